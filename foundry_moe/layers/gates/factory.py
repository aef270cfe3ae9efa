"""Finds gates by name, ours and those of other packages, and builds them from the user's keys."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from foundry_moe.layers.gates.gate import Gate
from foundry_moe.layers.gates.rules import gates_of_others, no_such_gate
from foundry_moe.schema import from_mapping

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
    installed = gates_of_others()
    if name in installed:
        return installed[name].load()
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)
    raise no_such_gate(name)


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
