"""Gates: one file each; `factory` finds them by name, `rules` and `keys` check what a user wrote, without torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foundry_moe.layers.gates.factory import build_gate, find_gate
    from foundry_moe.layers.gates.gate import Choices, Gate

__all__ = ["Choices", "Gate", "build_gate", "find_gate"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.{'gate' if name[0].isupper() else 'factory'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
