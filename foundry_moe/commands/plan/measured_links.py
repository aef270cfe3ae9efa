"""Measures messages between the GPUs of one host, and how much they slow products down. A worker of `run_processes`.

A message's bytes are those that leave one GPU. Times are of the slowest rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from foundry_moe.commands.plan.measured_products import clock

ROUNDS, WARM_UP = 10, 3
GPU_BYTES, CPU_BYTES = (2**20, 2**24, 2**27), (2**12, 2**17, 2**21)  # of one GPU's buffer


def fit_link(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Latency and bandwidth through (bytes, seconds): least squares of relative errors, neither below what can be.

    Raises:
        ValueError: fewer than two sizes.
    """
    if len({size for size, _ in points}) < 2:
        raise ValueError("a latency and a bandwidth need messages of at least two sizes")
    # minimise sum ((a + b x - y) / y)^2
    rows = [(1 / y, x / y) for x, y in points]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = aa * bb - ab * ab
    latency, per_byte = (a1 * bb - b1 * ab) / determinant, (aa * b1 - ab * a1) / determinant
    largest = max(points)
    if per_byte <= 0:  # noise: the largest message is all bandwidth
        per_byte = largest[1] / largest[0]
    return {"latency_s": max(latency, 1e-7), "bytes_per_s": 1 / per_byte}


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(WARM_UP + ROUNDS):
        dist.barrier()
        began = clock(device)
        step()
        slowest = torch.tensor(clock(device) - began, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.append(slowest.item())
    return statistics.median(found[WARM_UP:])


def _messages(numbers: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Each kind of message with a buffer of so many fp32 numbers."""
    ranks = dist.get_world_size()
    whole = torch.zeros(numbers, device=device)
    other, part = torch.zeros_like(whole), torch.zeros(numbers // ranks, device=device)
    return {
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }


def measure_links() -> dict[str, Any]:
    """Every link's latency and bandwidth, and `contention`; equal on all ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    points: dict[str, list[tuple[float, float]]] = {}
    for size in GPU_BYTES if on_gpu else CPU_BYTES:
        numbers = size // 4 // ranks * ranks
        for name, message in _messages(numbers, device).items():
            leaves = 4 * numbers * (ranks - 1) / ranks
            points.setdefault(name, []).append((leaves, _seconds(message, device)))
    found: dict[str, Any] = {name: fit_link(measured) for name, measured in points.items()}
    found["contention"] = _contention(device) if on_gpu else 1.0  # a CPU's messages take the cores of its products
    return found


def _contention(device: torch.device) -> float:
    """What messages that travel beside products cost, over what they take alone."""
    x, w = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    numbers = GPU_BYTES[-1] // 4 // dist.get_world_size() * dist.get_world_size()
    gather = _messages(numbers, device)["all_gather"]
    beside = torch.cuda.Stream(device)

    def products() -> None:
        for _ in range(12):
            x @ w

    def messages() -> None:
        for _ in range(12):
            gather()

    def both() -> None:
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            messages()
        products()

    alone, sent, together = (_seconds(step, device) for step in (products, messages, both))
    # what the longer of the two takes is there without contention
    return max(together - max(alone, sent), 0.0) / min(alone, sent)
