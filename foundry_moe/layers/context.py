"""What a layer reads of a batch beyond its input: token ids, padding, progress, and the scale of the loss.

The layers of a model share one `BatchContext`. Hooks fill it, so that the model's code stays unchanged. Independent
of ranks and trainers.

Shapes: B sequences, S positions, T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Signature, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foundry_moe.layers.schedule import Progress
from foundry_moe.ops import noise
from foundry_moe.schema import UserError


def unchanged(tensor: Tensor) -> Tensor:
    """The tensor itself: the reduction of a single process."""
    return tensor


# (rows, stream) -> shuffled rows, and a function that undoes the shuffle
Shuffle = Callable[[Tensor, int], tuple[Tensor, Callable[[Tensor], Tensor]]]


def _by_sequence(tokens: Tensor) -> Tensor:
    """[B, S] of [..., S]: with one dimension it is one sequence."""
    return tokens[None] if tokens.dim() == 1 else tokens.flatten(0, -2)


def stay(rows_TX: Tensor, stream: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The `Shuffle` of a single process: unchanged rows.

    A `Shuffle` over processes sends rows to random processes; equal streams give equal shuffles.
    """
    return rows_TX, unchanged


class TokenSequences(NamedTuple):
    """The sequence of each token.

    index_T: int64, below `num_sequences`.
    num_sequences: at most; some may have no tokens.
    """

    index_T: Tensor
    num_sequences: int


@dataclass(frozen=True, kw_only=True)
class GateContext:
    """Properties of a gate's tokens. T tokens.

    token_ids_BS: the ids of the batch [sequences, positions], or None where the model was not given any.
    mask_T: True for real tokens, False for padding; None = all are real.
    progress: of the training; None where nothing sets it.
    losses: names of the auxiliary losses that are wanted; none in evaluation.
    seed, layer: of the layer, for random numbers.
    sum_counts: sums counts over all tokens of the balance loss. Call it at most once in a forward pass, with a tensor
        without gradient. `sum_importance` and `sum_load` are the same for the experts' totals of these losses.
    sequences: given where the balance loss is per sequence, instead of over `sum_counts`.
    largest: the maximum of a scalar over all processes that share a batch.
    shuffle: moves rows at random between the processes that share a batch, see `stay`.
    keys: gives `token_keys` of the ids; None where there are none.
    """

    token_ids_BS: Tensor | None = None
    mask_T: Tensor | None = None
    progress: Progress | None = None
    losses: frozenset[str] = frozenset()
    seed: int = 0
    layer: int = 0
    sum_counts: Callable[[Tensor], Tensor] = unchanged
    sum_importance: Callable[[Tensor], Tensor] = unchanged
    sum_load: Callable[[Tensor], Tensor] = unchanged
    sequences: TokenSequences | None = None
    largest: Callable[[Tensor], Tensor] = unchanged
    shuffle: Shuffle = stay
    keys: Callable[[], Tensor] | None = None

    def token_keys(self, num_tokens: int, device: torch.device) -> Tensor:
        """int32 [T]: seeds of the tokens' random numbers; from the sequence, else from the position in the input."""
        if self.keys is not None:
            return self.keys()
        return noise.mix(torch.arange(num_tokens, dtype=torch.int32, device=device))

    def stream(self, purpose: int) -> int:
        """For `foundry_moe.ops.noise`: distinct for each layer, batch and purpose."""
        return noise.stream_of(self.seed, self.layer, self.progress.ba if self.progress else 0, purpose)


