"""The interface of a gate: from tokens to experts and combine weights.

Shapes: T tokens, D model width, E experts, K choices per token at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foundry_moe.layers.context import NO_PROGRESS, GateContext, unchanged
from foundry_moe.layers.gates.keys import GateKeys, LinearKeys
from foundry_moe.layers.init import normal_matrix
from foundry_moe.layers.losses import sequence_balance_loss
from foundry_moe.layers.schedule import Progress, Schedule, parse_schedule
from foundry_moe.ops.gate_logits import NO_JITTER, Jitter, gate_logits
from foundry_moe.ops.operators import on_gpu
from foundry_moe.ops.select_topk import pack
from foundry_moe.ops.softmax_topk import Selection, balance, masked_mean, softmax_topk, z_loss
from foundry_moe.schema import UserError

_JITTER = 0  # stream of random numbers


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of a gate.

    experts_TK: int64, -1 where a token has fewer than K choices.
    weights_TK: combine weights, fp32 or better.
    losses: auxiliary losses by name, unweighted scalars; at least those in `GateContext.losses`.
    logits_TE: None for gates without logits.
    rows: upper bound of the number of choices, if one below T * K is known on the host; None = T * K.
    counts_E: int64, choices per expert of the real tokens; None = not counted by the gate.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    logits_TE: Tensor | None = None
    rows: int | None = None
    counts_E: Tensor | None = None


class Gate(nn.Module):
    """Base of all gates.

    A subclass names its keys in `Config` (a frozen keyword-only dataclass), its losses in `LOSSES`, and those that
    are used where the user names none in `DEFAULT_LOSSES`. `MAY_CHANGE` names the keys that a resumed run may give
    another value: in evaluation, saved weights choose and weigh as before. `CHOOSES_BY_SEED` says that choices in
    evaluation depend on `seed` of the layer, which then must agree as well. `REPLAYS` says that `forward` uses the
    `top_k` experts of `GateContext.experts_TK` where they are given. Its class is an entry point of the group
    `foundry_moe_gates`. Buffers keep their dtype when the model is cast; state that must survive a checkpoint is a
    persistent buffer, drawn by `reset_parameters` and changed by `after_step` only, so that recomputation and
    evaluation leave it alone.
    """

    LOSSES: ClassVar[frozenset[str]] = frozenset()
    DEFAULT_LOSSES: ClassVar[Mapping[str, float]] = {}
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset()
    CHOOSES_BY_SEED: ClassVar[bool] = False
    REPLAYS: ClassVar[bool] = False

    Config = GateKeys

    def __init__(
        self,
        config: Any,
        *,
        d_model: int,
        num_experts: int,
        top_k: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(config, GateKeys):
            config.check(num_experts, top_k)
        self.config = config
        self.d_model = d_model
        self.num_experts = num_experts
        self.top_k = top_k

    def reset_parameters(self, *, seed: int, layer: int, std: float) -> None:
        """Draws initial weights from (seed, layer) alone, and sets buffers. Gates without either do nothing."""

    def check_losses(self, names: Iterable[str]) -> None:
        """Raises ValueError for a loss of `LOSSES` that these keys do not support."""
        if isinstance(self.config, GateKeys):
            self.config.check_losses(names, self.num_experts, self.top_k)

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        raise NotImplementedError

    @property
    def uses_loads(self) -> bool:
        """Whether `after_step` has to be called."""
        return False

    def after_step(self, counts_E: Tensor, progress: Progress) -> None:
        """Once after each optimizer step, with the same arguments on every rank.

        Args:
            counts_E: int64, choices per expert of all real tokens of the step, of all ranks and microbatches.
        """

    @property
    def chooses_by_tokens_alone(self) -> bool:
        """Whether choices depend on the tokens only: not on layer, time or random numbers. False if not known."""
        return False

    def progress(self, context: GateContext) -> Progress:
        """How far training is.

        Raises:
            ValueError: it is not set, so that a schedule would not advance.
        """
        if context.progress is None:
            raise UserError(f"gate {type(self).__name__} follows the training's progress, {NO_PROGRESS}")
        return context.progress

    def value_of(self, schedule: Schedule, context: GateContext) -> float:
        """The current value of a schedule; see `progress`."""
        return schedule.start if schedule.is_constant else schedule.at(self.progress(context))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gate:
        """As in nn.Module, but a cast of the model leaves buffers in their dtype: a bf16 bias would lose its steps."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.dtype != old.dtype:
                setattr(self, name, old.to(new.device))
        return self


