"""Block-sparse products over tile sizes, beside cuBLAS (MegaBlocks, Gale et al. 2022, figure 4). On a GPU:

    python -m benchmarks.papers.megablocks_tiles [--cases XS Small Medium] [--csv FILE] [--plot FILE]

The paper's figure has CUTLASS's dense products on an A100, whose 128x128 tiles are as fast as any other or faster, and
takes these for its blocks. Here it is the block-sparse products of a layer themselves, as `benchmarks/sparse_tiles.py`
runs them: a tile is a block of 128 rows by its width; of each width and depth the best stages and warps.
"""

from __future__ import annotations

from pathlib import Path

import sparse_tiles
from matmul import CASES, PAPER
from timing import geometric_mean, in_processes

from benchmarks.papers.table import measure, parser_of

ROWS = 128


def sizes() -> list[tuple[int, int]]:
    """(width, depth) of every tile, each once."""
    return sorted({(tile.bn, tile.bk) for tile in sparse_tiles.TILES})


def columns() -> list[str]:
    """Of the table."""
    return ["case", "product", "cuBLAS TFLOP/s", *(f"{ROWS}x{bn}x{bk}" for bn, bk in sizes()), "best of cuBLAS"]


def rows_of(cases: list[str], products: list[str] | None = None) -> list[list[str]]:
    """The table: TFLOP/s, empty where no tile of the size fits the chip and the experts."""
    rows = []
    for case in cases:
        for product, (flops, run) in sparse_tiles.runs(case).items():
            if products and product not in products:
                continue
            rates = sparse_tiles.rates_of(case, product, flops, run, sparse_tiles.TILES)
            best = dict.fromkeys(sizes(), 0.0)
            for tile, rate in rates.items():
                if tile is not None:
                    best[tile.bn, tile.bk] = max(best[tile.bn, tile.bk], rate)
            shown = [f"{rate:.4g}" if rate else "" for rate in best.values()]
            rows.append([case, product, f"{rates[None]:.4g}", *shown, f"{max(best.values()) / rates[None]:.3f}"])
    return rows


def summary(rows: list[list[str]]) -> list[str]:
    """Each size over the best of its row, where it fits every product of the rows."""
    lines = ["the paper, dense products on an A100: 128x128 is level with the best or better"]
    for at, name in enumerate(columns()[3:-1], 3):
        shares = [float(row[at]) / max(float(cell) for cell in row[3:-1] if cell) for row in rows if row[at]]
        if shares:
            lines.append(f"{name}: {geometric_mean(shares):.3f} of the best tile, over {len(shares)} products")
    return lines


def plot(rows: list[list[str]], path: Path) -> None:
    """Each product by tile, over cuBLAS: the geometric mean of the cases that the tile fits."""
    from matplotlib import pyplot

    names = columns()[3:-1]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for product in dict.fromkeys(row[1] for row in rows):
        shares = []
        for at in range(3, 3 + len(names)):
            found = [float(row[at]) / float(row[2]) for row in rows if row[1] == product and row[at]]
            shares.append(geometric_mean(found) if found else float("nan"))
        axes.plot(names, shares, marker="o", label=product)
    axes.set(ylabel="of cuBLAS", ylim=(0, None))
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path)


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(PAPER), choices=list(CASES))
    arguments = parser.parse_args()
    in_processes(sparse_tiles.compile_tile, ((tile, arguments.cases, []) for tile in sparse_tiles.TILES))
    measure(columns(), lambda: rows_of(arguments.cases), plot, arguments, summary)


if __name__ == "__main__":
    main()
