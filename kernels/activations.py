"""Pointwise activations and their derivatives as Triton functions, for the epilogues of the expert products.

All arithmetic in fp32. Constants are the right operand: in the interpreter of Triton 3.9 a constant times a tensor
stays a constant, which `tl.exp` refuses.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from foundry_moe_kernels.launch import INTERPRETED

NAMES = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")


class GLUFormula(NamedTuple):
    """A GLU: h = act(alpha g) / alpha * (u + shift), g = min(gate, limit), u = up within +-limit; limit 0 = none."""

    act: str
    alpha: float = 1.0
    limit: float = 0.0
    shift: float = 0.0


@functools.cache
def formula(activation: str) -> GLUFormula:
    """From an activation's name, or a formula's fields separated by spaces: `silu 1.702 7.0 1.0` is GPT-OSS's."""
    act, *numbers = activation.split()
    return GLUFormula(act, *map(float, numbers))


_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_GELU_CUBIC = tl.constexpr(0.044715)
_PTX = tl.constexpr(not INTERPRETED)


@triton.jit
def _sigmoid(x):
    """In four instructions, right to some 2^-22; `tl.sigmoid` takes 13, most of them for denormals."""
    if _PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            mul.ftz.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.ftz.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }""",
            constraints="=f,f",
            args=[x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.sigmoid(x)


@triton.jit
def _tanh(x):
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@triton.jit
def _normal_cdf(z):
    """(Phi(z), exp(-z^2/2)): Abramowitz and Stegun 7.1.26, off by 7.5e-8 at most.

    With `tl.erf` the epilogue of `up` took as long again as its product (H200, 65536 x 512 x 2048: 287 of 602 TFLOP/s).
    As one block, whose two divisions and powers are single instructions, an element's numbers are not kept while those
    of all others are computed: the epilogue spills nothing.
    """
    if _PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t, p, q;
            .reg .pred negative;
            abs.ftz.f32 t, $2;
            fma.rn.ftz.f32 t, t, 0f3E6D3388, 0f3F800000;
            rcp.approx.ftz.f32 t, t;
            mul.ftz.f32 q, $2, $2;
            mul.ftz.f32 q, q, 0fBF38AA3B;
            ex2.approx.ftz.f32 $1, q;
            fma.rn.ftz.f32 p, t, 0f3F87DC22, 0fBFBA00E3;
            fma.rn.ftz.f32 p, p, t, 0f3FB5F0E3;
            fma.rn.ftz.f32 p, p, t, 0fBE91A98E;
            fma.rn.ftz.f32 p, p, t, 0f3E827906;
            mul.ftz.f32 p, p, t;
            mul.ftz.f32 p, p, $1;
            mul.ftz.f32 p, p, 0f3F000000;
            sub.ftz.f32 q, 0f3F800000, p;
            setp.lt.ftz.f32 negative, $2, 0f00000000;
            selp.f32 $0, p, q, negative;
            }""",
            constraints="=f,=&f,f",
            args=[z],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        t = 1.0 / (1.0 + tl.abs(z) * (0.3275911 * _SQRT_HALF))
        bell = tl.exp(-0.5 * z * z)
        tail = (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592
        tail = 0.5 * tail * t * bell
        return tl.where(z < 0.0, tail, 1.0 - tail), bell


@triton.jit
def activate(z, ACT: tl.constexpr):
    """act(z)."""
    if ACT == "silu":
        return z * _sigmoid(z)
    elif ACT == "gelu":
        cdf, _ = _normal_cdf(z)
        return z * cdf
    elif ACT == "gelu_tanh":
        return 0.5 * z * (1.0 + _tanh((z + z * z * z * _GELU_CUBIC) * _SQRT_2_OVER_PI))
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
        s = _sigmoid(z)
        value = z * s
        return value, s + value * (1.0 - s)
    elif ACT == "gelu":
        cdf, bell = _normal_cdf(z)
        return z * cdf, cdf + z * _INV_SQRT_2PI * bell
    elif ACT == "gelu_tanh":
        t = _tanh((z + z * z * z * _GELU_CUBIC) * _SQRT_2_OVER_PI)
        slope = (1.0 + z * z * (3.0 * _GELU_CUBIC)) * _SQRT_2_OVER_PI
        return 0.5 * z * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * slope
    elif ACT == "relu":
        return tl.maximum(z, 0.0), tl.where(z > 0.0, 1.0, 0.0)
    elif ACT == "relu2":
        r = tl.maximum(z, 0.0)
        return r * r, 2.0 * r
    else:
        tl.static_assert(ACT == "identity", "unknown activation")
        return z, tl.zeros_like(z) + 1.0


@triton.jit
def _within(z, LIMIT: tl.constexpr):
    """NaN stays NaN."""
    return tl.where(z > LIMIT, LIMIT, tl.where(z < -LIMIT, -LIMIT, z))


@triton.jit
def glu(gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """h of a `GLUFormula`."""
    if LIMIT > 0:
        gate, up = tl.where(gate > LIMIT, LIMIT, gate), _within(up, LIMIT)
    if SHIFT != 0:
        up = up + SHIFT
    return activate(gate * ALPHA, ACT) * (1.0 / ALPHA) * up


@triton.jit
def glu_with_grad(gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """(h, dh/dgate, dh/dup)."""
    clamped, factor = gate, up
    if LIMIT > 0:
        clamped, factor = tl.where(gate > LIMIT, LIMIT, gate), _within(up, LIMIT)
    if SHIFT != 0:
        factor = factor + SHIFT
    value, slope = activate_with_grad(clamped * ALPHA, ACT)
    value = value * (1.0 / ALPHA)
    dgate, dup = slope * factor, value
    if LIMIT > 0:
        dgate = tl.where(gate > LIMIT, 0.0, dgate)
        dup = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, dup)
    return value * factor, dgate, dup