class LinearGate(Gate):
    """A gate that scores experts by a linear map, computed in fp32 for every precision of the model."""

    LOSSES: ClassVar[frozenset[str]] = LinearKeys.LOSSES
    DEFAULT_LOSSES: ClassVar[Mapping[str, float]] = LinearKeys.DEFAULT_LOSSES

    def __init__(self, config: Any, *, device: Any = None, dtype: torch.dtype | None = None, **shape: Any) -> None:
        super().__init__(config, **shape)
        self.weight_ED = nn.Parameter(torch.empty(self.num_experts, self.d_model, device=device, dtype=dtype))

    @torch.no_grad()
    def reset_parameters(self, *, seed: int, layer: int, std: float) -> None:
        shape, device = self.weight_ED.shape, self.weight_ED.device
        self.weight_ED.copy_(normal_matrix(shape, std, seed=seed, layer=layer, name="router", device=device))

    def logits(self, x_TD: Tensor, jitter: Jitter = NO_JITTER) -> Tensor:
        """[T, E] in fp32, or fp64 for a model in fp64 (Fedus et al. 2021, section 2.4: selective precision)."""
        return gate_logits(x_TD, self.weight_ED, jitter)

    def choose_best(self, logits_TE: Tensor, k: int, context: GateContext, **options: Any) -> Choices:
        """The k most probable experts of each token, and `balance` and `z` if they are requested.

        Args:
            options: of `softmax_topk`. With `counted`, the losses are over these choices, and `counts_E` is None.
        """
        alone = context.sum_counts is unchanged and context.sequences is None
        selection = softmax_topk(
            logits_TE,
            k,
            mask_T=context.mask_T,
            statistics=bool(context.losses),
            with_balance=alone and "balance" in context.losses,
            replayed_TK=context.experts_TK,
            **options,
        )
        counted = options.get("counted")
        experts_TK, counts_E = selection.experts_TK, selection.counts_E
        counted_TK = experts_TK if counted is None else experts_TK[:, :counted]
        return Choices(
            experts_TK=experts_TK,
            weights_TK=selection.weights_TK,
            losses=self.common_losses(logits_TE, None, counts_E, context, counted_TK, selection),
            logits_TE=logits_TE,
            counts_E=counts_E if context.losses and counted is None else None,
        )

    def common_losses(
        self,
        logits_TE: Tensor,
        probs_TE: Tensor | None,
        counts_E: Tensor,
        context: GateContext,
        experts_TK: Tensor,
        known: Selection | None = None,
    ) -> dict[str, Tensor]:
        """`balance` and `z`, if they are requested.

        Args:
            probs_TE: None = the softmax of the logits, computed where it is needed; then give `known`.
            counts_E: choices of these tokens; the context sums them over the scope of the balance loss.
            experts_TK: the choices that count in the loads; -1 = none.
            known: sums that `softmax_topk` has computed.
        """
        losses = {}
        if "balance" in context.losses and context.sequences is not None:
            probs_TE = logits_TE.softmax(-1) if probs_TE is None else probs_TE
            losses["balance"] = sequence_balance_loss(probs_TE, experts_TK, context.sequences, context.mask_T)
        elif known is not None and known.balance is not None:
            losses["balance"] = known.balance
        elif "balance" in context.losses:
            if known is None:
                assert probs_TE is not None
                mean_E = masked_mean(probs_TE, context.mask_T)
            else:
                mean_E = known.mean_E
            losses["balance"] = balance(mean_E, context.sum_counts(counts_E))
        if "z" in context.losses:
            losses["z"] = z_loss(logits_TE, context.mask_T) if known is None else known.z
        return losses


class JitteredGate(LinearGate):
    """A linear gate whose input is multiplied by U[1 - jitter, 1 + jitter] in training; `jitter` is one of its keys."""

    def __init__(self, config: Any, **shape: Any) -> None:
        super().__init__(config, **shape)
        self.jitter = parse_schedule(config.jitter, "jitter")

    @property
    def chooses_by_tokens_alone(self) -> bool:
        return self.jitter.is_constant and not self.jitter.start

    def input_jitter(self, x_TD: Tensor, context: GateContext) -> Jitter:
        """The factors of this batch's input; none in evaluation, or once the schedule is zero."""
        amount = self.value_of(self.jitter, context) if self.training else 0.0
        if not amount:
            return NO_JITTER
        keys_T = context.token_keys(x_TD.shape[0], x_TD.device)
        return Jitter(keys_T=keys_T, amount=amount, stream=context.stream(_JITTER))


def pack_choices(
    ranked_TE: Tensor, probs_TE: Tensor, context: GateContext, rows: int | None = None
) -> tuple[Tensor, Tensor, int]:
    """Each token's experts, by falling weight, padded with -1 to K.

    K is the largest over all processes that share the batch: they exchange these columns. One host synchronisation to
    read K and the number of choices; none on a GPU where `rows` is given and nothing is exchanged: K is E then.

    Args:
        ranked_TE: without gradient; below zero where an expert is not chosen, `probs_TE` where it is.
        probs_TE: combine weights; keeps its gradient.
        rows: choices in all, or a few more, if known on the host.

    Returns:
        experts_TK int64, weights_TK, and how many choices there are in all.
    """
    if rows is not None and on_gpu()(ranked_TE) and context.largest is unchanged:
        columns = ranked_TE.shape[1]
    else:
        number_T = (~(ranked_TE < 0)).sum(-1)  # NaN is a choice, as in `pack`
        most = number_T.max() if number_T.shape[0] else number_T.new_zeros(())
        columns, rows = torch.stack([context.largest(most), number_T.sum()]).tolist()
    weights_TK, experts_TK = pack(probs_TE, ranked_TE, max(columns, 1))
    return experts_TK, weights_TK, rows
