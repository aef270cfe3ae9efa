"""Gates, one file each; `registry` finds them by name, `keys` checks a user's keys. Both import no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foundry_moe.layers.gates.gate import Choices, Gate
    from foundry_moe.layers.gates.registry import build_gate, find_gate

__all__ = ["Choices", "Gate", "build_gate", "find_gate"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.{'gate' if name[0].isupper() else 'registry'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
