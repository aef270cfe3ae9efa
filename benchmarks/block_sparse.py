"""TFLOP/s of block-sparse products of any topology (`foundry_moe.sparse`) beside cuBLAS, torch's BSR and stk.

    python benchmarks/block_sparse.py [--parts problems transposes random ...] [--cases XS,Small,Medium] [--stk FOLDER]

`problems`: the 18 problems of the MegaBlocks paper (Gale et al. 2022, figure 9), six products of a layer whose topology
is block-diagonal. `index` are the kernels for any topology, `contiguous` the layers' own, which know that an expert's
blocks are adjacent, `cuBLAS` a batched product. `transposes`: SDD, DSD and DDS of that topology with every transpose.
`random`: topologies of 10%, 50% and 90% of the blocks; `cuBLAS` multiplies the dense matrix, whose zeros count for
nothing in its TFLOP/s; `torch BSR` are Triton kernels of `torch.sparse`. `transposed` (section 5.1.4): Sᵀ by the
secondary index over the product of a matrix that is stored transposed, by the same tile, for two tiles; and a gather of
its blocks in that order, the least that an explicit transpose copies. `launches` (section 5.1.3): SDD with a program
for each block that exists, and with one for each that could. `tiles` (figure 4): columns x depth of a tile. `--stk`
adds stk where it runs: a folder with its source.

Shapes: R rows, D model width, F expert width, E experts, C = E * F columns, block 128.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from foundry_moe_kernels import block_products, products
from foundry_moe_kernels.sparse_tiles import SparseTile
from foundry_moe_kernels.topology import topology_from_offsets
from matmul import CASES, PAPER, new
from timing import DEVICE, geometric_mean, header, in_turn_ms, print_table
from torch import Tensor

from foundry_moe.ops.expert_plan import block_of
from foundry_moe.sparse import Matrix, dds, dsd, sdd

PARTS = ("problems", "transposes", "random", "transposed", "launches", "tiles")
DENSITIES = (0.1, 0.5, 0.9)
BLOCK = block_of(DEVICE)
SIZE = 8192 if DEVICE.type == "cuda" else 64
ONE_BLOCK = SparseTile(bn=BLOCK, stages=3, warps=4) if DEVICE.type == "cuda" else SparseTile(bn=BLOCK, bk=16)
# the two from which `sparse_tiles` chooses for DSD of Sᵀ
TURNED_TILES: dict[str, SparseTile | None] = {"128x32": SparseTile(bk=32, stages=4)}
TURNED_TILES["256x64"] = SparseTile(bn=256, stages=4, warps=8)
if DEVICE.type != "cuda":
    TURNED_TILES = {"chosen": None}
CASES["toy"] = (64, 32, 32, 2)
Ways = dict[str, Callable[[], Any]]


def stk_matrix(stk: Any, s: Matrix) -> Any:
    """The same tables and values. Of 16-bit indices, as it makes them, stk reads before an operand from 256 block
    columns on: its products of an index and 128 have 16 bits too.
    """
    index = s.index
    return stk.Matrix(
        torch.Size(index.shape), s.values, index.rows_Z, index.columns_Z, index.row_offsets_M1,
        index.transposed_rows_Z, index.column_offsets_N1, index.transposed_Z,
    )  # fmt: skip


def layer_matrix(case: str) -> Matrix:
    """S of a layer with even loads."""
    rows, _, f, experts = CASES[case]
    box = torch.ones(rows // experts // BLOCK, f // BLOCK, device=DEVICE)
    mask = torch.block_diag(*[box] * experts)
    return Matrix.from_mask(mask, new(int(mask.sum()), BLOCK, BLOCK), block=BLOCK)


def layer_rows(s: Matrix, case: str) -> Tensor:
    """[R, F]: the values of `layer_matrix`, row by row."""
    rows, _, f, _ = CASES[case]
    blocks = s.values.view(rows // BLOCK, f // BLOCK, BLOCK, BLOCK)
    return blocks.transpose(1, 2).reshape(rows, f)


def new_as(how: str, rows: int, columns: int) -> Tensor:
    """n: as it is; t: transposed in memory."""
    return new(columns, rows).mT if how == "t" else new(rows, columns)


def random_matrix(density: float, size: int = SIZE) -> Matrix:
    mask = torch.rand(size // BLOCK, size // BLOCK, device=DEVICE, generator=_generator()) < density
    return Matrix.from_mask(mask, new(int(mask.sum()), BLOCK, BLOCK), block=BLOCK)


def _generator() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(0)


def problems(case: str, stk: Any) -> dict[str, Ways]:
    """The six products of a case, by who computes them."""
    rows, d, f, experts = CASES[case]
    each = rows // experts
    s = layer_matrix(case)
    x, w1, w2 = new(rows, d), new(experts * f, d), new(experts * f, d)
    h = layer_rows(s, case)
    topology = topology_from_offsets(
        torch.full((experts,), each, device=DEVICE).cumsum(0).int(), rows, [f] * experts, BLOCK
    )
    x3, h3, w13, w23 = x.view(experts, each, d), h.view(experts, each, f), *(w.view(experts, f, d) for w in (w1, w2))
    named: dict[str, tuple[Callable[[], Any], ...]] = {
        "fwd1 SDD": (
            lambda: sdd(x, w1.mT, s), lambda: products.sdd(x, w13, topology, trans_b=True, zero_tail=False),
            lambda: x3 @ w13.mT,
        ),
        "fwd2 DSD": (
            lambda: dsd(s, w2), lambda: products.dsd(h, w23, topology, zero_tail=False), lambda: h3 @ w23
        ),
        "dgrad2 SDD": (
            lambda: sdd(x, w2.mT, s), lambda: products.sdd(x, w23, topology, trans_b=True, zero_tail=False),
            lambda: x3 @ w23.mT,
        ),
        "dgrad1 DSD": (
            lambda: dsd(s, w1), lambda: products.dsd(h, w13, topology, zero_tail=False), lambda: h3 @ w13
        ),
        "wgrad2 DSTD": (
            lambda: dsd(s.mT, x), lambda: products.dsd(h, x, topology, trans_s=True, stacked=True), lambda: h3.mT @ x3
        ),
        "wgrad1 DDS": (
            lambda: dds(x.mT, s), lambda: products.dsd(h, x, topology, trans_s=True, stacked=True), lambda: x3.mT @ h3
        ),
    }  # fmt: skip
    ways = {name: dict(zip(("index", "contiguous", "cuBLAS"), runs, strict=True)) for name, runs in named.items()}
    if stk is not None:
        m, ops = stk_matrix(stk, s), stk.ops
        runs = (
            lambda: ops.sdd(x, w1.t(), m), lambda: ops.dsd(m, w2), lambda: ops.sdd(x, w2.t(), m),
            lambda: ops.dsd(m, w1), lambda: ops.dsd(m.t(), x), lambda: ops.dds(x.t(), m),
        )  # fmt: skip
        for name, run in zip(ways, runs, strict=True):
            ways[name]["stk"] = run
    return ways


def transposes(case: str) -> dict[str, Ways]:
    """SDD, DSD and DDS of a layer's topology with every transpose: n is as it is, t lies transposed in memory."""
    rows, d, f, experts = CASES[case]
    each, c = rows // experts, experts * f
    s = layer_matrix(case)
    s3 = layer_rows(s, case).view(experts, each, f)
    ways: dict[str, Ways] = {}
    for one, two in itertools.product("nt", repeat=2):
        a_RD, b_DC = new_as(one, rows, d), new_as(two, d, c)
        a3, b3 = a_RD.unflatten(0, (experts, each)), b_DC.unflatten(1, (experts, f)).transpose(0, 1)
        ways[f"SDD {one}{two}"] = {
            "index": lambda a=a_RD, b=b_DC: sdd(a, b, s), "cuBLAS": lambda a=a3, b=b3: torch.bmm(a, b)
        }  # fmt: skip
        turned, op, op3 = one == "t", s.mT if one == "t" else s, s3.mT if one == "t" else s3
        b, inner = new_as(two, op.shape[1], d), each if turned else f
        ways[f"DSD {one}{two}"] = {
            "index": lambda op=op, b=b: dsd(op, b),
            "cuBLAS": lambda op3=op3, b=b, inner=inner: torch.bmm(op3, b.unflatten(0, (experts, inner))),
        }
        turned, op, op3 = two == "t", s.mT if two == "t" else s, s3.mT if two == "t" else s3
        a, inner = new_as(one, d, op.shape[0]), f if turned else each
        ways[f"DDS {one}{two}"] = {
            "index": lambda op=op, a=a: dds(a, op),
            "cuBLAS": lambda op3=op3, a=a, inner=inner: torch.bmm(
                a.unflatten(1, (experts, inner)).transpose(0, 1), op3
            ),
        }
    return ways


