"""What the sparse format costs (MegaBlocks, Gale et al. 2022, section 5.1). On a GPU:

    python -m benchmarks.papers.megablocks_indices [--cases XS Small Medium]

Transpose indices: a layer's backward pass needs S transposed. The secondary index lists its blocks column by column, so
that the product walks the same values; the alternative is to copy the values transposed and multiply the copy. Both
compute Sᵀ x for the weights' gradient. Topology: the tables are built once for each layer and step, in one launch;
its share is of the layer's forward and backward passes on the kernels of any chip. The paper argues that explicit
transposes cost time and memory, and that the tables' cost is spread over all products of a layer.

Shapes: R rows, D model width, F expert width, E experts.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from foundry_moe_kernels import products
from foundry_moe_kernels.topology import topology_from_offsets
from layer import expert_ways
from matmul import CASES, PAPER, new
from timing import DEVICE, header, in_processes, in_turn_ms, print_table, queued_ms
from torch import Tensor

from foundry_moe.ops.blocksparse import block_of

COLUMNS = (
    "case",
    "by index ms",
    "copy ms",
    "product of the copy ms",
    "copy and product over index",
    "copy MB",
    "topology ms",
    "layer's step ms",
    "topology's share",
)


def transposed(case: str) -> tuple[Callable[[], Tensor], Callable[[], Tensor], Callable[[], Tensor]]:
    """Sᵀ x by the index; the copy of S's values, transposed; and the product of the copy. All give [E, F, D]."""
    rows, d, f, experts = CASES[case]
    each, block = rows // experts, block_of(DEVICE)
    s_RF, x_RD = new(rows, f), new(rows, d)
    offsets_E = torch.full((experts,), each, device=DEVICE).cumsum(0).int()
    topology = topology_from_offsets(offsets_E, rows, [f] * experts, block)
    turned = topology_from_offsets(offsets_E * f // each, experts * f, [each] * experts, block)
    out_EFD = torch.empty(experts, f, d, dtype=x_RD.dtype, device=DEVICE)
    s_EFr = torch.empty(experts, f, each, dtype=s_RF.dtype, device=DEVICE)

    def by_index() -> Tensor:
        return products.dsd(s_RF, x_RD, topology, trans_s=True, stacked=True, out=out_EFD)

    def copy() -> Tensor:
        return s_EFr.copy_(s_RF.view(experts, each, f).mT)

    def of_copy() -> Tensor:
        return products.dsd(s_EFr, x_RD.view(experts, each, d), turned, zero_tail=False).view(experts, f, d)

    return by_index, copy, of_copy


def topology_ms(case: str, rounds: int) -> tuple[float, float]:
    """Milliseconds of the tables, and of the layer's step on the kernels of any chip."""
    rows, d, f, experts = CASES[case]
    offsets_E = torch.full((experts,), rows // experts, device=DEVICE).cumsum(0).int()
    tables_ms = queued_ms(
        lambda: topology_from_offsets(offsets_E, rows, [f] * experts, block_of(DEVICE)), DEVICE, rounds
    )
    before = os.environ.get("FOUNDRY_MOE_KERNELS")
    os.environ["FOUNDRY_MOE_KERNELS"] = "portable"
    try:
        step = expert_ways((rows, d, f, experts, 1, False), "uniform")[0].step
        return tables_ms, queued_ms(step, DEVICE, rounds)
    finally:
        if before is None:
            del os.environ["FOUNDRY_MOE_KERNELS"]
        else:
            os.environ["FOUNDRY_MOE_KERNELS"] = before


def compile_case(case: str) -> None:
    """In a process of its own: see `in_processes`."""
    for run in transposed(case):
        run()
    topology_ms(case, 1)


def rows_of(cases: list[str], rounds: int = 11) -> list[list[str]]:
    """The table."""
    rows = []
    for case in cases:
        by_index, copy, of_copy = transposed(case)
        index_ms, copy_ms, product_ms = in_turn_ms([by_index, copy, of_copy])
        tables_ms, step_ms = topology_ms(case, rounds)
        ratio, megabytes = (copy_ms + product_ms) / index_ms, copy().nbytes / 1e6
        shown = [f"{ms:.3f}" for ms in (index_ms, copy_ms, product_ms)]
        shown += [
            f"{ratio:.2f}",
            f"{megabytes:.0f}",
            f"{tables_ms:.4f}",
            f"{step_ms:.2f}",
            f"{tables_ms / step_ms:.2%}",
        ]
        rows.append([case, *shown])
    return rows


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(PAPER), choices=list(CASES))
    arguments = parser.parse_args()
    in_processes(compile_case, ((case,) for case in arguments.cases))
    torch.manual_seed(0)
    print(header(), flush=True)
    print_table(COLUMNS, rows_of(arguments.cases))


if __name__ == "__main__":
    main()
