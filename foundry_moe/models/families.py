"""Families of Hugging Face MoE models that can be loaded and exported: a table that is read in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from foundry_moe.config import ACTIVATIONS
from foundry_moe.models.blocks import (
    Blocks,
    Place,
    WeightPart,
    each_expert,
    gate_above_up,
    gate_keys,
    of_experts,
    shared_expert,
    side_by_side,
    whole,
)
from foundry_moe.schema import UserError, yaml_value

# by name in transformers' ACT2FN
_GATED = {theirs: ours for ours, activation in ACTIVATIONS.items() for theirs in activation.hugging_face}
# what most families call the fields of `Blocks`
_KEYS = {
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "top_k": "num_experts_per_tok",
    "activation": "hidden_act",
}
# the k largest probabilities of a softmax, without a shared expert: blocks of most families
_FIXED = {
    "gate.score": "softmax",
    "gate.scale": 1.0,
    "gate.bias_balance": False,
    "gate.groups": 1,
    "shared_expert_hidden_size": 0,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of Hugging Face models.

    name: for messages.
    model_type, architecture: as in its `config.json`.
    block: name of a layer's FFN in the model's state dict.
    keys: keys of its configuration by fields of `Blocks`, `gate.x` for key x of the gate, beside those of most
        families; a dot in a value leads into a part of the configuration.
    fixed: values, by such names, that all its blocks have, beside those of most families.
    jitter: its key for the gate's jitter in training, which is read and not written.
    gate_output: see `Blocks`.
    gate: name of the gate's matrix in a block.
    experts: where the matrices of a block's experts are.
    beside: the other parts of a block.
    """

    name: str
    model_type: str
    architecture: str
    block: str = "model.layers.{layer}.mlp"
    keys: dict[str, str]
    fixed: dict[str, Any] = field(default_factory=dict)
    jitter: str = ""
    gate_output: Literal["logits", "probabilities", "none"] = "logits"
    gate: str = "gate.weight"
    experts: Place = each_expert
    beside: Callable[[Blocks], list[WeightPart]] = lambda blocks: []

    def read(self, config: Any) -> Blocks:
        """Its sparse blocks, from a `PretrainedConfig`."""
        found = {key: self.to_ours(key, _get(config, name)) for key, name in (_KEYS | self.keys).items()}
        found |= self.fixed
        gate = {key.removeprefix("gate."): found.pop(key) for key in list(found) if key.startswith("gate.")}
        if self.jitter and (jitter := _get(config, self.jitter)):
            gate["jitter"] = jitter
        layers = self.sparse_layers(config, found["num_layers"])
        return Blocks(**found, gate={"name": "topk", **gate}, layers=layers, gate_output=self.gate_output)

    def write(self, blocks: Blocks) -> dict[str, Any]:
        """Keys of its configuration for sparse blocks such as these: the reverse of `read`, for `Config(**keys)`."""
        found = blocks.settings() | {"d_model": blocks.d_model, "num_layers": blocks.num_layers}
        found |= {f"gate.{key}": value for key, value in gate_keys(blocks).items()}
        fixed = {key: value for key, value in _FIXED.items() if key not in self.keys} | self.fixed
        for key, value in fixed.items():
            if found[key] != value:
                raise UserError(
                    f"{key} ({yaml_value(found[key])}): {self.name} has no such blocks; use {yaml_value(value)}"
                )
        written = self.write_layers(blocks)
        for key, name in (_KEYS | self.keys).items():
            *parts, last = name.split(".")
            inner = written
            for part in parts:
                inner = inner.setdefault(part, {})
            inner[last] = self.to_theirs(key, found[key])
        return written

    def parts(self, blocks: Blocks) -> list[WeightPart]:
        """All tensors of one sparse block, each element of ours and of theirs in exactly one part."""
        gate = whole("gate.weight_ED", self.gate, blocks.num_experts, blocks.d_model)
        return [gate, *of_experts(blocks, self.experts), *self.beside(blocks)]

    def block_name(self, layer: int) -> str:
        """The name of a layer's FFN in the model's state dict, for example `model.layers.3.mlp`."""
        return self.block.format(layer=layer)

    def to_ours(self, key: str, value: Any) -> Any:
        """A value of its configuration as that of our key."""
        if key == "activation":
            if value not in _GATED:
                raise UserError(f"{self.name}: hidden_act ({value}) is not one of {', '.join(_GATED)}")
            return _GATED[value]
        return {"gate.normalize": bool, "gate.scale": float}.get(key, lambda value: value)(value)

    def to_theirs(self, key: str, value: Any) -> Any:
        """The reverse of `to_ours`."""
        if key != "activation":
            return value
        if not ACTIVATIONS[value].gated:
            raise UserError(
                f"activation ({value}): experts of {self.name} are GLUs; use swiglu, geglu, geglu_tanh or reglu"
            )
        return ACTIVATIONS[value].hugging_face[0]

    def sparse_layers(self, config: Any, num_layers: int) -> tuple[int, ...]:
        """Indices of its sparse layers."""
        return tuple(range(num_layers))

    def write_layers(self, blocks: Blocks) -> dict[str, Any]:
        """Keys of its configuration for the indices of sparse layers."""
        dense = sorted(set(range(blocks.num_layers)) - set(blocks.layers))
        if dense:
            raise UserError(f"layers: {dense} are dense, and {self.name} has no dense layers; use layers: all")
        return {}


