"""Per-batch context shared by all MoE layers: token ids, padding, progress, and the scale of the loss.

Hooks fill it, so that the model's code stays unchanged. Independent of ranks and trainers.

Shapes: B sequences, S positions, T tokens, E experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundry_moe.config import refuse_other_parallelism
from foundry_moe.layers.forward_pass import (
    ForwardPass,
    by_sequence,
    count_targets,
    inherit,
    padding_of,
    read_call,
    read_mask,
)
from foundry_moe.layers.schedule import Progress
from foundry_moe.ops import noise
from foundry_moe.schema import UserError

if TYPE_CHECKING:
    from foundry_moe.layers.replay import PassChoices, ReplayedChoices

Result = TypeVar("Result")
NO_PROGRESS = (
    "which nothing sets: add `dmoe_steps: {}` to algorithms (the algorithm dmoe does this itself), or call "
    "`step_gates_after(optimizer, model)` or set `batch_context(model).progress` before each step"
)
_TWICE = object()  # kept by a pass in which two calls gave one key


def unchanged(tensor: Tensor) -> Tensor:
    """The tensor itself: the reduction of a single process."""
    return tensor


# (rows, stream) -> shuffled rows, and a function that undoes the shuffle
Shuffle = Callable[[Tensor, int], tuple[Tensor, Callable[[Tensor], Tensor]]]


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
    losses: names of the auxiliary losses to compute; none in evaluation.
    seed, layer: of the layer, for random numbers.
    sum_counts: sums counts over all tokens of the balance loss. Call it at most once per forward pass, with a tensor
        without gradient. `sum_importance` and `sum_load` are the same for the experts' totals of these losses.
    sequences: given where the balance loss is per sequence, instead of over `sum_counts`.
    largest: the maximum of a scalar over all processes that share a batch.
    shuffle: moves rows at random between the processes that share a batch, see `stay`.
    keys: gives `token_keys` of the ids; None where there are none.
    experts_TK: int64, the choices to use in place of the gate's own, -1 = none; None = the gate chooses.
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
    experts_TK: Tensor | None = None

    def token_keys(self, num_tokens: int, device: torch.device) -> Tensor:
        """int32 [T]: seeds of the tokens' random numbers; from the sequence, else from the position in the input."""
        if self.keys is not None:
            return self.keys()
        # from 1: `mix` keeps 0, and the key 0 has the same number in column 0 of every stream
        return noise.mix(torch.arange(1, num_tokens + 1, dtype=torch.int32, device=device))

    def stream(self, purpose: int) -> int:
        """For `foundry_moe.ops.noise`: distinct for each layer, batch and purpose.

        Raises:
            ValueError: nothing sets the progress: each batch would have the same random numbers.
        """
        if self.progress is None:
            raise UserError(f"the gate's random numbers follow the training's progress, {NO_PROGRESS}")
        return noise.stream_of(self.seed, self.layer, self.progress.ba, purpose)


