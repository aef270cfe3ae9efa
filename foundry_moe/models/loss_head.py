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
# of the memory that hidden states take: more tokens at once, so that fewer passes add to the head's fp32 gradient
_LOGITS_OVER_HIDDEN = 4


def is_installed() -> bool:
    """Whether Liger-Kernel is installed."""
    return find_spec("liger_kernel") is not None


def runs_on(device: torch.device) -> bool:
    """Whether Liger-Kernel's kernels run on this device."""
    return device.type == "cuda"


def linear_cross_entropy(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """The sum over tokens of the cross-entropy of `x_TD @ weight_VD.T`; targets of -100 are ignored.

    Under autocast, operands are cast as they are for a linear layer. The weight's gradient is summed in fp32.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    device_type = x_TD.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x_TD, weight_VD = x_TD.to(dtype), weight_VD.to(dtype)
    with torch.autocast(device_type, enabled=False):
        loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(
            x_TD, weight_VD, targets_T,
            None, None, IGNORED, 0.0, 0.0, "sum", None, False,  # bias, weights, ignored, z, smoothing, sum, cap, no z
            torch.float32, False, False, False, None, None, _LOGITS_OVER_HIDDEN,
        )  # fmt: skip
    return loss


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
