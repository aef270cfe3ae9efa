"""A whole expert layer from routing to combine, forward and backward, beside torch's grouped way and the dense roof.

    python benchmarks/layer.py [--cases OLMoE,Qwen3] [--profile]
    python benchmarks/layer.py --cases OLMoE --mixed          # experts of half and of three halves of the case's width
    python benchmarks/layer.py --sweep: see `layer_sweep`

The roof is one dense FFN of the same active arithmetic: T tokens through width K * F. Times are taken one step of each
in turn, in a new order every time, so all have the same power limit. Peak memory is what the
step adds to its inputs and weights, gradients included.

Shapes: T tokens, K choices, D model width, F expert width, E experts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))
from layer_sweep import LAYERS, sweep, width_cliffs
from timing import DEVICE, DTYPE, captured, header, in_processes, in_turn_ms, probabilities

from foundry_moe.ops import expert_mlp, plan_permute
from foundry_moe.ops.softmax_topk import softmax_topk

Shape = tuple[int, int, int, int, int, bool]  # tokens, model width, expert width, experts, top-k, gated
CASES: dict[str, Shape] = {
    "Medium": (16384, 1024, 4096, 64, 1, False),
    "Mixtral": (8192, 4096, 14336, 8, 2, True),
    "DBRX": (8192, 6144, 10752, 16, 4, True),
    "OLMoE": (16384, 2048, 1024, 64, 8, True),
    "GPT-OSS": (16384, 2880, 2880, 128, 4, True),
    "DeepSeek-V2-Lite": (16384, 2048, 1408, 64, 6, True),
    "DeepSeek-V2": (24576, 5120, 1536, 160, 6, True),
    "Qwen3": (16384, 2048, 768, 128, 8, True),
    "odd": (16384, 2120, 1000, 60, 4, True),
}


def ours(x: Tensor, logits: Tensor, w1: Tensor, v1: Tensor | None, w2: Tensor, k: int, memory: str = "save") -> Tensor:
    chosen = softmax_topk(logits, k, normalize=True, statistics=False)
    plan = plan_permute(chosen.experts_TK, w1.shape[0])
    act = "gelu" if v1 is None else "silu"
    return expert_mlp(x, chosen.weights_TK, plan, w1, v1, w2, activation=act, backend="blocksparse", memory=memory)


def torch_grouped(x: Tensor, logits: Tensor, w1: Tensor, v1: Tensor | None, w2: Tensor, k: int) -> Tensor:
    """torchtitan's way: sort, gather, `torch._grouped_mm`, weigh, scatter-add."""
    top, experts_TK = torch.topk(logits, k)
    return grouped_experts(x, experts_TK, torch.softmax(top.float(), -1), w1, v1, w2, k)


def grouped_experts(
    x: Tensor, experts_TK: Tensor, weights_TK: Tensor, w1: Tensor, v1: Tensor | None, w2: Tensor, k: int
) -> Tensor:
    """`torch_grouped` after its gate."""
    weights_A = weights_TK.flatten()
    expert_A, order_A = torch.sort(experts_TK.flatten(), stable=True)
    offsets_E = torch.histc(expert_A.float(), bins=w1.shape[0], min=0, max=w1.shape[0] - 1).cumsum(0).int()
    token_A = order_A // k
    x_RD = x[token_A]
    z = torch._grouped_mm(x_RD, w1.mT, offs=offsets_E)
    h = F.gelu(z) if v1 is None else F.silu(z) * torch._grouped_mm(x_RD, v1.mT, offs=offsets_E)
    y_RD = torch._grouped_mm(h, w2.mT, offs=offsets_E)
    y_RD = (y_RD.float() * weights_A[order_A, None]).to(x.dtype)
    return torch.zeros_like(x).scatter_add(0, token_A[:, None].expand(-1, x.shape[1]), y_RD)


def dense(x: Tensor, w1: Tensor, v1: Tensor | None, w2: Tensor) -> Tensor:
    z = F.linear(x, w1)
    h = F.gelu(z) if v1 is None else F.silu(z) * F.linear(x, v1)
    return F.linear(h, w2)


def step(function: Callable[[], Tensor], leaves: list[Tensor], dy: Tensor) -> None:
    for leaf in leaves:
        leaf.grad = None
    function().backward(dy)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compute a layer, with what gets gradients and the gradient of its output."""

    name: str
    function: Callable[[], Tensor]
    leaves: list[Tensor]
    dy: Tensor

    def step(self) -> None:
        step(self.function, self.leaves, self.dy)


def peak_bytes(way: Way) -> int:
    """The memory that a step adds."""
    way.step()
    for leaf in way.leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    for leaf in way.leaves:
        leaf.grad = None
    return peak


def profile(way: Way) -> None:
    from torch.profiler import ProfilerActivity, profile

    way.step()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        way.step()
        torch.cuda.synchronize()
    for event in recorded.key_averages():
        if event.device_time_total > 5:
            print(f"    {event.device_time_total / 1e3:8.3f} ms  {event.count:3d} x {event.key[:90]}")


def new(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE).requires_grad_()


def routed(tokens: int, d: int, experts: int, load: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, logits and the gradient of the output."""
    noise = -torch.empty(tokens, experts, device=DEVICE).exponential_().log()
    logits = (noise + probabilities(experts, load).log().to(DEVICE).float()).requires_grad_()
    return new(tokens, d), logits, torch.randn(tokens, d, device=DEVICE, dtype=DTYPE)


