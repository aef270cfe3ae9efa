"""The MoE layer: gate, dispatch, experts, combine. It never asks for a rank or a world size: a `dispatch` object does.

Shapes: T tokens, D model width, E experts (of the whole layer), K choices a token.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.experts import Experts, SharedExpert
from foundry_moe.layers.gates.registry import build_gate, check_gate
from foundry_moe.ops import plan_routes
from foundry_moe.ops.topk import count_choices


class Dispatch(Protocol):
    """Brings tokens to their experts, wherever these are, and the weighted results back.

    Args: x_TD, weights_TK, experts_TK (int, -1 = no choice), the layer's number of experts, and the module that
    holds this process's experts. Returns y_TD.
    """

    def __call__(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int, experts: Experts
    ) -> Tensor: ...


class LocalDispatch:
    """All experts are on this process."""

    def __call__(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int, experts: Experts
    ) -> Tensor:
        return experts(x_TD, weights_TK, plan_routes(experts_TK, num_experts))


class LoadStatistics:
    """Loads and losses of a layer, summed over the microbatches since `reset`.

    Written in the backward pass, which runs once a microbatch whatever activation checkpointing recomputes.
    Plain tensors, not buffers: DDP would overwrite them with rank 0's.

    counts_E: int64, choices per expert of the real tokens of this process.
    losses_L: fp32, sums of the unweighted auxiliary losses in the order of `names`.
    microbatches: how many were summed.
    """

    def __init__(self, num_experts: int, names: list[str]) -> None:
        self.names = names
        self.counts_E = torch.zeros(num_experts, dtype=torch.int64)
        self.losses_L = torch.zeros(len(names))
        self.microbatches = 0

    def add(self, counts_E: Tensor, losses_L: Tensor) -> None:
        if self.counts_E.device != counts_E.device:
            self.counts_E = self.counts_E.to(counts_E.device)
            self.losses_L = self.losses_L.to(counts_E.device)
        self.counts_E.add_(counts_E)
        self.losses_L.add_(losses_L)
        self.microbatches += 1

    def reset(self) -> None:
        self.counts_E.zero_()
        self.losses_L.zero_()
        self.microbatches = 0


class _AttachLoss(torch.autograd.Function):
    """The layer's output unchanged; the backward pass adds the auxiliary loss's gradient and notes the statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        y_TD: Tensor,
        loss: Tensor,
        losses_L: Tensor,
        counts_E: Tensor,
        scale: Tensor,
        statistics: LoadStatistics,
    ) -> Tensor:
        ctx.save_for_backward(losses_L, counts_E)
        ctx.scale = scale
        ctx.loss_dtype = loss.dtype
        ctx.statistics = statistics
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        losses_L, counts_E = ctx.saved_tensors
        ctx.statistics.add(counts_E, losses_L)
        return grads[0], ctx.scale.to(ctx.loss_dtype), None, None, None, None


class MoELayer(nn.Module):
    """A drop-in for a transformer's FFN: [..., D] -> [..., D].

    Args:
        d_model: D.
        config: with `expert_hidden_size` and `activation` resolved (no `auto`).
        layer_index: place among the model's layers; seeds the weights.
        num_layers: layers of the model, for the scale of the output projections.
        context: shared by the layers of a model.
        returns_logits: return (output, router logits) as Hugging Face's MoE blocks do.

    Raises:
        ValueError: an unknown gate or key, or a loss that the gate does not have.
    """

    def __init__(
        self,
        d_model: int,
        config: MoEConfig,
        *,
        layer_index: int,
        num_layers: int,
        context: BatchContext,
        returns_logits: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert isinstance(config.expert_hidden_size, int) and config.activation != "auto", (
            "resolve `auto` first"
        )
        check_gate(config.gate, config.loss)
        self.config = config
        self.d_model = d_model
        self.layer_index = layer_index
        self.returns_logits = returns_logits
        self.num_experts = config.num_experts
        placement: dict[str, Any] = {"device": device, "dtype": dtype}
        expert: dict[str, Any] = {
            "d_model": d_model,
            "activation": config.activation,
            "num_layers": num_layers,
            "init_std": config.init_std,
            **placement,
        }
        self.gate = build_gate(
            config.gate, d_model=d_model, num_experts=config.num_experts, top_k=config.top_k, **placement
        )
        self.experts = Experts(
            num_experts=config.num_experts,
            hidden_size=config.expert_hidden_size,
            backend=config.backend,
            memory=config.memory,
            **expert,
        )
        self.shared_expert = (
            SharedExpert(hidden_size=config.shared_expert_hidden_size, **expert)
            if config.shared_expert_hidden_size
            else None
        )
        self.dispatch: Dispatch = LocalDispatch()
        self.loss_weights = {name: weight for name, weight in config.loss.items() if weight}
        self.statistics = LoadStatistics(config.num_experts, list(self.loss_weights))
        self.context = context

    def reset_parameters(self) -> None:
        """Draws gate and experts from (seed, layer, expert)."""
        seed, layer = self.config.seed, self.layer_index
        self.gate.reset_parameters(seed=seed, layer=layer, std=self.config.init_std)
        self.experts.reset_parameters(seed=seed, layer=layer)
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters(seed=seed, layer=layer)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        x_TD = x.reshape(-1, self.d_model)
        context = self.context.for_tokens(x_TD.shape[0])
        with torch.autocast(x.device.type, enabled=False):
            choices = self.gate(x_TD, context)
        y_TD = self.dispatch(x_TD, choices.weights_TK, choices.experts_TK, self.num_experts, self.experts)
        if self.shared_expert is not None:
            y_TD = y_TD + self.shared_expert(x_TD)
        if self.training and torch.is_grad_enabled():
            y_TD = self._attach(y_TD, choices.losses, choices.experts_TK, context.mask_T)
        y = y_TD.reshape(x.shape)
        return (y, choices.logits_TE) if self.returns_logits else y

    def _attach(
        self, y_TD: Tensor, losses: dict[str, Tensor], experts_TK: Tensor, mask_T: Tensor | None
    ) -> Tensor:
        """Adds the weighted auxiliary losses to the graph of `y_TD`, and the loads to the statistics."""
        weighted = [losses[name] * weight for name, weight in self.loss_weights.items()]
        loss = torch.stack(weighted).sum() if weighted else y_TD.new_zeros(())
        values = [losses[name].detach() for name in self.loss_weights]
        losses_L = torch.stack(values).float() if values else y_TD.new_zeros(0, dtype=torch.float32)
        counts_E = count_choices(experts_TK, self.num_experts, mask_T)
        return _AttachLoss.apply(
            y_TD, loss, losses_L, counts_E, self.context.loss_scale(y_TD.device), self.statistics
        )
