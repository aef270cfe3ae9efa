"""Where the time of HetuMoE's layer goes, by GShard's einsums and in ours (Nie et al. 2022). On a GPU:

    python -m benchmarks.papers.hetumoe_shares [--batches 8 32] [--csv FILE] [--plot FILE]

The forward pass of the layer that `hetumoe_layer` times whole, cut in parts by events on the device: the gate (logits,
and in the einsums' way their softmax), top-k with its losses, weights and slots, the layout transform of tokens to
experts (with the permutation's plan, or with the masks), the experts, and the way back. "Before" are the einsums in one
group, "after" our kernels, called one by one: inside the layer some of them are one. There is no all-to-all on one
GPU; between GPUs see `benchmarks/dispatch.py`, between hosts `hetumoe_all_to_all`.

Shapes: T tokens, R rows, D model width.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from foundry_moe_kernels import expert_products, products
from foundry_moe_kernels.topology import topology_from_offsets
from timing import DEVICE, DTYPE
from torch import Tensor

from benchmarks.papers.einsum_dispatch import PARTS, Mark
from benchmarks.papers.hetumoe_layer import GATES, SEQUENCE, SHAPE, Shape, build, by_einsum
from benchmarks.papers.table import measure, parser_of
from foundry_moe.layers.moe import MoELayer
from foundry_moe.ops import PermutePlan, permute, plan_permute, unpermute
from foundry_moe.ops.expert_steps import takes_hopper
from foundry_moe.ops.softmax_topk import softmax_topk
from foundry_moe.ops.sparse_steps import block_of

COLUMNS = ("kind of gate", "batch", "", "ms", *PARTS)


class Clock:
    """Moments of one pass: on a GPU events, behind a wait of some 8 ms that hides the launches."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, torch.cuda.Event | float]] = []
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(15_000_000)
        self.mark("begin")

    def mark(self, part: str) -> None:
        """The end of a part, and the begin of the next."""
        if DEVICE.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.moments.append((part, event))
        else:
            self.moments.append((part, time.perf_counter()))

    def milliseconds(self) -> dict[str, float]:
        """By part."""
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        found = {}
        for (_, before), (part, after) in zip(self.moments, self.moments[1:], strict=False):
            found[part] = 1e3 * (after - before) if isinstance(after, float) else before.elapsed_time(after)
        return found


def experts_of(layer: MoELayer, x_RD: Tensor, plan: PermutePlan) -> Tensor:
    """y_RD of permuted rows, by the kernels that the layer takes here."""
    w1_EFD, w2_EDF = layer.experts.w1_EFD, layer.experts.w2_EDF
    experts, hidden, width = w1_EFD.shape
    if takes_hopper(DEVICE, DTYPE, width, hidden):
        ragged = expert_products.ragged_rows(plan.offsets_E, plan.num_rows)
        _, h_RF = expert_products.up(x_RD, w1_EFD, None, ragged, "gelu")
        return expert_products.rows_product(h_RF[None], (w2_EDF,), ragged, transposed=True)
    topology = topology_from_offsets(plan.offsets_E, plan.num_rows, [hidden] * experts, block_of(DEVICE))
    _, h_RF = products.sdd_act(x_RD, (w1_EFD,), topology, "gelu")
    return products.dsd(h_RF, w2_EDF, topology, trans_b=True)


def by_kernels(layer: MoELayer, x_TD: Tensor, mark: Mark) -> Tensor:
    """y_TD of our layer, part by part."""
    k = layer.config.top_k
    logits_TE = layer.gate.logits(x_TD)
    mark("gate")
    chosen = softmax_topk(logits_TE, k, normalize=k > 1, counted=1, with_balance=True)
    mark("top-k")
    plan = plan_permute(chosen.experts_TK, layer.num_experts)
    x_RD = permute(x_TD, plan)
    mark("layout transform")
    y_RD = experts_of(layer, x_RD, plan)
    mark("experts")
    y_TD = unpermute(y_RD, chosen.weights_TK, plan)
    mark("layout back")
    return y_TD


def parts_ms(run: Callable[[Mark], object], rounds: int) -> dict[str, float]:
    """The median of each part, after three passes that are not counted."""
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for number in range(rounds + 3):
        clock = Clock()
        run(clock.mark)
        for part, ms in clock.milliseconds().items():
            if number >= 3:
                found[part].append(ms)
    return {part: statistics.median(times) for part, times in found.items()}


@torch.no_grad()
def rows_of(batches: list[int], shape: Shape = SHAPE, sequence: int = SEQUENCE, rounds: int = 7) -> list[list[str]]:
    """The table."""
    rows = []
    for gate in GATES:
        layer = build(gate, shape)
        for batch in batches:
            x_TD = torch.randn(batch * sequence, shape[0], device=DEVICE, dtype=DTYPE)
            ways = {
                "before": partial(by_einsum, layer, x_TD, 1),
                "after": partial(by_kernels, layer, x_TD),
            }
            for name, run in ways.items():
                times = parts_ms(run, rounds)
                whole = sum(times.values())
                shares = [f"{times[part] / whole:.1%}" for part in PARTS]
                rows.append([gate, str(batch), name, f"{whole:.3f}", *shares])
    return rows


def plot(rows: list[list[str]], path: Path) -> None:
    """Shares as bars."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    names = [f"{gate} {batch}\n{name}" for gate, batch, name, *_ in rows]
    left = [0.0] * len(rows)
    for column, part in enumerate(PARTS, 4):
        shares = [float(row[column].rstrip("%")) for row in rows]
        axes.barh(names, shares, left=left, label=part)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="% of the forward pass")
    axes.legend(ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.5, 1), fontsize="small")
    figure.savefig(path)


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = parser_of(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    arguments = parser.parse_args()
    measure(COLUMNS, lambda: rows_of(arguments.batches), plot, arguments)


if __name__ == "__main__":
    main()
