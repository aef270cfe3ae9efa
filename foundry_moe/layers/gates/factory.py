"""Finds gates by name, ours and those of other packages, and builds them from the user's keys."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch

from foundry_moe.config import from_mapping, nearest
from foundry_moe.layers.gates.gate import Gate

# of entry points, for gates of other packages; one of the name of a gate of ours wins
GROUP = "foundry_moe_gates"

_BUILT_IN = {
    "base": "foundry_moe.layers.gates.base:BaseGate",
    "dense_to_sparse": "foundry_moe.layers.gates.dense_to_sparse:DenseToSparseGate",
    "expert_choice": "foundry_moe.layers.gates.expert_choice:ExpertChoiceGate",
    "gshard": "foundry_moe.layers.gates.gshard:GShardGate",
    "hash": "foundry_moe.layers.gates.hash:HashGate",
    "hierarchical": "foundry_moe.layers.gates.hierarchical:HierarchicalGate",
    "ktop1": "foundry_moe.layers.gates.ktop1:KTop1Gate",
    "switch": "foundry_moe.layers.gates.switch:SwitchGate",
    "topk": "foundry_moe.layers.gates.topk:TopKGate",
}


def find_gate(name: str) -> type[Gate]:
    """The gate class of this name.

    Raises:
        ValueError: no such gate; the nearest name is given.
    """
    # up to version 0.1 this package listed its own gates there too: an old installation must not shadow these
    installed = {e.name: e for e in entry_points(group=GROUP) if not e.value.startswith("foundry_moe.")}
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
    return cls(config, d_model=d_model, num_experts=num_experts, top_k=top_k, device=device, dtype=dtype)


def check_gate(settings: Mapping[str, Any], losses: Mapping[str, float] | str, *, num_experts: int, top_k: int) -> None:
    """Checks a gate's keys and losses, and that they go with these numbers, before anything is built.

    Raises:
        ValueError: see `build_gate` and `resolve_losses`.
    """
    names = resolve_losses(settings, losses)
    build_gate(settings, d_model=1, num_experts=num_experts, top_k=top_k, device="meta").check_losses(names)


def resolve_losses(settings: Mapping[str, Any], losses: Mapping[str, float] | str) -> dict[str, float]:
    """The weights of a gate's auxiliary losses, those of weight zero left out; `auto` is what the gate wants.

    Raises:
        ValueError: see `build_gate`; or a loss that this gate does not have.
    """
    cls = find_gate(settings["name"])
    if isinstance(losses, str):
        return dict(cls.DEFAULT_LOSSES)
    for name, weight in losses.items():
        if name not in cls.LOSSES and weight:
            known = nearest(name, cls.LOSSES) if cls.LOSSES else "it has none: write loss: {}"
            raise ValueError(f"loss.{name}: gate {settings['name']} has no such loss; {known}")
    return {name: float(weight) for name, weight in losses.items() if weight}
