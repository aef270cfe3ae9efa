"""Dispatch and combine on GPUs of one host, beside NCCL's own all-to-all of the same bytes.

    python benchmarks/dispatch.py [--gpus 4] [--tokens 16384] [--width 2048] [--experts 64] [--top-k 8]

Prints, per GPU: bytes that leave it, milliseconds of NCCL's even all-to-all of that size, of the exchange alone
(uneven rows there and back), and of all of dispatch and combine around experts that do nothing; forward, and
forward with backward. Bandwidth is bytes that leave a GPU over time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.ops.routes import Routes
from foundry_moe.parallel.dispatch import ExpertDispatch
from foundry_moe.parallel.exchange import FlatExchange, Splits
from foundry_moe.parallel.launch import run_processes

ROUNDS, WARM_UP = 30, 10


def _milliseconds(step: Callable[[], object]) -> float:
    """Median over rounds of the slowest rank's time."""
    times = []
    for _ in range(WARM_UP + ROUNDS):
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(slowest.item())
    return statistics.median(times[WARM_UP:])


class _Recorder(FlatExchange):
    """Keeps the splits of the last exchange."""

    def agree(self, counts_P2: Tensor) -> Splits:
        self.last = super().agree(counts_P2)
        return self.last


def _same(x_QD: Tensor, weights_QK: Tensor, routes: Routes) -> Tensor:
    return x_QD * weights_QK.sum(1, keepdim=True).to(x_QD.dtype)


def measure(tokens: int, width: int, num_experts: int, top_k: int) -> dict[str, float]:
    """One rank's part; equal on all ranks."""
    torch.manual_seed(dist.get_rank())
    exchange = _Recorder(dist.group.WORLD)
    dispatch = ExpertDispatch(exchange)
    x_TD = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights_TK = torch.rand(tokens, top_k, device="cuda", requires_grad=True)
    experts_TK = torch.rand(tokens, num_experts, device="cuda").topk(top_k).indices
    y_TD = dispatch(x_TD, weights_TK, experts_TK, num_experts, _same)
    splits = exchange.last
    to = splits.stages[0][0]
    leaving = sum(n for rank, n in enumerate(to) if rank != exchange.rank) * width * 2
    even = torch.empty(splits.sent // exchange.size * exchange.size, width, device="cuda", dtype=torch.bfloat16)
    received = torch.empty_like(even)
    rows = torch.randn(splits.sent, width, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn_like(y_TD)

    def forward() -> Tensor:
        return dispatch(x_TD, weights_TK, experts_TK, num_experts, _same)

    return {
        "MB leaving a GPU, one way": leaving / 1e6,
        "NCCL all-to-all, one way": _milliseconds(lambda: dist.all_to_all_single(received, even)),
        "exchange of rows, there and back": _milliseconds(lambda: exchange.back(exchange.there(rows, splits), splits)),
        "dispatch and combine, forward": _milliseconds(forward),
        "dispatch and combine, forward and backward": _milliseconds(lambda: forward().backward(gradient)),
    }


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    arguments = parser.parse_args()
    sizes = (arguments.tokens, arguments.width, arguments.experts, arguments.top_k)
    found = run_processes(measure, *sizes, world_size=arguments.gpus, backend="nccl")
    one_way = found.pop("MB leaving a GPU, one way")
    print(f"{arguments.gpus} GPUs, {one_way:.0f} MB leave each, one way")
    base = one_way / found["NCCL all-to-all, one way"]
    for name, ms in found.items():
        ways = 4 if "backward" in name else 2 if "and" in name else 1
        speed = ways * one_way / ms
        print(f"{name:45}{ms:9.3f} ms {speed:8.0f} GB/s {speed / base:7.0%} of NCCL")


if __name__ == "__main__":
    main()
