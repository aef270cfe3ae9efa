"""HetuMoE's kernels (Nie et al. 2022): top-k over k and tokens, layout transform over the batch. On a GPU:

    python -m benchmarks.papers.hetumoe_kernels [--csv FILE] [--plot FILE]

The paper: top-k 25% faster than PyTorch's for small k, the layout transform 26% faster than Tutel's. Here top-k with
its softmax beside `torch.topk` and `torch.softmax`, 16 and 64 experts. The layout transform of top-1 is one copy of
each token, 2048 wide in bf16: ours to rows sorted by expert, beside PyTorch's gather of the same rows, and beside the
copy into slots of capacity 1 (Tutel's layout: by a kernel of ours, and by `index_copy_` into zeros). Times are of the
copies alone, of 20 in a graph, without the plans that say where rows go.

Shapes: T tokens, E experts, D model width, R rows, K choices, C slots of an expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from foundry_moe_kernels import padded, permute, permute_plan
from foundry_moe_kernels.select_topk import topk
from routing import graph_ms
from timing import DEVICE, DTYPE, queued_ms
from torch import Tensor

from benchmarks.papers.table import measure, parser_of
from foundry_moe.ops.padded import capacity_of

COLUMNS = ("kernel", "tokens", "experts", "k", "peer us", "ours us", "ours is times as fast", "the paper")
TOKENS, KS, TOPK_EXPERTS = (8192, 32768, 131072), (1, 2, 4, 8), (16, 64)
WIDTH, EXPERTS = 2048, 16
TOPK, GATHER, SLOTS = "top-k and softmax, torch", "layout transform, torch's gather", "layout transform, slots by torch"
OUR_SLOTS = "layout transform, slots by our kernel"


def microseconds(run: Callable[[], object]) -> float:
    """Of one call."""
    return 1e3 * (graph_ms(run) if DEVICE.type == "cuda" else queued_ms(run, DEVICE, 1))


def torch_topk(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What `topk(scores_TE, k, softmax="chosen")` gives, by torch."""
    values_TK, experts_TK = torch.topk(scores_TE, k)
    return torch.softmax(values_TK, -1), experts_TK


def layouts(tokens: int, width: int, experts: int) -> dict[str, Callable[[], Tensor]]:
    """Copies of top-1's tokens: `ours` and `GATHER` give [T, D] sorted by expert, the others [E * C, D] with zeros."""
    x_TD = torch.randn(tokens, width, device=DEVICE, dtype=DTYPE)
    experts_TK = torch.randint(experts, (tokens, 1), device=DEVICE)
    _, _, offsets_E, source_R, row_TK = permute_plan.plan_permute(experts_TK, experts)
    token_R = source_R.long()
    capacity = capacity_of(1.0, tokens, 1, experts)
    _, slot_TK, slot_source_R = padded.Sorted(experts_TK, experts).assign_slots(capacity)
    kept_T = (slot_TK[:, 0] >= 0).nonzero()[:, 0]
    slot_T = slot_TK[kept_T, 0].long()
    slots_RD = torch.empty(experts * capacity, width, device=DEVICE, dtype=DTYPE)
    return {
        "ours": lambda: permute.permute(x_TD, row_TK, offsets_E, zero_tail=False),
        GATHER: lambda: x_TD[token_R],
        SLOTS: lambda: slots_RD.zero_().index_copy_(0, slot_T, x_TD[kept_T]),
        OUR_SLOTS: lambda: padded.gather(x_TD, slot_source_R, 1),
    }


def rows_of(
    tokens: Sequence[int] = TOKENS,
    ks: Sequence[int] = KS,
    topk_experts: Sequence[int] = TOPK_EXPERTS,
    width: int = WIDTH,
    experts: int = EXPERTS,
) -> list[list[str]]:
    """The table."""
    rows = []
    for count, k, number in itertools.product(topk_experts, ks, tokens):
        scores_TE = torch.randn(number, count, device=DEVICE)
        theirs = microseconds(lambda: torch_topk(scores_TE, k))  # noqa: B023
        ours = microseconds(lambda: topk(scores_TE, k, softmax="chosen"))  # noqa: B023
        rows.append([TOPK, str(number), str(count), str(k), *_compared(theirs, ours), "1.25" if k <= 2 else ""])
    for number in tokens:
        times = {name: microseconds(run) for name, run in layouts(number, width, experts).items()}
        for name in (GATHER, SLOTS, OUR_SLOTS):
            paper = "1.26" if name == OUR_SLOTS else ""
            rows.append([name, str(number), str(experts), "1", *_compared(times[name], times["ours"]), paper])
    return rows


def _compared(theirs: float, ours: float) -> list[str]:
    return [f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.2f}"]


def plot(rows: list[list[str]], path: Path) -> None:
    """Speedups over the tokens: top-k by k, and the layout transform by peer."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    lines: dict[tuple[bool, str], list[tuple[int, float]]] = {}
    for name, number, count, k, _, _, speed, _ in rows:
        label = f"{count} experts, k {k}" if name == TOPK else name.removeprefix("layout transform, ")
        lines.setdefault((name == TOPK, label), []).append((int(number), float(speed)))
    for (is_topk, label), points in lines.items():
        (left if is_topk else right).plot(*zip(*points, strict=True), marker="o", label=label)
    for axes, title in ((left, "top-k and softmax"), (right, "layout transform")):
        axes.axhline(1, color="grey", linewidth=1)
        axes.set(title=title, xlabel="tokens", xscale="log", ylim=(0, None))
        axes.legend(fontsize="x-small")
    left.set(ylabel="the peer's time over ours")
    figure.savefig(path)


def main() -> None:
    """Runs from the command line; see the text at the top."""
    arguments = parser_of(__doc__).parse_args()
    measure(COLUMNS, rows_of, plot, arguments)


if __name__ == "__main__":
    main()
