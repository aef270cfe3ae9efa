"""Measures the constants of this machine's GPUs for `foundry-moe plan --constants FILE`, in about a minute.

    python benchmarks/calibrate.py > constants.json                             # one GPU; messages are assumed
    torchrun --nproc-per-node 8 benchmarks/calibrate.py > constants.json

Every timed operation follows a copy of similar duration, as in a training step: back-to-back matrix products draw so
much power that the chip lowers its clock. Bytes of a message are those that leave one GPU; its time is the slowest
rank's. Shapes: T tokens, D model width, F expert width, E experts, K choices, H heads, S sequence.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from foundry_moe.commands.plan.constants import FORMAT, LINKS, Constants, Link, shipped_constants
from foundry_moe.ops import expert_mlp, plan_permute
from foundry_moe.ops.softmax_topk import softmax_topk

ROUNDS, WARM_UP = 12, 3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of what is measured. The defaults are for a GPU; tests measure small ones on the CPU.

    experts: (D, F, E, K, T). attention: (sequences, H, S, head width). message_bytes: of one GPU's buffer.
    """

    tokens: int = 16384
    widths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    experts: tuple[tuple[int, int, int, int, int], ...] = (
        (2048, 768, 128, 8, 16384),
        (2048, 1024, 64, 8, 16384),
        (6144, 10752, 16, 4, 8192),
    )
    attention: tuple[int, int, int, int] = (4, 16, 4096, 128)
    copied_bytes: int = 2**30
    launches: int = 2000
    message_bytes: tuple[int, ...] = (2**20, 2**24, 2**27)


def calibrate(device: torch.device, sizes: Sizes = Sizes()) -> Constants:
    """Collective: measures all GPUs at once. Without a process group the shipped constants of messages are assumed."""
    values = measure_rates(device, sizes)
    if dist.is_initialized():
        values |= measure_messages(device, sizes.message_bytes)
    shipped = shipped_constants("h200")
    assumed = tuple(name for name in (*LINKS, "contention") if name not in values)
    return Constants(
        format=FORMAT,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        gpus=dist.get_world_size() if dist.is_initialized() else 1,
        source=f"benchmarks/calibrate.py, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}",
        assumed=assumed,
        **{name: getattr(shipped, name) for name in assumed},
        **values,
    )


def measure_rates(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """The constants of one GPU, by their names in `Constants`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = torch.empty(sizes.copied_bytes // 4, device=device).normal_()
    target = torch.empty_like(source)

    def new(*shape: int, grad: bool = False) -> Tensor:
        x = torch.randn(*shape, device=device, dtype=dtype) * shape[-1] ** -0.5
        return x.requires_grad_(grad)

    def seconds(step: Callable[[], object]) -> float:
        return _median_s(step, lambda: target.copy_(source), device)

    dense = {}
    for width in sizes.widths:
        x, w, dy = new(sizes.tokens, width), new(width, width), new(sizes.tokens, width)
        took_s = seconds(lambda x=x, w=w, dy=dy: (x @ w.T, dy @ w, dy.T @ x))  # type: ignore[misc]
        dense[str(width)] = 6 * sizes.tokens * width**2 / took_s

    experts = {}
    backend = "blocksparse" if device.type == "cuda" else "reference"
    for d, f, e, k, tokens in sizes.experts:
        x, dy = new(tokens, d, grad=True), new(tokens, d)
        logits = torch.randn(tokens, e, device=device).requires_grad_()
        w1, v1, w2 = (new(e, *size, grad=True) for size in ((f, d), (f, d), (d, f)))
        leaves = (x, logits, w1, v1, w2)

        def train_experts(leaves=leaves, dy=dy, e=e, k=k) -> None:  # type: ignore[no-untyped-def]
            for leaf in leaves:
                leaf.grad = None
            x, logits, w1, v1, w2 = leaves
            chosen = softmax_topk(logits, k, normalize=True, statistics=False)
            plan = plan_permute(chosen.experts_TK, e)
            weights = chosen.weights_TK
            expert_mlp(x, weights, plan, w1, v1, w2, activation="silu", backend=backend, memory="save").backward(dy)

        try:
            experts[str(f)] = 18 * tokens * k * d * f / seconds(train_experts)
        except torch.cuda.OutOfMemoryError:  # a smaller GPU skips the widest
            continue

    sequences, heads, s, width = sizes.attention
    q, key, v, dy = (new(sequences, heads, s, width, grad=index < 3) for index in range(4))

    def train_attention() -> None:
        q.grad = key.grad = v.grad = None
        F.scaled_dot_product_attention(q, key, v, is_causal=True).backward(dy)

    one = torch.zeros(1, device=device)
    # before each repetition the queue is emptied
    launches = timeit.repeat(lambda: one.add_(1.0), lambda: _clock(device), repeat=5, number=sizes.launches)
    return {
        "dense_flops_per_s": dense,
        "expert_flops_per_s": experts,
        "attention_flops_per_s": 6.0 * sequences * s * s * heads * width / seconds(train_attention),
        "memory_bytes_per_s": 2 * sizes.copied_bytes / seconds(lambda: target.copy_(source)),
        "launch_s": min(launches) / sizes.launches,
    }


def _clock(device: torch.device) -> float:
    """Seconds, after the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _median_s(step: Callable[[], object], between: Callable[[], object], device: torch.device) -> float:
    """Median time of a step, with `between` before each."""
    if device.type != "cuda":
        return statistics.median(timeit.repeat(step, number=1, repeat=WARM_UP + ROUNDS)[WARM_UP:])
    events = []
    for _ in range(WARM_UP + ROUNDS):
        between()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events[WARM_UP:]) / 1e3


