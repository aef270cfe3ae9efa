"""Router replay: the experts that one forward pass chose, or a serving engine, are used in another one.

Independent of gates, ranks and trainers: each rank records and replays its own tokens.

Shapes: T tokens, L MoE layers, K choices per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from foundry_moe.layers.context import in_backward
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.layers.moe import MoELayer
from foundry_moe.schema import UserError, shorten


class ChoiceRecord:
    """The choices of the forward passes within `record_choices`, one pass after the other."""

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self._taken: dict[nn.Module, list[tuple[Tensor, Tensor, int]]] = {layer: [] for layer in layers}

    @torch.compiler.disable
    def add(
        self, layer: nn.Module, experts_TK: Tensor, weights_TK: Tensor, mask_T: Tensor | None, sequences: int
    ) -> None:
        """Adds the choices of a layer's call; a recomputation adds none. `mask_T` is True for real tokens."""
        if not in_backward():
            if mask_T is not None:
                experts_TK = experts_TK.masked_fill(~mask_T[:, None], -1)
            self._taken[layer].append((experts_TK.to(torch.int16), weights_TK.detach(), sequences))

    def calls(self, layer: nn.Module) -> int:
        """How many calls of a layer are recorded."""
        return len(self._taken[layer])

    def keep(self, layer: nn.Module, calls: int) -> None:
        """Forgets the calls of a layer after its first `calls`: they are repeated."""
        del self._taken[layer][calls:]

    @property
    def experts_TLK(self) -> Tensor:
        """int16 (a layer has 4096 experts at most); -1 = no choice, as all of a padded token.

        Raises:
            ValueError: nothing was recorded, or not by every layer.
        """
        return self._stack(0)

    @property
    def weights_TLK(self) -> Tensor:
        """Combine weights, detached, for `replay_choices(..., weights=)`. Raises as `experts_TLK` does."""
        return self._stack(1)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Sequences and positions of each call of a layer."""
        parts = next(iter(self._taken.values()))
        return [(sequences, len(experts_TK) // max(sequences, 1)) for experts_TK, _, sequences in parts]

    def _stack(self, which: Literal[0, 1]) -> Tensor:
        numbers = [sum(len(part[0]) for part in parts) for parts in self._taken.values()]
        if len(set(numbers)) > 1 or not all(self._taken.values()):
            raise UserError(f"the layers recorded {numbers} tokens: run the whole model within record_choices")
        return torch.stack([torch.cat([part[which] for part in parts]) for parts in self._taken.values()], 1)


class ReplayedChoices:
    """The choices to replay, and how many tokens of them the passes so far have taken.

    Args:
        shapes: of the calls that a `ChoiceRecord` has; none for a tensor.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        experts_TLK: Tensor,
        weights_TLK: Tensor | None,
        shapes: Sequence[tuple[int, int]],
    ) -> None:
        self.column: dict[nn.Module, int] = {layer: number for number, layer in enumerate(layers)}
        self.experts_TLK, self.weights_TLK = experts_TLK, weights_TLK
        self.shapes, self.taken = shapes, 0

    def begin(self) -> PassChoices:
        """The choices of the pass that begins."""
        return PassChoices(self)

    def arrange(self, sequences: int, positions: int) -> None:
        """Before the first pass, which has this shape: puts what a generation recorded in the order of its sequences.

        The record has the prompts, then one position of all sequences after the other.
        """
        lengths = [length for _, length in self.shapes]
        numbers = {number for number, _ in self.shapes}
        generated = len(lengths) > 1 and set(lengths[1:]) == {1}
        if not generated or positions == lengths[0] or numbers == {1}:
            return
        if len(numbers) > 1 or positions != sum(lengths):
            raise UserError(
                f"choices were recorded in calls of [sequences, positions] {shorten([list(s) for s in self.shapes])}, "
                f"and a forward pass has {[sequences, positions]}: replay passes of the same lengths, or the whole "
                f"sequences, of {sum(lengths)} positions"
            )
        (number,) = numbers
        parts = torch.arange(len(self.experts_TLK)).split([number * length for length in lengths])
        order_T = torch.cat([part.view(number, -1) for part in parts], dim=1).flatten().to(self.experts_TLK.device)
        self.experts_TLK = self.experts_TLK[order_T]
        self.weights_TLK = None if self.weights_TLK is None else self.weights_TLK[order_T.to(self.weights_TLK.device)]


