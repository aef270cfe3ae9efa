"""Newton-Schulz iterations, which map the singular values of a matrix to about 1. Knows no optimizer.

Shapes: N matrices, R rows and C columns of one.
"""

from __future__ import annotations

import torch
from foundry_moe_kernels.symmetric_products import supported, symmetric_product
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial; Jordan 2024, "Newton-Schulz"
NORM_EPS = 1e-7  # as in torch.optim.Muon
RESTART = 3  # iterations on one Gram matrix


def orthogonalize(x_NRC: Tensor, steps: int = 5) -> Tensor:
    """Maps the singular values of each matrix to about 1 (0.7 to 1.2).

    Sums are in fp32 or the dtype of `x_NRC`. bf16 on Hopper: see `iterate_on_gram`, the result is fp16.
    """
    on_gram = x_NRC.dtype == torch.bfloat16 and supported(x_NRC)
    dtype = torch.float32 if on_gram else x_NRC.dtype
    norm = torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True, dtype=dtype).clamp(min=NORM_EPS)
    if not on_gram:
        return iterate(x_NRC / norm, steps)
    x = torch.div(x_NRC, norm, out=torch.empty_like(x_NRC, dtype=torch.float16))
    return iterate_on_gram(x, steps) if len(x) else x  # fp16 on a rank without matrices too, as on its peers


def iterate(x_NRC: Tensor, steps: int) -> Tensor:
    """Of matrices of norm 1, in their dtype."""
    a, b, c = COEFFICIENTS
    tall = x_NRC.shape[1] > x_NRC.shape[2]
    x = x_NRC.mT if tall else x_NRC
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def iterate_on_gram(x_NRC: Tensor, steps: int) -> Tensor:
    """The same polynomials of x, by way of x x^T, of the smaller side: 0.61 to 0.74 of the time of `iterate`.

    For p(x) = q(x x^T) x, the next iteration needs p(x) p(x)^T = q (x x^T) q alone, of which all factors commute:
    products of symmetric matrices, computed by half. q is kept as y = q - scale, so that no pass adds a diagonal to z.

    Rounding turns small eigenvalues of x x^T negative, and iterations make them grow, so x is multiplied by q and its
    Gram matrix computed again after `RESTART` iterations. In fp16 the result is then nearer to the exact polynomial
    than that of `iterate` in bf16 (relative errors of 0.003 and 0.01 for random matrices, 0.01 and 0.1 for low rank,
    0.005 and 0.06 for a condition of 1e6); in bf16 it is not.
    Zhang et al. 2026, Gram Newton-Schulz, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/.
    """
    a, b, c = COEFFICIENTS
    tall = x_NRC.shape[1] > x_NRC.shape[2]
    x = x_NRC
    for first in range(0, steps, RESTART):
        last = min(first + RESTART, steps) - 1
        gram = y = symmetric_product(x, turned=tall)
        scale = 1.0
        for step in range(first, last + 1):
            z = symmetric_product(gram, gram, [gram], scales=(c, b))
            y = z if step == first else symmetric_product(y, z, [y, z], scales=(1.0, a, scale))
            scale *= a
            if step < last:
                half = symmetric_product(gram, z, [gram], scales=(1.0, a))
                gram = symmetric_product(half, z, [half], scales=(1.0, a))
        y.diagonal(dim1=1, dim2=2).add_(scale)
        x = x @ y if tall else y @ x
    return x