def _get(config: Any, name: str) -> Any:
    for part in name.split("."):
        if isinstance(config, Mapping) and part not in config:
            raise UserError(f"{name} is missing in the model's configuration")
        config = config[part] if isinstance(config, Mapping) else getattr(config, part)
    return config


class _Qwen(Family):
    """Some layers may be dense."""

    def sparse_layers(self, config: Any, num_layers: int) -> tuple[int, ...]:
        step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
        layers = range(num_layers) if config.num_experts > 0 else ()
        return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)

    def write_layers(self, blocks: Blocks) -> dict[str, Any]:
        dense = sorted(set(range(blocks.num_layers)) - set(blocks.layers))
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


class _DeepSeek(Family):
    """Sigmoid scores, a bias for the choice, groups, shared experts of one width, first layers dense.

    Attention stays Hugging Face's. Outside a token's groups an expert counts as minus infinity, as in DeepSeek's own
    `inference/model.py`, in vLLM and in transformers 5; transformers 4.51 counts it as 0, and chooses it where a biased
    score inside the groups is below 0. One number added to all biases of a layer changes no choice of the former, and
    with biases that are all 0 or more the latter chooses the same.
    """

    # Keys of DeepSeek's own configuration that transformers does not read. Without them vLLM (`models/deepseek_v2.py`)
    # assumes a softmax gate without biases; SGLang reads the method too.
    FOR_SERVERS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}

    def read(self, config: Any) -> Blocks:
        limited = config.topk_group < config.n_group
        if limited and config.n_routed_experts < 2 * config.n_group:
            raise UserError(f"{self.name}: n_group ({config.n_group}) leaves groups of fewer than two experts")
        if not config.n_shared_experts:
            raise UserError(f"{self.name}: n_shared_experts ({config.n_shared_experts}) must be 1 or more")
        blocks = super().read(config)
        width = blocks.expert_hidden_size * blocks.shared_expert_hidden_size  # this many shared experts, side by side
        return replace(blocks, shared_expert_hidden_size=width)

    def write(self, blocks: Blocks) -> dict[str, Any]:
        written, width = super().write(blocks), blocks.expert_hidden_size
        shared, rest = divmod(blocks.shared_expert_hidden_size, width)
        if rest or not shared:
            raise UserError(
                f"shared_expert_hidden_size ({blocks.shared_expert_hidden_size}) must be a multiple of "
                f"expert_hidden_size ({width}) in {self.name}; use {max(shared, 1) * width}"
            )
        written["topk_group"] = written["topk_group"] or written["n_group"]
        return {**written, "n_shared_experts": shared, **self.FOR_SERVERS}

    def sparse_layers(self, config: Any, num_layers: int) -> tuple[int, ...]:
        return tuple(range(config.first_k_dense_replace, num_layers))

    def write_layers(self, blocks: Blocks) -> dict[str, Any]:
        first = min(blocks.layers)
        if blocks.layers != tuple(range(first, blocks.num_layers)):
            raise UserError(
                f"layers ({list(blocks.layers)}): in {self.name} the first layers are dense and all others sparse; "
                f"use {list(range(first, blocks.num_layers))}"
            )
        return {"first_k_dense_replace": first}


def _beside_deepseek(blocks: Blocks) -> list[WeightPart]:
    bias = whole("gate.bias_E", "gate.e_score_correction_bias", blocks.num_experts, fp32=True)
    return [bias, *shared_expert(blocks, "shared_experts")]


def _beside_qwen2(blocks: Blocks) -> list[WeightPart]:
    gate = whole("shared_expert.gate.weight", "shared_expert_gate.weight", 1, blocks.d_model)
    return [*shared_expert(blocks, "shared_expert"), gate]


