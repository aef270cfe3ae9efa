"""Muon's orthogonalisation and a whole step of it: times, and errors against the same polynomial in fp64.

    python benchmarks/newton_schulz.py [--toy]

TFLOP/s of orthogonalisation count the products of plain iterations, so that they compare times; of single products they
count what is computed. The inputs that errors are of: normal numbers, rank n / 8, and a condition of 1e6. `--toy` is
for a CPU, with kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))
from foundry_moe_kernels import symmetric_products
from foundry_moe_kernels.symmetric_products import symmetric_product
from timing import DEVICE, header, in_turn_ms, print_table
from torch import Tensor, nn

from foundry_moe import Muon
from foundry_moe.optim import muon, newton_schulz
from foundry_moe.optim.muon import TOGETHER
from foundry_moe.optim.newton_schulz import COEFFICIENTS, iterate, orthogonalize

SHAPES = ((224, 1024, 2048), (224, 2048, 1024), (576, 768, 2048), (16, 2048, 2048))
TOY_SHAPES = ((4, 16, 32), (4, 32, 16), (2, 24, 40))
TILES = [
    {"SIDE": 128, "BK": depth, "num_stages": stages, "num_warps": warps}
    for depth, stages, warps in ((64, 3, 4), (64, 3, 8), (64, 6, 8), (32, 4, 4))
]
TOY_TILES = [{"SIDE": 16, "BK": 16, "num_stages": 2, "num_warps": 4}]


def inputs(number: int, rows: int, columns: int) -> Tensor:
    """fp32 [N, R, C]: matrix 1 has a rank of n / 8, matrix 2 a condition of 1e6, the others are normal."""
    x = torch.randn(number, rows, columns, device=DEVICE)
    n = min(rows, columns)
    x[1] = torch.randn(rows, n // 8, device=DEVICE) @ torch.randn(n // 8, columns, device=DEVICE)
    if number > 2:
        left, _ = torch.linalg.qr(torch.randn(rows, n, device=DEVICE))
        right, _ = torch.linalg.qr(torch.randn(columns, n, device=DEVICE))
        x[2] = (left * torch.logspace(0, -6, n, device=DEVICE)) @ right.mT
    return x.bfloat16()


def in_batches(function: Callable[[Tensor], Tensor], x: Tensor, together: int) -> Callable[[], Tensor]:
    """As the optimizer does, with at most so many numbers at once; the last result is returned."""
    batches = x.split(max(1, together // x[0].numel()))

    def run() -> Tensor:
        result = batches[0]
        for batch in batches:
            result = function(batch)
        return result

    return run


def plain(x: Tensor) -> Tensor:
    """What the optimizer did before, and does on other GPUs."""
    return iterate(x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7), 5)


def torchs(x: Tensor) -> Tensor:
    """torch.optim.Muon's function for each matrix; it divides a bf16 input in place."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    return torch.stack([_zeropower_via_newtonschulz(matrix.clone(), COEFFICIENTS, 5, 1e-7) for matrix in x])


def gram(x: Tensor) -> Tensor:
    """`orthogonalize` by Gram matrices, whatever the device is."""
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    return newton_schulz.iterate_on_gram(torch.div(x, norm, out=torch.empty_like(x, dtype=torch.float16)), 5)


def whole_product(
    a: Tensor,
    b: Tensor | None = None,
    added: Sequence[Tensor] = (),
    *,
    scales: Sequence[float] = (1.0,),
    turned: bool = False,
) -> Tensor:
    """`symmetric_product` by torch, which computes both halves."""
    b = a if b is None else b
    a, b = (a.mT, b) if turned else (a, b.mT)
    result = torch.baddbmm(added[0], a, b, beta=scales[1], alpha=scales[0]) if added else a @ b
    return result.add_(added[1], alpha=scales[2]) if len(added) > 1 else result


def gram_by_torch(x: Tensor) -> Tensor:
    """The same algorithm with torch's products."""
    newton_schulz.symmetric_product = whole_product  # type: ignore[assignment]
    try:
        return gram(x)
    finally:
        newton_schulz.symmetric_product = symmetric_product


