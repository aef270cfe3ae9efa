"""`foundry-moe plan --calibrate`: measures this machine's constants in about a minute and writes them to a file.

Imports torch and the kernels only, so that a machine without Composer can be measured:
`python -m foundry_moe.commands.plan.calibrate --out h200.json`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from foundry_moe.commands.argument_types import local_path
from foundry_moe.commands.plan.constants import (
    CHIPS,
    FORMAT,
    Constants,
    Link,
    default_path,
    shipped_constants,
    write_constants,
)
from foundry_moe.commands.plan.measure import Measured, measure_links
from foundry_moe.launch.processes import run_processes

LINKS_TIMEOUT_S = 180.0
CPU_RANKS = 2


def chip_of(name: str) -> str:
    """The planner's name of a GPU: `h200` of `NVIDIA H200`; of one that it does not know the whole name."""
    words = "-".join(name.lower().split())
    return next((chip for chip in sorted(CHIPS, key=len, reverse=True) if chip in words), words)


def calibrate(device: str, gpus: int | None = None) -> Constants:
    """Measures this machine.

    Args:
        device: cuda or cpu.
        gpus: that exchange messages; None = all of this host, on a CPU two processes.

    Raises:
        ValueError: no such device, or more GPUs than there are.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device (cuda): torch sees no GPU here; --device cpu measures the CPU")
    there = torch.cuda.device_count() if device == "cuda" else CPU_RANKS
    gpus = there if gpus is None else gpus
    if not 1 <= gpus <= (there if device == "cuda" else 8):
        raise ValueError(f"--gpus ({gpus}): this host has {there}")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    measured = Measured(torch.device(device))
    values: dict[str, Any] = {
        "memory_bytes_per_s": measured.memory_bytes_per_s(),
        "dense_flops_per_s": measured.dense_flops_per_s(),
        "expert_flops_per_s": measured.expert_flops_per_s(),
        "attention_flops_per_s": measured.attention_flops_per_s(),
        "launch_s": measured.launch_s(),
    }
    del measured
    if device == "cuda":
        torch.cuda.empty_cache()  # the ranks below use this GPU too
    shipped = shipped_constants("h200")
    assumed = ["network"]
    if gpus > 1:
        found = run_processes(
            measure_links,
            world_size=gpus,
            backend="nccl" if device == "cuda" else "gloo",
            timeout_s=LINKS_TIMEOUT_S,
            preload=("foundry_moe.commands.plan.measure",),
        )
        values["contention"] = found.pop("contention")
        values |= {name: Link(**link) for name, link in found.items()}
    else:
        for link in ("all_to_all", "all_gather", "reduce_scatter", "contention"):
            values[link] = getattr(shipped, link)
            assumed.append(link)
    return Constants(
        format=FORMAT,
        device=name,
        gpus=gpus,
        source=f"foundry-moe plan --calibrate, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}",
        assumed=tuple(assumed),
        network=shipped.network,
        **values,
    )


def format_constants(constants: Constants) -> str:
    """As text, with a list of the assumed constants."""

    def rates(by_width: dict[str, float]) -> str:
        return ", ".join(f"{rate / 1e12:.4g} at {width}" for width, rate in by_width.items())

    lines = [
        f"{constants.device}, {constants.gpus} on one host: {constants.source}",
        f"  products                {rates(constants.dense_flops_per_s)} TFLOP/s",
        f"  experts                 {rates(constants.expert_flops_per_s)} TFLOP/s",
        f"  attention               {constants.attention_flops_per_s / 1e12:.4g} TFLOP/s",
        f"  memory                  {constants.memory_bytes_per_s / 1e9:.4g} GB/s",
        f"  a launch                {constants.launch_s * 1e6:.3g} us",
        f"  products beside messages longer by {constants.contention:.2f} of the messages' time",
    ]
    for name in ("all_to_all", "all_gather", "reduce_scatter", "network"):
        link = getattr(constants, name)
        lines.append(f"  {name:23} {link.latency_s * 1e6:.3g} us and {link.bytes_per_s / 1e9:.4g} GB/s")
    if constants.assumed:
        lines.append(f"  not measured here, assumed: {', '.join(constants.assumed)}")
    if constants.device == "CPU":
        lines.append("warning: these constants are of CPUs: they say nothing about a run on GPUs")
    return "\n".join(lines)


def calibrate_command(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes the constants."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.out is not None:
        _check_writable(arguments.out)
    began = time.perf_counter()
    constants = calibrate(device, arguments.gpus)
    chip = "cpu" if device == "cpu" else chip_of(constants.device)
    out = arguments.out or default_path(chip)
    write_constants(constants, out)
    print(format_constants(constants))
    print(f"{out}: written after {time.perf_counter() - began:.0f} s")
    return 0


def _check_writable(path: Path) -> None:
    """Before minutes of measuring.

    Raises:
        ValueError: it is a folder, or lies where nothing can be written.
    """
    if path.is_dir():
        raise ValueError(f"--out ({path}) is a folder: name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"--out ({path}) cannot be written: {error.strerror or error}") from error


def main() -> None:
    """`python -m foundry_moe.commands.plan.calibrate`, where the command `foundry-moe` is not installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, help="that exchange messages (default: all of this host)")
    parser.add_argument("--out", type=local_path, help="default: beside the tuned tiles, where plan --chip finds it")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where torch sees a GPU")
    sys.exit(calibrate_command(parser.parse_args()))


if __name__ == "__main__":
    main()