class _DBRX(Family):
    """The norm of a token's weights, by which they are divided, is in its configuration; None = not divided."""

    def to_ours(self, key: str, value: Any) -> Any:
        if key == "gate.normalize" and value not in (None, 1, 1.0):
            raise UserError(
                f"{self.name}: ffn_config.moe_normalize_expert_weights ({value}) divides by another norm than the sum; "
                "1 or null can be taken over"
            )
        return value is not None if key == "gate.normalize" else super().to_ours(key, value)

    def to_theirs(self, key: str, value: Any) -> Any:
        if key == "gate.normalize":
            return 1.0 if value else None
        return super().to_theirs(key, value)


_QWEN_KEYS = {
    "num_experts": "num_experts",
    "expert_hidden_size": "moe_intermediate_size",
    "gate.normalize": "norm_topk_prob",
}
_LOCAL = {"num_experts": "num_local_experts", "expert_hidden_size": "intermediate_size"}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        # Jiang et al. 2024. Hugging Face's jitter multiplies the experts' input too, ours only the gate's
        Family(
            name="Mixtral",
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            block="model.layers.{layer}.block_sparse_moe",
            keys=_LOCAL,
            fixed={"gate.normalize": True},
            jitter="router_jitter_noise",
            experts=partial(each_expert, names={"w1": "w1", "v1": "w3", "w2": "w2"}),
        ),
        # Muennighoff et al. 2024
        Family(
            name="OLMoE",
            model_type="olmoe",
            architecture="OlmoeForCausalLM",
            keys={**_QWEN_KEYS, "expert_hidden_size": "intermediate_size"},
        ),
        # Qwen 2025
        _Qwen(name="Qwen3-MoE", model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", keys=_QWEN_KEYS),
        # Qwen 2024: a shared expert times sigmoid(x w)
        _Qwen(
            name="Qwen2-MoE",
            model_type="qwen2_moe",
            architecture="Qwen2MoeForCausalLM",
            keys={**_QWEN_KEYS, "shared_expert_hidden_size": "shared_expert_intermediate_size"},
            fixed={"shared_expert_gate": True},
            beside=_beside_qwen2,
        ),
        # DeepSeek-AI 2024
        _DeepSeek(
            name="DeepSeek-V3",
            model_type="deepseek_v3",
            architecture="DeepseekV3ForCausalLM",
            keys={
                **_QWEN_KEYS,
                "num_experts": "n_routed_experts",
                "gate.scale": "routed_scaling_factor",
                "gate.groups": "n_group",
                "gate.group_limit": "topk_group",
                "shared_expert_hidden_size": "n_shared_experts",
            },
            fixed={"gate.score": "sigmoid", "gate.bias_balance": True, "shared_expert_gate": False},
            gate_output="none",
            beside=_beside_deepseek,
        ),
        # Databricks 2024
        _DBRX(
            name="DBRX",
            model_type="dbrx",
            architecture="DbrxForCausalLM",
            block="transformer.blocks.{layer}.ffn",
            keys={
                "d_model": "d_model",
                "num_layers": "n_layers",
                "num_experts": "ffn_config.moe_num_experts",
                "top_k": "ffn_config.moe_top_k",
                "expert_hidden_size": "ffn_config.ffn_hidden_size",
                "activation": "ffn_config.ffn_act_fn.name",
                "gate.normalize": "ffn_config.moe_normalize_expert_weights",
            },
            jitter="ffn_config.moe_jitter_eps",
            gate_output="probabilities",
            gate="router.layer.weight",
            experts=side_by_side,
        ),
        # IBM 2024. Its softmax of the chosen logits is the softmax of all, the chosen divided by their sum
        Family(
            name="Granite-MoE",
            model_type="granitemoe",
            architecture="GraniteMoeForCausalLM",
            block="model.layers.{layer}.block_sparse_moe",
            keys=_LOCAL,
            fixed={"gate.normalize": True},
            gate="router.layer.weight",
            experts=gate_above_up,
        ),
    )
}


def names_of(key: str) -> tuple[str, ...]:
    """What families call a field of `Blocks`, without the part of the configuration that it is in."""
    return tuple(dict.fromkeys((_KEYS | family.keys)[key].rpartition(".")[2] for family in FAMILIES.values()))


def family_of(model_type: str) -> Family:
    """The family of a Hugging Face `model_type`."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    known = ", ".join(family.name for family in FAMILIES.values())
    raise UserError(f"model_type ({model_type}) cannot be taken over or exported; these families can: {known}")