def measure_messages(device: torch.device, message_bytes: Sequence[int]) -> dict[str, Any]:
    """Every link and `contention`, by their names in `Constants`; runs on all ranks, equal on all."""
    ranks = dist.get_world_size()
    points: dict[str, list[tuple[float, float]]] = {}
    for size in message_bytes:
        numbers = size // 4 // ranks * ranks
        whole = torch.zeros(numbers, device=device)
        other, part = torch.zeros_like(whole), torch.zeros(numbers // ranks, device=device)
        for name, message in (
            ("all_to_all", partial(dist.all_to_all_single, other, whole)),
            ("all_gather", partial(dist.all_gather_into_tensor, whole, part)),
            ("reduce_scatter", partial(dist.reduce_scatter_tensor, part, whole)),
        ):
            points.setdefault(name, []).append((4 * numbers * (ranks - 1) / ranks, _slowest_s(message, device)))
    found: dict[str, Any] = {name: fit_link(measured) for name, measured in points.items()}
    # on a CPU messages use the cores of the products
    found["contention"] = _contention(device, whole, part) if device.type == "cuda" else 1.0
    return found


def _slowest_s(step: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(WARM_UP + ROUNDS):
        dist.barrier()
        began = _clock(device)
        step()
        slowest = torch.tensor(_clock(device) - began, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.append(slowest.item())
    return statistics.median(found[WARM_UP:])


def fit_link(points: Sequence[tuple[float, float]]) -> Link:
    """Latency and bandwidth of messages (bytes, seconds) of two or more sizes: least squares of relative errors."""
    # minimise sum ((latency + per_byte x - y) / y)^2
    rows = [(1 / y, x / y) for x, y in points]
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0].tolist()
    if per_byte <= 0:  # noise: attribute the largest message to bandwidth alone
        size, took_s = max(points)
        per_byte = took_s / size
    return Link(latency_s=max(latency, 1e-7), bytes_per_s=1 / per_byte)


def _contention(device: torch.device, whole: Tensor, part: Tensor) -> float:
    """The slowdown of matrix products beside all-gathers, over the time of the shorter of the two."""
    x, w = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))

    def messages() -> list[Any]:
        return [dist.all_gather_into_tensor(whole, part, async_op=True) for _ in range(12)]

    def products() -> None:
        for _ in range(12):
            x @ w

    def both() -> None:
        sent = messages()  # on NCCL's own stream
        products()
        for message in sent:
            message.wait()

    alone, sent, together = (_slowest_s(step, device) for step in (products, messages, both))
    return max(together - max(alone, sent), 0.0) / min(alone, sent)


def main() -> None:
    """Prints the constants that rank 0 has measured, as JSON."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl", device_id=device)
    constants = calibrate(device)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(asdict(constants), indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
