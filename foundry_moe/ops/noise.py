"""Random numbers that are a function of (key of the token, column, stream) and of nothing else.

No generator is advanced: the numbers are the same when a layer is recomputed, on every mesh and in every
microbatch that holds the token.

Shapes: T tokens, N numbers per token, B sequences, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from foundry_moe_kernels import noise as kernels
from torch import Tensor

from foundry_moe.ops.operators import on_gpu, twins

# odd 32-bit constants of the finaliser of MurmurHash3 (Appleby, public domain), and the golden ratio for streams
_MIX_1, _MIX_2, _GOLDEN = 0x85EBCA6B, 0xC2B2AE35, 0x9E3779B9


def _signed(value: int) -> int:
    """The int32 with the same bits."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser: a permutation of int32 in which every input bit changes half of the output bits."""
    x = (x ^ _shifted(x, 16)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 13)) * _signed(_MIX_2)
    return x ^ _shifted(x, 16)


def stream_of(*numbers: int) -> int:
    """An int32 for a tuple of whole numbers, such as (seed, layer, step, purpose)."""
    state = 0
    for number in numbers:
        for part in (number & 0xFFFFFFFF, (number >> 32) & 0xFFFFFFFF):
            state = (state + _GOLDEN + part) & 0xFFFFFFFF
            state = ((state ^ (state >> 16)) * _MIX_1) & 0xFFFFFFFF
            state = ((state ^ (state >> 13)) * _MIX_2) & 0xFFFFFFFF
            state ^= state >> 16
    return _signed(state)


def token_keys(token_ids_BS: Tensor) -> Tensor:
    """An int32 for each token, from its sequence's ids and its position in it: [B * S].

    A sequence has the same keys whichever rank or microbatch it is in; two equal sequences have equal keys.
    """
    position_S = torch.arange(token_ids_BS.shape[1], dtype=torch.int32, device=token_ids_BS.device)
    position_S = mix(position_S * _signed(_GOLDEN) + 1)
    sequence_B1 = mix(token_ids_BS.int() * _signed(_MIX_2) ^ position_S).sum(1, keepdim=True).int()
    return mix(sequence_B1 ^ position_S).reshape(-1)


def _uniform_plain(keys_T: Tensor, columns: int, stream: int) -> Tensor:
    column_N = torch.arange(columns, dtype=torch.int32, device=keys_T.device)
    bits_TN = mix(mix(keys_T + stream)[:, None] ^ mix(column_N * _signed(_GOLDEN) ^ stream))
    return (_shifted(bits_TN, 9).float() + 0.5) * 2.0**-23


# uniform(keys_T, columns, stream): fp32 [T, N] in (0, 1). Keys are of `token_keys`; streams, of `stream_of`, are
# independent
uniform = twins(
    "uniform",
    triton=kernels.uniform,
    plain=_uniform_plain,
    fake=lambda keys_T, columns, stream: keys_T.new_empty(keys_T.shape[0], columns, dtype=torch.float32),
)


def normal(keys_T: Tensor, columns: int, stream: int) -> Tensor:
    """fp32 [T, N] from N(0, 1), by inversion."""
    return math.sqrt(2) * torch.erfinv(2 * uniform(keys_T, columns, stream) - 1)


def gumbel(keys_T: Tensor, columns: int, stream: int) -> Tensor:
    """fp32 [T, N] from the standard Gumbel distribution."""
    return -torch.log(-torch.log(uniform(keys_T, columns, stream)))


def _jitter_plain(x_TD: Tensor, keys_T: Tensor, amount: float, stream: int) -> Tensor:
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    pair_D = torch.arange(x_TD.shape[1], dtype=torch.int32, device=x_TD.device) // 2
    column_D = (pair_D + 1) * _signed(_GOLDEN)
    column_D = (column_D ^ _shifted(column_D, 15)) * _signed(_MIX_1)
    column_D = (column_D ^ _shifted(column_D, 13)) | 1
    # multiplication by odd numbers: cheaper than another `mix`, and a byte of its upper half for each column
    number_TD = (keys_T * (_signed(stream) | 1) + stream)[:, None] * column_D
    shift_D = torch.arange(x_TD.shape[1], dtype=torch.int32, device=x_TD.device) % 2 * 8 + 16
    factor_B = 1 + _changes(amount, x_TD.device).to(dtype)
    return (x_TD * factor_B[((number_TD >> shift_D) & 0xFF).long()]).to(x_TD.dtype)


def _changes(amount: float, device: torch.device) -> Tensor:
    """fp32 [256]: the change of a factor for each byte, factor - 1; the upper half is the lower one, negated."""
    # `kernels.step_of`, which torch.compile cannot trace
    step = (torch.tensor(amount, dtype=torch.float32, device=device).view(torch.int32) >> 16).clamp(min=1)
    top, below = (torch.stack([step, step - 1]) << 16).view(torch.float32)
    size_M = (torch.arange(128, device=device) / 128 + 1) * top - below
    size_M = size_M.bfloat16().float()
    return torch.cat([size_M, -size_M])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.settings = inputs[2:]
    ctx.save_for_backward(inputs[1])


# jitter(x_TD, keys_T, amount, stream): x_TD times factors from 1 - amount to 1 + amount, in its dtype. A factor is one
# of 256, evenly spaced and as many above one as below; `amount` is rounded down to bf16. Differentiable in x_TD
jitter: Callable[..., Any] = twins(
    "jitter",
    triton=kernels.jitter,
    plain=_jitter_plain,
    fake=lambda x_TD, *_: torch.empty_like(x_TD, memory_format=torch.contiguous_format),
    takes=on_gpu(torch.float32, torch.float16, torch.bfloat16),
    save=_save,
    # the kernel draws the factors again: [T, D] numbers are cheaper to compute than to keep
    backward=lambda ctx, dx_TD: (jitter(dx_TD, *ctx.saved_tensors, *ctx.settings), None, None, None),
)
