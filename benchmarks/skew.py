"""A layer's memory and time where the gate sends more to one GPU than to others, with `mesh.buffer` and without.

    python benchmarks/skew.py --gpus 2 [--tokens 16384] [--width 2048] [--hidden 1024] [--experts 64] [--top-k 8]
    python benchmarks/skew.py --gpus 1 --ranks 8         # the fullest of eight ranks alone: see `skewed_rank.py`

Skew S: the experts of GPU 0 get S times an even share of all choices; with as many as there are GPUs, every token goes
there alone. Peak memory of the fullest GPU beyond weights and tokens; forward and backward.

Shapes: T tokens of a GPU, K choices, D model width, E experts.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from skewed_rank import MirroredDispatcher, choices_of
from torch import Tensor

from foundry_moe.launch.processes import run_processes
from foundry_moe.layers.experts import Experts
from foundry_moe.layers.gates.gate import Choices
from foundry_moe.ops.select_topk import count_choices
from foundry_moe.parallel.all_to_all import AllToAllDispatcher

REPEATS, WARM_UP = 9, 3


def largest(value: float) -> float:
    """Over all ranks."""
    if not dist.is_initialized():
        return value
    tensor = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def sum_over_ranks(counts: Tensor) -> Tensor:
    """Of a rank alone its own: the others have the same."""
    if dist.is_initialized():
        dist.all_reduce(counts)
    return counts


def peak_and_time(step: Callable[[], None], inputs: Iterable[Tensor]) -> tuple[float, float]:
    """MB beyond what is held before, and the median of milliseconds, of the slowest rank."""
    times, peak = [], 0.0
    for _ in range(WARM_UP + REPEATS):
        for tensor in inputs:
            tensor.grad = None
        if dist.is_initialized():
            dist.barrier()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(largest(begin.elapsed_time(end)))
        if len(times) > WARM_UP:
            peak = max(peak, largest(torch.cuda.max_memory_allocated() - before))
    return peak / 1e6, statistics.median(times[WARM_UP:])


def measure(arguments: dict[str, Any], skews: list[float], buffers: list[float]) -> list[tuple[float, ...]]:
    """On each rank: rows of (skew, buffer, rows of the fullest over the mean, rounds, peak MB, ms)."""
    tokens, width, hidden, experts, top_k = (arguments[k] for k in ("tokens", "width", "hidden", "experts", "top_k"))
    ranks = arguments["ranks"]
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    mlp = Experts(
        num_experts=experts // ranks, d_model=width, hidden_size=hidden, activation="swiglu", num_layers=1, **options
    )
    mlp.reset_parameters(seed=0, layer=0)
    weights = tuple(mlp.parameters())

    def timed(skew: float, buffer: float) -> tuple[float, float, float]:
        x_TD = torch.randn(tokens, width, **options, requires_grad=True)
        weights_TK = torch.rand(tokens, top_k, device="cuda", requires_grad=True)
        gradient_TD = torch.randn_like(x_TD)
        experts_TK = choices_of(tokens, experts, top_k, ranks, skew, "cuda")
        choices = Choices(experts_TK=experts_TK, weights_TK=weights_TK)
        sizes: dict[str, Any] = {"num_experts": experts, "buffer": buffer}
        dispatcher = (
            AllToAllDispatcher((dist.group.WORLD,), **sizes)
            if dist.is_initialized()
            else MirroredDispatcher(ranks, **sizes)
        )

        def step() -> None:
            rows = dispatcher.dispatch(x_TD, choices)
            dispatcher.combine(mlp(rows)).backward(gradient_TD)

        rows_P = sum_over_ranks(count_choices(experts_TK, experts)).view(ranks, -1).sum(1).double()
        return (rows_P.max() / rows_P.mean()).item(), *peak_and_time(step, (x_TD, weights_TK, *weights))

    found = []
    for skew in skews:
        for buffer in buffers:
            mlp.most_rounds = 1
            fullest, peak, ms = timed(skew, buffer)
            found.append((skew, buffer, fullest, largest(mlp.most_rounds), peak, ms))
    return found


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("gpus", 2), ("tokens", 16384), ("width", 2048), ("hidden", 1024), ("experts", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--ranks", type=int, help="with --gpus 1: of how many ranks the GPU is the fullest")
    parser.add_argument("--buffers", type=float, nargs="+", default=[math.inf, 2.0, 1.25, 1.0])
    arguments = parser.parse_args()
    if arguments.gpus > 1:
        arguments.ranks = arguments.gpus
    if arguments.ranks is None or arguments.ranks < 2:
        parser.error("one GPU is one of several ranks: --ranks 8")
    ranks = float(arguments.ranks)
    skews = sorted({1.0, (1.0 + ranks) / 2 if ranks < 4 else 2.0, min(4.0, ranks), ranks})
    if arguments.gpus == 1:
        rows = measure(vars(arguments), skews, arguments.buffers)
    else:
        rows = run_processes(
            measure, vars(arguments), skews, arguments.buffers, world_size=arguments.gpus, backend="nccl"
        )  # fmt: skip
    print("| skew | buffer | fullest rows | rounds | peak MB | ms | peak, of an even load's | ms |")
    print("|---|---|---|---|---|---|---|---|")
    *_, even_peak, even_ms = rows[0]
    for skew, buffer, fullest, rounds, peak, ms in rows:
        print(
            f"| {skew:g} | {buffer:g} | {fullest:.2f} | {rounds:g} | {peak:.0f} | {ms:.2f} "
            f"| {peak / even_peak:.2f} | {ms / even_ms:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