def expert_ways(shape: Shape, load: str) -> list[Way]:
    """The expert layer by our kernels, saving and recomputing, and torch's grouped way."""
    tokens, d, f, experts, k, gated = shape
    x, logits, dy = routed(tokens, d, experts, load)
    w1, w2 = new(experts, f, d, scale=d**-0.5), new(experts, d, f, scale=f**-0.5)
    v1 = new(experts, f, d, scale=d**-0.5) if gated else None
    leaves = [t for t in (x, logits, w1, v1, w2) if t is not None]
    functions: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: ours(x, logits, w1, v1, w2, k),
        "ours, recompute": lambda: ours(x, logits, w1, v1, w2, k, "recompute"),
        "torch grouped": lambda: torch_grouped(x, logits, w1, v1, w2, k),
    }
    return [Way(name=name, function=function, leaves=leaves, dy=dy) for name, function in functions.items()]


def mixed_ways(shape: Shape, load: str) -> list[Way]:
    """Experts of half and of three halves of the width, in turn, and what torch has for them: all padded to the widest.

    Last the layer of one width, by the same kernels where FOUNDRY_MOE_KERNELS=portable.
    """
    tokens, d, f, experts, k, gated = shape
    widths = [f // 2, f + f // 2] * (experts // 2)
    x, logits, dy = routed(tokens, d, experts, load)
    w1, w2 = new(sum(widths), d, scale=d**-0.5), new(sum(widths), d, scale=f**-0.5)
    v1 = new(sum(widths), d, scale=d**-0.5) if gated else None

    def mixed(memory: str) -> Tensor:
        chosen = softmax_topk(logits, k, normalize=True, statistics=False)
        return expert_mlp(
            x, chosen.weights_TK, plan_permute(chosen.experts_TK, experts), w1, v1, w2, widths=widths,
            activation="silu" if gated else "gelu", backend="blocksparse", memory=memory,
        )  # fmt: skip

    leaves = [t for t in (x, logits, w1, v1, w2) if t is not None]
    one_width = expert_ways(shape, load)[0]
    padded = expert_ways((tokens, d, f + f // 2, experts, k, gated), load)[2]
    return [
        Way(name="mixed widths", function=lambda: mixed("save"), leaves=leaves, dy=dy),
        Way(name="mixed widths, recompute", function=lambda: mixed("recompute"), leaves=leaves, dy=dy),
        replace(padded, name="torch grouped, padded"),
        replace(one_width, name="one width"),
    ]


def dense_way(case: str) -> Way:
    tokens, d, f, _, k, gated = CASES[case]
    x, w1, w2 = new(tokens, d), new(k * f, d, scale=d**-0.5), new(d, k * f, scale=f**-0.5)
    v1 = new(k * f, d, scale=d**-0.5) if gated else None
    dy = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)
    leaves = [t for t in (x, w1, v1, w2) if t is not None]
    return Way(name="dense roof", function=lambda: dense(x, w1, v1, w2), leaves=leaves, dy=dy)


def compile_kernels(index: int, case: str, ways_of: Callable[[Shape, str], list[Way]]) -> None:
    """In a process of its own: kernels are kept on disk, and compile one after another in one process."""
    torch.cuda.set_device(index % torch.cuda.device_count())
    for way in ways_of(CASES[case], "uniform")[:2]:
        way.step()
    torch.cuda.synchronize()


def run(case: str, load: str, ways_of: Callable[[Shape, str], list[Way]], repeats: int, profiled: bool) -> None:
    tokens, d, f, _, k, gated = CASES[case]
    flops = 6 * (3 if gated else 2) * tokens * k * d * f
    ways = [*ways_of(CASES[case], load), dense_way(case)]
    peaks = [peak_bytes(way) for way in ways]
    eager = in_turn_ms([way.step for way in ways], repeats)
    graphs = [captured(way.step) for way in ways]
    replayed = in_turn_ms([graph.replay for graph in graphs], repeats)
    for way, ms, graph, peak in zip(ways, eager, replayed, peaks, strict=True):
        over = f"{ms / eager[-1]:.3f} | {eager[2] / ms:.2f} | {graph / replayed[-1]:.3f} | {replayed[2] / graph:.2f}"
        rates = f"{ms:.2f} | {flops / ms / 1e9:.0f} | {graph:.2f} | {peak / 1e6:.0f}"
        print(f"| {case} | {load} | {way.name} | {rates} | {over} |", flush=True)
    if profiled:
        profile(ways[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--loads", default="uniform,zipf")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--mixed", action="store_true", help="experts of different widths")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--layers", default=",".join([*LAYERS, "widths"]), help="of the sweep")
    parser.add_argument("--dtypes", default="bf16,fp16,tf32", help="of the sweep")
    parser.add_argument("--csv", type=Path, help="folder for the sweep's tables")
    arguments = parser.parse_args()
    if arguments.sweep:
        torch.manual_seed(0)
        layers, dtypes = arguments.layers.split(","), arguments.dtypes.split(",")
        odd = width_cliffs(arguments.repeats) if "widths" in layers else {}
        layers = [layer for layer in layers if layer != "widths"]
        sys.exit(bool(sweep(grouped_experts, layers, dtypes, arguments.repeats, arguments.csv) or odd))
    cases = arguments.cases.split(",")
    ways_of = mixed_ways if arguments.mixed else expert_ways
    in_processes(compile_kernels, ((index, case, ways_of) for index, case in enumerate(cases)))
    torch.manual_seed(0)
    print(header())
    print("| case | load | | ms | TFLOP/s | graph ms | peak MB | over roof | over grouped | the same, graph | |")
    print("|---" * 11 + "|")
    for case in cases:
        for load in arguments.loads.split(","):
            run(case, load, ways_of, arguments.repeats, arguments.profile and load == "uniform")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
