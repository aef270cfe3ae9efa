"""Dropless Mixture-of-Experts training for Composer and LLM Foundry.

Importing this package is fast and needs no GPU: public names are loaded at their first use.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "MoEConfig": "foundry_moe.config",
    "MeshConfig": "foundry_moe.config",
    "MoELayer": "foundry_moe.layers.moe",
    "apply_dmoe": "foundry_moe.models.conversion",
    "DMoE": "foundry_moe.algorithms.dmoe",
    "DMoECausalLM": "foundry_moe.models.mpt",
    "ExpertLoad": "foundry_moe.callbacks.expert_load",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
