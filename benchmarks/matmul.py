"""TFLOP/s of the six expert products against cuBLAS (`torch.bmm`) and `torch._grouped_mm`.

    python benchmarks/matmul.py [--cases XS,Small,...]

`ours` are the Hopper kernels. `sparse` are the portable SDD and DSD products of a layer: fwd1 and dgrad2 are SDD, fwd2
and dgrad1 DSD, wgrad2 and wgrad1 DSD of a transposed S. FOUNDRY_MOE_KERNELS=portable leaves `ours` out. The first three
cases are the MegaBlocks paper's 18 problems (Gale et al. 2022, figure 9). For other topologies: `block_sparse.py`.

Shapes: R rows, D model width, F expert width, E experts, C = E * F columns of S.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from foundry_moe_kernels import expert_products as ep
from foundry_moe_kernels import products
from foundry_moe_kernels.topology import topology_from_offsets
from timing import DEVICE, DTYPE, geometric_mean, header, in_turn_ms, loads
from torch import Tensor

from foundry_moe.ops.backends import takes_hopper
from foundry_moe.ops.expert_plan import block_of

CASES = {
    "XS": (65536, 512, 2048, 64),
    "Small": (32768, 768, 3072, 64),
    "Medium": (8192, 1024, 4096, 64),
    "Mixtral": (16384, 4096, 14336, 8),
    "DBRX": (32768, 6144, 10752, 16),
    "OLMoE": (131072, 2048, 1024, 64),
    "Qwen3": (131072, 2048, 768, 128),
}
PAPER = ("XS", "Small", "Medium")
PRODUCTS = ("fwd1", "fwd2", "dgrad2", "dgrad1", "wgrad2", "wgrad1")


def new(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def variants(case: str, load: str) -> dict[str, dict[str, Callable[[], Tensor]]]:
    """Each product by who computes it: sparse, grouped, ours (on a Hopper) and, with uniform load, bmm."""
    rows, d, f, experts = CASES[case]
    counts = loads(rows, experts, load)
    offsets_E = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    ragged = ep.ragged_rows(offsets_E, rows)

    x, h, w1, w2 = new(rows, d), new(rows, f), new(experts, f, d), new(experts, d, f)
    dy, dh = new(rows, d), new(rows, f)
    dw2, dw1 = (torch.empty(1, *w.shape, dtype=w.dtype, device=DEVICE) for w in (w2, w1))
    g = torch._grouped_mm
    ours = {
        "fwd1": lambda: ep.rows_product(x[None], (w1,), ragged, transposed=True),
        "fwd2": lambda: ep.rows_product(h[None], (w2,), ragged, transposed=True),
        "dgrad2": lambda: ep.rows_product(dy[None], (w2,), ragged, transposed=False),
        "dgrad1": lambda: ep.rows_product(dh[None], (w1,), ragged, transposed=False),
        "wgrad2": lambda: ep.weight_gradient(dy[None], h, ragged, out=dw2),
        "wgrad1": lambda: ep.weight_gradient(dh[None], x, ragged, out=dw1),
    }
    topology = topology_from_offsets(offsets_E, rows, [f] * experts, block_of(DEVICE))
    sparse = {
        "fwd1": lambda: products.sdd(x, w1, topology, trans_b=True, zero_tail=False),
        "fwd2": lambda: products.dsd(h, w2, topology, trans_b=True, zero_tail=False),
        "dgrad2": lambda: products.sdd(dy, w2, topology, zero_tail=False),
        "dgrad1": lambda: products.dsd(dh, w1, topology, zero_tail=False),
        "wgrad2": lambda: products.dsd(h, dy, topology, trans_s=True, stacked=True, out=dw2[0].mT),
        "wgrad1": lambda: products.dsd(dh, x, topology, trans_s=True, stacked=True, out=dw1[0]),
    }
    grouped = {
        "fwd1": lambda: g(x, w1.mT, offs=offsets_E),
        "fwd2": lambda: g(h, w2.mT, offs=offsets_E),
        "dgrad2": lambda: g(dy, w2, offs=offsets_E),
        "dgrad1": lambda: g(dh, w1, offs=offsets_E),
        "wgrad2": lambda: g(dy.t(), h, offs=offsets_E),
        "wgrad1": lambda: g(dh.t(), x, offs=offsets_E),
    }
    ways = {"sparse": sparse, "grouped": grouped}
    if takes_hopper(DEVICE, DTYPE, d, f):
        ways["ours"] = ours
    if load == "uniform" and rows % experts == 0:
        x3, h3, dy3, dh3 = (t.view(experts, rows // experts, -1) for t in (x, h, dy, dh))
        ways["bmm"] = {
            "fwd1": lambda: torch.bmm(x3, w1.mT),
            "fwd2": lambda: torch.bmm(h3, w2.mT),
            "dgrad2": lambda: torch.bmm(dy3, w2),
            "dgrad1": lambda: torch.bmm(dh3, w1),
            "wgrad2": lambda: torch.bmm(dy3.mT, h3),
            "wgrad1": lambda: torch.bmm(dh3.mT, x3),
        }
    return ways


def measure(case: str, load: str) -> dict[str, dict[str, float]]:
    """TFLOP/s of each product by those that `variants` names."""
    rows, d, f, _ = CASES[case]
    flops = 2.0 * rows * d * f
    ways = variants(case, load)
    result = {}
    for product in PRODUCTS:
        times = in_turn_ms([runs[product] for runs in ways.values()], 15)
        result[product] = {name: flops / ms / 1e9 for name, ms in zip(ways, times, strict=True)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    args = parser.parse_args()
    torch.manual_seed(0)
    print(header(), flush=True)
    ratios: dict[str, list[float]] = defaultdict(list)
    print("| case | load | | " + " | ".join(PRODUCTS) + " |\n" + "|---" * 9 + "|")
    for case in args.cases.split(","):
        shapes = "the paper's problems" if case in PAPER else "models' shapes"
        for load in ("uniform", "zipf"):
            result = measure(case, load)
            for name in next(iter(result.values())):
                rates = " | ".join(f"{result[product][name]:.0f}" for product in PRODUCTS)
                print(f"| {case} | {load} | {name} | {rates} |", flush=True)
            for values in result.values():
                for way in ("ours", "sparse"):
                    if way not in values:
                        continue
                    ratios[f"{way} / _grouped_mm, {load}"].append(values[way] / values["grouped"])
                    if "bmm" in values:
                        ratios[f"{way} / bmm, {shapes}"].append(values[way] / values["bmm"])
        torch.cuda.empty_cache()
    for label, values in ratios.items():
        print(f"{label}: geometric mean {geometric_mean(values):.3f}, min {min(values):.3f}, max {max(values):.3f}")


if __name__ == "__main__":
    main()
