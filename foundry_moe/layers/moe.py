"""The MoE layer: choose, dispatch, experts, combine. Independent of ranks and world sizes: see its dispatcher.

Shapes: T tokens, D model width, E experts (of the whole layer), K choices per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foundry_moe.config import MoEConfig
from foundry_moe.layers.aux_loss import LoadStatistics, attach
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.dispatch import Dispatcher
from foundry_moe.layers.experts import Experts, MixedExperts, SharedExpert
from foundry_moe.layers.gates.gate import Choices
from foundry_moe.layers.gates.registry import build_gate, no_gate, resolve_losses
from foundry_moe.layers.losses import gate_entropy
from foundry_moe.layers.schedule import Progress
from foundry_moe.ops.capacity import drop_beyond_capacity
from foundry_moe.ops.operators import refuse_second_derivatives
from foundry_moe.ops.select_topk import count_choices
from foundry_moe.schema import UserError

if TYPE_CHECKING:
    from foundry_moe.layers.replay import ChoiceRecord

# values in `LoadStatistics` beside the losses: the share of dropped choices, and that of `measure_gate`
DROPPED, GATE_ENTROPY = "dropped", "gate_entropy"


class MoELayer(nn.Module):
    """A drop-in for a transformer's FFN: [..., D] -> [..., D].

    Args:
        d_model: D.
        config: with `expert_hidden_size` and `activation` resolved (no `auto`).
        layer_index: among the model's layers; seeds the weights.
        num_layers: layers of the model, for the scale of the output projections.
        context: shared by the layers of a model, which then draws their weights; None for a layer on its own, which
            draws its weights here.
        gate_output: return (output, gate logits) or (output, probabilities), as Hugging Face's MoE blocks do.

    Raises:
        ValueError: `auto` for the experts' width or activation; an unknown gate or key, a loss that the gate does
            not have, or `freeze: [gate]` for a gate without weights; a mesh for a layer on its own.
    """

    def __init__(
        self,
        d_model: int,
        config: MoEConfig,
        *,
        layer_index: int = 0,
        num_layers: int = 1,
        context: BatchContext | None = None,
        gate_output: Literal["none", "logits", "probabilities"] = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for key in ("expert_hidden_size", "activation"):
            if getattr(config, key) == "auto":
                raise UserError(f"{key} (auto): a layer on its own has no FFN to read it from; give it a value")
        if context is None and config.mesh is not None:
            raise UserError(
                f"mesh ({config.mesh}): a layer does not place itself on a mesh; leave the key out and call "
                "foundry_moe.parallelize(model, mesh)"
            )
        assert isinstance(config.expert_hidden_size, int | tuple)
        self.config = config
        self.d_model = d_model
        self.layer_index = layer_index
        self.gate_output = gate_output
        self.gate_groups = 1  # experts in a group whose gate rows start equal; see `models/block_plans.py`
        self.zero_init_shared = False  # the shared expert's output starts as zero
        self.sources: Sequence[Any] = ()  # files of the weights of a layer on the meta device
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
        computed = {"backend": config.backend, "memory": config.memory, **expert}
        if "gate" in config.freeze:
            if next(self.gate.parameters(), None) is None:
                raise no_gate(config.gate["name"])
            self.gate.requires_grad_(False)
        self.experts: Experts | MixedExperts
        if isinstance(config.expert_hidden_size, tuple):
            self.experts = MixedExperts(widths=config.expert_hidden_size, **computed)
        else:
            self.experts = Experts(
                num_experts=config.num_experts,
                hidden_size=config.expert_hidden_size,
                bias=config.bias is True,
                lora=config.lora_config,
                **computed,
            )
        self.shared_expert = (
            SharedExpert(hidden_size=config.shared_expert_hidden_size, gated=config.shared_expert_gate, **expert)
            if config.shared_expert_hidden_size
            else None
        )
        self.record: ChoiceRecord | None = None  # see `record_choices`
        self.dispatcher = Dispatcher(config.num_experts)
        self.loss_weights = resolve_losses(config.gate, config.loss)
        self.gate.check_losses(self.loss_weights)
        self.wanted_losses = frozenset(self.loss_weights)
        measured = list(self.loss_weights) if config.capacity is None else [*self.loss_weights, DROPPED]
        self.statistics = LoadStatistics(config.num_experts, measured)
        self.move_statistics()
        self.context = BatchContext() if context is None else context
        self.context.has_losses |= bool(self.loss_weights)
        reads_mask = bool(self.loss_weights) or config.capacity is not None
        self._needs_mask = reads_mask or not self.gate.chooses_by_tokens_alone
        if not self._on_meta():
            self.reset_parameters()

    def _on_meta(self) -> bool:
        return any(parameter.is_meta for parameter in self.parameters())

    def move_statistics(self) -> None:
        """Moves the sums of loads to the weights' device, if they are not there."""
        if not self._on_meta():
            self.statistics.move_to(next(self.experts.parameters()).device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoELayer:
        """As in nn.Module; weights that leave the meta device (`to_empty`) are drawn, unless they are sharded."""
        on_meta = self._on_meta()
        super()._apply(fn, recurse)
        self.move_statistics()
        sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters())
        if on_meta and not sharded and not self._on_meta():
            self.reset_parameters()
        return self

    @property
    def chooses_by_tokens_alone(self) -> bool:
        """Whether `choose` depends on tokens of one microbatch only: not on the layer, time or random numbers."""
        return self.gate.chooses_by_tokens_alone and self.config.balance_over != "batch"

    @property
    def uses_loads(self) -> bool:
        """Whether `after_step` has to be called."""
        weights = list(self.gate.parameters())
        return self.gate.uses_loads and (not weights or any(weight.requires_grad for weight in weights))

    def after_step(self, counts_E: Tensor, progress: Progress) -> None:
        """Once after each optimizer step: arguments as of `Gate.after_step`."""
        if self.uses_loads:
            self.gate.after_step(counts_E, progress)

    def measure_gate(self) -> None:
        """Adds `gate_entropy` to the statistics, from the next microbatch on; NaN for a gate without logits."""
        if GATE_ENTROPY not in self.statistics.names:
            self.statistics = LoadStatistics(self.num_experts, [*self.statistics.names, GATE_ENTROPY])
            self.move_statistics()

    def reset_parameters(self) -> None:
        """Draws gate and experts from (seed, layer, expert)."""
        self.reset_gate()
        self.experts.reset_parameters(seed=self.config.seed, layer=self.layer_index)
        self.reset_shared_expert()

    @torch.no_grad()
    def reset_gate(self) -> None:
        """Draws the gate from (seed, layer)."""
        self.gate.reset_parameters(seed=self.config.seed, layer=self.layer_index, std=self.config.init_std)
        if self.gate_groups > 1:
            weight_ED = self.gate.get_parameter("weight_ED")
            weight_ED.copy_(weight_ED[:: self.gate_groups].repeat_interleave(self.gate_groups, dim=0))

    def reset_shared_expert(self) -> None:
        """Draws the shared expert, if there is one, from (seed, layer)."""
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters(seed=self.config.seed, layer=self.layer_index)
            if self.zero_init_shared:
                with torch.no_grad():
                    self.shared_expert.w2.weight.zero_()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        if x.shape[-1] != self.d_model:
            raise UserError(f"the layer's width is {self.d_model}, and the last dimension of its input {x.shape[-1]}")
        x_TD = x.reshape(-1, self.d_model)
        choices, mask_T = self.choose(x)
        measured, kept = dict(choices.losses), choices
        if self.config.capacity is not None:
            kept, measured[DROPPED] = self._drop(choices, mask_T)
        y_TD = self.compute_experts(x_TD, kept)
        if self.training and torch.is_grad_enabled():
            y_TD = self._attach(y_TD, measured, choices, mask_T)
        elif y_TD.requires_grad and not torch.compiler.is_compiling():
            y_TD.register_hook(refuse_second_derivatives)
        y = y_TD.reshape(x.shape)
        if self.gate_output == "none":
            return y
        logits_TE = choices.logits_TE
        if logits_TE is not None and self.gate_output == "probabilities":
            return y, logits_TE.softmax(-1).to(x.dtype)
        return y, logits_TE

    def choose(self, x: Tensor) -> tuple[Choices, Tensor | None]:
        """The gate's choices, and mask_T: True for real tokens; None = all are real."""
        x_TD, device_type = x.reshape(-1, self.d_model), x.device.type
        sequences = x.shape[0] if x.dim() == 3 else None
        context = self.context.for_tokens(
            x_TD.shape[0],
            layer=self.layer_index,
            seed=self.config.seed,
            losses=self.wanted_losses,
            balance_over=self.config.balance_over,
            training=self.training,
            rows=sequences,
            device=x.device,
            needs_mask=self._needs_mask,
        )
        weights_TK, replayed = None, self.context.replayed
        if replayed is not None:
            experts_TK, weights_TK = replayed.take(self, x_TD.shape[0], x.device, sequences or 1)
            context = replace(context, experts_TK=experts_TK)
        with torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext():
            choices = self.gate(x_TD, context)
        if weights_TK is not None:
            choices = replace(choices, weights_TK=weights_TK.to(choices.weights_TK.dtype))
        if self.record is not None:
            self.record.add(self, choices.experts_TK, choices.weights_TK, context.mask_T, sequences or 1)
        return choices, context.mask_T

    def compute_experts(self, x_TD: Tensor, choices: Choices) -> Tensor:
        """y_TD: each token's weighted sum of its experts, and the shared expert. Not compiled where tokens are sent."""
        rows = self.dispatcher.dispatch(x_TD, choices)
        rows = self.experts(rows)
        shared_TD = None if self.shared_expert is None else self.shared_expert(x_TD)  # while results travel
        y_TD = self.dispatcher.combine(rows)
        return y_TD if shared_TD is None else y_TD + shared_TD

    def _drop(self, choices: Choices, mask_T: Tensor | None) -> tuple[Choices, Tensor]:
        """The choices that fit the experts' capacity, and the dropped share. Padding takes no slot."""
        assert self.config.capacity is not None
        wanted_TK = choices.experts_TK
        if mask_T is not None:
            wanted_TK = wanted_TK.masked_fill(~mask_T[:, None], -1)
        kept_TK = drop_beyond_capacity(
            wanted_TK,
            self.num_experts,
            top_k=self.config.top_k,
            factor=self.config.capacity,
            weights_TK=choices.weights_TK if self.config.drop == "weight" else None,
            mask_T=mask_T,
        )
        wanted = (wanted_TK >= 0).sum()
        dropped = (wanted - (kept_TK >= 0).sum()) / wanted.clamp(min=1)
        return Choices(experts_TK=kept_TK, weights_TK=choices.weights_TK), dropped

    def _attach(self, y_TD: Tensor, measured: dict[str, Tensor], choices: Choices, mask_T: Tensor | None) -> Tensor:
        """Adds the weighted auxiliary losses to the graph of `y_TD`, and the loads to the statistics."""
        weighted = [measured[name] * weight for name, weight in self.loss_weights.items()]
        loss = sum(weighted[1:], start=weighted[0]) if weighted else y_TD.new_zeros(())
        if GATE_ENTROPY in self.statistics.names:
            logits_TE, score = choices.logits_TE, getattr(self.gate.config, "score", "softmax")
            measured[GATE_ENTROPY] = (
                y_TD.new_full((), torch.nan) if logits_TE is None else gate_entropy(logits_TE, mask_T, score=score)
            )
        values = [measured[name].detach().float() for name in self.statistics.names]
        if len(values) > 1:
            losses_L = torch.stack(values)
        else:
            losses_L = values[0][None] if values else y_TD.new_zeros(0, dtype=torch.float32)
        counts_E = choices.counts_E
        if counts_E is None:
            counts_E = count_choices(choices.experts_TK, self.num_experts, mask_T)
        return attach(y_TD, loss, losses_L, counts_E, self.context.loss_scale(y_TD.device), self.statistics)
