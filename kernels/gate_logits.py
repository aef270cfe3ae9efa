"""A gate's logits in fp32 on tensor cores, and their gradients, with the jitter of the input inside.

A product of two bf16 numbers is exact in fp32, so bf16 products with fp32 sums are the fp32 product; an fp32 factor is
split into bf16 parts of 8 bits each. Jitter multiplies x by hashed factors as it is loaded: nothing of the size of x is
written. No atomics: the weights' gradient is summed over spans of tokens in a second launch.

Shapes: T tokens, D model width, E experts, S spans of tokens, Y planes (the bf16 parts of an fp32 number).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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


# at OLMoE's shape on an H200, with jitter: 23 us against 27 with 64 columns
_LOGITS = _Tile(tokens=64, experts=64, columns=128, warps=4, stages=3)
_LOGITS_FP32 = _Tile(tokens=128, experts=128, columns=32, warps=8, stages=3)  # 96 KiB
_INPUT_GRADIENT = _Tile(tokens=128, experts=32, columns=256, warps=8, stages=3)  # 144 KiB
_INPUT_GRADIENT_SMALL = replace(_INPUT_GRADIENT, warps=16, stages=2)
_WEIGHT_GRADIENT = _Tile(tokens=64, experts=64, columns=128, span=1024, warps=4, stages=3)
# 0.71 to 0.88 of its time with fp32 weights on an H200, 65536 x 512 x 128 and 16384 x 2048 x 64 and 128; for 192 KiB
_WEIGHT_GRADIENT_WIDE = _Tile(tokens=64, experts=128, columns=128, span=2048, warps=8, stages=3)


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


@triton.jit(do_not_specialize=["stream", "step"])
def _logits_kernel(
    x_ptr, w_ptr, key_ptr, out_ptr, stream, step, tokens, experts, width, plane,
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
        at = w_ptr + e[None, :].to(tl.int64) * width + d[:, None]
        for p in tl.static_range(PARTS):
            acc = tl.dot(x, load_within(at + p * plane, d < width, e < experts), acc, input_precision="ieee")
    keep = (t < tokens)[:, None] & (e < experts)[None, :]
    tl.store(out_ptr + t.to(tl.int64)[:, None] * experts + e[None, :], acc, mask=keep)


@triton.jit(do_not_specialize=["stream", "step"])
def _input_gradient_kernel(
    dlogits_ptr, w_ptr, key_ptr, dx_ptr, stream, step, tokens, experts, width, dlogits_plane, w_plane,
    JITTER: tl.constexpr, PACKED: tl.constexpr, DLOGITS_PARTS: tl.constexpr, PARTS: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A result rounded to 8 bits needs only 16 bits of its factors: the product of their second parts is left out."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    acc = tl.zeros((BT, BD), tl.float32)
    for first in range(0, experts, BE):
        e = first + tl.arange(0, BE)
        at = dlogits_ptr + t.to(tl.int64)[:, None] * experts + e[None, :]
        w_at = w_ptr + e[:, None].to(tl.int64) * width + d[None, :]
        high = load_within(at, t < tokens, e < experts)
        w = load_within(w_at, e < experts, d < width)
        if DLOGITS_PARTS > 1:
            rest = load_within(at + dlogits_plane, t < tokens, e < experts)
            acc = tl.dot(rest, w, acc, input_precision="ieee")
        acc = tl.dot(high, w, acc, input_precision="ieee")
        if PARTS > 1:
            w_rest = load_within(w_at + w_plane, e < experts, d < width)
            acc = tl.dot(high, w_rest, acc, input_precision="ieee")
    dtype: tl.constexpr = dx_ptr.dtype.element_ty
    if JITTER:
        row = _rows(key_ptr, t, tokens, stream, JITTER)
        acc = jittered(acc, row[:, None], jitter_column(d)[None, :], d[None, :], step, dtype, PACKED)
    keep = (t < tokens)[:, None] & (d < width)[None, :]
    tl.store(dx_ptr + t.to(tl.int64)[:, None] * width + d[None, :], acc.to(dtype), mask=keep)


@triton.jit
def _split_kernel(values_ptr, parts_ptr, numbers, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(values_ptr + i, mask=i < numbers, other=0.0)
    for p in tl.static_range(PARTS):
        part = rest.to(parts_ptr.dtype.element_ty)
        tl.store(parts_ptr + p * numbers + i, part, mask=i < numbers)
        rest -= part.to(tl.float32)


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


def _split(values: Tensor, dtype: torch.dtype, parts: int) -> Tensor:
    """[Y, ...]: numbers of this dtype whose sum is `values`, in parts once, so that products take them from memory."""
    if values.dtype is dtype:
        return values[None]
    out = torch.empty(parts, *values.shape, dtype=dtype, device=values.device)
    numbers = values.numel()
    launch(_split_kernel, (cdiv(numbers, 2048),), values, out, numbers, PARTS=parts, BLOCK=2048)
    return out


def _expert_block(experts: int, tile: _Tile) -> int:
    return min(max(next_power_of_2(experts), 16), tile.experts)


def _reads_shared(device: torch.device) -> bool:
    """Whether tensor cores read shared memory, of which there is more then."""
    return sparse_tiles.capability(device) // 10 in (9, 10)


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
        parts_YED = _split(weight_ED, x_TD.dtype, 3)
        tile = _LOGITS if parts_YED.shape[0] == 1 else _LOGITS_FP32
        block = _expert_block(experts, tile)
        launch(
            _logits_kernel, (cdiv(tokens, tile.tokens), cdiv(experts, block)),
            x_TD, parts_YED, *_with_keys(jitter, out_TE), tokens, experts, width, weight_ED.numel(),
            JITTER=jitter.keys_T is not None, PACKED=_packed(x_TD), PARTS=parts_YED.shape[0],
            BT=tile.tokens, BE=block, BD=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out_TE


def _forward_and_backward(x_TD: Tensor, weight_ED: Tensor, jitter: Jitter) -> None:
    gradients(gate_logits(x_TD, weight_ED, jitter), x_TD, weight_ED, jitter, (True, True))


def gradients(
    dlogits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, jitter: Jitter, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """dx_TD and dweight_ED, in the dtypes of x and the weight; without elements where it is not needed."""
    dlogits_TE, x_TD, weight_ED = dlogits_TE.contiguous(), x_TD.contiguous(), weight_ED.contiguous()
    dx_TD = x_TD.new_empty(x_TD.shape if needs[0] else 0)
    dweight_ED = weight_ED.new_empty(weight_ED.shape if needs[1] else 0)
    if dlogits_TE.numel() == 0:
        return dx_TD, dweight_ED.zero_()
    parts = 3 if needs[1] and weight_ED.dtype is not x_TD.dtype else 2
    parts_YTE = _split(dlogits_TE, x_TD.dtype, parts)
    if dx_TD.numel():
        _input_gradient(parts_YTE, _split(weight_ED, x_TD.dtype, 2), dx_TD, jitter)
    if dweight_ED.numel():
        _weight_gradient(parts_YTE, x_TD, dweight_ED, jitter)
    return dx_TD, dweight_ED


def _input_gradient(parts_YTE: Tensor, weight_YED: Tensor, dx_TD: Tensor, jitter: Jitter) -> None:
    parts, tokens, experts = parts_YTE.shape
    width = weight_YED.shape[2]
    tile = _INPUT_GRADIENT if _reads_shared(dx_TD.device) else _INPUT_GRADIENT_SMALL
    launch(
        _input_gradient_kernel, (cdiv(width, tile.columns), cdiv(tokens, tile.tokens)),
        parts_YTE, weight_YED, *_with_keys(jitter, dx_TD), tokens, experts, width, tokens * experts, experts * width,
        JITTER=jitter.keys_T is not None, PACKED=_packed(dx_TD), DLOGITS_PARTS=parts, PARTS=weight_YED.shape[0],
        BT=tile.tokens, BE=_expert_block(experts, tile), BD=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _weight_gradient(parts_YTE: Tensor, x_TD: Tensor, dweight_ED: Tensor, jitter: Jitter) -> None:
    parts, tokens, experts = parts_YTE.shape
    width = x_TD.shape[1]
    tile = _WEIGHT_GRADIENT_WIDE if _reads_shared(x_TD.device) else _WEIGHT_GRADIENT
    spans = cdiv(tokens, tile.span)
    sums_SED = torch.empty(spans, experts, width, dtype=torch.float32, device=x_TD.device)
    block = _expert_block(experts, tile)
    launch(
        _weight_gradient_kernel, (cdiv(width, tile.columns), cdiv(experts, block), spans),
        parts_YTE, x_TD, *_with_keys(jitter, sums_SED), tokens, experts, width, tokens * experts,
        JITTER=jitter.keys_T is not None, PACKED=_packed(x_TD), PARTS=parts, SPAN=tile.span,
        BT=tile.tokens, BE=block, BD=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    numbers = experts * width
    launch(_sum_spans_kernel, (cdiv(numbers, 512),), sums_SED, dweight_ED, spans, numbers, BLOCK=512)