class PassChoices:
    """The choices of one forward pass: the next tokens of all, as many as its first layer has."""

    def __init__(self, choices: ReplayedChoices) -> None:
        self.choices = choices
        self.tokens: slice | None = None
        self.seen: set[nn.Module] = set()

    @torch.compiler.disable
    def take(self, layer: nn.Module, tokens: int, device: torch.device, sequences: int) -> tuple[Tensor, Tensor | None]:
        """experts_TK, and weights_TK where these are replayed, too."""
        choices = self.choices
        held = len(choices.experts_TLK)
        if self.tokens is None:
            if choices.taken == 0 and tokens:
                choices.arrange(sequences, tokens // sequences)
            if choices.taken + tokens > held:
                raise UserError(
                    f"choices has {held} tokens, and the forward passes have {choices.taken + tokens} or more: give a "
                    "row for each token, -1 for padded ones"
                )
            self.tokens = slice(choices.taken, choices.taken + tokens)
            choices.taken += tokens
        if tokens != self.tokens.stop - self.tokens.start:
            raise UserError(f"replay_choices needs as many tokens in each layer: one has {tokens}, others not")
        if not in_backward():
            if layer in self.seen:
                raise UserError("replay_choices needs one call of each layer per forward pass of the model")
            self.seen.add(layer)
        at = self.tokens, choices.column[layer]
        weights_TLK = choices.weights_TLK
        return choices.experts_TLK[at].to(device).long(), None if weights_TLK is None else weights_TLK[at].to(device)

    def restart(self) -> None:
        """The pass is run once more."""
        self.seen.clear()


@contextmanager
def record_choices(model: nn.Module) -> Iterator[ChoiceRecord]:
    """Records the experts that the gates choose in forward passes of `model`, on each rank for its own tokens.

    Raises:
        ValueError: no MoE layers, or a gate that cannot be replayed: `expert_choice` and `dense_to_sparse`, whose
            tokens have no fixed number of experts, or a gate of your own without `REPLAYS`.
    """
    layers = _layers(model)
    record = ChoiceRecord(layers)
    before = [layer.record for layer in layers]
    for layer in layers:
        layer.record = record
    try:
        yield record
    finally:
        for layer, earlier in zip(layers, before, strict=True):
            layer.record = earlier


@contextmanager
def replay_choices(
    model: nn.Module, choices: ChoiceRecord | Tensor, *, weights: Tensor | None = None
) -> Iterator[None]:
    """Forward passes of `model` use these experts; combine weights and gradients are those of the present logits.

    Each forward pass takes the next tokens: microbatches together use up all of them. Whole sequences take what was
    recorded while they were generated. The backward pass may run after this; a recomputation uses the choices of its
    forward pass.

    Args:
        choices: of `record_choices`, or integers [T, L, K] for the tokens of this rank and its MoE layers in order;
            -1 = no expert, as for padded tokens.
        weights: [T, L, K], combine weights to use as well, such as `ChoiceRecord.weights_TLK`. The gate then gets
            gradients from its losses alone.

    Raises:
        ValueError: see `record_choices`; another number of tokens, layers or choices; an expert out of range.
    """
    layers = _layers(model)
    experts_TLK = choices.experts_TLK if isinstance(choices, ChoiceRecord) else choices
    sizes = len(layers), layers[0].config.top_k
    if experts_TLK.dtype not in (torch.int16, torch.int32, torch.int64) or experts_TLK.dim() != 3:
        raise UserError(f"choices ({experts_TLK.dtype}, {list(experts_TLK.shape)}) must be int16 or int32 [T, L, K]")
    for size, needed, what in zip(experts_TLK.shape[1:], sizes, ("layers", "choices per token (top_k)"), strict=True):
        if size != needed:
            raise UserError(f"choices has {size} {what}, and the model's MoE layers {needed}")
    if weights is not None and weights.shape != experts_TLK.shape:
        raise UserError(f"weights {list(weights.shape)} must have the shape of choices, {list(experts_TLK.shape)}")
    least, most = (int(bound) for bound in experts_TLK.aminmax()) if experts_TLK.numel() else (-1, -1)
    if least < -1 or most >= layers[0].num_experts:
        wrong = least if least < -1 else most
        raise UserError(f"choices has expert {wrong}: use 0 to {layers[0].num_experts - 1}, or -1 for none")
    contexts = {layer.context: layer.context.replay for layer in layers}
    shapes = choices.shapes if isinstance(choices, ChoiceRecord) else ()
    parts = [ReplayedChoices(layers, experts_TLK, weights, shapes) for _ in contexts]
    for context, part in zip(contexts, parts, strict=True):
        context.replay = part
    try:
        yield
    finally:
        for context, earlier in contexts.items():
            context.replay = earlier
    for part in parts:
        if part.taken != len(experts_TLK):
            raise UserError(f"choices has {len(experts_TLK)} tokens, and the forward passes took {part.taken}")


def _layers(model: nn.Module) -> list[MoELayer]:
    """The model's MoE layers, whose forward passes are then observed."""
    layers = moe_layers(model)
    if not layers:
        raise UserError("record_choices and replay_choices need a model with MoE layers: call apply_dmoe first")
    for layer in layers:
        if not layer.gate.REPLAYS:
            raise UserError(
                f"gate {layer.config.gate['name']} cannot be replayed: its tokens have no fixed number of experts, or "
                "its class does not set REPLAYS"
            )
    for context in {layer.context for layer in layers}:
        context.observe(model)
    return layers
