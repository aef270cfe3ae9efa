"""Valid values of an optimizer's settings. Imports neither torch nor Composer: a run's YAML is checked before both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from foundry_moe.schema import fits

_LEAST = {"lr": 0, "adamw_lr": 0, "eps": 0, "weight_decay": 0, "ns_steps": 1}
_DTYPES = ("bfloat16", "float32", "float64")


def value_mistakes(settings: Mapping[str, Any], where: str) -> Iterator[str]:
    """A sentence for each invalid value of Muon's settings, or of one parameter group; absent keys are valid."""
    given = {key: value for key, value in settings.items() if key != "adamw_lr" or value is not None}
    for key, least in _LEAST.items():
        value: Any = given.get(key, least)
        if not (fits(value, int if key == "ns_steps" else float) and value >= least):
            yield f"{where}.{key} ({value!r}) must be {least} or more"
    betas, momentum, dtype = given.get("betas"), given.get("momentum", 0), given.get("dtype", _DTYPES[0])
    if betas is not None and not (fits(betas, list[float]) and len(betas) == 2 and all(0 <= b < 1 for b in betas)):
        yield f"{where}.betas ({betas!r}) must be two numbers from 0 to below 1, such as [0.9, 0.95]"
    if not (fits(momentum, float) and 0 <= momentum < 1):
        yield f"{where}.momentum ({momentum!r}) must be 0 or more and below 1"
    if dtype not in _DTYPES:
        yield f"{where}.dtype ({dtype}) must be bfloat16, float32 or float64"
    if given.get("lr") == 0 and given.get("adamw_lr"):
        yield (
            f"{where}.lr (0) with adamw_lr ({given['adamw_lr']}): schedules multiply both by lr / initial lr, so lr "
            "must be above 0; to freeze hidden matrices use disable_grad"
        )
