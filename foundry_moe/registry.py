"""The objects that LLM Foundry's entry points name. Importing this module registers nothing."""

from foundry_moe.algorithms.dmoe import DMoE
from foundry_moe.algorithms.dmoe_mesh import MoEMesh, add_mesh_algorithm
from foundry_moe.algorithms.gate_steps import GateSteps, add_steps_algorithm
from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.callbacks.expert_load import ExpertLoad
from foundry_moe.callbacks.nonfinite_guard import NonfiniteGuard
from foundry_moe.callbacks.run_report import RunReport
from foundry_moe.models.attention import sdpa_attention
from foundry_moe.models.mpt import DMoECausalLM, build_dmoe_ffn, init_moe_module
from foundry_moe.optim import DecoupledAdamWFused

RouterSteps = GateSteps  # named by entry points of environments that were installed before the rename

__all__ = [
    "DMoE",
    "DMoECausalLM",
    "DecoupledAdamWFused",
    "ElasticCheckpoint",
    "ExpertLoad",
    "GateSteps",
    "MoEMesh",
    "NonfiniteGuard",
    "RunReport",
    "add_mesh_algorithm",
    "add_steps_algorithm",
    "build_dmoe_ffn",
    "init_moe_module",
    "sdpa_attention",
]
