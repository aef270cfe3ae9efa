"""A gate's logits x W^T in fp32, on tensor cores where the input is bf16, with jitter of the input.

A product of two bf16 numbers is exact in fp32, so a bf16 product with fp32 sums and fp32 output is the fp32 product:
see `foundry_moe_kernels.gate_logits`. At OLMoE's shape (16,384 tokens, 2048 wide, 64 experts) on an H200 casting and
fp32 products were 0.49 of the gate's 0.61 ms.

Shapes: T tokens, D model width, E experts.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from foundry_moe_kernels import gate_logits as kernels
from foundry_moe_kernels.gate_logits import Jitter
from torch import Tensor
from torch.nn import functional as F

from foundry_moe.ops import noise
from foundry_moe.ops.operators import on_gpu, operator, twins

__all__ = ["NO_JITTER", "Jitter", "gate_logits"]


NO_JITTER = Jitter()


def gate_logits(x_TD: Tensor, weight_ED: Tensor, jitter: Jitter = NO_JITTER) -> Tensor:
    """[T, E] in fp32, or fp64 for fp64 inputs, under autocast too (Fedus et al. 2021, section 2.4).

    Args:
        jitter: multiplies x by random factors first: `noise.jitter` without its tensor.
    """
    device_type = x_TD.device.type
    with torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext():
        return _gate_logits(x_TD, weight_ED, jitter)


def _takes(x_TD: Tensor, weight_ED: Tensor, *_: Any) -> bool:
    return on_gpu(torch.bfloat16)(x_TD) and weight_ED.dtype in (torch.bfloat16, torch.float32)


def _plain(x_TD: Tensor, weight_ED: Tensor, jitter: Jitter) -> Tensor:
    """The plain twin of `foundry_moe_kernels.gate_logits.gate_logits`."""
    if jitter.keys_T is not None:
        x_TD = noise.jitter(x_TD, *jitter)
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    return F.linear(x_TD.to(dtype), weight_ED.to(dtype))


def _fake_gradients(dlogits, x, weight, jitter, needs_x, needs_weight):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape if needs_x else 0), weight.new_empty(weight.shape if needs_weight else 0)


@operator("gate_gradients", _fake_gradients)
def _gradients(
    dlogits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, jitter: Jitter, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    return kernels.gradients(dlogits_TE, x_TD, weight_ED, jitter, (needs_x, needs_weight))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_TD, weight_ED, (keys_T, *ctx.draw) = inputs
    ctx.save_for_backward(x_TD, weight_ED, keys_T)


def _backward(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor | None, ...]:
    x_TD, weight_ED, keys_T = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    found = _gradients(dlogits_TE, x_TD, weight_ED, Jitter(keys_T, *ctx.draw), *needs)
    return *[gradient if needed else None for gradient, needed in zip(found, needs, strict=True)], None


_gate_logits = twins(
    "gate_logits",
    triton=kernels.gate_logits,
    plain=_plain,
    fake=lambda x, w, *_: x.new_empty(x.shape[0], w.shape[0], dtype=torch.float32),
    takes=_takes,
    save=_save,
    backward=_backward,
)
