"""`foundry-moe checkpoints`: list, show, verify, clean, release, export and import the checkpoints of a folder."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from foundry_moe.checkpoint import range_reads
from foundry_moe.checkpoint.committer import Retention
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, NotFoundError
from foundry_moe.checkpoint.ledger import Found, Ledger, listed_steps
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.owners import Owners
from foundry_moe.checkpoint.records import CommitKey
from foundry_moe.commands.chosen_checkpoint import describe_mesh, open_folder, with_checkpoint
from foundry_moe.config import can_cut_rows
from foundry_moe.launch.checkpoint_settings import parse_interval
from foundry_moe.parallel.mesh import divisors
from foundry_moe.schema import UserError


def _pick(ledger: Ledger, step: int | None) -> CommitKey:
    every = ledger.newest_first()
    keys = [key for key in every if step is None or key.step == step]
    if not keys:
        wanted = "" if step is None else f" of step {step}"
        have = f"; it holds: {listed_steps(every)}" if every else ""
        raise NotFoundError(f"{ledger.store.url} holds no checkpoint{wanted}{have}")
    return keys[0]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def run_ls(arguments: argparse.Namespace) -> int:
    store, ledger = open_folder(arguments.folder, arguments)
    keys = ledger.newest_first()
    if not keys:
        print(f"{store.url} holds no checkpoint")
        return 0
    damaged = 0
    print(f"{'step':>10}  {'size':>9}  {'objects':>7}  {'saved':20}  mesh")
    for key in keys:
        try:
            commit = ledger.read(key)
        except DamagedError as error:
            print(f"{key.step:>10}  damaged: {error}")
            damaged += 1
            continue
        summary = commit.summary
        kept = "  milestone" if summary.get("milestone") else ""
        fork = f"  fork {key.generation}" if key.generation else ""
        mesh = describe_mesh(summary.get("mesh"))
        print(
            f"{key.step:>10}  {_size(summary.get('bytes', 0)):>9}  {summary.get('objects', 0):>7}  "
            f"{summary.get('saved', '?'):20}  {mesh}{kept}{fork}"
        )
    return 1 if damaged else 0


def expert_shapes(manifest: Manifest) -> dict[tuple[int, int], str]:
    """The sizes that a mesh must divide: dimensions 0 (experts) and 1 of the model's tensors of three dimensions.

    With the name of one tensor for each pair of sizes.
    """
    sizes: dict[tuple[int, int], str] = {}
    for name, entry in manifest.tensors.items():
        if name.startswith("model.") and len(entry.shape) == 3:
            sizes.setdefault((entry.shape[0], entry.shape[1]), name)
    return sizes


def meshes_that_hold(manifest: Manifest, world_size: int) -> Iterator[tuple[int, int, int]]:
    """All (replicate, shard, expert) of `world_size` ranks that can hold a checkpoint."""
    sizes = expert_shapes(manifest)
    for expert in divisors(world_size):
        for shard in divisors(world_size // expert):
            if all(
                experts % expert == 0 and can_cut_rows(width, shard=shard, expert=expert) for experts, width in sizes
            ):
                yield world_size // (expert * shard), shard, expert


def run_show(arguments: argparse.Namespace) -> int:
    _, ledger = open_folder(arguments.folder, arguments)
    found = ledger.open(_pick(ledger, arguments.step))
    manifest, info = found.manifest, found.manifest.info
    print(f"step {found.commit.step}, attempt {found.commit.attempt.rpartition('/')[2]}")
    mesh = describe_mesh(info.get("mesh"))
    print(f"written by {info.get('world_size')} processes: {mesh}, torch {info.get('torch', '?')}")
    index = _size(found.commit.manifest_bytes)
    print(f"{_size(manifest.size_bytes)} in {len(manifest.objects)} objects; manifest {index}")
    sections = defaultdict(list)
    for name, entry in manifest.tensors.items():
        sections[name.split(".")[0]].append(entry)
    for section, tensors in sections.items():
        blocks, size = sum(len(entry.object_B) for entry in tensors), sum(entry.size_bytes for entry in tensors)
        print(f"  {section:10} {len(tensors):>6} tensors  {blocks:>7} blocks  {_size(size)}")
    for (experts, width), name in expert_shapes(manifest).items():
        print(f"  experts of {name}: mesh.expert must divide {experts}, and beside it mesh.shard must divide {width}")
    for gpus in arguments.gpus or [int(info.get("world_size", 1))]:
        meshes = " ".join(f"({r},{s},{e})" for r, s, e in meshes_that_hold(manifest, gpus))
        print(f"meshes of {gpus} that can read it (replicate, shard, expert): {meshes or 'none'}")
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    store, ledger = open_folder(arguments.folder, arguments)
    keys = [_pick(ledger, arguments.step)] if arguments.step is not None else ledger.newest_first()
    bad = 0
    for key in keys:
        began = time.perf_counter()
        try:
            found = ledger.open(key)
            problems, size = range_reads.verify(store, found), found.manifest.size_bytes
        except DamagedError as error:
            problems, size = [str(error)], 0
        seconds = time.perf_counter() - began
        bad += bool(problems)
        verdict = "DAMAGED" if problems else f"good: {_size(size)} read, every hash agrees, {seconds:.1f} s"
        print(f"step {key.step}: {verdict}")
        for problem in problems:
            print(f"  {problem}")
    if not keys:
        print(f"{store.url} holds no checkpoint")
    return 1 if bad else 0


def run_gc(arguments: argparse.Namespace) -> int:
    store, ledger = open_folder(arguments.folder, arguments)
    older = parse_interval(arguments.older_than, "--older-than", "sec")
    retention, verb = Retention(ledger), "would remove" if arguments.dry_run else "removed"
    gone: list[CommitKey] = []
    if arguments.keep is not None:
        if retention.retain(arguments.keep, dry_run=True):
            _distrust_damaged(ledger)
        gone = retention.retain(arguments.keep, dry_run=arguments.dry_run)
        for key in gone:
            print(f"{verb} the checkpoint of step {key.step}")
    stale = retention.collect(older.amount, dry_run=arguments.dry_run)
    for attempt, size in stale.items():
        print(f"{verb} the unfinished attempt {attempt}, {_size(size)}")
    if not gone and not stale:
        print(f"{verb} nothing")
    owner = Owners(store)
    if owner.living_since_s() is not None:
        print(f"{owner.newest()} is running: its unfinished checkpoints are kept")
    left = len(ledger.newest_first()) - (len(gone) if arguments.dry_run else 0)
    print(f"{left} checkpoint{'' if left == 1 else 's'} {'would stay ' if arguments.dry_run else ''}in {store.url}")
    return 0


def _distrust_damaged(ledger: Ledger) -> None:
    """Reads the newest checkpoints until one is good, before others are removed: sizes do not show damaged data."""
    for key in ledger.newest_first():
        try:
            found = ledger.open(key)
        except DamagedError:
            continue  # retention checks it itself
        problems = range_reads.verify(ledger.store, found)
        if not problems:
            return
        ledger.damaged.add(key)
        print(f"step {key.step} is damaged and is not counted by --keep: {problems[0]}", file=sys.stderr)


def run_release(arguments: argparse.Namespace) -> int:
    store, _ = open_folder(arguments.folder, arguments)
    owners = Owners(store)
    alive = owners.living_since_s() is not None
    owner = owners.release()
    if owner is None:
        print(f"no run owns {store.url}")
    else:
        then = f"; {owner} stops at its next save" if alive else ""
        print(f"{store.url} is released from {owner}: any run can continue in it{then}")
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    from foundry_moe.commands.exported_files import INDEX, export, export_state

    store, ledger = open_folder(arguments.folder, arguments)
    out = arguments.out

    def write(found: Found) -> str:
        if arguments.format == "safetensors":
            names = export(store, found, out, file_bytes=arguments.file_gb * 1e9)
            count, where = len(names), f"{len(set(names.values()))} files, {out / INDEX}"
        else:
            count, where = export_state(store, found, out, arguments.format), str(out)
        return f"step {found.commit.step}: {count} tensors in {where}"

    print(with_checkpoint(ledger, arguments.step, write))
    return 0


def run_import(arguments: argparse.Namespace) -> int:
    from foundry_moe.commands.imported_files import import_weights
    from foundry_moe.models.pretrained import renaming_of

    store, _ = open_folder(arguments.folder, arguments, new=True)
    source, prefix = arguments.source, arguments.prefix
    try:
        rename = None if prefix else renaming_of(Path(source))
        count, size = import_weights(source, store, prefix=prefix, trust_pickle=arguments.trust_pickle, rename=rename)
    except CheckpointError:
        raise
    except (UserError, OSError) as error:
        raise CheckpointError(f"{source}: {error}") from error
    print(f"{count} tensors, {_size(size)}: the checkpoint of step 0 in {store.url}; runs here start from it")
    return 0
