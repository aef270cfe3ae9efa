"""Dropless Mixture-of-Experts training for Composer and LLM Foundry.

Importing this package is fast and needs no GPU: public names are loaded at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers and editors read these; `X as X` marks a public name
    from foundry_moe.algorithms.dmoe import DMoE as DMoE
    from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint as ElasticCheckpoint
    from foundry_moe.callbacks.expert_load import ExpertLoad as ExpertLoad
    from foundry_moe.checkpoint.dcp_reader import Reader as Reader
    from foundry_moe.checkpoint.dcp_writer import Writer as Writer
    from foundry_moe.config import MeshConfig as MeshConfig
    from foundry_moe.config import MoEConfig as MoEConfig
    from foundry_moe.counts import flops_per_token as flops_per_token
    from foundry_moe.counts import num_active_params as num_active_params
    from foundry_moe.counts import num_params as num_params
    from foundry_moe.layers.context import BatchContext as BatchContext
    from foundry_moe.layers.lookup import batch_context as batch_context
    from foundry_moe.layers.lookup import moe_layers as moe_layers
    from foundry_moe.layers.lookup import step_gates_after as step_gates_after
    from foundry_moe.layers.moe import MoELayer as MoELayer
    from foundry_moe.layers.replay import record_choices as record_choices
    from foundry_moe.layers.replay import replay_choices as replay_choices
    from foundry_moe.layers.schedule import Progress as Progress
    from foundry_moe.models.conversion import apply_dmoe as apply_dmoe
    from foundry_moe.models.mpt import DMoECausalLM as DMoECausalLM
    from foundry_moe.optim.muon import Muon as Muon
    from foundry_moe.parallel.gradients import clip_grad_norm_ as clip_grad_norm_
    from foundry_moe.parallel.placement import parallelize as parallelize

__version__ = "0.1.0"

_PUBLIC = {
    "MoEConfig": "foundry_moe.config",
    "MeshConfig": "foundry_moe.config",
    "MoELayer": "foundry_moe.layers.moe",
    "BatchContext": "foundry_moe.layers.context",
    "Progress": "foundry_moe.layers.schedule",
    "batch_context": "foundry_moe.layers.lookup",
    "moe_layers": "foundry_moe.layers.lookup",
    "step_gates_after": "foundry_moe.layers.lookup",
    "record_choices": "foundry_moe.layers.replay",
    "replay_choices": "foundry_moe.layers.replay",
    "num_params": "foundry_moe.counts",
    "num_active_params": "foundry_moe.counts",
    "flops_per_token": "foundry_moe.counts",
    "parallelize": "foundry_moe.parallel.placement",
    "Muon": "foundry_moe.optim.muon",
    "clip_grad_norm_": "foundry_moe.parallel.gradients",
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


if not TYPE_CHECKING:  # with it, any name of the package would have the type Any

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return getattr(import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
