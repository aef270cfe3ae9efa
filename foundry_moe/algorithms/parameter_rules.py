"""`optimizer.disable_grad` and `optimizer.param_groups` for a model whose experts are added later.

LLM Foundry applies both when it builds the optimizer, before `algorithms.dmoe` adds the experts. This module applies
them again, with LLM Foundry's semantics, to the model with experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from foundry_moe.schema import UserError, nearest

KEYS = ("disable_grad", "param_groups")


def rules_of(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """The patterns of a run's optimizer by key; empty without a rule."""
    optimizer = config.get("optimizer") or {}
    frozen = optimizer.get("disable_grad") or []
    found = {
        "disable_grad": [frozen] if isinstance(frozen, str) else list(frozen),
        "param_groups": [group["param_str_match"] for group in optimizer.get("param_groups") or ()],
    }
    return {key: patterns for key, patterns in found.items() if patterns}


def check_rules(model: nn.Module, rules: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError for a rule that matches no parameter; names the nearest parts of names."""
    names = [name for name, _ in model.named_parameters()]
    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    for key in KEYS:
        for pattern in rules.get(key, ()):
            if not any(re.search(pattern, name) for name in names):
                raise UserError(f"optimizer.{key} ({pattern}) matches no parameter; {nearest(pattern, parts)}")


def apply_rules(model: nn.Module, optimizers: Iterable[Optimizer], rules: Mapping[str, Sequence[str]]) -> None:
    """Freezes the parameters that `disable_grad` matches, and moves parameters into the groups of `param_groups`.

    A parameter belongs to the first rule that matches its name, and to the optimizer's first group if none does.

    Raises:
        ValueError: a rule matches nothing.
    """
    check_rules(model, rules)
    for name, parameter in model.named_parameters():
        if any(re.search(pattern, name) for pattern in rules.get("disable_grad", ())):
            parameter.requires_grad = False
    patterns = rules.get("param_groups", ())
    for optimizer in optimizers:
        if not patterns or len(optimizer.param_groups) != len(patterns) + 1:
            continue
        groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for name, parameter in model.named_parameters():
            index = next((i for i, pattern in enumerate(patterns, 1) if re.search(pattern, name)), 0)
            groups[index].append(parameter)
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
