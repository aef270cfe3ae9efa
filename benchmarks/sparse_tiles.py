"""TFLOP/s of the portable block-sparse products by tile size, as in figure 4 of the MegaBlocks paper.

    python benchmarks/sparse_tiles.py [--cases XS,OLMoE] [--products sdd,dsd] [--tiles "128x64 s3 w4 g2,..."]

Measures every product of a layer with every tile (columns x depth, stages, warps, group), and cuBLAS (`torch.bmm`) in
the same run. `foundry_moe_kernels.sparse_tiles` should choose the best tile of each row. The last lines give each tile
size, with its best stages and warps, as a share of the best tile: a geometric mean over the products that it fits.

Shapes: R rows, D model width, F expert width, E experts.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from foundry_moe_kernels import products
from foundry_moe_kernels.sparse_tiles import SparseTile, shared_bytes
from foundry_moe_kernels.topology import topology_from_offsets
from matmul import CASES, new
from timing import DEVICE, geometric_mean, header, in_processes, in_turn_ms

from foundry_moe.ops.expert_plan import block_of

TILES = [
    SparseTile(bn=64, bk=64, stages=3, warps=4),
    SparseTile(bn=64, bk=64, stages=4, warps=4),
    SparseTile(bn=64, bk=64, stages=4, warps=8),
    SparseTile(bn=128, bk=64, stages=2, warps=4),
    SparseTile(bn=128, bk=64, stages=3, warps=4),
    SparseTile(bn=128, bk=64, stages=3, warps=8),
    SparseTile(bn=128, bk=64, stages=4, warps=8),
    SparseTile(bn=128, bk=32, stages=4, warps=4),
    SparseTile(bn=128, bk=32, stages=6, warps=8),
    SparseTile(bn=128, bk=128, stages=2, warps=8),
    SparseTile(bn=256, bk=64, stages=3, warps=8),
    SparseTile(bn=256, bk=64, stages=4, warps=8),
    SparseTile(bn=256, bk=64, stages=4, warps=8, group=4),
    SparseTile(bn=256, bk=64, stages=4, warps=8, group=16),
]


def name_of(tile: SparseTile) -> str:
    """As the table shows it and `--tiles` takes it."""
    return f"{tile.bn}x{tile.bk} s{tile.stages} w{tile.warps} g{tile.group}"


def tile_of(name: str) -> SparseTile:
    """The tile of a name.

    Raises:
        argparse.ArgumentTypeError: no such name.
    """
    found = re.fullmatch(r"(\d+)x(\d+) s(\d+) w(\d+) g(\d+)", name.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f'"{name}" is no tile: write one as "{name_of(SparseTile())}"')
    bn, bk, stages, warps, group = map(int, found.groups())
    return SparseTile(bn=bn, bk=bk, stages=stages, warps=warps, group=group)


def tiles_of(names: str) -> list[SparseTile]:
    """The tiles of names between commas."""
    return [tile_of(name) for name in names.split(",")]


def runs(case: str, shrink: int = 1) -> dict[str, tuple[float, Callable[[SparseTile | None], object]]]:
    """Floating-point operations, and the product with a tile (None: cuBLAS), for each product of a layer.

    shrink: divides rows and experts, for many processes that compile on one GPU: the products' kernels are the same.
    """
    rows, d, f, experts = CASES[case]
    rows, experts = rows // shrink, max(experts // shrink, 2)
    offsets_E = torch.full((experts,), rows // experts, device=DEVICE).cumsum(0).int()
    topology = topology_from_offsets(offsets_E, rows, [f] * experts, block_of(DEVICE))

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
            lambda t: products.dsd(h, x, topology, trans_s=True, stacked=True, out=out2.mT, tile=t),
            lambda: x3.mT @ h3)),
    }  # fmt: skip


def fits(tile: SparseTile, product: str, case: str) -> bool:
    """Whether the tile has room on this chip, and covers whole blocks of an expert where it must."""
    glu = product == "glu"
    room = tile.shared_bytes(block_of(DEVICE), 2, operands=2 if glu else 1) <= shared_bytes(DEVICE)
    return room and not (product.startswith(("sdd", "glu")) and CASES[case][2] % tile.bn)


def rates_of(
    case: str,
    product: str,
    flops: float,
    run: Callable[[SparseTile | None], object],
    tiles: list[SparseTile],
) -> dict[SparseTile | None, float]:
    """TFLOP/s of each tile that fits, and of cuBLAS (None)."""
    ways = [None, *(tile for tile in tiles if fits(tile, product, case))]
    times = in_turn_ms([lambda tile=tile: run(tile) for tile in ways], 11)
    return dict(zip(ways, (flops / ms / 1e9 for ms in times), strict=True))


def best_of_sizes(rates: dict[SparseTile | None, float]) -> dict[str, float]:
    """Columns x depth -> the highest rate of the tiles of that size."""
    best: dict[str, float] = {}
    for tile, rate in rates.items():
        if tile is not None:
            size = f"{tile.bn}x{tile.bk}"
            best[size] = max(best.get(size, 0.0), rate)
    return best


def compile_tile(tile: SparseTile, names: list[str], wanted: list[str]) -> None:
    """In a process of its own: kernels are kept on disk, and compile one after another in one process."""
    for case in names:
        for product, (_, run) in runs(case, 8).items():
            if (not wanted or product in wanted) and fits(tile, product, case):
                run(tile)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--products", default="")
    parser.add_argument("--tiles", type=tiles_of, default=TILES)
    arguments = parser.parse_args()
    cases, tiles = arguments.cases.split(","), arguments.tiles
    wanted = [product for product in arguments.products.split(",") if product]
    in_processes(compile_tile, ((tile, cases, wanted) for tile in tiles))
    print(header(), flush=True)
    names = [name_of(tile) for tile in tiles]
    print("| case | product | cuBLAS | " + " | ".join(names) + " |\n" + "|---" * (len(tiles) + 3) + "|")
    shares: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        for product, (flops, run) in runs(case).items():
            if wanted and product not in wanted:
                continue
            rates = rates_of(case, product, flops, run, tiles)
            cells = [f"{rates[tile]:.0f}" if tile in rates else "" for tile in tiles]
            by_size = best_of_sizes(rates)
            best = max(by_size.values())
            for size, rate in by_size.items():
                shares[size].append(rate / best)
            print(
                f"| {case} | {product} | {rates[None]:.0f} | {' | '.join(cells)} | best {best / rates[None]:.3f}",
                flush=True,
            )
        torch.cuda.empty_cache()
    for size, of_best in shares.items():
        print(f"{size}: {geometric_mean(of_best):.3f} of the best tile, over {len(of_best)} products")


if __name__ == "__main__":
    main()
