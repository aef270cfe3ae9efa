"""Gates by name: finds and builds them, and checks a user's `gate` and `loss` before anything is built.

Imports no torch: `foundry-moe check` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from foundry_moe.layers.gates.keys import BUILT_IN, GateKeys, LinearKeys, TopKKeys
from foundry_moe.schema import UserError, caught, from_mapping, nearest, raise_mistakes

if TYPE_CHECKING:
    import torch

    from foundry_moe.layers.gates.gate import Gate

# entry points for gates of other packages
GROUP = "foundry_moe_gates"


def _declaration(name: str) -> Any:
    """The class that names a gate's losses: the keys of a built-in gate, else the gate itself."""
    # up to version 0.1 this package registered its own gates in this group; an old installation must not shadow them
    others = _installed(tuple(sys.path))
    if name not in others and name not in BUILT_IN:
        _installed.cache_clear()  # a package may have been installed since
        others = _installed(tuple(sys.path))
    if name in others:
        return others[name].load()
    if name in BUILT_IN:
        return BUILT_IN[name][1]
    raise UserError(f"gate.name: there is no gate {name!r}; {nearest(name, {*others, *BUILT_IN})}")


@cache
def _installed(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Gates of other packages on this `sys.path`. Reading all metadata takes 50 ms, and each layer asks thrice."""
    return {e.name: e for e in entry_points(group=GROUP) if not e.value.startswith("foundry_moe.")}


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
    name, keys = settings["name"], read_keys(settings)
    cls = _declaration(name)
    if issubclass(cls, GateKeys):
        cls = getattr(import_module(f"foundry_moe.layers.gates.{name}"), BUILT_IN[name][0])
    return cls(keys, d_model=d_model, num_experts=num_experts, top_k=top_k, device=device, dtype=dtype)


def check_gate(
    settings: Mapping[str, Any],
    losses: Mapping[str, float] | str,
    *,
    num_experts: int,
    top_k: int,
    from_family: bool = False,
) -> None:
    """Raises ValueError if `build_gate` or `resolve_losses` would, before anything is built.

    Args:
        from_family: the model may be one whose family adds keys of the gate.
    """
    raise_mistakes([*caught(resolve_losses, settings, losses), *caught(read_keys, settings)])
    names, keys = resolve_losses(settings, losses), read_keys(settings)
    cls = _declaration(settings["name"])
    if issubclass(cls, GateKeys):
        keys.check(num_experts, top_k)
        keys.check_losses(names, num_experts, top_k)
        if isinstance(keys, TopKKeys) and not from_family:
            keys.check_bias()
    else:
        cls(keys, d_model=1, num_experts=num_experts, top_k=top_k, device="meta").check_losses(names)


def read_keys(settings: Mapping[str, Any]) -> Any:
    """A gate's keys, as its class reads them; raises ValueError as `build_gate` does."""
    cls = _declaration(settings["name"])
    keys = {key: value for key, value in settings.items() if key != "name"}
    return from_mapping(cls if issubclass(cls, GateKeys) else cls.Config, keys, "gate")


def check_freeze(settings: Mapping[str, Any], freeze: Collection[str]) -> None:
    """Raises ValueError if `freeze` names the gate and the gate has no weights."""
    name = settings["name"]
    if "gate" in freeze and name in BUILT_IN and not issubclass(BUILT_IN[name][1], LinearKeys):
        raise no_gate(name)


def no_gate(name: str) -> UserError:
    """The error for `freeze: [gate]` and a gate without weights."""
    return UserError(f"freeze (gate): gate {name} has no weights to freeze; remove gate from freeze")


def resolve_losses(settings: Mapping[str, Any], losses: Mapping[str, float] | str) -> dict[str, float]:
    """The weights of a gate's auxiliary losses, those of weight zero left out; `auto` = the gate's defaults.

    Raises:
        ValueError: see `build_gate`; or a loss that this gate does not have.
    """
    cls = _declaration(settings["name"])
    if isinstance(losses, str):
        return dict(cls.DEFAULT_LOSSES)
    for name, weight in losses.items():
        if name not in cls.LOSSES and weight:
            known = nearest(name, cls.LOSSES) if cls.LOSSES else "it has none: write loss: {}"
            raise UserError(f"loss.{name}: gate {settings['name']} has no such loss; {known}")
    return {name: float(weight) for name, weight in losses.items() if weight}
