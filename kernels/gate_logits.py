"""A gate's logits in fp32 on tensor cores, and their gradients, with the jitter of the input inside.

A product of two bf16 numbers is exact in fp32, so bf16 products with fp32 sums are the fp32 product; an fp32 factor is
split into bf16 parts of 8 bits each. Jitter multiplies x by hashed factors as it is loaded: nothing of the size of x is
written. No atomics: the weights' gradient is summed over spans of tokens in a second launch.

Shapes: T tokens, D model width, E experts, S spans of tokens, Y planes (the bf16 parts of an fp32 number).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from foundry_moe_kernels import sparse_tiles
from foundry_moe_kernels.launch import cdiv, compile_first, launch, next_power_of_2
from foundry_moe_kernels.noise import jitter_column, jitter_row, jittered, step_of
from foundry_moe_kernels.sparse_kernels import load_within
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """The sizes of a program: tokens, experts at most, and columns, in a step; `span`: tokens in all."""

    tokens: int
    experts: int
    columns: int
    warps: int
    stages: int
    span: int = 0


# at OLMoE's shape on an H200, with jitter: 23 us against 27 with 64 columns, but for fp32 weights 128 columns fill the
# shared memory
_LOGITS = _Tile(tokens=64, experts=64, columns=128, warps=4, stages=3)
_LOGITS_FP32 = _Tile(tokens=128, experts=64, columns=64, warps=8, stages=3)
_INPUT_GRADIENT = _Tile(tokens=128, experts=32, columns=128, warps=4, stages=3)
_WEIGHT_GRADIENT = _Tile(tokens=64, experts=64, columns=128, span=1024, warps=4, stages=3)


class Jitter(NamedTuple):
    """`foundry_moe_kernels.noise.jitter` of the input: its numbers, from int32 keys of the tokens and a stream.

    keys_T: contiguous; None = no jitter.
    """

    keys_T: Tensor | None = None
    amount: float = 0.0
    stream: int = 0


@triton.jit
def _tile(x_ptr, t, d, row, step, keep, width, JITTER: tl.constexpr, PACKED: tl.constexpr):
    """x at tokens t and columns d, jittered and rounded as `noise.jitter` would; `row`: from `_rows`."""
    x = tl.load(x_ptr + t.to(tl.int64)[:, None] * width + d[None, :], mask=keep, other=0.0)
    if JITTER:
        x = jittered(x, row[:, None], jitter_column(d)[None, :], d[None, :], step, x_ptr.dtype.element_ty, PACKED)
    return x


@triton.jit
def _rows(key_ptr, t, tokens, stream, JITTER: tl.constexpr):
    row = tl.zeros_like(t).to(tl.uint32)
    if JITTER:
        row = jitter_row(tl.load(key_ptr + t, mask=t < tokens, other=0), stream)
    return row


@triton.jit
def _dot_parts(a, b, acc, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """acc + a b for an fp32 `b` taken apart into PARTS numbers of DTYPE."""
    for _ in tl.static_range(PARTS):
        part = b.to(DTYPE)
        acc = tl.dot(a, part, acc, input_precision="ieee")
        b = b.to(tl.float32) - part.to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["stream", "step"])
def _logits_kernel(
    x_ptr, w_ptr, key_ptr, out_ptr, stream, step, tokens, experts, width,
    JITTER: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    row = _rows(key_ptr, t, tokens, stream, JITTER)
    acc = tl.zeros((BT, BE), tl.float32)
    for first in range(0, width, BD):
        d = first + tl.arange(0, BD)
        keep = (t < tokens)[:, None] & (d < width)[None, :]
        x = _tile(x_ptr, t, d, row, step, keep, width, JITTER, PACKED)
        w = load_within(w_ptr + e[None, :].to(tl.int64) * width + d[:, None], d < width, e < experts)
        acc = _dot_parts(x, w, acc, PARTS, x_ptr.dtype.element_ty)
    keep = (t < tokens)[:, None] & (e < experts)[None, :]
    tl.store(out_ptr + t.to(tl.int64)[:, None] * experts + e[None, :], acc, mask=keep)


@triton.jit
def _load_split(dlogits_ptr, t, e, tokens, experts, DTYPE: tl.constexpr):
    """Gradients of logits as two numbers of DTYPE: a result rounded to 8 bits needs only 16 bits of its factors."""
    ds = load_within(dlogits_ptr + t.to(tl.int64)[:, None] * experts + e[None, :], t < tokens, e < experts)
    high = ds.to(DTYPE)
    return high, (ds - high.to(tl.float32)).to(DTYPE)


@triton.jit
def _split_dot(high, rest, w_ptr, e, d, acc, experts, width, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    w = load_within(w_ptr + e[:, None].to(tl.int64) * width + d[None, :], e < experts, d < width)
    acc = tl.dot(rest, w.to(DTYPE), acc, input_precision="ieee")
    return _dot_parts(high, w, acc, PARTS, DTYPE)


@triton.jit(do_not_specialize=["stream", "step"])
def _input_gradient_kernel(
    dlogits_ptr, w_ptr, key_ptr, dx_ptr, stream, step, tokens, experts, width,
    JITTER: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    dtype: tl.constexpr = dx_ptr.dtype.element_ty
    acc = tl.zeros((BT, BD), tl.float32)
    for first in range(0, experts, BE):
        e = first + tl.arange(0, BE)
        high, rest = _load_split(dlogits_ptr, t, e, tokens, experts, dtype)
        acc = _split_dot(high, rest, w_ptr, e, d, acc, experts, width, PARTS, dtype)
    if JITTER:
        row = _rows(key_ptr, t, tokens, stream, JITTER)
        acc = jittered(acc, row[:, None], jitter_column(d)[None, :], d[None, :], step, dtype, PACKED)
    keep = (t < tokens)[:, None] & (d < width)[None, :]
    tl.store(dx_ptr + t.to(tl.int64)[:, None] * width + d[None, :], acc.to(dtype), mask=keep)


@triton.jit
def _split_kernel(dlogits_ptr, parts_ptr, numbers, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ds = tl.load(dlogits_ptr + i, mask=i < numbers, other=0.0)
    for p in tl.static_range(PARTS):
        part = ds.to(parts_ptr.dtype.element_ty)
        tl.store(parts_ptr + p * numbers + i, part, mask=i < numbers)
        ds -= part.to(tl.float32)


@triton.jit(do_not_specialize=["stream", "step"])
def _weight_gradient_kernel(
    parts_ptr, x_ptr, key_ptr, out_ptr, stream, step, tokens, experts, width, plane,
    JITTER: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    first_token = tl.program_id(2) * SPAN
    acc = tl.zeros((BD, BE), tl.float32)
    for first in range(0, SPAN, BT):
        t = first_token + first + tl.arange(0, BT)
        row = _rows(key_ptr, t, tokens, stream, JITTER)
        keep = (t < tokens)[:, None] & (d < width)[None, :]
        x = tl.trans(_tile(x_ptr, t, d, row, step, keep, width, JITTER, PACKED))
        at = parts_ptr + t.to(tl.int64)[:, None] * experts + e[None, :]
        keep = (t < tokens)[:, None] & (e < experts)[None, :]
        for p in tl.static_range(PARTS):
            acc = tl.dot(x, tl.load(at + p * plane, mask=keep, other=0.0), acc, input_precision="ieee")
    out = out_ptr + tl.program_id(2).to(tl.int64) * experts * width
    keep = (d < width)[:, None] & (e < experts)[None, :]
    tl.store(out + e[None, :].to(tl.int64) * width + d[:, None], acc, mask=keep)


@triton.jit
def _sum_spans_kernel(parts_ptr, out_ptr, spans, numbers, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    at = parts_ptr + i
    for _ in range(spans):
        total += tl.load(at, mask=i < numbers, other=0.0)
        at += numbers
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < numbers)


def _with_keys(jitter: Jitter, out: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Keys, the output, stream and the bits of the amount, as kernels take them."""
    if jitter.keys_T is None:
        return out, out, 0, 1  # not read
    return jitter.keys_T, out, jitter.stream, step_of(jitter.amount)


