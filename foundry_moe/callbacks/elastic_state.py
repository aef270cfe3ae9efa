"""Composer's training state as a state dict that fits any mesh, and back.

Model and optimizer are saved by parameter name, as DTensors in place; everything else goes through `state_dict` and
`load_state_dict` of Composer's objects. Not saved: the tokenizer, which Composer would store byte by byte, and random
states of ranks (see `reseed`).

A checkpoint is not trusted, but Composer's loader trusts its input: it strips underscores from keys, adds algorithms by
evaluating their `repr`, and sets attributes. So it receives only keys that `collect` writes, after `check`.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from composer.core import State, Time
from composer.loggers import Logger, ProgressBarLogger
from composer.utils import dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from foundry_moe.callbacks.data_order import DataPosition, allow_next_datamix, is_curriculum, seed_of
from foundry_moe.checkpoint.codec import encode
from foundry_moe.checkpoint.errors import DamagedError, MismatchError
from foundry_moe.checkpoint.strict import MOST, shown
from foundry_moe.schema import UserError

BY_NAME = ("schedulers", "algorithms", "callbacks", "scaler", "timestamp")
PLAIN = ("rank_zero_seed", "dataset_state")
SECTIONS = ("model", "optim", "composer")
TIME = "composer.Time"
RECORD = "dataclass."  # and the name of the class
NEVER = ("repr", "required_on_load")  # keys of an algorithm's state; Composer evaluates the first as Python
ONLY_WEIGHTS = "or start a new run from its weights, with load_path, load_weights_only: true and another folder"


def collect(
    state: State,
    *,
    weights_only: bool = False,
    left_out: Collection[str] = (),
    position: DataPosition | None = None,
) -> dict[str, Any]:
    """The state that a run resumes from, or the model only. Tensors are the live ones, not copies.

    The state of an optimizer that has not stepped is initialised, as PyTorch does it.

    Args:
        left_out: names of the model's tensors.
        position: knows the epochs that have ended.
    """
    model = {name: tensor for name, tensor in get_model_state_dict(state.model).items() if name not in left_out}
    if weights_only:
        return {"model": model}
    return {
        "model": model,
        "optim": get_optimizer_state_dict(state.model, state.optimizers) if state.optimizers else {},
        "composer": {
            **{name: _named(getattr(state, name)) for name in BY_NAME},
            "rank_zero_seed": state.rank_zero_seed,
            "dataset_state": (position or DataPosition()).of(state),
        },
    }


def _named(objects: Any) -> dict[str, Any]:
    """State dicts by class name, as Composer stores them, as data and without keys that Composer evaluates."""
    return {
        type(item).__qualname__: {key: to_data(value) for key, value in item.state_dict().items() if key not in NEVER}
        for item in _several(objects)
    }


def to_data(value: Any) -> Any:
    """A value with dataclasses and Composer's times as dictionaries of one key, which `from_data` reads."""
    if isinstance(value, Time):
        return {TIME: value.to_timestring()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {RECORD + type(value).__qualname__: fields}
    if type(value) is dict:
        return {key: to_data(item) for key, item in value.items()}
    return type(value)(map(to_data, value)) if type(value) in (list, tuple) else value


def from_data(value: Any, types: Mapping[str, type], where: str) -> Any:
    """The inverse of `to_data`.

    Args:
        types: the dataclasses that may be made, by name.

    Raises:
        DamagedError: another dataclass, other fields, or an invalid time.
    """
    if type(value) in (list, tuple):
        return type(value)(from_data(item, types, where) for item in value)
    if type(value) is not dict:
        return value
    key = next(iter(value)) if len(value) == 1 else ""
    if key == TIME:
        try:
            return Time.from_timestring(value[TIME])
        except (TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{where} holds {shown(value[TIME])}, which is no time") from error
    if isinstance(key, str) and key.startswith(RECORD):
        cls = types.get(key.removeprefix(RECORD))
        names = {field.name for field in dataclasses.fields(cls)} if cls is not None else None
        if cls is None or not isinstance(value[key], dict) or set(value[key]) != names:
            raise DamagedError(f"{where} holds {shown(key)}, which this run does not write, or with other fields")
        return cls(**{name: from_data(item, types, where) for name, item in value[key].items()})
    return {name: from_data(item, types, where) for name, item in value.items()}


def check_storable(state: State) -> None:
    """Raises ValueError for a callback, algorithm or scheduler with a state that a checkpoint cannot hold."""
    for section in BY_NAME:
        for item in _several(getattr(state, section)):
            name = type(item).__qualname__
            try:
                encode(_named(item)[name], tensor=lambda path, tensor: None)
            except Exception as error:  # of a `state_dict` that fails, too
                raise UserError(
                    f"{section}: the state of {name} cannot be saved with elastic_checkpoint, which stores plain data "
                    f"only ({type(error).__name__}: {error}): remove {name}, or let its state_dict return plain data"
                ) from error


def _several(objects: Any) -> Sequence[Any]:
    return objects if isinstance(objects, list | tuple) else [objects] if objects is not None else []


def check(
    loaded: Mapping[str, Any], here: Mapping[str, Any], *, step: int | None = None, samples: int | None = None
) -> None:
    """Compares a loaded state, before any of it is used, with what `collect` gives in this run.

    Args:
        step: of the commit that the state came from.
        samples: at most in an epoch of this run's data, without what fills up its canonical nodes; None = not known.

    Raises:
        DamagedError: a section or a key that `collect` does not write, or a value of another kind than this run's.
        MismatchError: this run has other groups of parameters, or fewer samples than the checkpoint has read.
    """
    _mapping(loaded, "the checkpoint", SECTIONS)
    optim = _mapping(loaded.get("optim", {}), "optim", ("state", "param_groups"))
    ours = here.get("optim") or {}
    _check_groups(optim.get("param_groups", []), ours.get("param_groups") or [])
    for name, value in _mapping(optim.get("state", {}), "optim.state").items():
        _mapping(value, f"optim.state.{name}")
    composer = _mapping(loaded.get("composer", {}), "composer", (*BY_NAME, *PLAIN))
    mine = here.get("composer") or {}
    for section in BY_NAME:
        for name, state in _mapping(composer.get(section) or {}, f"composer.{section}").items():
            where, like = f"composer.{section}.{name}", (mine.get(section) or {}).get(name, {})
            for key, value in _mapping(state, where).items():
                if section == "algorithms":
                    _alike(value, like.get(key), f"{where}.{key}", inner=False)
                elif section != "callbacks":  # callbacks check their own state, which is plain data
                    _alike(value, like.get(key), f"{where}.{key}", same_length=True)
                # Composer's and torch's loaders set each key as an attribute: `optimizer` would replace the optimizer
                if section == "schedulers" and like and key not in like and not key.startswith("_"):
                    raise DamagedError(f"{where} holds {shown(key)}, which this run's scheduler does not write")
    for name, timestamp in (composer.get("timestamp") or {}).items():
        _check_timestamp(timestamp, (mine.get("timestamp") or {}).get(name, {}), f"composer.timestamp.{name}", step)
    for key in PLAIN:
        _alike(composer.get(key), mine.get(key), f"composer.{key}")
    _check_data(_mapping(composer.get("dataset_state") or {}, "composer.dataset_state"), samples)


def _check_groups(groups: Any, ours: Sequence[Mapping[str, Any]]) -> None:
    """The optimizer's groups: as many as this run has, of the same parameters, with valid numbers."""
    if not isinstance(groups, list):
        raise DamagedError(f"optim.param_groups is a {type(groups).__name__}, not a list")
    if len(groups) != len(ours):
        counts = f"{len(groups)} group{'s' * (len(groups) != 1)}, this run {len(ours)}"
        raise MismatchError(f"optimizer.param_groups: the checkpoint has {counts}: use the same groups, {ONLY_WEIGHTS}")
    for number, (group, like) in enumerate(zip(groups, ours, strict=True)):
        where = f"optim.param_groups.{number}"
        for key, value in _mapping(group, where).items():
            _alike(value, like.get(key), f"{where}.{key}", same_length=key != "params")
            numbers = value if isinstance(value, list | tuple) else [value]
            bound = 1.0 if key == "betas" else float("inf")
            if any(isinstance(n, int | float) and not 0 <= n < bound for n in numbers):
                raise DamagedError(f"{where}.{key} is {shown(value)}, which no optimizer takes")
        if "params" in like and sorted(map(str, group.get("params") or [])) != sorted(map(str, like["params"])):
            raise MismatchError(
                f"optimizer.param_groups: group {number} of the checkpoint has other parameters than that of this run: "
                f"use the same groups, {ONLY_WEIGHTS}"
            )


def _check_timestamp(timestamp: Mapping[str, Any], like: Mapping[str, Any], where: str, step: int | None) -> None:
    """Counts of batches, samples and tokens: consistent with the checkpoint's step and with each other."""
    for key, ours in like.items():
        value = timestamp.get(key)
        if type(ours) is int and not (type(value) is int and 0 <= value <= MOST):
            raise DamagedError(f"{where}.{key} is {shown(value)}, not a count")
        if isinstance(ours, datetime.timedelta) and not (
            isinstance(value, datetime.timedelta) and value >= datetime.timedelta(0)
        ):
            raise DamagedError(f"{where}.{key} is {shown(value)}, not a span of time")
    if step is not None and "batch" in like and timestamp["batch"] != step:
        raise DamagedError(f"{where}.batch is {timestamp['batch']}, and the checkpoint is that of step {step}")
    # not batches: a run that halves its batch size counts twice as many in the epoch
    for part, whole in (("sample_in_epoch", "sample"), ("token_in_epoch", "token")):
        if part in like and whole in like and timestamp[part] > timestamp[whole]:
            raise DamagedError(f"{where}.{part} ({timestamp[part]}) is above {whole} ({timestamp[whole]})")


def _check_data(dataset: Mapping[str, Any], samples: int | None) -> None:
    """The position in the data. Streaming computes with it in data workers, whose errors appear long after a load."""
    train = _mapping(dataset, "dataset_state", ("train", "eval")).get("train")
    if not isinstance(train, Mapping):
        return
    limits = {"sample_in_epoch": MOST, "shuffle_seed": 2**32 - 1}
    limits |= {"epoch": 2**31, "num_canonical_nodes": 2**16, "initial_physical_nodes": 2**16}
    for key, most in limits.items():
        value = train.get(key)
        if value is not None and not (type(value) is int and 0 <= value <= most):
            raise DamagedError(f"composer.dataset_state.train.{key} is {shown(value)}, not a count up to {most}")
    nodes = train.get("num_canonical_nodes") or 1  # streaming repeats samples until each has as many
    if samples is not None and (train.get("sample_in_epoch") or 0) > samples + nodes - 1:
        raise MismatchError(
            f"the checkpoint has read {train['sample_in_epoch']} samples of its epoch, and train_loader.dataset has at "
            f"most {samples} per epoch: use the data set that the checkpoint was trained with, {ONLY_WEIGHTS}"
        )


def _mapping(value: Any, where: str, keys: Sequence[str] = ()) -> Mapping[str, Any]:
    """A dictionary by name, of no other names than `keys` if there are any."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise DamagedError(f"{where} is a {type(value).__name__}, not a dictionary by name")
    for key in value if keys else ():
        if key not in keys:
            raise DamagedError(f"{where} holds {shown(key)}, which is not on the list of what is loaded: {list(keys)}")
    return value


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, int | float | np.number) or (isinstance(value, torch.Tensor) and value.ndim == 0):
        return "number"
    for kind, types in (("dictionary", Mapping), ("list", (list, tuple)), ("text", str), ("tensor", torch.Tensor)):
        if isinstance(value, types):
            return kind
    return type(value).__name__


def _alike(value: Any, like: Any, where: str, *, inner: bool = True, same_length: bool = False) -> None:
    """Raises DamagedError for a value of another kind than `like`, or a number that is not finite.

    None matches any value, and an empty list any list. With `same_length` lists must be as long as those of `like`.
    """
    if value is None or like is None:
        return
    if _kind(value) != _kind(like):
        raise DamagedError(f"{where} is a {_kind(value)}, where this run has a {_kind(like)}")
    if (isinstance(value, int) and abs(value) > MOST) or (isinstance(value, float) and not math.isfinite(value)):
        raise DamagedError(f"{where} is {shown(value)}, which is no number to compute with")
    if same_length and isinstance(like, list | tuple) and len(value) != len(like):
        raise DamagedError(f"{where} has {len(value)} values, where this run has {len(like)}")
    if inner and isinstance(like, Mapping):
        for key, item in value.items():
            _alike(item, like.get(key), f"{where}.{key}")
    elif inner and isinstance(like, list | tuple) and like:
        for number, item in enumerate(value):
            _alike(item, like[min(number, len(like) - 1)], f"{where}.{number}")


def restore(state: State, loaded: dict[str, Any], logger: Logger, *, keep_settings: bool = False) -> None:
    """Restores a loaded state that `check` has passed. Loading has filled the model's tensors, which are live.

    Args:
        keep_settings: see `restore_optimizers`.
    """
    if "composer" not in loaded:
        return  # weights only: a new run starts from them
    saved = loaded["composer"]
    rest = {key: saved[key] for key in PLAIN if saved.get(key) is not None}
    try:
        for name in BY_NAME:
            rest[name] = {}
            for item in _several(getattr(state, name)):
                (kind, own), there = next(iter(_named(item).items())), saved.get(name) or {}
                # objects that the checkpoint lacks keep their initial state, without Composer's warning
                known = kind in there and not isinstance(item, ProgressBarLogger)  # which formats text with its state
                rest[name][kind] = _handed_on(item, own, there[kind] if known else own)
        state.load_state_dict(rest, logger)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DamagedError(f"the state of a callback, algorithm or scheduler cannot be loaded: {error!r}") from error
    if state.optimizers:
        restore_optimizers(state, loaded["optim"], keep_settings=keep_settings)


def continue_progress_bars(state: State, logger: Logger) -> None:
    """Shows the progress of a resumed run: Composer begins a bar where an epoch begins, and counts from 0."""
    for display in logger.destinations:
        if isinstance(display, ProgressBarLogger) and state.timestamp.batch.value:
            display.epoch_start(state, logger)
            if display.train_pbar is not None:
                bar = display.train_pbar.pbar
                bar.n = bar.initial = bar.last_print_n = int(getattr(state.timestamp, display.train_pbar.timestamp_key))
                bar.refresh()


def restore_optimizers(state: State, optim: Mapping[str, Any], *, keep_settings: bool) -> None:
    """Restores the optimizers' state; with `keep_settings` only that of the parameters.

    The settings, such as the learning rate, then stay this run's, and schedules continue with them.
    """
    for optimizer in state.optimizers:
        own = [
            {key: group[key] for key in (*optimizer.defaults, "initial_lr") if key in group}
            for group in optimizer.param_groups
        ]
        set_optimizer_state_dict(state.model, optimizer, dict(optim))
        if not keep_settings:
            continue
        for group, values in zip(optimizer.param_groups, own, strict=True):
            group.update(values)
            group["lr"] = values.get("initial_lr", values["lr"])
        for scheduler in state.schedulers:
            if isinstance(scheduler, LambdaLR) and scheduler.optimizer is optimizer:
                scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
                for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
                    group["lr"] = group["initial_lr"] * factor(scheduler.last_epoch)


def _handed_on(item: Any, own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a saved state that an object may receive.

    Schedulers and some algorithms set each key as an attribute, so a key that the object does not write itself must not
    name one of its methods.
    """
    records = [value for value in item.state_dict().values() if dataclasses.is_dataclass(value)]
    types = {type(value).__qualname__: type(value) for value in records}
    found = {
        key: from_data(value, types, f"{type(item).__qualname__}.{key}")
        for key, value in saved.items()
        if key not in NEVER and (key in own or not (key.startswith("__") or hasattr(type(item), key)))
    }
    if is_curriculum(item):
        allow_next_datamix(item, found["state"])
    return found


def reseed(seed: int, batch: int, rank: int) -> None:
    """Sets all random generators from (seed, batch, data-parallel rank), whatever was drawn before."""
    value = seed_of(seed, batch, rank)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def describe_mesh(model: torch.nn.Module) -> dict[str, int]:
    """The mesh that holds the model, by dimension name: that of the parameter with the most dimensions."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    if not meshes:
        return {"world": dist.get_world_size()}
    mesh = max(meshes, key=lambda m: m.ndim)
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    return dict(zip(names, mesh.mesh.shape, strict=True))