class BatchContext:
    """Shared by the layers of one model; filled by hooks and by the training loop.

    progress: of the training, set before each batch.
    sum_over_ranks, sum_over_group: sum a tensor without gradient over the processes that share the batch, or experts.
    max_over_ranks, shuffle: `largest` and `shuffle` of `GateContext`.
    auxiliary_scale: of the auxiliary losses of the current microbatch, a scalar: its share of the real tokens of the
        whole batch, times the number of processes that share the batch, times the factor of a GradScaler. None =
        they are scaled as the loss is.
    batch_counts: by layer and loss, sums such as choices per expert over the whole batch, if counted before its first
        microbatch; see `count_ahead`.

    Not a module: DDP would broadcast its tensors, and `Module.to` would replace tensors that layers refer to.
    """

    def __init__(self) -> None:
        self.token_ids_BS: Tensor | None = None
        self.mask_BS: Tensor | None = None
        self.sequence_id_BS: Tensor | None = None
        self.progress: Progress | None = None
        self.sum_over_ranks: Callable[[Tensor], Tensor] = unchanged
        self.sum_over_group: Callable[[Tensor], Tensor] = unchanged
        self.max_over_ranks: Callable[[Tensor], Tensor] = unchanged
        self.shuffle: Shuffle = stay
        self.auxiliary_scale: Tensor | None = None
        self.batch_counts: dict[tuple[int, str], Tensor] = {}
        self._counting = False
        self._keys_T: Tensor | None = None
        self._packed_BS: Tensor | None = None
        self._loss_scale = torch.ones((), dtype=torch.float64)

    def loss_scale(self, device: torch.device) -> Tensor:
        """`auxiliary_scale`, else d(what is differentiated) / d(loss): a trainer weighs microbatches and scales fp16.

        fp64 scalar; 1 where no loss was anchored. Valid in the backward pass only.
        """
        if self._loss_scale.device != device:
            self._loss_scale = torch.ones((), dtype=torch.float64, device=device)
        return self._loss_scale

    def for_tokens(
        self,
        num_tokens: int,
        *,
        layer: int = 0,
        seed: int = 0,
        losses: frozenset[str] = frozenset(),
        balance_over: str = "rank",
        training: bool = False,
        rows: int | None = None,
        device: torch.device | None = None,
    ) -> GateContext:
        """The context of a layer's input. Ids and mask of another length (cached decoding) are ignored.

        Args:
            rows: sequences of the layer's input; None = tokens without sequences.
            device: of the input; None = that of the ids.

        Raises:
            ValueError: a balance loss over sequences, where the tokens of a sequence are unknown.
        """
        ids, mask = self.token_ids_BS, self.mask_BS
        fits = ids is not None and ids.numel() == num_tokens
        by_sequence = training and balance_over == "sequence" and "balance" in losses
        sum_for = partial(self._sum_for, balance_over if training else "rank", layer)
        return GateContext(
            token_ids_BS=ids if fits else None,
            mask_T=mask.reshape(-1) if mask is not None and mask.numel() == num_tokens else None,
            progress=self.progress,
            losses=losses if training else frozenset(),
            seed=seed,
            layer=layer,
            sum_counts=sum_for("counts"),
            sum_importance=sum_for("importance"),
            sum_load=sum_for("load"),
            sequences=self._sequences(num_tokens, rows, device) if by_sequence else None,
            largest=self.max_over_ranks,
            shuffle=self.shuffle,
            keys=self._token_keys if fits else None,
        )

    def _token_keys(self) -> Tensor:
        assert self.token_ids_BS is not None
        if self._keys_T is None:
            self._keys_T = noise.token_keys(self.token_ids_BS)
        return self._keys_T

    def _sequences(self, num_tokens: int, rows: int | None, device: torch.device | None) -> TokenSequences:
        packed_BS, ids = self.sequence_id_BS, self.token_ids_BS
        if packed_BS is not None and packed_BS.numel() == num_tokens:
            # a row of S tokens has S documents at most; -1 is padding
            rows, length = packed_BS.shape
            first_B1 = torch.arange(rows, device=packed_BS.device)[:, None] * length
            return TokenSequences((first_B1 + packed_BS.long().clamp(0, max(length - 1, 0))).flatten(), num_tokens)
        if ids is not None and ids.numel() == num_tokens:
            rows = ids.shape[0]
        if rows is None or (rows == 0) != (num_tokens == 0) or (rows and num_tokens % rows):
            raise UserError(
                f"balance_over (sequence): a layer got {num_tokens} tokens without their sequences: give it the whole "
                "batch (MPT: use_pad_tok_in_ffn: true), or use balance_over: rank"
            )
        device = ids.device if device is None and ids is not None else device
        length = num_tokens // rows if rows else 0
        return TokenSequences(torch.arange(rows, device=device).repeat_interleave(length, output_size=num_tokens), rows)

    def counts_here(self, balance_over: str) -> bool:
        """Whether the balance loss is over loads of one microbatch of this process."""
        return self._sum_for(balance_over, 0, "counts") is unchanged

    def _sum_for(self, balance_over: str, layer: int, of: str) -> Callable[[Tensor], Tensor]:
        if balance_over == "group":
            return self.sum_over_group
        if balance_over == "batch":
            return partial(self._sum_batch, (layer, of))
        return self.sum_over_ranks if balance_over == "microbatch" else unchanged

    def _sum_batch(self, key: tuple[int, str], counts: Tensor) -> Tensor:
        if self._counting:
            self.batch_counts[key] = self.batch_counts[key] + counts if key in self.batch_counts else counts
            return counts
        return self.batch_counts[key] if key in self.batch_counts else self.sum_over_ranks(counts)

    def count_ahead(self, run_forward: Callable[[], None]) -> None:
        """Counts the choices of a whole batch before its first microbatch is trained on.

        The gradient of every microbatch depends on the loads of the whole batch, so these must be known before the
        first backward pass: with several microbatches, a step takes one more forward pass, without gradients.

        Args:
            run_forward: runs the model on all microbatches of this process.
        """
        self.batch_counts = {}
        self._counting = True
        try:
            with torch.no_grad():
                run_forward()
        finally:
            self._counting = False
        self.batch_counts = {key: self.sum_over_ranks(self.batch_counts[key]) for key in sorted(self.batch_counts)}

    def observe(self, model: nn.Module) -> None:
        """Hooks the first module of `model` whose forward takes `input_ids`, to note ids and padding of each batch.

        An outer module whose forward takes `batch` is hooked too: it drops keys that the inner one does not take.
        """
        for module in model.modules():
            takes = signature(module.forward)
            if "input_ids" in takes.parameters:
                module.register_forward_pre_hook(partial(self._note_batch, takes), with_kwargs=True)
                return
            if "batch" in takes.parameters:
                module.register_forward_pre_hook(partial(self._note_packing, takes), with_kwargs=True)

    def _note_packing(self, takes: Signature, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        batch = takes.bind_partial(*args, **kwargs).arguments.get("batch")
        found = batch.get("sequence_id") if isinstance(batch, Mapping) else None
        self._packed_BS = found if isinstance(found, Tensor) else None

    def _note_batch(self, takes: Signature, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        bound = takes.bind_partial(*args, **kwargs).arguments
        found = (bound.get(name) for name in ("input_ids", "attention_mask", "sequence_id"))
        ids, mask, packed = (value if isinstance(value, Tensor) else None for value in found)
        around, self._packed_BS = self._packed_BS, None  # valid for this call only
        if packed is None and around is not None and ids is not None and around.shape == ids.shape:
            packed = around
        self.note(ids, mask, packed)

    def note(
        self, token_ids_BS: Tensor | None, mask_BS: Tensor | None = None, sequence_id_BS: Tensor | None = None
    ) -> None:
        """Notes ids and padding of the next forward pass: [sequences, positions], or [tokens] of one sequence.

        Args:
            mask_BS: 1 or True = real, 0 = padding.
            sequence_id_BS: index of a token's packed document in its row, from 0 up; -1 = padding.
        """
        if mask_BS is not None and mask_BS.dim() > 2 and (token_ids_BS is None or mask_BS.shape != token_ids_BS.shape):
            mask_BS = None  # of pairs of positions
        self.token_ids_BS = None if token_ids_BS is None else _by_sequence(token_ids_BS)
        self.mask_BS = None if mask_BS is None else _by_sequence(mask_BS).bool()
        self.sequence_id_BS = sequence_id_BS if sequence_id_BS is not None and sequence_id_BS.dim() == 2 else None
        self._keys_T = None
        if token_ids_BS is not None:
            self.loss_scale(token_ids_BS.device)  # before any layer runs: a compiled graph would make it a constant

    def anchor(self, loss: Any) -> Any:
        """The loss unchanged; its backward pass records the factor by which the trainer scales it.

        A mapping of losses is anchored at `total`, other containers at each tensor.
        """
        if isinstance(loss, Tensor):
            return self._anchor(loss) if loss.requires_grad else loss
        if isinstance(loss, Mapping):
            names = ["total"] if "total" in loss else list(loss)
            return {**loss, **{name: self.anchor(loss[name]) for name in names}}
        if isinstance(loss, tuple | list):
            return type(loss)(self.anchor(item) for item in loss)
        return loss

    def _anchor(self, loss: Tensor) -> Tensor:
        scale, anchored = self.loss_scale(loss.device), loss.clone()

        def record(gradient: Tensor) -> None:  # runs before all other nodes of the backward pass
            # `.data`: a compiled layer has saved the buffer and must see the new value
            scale.data.copy_(gradient.detach().sum() if self.auxiliary_scale is None else self.auxiliary_scale)

        anchored.register_hook(record)
        return anchored
