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
    "BatchContext": "foundry_moe.layers.context",
    "Progress": "foundry_moe.layers.schedule",
    "batch_context": "foundry_moe.layers.lookup",
    "moe_layers": "foundry_moe.layers.lookup",
    "note_loads": "foundry_moe.layers.lookup",
    "step_gates": "foundry_moe.layers.lookup",
    "parallelize": "foundry_moe.parallel.placement",
    "clip_norm": "foundry_moe.parallel.gradients",
    "Writer": "foundry_moe.checkpoint.dcp_writer",
    "Reader": "foundry_moe.checkpoint.dcp_reader",
    "apply_dmoe": "foundry_moe.models.conversion",
    # the following import Composer
    "DMoE": "foundry_moe.algorithms.dmoe",
    "DMoECausalLM": "foundry_moe.models.mpt",
    "ElasticCheckpoint": "foundry_moe.callbacks.elastic_checkpoint",
    "ExpertLoad": "foundry_moe.callbacks.expert_load",
}

__all__ = ["__version__", *_PUBLIC]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