def orthogonalisation(shapes: tuple[tuple[int, int, int], ...]) -> None:
    """Times and errors of each way, for stacks of matrices."""
    variants: list[tuple[str, Callable[[Tensor], Tensor], int]] = [
        ("plain iterations, bf16", plain, TOGETHER),
        ("torch.optim.Muon's", torchs, TOGETHER),
        ("Gram matrices, torch's products", gram_by_torch, TOGETHER),
        ("Gram matrices", gram, TOGETHER),
        ("Gram matrices, 2^25 numbers at once", gram, 2**25),
        ("Gram matrices, 2^27 numbers at once", gram, 2**27),
    ]
    for number, rows, columns in shapes:
        x = inputs(number, rows, columns)
        exact = iterate(x[:3].double() / x[:3].double().norm(dim=(1, 2), keepdim=True), 5)
        exact = exact.view(-1, rows, columns)
        n, m = sorted((rows, columns))
        flops = number * 5 * (4 * n * n * m + 2 * n**3)
        times = in_turn_ms([in_batches(function, x, together) for _, function, together in variants], 3, 1)
        lines = []
        for (name, function, _), ms in zip(variants, times, strict=True):
            difference = (function(x[:3].clone()).double() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
            errors = [f"{float(error):.4f}" for error in difference]
            lines.append([name, f"{ms:.2f}", f"{flops / ms / 1e9:.0f}", f"{ms / times[0]:.3f}", ", ".join(errors)])
        print(f"\n{number} matrices {rows} x {columns}")
        print_table(["", "ms", "TFLOP/s", "over plain", "errors: normal, low rank, condition 1e6"], lines)
        largest = torch.linalg.svdvals(gram(x[:3].clone()).double())
        print("singular values, Gram matrices: " + ", ".join(f"{s.min():.3f} to {s.max():.3f}" for s in largest))


def products(number: int, n: int, m: int, tiles: list[dict[str, int]]) -> None:
    """Each product of an iteration against torch's; the fastest tile of the first is used from then on."""
    x = torch.randn(number, n, m, device=DEVICE, dtype=torch.float16) / m**0.5
    turned, g = x.mT.contiguous(), symmetric_product(x)
    half, other = symmetric_products.cdiv(n, 128) + 1, symmetric_products.cdiv(n, 128)
    computed = number * n * n * (half / other)  # numbers twice, of tiles on and below the diagonal

    def rates(name: str, inner: int, runs: list[Callable[[], Tensor]], names: list[str]) -> list[float]:
        times = in_turn_ms(runs, 9, 2)
        for label, ms in zip(names, times, strict=True):
            flops = 2 * number * n * n * inner if label == "torch" else computed * inner
            lines.append([name, label, f"{ms:.3f}", f"{flops / ms / 1e9:.0f}", f"{times[0] / ms:.2f}"])
        return times

    lines: list[list[str]] = []
    names = ["torch", *(", ".join(str(value) for value in tile.values()) for tile in tiles)]

    def each(
        function: Callable[[dict[str, int]], Tensor], by_torch: Callable[[], Tensor]
    ) -> list[Callable[[], Tensor]]:
        return [by_torch, *((lambda tile=tile: function(tile)) for tile in tiles)]

    times = rates("g h", n, each(lambda tile: symmetric_product(g, g, tile=tile), lambda: g @ g), names)
    best = tiles[min(range(len(tiles)), key=lambda i: times[i + 1])]
    symmetric_products.TILE = best
    names = ["torch", "kernel"]
    rates(
        "g h + g",
        n,
        [lambda: whole_product(g, g, [g], scales=(1.0, 2.0)), lambda: symmetric_product(g, g, [g], scales=(1.0, 2.0))],
        names,
    )
    rates("x x^T", m, [lambda: x @ x.mT, lambda: symmetric_product(x)], names)
    rates("x^T x", m, [lambda: turned.mT @ turned, lambda: symmetric_product(turned, turned=True)], names)
    print(f"\nproducts of {number} matrices {n} x {m}, fp16; tiles: {', '.join(best)}")
    print_table(["", "by", "ms", "TFLOP/s", "times as fast"], lines)
    q = lambda: g @ x  # noqa: E731
    (ms,) = in_turn_ms([q])
    print(f"g x by torch: {ms:.3f} ms, {2 * number * n * n * m / ms / 1e9:.0f} TFLOP/s")


class Stacks(nn.Module):
    """The hidden matrices of some layers."""

    def __init__(self, layers: int, number: int, n: int, m: int) -> None:
        super().__init__()
        shapes = [(number, n, m), (number, n, m), (number, m, n)] * layers
        self.stacks = nn.ParameterList([torch.randn(shape, device=DEVICE) for shape in shapes])


def step(layers: int, number: int, n: int, m: int) -> None:
    """A whole step, with kernels and without."""
    model = Stacks(layers, number, n, m)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = Muon(model.parameters(), model=model)
    optimizer.gradient_factor = torch.ones((), device=DEVICE)
    numbers = sum(parameter.numel() for parameter in model.parameters())

    def run(fast: bool, part: Callable[[Tensor, int], Tensor]) -> Callable[[], None]:
        def once() -> None:
            fits, muon.orthogonalize = muon._fits_kernel, part
            muon._fits_kernel = fits if fast else lambda *_: False
            try:
                optimizer.step()
            finally:
                muon._fits_kernel, muon.orthogonalize = fits, orthogonalize

        return once

    def nothing(x: Tensor, _: int) -> Tensor:
        return x

    runs = {
        "plain, torch's element-wise operators": run(False, lambda x, *_, **__: plain(x)),
        "with kernels": run(True, orthogonalize),
        "element-wise operators of torch alone": run(False, nothing),
        "element-wise kernels alone": run(True, nothing),
    }
    times = in_turn_ms(list(runs.values()), 5, 2)
    print(f"\na step of {3 * layers} stacks of {number} matrices {n} x {m}, fp32, {numbers / 1e9:.3f}e9 numbers")
    lines = [
        [name, f"{ms:.2f}", f"{ms / times[0]:.3f}", f"{24 * numbers / ms / 1e9:.2f}"]
        for name, ms in zip(runs, times, strict=True)
    ]
    print_table(["", "ms", "over plain", "TB/s if 24 bytes a number"], lines)


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    toy = parser.parse_args().toy
    print(header(), flush=True)
    torch.manual_seed(1)
    if toy:
        products(2, 16, 32, TOY_TILES)
        orthogonalisation(TOY_SHAPES)
        step(1, 2, 16, 32)
        return
    products(64, 1024, 2048, TILES)
    orthogonalisation(SHAPES)
    step(2, 64, 1024, 2048)
    products(85, 768, 2048, TILES[:3])


if __name__ == "__main__":
    with torch.no_grad():
        main()
