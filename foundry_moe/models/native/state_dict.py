"""Maps the tensors of a model with dMoE layers to those of a Hugging Face family. Nothing is read or written here.

A model of an MoE family is exported as that family. An upcycled dense model or an MPT is exported as the family that
computes the same function; if there is none, the error names the key that prevents it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from foundry_moe.models.blocks import Blocks, WeightPart, blocks_of, whole
from foundry_moe.models.families import FAMILIES, Family, family_of
from foundry_moe.models.native.architecture import Architecture
from foundry_moe.models.native.from_mpt import config_of_mpt, rename_mpt
from foundry_moe.models.native.targets import Target, check_targets, targets_of
from foundry_moe.schema import UserError, yaml_value

Shapes = Mapping[str, tuple[int, ...]]
_BLOCK = re.compile(r"(.*?\.(\d+)\..*)\.experts\.w1_EFD")
_TRAINING_ONLY = "gate.weight_noise_ED"
# keys of a configuration that hold for its folder or its training: exported weights are not quantized, custom code is
# not copied, and a trainer turns the cache off
_OF_THE_FILE = (
    *("model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path"),
    *("quantization_config", "auto_map", "use_cache"),
)
# A dense model_type -> the family with its attention, norms and rope, and values that its keys must have if present.
_DENSE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("mixtral", {"attention_bias": False, "mlp_bias": False, "rope_scaling": None, "hidden_act": "silu"}),
    "mistral": ("mixtral", {"rope_scaling": None}),
    "qwen2": ("qwen2_moe", {}),
    "qwen3": ("qwen3_moe", {"attention_bias": False}),
}
_CARRIED_OVER = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "initializer_range", "rms_norm_eps", "tie_word_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "rope_theta", "rope_scaling", "sliding_window"),
    *("use_sliding_window", "max_window_layers", "attention_dropout"),
)


@dataclass(frozen=True, kw_only=True)
class Native:
    """A model in a family's terms.

    config: of the family, for its `config.json`.
    blocks: what its MoE layers compute.
    rename: from one of our tensors outside MoE layers, and its shape, to the family's.
    """

    family: Family
    config: PretrainedConfig
    blocks: Blocks
    rename: Callable[[str, tuple[int, ...]], list[WeightPart]]

    def targets(self, shapes: Shapes) -> list[Target]:
        """All tensors of the family's state dict, from ours by name."""
        prefixes = {match[1]: int(match[2]) for name in shapes if (match := _BLOCK.fullmatch(name))}
        if sorted(prefixes.values()) != sorted(self.blocks.layers):
            raise UserError(
                f"the tensors have experts in layers {sorted(prefixes.values())}, but the model has them in "
                f"{sorted(self.blocks.layers)}"
            )
        tied = bool(getattr(self.config, "tie_word_embeddings", False))
        parts = [
            replace(part, ours=f"{prefix}.{part.ours}", theirs=f"{self.family.block_name(layer)}.{part.theirs}")
            for prefix, layer in prefixes.items()
            for part in self.family.parts(self.blocks)
        ]
        used: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            inside = name.startswith(tuple(f"{prefix}." for prefix in prefixes))
            if (tied and name == "lm_head.weight") or (inside and name.endswith(_TRAINING_ONLY)):
                continue  # files hold an embedding once
            used[name] = shape
            if not inside:
                parts += self.rename(name, shape)
        targets = targets_of(parts)
        check_targets(targets, used)
        return targets


def native_of(architecture: Architecture) -> Native:
    """The family that computes what this model does."""
    model_type, config = architecture.model_type, dict(architecture.config)
    if architecture.experts.lora is not None:
        raise UserError(
            f"lora ({architecture.experts.lora}): no Hugging Face model has adapters in its weights; use `foundry-moe "
            "export --merge` for the whole model or --adapter for a PEFT folder"
        )
    blocks = blocks_of(
        architecture.experts,
        d_model=int(config.get("d_model") or config.get("hidden_size") or 0),
        layers=architecture.layers,
        num_layers=architecture.num_layers,
    )
    if model_type == "mpt":
        family, keys = config_of_mpt(config, blocks)
        rename = rename_mpt(config)
    elif model_type in _DENSE:
        family, keys = _config_of_dense(config, blocks)
        rename = _same
    else:
        family, rename = family_of(model_type), _same
        came = {key: value for key, value in config.items() if key not in _OF_THE_FILE}
        keys = {**family.write(blocks), **came}  # the original configuration, and keys that servers read
    made = AutoConfig.for_model(family.model_type, **keys)
    made.architectures = [family.architecture]
    return Native(family=family, config=made, blocks=blocks, rename=rename)


def _config_of_dense(config: Mapping[str, Any], blocks: Blocks) -> tuple[Family, dict[str, Any]]:
    """The family that an upcycled dense model is exported as, and the keys of its configuration."""
    model_type = str(config["model_type"])
    family_type, wanted = _DENSE[model_type]
    family = FAMILIES[family_type]
    for key, value in wanted.items():
        if key in config and config[key] != value:
            raise UserError(
                f"{key} ({config[key]}) of this {model_type} model is not one that {family.name} has; "
                f"use {yaml_value(value)}"
            )
    carried = {key: config[key] for key in _CARRIED_OVER if key in config}
    if model_type != "llama" and "intermediate_size" in config:
        carried["intermediate_size"] = config["intermediate_size"]  # of the layers that stay dense
    return family, {**carried, **family.write(blocks)}


def _same(name: str, shape: tuple[int, ...]) -> list[WeightPart]:
    return [whole(name, name, *shape)]