def _packed(x_TD: Tensor) -> bool:
    """Whether eight neighbouring columns are sure to be loaded or stored at once: see `jittered`."""
    return x_TD.dtype is torch.bfloat16 and x_TD.shape[1] % 16 == 0 and x_TD.data_ptr() % 16 == 0


def _parts(weight_ED: Tensor, x_dtype: torch.dtype, most: int) -> int:
    return 1 if weight_ED.dtype is x_dtype else most


def _expert_block(experts: int, tile: _Tile) -> int:
    return min(max(next_power_of_2(experts), 16), tile.experts)


def gate_logits(x_TD: Tensor, weight_ED: Tensor, jitter: Jitter) -> Tensor:
    """x Wᵀ, fp32 [T, E].

    Args:
        x_TD: bf16 (in Triton's interpreter fp32).
        weight_ED: of x's dtype or fp32.
    """
    x_TD, weight_ED = x_TD.contiguous(), weight_ED.contiguous()
    compile_first("gate_logits", lambda: _forward_and_backward(x_TD, weight_ED, jitter))
    tokens, width = x_TD.shape
    experts = weight_ED.shape[0]
    out_TE = torch.empty(tokens, experts, dtype=torch.float32, device=x_TD.device)
    if out_TE.numel():
        parts = _parts(weight_ED, x_TD.dtype, 3)
        tile = _LOGITS if parts == 1 else _LOGITS_FP32
        block = _expert_block(experts, tile)
        launch(
            _logits_kernel, (cdiv(tokens, tile.tokens), cdiv(experts, block)),
            x_TD, weight_ED, *_with_keys(jitter, out_TE), tokens, experts, width,
            JITTER=jitter.keys_T is not None, PACKED=_packed(x_TD), PARTS=parts,
            BT=tile.tokens, BE=block, BD=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out_TE


def _forward_and_backward(x_TD: Tensor, weight_ED: Tensor, jitter: Jitter) -> None:
    logits_TE = gate_logits(x_TD, weight_ED, jitter)
    input_gradient(logits_TE, weight_ED, jitter, x_TD.dtype)
    weight_gradient(logits_TE, x_TD, jitter, weight_ED.dtype)


def input_gradient(dlogits_TE: Tensor, weight_ED: Tensor, jitter: Jitter, dtype: torch.dtype) -> Tensor:
    """dx_TD in x's dtype."""
    tokens, experts = dlogits_TE.shape
    width = weight_ED.shape[1]
    dx_TD = torch.empty(tokens, width, dtype=dtype, device=dlogits_TE.device)
    if dx_TD.numel():
        parts = _parts(weight_ED, dtype, 2)
        tile = _INPUT_GRADIENT
        # where tensor cores read registers, a thread of four warps does not hold its part of fp32 weights and sums
        warps = tile.warps if sparse_tiles.capability(dlogits_TE.device) // 10 in (9, 10) else 2 * tile.warps
        launch(
            _input_gradient_kernel, (cdiv(width, tile.columns), cdiv(tokens, tile.tokens)),
            dlogits_TE, weight_ED, *_with_keys(jitter, dx_TD), tokens, experts, width,
            JITTER=jitter.keys_T is not None, PACKED=_packed(dx_TD), PARTS=parts, BT=tile.tokens,
            BE=_expert_block(experts, tile), BD=tile.columns, num_warps=warps, num_stages=tile.stages,
        )  # fmt: skip
    return dx_TD


def weight_gradient(dlogits_TE: Tensor, x_TD: Tensor, jitter: Jitter, dtype: torch.dtype) -> Tensor:
    """dW [E, D] in the weight's dtype."""
    tokens, experts = dlogits_TE.shape
    width = x_TD.shape[1]
    tile = _WEIGHT_GRADIENT
    spans = cdiv(tokens, tile.span)
    dweight_ED = torch.empty(experts, width, dtype=dtype, device=x_TD.device)
    if tokens == 0 or dweight_ED.numel() == 0:
        return dweight_ED.zero_()
    # in parts once, so that the product below takes them from memory as they are
    parts = _parts(x_TD, torch.float32, 2 if dtype is x_TD.dtype else 3)
    parts_YTE = torch.empty(parts, tokens, experts, dtype=x_TD.dtype, device=x_TD.device)
    numbers = tokens * experts
    launch(_split_kernel, (cdiv(numbers, 2048),), dlogits_TE, parts_YTE, numbers, PARTS=parts, BLOCK=2048)
    sums_SED = torch.empty(spans, experts, width, dtype=torch.float32, device=x_TD.device)
    block = _expert_block(experts, tile)
    launch(
        _weight_gradient_kernel, (cdiv(width, tile.columns), cdiv(experts, block), spans),
        parts_YTE, x_TD, *_with_keys(jitter, sums_SED), tokens, experts, width, numbers,
        JITTER=jitter.keys_T is not None, PACKED=_packed(x_TD), PARTS=parts, SPAN=tile.span,
        BT=tile.tokens, BE=block, BD=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    numbers = experts * width
    launch(_sum_spans_kernel, (cdiv(numbers, 512),), sums_SED, dweight_ED, spans, numbers, BLOCK=512)
    return dweight_ED
