"""Layers of every load: from one token up, three load classes, every dtype, beside torch's grouped way where it runs.

    python benchmarks/layer.py --sweep [--layers few,OLMoE,widths] [--dtypes bf16,fp16,tf32,fp32] [--csv FOLDER]

`widths` are a layer's step at many widths of tokens and experts, those that 8 does not divide too, in bf16: a cliff
takes twice what a neighbour in the list leads to expect.

A cell is a replayed graph's milliseconds, forward, or forward and backward. It is a cliff where it takes `CLIFF` times
what a neighbour leads to expect: the neighbour's time, or more where the work is more. Work is a lower bound, the
operations at the card's rate or the bytes at its bandwidth. Neighbours are half and twice the tokens, and at the same
tokens uniform load and bf16. Exits with 1 where there is a cliff.

Shapes: T tokens, K choices, R rows, D model width, F expert width, E experts.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import captured, header, in_turn_ms, probabilities
from torch import Tensor

from foundry_moe.ops import expert_mlp, plan_permute

# model width, expert width, experts, top-k; all gated
LAYERS = {"few": (2048, 512, 256, 8), "OLMoE": (2048, 1024, 64, 8)}
# model width, expert width of one more layer, in order of work
WIDTHS = [
    (2048, 1000), (2048, 1001), (2048, 1024), (2112, 1000), (2116, 1000), (2120, 1000), (2120, 1001), (2121, 1001),
    (2120, 1004), (2128, 1008), (2176, 1000), (2176, 1024),
]  # fmt: skip
WIDTHS_LAYER = (16384, 60, 4)  # tokens, experts, top-k
LOADS = ("uniform", "zipf", "one")
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
CLIFF = 1.5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
# Operations a ms of cuBLAS on an H200 with these layers' products (tf32 204 to 330 TFLOP/s in their six, fp32 on CUDA
# cores), bytes a ms
_OPS = {"bf16": 7e11, "fp16": 7e11, "tf32": 2.7e11, "fp32": 5e10}
_BYTES = 4e9


@dataclass(frozen=True, kw_only=True, order=True)
class Point:
    """One cell: `what` is forward or step."""

    layer: str
    dtype: str
    load: str
    what: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Time:
    ms: float
    work_ms: float


def work_ms(point: Point, rows: int, touched: int) -> float:
    """The least that a layer takes: `rows` choices, spread over `touched` experts."""
    d, f, experts, _ = LAYERS[point.layer]
    backward = point.what == "step"
    matrices = 3 * d * f
    operations = 2 * rows * matrices * (3 if backward else 1)
    elements = touched * matrices + rows * (d + 3 * f)
    if backward:  # all experts' gradients are written, zeros too
        elements += touched * matrices + experts * matrices + rows * (3 * d + 6 * f)
    size = DTYPES[point.dtype].itemsize
    return max(operations / _OPS[point.dtype], size * elements / _BYTES)


def neighbours(point: Point) -> list[Point]:
    """Half and twice the tokens, the same with uniform load, and in bf16."""
    found = [Point(**{**vars(point), "tokens": tokens}) for tokens in (point.tokens // 2, 2 * point.tokens)]
    found += [Point(**{**vars(point), **other}) for other in ({"load": "uniform"}, {"dtype": "bf16"})]
    return [other for other in found if other != point]


def excess(point: Point, times: Mapping[Point, Time]) -> float:
    """The largest of a point's time over what a neighbour leads to expect; 0 without neighbours."""
    own = times[point]
    return max(
        (
            own.ms / (times[other].ms * max(own.work_ms / times[other].work_ms, 1.0))
            for other in neighbours(point)
            if other in times
        ),
        default=0.0,
    )


def cliffs(times: Mapping[Point, Time]) -> dict[Point, float]:
    """The points that a neighbour's time does not explain, and by how much."""
    return {point: over for point in times if (over := excess(point, times)) >= CLIFF}


def chosen(tokens: int, experts: int, k: int, load: str) -> Tensor:
    """[T, K]: with `one` all tokens go to the same K experts."""
    if load == "one":
        return torch.arange(k, device="cuda", dtype=torch.int32).repeat(tokens, 1)
    noise = -torch.empty(tokens, experts, device="cuda").exponential_().log()
    return (noise + probabilities(experts, load).log().cuda().float()).topk(k).indices.int()


def _weights(d: int, f: int, experts: int, kind: torch.dtype) -> list[Tensor]:
    shapes = ((f, d), (f, d), (d, f))
    made = [torch.randn(experts, *shape, device="cuda") * shape[1] ** -0.5 for shape in shapes]
    return [weight.to(kind).requires_grad_() for weight in made]


