"""Makes the committed table of tiles, `kernels/hopper.json`: times each candidate on each product of each shape class.

    python benchmarks/tune_kernels.py --out kernels/hopper.json [--cases XS,OLMoE] [--products up2,inner]

Compiles in parallel processes first, then times alone: one call of each candidate in turn, medians of CUDA events over
operands that exceed the L2.

Shapes: R rows, D model width, F expert width, E experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from foundry_moe_kernels import expert_products as ep
from foundry_moe_kernels import tuning
from foundry_moe_kernels.tuning import Tile
from timing import in_turn_ms

# rows (tokens x choices), model width, expert width, experts, gated
CASES = {
    "XS": (65536, 512, 2048, 64, False),
    "Small": (32768, 768, 3072, 64, False),
    "Medium": (8192, 1024, 4096, 64, False),
    "Medium2": (16384, 1024, 4096, 64, False),
    "Mixtral": (16384, 4096, 14336, 8, True),
    "DBRX": (32768, 6144, 10752, 16, True),
    "OLMoE": (131072, 2048, 1024, 64, True),
    "Qwen3": (131072, 2048, 768, 128, True),
}

SPECIALISED = [
    Tile(specialised=1, stages=s, split=p, group=g) for s, p in ((4, 2), (4, 4), (3, 1)) for g in (1, 2, 4, 8, 16)
]
SPECIALISED_UP = [  # this epilogue stores halves always; with three stages there is room for a second buffer
    Tile(specialised=1, stages=s, group=g) for s in (3, 4) for g in (1, 2, 4, 8, 16)
]
WIDE = [Tile(stages=s, flatten=f, group=g) for s, f, g in ((3, 0, 8), (3, 0, 16), (3, 1, 8), (4, 1, 4), (4, 1, 8))]


def candidates(product: str) -> list[Tile]:
    return WIDE + (SPECIALISED_UP if product == "up2" else SPECIALISED)


@dataclasses.dataclass(kw_only=True)
class Product:
    """One product of one case, ready to run with any tile."""

    case: str
    name: str
    key: str
    flops: float
    run: Callable[[Tile], object]


def loads(rows: int, experts: int, device: str) -> torch.Tensor:
    return torch.full((experts,), rows // experts, dtype=torch.int64, device=device).cumsum(0).int()


def products(case: str, device: str) -> Iterator[Product]:
    rows_, d, f, experts, gated = CASES[case]
    rows = ep.ragged_rows(loads(rows_, experts, device), rows_)

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_(0, 0.5)

    x, dy, h = new(rows_, d), new(rows_, d), new(rows_, f)
    w1, w2 = new(experts, f, d), new(experts, d, f)
    v1 = new(experts, f, d) if gated else None
    z = new(2 if gated else 1, rows_, f)
    weights = torch.rand(rows_, device=device)
    source = torch.randperm(rows_, device=device).int()
    act = "silu" if gated else "gelu"
    up_weights = (w1,) if v1 is None else (w1, v1)
    planes = len(up_weights)
    out = torch.empty(planes, experts, f, d, dtype=torch.bfloat16, device=device)
    out2 = torch.empty(1, experts, d, f, dtype=torch.bfloat16, device=device)
    one = 2.0 * rows_ * d * f
    per_expert = rows_ // experts

    def key(name: str, n: int, k: int) -> str:
        return tuning.shape_class(name, rows_per_expert=per_expert, n=n, k=k)

    def p(name: str, n: int, k: int, times: int, run: Callable[[Tile], object]) -> Product:
        return Product(case=case, name=name, key=key(name, n, k), flops=times * one, run=run)

    yield p(f"up{planes}", f, d, planes, lambda t: ep.up(x, w1, v1, rows, act, tile=t))
    yield p("nt", f, d, 1, lambda t: ep.rows_product(x[None], (w1,), rows, transposed=True, tile=t))
    yield p("nt", d, f, 1, lambda t: ep.rows_product(h[None], (w2,), rows, transposed=True, tile=t))
    yield p("nn", f, d, 1, lambda t: ep.rows_product(dy[None], (w2,), rows, transposed=False, tile=t))
    yield p("nn", d, f, 1, lambda t: ep.rows_product(h[None], (w1,), rows, transposed=False, tile=t))
    if gated:
        yield p("nn2", d, f, 2, lambda t: ep.rows_product(z, up_weights, rows, transposed=False, tile=t))
    yield p(
        f"down_backward{planes}", f, d, 1,
        lambda t: ep.down_backward_(dy, w2, z.clone() if t is None else z, rows, act, weights, source, tile=t),
    )  # fmt: skip
    yield p("inner", f, d, 1, lambda t: ep.weight_gradient(dy[None], h, rows, out=out2, tile=t))
    yield p("inner", d, f, planes, lambda t: ep.weight_gradient(z, x, rows, out=out, tile=t))


def _compile(share: tuple[int, int, list[str]]) -> None:
    index, of, names = share
    count = 0
    for case in ("tiny-gated", "tiny"):
        CASES[case] = (2048, 256, 512, 4, case == "tiny-gated")
        for product in products(case, "cuda"):
            if names and product.name not in names:
                continue
            for tile in candidates(product.name):
                count += 1
                if count % of == index:
                    try:
                        product.run(tile)
                    except Exception as error:
                        print("compile", product.name, tile, repr(error)[:200])


def compile_all(names: list[str]) -> None:
    began = time.time()
    workers = min(max(os.cpu_count() or 2, 2), 24)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(_compile, [(i, workers, names) for i in range(workers)], chunksize=1)
    print(f"compiled in {time.time() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--products", default="")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--top", type=int, default=3)
    args = parser.parse_args()
    names = [name for name in args.products.split(",") if name]
    torch.manual_seed(0)
    compile_all(names)
    best: dict[str, dict[str, int]] = {}
    for case in args.cases.split(","):
        for product in products(case, "cuda"):
            if names and product.name not in names:
                continue
            tiles = []
            for tile in candidates(product.name):
                try:
                    product.run(tile)
                    tiles.append(tile)
                except Exception as error:
                    print("failed", product.name, tile, repr(error)[:120])
            times = in_turn_ms([functools.partial(product.run, tile) for tile in tiles], args.repeats)
            ranked = sorted(zip(times, tiles, strict=True), key=lambda pair: pair[0])
            best[product.key] = dataclasses.asdict(ranked[0][1])
            shown = "  ".join(
                f"{product.flops / ms / 1e9:.0f}: {t.bm}x{t.bn}x{t.bk} s{t.stages} g{t.group} /{t.split}"
                f"{' specialised' if t.specialised else f' w{t.warps} f{t.flatten} p{t.per_sm}'}"
                for ms, t in ranked[: args.top]
            )
            print(f"{case:8s} {product.key:34s} {shown}", flush=True)
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(
            "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(best.items())) + "\n}\n"
        )


if __name__ == "__main__":
    main()
