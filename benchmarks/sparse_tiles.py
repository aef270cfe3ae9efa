"""The tiles of the block-sparse products on this chip, as in the MegaBlocks paper's figure 4: TFLOP/s of each.

    python benchmarks/sparse_tiles.py [--cases XS,OLMoE] [--products sdd,dsd]

Every product of a layer with every tile, beside cuBLAS (`torch.bmm`) in the same run; the best tile of each row is what
`foundry_moe_kernels.sparse_tiles` should choose there.

Shapes: R rows, D model width, F expert width, E experts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from foundry_moe_kernels import products
from foundry_moe_kernels.sparse_tiles import BLOCK, SparseTile, shared_bytes
from foundry_moe_kernels.topology import topology_from_offsets
from matmul import CASES
from timing import header, in_turn_ms

TILES = [
    SparseTile(bn=64, bk=64, stages=3, warps=4),
    SparseTile(bn=64, bk=64, stages=4, warps=4),
    SparseTile(bn=64, bk=64, stages=4, warps=8),
    SparseTile(bn=128, bk=64, stages=2, warps=4),
    SparseTile(bn=128, bk=64, stages=3, warps=4),
    SparseTile(bn=128, bk=64, stages=3, warps=8),
    SparseTile(bn=128, bk=64, stages=4, warps=8),
    SparseTile(bn=128, bk=32, stages=6, warps=8),
    SparseTile(bn=128, bk=128, stages=2, warps=8),
    SparseTile(bn=256, bk=64, stages=3, warps=8),
    SparseTile(bn=256, bk=64, stages=4, warps=8),
    SparseTile(bn=256, bk=64, stages=4, warps=8, group=4),
    SparseTile(bn=256, bk=64, stages=4, warps=8, group=16),
]


def runs(case: str, shrink: int = 1) -> dict[str, tuple[float, Callable[[SparseTile | None], object]]]:
    """Floating-point operations, and the product with a tile (None: cuBLAS), for each product of a layer."""
    rows, d, f, experts = CASES[case]
    rows //= shrink
    offsets_E = torch.full((experts,), rows // experts, device="cuda").cumsum(0).int()
    topology = topology_from_offsets(offsets_E, rows, [f] * experts, BLOCK)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    x, h, h2, w1, v1, w2 = (
        new(rows, d),
        new(rows, f),
        new(rows, f),
        new(experts, f, d),
        new(experts, f, d),
        new(experts, d, f),
    )
    x3, h3 = (t.view(experts, rows // experts, -1) for t in (x, h))
    out1, out2 = torch.empty_like(w1), torch.empty_like(w2)
    one = 2.0 * rows * d * f

    def both(
        first: Callable[[SparseTile], object], second: Callable[[], object]
    ) -> Callable[[SparseTile | None], object]:
        return lambda tile: second() if tile is None else first(tile)

    return {
        "sdd": (one, both(
            lambda t: products.sdd(x, w1, topology, trans_b=True, zero_tail=False, tile=t), lambda: x3 @ w1.mT)),
        "sdd nn": (one, both(
            lambda t: products.sdd(x, w2, topology, zero_tail=False, tile=t), lambda: x3 @ w2)),
        "glu": (2 * one, both(
            lambda t: products.sdd_act(x, (w1, v1), topology, "silu", tile=t), lambda: (x3 @ w1.mT, x3 @ v1.mT))),
        "dsd": (one, both(
            lambda t: products.dsd(h, w2, topology, trans_b=True, zero_tail=False, tile=t), lambda: h3 @ w2.mT)),
        "dsd nn": (one, both(
            lambda t: products.dsd(h, w1, topology, zero_tail=False, tile=t), lambda: h3 @ w1)),
        "dsd 2": (2 * one, both(
            lambda t: products.dsd((h, h2), (w1, v1), topology, zero_tail=False, tile=t), lambda: (h3 @ w1, h3 @ v1))),
        "dsd tn": (one, both(
            lambda t: products.dsd(h, x, topology, trans_s=True, stacked=True, out=out1, tile=t), lambda: h3.mT @ x3)),
        "dds tn": (one, both(
            lambda t: products.dds(x, h, topology, trans_a=True, stacked=True, out=out2, tile=t), lambda: x3.mT @ h3)),
    }  # fmt: skip


def fits(tile: SparseTile, product: str, case: str) -> bool:
    """Whether the tile has room on this chip, and covers whole blocks of an expert where it must."""
    glu = product == "glu"
    room = tile.shared_bytes(BLOCK, 2, operands=2 if glu else 1) <= shared_bytes(torch.device("cuda"))
    return room and not (product.startswith(("sdd", "glu")) and CASES[case][2] % tile.bn)


def compile_all(index: int, names: list[str]) -> None:
    """In a process of its own: kernels are kept on disk, and compile one after another in one process."""
    for case in names:
        for product, (_, run) in runs(case, 8).items():
            for number, tile in enumerate(TILES):
                if number % len(TILES) == index and fits(tile, product, case):
                    run(tile)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--products", default="")
    arguments = parser.parse_args()
    cases = arguments.cases.split(",")
    context = torch.multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_all, args=(index, cases)) for index in range(len(TILES))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(header(), flush=True)
    names = [f"{t.bn}x{t.bk} s{t.stages} w{t.warps} g{t.group}" for t in TILES]
    print("| case | product | cuBLAS | " + " | ".join(names) + " |\n" + "|---" * (len(TILES) + 3) + "|")
    for case in cases:
        for product, (flops, run) in runs(case).items():
            if arguments.products and product not in arguments.products.split(","):
                continue
            ways = [tile for tile in TILES if fits(tile, product, case)]
            times = in_turn_ms([lambda tile=tile, run=run: run(tile) for tile in [None, *ways]], 11)
            rates = dict(zip([None, *ways], (flops / ms / 1e9 for ms in times), strict=True))
            cells = [f"{rates[tile]:.0f}" if tile in rates else "" for tile in TILES]
            best = max(rate / rates[None] for tile, rate in rates.items() if tile is not None)
            print(f"| {case} | {product} | {rates[None]:.0f} | {' | '.join(cells)} | best {best:.3f}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