def width_cliffs(repeats: int) -> dict[tuple[int, int], float]:
    """Prints a step's milliseconds at each of WIDTHS, and returns those that take twice what a neighbour predicts."""
    tokens, experts, k = WIDTHS_LAYER
    pool, kept, graphs = torch.cuda.graph_pool_handle(), [], []
    for d, f in WIDTHS:
        leaves = [torch.randn(tokens, d, device="cuda").bfloat16().requires_grad_()]
        leaves += _weights(d, f, experts, torch.bfloat16)
        weights, chosen_TK = torch.rand(tokens, k, device="cuda"), chosen(tokens, experts, k, "uniform")
        dy = torch.randn(tokens, d, device="cuda").bfloat16()

        def step(leaves=leaves, weights=weights, chosen_TK=chosen_TK, dy=dy) -> None:  # type: ignore[no-untyped-def]
            x, w1, v1, w2 = leaves
            plan = plan_permute(chosen_TK, experts)
            y = expert_mlp(x, weights, plan, w1, v1, w2, activation="silu", backend="blocksparse")
            torch.autograd.grad(y, leaves, dy)

        kept.append(step)
        graphs.append(captured(step, pool))
    times = in_turn_ms([graph.replay for graph in graphs], repeats)
    works = [d * f for d, f in WIDTHS]
    over = {}
    print(f"\nstep at widths, {WIDTHS_LAYER} (tokens, experts, top-k), ms\n| D | F | ms | over a neighbour |")
    for i, widths in enumerate(WIDTHS):
        beside = [j for j in (i - 1, i + 1) if 0 <= j < len(WIDTHS)]
        over[widths] = max(times[i] / (times[j] * max(works[i] / works[j], 1.0)) for j in beside)
        print(f"| {widths[0]} | {widths[1]} | {times[i]:.2f} | {over[widths]:.2f} |", flush=True)
    return {widths: factor for widths, factor in over.items() if factor >= 2}


def layer_times(
    layer: str, dtype: str, load: str, peer: Callable[..., Tensor] | None, repeats: int
) -> dict[Point, Time]:
    """Both times of every number of tokens, one replay of each in turn; with `peer`, torch's way too, as `grouped`."""
    d, f, experts, k = LAYERS[layer]
    kind = DTYPES[dtype]
    w1, v1, w2 = _weights(d, f, experts, kind)
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[Point, torch.cuda.CUDAGraph] = {}
    works: dict[Point, float] = {}
    kept = []  # what graphs read
    for tokens in TOKENS:
        x = torch.randn(tokens, d, device="cuda", dtype=kind).requires_grad_()
        dy = torch.randn(tokens, d, device="cuda", dtype=kind)
        weights = torch.rand(tokens, k, device="cuda", requires_grad=True)
        experts_TK = chosen(tokens, experts, k, load)
        kept.append((x, dy, weights, experts_TK))
        leaves = (x, weights, w1, v1, w2)

        def ours(x=x, weights=weights, experts_TK=experts_TK) -> Tensor:  # type: ignore[no-untyped-def]
            plan = plan_permute(experts_TK, experts)
            return expert_mlp(x, weights, plan, w1, v1, w2, activation="silu", backend="blocksparse")

        def theirs(x=x, weights=weights, experts_TK=experts_TK) -> Tensor:  # type: ignore[no-untyped-def]
            assert peer is not None
            return peer(x, experts_TK, weights, w1, v1, w2, k)

        def step(function: Callable[[], Tensor], leaves=leaves, dy=dy) -> None:  # type: ignore[no-untyped-def]
            for leaf in leaves:
                leaf.grad = None
            function().backward(dy)

        def forward(function: Callable[[], Tensor]) -> None:
            with torch.no_grad():
                function()

        for name, function in (("", ours), ("grouped ", theirs)):
            if name and peer is None:
                continue
            for what, run in (("forward", forward), ("step", step)):
                point = Point(layer=layer, dtype=name + dtype, load=load, what=what, tokens=tokens)
                run(function)
                graphs[point] = captured(lambda run=run, function=function: run(function), pool)
                touched = int(experts_TK.unique().numel())
                works[point] = work_ms(Point(**{**vars(point), "dtype": dtype}), experts_TK.numel(), touched)
        for leaf in leaves:
            leaf.grad = None
    times = in_turn_ms([graph.replay for graph in graphs.values()], repeats)
    return {point: Time(ms=ms, work_ms=works[point]) for point, ms in zip(graphs, times, strict=True)}


def table(times: Mapping[Point, Time], layer: str, what: str) -> list[list[str]]:
    """Tokens by columns of a dtype and a load; cliffs are marked with their excess."""
    columns = list(dict.fromkeys((p.dtype, p.load) for p in times if (p.layer, p.what) == (layer, what)))
    lines = [["tokens", *(f"{dtype} {load}" for dtype, load in columns)]]
    for tokens in TOKENS:
        line = [str(tokens)]
        for dtype, load in columns:
            point = Point(layer=layer, dtype=dtype, load=load, what=what, tokens=tokens)
            over = excess(point, times)
            mark = f" ({over:.2f})" if over >= CLIFF and not dtype.startswith("grouped") else ""
            line.append(f"{times[point].ms:.3f}{mark}")
        lines.append(line)
    return lines


def sweep(
    peer: Callable[..., Tensor], layers: list[str], dtypes: list[str], repeats: int, folder: Path | None
) -> dict[Point, float]:
    """Prints a table for each layer, forward and step, writes them as CSV, and returns the cliffs of ours."""
    print(header(), flush=True)
    times: dict[Point, Time] = {}
    for layer in layers:
        for dtype in dtypes:
            torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
            for load in LOADS:
                times |= layer_times(layer, dtype, load, peer if dtype == "bf16" else None, repeats)
                torch.cuda.empty_cache()
        for what in ("forward", "step"):
            lines = table(times, layer, what)
            print(f"\n{layer} {LAYERS[layer]}, {what}, ms")
            print("\n".join("| " + " | ".join(line) + " |" for line in lines), flush=True)
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / f"layer_sweep_{layer.lower()}_{what}.csv").open("w", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows(lines)
    found = {point: over for point, over in cliffs(times).items() if not point.dtype.startswith("grouped")}
    print(f"\n{len(times)} cells, {len(found)} cliffs")
    for point, over in sorted(found.items()):
        print(f"  {point}: {times[point].ms:.3f} ms, {over:.2f} times what a neighbour leads to expect")
    return found
