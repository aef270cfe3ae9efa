"""The objects that LLM Foundry's entry points name. Importing this module registers nothing."""
# ruff: noqa: F401

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

# Registries look entry points up by group, in place of a search through those of all packages: models of 48 layers are
# initialised with 8,600 look-ups. `catalogue` takes a dictionary, too: the entry points of old Pythons are one.
_found: Any = catalogue.AVAILABLE_ENTRY_POINTS
if hasattr(_found, "select"):  # not replaced yet
    catalogue.AVAILABLE_ENTRY_POINTS = {group: tuple(_found.select(group=group)) for group in _found.groups}
