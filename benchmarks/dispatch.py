"""Dispatch and combine on GPUs of one host, beside NCCL's own all-to-all.

    python benchmarks/dispatch.py [--gpus 4] [--tokens 16384] [--width 2048] [--experts 64] [--top-k 8]

A row of a token leaves once for each rank that has an expert of it, while a plain exchange sends one row for each
choice. So there are two readings, both beside NCCL's even all-to-all in the same run:

- of the bytes: those that leave, over the time, as a share of the bandwidth that NCCL shows for as many;
- of the work: the time in which NCCL does a plain exchange, one row for each choice, there and back, over ours.

`between ranks` moves tokens to their ranks and back; `to experts' rows` also copies them to the rows of each choice
and sums these rows, weighted, which a plain exchange has done by then. Times are medians of the slowest rank.

The last line is of a whole layer with block-sparse experts (`--hidden`, swiglu).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.launch.processes import run_processes
from foundry_moe.layers.dispatch import Dispatched
from foundry_moe.layers.experts import Experts
from foundry_moe.layers.gates.gate import Choices
from foundry_moe.ops.permute import permute, unpermute
from foundry_moe.parallel.all_to_all import AllToAllDispatcher

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


class _Nothing(torch.autograd.Function):
    """Experts that return what they get, and cost no time; weights get some gradient, so that it travels."""

    @staticmethod
    def forward(ctx: Any, x_QD: Tensor, weights_QK: Tensor) -> Tensor:
        ctx.save_for_backward(weights_QK)
        return x_QD.view_as(x_QD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.saved_tensors[0]


# what happens between dispatch and combine
Stage = Callable[[Dispatched], Dispatched]


def _between_ranks(rows: Dispatched) -> Dispatched:
    rows = rows.receive()
    return rows.send_back(_Nothing.apply(rows.x, rows.weights))


def _to_rows(rows: Dispatched) -> Dispatched:
    rows = rows.receive()
    assert rows.plan is not None
    return rows.send_back(unpermute(permute(rows.x, rows.plan), rows.weights, rows.plan))


def measure(tokens: int, width: int, num_experts: int, top_k: int) -> dict[str, float]:
    """One rank's part; equal on all ranks."""
    torch.manual_seed(dist.get_rank())
    ranks = dist.get_world_size()
    dispatcher = AllToAllDispatcher((dist.group.WORLD,), num_experts=num_experts)
    x_TD = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights_TK = torch.rand(tokens, top_k, device="cuda", requires_grad=True)
    experts_TK = torch.rand(tokens, num_experts, device="cuda").topk(top_k).indices
    gradient = torch.randn_like(x_TD)

    choices = Choices(experts_TK=experts_TK, weights_TK=weights_TK)

    def forward(experts: Stage) -> Tensor:
        return dispatcher.combine(experts(dispatcher.dispatch(x_TD, choices)))

    exchange = dispatcher.dispatch(x_TD, choices).exchange
    to, _ = exchange.stages[0]
    leaving = sum(n for rank, n in enumerate(to) if rank != dist.get_rank())
    rows = torch.randn(exchange.sent, width, device="cuda", dtype=torch.bfloat16)

    def there_and_back() -> None:
        received = dispatcher.start(rows, exchange, back=False)()
        dispatcher.start(received, exchange, back=True)()

    def even(count: int) -> float:
        most = torch.tensor(count, device="cuda")
        dist.all_reduce(most, op=dist.ReduceOp.MAX)  # the same on all ranks
        count = int(most.item())
        sent = torch.randn(count // ranks * ranks, width, device="cuda", dtype=torch.bfloat16)
        received = torch.empty_like(sent)
        return _milliseconds(lambda: dist.all_to_all_single(received, sent))

    found = {
        "rows sent": float(exchange.sent),
        "MB leaving": leaving * width * 2 / 1e6,
        "NCCL": even(exchange.sent),
        "NCCL plain": even(tokens * top_k),
        "exchange": _milliseconds(there_and_back),
    }
    for name, experts in (("between ranks", _between_ranks), ("to experts' rows", _to_rows)):
        found[f"{name}, forward"] = _milliseconds(lambda e=experts: forward(e))  # type: ignore[misc]
        found[f"{name}, forward and backward"] = _milliseconds(lambda e=experts: forward(e).backward(gradient))  # type: ignore[misc]
    w1_DF, w2_FD = (
        (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
        for shape in ((width, 2 * width), (2 * width, width))
    )

    def shared() -> Tensor:
        return torch.relu(x_TD @ w1_DF) @ w2_FD

    def with_shared(meanwhile: bool) -> None:
        if meanwhile:
            outputs = _to_rows(dispatcher.dispatch(x_TD, choices))
            shared_TD = shared()
            y_TD = dispatcher.combine(outputs) + shared_TD
        else:
            y_TD = forward(_to_rows) + shared()
        y_TD.backward(gradient)

    found["shared expert alone"] = _milliseconds(lambda: shared().backward(gradient))
    found["shared expert after"] = _milliseconds(lambda: with_shared(False))
    found["shared expert meanwhile"] = _milliseconds(lambda: with_shared(True))
    return found


def measure_layer(tokens: int, width: int, num_experts: int, top_k: int, hidden: int) -> tuple[float, float]:
    """(forward, forward and backward) of a layer with experts, in ms; equal on all ranks."""
    torch.manual_seed(dist.get_rank())
    experts = Experts(
        num_experts=num_experts // dist.get_world_size(),
        d_model=width,
        hidden_size=hidden,
        activation="swiglu",
        num_layers=1,
        device="cuda",
        dtype=torch.bfloat16,
    )
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.02)
    x_TD = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights_TK = torch.rand(tokens, top_k, device="cuda", requires_grad=True)
    experts_TK = torch.rand(tokens, num_experts, device="cuda").topk(top_k).indices
    gradient = torch.randn_like(x_TD)

    choices = Choices(experts_TK=experts_TK, weights_TK=weights_TK)

    dispatcher = AllToAllDispatcher((dist.group.WORLD,), num_experts=num_experts)

    def layer(backward: bool) -> None:
        y_TD = dispatcher.combine(experts(dispatcher.dispatch(x_TD, choices)))
        if backward:
            for tensor in (x_TD, weights_TK, *experts.parameters()):
                tensor.grad = None
            y_TD.backward(gradient)

    return _milliseconds(lambda: layer(False)), _milliseconds(lambda: layer(True))


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    arguments = parser.parse_args()
    for tokens in arguments.tokens:
        sizes = (tokens, arguments.width, arguments.experts, arguments.top_k)
        found = run_processes(measure, *sizes, world_size=arguments.gpus, backend="nccl")
        print(format_table(found, arguments.gpus, tokens, arguments.top_k), flush=True)
        layer = run_processes(measure_layer, *sizes, arguments.hidden, world_size=arguments.gpus, backend="nccl")
        print("a whole layer: forward {:.3f} ms, forward and backward {:.3f} ms".format(*layer), flush=True)


def format_table(found: dict[str, float], gpus: int, tokens: int, top_k: int) -> str:
    """One size as text."""
    rows, leaving, one_way, plain = (found.pop(name) for name in ("rows sent", "MB leaving", "NCCL", "NCCL plain"))
    alone, after, meanwhile = (found.pop(f"shared expert {when}") for when in ("alone", "after", "meanwhile"))
    lines = [
        f"{gpus} GPUs, {tokens} tokens each, top {top_k}: {rows / tokens:.2f} rows per token sent, {leaving:.0f} MB "
        "leave a GPU, one way",
        f"NCCL's even all-to-all of as much, one way: {one_way:.3f} ms, {leaving / one_way:.0f} GB/s; of one row for "
        f"each choice: {plain:.3f} ms",
        f"{'':44}{'ms':>8}{'GB/s':>7}{'bytes, of NCCL':>16}{'work, of NCCL':>15}",
    ]
    for name, ms in found.items():
        ways = 4 if "backward" in name else 2
        lines.append(
            f"{name:44}{ms:8.3f}{ways * leaving / ms:7.0f}{ways * one_way / ms:16.0%}{ways * plain / ms:15.0%}"
        )
    lines.append(
        f"to experts' rows, forward and backward, with a shared expert of {alone:.3f} ms: {after:.3f} ms one after the "
        f"other, {meanwhile:.3f} ms with it computed while results travel"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
