"""Dense Hugging Face models that were given experts, and the MoE families that have their attention, norms and rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foundry_moe.models.families import FAMILIES, Blocks, Family

# a dense model's type -> the family's, and keys whose value must be this (a key that is not there does not count)
_FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("mixtral", {"attention_bias": False, "mlp_bias": False, "rope_scaling": None, "hidden_act": "silu"}),
    "mistral": ("mixtral", {"rope_scaling": None}),
    "qwen2": ("qwen2_moe", {}),
    "qwen3": ("qwen3_moe", {"attention_bias": False}),
}
_CARRIED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "tie_word_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "rope_theta", "rope_scaling", "sliding_window"),
    *("use_sliding_window", "max_window_layers", "attention_dropout"),
)


def is_dense(model_type: str) -> bool:
    """Whether a model of this type is dense by itself, and leaves as a family once it has experts."""
    return model_type in _FAMILIES


def config_of_dense(config: Mapping[str, Any], blocks: Blocks) -> tuple[Family, dict[str, Any]]:
    """The family, and the keys of its configuration.

    Raises:
        ValueError: the family does not compute what this model does; names the key and the value that would do.
    """
    model_type = str(config["model_type"])
    family_type, wanted = _FAMILIES[model_type]
    family = FAMILIES[family_type]
    for key, value in wanted.items():
        if key in config and config[key] != value:
            shown = "null" if value is None else str(value).lower()
            raise ValueError(
                f"{key} ({config[key]}) of this {model_type} model is not one that {family.name} has; {shown} would do"
            )
    carried = {key: config[key] for key in _CARRIED if key in config}
    if model_type != "llama" and "intermediate_size" in config:
        carried["intermediate_size"] = config["intermediate_size"]  # of the layers that stay dense
    return family, {**carried, **family.write(blocks)}
