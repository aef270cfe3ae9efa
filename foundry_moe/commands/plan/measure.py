"""Measures the rates of one GPU or CPU (products, experts, attention, memory, launches) and of messages between GPUs.

Every timed product is preceded by a copy of similar duration, as in a training step: back-to-back products draw so much
power that the chip lowers its clock. Bytes of a message are those that leave one GPU; its time is the slowest rank's.

Shapes: T tokens, D model width, F expert width, E experts, K choices, H heads, S sequence.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

ROUNDS, WARM_UP = 12, 3
CPU_ROUNDS = 5
LINK_ROUNDS = 10
GPU_BYTES, CPU_BYTES = (2**20, 2**24, 2**27), (2**12, 2**17, 2**21)  # of one GPU's buffer


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured. tokens: T. experts: (D, F, E, K, T). attention: (sequences, H, S, head width)."""

    tokens: int
    widths: tuple[int, ...]
    experts: tuple[tuple[int, int, int, int, int], ...]
    attention: tuple[int, int, int, int]
    copied_bytes: int
    launches: int


GPU = Sizes(
    tokens=16384,
    widths=(1024, 2048, 4096, 8192),
    experts=((2048, 768, 128, 8, 16384), (2048, 1024, 64, 8, 16384), (6144, 10752, 16, 4, 8192)),
    attention=(4, 16, 4096, 128),
    copied_bytes=2**30,
    launches=2000,
)
CPU = Sizes(
    tokens=256,
    widths=(128, 512),
    experts=((128, 128, 4, 2, 128), (128, 512, 4, 2, 128)),
    attention=(1, 4, 256, 32),
    copied_bytes=2**24,
    launches=500,
)


def clock(device: torch.device) -> float:
    """Seconds, after the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _median_s(step: Callable[[], object], device: torch.device, between: Callable[[], object]) -> float:
    """Median time of a step, with `between` before each."""
    if device.type != "cuda":
        found = []
        for _ in range(WARM_UP + CPU_ROUNDS):
            began = time.perf_counter()
            step()
            found.append(time.perf_counter() - began)
        return statistics.median(found[WARM_UP:])
    events = []
    for _ in range(WARM_UP + ROUNDS):
        between()
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        step()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events[WARM_UP:]) / 1e3


class Measured:
    """One device's rates, one method each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sizes = GPU if device.type == "cuda" else CPU
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.source = torch.empty(self.sizes.copied_bytes // 4, device=device).normal_()
        self.target = torch.empty_like(self.source)

    def _new(self, *shape: int, grad: bool = False) -> Tensor:
        x = torch.randn(*shape, device=self.device, dtype=self.dtype) * shape[-1] ** -0.5
        return x.requires_grad_(grad)

    def _copy(self) -> None:
        self.target.copy_(self.source)

    def _seconds(self, step: Callable[[], object]) -> float:
        return _median_s(step, self.device, self._copy)

    def memory_bytes_per_s(self) -> float:
        """Read and written by a copy."""
        return 2 * self.sizes.copied_bytes / self._seconds(self._copy)

    def dense_flops_per_s(self) -> dict[str, float]:
        """A product's forward pass and its two of the backward pass, by width."""
        found = {}
        for width in self.sizes.widths:
            x, w, dy = self._new(self.sizes.tokens, width), self._new(width, width), self._new(self.sizes.tokens, width)
            seconds = self._seconds(lambda x=x, w=w, dy=dy: (x @ w.T, dy @ w, dy.T @ x))  # type: ignore[misc]
            found[str(width)] = 6 * self.sizes.tokens * width**2 / seconds
        return found

    def expert_flops_per_s(self) -> dict[str, float]:
        """Experts with even loads, from routing to combine, forward and backward, by an expert's width."""
        from foundry_moe.ops import expert_mlp, plan_permute
        from foundry_moe.ops.softmax_topk import softmax_topk

        found = {}
        backend = "blocksparse" if self.device.type == "cuda" else "reference"
        for d, f, e, k, tokens in self.sizes.experts:
            x, dy = self._new(tokens, d, grad=True), self._new(tokens, d)
            logits = torch.randn(tokens, e, device=self.device).requires_grad_()
            w1, v1, w2 = (self._new(e, *size, grad=True) for size in ((f, d), (f, d), (d, f)))
            leaves = (x, logits, w1, v1, w2)

            def step(x=x, dy=dy, logits=logits, w1=w1, v1=v1, w2=w2, e=e, k=k, leaves=leaves) -> None:  # type: ignore[no-untyped-def]
                for leaf in leaves:
                    leaf.grad = None
                chosen = softmax_topk(logits, k, normalize=True, statistics=False)
                plan = plan_permute(chosen.experts_TK, e)
                weights = chosen.weights_TK
                expert_mlp(x, weights, plan, w1, v1, w2, activation="silu", backend=backend, memory="save").backward(dy)

            try:
                found[str(f)] = 18 * tokens * k * d * f / self._seconds(step)
            except torch.cuda.OutOfMemoryError:  # a smaller GPU goes without the widest
                continue
        return found

    def attention_flops_per_s(self) -> float:
        """Causal attention, counted as the planner does: 6 s d a token, forward and backward."""
        sequences, heads, s, width = self.sizes.attention
        q, k, v, dy = (self._new(sequences, heads, s, width, grad=index < 3) for index in range(4))

        def step() -> None:
            q.grad = k.grad = v.grad = None
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(dy)

        return 6.0 * sequences * s * s * heads * width / self._seconds(step)

    def launch_s(self) -> float:
        """The host's time for one small operation."""
        x = torch.zeros(1, device=self.device)
        found = []
        for _ in range(5):
            clock(self.device)
            began = time.perf_counter()
            for _ in range(self.sizes.launches):
                x.add_(1.0)
            found.append((time.perf_counter() - began) / self.sizes.launches)
        return min(found)


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


def _slowest_s(step: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(WARM_UP + LINK_ROUNDS):
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
            points.setdefault(name, []).append((leaves, _slowest_s(message, device)))
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

    alone, sent, together = (_slowest_s(step, device) for step in (products, messages, both))
    # what the longer of the two takes is there without contention
    return max(together - max(alone, sent), 0.0) / min(alone, sent)
