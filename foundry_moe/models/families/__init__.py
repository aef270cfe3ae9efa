"""Families of Hugging Face MoE models that can be loaded and exported: one file each."""

from __future__ import annotations

from foundry_moe.models.families.dbrx import DBRX
from foundry_moe.models.families.deepseek_v3 import DeepSeekV3
from foundry_moe.models.families.family import Blocks, Family, WeightPart, blocks_of
from foundry_moe.models.families.granite_moe import GraniteMoE
from foundry_moe.models.families.mixtral import Mixtral
from foundry_moe.models.families.olmoe import OLMoE
from foundry_moe.models.families.qwen2_moe import Qwen2MoE
from foundry_moe.models.families.qwen3_moe import Qwen3MoE

__all__ = ["FAMILIES", "Blocks", "Family", "WeightPart", "blocks_of", "family_of"]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (Mixtral(), OLMoE(), Qwen3MoE(), Qwen2MoE(), DeepSeekV3(), DBRX(), GraniteMoE())
}

# model_type of other MoE models -> why they are not supported
_OTHERS = {
    "granitemoeshared": "its shared expert stands beside the block, which has not been tried",
    "jamba": "its MoE layers stand between Mamba layers, which has not been tried",
    "jetmoe": "its attention has experts too, with biases",
    "llama4": "a router's weight multiplies the expert's input, not its output",
    "llama4_text": "a router's weight multiplies the expert's input, not its output",
    "nllb-moe": "it is an encoder-decoder model that drops tokens",
    "phimoe": "its router is SparseMixer's, which no gate of ours computes",
    "switch_transformers": "it is an encoder-decoder model that drops tokens",
}


def family_of(model_type: str) -> Family:
    """The family of a Hugging Face `model_type`.

    Raises:
        ValueError: another model; with the reason if it is known.
    """
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    known = ", ".join(family.name for family in FAMILIES.values())
    reason = f": {_OTHERS[model_type]}" if model_type in _OTHERS else " is no family of MoE models that is known"
    raise ValueError(f"model_type ({model_type}){reason}; these can be taken over and exported: {known}")