class BatchContext:
    """Shared by the layers of one model; filled by hooks and by the training loop.

    Attributes:
        progress: of the training, set before each batch.
        auxiliary_scale: of the auxiliary losses of the current microbatch, a scalar: its share of the real tokens of
            the whole batch, times the number of processes that share the batch, times the factor of a GradScaler. None
            = they are scaled as the loss is.

    Not a module: DDP would broadcast its tensors, and `Module.to` would replace tensors that layers refer to.
    """

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self.auxiliary_scale: Tensor | None = None
        # set by `parallelize` and by algorithms; see `GateContext`
        self.sum_over_ranks: Callable[[Tensor], Tensor] = unchanged
        self.sum_over_group: Callable[[Tensor], Tensor] = unchanged
        self.max_over_ranks: Callable[[Tensor], Tensor] = unchanged
        self.shuffle: Shuffle = stay
        self.batch_counts: dict[tuple[int, str], Tensor] = {}  # by layer and loss, of a whole batch; see `count_ahead`
        self.replay: ReplayedChoices | None = None  # set by `replay_choices`
        self.has_losses = False
        self._counting = False
        # batch and counts of the last pass that had no counts of a whole batch, by layer and loss
        self._passed: dict[tuple[int, str], tuple[int, Mapping[tuple[int, str], Tensor]]] = {}
        self._pass: ForwardPass | None = None  # that runs, or is recomputed
        self._given: ForwardPass | None = None
        self._loss_scale = torch.ones((), dtype=torch.float64)
        self._backward: _Backward | None = None
        self._warned = self._checked = False

    def loss_scale(self, device: torch.device) -> Tensor:
        """`auxiliary_scale`, else d(what is differentiated) / d(loss): a trainer weighs microbatches and scales fp16.

        fp64 scalar; 1 without a loss of `track_scale`. Valid in the backward pass only.
        """
        if self._pass is None and self.auxiliary_scale is not None:  # no hook of a pass reads it
            return self.auxiliary_scale.to(device, torch.float64)
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
        needs_mask: bool = False,
    ) -> GateContext:
        """The context of a layer's input. Ids of another length (cached decoding) are ignored.

        So is a mask of another length, without gradients.

        Args:
            rows: sequences of the layer's input; None = tokens without sequences.
            device: of the input; None = that of the ids.
            needs_mask: in training the result depends on which tokens are padding.

        Raises:
            ValueError: a balance loss over sequences, where the tokens of a sequence are unknown; an attention mask
                whose padding is unknown, or of another shape than the ids, with `needs_mask`; a recomputation outside a
                pass that was observed; a balance loss over ranks that nothing connects.
        """
        run = self._running(training and needs_mask)
        ids, mask = run.token_ids_BS, run.mask_BS
        fits = ids is not None and ids.numel() == num_tokens
        trains = training and needs_mask and torch.is_grad_enabled()
        if fits and trains and mask is not None and mask.numel() != num_tokens:
            wanted = [] if ids is None else list(ids.shape)
            raise UserError(f"the mask {list(mask.shape)} must have the shape of the token ids, {wanted}")
        by_sequence = training and balance_over == "sequence" and "balance" in losses
        sum_for = partial(self._sum_for, balance_over if training and losses else "rank", layer, run.batch_counts)
        return GateContext(
            token_ids_BS=ids if fits else None,
            mask_T=mask.reshape(-1) if mask is not None and mask.numel() == num_tokens else None,
            progress=run.progress,
            losses=losses if training else frozenset(),
            seed=seed,
            layer=layer,
            sum_counts=sum_for("counts"),
            sum_importance=sum_for("importance"),
            sum_load=sum_for("load"),
            sequences=_sequences(run, num_tokens, rows, device) if by_sequence else None,
            largest=self.max_over_ranks,
            shuffle=self.shuffle,
            keys=partial(_token_keys, run) if fits else None,
        )

    def _running(self, needs_mask: bool) -> ForwardPass:
        run = self._pass
        if run is None:
            if self._given is None:
                return ForwardPass(progress=self.progress, batch_counts=self.batch_counts)
            if in_backward():
                raise UserError(
                    "activation checkpointing recomputes a layer whose ids or padding were given by set_tokens(): call "
                    "context.observe(model) once after the model is built, so that each forward pass keeps its own"
                )
            run = replace(self._given, progress=self.progress, batch_counts=self.batch_counts)
            if run.mask_BS is None and not run.unknown_mask:
                run = replace(run, mask_BS=padding_of(run.sequence_id_BS))
        if needs_mask and run.unknown_mask:
            raise UserError(
                f"attention_mask ({run.unknown_mask}) does not tell which tokens are padding, on which this training "
                "depends: give the model a mask [batch, sequence] or [batch, heads, sequence, sequence], or pass one "
                "to batch_context(model).set_tokens(input_ids, mask) before each forward pass"
            )
        return run

    @property
    def replayed(self) -> PassChoices | None:
        """The choices that the pass which runs, or is recomputed, replays."""
        return None if self._pass is None else self._pass.replay

    def once(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """`compute()`; in a recomputation, its result for this key in the first pass.

        A key that a pass has computed twice is computed again.
        """
        if self._pass is None:
            return compute()
        kept = self._pass.kept
        if in_backward():
            found = kept.get(key, _TWICE)
            return compute() if found is _TWICE else found
        result = compute()
        kept[key] = _TWICE if key in kept else result
        return result

    @property
    def runs(self) -> bool:
        """Whether a forward pass runs that is observed."""
        return self._pass is not None

    def restart(self) -> None:
        """Forgets what the calls of layers have left in the pass that runs: the model is run once more in it."""
        self._passed.clear()
        run = self._pass
        while run is not None:
            run.kept.clear()
            if run.replay is not None:
                run.replay.restart()
            run = run.around

    def _sum_for(
        self, balance_over: str, layer: int, known: Mapping[tuple[int, str], Tensor], of: str
    ) -> Callable[[Tensor], Tensor]:
        if balance_over == "group":
            return self.sum_over_group
        if balance_over == "batch":
            return partial(self._sum_batch, known, (layer, of))
        if balance_over != "microbatch":
            return unchanged
        return self._sum_unconnected if self.sum_over_ranks is unchanged and not _is_alone() else self.sum_over_ranks

    def _sum_unconnected(self, counts: Tensor) -> Tensor:
        self.check_ranks("balance_over (microbatch)")
        return counts

    def check_ranks(self, what: str) -> None:
        """Raises ValueError if `what` has to be summed over the ranks of this job, and nothing has connected them."""
        if self.sum_over_ranks is unchanged and not _is_alone():
            raise UserError(
                f"{what} needs sums over the {dist.get_world_size()} ranks of this job: call "
                "foundry_moe.parallelize(model, ...), or with DDP or FSDP2 alone "
                "`GateCollectives().connect(batch_context(model))` (of foundry_moe.parallel.collectives)"
            )

    def _sum_batch(self, known: Mapping[tuple[int, str], Tensor], key: tuple[int, str], counts: Tensor) -> Tensor:
        if self._counting:
            self.batch_counts[key] = self.batch_counts[key] + counts if key in self.batch_counts else counts
            return counts
        if key in known:
            return known[key]
        self.check_ranks("balance_over (batch)")
        if self.progress is not None and torch.is_grad_enabled() and not in_backward():
            batch, counts_then = self._passed.get(key, (None, None))
            if batch == self.progress.ba and counts_then is known:
                warnings.warn(_NOT_AHEAD, stacklevel=2)  # or the last step was skipped, as by a GradScaler
            self._passed[key] = self.progress.ba, known
        return self.sum_over_ranks(counts)

    def count_ahead(self, run_forward: Callable[[], None]) -> None:
        """Counts the choices of a whole batch before its first microbatch is trained on.

        The gradient of every microbatch depends on the loads of the whole batch, so these must be known before the
        first backward pass: with several microbatches, a step takes one more forward pass, without gradients.

        Args:
            run_forward: runs the model on all microbatches of this process.
        """
        self.batch_counts = {}
        self._counting = True
        # a copy takes the replayed tokens, so that the microbatches take them again
        replay, self.replay = self.replay, copy(self.replay)
        try:
            with torch.no_grad():
                run_forward()
        finally:
            self._counting, self.replay = False, replay
        self.batch_counts = {key: self.sum_over_ranks(self.batch_counts[key]) for key in sorted(self.batch_counts)}

    def observe(self, model: nn.Module) -> None:
        """Hooks `model` and those of its modules whose forward takes `input_ids` or `batch`.

        Each call of such a module is a forward pass, with the ids and padding of its arguments; nested modules use the
        innermost one's, completed by those around it. While its backward pass runs, a layer that is
        recomputed reads them again, whatever ran in between. A scalar `loss` among its results gives the scale of
        auxiliary losses, and a loss without targets becomes 0. Modules that are hooked already are left alone.
        """
        for module in model.modules():
            takes = signature(module.forward)
            begin = partial(self._begin, takes)
            hooked = any(getattr(hook, "func", None) == self._begin for hook in module._forward_pre_hooks.values())
            if not hooked and (module is model or not takes.parameters.keys().isdisjoint(("input_ids", "batch"))):
                module.register_forward_pre_hook(begin, with_kwargs=True)
                module.register_forward_hook(self._end, always_call=True)

    def _begin(self, takes: Signature, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._backward is not None and not in_backward():
            self._end_backward()  # it has failed
        around = self._pass
        found = inherit(read_call(takes, args, kwargs), around)
        padding_BS = found.pop("padding_BS")
        if self._given is not None:  # of this pass, and before what its arguments say
            given, self._given = self._given, None
            if given.mask_BS is not None:
                found.update(mask_BS=given.mask_BS, unknown_mask="")
            for name in ("token_ids_BS", "sequence_id_BS"):
                found[name] = found[name] if getattr(given, name) is None else getattr(given, name)
            if given.sequence_id_BS is not None:
                padding_BS = padding_of(given.sequence_id_BS)
        if found["mask_BS"] is None and not found["unknown_mask"]:
            found["mask_BS"] = padding_BS
        self._pass = ForwardPass(
            **found,
            progress=self.progress,
            batch_counts=self.batch_counts,
            auxiliary_scale=self.auxiliary_scale,
            replay=around.replay if around else self.replay.begin() if self.replay and not in_backward() else None,
            kept=around.kept if around else {},
            around=around,
        )
        if self._pass.token_ids_BS is not None:
            self.loss_scale(self._pass.token_ids_BS.device)  # a compiled graph would make it a constant
        if not self._checked:
            # once; algorithms of Composer check it before the model is wrapped
            refuse_other_parallelism(tensor_parallel=False, fsdp_version="1" if _by_fsdp1(module) else "2")
            self._checked = True

    def _end(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        ended = self._pass
        assert ended is not None
        self._pass = ended.around
        if not torch.is_grad_enabled():
            return None
        if torch.compiler.is_compiling():
            # breaks the graph of a model that is compiled as a whole: only a hook of its loss has the loss's scale
            scaled = self.has_losses and _loss_of(output)[1] is not None
            return self._watch_uncompiled(output, ended) if scaled else None
        return self._watch(output, ended)

    def _watch(self, output: Any, ended: ForwardPass) -> Any:
        changed = self._watch_loss(output, ended)
        for tensor in _tensors(output if changed is None else changed):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._resume, ended))
        return changed

    _watch_uncompiled = torch.compiler.disable(_watch)

    def _watch_loss(self, output: Any, run: ForwardPass) -> Any:
        """Records the gradient of a scalar loss in `output`, and makes it 0 where it has no targets.

        Returns:
            An output in place of this one; None = the same, changed in place.
        """
        key, found = _loss_of(output)
        if found is None:
            return None
        loss = _zero_without(run.targets, found)
        loss.register_hook(partial(self._record_loss, run))
        if isinstance(output, MutableMapping):
            output[key] = loss
            return None
        return (loss, *output[1:])

    def _record_loss(self, run: ForwardPass, gradient: Tensor) -> Tensor:
        gradient = _zero_without(run.targets, gradient)
        scale = gradient.detach().double()
        self._in_this_backward().losses[run] = scale if run.share is None else scale * run.share
        return gradient

    def _resume(self, run: ForwardPass, _: Tensor) -> None:
        """At the begin of the backward pass of `run`."""
        backward = self._in_this_backward()
        self._pass = run
        scale = run.auxiliary_scale if backward.tracked is None else backward.tracked
        found: ForwardPass | None = run
        while scale is None and found is not None:
            scale, found = backward.losses.get(found), found.around
        if scale is None:
            scale = next(reversed(backward.losses.values()), None)
        if scale is None and self.has_losses and not self._warned:
            self._warned = True
            warnings.warn(_NO_LOSS, stacklevel=2)
        self._set_scale(scale)

    def _set_scale(self, scale: Tensor | None) -> None:
        # `.data`: a compiled layer has saved the buffer and must see the new value
        data = self._loss_scale.data
        data.fill_(1) if scale is None else data.copy_(scale)

    def _in_this_backward(self) -> _Backward:
        """The state of the backward pass that runs, which ends with it."""
        if self._backward is None:
            self._backward = _Backward(before=self._pass, losses={})
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return self._backward

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._pass, self._backward = self._backward.before, None
            self._set_scale(None)

    def set_tokens(
        self, token_ids_BS: Tensor | None, mask_BS: Tensor | None = None, sequence_id_BS: Tensor | None = None
    ) -> None:
        """Sets ids and padding of the next forward pass: [sequences, positions], or [tokens] of one sequence.

        Without `observe`, of all forward passes until the next call.

        Args:
            mask_BS: 1 or True = real, 0 = padding; None = as the arguments of the pass, else `sequence_id_BS`, say.
            sequence_id_BS: index of a token's packed document in its row, from 0 up; -1 = padding.
        """
        packed = sequence_id_BS if sequence_id_BS is not None and sequence_id_BS.dim() == 2 else None
        mask, ids_BS = read_mask(mask_BS, token_ids_BS), None if token_ids_BS is None else by_sequence(token_ids_BS)
        self._given = ForwardPass(token_ids_BS=ids_BS, sequence_id_BS=packed, **mask)
        if token_ids_BS is not None:
            self.loss_scale(token_ids_BS.device)  # before any layer runs: a compiled graph would make it a constant

    def track_scale(self, loss: Any, labels_BS: Any = None) -> Any:
        """The loss unchanged; its backward pass records the factor by which the trainer scales it.

        Of a mapping of losses this is `total`, of other containers each tensor.

        Args:
            labels_BS: of a language model; if all are -100, loss and gradient become 0 in place of NaN.
        """
        if isinstance(loss, Tensor):
            return self._track_scale(loss, count_targets(labels_BS)) if loss.requires_grad else loss
        if isinstance(loss, Mapping):
            names = ["total"] if "total" in loss else list(loss)
            return {**loss, **{name: self.track_scale(loss[name], labels_BS) for name in names}}
        if isinstance(loss, tuple | list):
            return type(loss)(self.track_scale(item, labels_BS) for item in loss)
        return loss

    def _track_scale(self, loss: Tensor, targets: Tensor | None) -> Tensor:
        self.loss_scale(loss.device)
        given = self.auxiliary_scale

        def record(gradient: Tensor) -> Tensor:  # runs before all other nodes of the backward pass
            gradient = _zero_without(targets, gradient)
            scale = gradient.detach().sum() if given is None else given
            self._in_this_backward().tracked = scale
            self._set_scale(scale)
            return gradient

        tracked = _zero_without(targets, loss)
        tracked.register_hook(record)
        return tracked


@dataclass(kw_only=True)
class _Backward:
    """State of one backward pass.

    before: the pass that ran when it began.
    tracked: the scale of a loss of `track_scale`.
    losses: scales by the passes that computed a loss.
    """

    before: ForwardPass | None
    losses: dict[ForwardPass, Tensor]
    tracked: Tensor | None = None


_NO_LOSS = (
    "auxiliary losses are added with factor 1: the loss of this backward pass is not known. If it is scaled before "
    "backward() (divided by microbatches, by a GradScaler), use batch_context(model).track_scale(loss) first; if a "
    "wrapper that was made after apply_dmoe computes the loss, call batch_context(model).observe(wrapper) once"
)


_NOT_AHEAD = (
    "balance_over (batch): a layer is called more than once at the same progress, and counts the loads of each call by "
    "itself: with several forward passes per step call `batch_context(model).count_ahead(run_forward)` before the first"
)


def _is_alone() -> bool:
    """Whether this job is one process."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


def _loss_of(output: Any) -> tuple[Any, Tensor | None]:
    """The key or place of a scalar loss in a model's output, and the loss; None where there is none to train on."""
    key = "loss" if isinstance(output, MutableMapping) else 0
    found = output.get(key) if key == "loss" else output[0] if isinstance(output, tuple) and output else None
    return key, found if isinstance(found, Tensor) and not found.dim() and found.requires_grad else None


def _zero_without(targets: Tensor | None, value: Tensor) -> Tensor:
    """A copy, zero where there are no targets: a mean over none is NaN, as is a batch's share of none."""
    return value.clone() if targets is None else value.masked_fill(targets == 0, 0)


def _by_fsdp1(model: nn.Module) -> bool:
    """Whether FSDP1 wraps the model or parts of it, as seen in its forward pass.

    Parameters of parts are marked as flattened. Those of the whole are then plain tensors, or no parameters at all.
    """
    flat = [getattr(p, "_fsdp_flattened", False) for p in model.parameters()]
    whole = bool(getattr(model, "_is_fsdp_managed_module", False))  # by FSDP2, too
    return any(flat) or (whole and not any(isinstance(p, nn.Parameter) for p in model.parameters()))


def in_backward() -> bool:
    """Whether a backward pass runs: a forward pass is then a recomputation."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in nested containers."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for item in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(item)


def _token_keys(run: ForwardPass) -> Tensor:
    return run.keys_T


def _sequences(run: ForwardPass, num_tokens: int, rows: int | None, device: torch.device | None) -> TokenSequences:
    packed_BS, ids = run.sequence_id_BS, run.token_ids_BS
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
