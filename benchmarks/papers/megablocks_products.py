"""Block-sparse products beside cuBLAS (MegaBlocks, Gale et al. 2022, figure 9), and every transpose of each. On a GPU:

    python -m benchmarks.papers.megablocks_products [--cases XS Small Medium] [--csv FILE] [--plot FILE]

The paper's 18 problems are the six products of MoE-XS, Small and Medium with an even load: 98.6% of cuBLAS's batched
products, with a deviation of 4%, 91% at least and 104% at most, on an A100. Six further transposes, which no layer
needs, complete SDD, DSD and DDS. Two letters name the operands: n as it is, t transposed. `block-sparse` are the
kernels of any chip; `Hopper` the ragged ones that layers use there.

Shapes: R rows, D model width, F expert width, E experts, C = E * F columns of S.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from foundry_moe_kernels import products
from foundry_moe_kernels.topology import topology_from_offsets
from matmul import CASES, PAPER, new, variants
from timing import DEVICE, in_processes, in_turn_ms
from torch import Tensor

from benchmarks.papers.table import measure, parser_of, spread
from foundry_moe.ops.sparse_steps import block_of

LAYER = {
    "fwd1": "SDD nt",
    "dgrad2": "SDD nn",
    "fwd2": "DSD nt",
    "dgrad1": "DSD nn",
    "wgrad1": "DSD tn",
    "wgrad2": "DDS tn",
}
COLUMNS = (
    "case",
    "product",
    "in a layer",
    "cuBLAS TFLOP/s",
    "block-sparse",
    "of cuBLAS",
    "Hopper",
    "of cuBLAS, Hopper",
)
Runs = dict[str, Callable[[], Tensor]]


def other_transposes(case: str) -> dict[str, Runs]:
    """The six that a layer has no use for, as `bmm` and `sparse`; op(S) has S's own values throughout."""
    rows, d, f, experts = CASES[case]
    each = rows // experts
    offsets_E = torch.full((experts,), each, device=DEVICE).cumsum(0).int()
    topology = topology_from_offsets(offsets_E, rows, [f] * experts, block_of(DEVICE))
    x_DR, s_RF, w_EFD, w_EDF, w_DC = (
        new(d, rows),
        new(rows, f),
        new(experts, f, d),
        new(experts, d, f),
        new(d, experts * f),
    )
    w_CD = w_EFD.view(experts * f, d)
    x_EDr, s_ErF = x_DR.view(d, experts, each).transpose(0, 1), s_RF.view(experts, each, f)
    by_expert_EDF = w_DC.view(d, experts, f).transpose(0, 1)
    out_EFD, out_EDF = torch.empty_like(w_EFD), torch.empty_like(w_EDF)
    return {
        "SDD tn": {
            "bmm": lambda: torch.bmm(x_EDr.mT, w_EDF),
            "sparse": lambda: products.sdd(x_DR, w_EDF, topology, trans_a=True, zero_tail=False),
        },
        "SDD tt": {
            "bmm": lambda: torch.bmm(x_EDr.mT, w_EFD.mT),
            "sparse": lambda: products.sdd(x_DR, w_EFD, topology, trans_a=True, trans_b=True, zero_tail=False),
        },
        "DSD tt": {
            "bmm": lambda: torch.bmm(s_ErF.mT, x_EDr.mT),
            "sparse": lambda: products.dsd(
                s_RF, x_DR, topology, trans_s=True, trans_b=True, stacked=True, out=out_EFD
            ),
        },
        "DDS nn": {
            "bmm": lambda: torch.bmm(x_EDr, s_ErF),
            "sparse": lambda: products.dds(x_DR, s_RF, topology, stacked=True, out=out_EDF),
        },
        "DDS nt": {
            "bmm": lambda: torch.bmm(by_expert_EDF, s_ErF.mT),
            "sparse": lambda: products.dds(w_DC, s_RF, topology, trans_s=True),
        },
        "DDS tt": {
            "bmm": lambda: torch.bmm(w_EFD.mT, s_ErF.mT),
            "sparse": lambda: products.dds(w_CD, s_RF, topology, trans_a=True, trans_s=True),
        },
    }  # fmt: skip


def all_products(case: str) -> dict[str, Runs]:
    """Every transpose of SDD, DSD and DDS, by who computes it; `ours` for a layer's, on a Hopper."""
    ways = variants(case, "uniform")
    layer = {kind: {way: runs[name] for way, runs in ways.items()} for name, kind in LAYER.items()}
    return dict(sorted({**layer, **other_transposes(case)}.items(), key=lambda item: (item[0][:3] != "SDD", item[0])))


def compile_some(index: int, workers: int, cases: list[str]) -> None:
    """In a process of its own: see `in_processes`."""
    for case in cases:
        for number, runs in enumerate(all_products(case).values()):
            if number % workers == index:
                for way in runs.keys() & {"sparse", "ours"}:
                    runs[way]()
    torch.cuda.synchronize()


def rows_of(cases: list[str]) -> list[list[str]]:
    """The table."""
    names = {kind: name for name, kind in LAYER.items()}
    rows = []
    for case in cases:
        size, d, f, _ = CASES[case]
        for kind, runs in all_products(case).items():
            wanted = {way: run for way, run in runs.items() if way != "grouped"}
            rates = dict(
                zip(wanted, (2e-9 * size * d * f / ms for ms in in_turn_ms(list(wanted.values()), 15)), strict=True)
            )
            shown = [case, kind, names.get(kind, ""), f"{rates['bmm']:.0f}"]
            for way in ("sparse", "ours"):
                shown += [f"{rates[way]:.0f}", f"{rates[way] / rates['bmm']:.3f}"] if way in rates else ["", ""]
            rows.append(shown)
    return rows


def summary(rows: list[list[str]]) -> list[str]:
    """Lines beside the paper's own figure."""
    layer = [row for row in rows if row[2]]
    lines = ["of cuBLAS, the paper, A100: 98.6% +- 4% (91% to 104%)"]
    lines += [f"of cuBLAS, block-sparse, {len(layer)} problems: {spread([float(row[5]) for row in layer])}"]
    if layer[0][7]:
        lines += [f"of cuBLAS, Hopper, {len(layer)} problems: {spread([float(row[7]) for row in layer])}"]
    for kind in ("SDD", "DSD", "DDS"):
        of = [float(row[5]) for row in rows if row[1].startswith(kind)]
        lines.append(f"of cuBLAS, block-sparse, all transposes of {kind}: {spread(of)}")
    return lines


def plot(rows: list[list[str]], path: Path) -> None:
    """Figure 9: each problem's share of cuBLAS."""
    from matplotlib import pyplot

    layer = [row for row in rows if row[2]]
    figure, axes = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    for column, label in ((5, "block-sparse"), (7, "Hopper")):
        axes.plot([float(row[column] or "nan") for row in layer], marker="o", linestyle="", label=label)
    axes.axhline(0.986, color="grey", linewidth=1, label="the paper's mean, A100")
    axes.set_xticks(range(len(layer)), [f"{row[0]} {row[1]}" for row in layer], rotation=90)
    axes.set(ylabel="of cuBLAS", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(PAPER), choices=list(CASES))
    arguments = parser.parse_args()
    workers = 12
    in_processes(compile_some, ((index, workers, arguments.cases) for index in range(workers)))
    measure(COLUMNS, lambda: rows_of(arguments.cases), plot, arguments, summary)


if __name__ == "__main__":
    main()
