"""Gates: one file each; `factory` finds them by name."""

from foundry_moe.layers.gates.factory import build_gate, find_gate
from foundry_moe.layers.gates.gate import Choices, Gate

__all__ = ["Choices", "Gate", "build_gate", "find_gate"]
