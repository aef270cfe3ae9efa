"""Makes the committed table of tiles, `kernels/hopper.json`: times each candidate on each product of each shape class.

    python benchmarks/tune_kernels.py --out kernels/hopper.json [--cases XS,OLMoE] [--products up2,inner]

Compiles in parallel processes first, then times alone: one call of each candidate in turn, medians of CUDA events over
operands that exceed the L2. Each runs twice, with as many rows for every expert and with rows as a balanced gate
sends them, at random: the least sum of both wins, for the best on equal rows can be far from it on random ones.
cuBLAS (`torch.bmm`, equal rows) runs in turn with them.

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
    "GPT-OSS": (65536, 2880, 2880, 128, True),
    "DeepSeek-V2": (147456, 5120, 1536, 160, True),
    "DeepSeek-V2-Lite": (98304, 2048, 1408, 64, True),
    "fine": (458752, 512, 256, 128, False),  # docs/explanation/recipe.md
    "finer": (458752, 512, 256, 256, False),
}

SHORT = [Tile(stages=s, split=p, group=g) for s, p in ((4, 2), (4, 4), (3, 1), (3, 2)) for g in (1, 2, 4, 8, 16)]
TALL = [Tile(bm=192, split=p, group=g) for p in (2, 4) for g in (1, 2, 3, 4, 6, 8, 12, 16)]
# The first product's epilogue stores halves at least; with three stages there is room for a second buffer
SHORT_UP = [Tile(stages=s, group=g) for s in (3, 4) for g in (1, 2, 4, 8, 16)]


@dataclasses.dataclass(kw_only=True)
class Product:
    """One product of one case, ready to run with any tile; one that reads tokens, with those of two consumers."""

    case: str
    name: str
    key: str
    flops: float
    run: Callable[[Tile], object]
    peer: Callable[[], object]
    tokens: bool = False

    def candidates(self) -> list[Tile]:
        return [*(SHORT_UP if self.name == "up2" else SHORT), *([] if self.tokens else TALL)]


def loads(rows: int, experts: int, load: str, device: str) -> torch.Tensor:
    """Row ends: `equal`, or `random` as of a balanced gate."""
    counts = torch.full((experts,), rows // experts)
    if load == "random":
        generator = torch.Generator().manual_seed(1)
        chosen = torch.randint(experts, (rows,), generator=generator)
        counts = chosen.bincount(minlength=experts)
    return counts.to(device).cumsum(0).int()


def products(case: str, device: str, load: str) -> Iterator[Product]:
    rows_, d, f, experts, gated = CASES[case]
    rows = ep.ragged_rows(loads(rows_, experts, load, device), rows_)

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

    def p(
        name: str, n: int, k: int, times: int, run: Callable[[Tile], object], peer: Callable[[], object],
        tokens: bool = False,
    ) -> Product:  # fmt: skip
        def peers() -> None:
            for _ in range(times):
                peer()

        return Product(case=case, name=name, key=key(name, n, k), flops=times * one, run=run, peer=peers, tokens=tokens)

    # layers of narrow experts hand tokens to two of the products
    tokens = ep.Tokens(x_TD=x[: rows_ // 8], source_R=source, choices=8)
    taken = tokens if ep.gathers(x, f) and gated else x
    gathered = taken is tokens
    late = tokens if ep.gathers(x, f, backward=True) else None  # of the products of the backward pass
    beside = (tokens, torch.empty_like(x)) if gathered and late is None and ep.copies(tokens) else None
    even = rows_ // experts * experts
    x3, h3, dy3 = (t[:even].view(experts, per_expert, -1) for t in (x, h, dy))
    yield p(
        f"up{planes}", f, d, planes, lambda t: ep.up(taken, up_weights, rows, act, tile=t), lambda: x3 @ w1.mT, gathered
    )
    yield p("nt", f, d, 1, lambda t: ep.rows_product(x[None], (w1,), rows, transposed=True, tile=t), lambda: x3 @ w1.mT)
    yield p("nt", d, f, 1, lambda t: ep.rows_product(h[None], (w2,), rows, transposed=True, tile=t), lambda: h3 @ w2.mT)
    yield p("nn", f, d, 1, lambda t: ep.rows_product(dy[None], (w2,), rows, transposed=False, tile=t), lambda: x3 @ w2)
    yield p("nn", d, f, 1, lambda t: ep.rows_product(h[None], (w1,), rows, transposed=False, tile=t), lambda: h3 @ w1)
    if gated:
        yield p(
            "nn2", d, f, 2,
            lambda t: ep.rows_product(z, up_weights, rows, transposed=False, tile=t, beside=beside), lambda: h3 @ w1,
            beside is not None,
        )  # fmt: skip
        # of LoRA adapters, rank 16
        low_h = ep.LowRank(a_RL=new(rows_, 16), b=new(1, experts, d, 16))
        low_dy = ep.LowRank(a_RL=low_h.a_RL, b=new(1, experts, 16, f))
        low_z = ep.LowRank(a_RL=new(rows_, 32), b=new(1, experts, 32, d))
        dy_rows = taken if gathered else dy[None]
        yield p(
            "low_nt", d, f, 1,
            lambda t: ep.rows_product(h[None], (w2,), rows, transposed=True, tile=t, low=low_h), lambda: h3 @ w2.mT,
        )  # fmt: skip
        yield p(
            "low_nn", f, d, 1,
            lambda t: ep.rows_product(dy_rows, (w2,), rows, transposed=False, tile=t, low=low_dy), lambda: x3 @ w2,
            gathered,
        )  # fmt: skip
        yield p(
            "low_nn2", d, f, 2,
            lambda t: ep.rows_product(z, up_weights, rows, transposed=False, tile=t, low=low_z), lambda: h3 @ w1,
        )  # fmt: skip
    yield p(
        f"down_backward{planes}", f, d, 1,
        lambda t: ep.down_backward_(late or dy, w2, z.clone() if t is None else z, rows, act, weights, source, tile=t),
        lambda: x3 @ w2, late is not None,
    )  # fmt: skip
    inner = "inner" if late is None else "inner_tokens"
    yield p(
        inner, f, d, 1, lambda t: ep.weight_gradient(late or dy, h, rows, out=out2, tile=t), lambda: dy3.mT @ h3,
        late is not None,
    )  # fmt: skip
    yield p(
        inner, d, f, planes, lambda t: ep.weight_gradient(z, late or x, rows, out=out, tile=t), lambda: h3.mT @ x3,
        late is not None,
    )  # fmt: skip


def _compile(share: tuple[int, int, list[str]]) -> None:
    index, of, names = share
    count = 0
    # widths that leave a last tile of 256, of 64 and of 128 columns, and tokens that are gathered
    for d, f, gated in ((2048, 512, True), (256, 2048, True), (256, 2048, False), (320, 320, True), (320, 384, True)):
        CASES["tiny"] = (2048, d, f, 4, gated)
        for product in products("tiny", "cuda", "equal"):
            if names and product.name not in names:
                continue
            for tile in {tile._replace(group=1) for tile in product.candidates()}:
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
        for equal, random in zip(products(case, "cuda", "equal"), products(case, "cuda", "random"), strict=True):
            if names and equal.name not in names:
                continue
            tiles = []
            for tile in equal.candidates():
                try:
                    equal.run(tile)
                    tiles.append(tile)
                except Exception as error:
                    print("failed", equal.name, tile, repr(error)[:120])
            runs = [functools.partial(product.run, tile) for product in (equal, random) for tile in tiles]
            peer, *times = in_turn_ms([equal.peer, *runs], args.repeats)
            pairs = list(zip(times[: len(tiles)], times[len(tiles) :], tiles, strict=True))
            ranked = sorted(pairs, key=lambda pair: pair[0] + pair[1])
            best[equal.key] = {name: getattr(ranked[0][2], name) for name in ("bm", "stages", "group", "split")}
            shown = "  ".join(
                f"{equal.flops / even / 1e9:.0f}, {equal.flops / uneven / 1e9:.0f}: "
                f"{t.bm} s{t.stages} g{t.group} /{t.split}"
                for even, uneven, t in [*ranked[: args.top], ranked[-1]]
            )
            print(f"{case:8s} {equal.key:30s} bmm {equal.flops / peer / 1e9:.0f} | {shown}", flush=True)
        torch.cuda.empty_cache()
    if args.out:
        table = {**(json.loads(args.out.read_text()) if args.out.exists() else {}), **best}
        args.out.write_text(
            "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(table.items())) + "\n}\n"
        )


if __name__ == "__main__":
    main()
