"""The checkpoint folder of a command, and the checkpoint that it reads: of a step, or the newest that is good."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.errors import DamagedError, NotFoundError
from foundry_moe.checkpoint.ledger import Found, Ledger, listed_steps
from foundry_moe.checkpoint.store import Store, StoreOptions

BELOW = "checkpoints"  # the subfolder of a run's folder, in every shipped YAML

T = TypeVar("T")


def open_folder(folder: str, arguments: argparse.Namespace, *, new: bool = False) -> tuple[Store, Ledger]:
    """The folder of a run's checkpoints, with the options of the store among a command's arguments.

    If the folder has no checkpoints but its subfolder `checkpoints/` has, the subfolder is opened.

    Args:
        new: the command creates the folder if it does not exist.
    """
    options = StoreOptions(endpoint_url=arguments.endpoint_url, profile=arguments.profile, region=arguments.region)
    store = open_store(folder, options)
    if not new and not os.path.isdir(store.url) and next(store.scan(), None) is None:
        raise NotFoundError(f"there is nothing at {store.url}: name the folder of a run that has saved")
    ledger = Ledger(store)
    if not new and not ledger.newest_first():
        below = open_store(f"{folder.rstrip('/')}/{BELOW}", options)
        if Ledger(below).newest_first():
            print(f"{store.url} holds no checkpoint: using {below.url}", file=sys.stderr)
            return below, Ledger(below)
    return store, ledger


def describe_mesh(mesh: object) -> str:
    """The mesh that a checkpoint records, in words; `?` if it records none."""
    return " x ".join(f"{name} {size}" for name, size in mesh.items()) if isinstance(mesh, dict) else "?"


def with_checkpoint(ledger: Ledger, step: int | None, use: Callable[[Found], T]) -> T:
    """The result of `use`, which reads the commit of a step, or the newest that is good.

    If the newest turns out damaged, or the run deletes it meanwhile, `use` gets the newest that is good then.
    """
    printed: set[str] = set()
    while True:
        choice = ledger.choose("auto" if step is None else step)
        for sentence in choice.rejected:
            if sentence not in printed and not any(sentence.startswith(key.key) for key in ledger.damaged):
                print(f"passed over: {sentence}", file=sys.stderr)
            printed.add(sentence)
        if choice.found is None:
            raise NotFoundError(f"{ledger.store.url} holds no checkpoint")
        commit = choice.found.commit
        try:
            return use(choice.found)
        except DamagedError as error:
            keys = ledger.newest_first()
            fault = "is damaged" if commit.where in keys else "was deleted while it was read"
            if step is not None:
                others = listed_steps(key for key in keys if key.step != step)
                there = f"; other steps: {others}" if others else ""
                raise DamagedError(f"step {step} {fault}: {error}{there}") from error
            ledger.damaged.add(commit.where)
            print(f"step {commit.step} {fault}, trying the one before: {error}", file=sys.stderr)
