"""The objects that LLM Foundry's entry points name. Importing this module registers nothing."""

from foundry_moe.algorithms.dmoe import DMoE
from foundry_moe.algorithms.dmoe_mesh import MoEMesh, add_mesh_algorithm
from foundry_moe.algorithms.gate_steps import GateSteps, add_steps_algorithm
from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.callbacks.expert_load import ExpertLoad
from foundry_moe.callbacks.run_report import RunReport
from foundry_moe.models.attention import sdpa_attention
from foundry_moe.models.mpt import DMoECausalLM, init_moe_module
from foundry_moe.optim.decoupled import DecoupledAdamWFused
from foundry_moe.optim.muon import Muon

__all__ = [
    "DMoE",
    "DMoECausalLM",
    "DecoupledAdamWFused",
    "ElasticCheckpoint",
    "ExpertLoad",
    "GateSteps",
    "MoEMesh",
    "Muon",
    "RunReport",
    "add_mesh_algorithm",
    "add_steps_algorithm",
    "init_moe_module",
    "sdpa_attention",
]
