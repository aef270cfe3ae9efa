"""Pointwise activations and their derivatives as Triton functions, for the epilogues of the expert products.

All arithmetic in fp32. Knows nothing of shapes. The twins are `reference.activate` and `reference.activation_grad`.
"""

import triton
import triton.language as tl

NAMES = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activate(z, ACT: tl.constexpr):
    """act(z)."""
    if ACT == "silu":
        return z * tl.sigmoid(z)
    elif ACT == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * _SQRT_HALF))
    elif ACT == "gelu_tanh":
        return 0.5 * z * (1.0 + _tanh(_SQRT_2_OVER_PI * (z + _GELU_CUBIC * z * z * z)))
    elif ACT == "relu":
        return tl.maximum(z, 0.0)
    elif ACT == "relu2":
        r = tl.maximum(z, 0.0)
        return r * r
    else:
        tl.static_assert(ACT == "identity", "unknown activation")
        return z


@triton.jit
def activate_with_grad(z, ACT: tl.constexpr):
    """(act(z), act'(z))."""
    if ACT == "silu":
        s = tl.sigmoid(z)
        value = z * s
        return value, s + value * (1.0 - s)
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(z * _SQRT_HALF))
        return z * cdf, cdf + z * _INV_SQRT_2PI * tl.exp(-0.5 * z * z)
    elif ACT == "gelu_tanh":
        t = _tanh(_SQRT_2_OVER_PI * (z + _GELU_CUBIC * z * z * z))
        slope = _SQRT_2_OVER_PI * (1.0 + 3.0 * _GELU_CUBIC * z * z)
        return 0.5 * z * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * slope
    elif ACT == "relu":
        return tl.maximum(z, 0.0), tl.where(z > 0.0, 1.0, 0.0)
    elif ACT == "relu2":
        r = tl.maximum(z, 0.0)
        return r * r, 2.0 * r
    else:
        tl.static_assert(ACT == "identity", "unknown activation")
        return z, tl.zeros_like(z) + 1.0
