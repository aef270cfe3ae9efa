"""Gates: one file each, found by name through the entry-point group `foundry_moe_gates`."""

from foundry_moe.layers.gates.base import Choices, Gate
from foundry_moe.layers.gates.registry import build_gate, find_gate

__all__ = ["Choices", "Gate", "build_gate", "find_gate"]
