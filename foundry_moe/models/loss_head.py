"""The output projection and the loss in one step: logits of a part of the tokens at a time, never of all.

The kernels are Liger-Kernel's (Hsu et al. 2024, arXiv 2410.10989). Their forward pass computes the gradients too,
because the logits of each part of the tokens exist only once.

Shapes: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100
# memory of logits over that of hidden states: more tokens at once, so that fewer passes add to the head's fp32 gradient
_LOGITS_OVER_HIDDEN = 4


def is_installed() -> bool:
    """Whether Liger-Kernel is installed."""
    return find_spec("liger_kernel") is not None


def runs_on(device: torch.device) -> bool:
    """Whether Liger-Kernel's kernels run on this device."""
    return device.type == "cuda"


class _LinearCrossEntropy(torch.autograd.Function):
    """Liger-Kernel's forward pass and a backward pass that does not wait for the device.

    Liger-Kernel's own reads the loss's gradient on the host, to skip products with 1.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

        loss, *_, grad_x_TD, grad_weight_VD, _ = fused_linear_cross_entropy_forward(
            x_TD,
            weight_VD.to(x_TD.dtype),
            targets_T,
            ignore_index=IGNORED,
            reduction="sum",
            accum_dtype=torch.float32,
            compute_gradients=any(ctx.needs_input_grad),
            weight_requires_grad=ctx.needs_input_grad[1],
            chunk_mem_const=_LOGITS_OVER_HIDDEN,
        )
        ctx.save_for_backward(grad_x_TD, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad_x_TD, grad_weight_VD = ctx.saved_tensors
        if grad_weight_VD is not None:
            out = torch.empty_like(grad_weight_VD, dtype=ctx.weight_dtype)
            # by a matrix: the product with a scalar would be rounded to 16 bits before it is written to `out`
            grad_weight_VD = torch.mul(grad_weight_VD, grads[0].reshape(1, 1), out=out)
        return grad_x_TD * grads[0], grad_weight_VD, None


def linear_cross_entropy(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """The sum over tokens of the cross-entropy of `x_TD @ weight_VD.T`; targets of -100 are ignored.

    Under autocast, operands are cast as they are for a linear layer. The weight's gradient is summed in fp32.
    """
    device_type = x_TD.device.type
    if torch.is_autocast_enabled(device_type):
        x_TD = x_TD.to(torch.get_autocast_dtype(device_type))
    with torch.autocast(device_type, enabled=False):
        return _LinearCrossEntropy.apply(x_TD, weight_VD, targets_T)


class _LossHead(nn.Module):
    """Mixed into the class of an output projection: with `targets` set, it returns the loss in place of logits.

    FSDP2 shards the projection by itself, so its weight is whole only during its own forward pass.
    """

    weight: Tensor
    targets: Tensor | None = None

    def forward(self, x: Tensor, *unembed: Any) -> Tensor:
        # an embedding that is shared is called without `unembed` for tokens
        if self.targets is None or not x.is_floating_point():
            return super().forward(x, *unembed)
        return linear_cross_entropy(x.flatten(0, -2), self.weight, self.targets.flatten())


def make_loss_head(head: nn.Module) -> None:
    """Lets an `nn.Linear` without bias, or LLM Foundry's `SharedEmbedding`, return losses."""
    kind = type(head)
    if not issubclass(kind, _LossHead):
        attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        head.__class__ = type(kind.__name__, (_LossHead, kind), attributes)
