"""Finds gates by name, ours and those of other packages, through the entry-point group `foundry_moe_gates`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch

from foundry_moe.config import from_mapping, nearest
from foundry_moe.layers.gates.base import Gate, LinearGate

GROUP = "foundry_moe_gates"

# Known without an installed distribution, so that a checkout on PYTHONPATH works; an entry point of the same name wins.
_BUILT_IN = {
    "topk": "foundry_moe.layers.gates.topk:TopKGate",
}


def find_gate(name: str) -> type[Gate]:
    """The gate class of this name.

    Raises:
        ValueError: no such gate; the nearest name is given.
    """
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in installed:
        return installed[name].load()
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)
    raise ValueError(f"gate.name: there is no gate {name!r}; {nearest(name, {*installed, *_BUILT_IN})}")


def build_gate(
    settings: Mapping[str, Any],
    *,
    d_model: int,
    num_experts: int,
    top_k: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Gate:
    """A gate from the user's `gate` mapping, weights not yet drawn.

    Raises:
        ValueError: unknown gate, unknown key, or a value that the gate refuses.
    """
    cls = find_gate(settings["name"])
    config = from_mapping(cls.Config, {k: v for k, v in settings.items() if k != "name"}, "gate")
    if issubclass(cls, LinearGate):
        return cls(config, d_model=d_model, num_experts=num_experts, top_k=top_k, device=device, dtype=dtype)
    return cls(config, num_experts=num_experts, top_k=top_k)


def check_gate(settings: Mapping[str, Any], losses: Mapping[str, float]) -> None:
    """Checks a gate's keys and that it has the losses asked for, without building it.

    Raises:
        ValueError: see `build_gate`; or a loss that this gate does not have.
    """
    cls = find_gate(settings["name"])
    from_mapping(cls.Config, {k: v for k, v in settings.items() if k != "name"}, "gate")
    for name, weight in losses.items():
        if name not in cls.LOSSES and weight:
            raise ValueError(
                f"loss.{name}: gate {settings['name']} has no such loss; {nearest(name, cls.LOSSES)}"
            )
