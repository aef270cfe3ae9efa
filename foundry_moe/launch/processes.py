"""Starts a process group on this machine, runs one function on every rank, and ends all of it if one rank fails.

Children come from a fork server that has imported torch, so a launch takes a fraction of a second per process.
This module must not know the function.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foundry_moe.launch.network import use_loopback

GRACE_S = 2.0
STACK_LINES = 12  # of each rank that has hung


def _enter(
    rank: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    world_size: int,
    backend: str,
    folder: Path,
    timeout_s: float,
) -> None:
    """One rank, from process start to exit code. Rank 0's result and every rank's error go to files of `folder`."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in place.items()})
    # also works within a call that hangs, unlike a handler in Python
    faulthandler.register(signal.SIGUSR1, file=(folder / f"stack-{rank}").open("w", encoding="utf-8"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size) if backend == "gloo" else 4)
    use_loopback()
    try:
        if backend != "gloo":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(*arguments)
        if rank == 0:
            torch.save(result, folder / "result.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        text = folder / f"text-{rank}"
        text.write_text(traceback.format_exc(), encoding="utf-8")
        text.rename(folder / f"error-{rank}")  # the parent reads whole messages only
        # exit handlers may wait for other ranks, which wait for this one: skip them
        os._exit(1)


def run_processes(
    function: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    backend: str = "gloo",
    timeout_s: float = 300.0,
    preload: Sequence[str] = ("torch",),
) -> Any:
    """Runs `function(*arguments)` on `world_size` new processes that form a process group; returns rank 0's result.

    Args:
        function: importable by name; returns on rank 0 what `torch.save` can write.
        timeout_s: for the whole run, and for each collective in it.
        preload: modules that the fork server imports; the first launch of this process fixes them for all later ones.

    Raises:
        RuntimeError: a rank raised, died or ran out of time. All others have been killed; the message holds the
            error of the rank that failed first, or where each one was when time was out.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        job = {"world_size": world_size, "backend": backend, "folder": folder, "timeout_s": timeout_s}
        processes = [
            context.Process(target=_enter, args=(rank, function, arguments), kwargs=job, name=f"rank {rank}")
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            failed = _wait(processes, timeout_s)
            if failed:
                if not any(process.exitcode for process in processes):
                    _write_stacks(processes, folder)
                settle(lambda: any(process.is_alive() for process in processes))
                codes = [process.exitcode for process in processes]
                raise RuntimeError(_describe(codes, folder, timeout_s))
            return torch.load(folder / "result.pt", weights_only=False)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()


def _wait(processes: Sequence[BaseProcess], timeout_s: float) -> bool:
    """Whether the run failed: True once a rank fails or time is out; False once all ranks have succeeded."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes) or time.monotonic() > deadline:
            return True
        time.sleep(0.02)
    return any(process.exitcode for process in processes)


def settle(still_run: Callable[[], bool]) -> None:
    """Waits up to GRACE_S for ranks that lost a peer, or have an error that all have, to write it and end."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and still_run():
        time.sleep(0.02)


def _write_stacks(processes: Sequence[BaseProcess], folder: Path) -> None:
    """Makes each running rank write its stack. A rank without a handler yet would die of the signal, and is skipped."""
    for rank, process in enumerate(processes):
        if process.is_alive() and process.pid is not None and (folder / f"stack-{rank}").exists():
            os.kill(process.pid, signal.SIGUSR1)


def _describe(codes: list[int | None], folder: Path, timeout_s: float) -> str:
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    if killed:  # the others' errors are about the connection to it
        signal_name = signal.Signals(-codes[killed[0]]).name  # type: ignore[operator]
        return f"rank {killed[0]} of {len(codes)} died of {signal_name}"
    errors = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        rank = errors[0].name.removeprefix("error-")
        return f"rank {rank} of {len(codes)} failed:\n{errors[0].read_text(encoding='utf-8')}"
    ended = [rank for rank, code in enumerate(codes) if code]
    if ended:
        return f"rank {ended[0]} of {len(codes)} ended with exit code {codes[ended[0]]} and no message"
    message = f"{codes.count(None)} of {len(codes)} ranks still ran after {timeout_s:g} s"
    for path in sorted(folder.glob("stack-*")):
        threads = [text for text in path.read_text(encoding="utf-8").split("\n\n") if "<no Python frame>" not in text]
        lines = "\n".join(threads).splitlines()[:STACK_LINES]
        message += "\n".join([f"\nrank {path.name.removeprefix('stack-')}, innermost call first:", *lines])
    return message
