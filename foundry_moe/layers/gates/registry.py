"""Gates by name: finds and builds them, and checks a user's `gate` and `loss` before anything is built.

Imports no torch: `foundry-moe check` answers at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from foundry_moe.layers.gates.keys import BUILT_IN, KEYS, LinearKeys
from foundry_moe.schema import caught, from_mapping, nearest, raise_mistakes

if TYPE_CHECKING:
    import torch

    from foundry_moe.layers.gates.gate import Gate

# entry points for gates of other packages
GROUP = "foundry_moe_gates"


def gates_of_others() -> dict[str, EntryPoint]:
    """Gates of other packages, by name."""
    # up to version 0.1 this package registered its own gates in this group; an old installation must not shadow them
    return {e.name: e for e in entry_points(group=GROUP) if not e.value.startswith("foundry_moe.")}


def no_such_gate(name: str) -> ValueError:
    """The error for an unknown gate; names the nearest."""
    return ValueError(f"gate.name: there is no gate {name!r}; {nearest(name, {*gates_of_others(), *KEYS})}")


def find_gate(name: str) -> type[Gate]:
    """The gate class of this name.

    Raises:
        ValueError: no such gate; the nearest name is given.
    """
    installed = gates_of_others()
    if name in installed:
        return installed[name].load()
    if name in BUILT_IN:
        return getattr(import_module(f"foundry_moe.layers.gates.{name}"), BUILT_IN[name][0])
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


def check_gate(settings: Mapping[str, Any], losses: Mapping[str, float] | str, *, num_experts: int, top_k: int) -> None:
    """Checks a gate's keys and losses against the numbers of experts and choices, before anything is built.

    Raises:
        ValueError: see `build_gate` and `resolve_losses`.
    """
    raise_mistakes([*caught(resolve_losses, settings, losses), *caught(read_keys, settings)])
    names, keys = resolve_losses(settings, losses), read_keys(settings)
    others = gates_of_others()
    if settings["name"] in others:
        cls = others[settings["name"]].load()
        cls(keys, d_model=1, num_experts=num_experts, top_k=top_k, device="meta").check_losses(names)
        return
    keys.check(num_experts, top_k)
    keys.check_losses(names, num_experts, top_k)


def read_keys(settings: Mapping[str, Any]) -> Any:
    """A gate's keys, as its class reads them.

    Raises:
        ValueError: see `build_gate`.
    """
    name, keys = settings["name"], {key: value for key, value in settings.items() if key != "name"}
    cls = _losses_of(name)
    return from_mapping(cls.Config if name in gates_of_others() else cls, keys, "gate")


def check_freeze(settings: Mapping[str, Any], freeze: Collection[str]) -> None:
    """Raises ValueError if `freeze` names the gate and the gate has no weights."""
    keys = KEYS.get(settings["name"])
    if "gate" in freeze and keys is not None and not issubclass(keys, LinearKeys):
        raise no_gate(settings["name"])


def no_gate(name: str) -> ValueError:
    """The error for `freeze: [gate]` and a gate without weights."""
    return ValueError(f"freeze (gate): gate {name} has no weights that could be frozen; take it out")


def resolve_losses(settings: Mapping[str, Any], losses: Mapping[str, float] | str) -> dict[str, float]:
    """The weights of a gate's auxiliary losses, those of weight zero left out; `auto` = the gate's defaults.

    Raises:
        ValueError: see `build_gate`; or a loss that this gate does not have.
    """
    cls = _losses_of(settings["name"])
    if isinstance(losses, str):
        return dict(cls.DEFAULT_LOSSES)
    for name, weight in losses.items():
        if name not in cls.LOSSES and weight:
            known = nearest(name, cls.LOSSES) if cls.LOSSES else "it has none: write loss: {}"
            raise ValueError(f"loss.{name}: gate {settings['name']} has no such loss; {known}")
    return {name: float(weight) for name, weight in losses.items() if weight}


def _losses_of(name: str) -> Any:
    """The class that has `LOSSES` and `DEFAULT_LOSSES` of a gate."""
    others = gates_of_others()
    if name not in others and name not in KEYS:
        raise no_such_gate(name)
    return others[name].load() if name in others else KEYS[name]
