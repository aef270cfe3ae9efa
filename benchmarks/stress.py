"""Each warp-specialised kernel many times on uneven loads, every result compared bit by bit with the first one's.

    python benchmarks/stress.py [LAUNCHES]

compute-sanitizer's racecheck does not follow every mbarrier: a hazard that it reports shows here as other bits, or not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from foundry_moe_kernels import expert_products as ep
from foundry_moe_kernels.tuning import Tile
from timing import captured, header

D, F, K, TOKENS, RANK = 512, 512, 2, 1024, 64
LOADS = [0, 1, 130, 127, 128, 129, 300, 7, 0, 511, 64, 611]  # of 2048 rows; 40 are unused
EACH = 50  # launches of a captured graph


def cases() -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Results of every kind of launch, rows in use alone."""
    experts, rows_ = len(LOADS), TOKENS * K

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    offsets_E = torch.tensor(LOADS, device="cuda").cumsum(0).int()
    rows, end = ep.ragged_rows(offsets_E, rows_), sum(LOADS)
    x, x_RD, z, h = new(TOKENS, D), new(rows_, D), new(2, rows_, F), new(rows_, F)
    w1, v1, w2 = new(experts, F, D), new(experts, F, D), new(experts, D, F)
    source_R = torch.randperm(rows_, device="cuda").int()
    source_R[end:] = -1
    tokens = ep.Tokens(x_TD=x, source_R=source_R, choices=K)
    low = ep.LowRank(a_RL=new(rows_, RANK), b=new(1, experts, D, RANK))
    tile = Tile()

    def copied() -> tuple[Tensor, ...]:
        out = torch.zeros(rows_, D, dtype=torch.bfloat16, device="cuda")
        product = ep.rows_product(z, (w1, v1), rows, transposed=False, tile=tile, beside=(tokens, out))
        return product[:end], out[:end]

    def down(**more: ep.LowRank) -> tuple[Tensor]:
        return (ep.rows_product(h[None], (w2,), rows, transposed=True, tile=tile, **more)[:end],)

    def up(taken: Tensor | ep.Tokens) -> tuple[Tensor, ...]:
        return tuple(out[..., :end, :] for out in ep.up(taken, (w1, v1), rows, "silu", tile=tile))

    def inner(dtype: torch.dtype) -> tuple[Tensor]:
        out = torch.empty(2, experts, F, D, dtype=dtype, device="cuda")
        return (ep.weight_gradient(z, x_RD, rows, tile=Tile(split=1), out=out),)

    return {
        "rows": down,
        "rows of two planes": lambda: (ep.rows_product(z, (w1, v1), rows, transposed=False, tile=tile)[:end],),
        "rows, gated": lambda: up(x_RD),
        "rows, gated, gathered": lambda: up(tokens),
        "rows with a copier": copied,
        "rows and a low-rank product": lambda: down(low=low),
        "weights' gradients": lambda: inner(torch.bfloat16),
        "weights' gradients in fp32": lambda: inner(torch.float32),
    }


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def main() -> None:
    launches = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    torch.manual_seed(0)
    print(header(), flush=True)
    differing = 0
    for name, run in cases().items():
        expected = [bits(result).clone() for result in run()]
        different = torch.zeros((), dtype=torch.int64, device="cuda")

        def step(run=run, expected=expected, different=different) -> None:  # type: ignore[no-untyped-def]
            for result, first in zip(run(), expected, strict=True):
                different.add_((bits(result) != first).any())

        graph = captured(lambda step=step: [step() for _ in range(EACH)])
        different.zero_()
        began = time.perf_counter()
        for _ in range(launches // EACH):
            graph.replay()
        torch.cuda.synchronize()
        differing += int(different)
        took_s = time.perf_counter() - began
        print(f"{name}: {launches // EACH * EACH} launches, {int(different)} differ, {took_s:.1f} s", flush=True)
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
