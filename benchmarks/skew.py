"""A layer's memory and time where the router sends more to one GPU than to others, with `mesh.buffer` and without.

    python benchmarks/skew.py --gpus 2 [--tokens 16384] [--width 2048] [--hidden 1024] [--experts 64] [--top-k 8]

Skew S: the experts of GPU 0 get S times an even share of all choices; with as many as there are GPUs, every token goes
there alone. Peak memory of the fullest GPU beyond weights and tokens; forward and backward.

Shapes: T tokens of a GPU, K choices, D model width, E experts.
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.launch.processes import run_processes
from foundry_moe.layers.experts import Experts
from foundry_moe.layers.gates import Choices
from foundry_moe.parallel.all_to_all import FlatAllToAll
from foundry_moe.parallel.all_to_all_dispatcher import AllToAllDispatcher

REPEATS, WARM_UP = 9, 3


def choices_of(tokens: int, experts: int, top_k: int, ranks: int, skew: float) -> Tensor:
    """Different experts for each token, a part `skew / ranks` of the choices on the first rank."""
    local = experts // ranks
    score_TE = torch.rand(tokens, experts, device="cuda")
    crowded = torch.rand(tokens, device="cuda") < (skew - 1) / (ranks - 1)
    score_TE[:, :local] += crowded[:, None].float()  # such a token chooses among the first rank's experts alone
    return score_TE.topk(top_k).indices


def largest(value: float) -> float:
    """Over all ranks."""
    tensor = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def measure(arguments: dict[str, Any], skews: list[float], buffers: list[float]) -> list[tuple[float, ...]]:
    """On each rank: rows of (skew, buffer, rounds, peak MB, ms)."""
    tokens, width, hidden, experts, top_k = (arguments[k] for k in ("tokens", "width", "hidden", "experts", "top_k"))
    ranks = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    mlp = Experts(
        num_experts=experts // ranks, d_model=width, hidden_size=hidden, activation="swiglu", num_layers=1, **options
    )
    mlp.reset_parameters(seed=0, layer=0)
    x_TD = torch.randn(tokens, width, **options, requires_grad=True)
    weights_TK = torch.rand(tokens, top_k, device="cuda", requires_grad=True)
    gradient_TD = torch.randn_like(x_TD)
    found = []
    for skew in skews:
        choices = Choices(experts_TK=choices_of(tokens, experts, top_k, ranks, skew), weights_TK=weights_TK)
        for buffer in buffers:
            dispatcher = AllToAllDispatcher(FlatAllToAll(dist.group.WORLD), num_experts=experts, buffer=buffer)
            times, peak = [], 0.0
            mlp.most_rounds = 1
            for _ in range(WARM_UP + REPEATS):
                for tensor in (x_TD, weights_TK, *mlp.parameters()):
                    tensor.grad = None
                dist.barrier()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                dispatcher.combine(mlp(dispatcher.dispatch(x_TD, choices))).backward(gradient_TD)
                end.record()
                torch.cuda.synchronize()
                times.append(largest(begin.elapsed_time(end)))
                peak = max(peak, largest(torch.cuda.max_memory_allocated() - before))
            rounds = largest(mlp.most_rounds)
            found.append((skew, buffer, rounds, peak / 1e6, statistics.median(times[WARM_UP:])))
    return found


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("gpus", 2), ("tokens", 16384), ("width", 2048), ("hidden", 1024), ("experts", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--buffers", type=float, nargs="+", default=[math.inf, 1.25, 1.0])
    arguments = parser.parse_args()
    skews = sorted({1.0, (1.0 + arguments.gpus) / 2, float(arguments.gpus)})
    rows = run_processes(measure, vars(arguments), skews, arguments.buffers, world_size=arguments.gpus, backend="nccl")
    print("| skew | buffer | rounds | peak MB | ms | peak over even, without rounds |")
    print("|---|---|---|---|---|---|")
    even = rows[0][3]
    for skew, buffer, rounds, peak, ms in rows:
        print(f"| {skew:g} | {buffer:g} | {rounds:g} | {peak:.0f} | {ms:.2f} | {peak / even:.2f} |")


if __name__ == "__main__":
    main()
