"""What `mesh.hot_experts` gains: the fullest of P ranks under Zipf's law, with copies of hot experts and without.

    python benchmarks/hot_experts.py [--ranks 8] [--zipf 1.5] [--copies 0 4 8] [--models OLMoE,Qwen3,Mixtral]

One GPU computes what the fullest rank would: it plans and gathers its own tokens, computes every row that all ranks
would send to it, forward and backward, and sums its own results. Messages of tokens are left out; they shrink too. The
copies' bytes, weights there and gradients back, are added at NCCL's rate between GPUs of one host
(`benchmarks/dispatch.py`).

Shapes: T tokens of a rank, K choices, E experts, P ranks, N slots for copies, Q tokens received, D model width.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from skewed_rank import zipf_choices_of
from torch import Tensor

from foundry_moe.layers.dispatch import Dispatched, Dispatcher
from foundry_moe.layers.experts import Experts
from foundry_moe.layers.gates.gate import Choices
from foundry_moe.layers.hot_experts import HotExperts
from foundry_moe.ops import plan_permute
from foundry_moe.ops.dispatch_plan import gather_rows, plan_dispatch, sum_rows
from foundry_moe.ops.select_topk import count_choices
from foundry_moe.parallel import hot_experts

MODELS = {  # T, E, K, D, F
    "OLMoE": (16384, 64, 8, 2048, 1024),
    "Qwen3": (16384, 128, 8, 2048, 768),
    "Mixtral": (16384, 8, 2, 4096, 14336),
}
BYTES_PER_S = 178e9  # NCCL's all-to-all, 64 MB a GPU, four H200s of one host
REPEATS, WARM_UP = 12, 4


def no_message(rows: Tensor, sent: list[int], received: list[int], group: Any, into: Tensor | None = None) -> Any:
    """In place of the all-to-all of weights: its bytes are written, and nothing is sent."""
    output = rows.new_empty(sum(received), *rows.shape[1:]) if into is None else into
    output.zero_()
    return lambda: output


def milliseconds(step: Callable[[], None]) -> float:
    times = []
    for _ in range(WARM_UP + REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[WARM_UP:])


def measure(model: str, ranks: int, zipf: float, copies: int) -> tuple[float, float, float]:
    """Rows of the fullest rank over the mean, its milliseconds, and megabytes of copies."""
    tokens, experts, top_k, width, hidden = MODELS[model]
    torch.manual_seed(1)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    chosen_P = [zipf_choices_of(tokens, experts, top_k, zipf, "cuda") for _ in range(ranks)]
    loads = torch.stack([count_choices(experts_TK, experts) for experts_TK in chosen_P]).sum(0).tolist()
    hot_P = [HotExperts(num_experts=experts, ranks=ranks, rank=rank, copies=copies) for rank in range(ranks)]
    weights_TK = torch.rand(tokens, top_k, device="cuda")
    slots_P = []
    for hot, experts_TK in zip(hot_P, chosen_P, strict=True):
        hot.after_step(loads)
        slots_P.append(hot.renumber(Choices(experts_TK=experts_TK, weights_TK=weights_TK)).experts_TK)
    local = experts // ranks + copies
    rows_P = torch.bincount(torch.cat(slots_P).flatten() // local, minlength=ranks).double()
    fullest = int(rows_P.argmax())
    received = []  # of every rank: the tokens with a choice of the fullest one, others marked -1
    for slots_TK in slots_P:
        here_TK = slots_TK // local == fullest
        received.append(torch.where(here_TK, slots_TK - fullest * local, -1)[here_TK.any(1)])
    slots_QK = torch.cat(received).int()

    mlp = Experts(num_experts=experts // ranks, d_model=width, hidden_size=hidden, activation="swiglu", num_layers=1,
                  **options)  # fmt: skip
    mlp.reset_parameters(seed=0, layer=0)
    if copies:
        mlp.with_copies = partial(hot_experts.append_copies, hot_P[fullest], None)  # type: ignore[arg-type]
    x_QD = torch.randn(len(slots_QK), width, **options, requires_grad=True)
    weights_QK = torch.rand(slots_QK.shape, device="cuda", requires_grad=True)
    own_TD, gradient_QD = torch.randn(tokens, width, **options), torch.randn_like(x_QD)
    dispatcher, used = Dispatcher(local), int((slots_QK >= 0).sum())

    def step() -> None:
        for tensor in (x_QD, weights_QK, *mlp.parameters()):
            tensor.grad = None
        _, assign_rows = plan_dispatch(slots_P[fullest], weights_TK, local_experts=local, ranks=ranks)
        row_TC, _ = assign_rows()
        sent_SD = gather_rows(own_TD, row_TC)
        rows = Dispatched(x_QD, weights_QK, plan_permute(slots_QK, local, used))
        dispatcher.combine(mlp(rows, dispatcher)).backward(gradient_QD)
        sum_rows(sent_SD, row_TC)
        sum_rows(gather_rows(own_TD, row_TC), row_TC)  # the backward pass: gradients there and back

    with mock.patch.object(hot_experts, "all_to_all", no_message):
        ms = milliseconds(step)
    traffic = [hot.traffic for hot in hot_P if hot.traffic is not None]
    most = max((max(sum(map(len, t.sent_P)), sum(t.received_P)) for t in traffic), default=0)
    return (rows_P.max() / rows_P.mean()).item(), ms, most * 3 * width * hidden * 2 * 2 / 1e6


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.5], help="exponents")
    parser.add_argument(
        "--copies", type=int, nargs="+", default=[0, 4, 8], help="mesh.hot_experts; the first is the peer"
    )
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    print("| model | Zipf | copies | fullest over mean | ms | copies' MB | with copies' ms | speed |")
    print("|---|---|---|---|---|---|---|---|")
    for model in arguments.models.split(","):
        for zipf in arguments.zipf:
            peer = 0.0
            for copies in arguments.copies:
                over_mean, ms, megabytes = measure(model, arguments.ranks, zipf, min(copies, MODELS[model][1]))
                whole = ms + megabytes * 1e9 / BYTES_PER_S
                peer = peer or whole
                print(
                    f"| {model} | {zipf:g} | {copies} | {over_mean:.2f} | {ms:.2f} | {megabytes:.0f} | {whole:.2f} "
                    f"| {peer / whole:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
