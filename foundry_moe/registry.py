"""The objects that LLM Foundry's entry points name. Importing this module registers nothing."""

from typing import Any

import catalogue

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


def _group_entry_points() -> None:
    """Has LLM Foundry's registries look entry points up by group, in place of a search through those of all packages.

    Models of 48 layers are initialised with 8,600 look-ups. `catalogue` takes a dictionary, too, since the entry points
    of old Pythons are one.
    """
    found: Any = catalogue.AVAILABLE_ENTRY_POINTS
    if hasattr(found, "select"):
        catalogue.AVAILABLE_ENTRY_POINTS = {group: tuple(found.select(group=group)) for group in found.groups}


_group_entry_points()