def random_ways(density: float, stk: Any) -> dict[str, Ways]:
    """Products of a random topology, by who computes them."""
    from torch.sparse import _triton_ops as bsr

    s = random_matrix(density)
    a, b, dense = new(SIZE, SIZE), new(SIZE, SIZE), s.to_dense()
    ways: dict[str, Ways] = {
        "SDD": {"index": lambda: sdd(a, b, s), "cuBLAS": lambda: a @ b},
        "DSD": {"index": lambda: dsd(s, b), "cuBLAS": lambda: dense @ b},
        "DSTD": {"index": lambda: dsd(s.mT, b), "cuBLAS": lambda: dense.mT @ b},
        "DDS": {"index": lambda: dds(a, s), "cuBLAS": lambda: a @ dense},
    }
    if DEVICE.type == "cuda":
        sparse = torch.sparse_bsr_tensor(s.index.row_offsets_M1, s.index.columns_Z, s.values, size=s.shape)
        ways["DSD"]["torch BSR"] = lambda: bsr.bsr_dense_addmm(b, sparse, b, beta=0)
        ways["SDD"]["torch BSR"] = lambda: bsr.sampled_addmm(sparse, a, b, beta=0.0, skip_checks=True)
    if stk is not None:
        m, ops = stk_matrix(stk, s), stk.ops
        runs = lambda: ops.sdd(a, b, m), lambda: ops.dsd(m, b), lambda: ops.dsd(m.t(), b), lambda: ops.dds(a, m)
        for name, run in zip(ways, runs, strict=True):
            ways[name]["stk"] = run
    return ways


