"""What a layer must know of the batch beyond its input: token ids, padding, and how the trainer scales the loss.

One `BatchContext` is shared by the layers of a model. It is filled from outside by hooks, so that the model's
code stays as it is. Knows nothing of ranks or trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn


def unchanged(tensor: Tensor) -> Tensor:
    """The tensor itself: one process has the whole batch."""
    return tensor


@dataclass(frozen=True, kw_only=True)
class GateContext:
    """What a gate may ask about its tokens. T tokens.

    token_ids_BS: the ids of the batch [sequences, positions], or None where the model was not given any.
    mask_T: True for real tokens, False for padding; None = all are real.
    sum_over_ranks: sums a tensor without gradient over all processes that share the batch. With expert counts of
        the whole batch, the mean over processes of their balance losses is that of the whole batch.
    """

    token_ids_BS: Tensor | None = None
    mask_T: Tensor | None = None
    sum_over_ranks: Callable[[Tensor], Tensor] = unchanged


class BatchContext:
    """Shared by the layers of one model; `observe` and `anchor` fill it.

    Not a module: DDP would broadcast its tensors, and `Module.to` would move what the layers hold on to.
    """

    def __init__(self) -> None:
        self.token_ids_BS: Tensor | None = None
        self.mask_BS: Tensor | None = None
        self._loss_scale = torch.ones((), dtype=torch.float64)
        self.sum_over_ranks: Callable[[Tensor], Tensor] = unchanged

    def loss_scale(self, device: torch.device) -> Tensor:
        """d(what is differentiated) / d(loss), fp64 scalar: a trainer weighs microbatches, and scales fp16 losses.

        One where no loss was anchored. Its value is right in the backward pass only.
        """
        if self._loss_scale.device != device:
            self._loss_scale = torch.ones((), dtype=torch.float64, device=device)
        return self._loss_scale

    def for_tokens(self, num_tokens: int) -> GateContext:
        """The part that fits a layer's input. Ids and mask of another length (cached decoding) are left out."""
        ids, mask = self.token_ids_BS, self.mask_BS
        return GateContext(
            token_ids_BS=ids if ids is not None and ids.numel() == num_tokens else None,
            mask_T=mask.reshape(-1) if mask is not None and mask.numel() == num_tokens else None,
            sum_over_ranks=self.sum_over_ranks,
        )

    def observe(self, model: nn.Module) -> None:
        """Hooks the first module of `model` whose forward takes `input_ids`, to note ids and padding of each batch."""
        for module in model.modules():
            if "input_ids" in signature(module.forward).parameters:
                module.register_forward_pre_hook(self._note_batch, with_kwargs=True)
                return

    def _note_batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        bound = signature(module.forward).bind_partial(*args, **kwargs).arguments
        ids, mask = bound.get("input_ids"), bound.get("attention_mask")
        self.token_ids_BS = ids if isinstance(ids, Tensor) else None
        self.mask_BS = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def anchor(self, loss: Any) -> Any:
        """The loss itself; in the backward pass it tells the layers how much the trainer makes of it.

        A mapping of losses is anchored at `total`, other containers at each tensor.
        """
        if isinstance(loss, Tensor):
            return _AnchorLoss.apply(loss, self.loss_scale(loss.device)) if loss.requires_grad else loss
        if isinstance(loss, Mapping):
            names = ["total"] if "total" in loss else list(loss)
            return {**loss, **{name: self.anchor(loss[name]) for name in names}}
        if isinstance(loss, tuple | list):
            return type(loss)(self.anchor(item) for item in loss)
        return loss


class _AnchorLoss(torch.autograd.Function):
    """Identity; its backward runs before that of any layer and records the gradient it is given."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        ctx.count = loss.numel()
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # `.data`: a compiled layer has saved the buffer, and is meant to see what is written here
        ctx.scale.data.copy_(grads[0].detach().sum())
        return grads[0], None
