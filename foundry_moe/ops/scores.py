"""A router's scores x W^T in fp32, on tensor cores where the input is bf16, with jitter of the input.

A product of two bf16 numbers is exact in fp32, so a bf16 product with fp32 sums and fp32 output is the fp32 product:
see `foundry_moe_kernels.router`. At OLMoE's shape (16,384 tokens, 2048 wide, 64 experts) on an H200 casting and fp32
products were 0.49 of the gate's 0.61 ms.

Shapes: T tokens, D model width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from foundry_moe_kernels import router
from foundry_moe_kernels.router import Jitter
from torch import Tensor
from torch.nn import functional as F

from foundry_moe.ops import noise
from foundry_moe.ops.operators import differentiable, operator

__all__ = ["Jitter", "router_scores"]


def router_scores(x_TD: Tensor, weight_ED: Tensor, jitter: Jitter | None = None) -> Tensor:
    """[T, E] in fp32, or fp64 for fp64 inputs, under autocast too (Fedus et al. 2021, section 2.4).

    Args:
        jitter: multiplies x by random factors first: `noise.jitter` without its tensor.
    """
    with torch.autocast(x_TD.device.type, enabled=False):
        bf16 = x_TD.dtype is torch.bfloat16 and weight_ED.dtype in (torch.bfloat16, torch.float32)
        if x_TD.is_cuda and bf16:
            keys_T, amount, stream = (None, 0.0, 0)
            if jitter is not None:
                keys_T, amount, stream = jitter.keys_T.contiguous(), jitter.amount, jitter.stream
            return _scores(x_TD.contiguous(), weight_ED.contiguous(), keys_T, amount, stream)
        if jitter is not None:
            x_TD = noise.jitter(x_TD, jitter.keys_T, jitter.amount, jitter.stream)
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        return F.linear(x_TD.to(dtype), weight_ED.to(dtype))


def _jitter(keys_T: Tensor | None, amount: float, stream: int) -> Jitter | None:
    return None if keys_T is None else Jitter(keys_T=keys_T, amount=amount, stream=stream)


@operator("router_scores", lambda x, w, *_: x.new_empty(x.shape[0], w.shape[0], dtype=torch.float32))
def _scores_operator(x_TD: Tensor, weight_ED: Tensor, keys_T: Tensor | None, amount: float, stream: int) -> Tensor:
    """See `foundry_moe_kernels.router.scores`."""
    return router.scores(x_TD, weight_ED, _jitter(keys_T, amount, stream))


@operator("router_input_gradient", lambda x, w, d, *_: torch.empty_like(x))
def _input_gradient(
    x_TD: Tensor, weight_ED: Tensor, dscores_TE: Tensor, keys_T: Tensor | None, amount: float, stream: int
) -> Tensor:
    return router.input_gradient(dscores_TE.contiguous(), weight_ED, _jitter(keys_T, amount, stream), x_TD.dtype)


@operator("router_weight_gradient", lambda x, w, d, *_: torch.empty_like(w))
def _weight_gradient(
    x_TD: Tensor, weight_ED: Tensor, dscores_TE: Tensor, keys_T: Tensor | None, amount: float, stream: int
) -> Tensor:
    return router.weight_gradient(dscores_TE.contiguous(), x_TD, _jitter(keys_T, amount, stream), weight_ED.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.draw = inputs[3:]
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx: Any, dscores_TE: Tensor) -> tuple[Tensor | None, ...]:
    x_TD, weight_ED, keys_T = ctx.saved_tensors
    given = (x_TD, weight_ED, dscores_TE, keys_T, *ctx.draw)
    dx_TD = _input_gradient(*given) if ctx.needs_input_grad[0] else None
    dweight_ED = _weight_gradient(*given) if ctx.needs_input_grad[1] else None
    return dx_TD, dweight_ED, None, None, None


_scores = differentiable(_scores_operator, _save, _backward)