def measured(ways: Ways, repeats: int) -> dict[str, float]:
    """Milliseconds of those that run; what does not is named on stderr."""
    able = {}
    for name, run in ways.items():
        try:
            run()
            able[name] = run
        except Exception as error:  # whatever a peer raises
            print(f"{name} does not run: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)
    return dict(zip(able, in_turn_ms(list(able.values()), repeats), strict=True))


def _cell(flops: float, ms: float | None) -> str:
    return "" if ms is None else f"{flops / ms / 1e9:.0f}"


def _ratio(ms: dict[str, float], way: str) -> float:
    """How much of cuBLAS's speed a way has."""
    return ms["cuBLAS"] / ms[way]


def print_problems(cases: list[str], stk: Any, repeats: int) -> None:
    names, rows, shares = ("index", "contiguous", "stk", "cuBLAS"), [], {}
    for case in cases:
        r, d, f, _ = CASES[case]
        totals = dict.fromkeys(names, 0.0)
        for product, ways in problems(case, stk).items():
            ms = measured(ways, repeats)
            for way in ms:
                totals[way] += ms[way]
                shares.setdefault(way, []).append(_ratio(ms, way))
            flops = 2.0 * r * d * f
            cells = [_cell(flops, ms.get(way)) for way in names]
            rows.append([case, product, *cells, f"{_ratio(ms, 'index'):.2f}"])
        over = totals["index"] / totals["contiguous"]
        rows.append([case, "all six, ms", *(f"{totals[way]:.3f}" for way in names), f"index/contiguous {over:.3f}"])
        torch.cuda.empty_cache()
    print_table(("case", "product", *names, "index over cuBLAS"), rows)
    for way, found in shares.items():
        print(f"{way}: {geometric_mean(found):.3f} of cuBLAS ({min(found):.2f} to {max(found):.2f}), {len(found)}")


def print_transposes(cases: list[str], repeats: int) -> None:
    shares: dict[str, list[float]] = {}
    for case in cases:
        for name, ways in transposes(case).items():
            shares.setdefault(name, []).append(_ratio(measured(ways, repeats), "index"))
        torch.cuda.empty_cache()
    rows = [[name, *(f"{share:.2f}" for share in found)] for name, found in sorted(shares.items())]
    print_table(("over cuBLAS", *cases), rows)
    for kind in ("SDD", "DSD", "DDS"):
        found = [share for name, of_cases in shares.items() if name.startswith(kind) for share in of_cases]
        print(f"{kind}: {geometric_mean(found):.3f} of cuBLAS ({min(found):.2f} to {max(found):.2f}), {len(found)}")


def print_random(stk: Any, repeats: int) -> None:
    names, rows = ("index", "torch BSR", "stk", "cuBLAS"), []
    for density in DENSITIES:
        ways, blocks = random_ways(density, stk), random_matrix(density).index.blocks
        for product, one in ways.items():
            ms = measured(one, repeats)
            flops = 2.0 * blocks * BLOCK * BLOCK * SIZE
            cells = [_cell(flops, ms.get(way)) for way in names]
            rows.append([f"{density:.0%}", product, *cells, f"{_ratio(ms, 'index'):.2f}"])
    print_table(("blocks", "product", *names, "times as fast as dense cuBLAS"), rows)


def transposed_ways(s: Matrix, columns: int) -> Ways:
    """Sᵀ x by the secondary index, and of a matrix that is stored as Sᵀ, each by the same tiles."""
    index, x = s.index, new(s.shape[0], columns)
    order = index.transposed_Z.long()
    stored = Matrix.from_csr(
        s.values.mT[order].contiguous(), index.column_offsets_N1, index.rows_Z[order], s.shape[0]
    )  # fmt: skip
    ways: Ways = {}
    for name, tile in TURNED_TILES.items():
        ways[f"index {name}"] = lambda tile=tile: block_products.dsd(s.values, x, index, transposed=True, tile=tile)
        ways[f"stored {name}"] = lambda tile=tile: block_products.dsd(stored.values, x, stored.index, tile=tile)
    return ways


def print_transposed(cases: list[str], repeats: int) -> None:
    rows = []
    matrices = {f"random {density:.0%}": random_matrix(density) for density in DENSITIES}
    matrices |= {case: layer_matrix(case) for case in cases}
    for name, s in matrices.items():
        ways = transposed_ways(s, CASES[name][1] if name in CASES else SIZE)
        gather = lambda s=s: s.values.mT[s.index.transposed_Z]  # noqa: E731
        *products_ms, gather_ms = in_turn_ms([*ways.values(), gather], repeats)
        by_index, stored = products_ms[::2], products_ms[1::2]
        both = zip(by_index, stored, strict=True)
        over = (min(stored) + gather_ms) / min(by_index)
        rows.append([
            name, *(f"{ms:.4f}" for ms in (*products_ms, gather_ms)), *(f"{one / two:.3f}" for one, two in both),
            f"{over:.2f}",
        ])  # fmt: skip
    shown = [f"{way}, ms" for way in ways] + ["gather, ms"] + [f"index over stored, {name}" for name in TURNED_TILES]
    print_table(("matrix", *shown, "gather and product over index, best tiles"), rows)


def print_launches(repeats: int) -> None:
    rows = []
    for density in (0.01, *DENSITIES):
        s = random_matrix(density)
        a, b = new(s.shape[0], SIZE // 8), new(SIZE // 8, s.shape[1])
        (m, n), index = (size // BLOCK for size in s.shape), s.index
        every = block_products.BlockIndex(
            BLOCK, index.rows_Z, index.columns_Z, index.row_offsets_M1, index.transposed_Z, index.transposed_rows_Z,
            index.column_offsets_N1,
        )  # fmt: skip
        tiles = torch.full((m * n, 3), -1, dtype=torch.int32, device=DEVICE)
        found = index.tiles(1)[:, 0].long()
        tiles[index.rows_Z[found] * n + index.columns_Z[found]] = index.tiles(1)
        every._tiles[1] = tiles  # a program for each block that could exist looks up whether it does
        exact, over = in_turn_ms(
            [lambda i=i, a=a, b=b: block_products.sdd(a, b, i, tile=ONE_BLOCK) for i in (index, every)], repeats
        )
        rows.append([f"{density:.0%}", str(index.blocks), f"{exact:.4f}", f"{over:.4f}", f"{over / exact:.2f}"])
    print_table(("blocks", "number", "one program each, ms", "over-launched, ms", "over-launched over exact"), rows)


def print_tiles(repeats: int) -> None:
    sizes = [(64, 64), (128, 32), (128, 64), (256, 32), (256, 64)]
    tiles = [SparseTile(bn=bn, bk=bk, stages=4, warps=8 if bn == 256 else 4) for bn, bk in sizes]
    rows = []
    for density in DENSITIES:
        s = random_matrix(density)
        a, b, index = new(SIZE, SIZE), new(SIZE, SIZE), s.index
        runs: dict[str, Callable[[SparseTile], Any]] = {
            "SDD": lambda tile, a=a, b=b, index=index: block_products.sdd(a, b, index, tile=tile),
            "DSD": lambda tile, s=s, b=b, index=index: block_products.dsd(s.values, b, index, tile=tile),
            "DSTD": lambda tile, s=s, b=b, index=index: block_products.dsd(
                s.values, b, index, transposed=True, tile=tile
            ),
        }
        for product, run in runs.items():
            ms = in_turn_ms([lambda tile=tile, run=run: run(tile) for tile in tiles], repeats)
            flops = 2.0 * index.blocks * BLOCK * BLOCK * SIZE
            rows.append([f"{density:.0%}", product, *(_cell(flops, one) for one in ms)])
    print_table(("blocks", "product", *(f"{bn}x{bk}" for bn, bk in sizes)), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--cases", default=",".join(PAPER) if DEVICE.type == "cuda" else "toy")
    parser.add_argument("--stk", type=Path, help="a folder with stk's source")
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    stk: Any = None
    if arguments.stk:
        sys.path.insert(0, str(arguments.stk))
        stk = import_module("stk")
    torch.manual_seed(0)
    print(header(), flush=True)
    cases = arguments.cases.split(",")
    if "problems" in arguments.parts:
        print_problems(cases, stk, arguments.repeats)
    if "transposes" in arguments.parts:
        print_transposes([case for case in cases if case in PAPER or case == "toy"], arguments.repeats)
    if "random" in arguments.parts:
        print_random(stk, arguments.repeats)
    if "transposed" in arguments.parts:
        print_transposed(cases, arguments.repeats)
    if "launches" in arguments.parts:
        print_launches(arguments.repeats)
    if "tiles" in arguments.parts and DEVICE.type == "cuda":
        print_tiles(arguments.repeats)


if __name__ == "__main__":
    main()
