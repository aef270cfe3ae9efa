"""The cost of building a layer's topology (MegaBlocks, Gale et al. 2022, section 5.1). On a GPU:

    python -m benchmarks.papers.megablocks_indices [--cases XS Small Medium]

The tables are built once for each layer and step, in one launch; their share is of the layer's forward and backward
passes on the kernels of any chip. The paper argues that this is spread over all products of a layer. Its other
claims about the format: `benchmarks/block_sparse.py`.
"""

from __future__ import annotations

import argparse
import os

import torch
from foundry_moe_kernels.topology import topology_from_offsets
from layer import expert_ways
from matmul import CASES, PAPER
from timing import DEVICE, header, in_processes, print_table, queued_ms

from foundry_moe.ops.expert_plan import block_of

COLUMNS = ("case", "topology ms", "layer's step ms", "topology's share")


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
    topology_ms(case, 1)


def rows_of(cases: list[str], rounds: int = 11) -> list[list[str]]:
    """The table."""
    rows = []
    for case in cases:
        tables_ms, step_ms = topology_ms(case, rounds)
        rows.append([case, f"{tables_ms:.4f}", f"{step_ms:.2f}", f"{tables_ms / step_ms:.2%}"])
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
