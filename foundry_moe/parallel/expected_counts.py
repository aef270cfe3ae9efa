"""Sizes of messages from the forward passes before, so that the host need not wait for counts in each layer.

With exact sizes the host waits in each layer until the device has counted the choices and ranks have exchanged the
counts. So it cannot run ahead, and the device waits for it to start the kernels of the experts and of the next block.
With sizes known beforehand the host reads the counts at the end of the forward pass. If there was too little room, the
pass is repeated with exact sizes: no token is dropped.

All decisions follow from counts that the ranks of an expert group share, and a repetition is agreed on by all ranks.

Independent of Composer and FSDP2.

Shapes: P ranks of an expert group.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundry_moe.layers.context import in_backward
from foundry_moe.ops.dispatch_plan import Room
from foundry_moe.parallel.collectives import side_stream

log = logging.getLogger(__name__)

_MARGIN = 1 / 8  # of room over the largest counts
_EXTRA = 16  # rows and choices of room on top, since small counts vary more
_WINDOW = 100  # passes whose largest counts are kept
# passes with exact sizes after a repetition: twice as many after each, half as many after some passes that fit
_PAUSE, _LONGEST_PAUSE = 1, 128
_FITTING = 10


@dataclass(kw_only=True)
class Sizes:
    """The sizes of one dispatch.

    room_PP2: rows that each rank has room for from each, and choices among them; on the host, the same on all ranks.
    room: this rank's row of `room_PP2`, as kernels read it, and its sum of rows.
    largest_PP2, before_PP2: the largest counts of this window of passes, and of the one before.
    choices: the most that one pass of this window had, on all ranks together.
    passes: in this window.
    """

    room_PP2: Tensor
    room: Room
    largest_PP2: Tensor
    before_PP2: Tensor
    choices: int
    passes: int


class ExpectedCounts:
    """Sizes of the dispatches of a model's forward passes, and whether they sufficed.

    Args:
        layers: MoE layers with their dispatchers. One that is called twice in a pass has exact sizes from then on.
        device: of the model.
        repeat_group: ranks that repeat a forward pass together; None = those of one expert group, which know the same.

    `repeated`: number of repeated forward passes.

    All ranks must run equally many passes with gradients.
    """

    def __init__(self, layers: Sequence[Any], device: torch.device, repeat_group: dist.ProcessGroup | None) -> None:
        self.layers, self.device, self.repeat_group = layers, device, repeat_group
        self.contexts = {layer.context for layer in layers}
        self.repeated = 0
        self._sizes: dict[Any, Sizes] = {}  # by dispatcher
        self._always_exact: set[Any] = set()
        self._called: set[Any] = set()  # in the pass that runs
        self._sent: list[tuple[Any, Callable[[], Tensor], Sizes]] = []
        self._runs = self._exact = False  # a pass runs; with exact sizes
        self._exact_passes = 0  # still to come
        self._pause = _PAUSE  # the next one's
        self._fitting = 0  # passes since the last repetition

    def sizes_for(self, dispatcher: Any, counts: Callable[[], Tensor]) -> Sizes | None:
        """The sizes to send with, whose counts are read at the end of the pass; None = exact ones."""
        if not self._runs:
            return None
        if dispatcher in self._called:  # a recomputation could not tell the calls apart
            self._always_exact.add(dispatcher)
            self._sizes.pop(dispatcher, None)
        self._called.add(dispatcher)
        sizes = None if self._exact else self._sizes.get(dispatcher)
        if sizes is not None:
            self._sent.append((dispatcher, counts, sizes))
        return sizes

    def learn(self, dispatcher: Any, counts_PP2: Tensor) -> None:
        """Makes room for counts like these, of a dispatch with exact sizes in one message, unless there is enough."""
        if not self._runs:
            return
        sizes = self._sizes.get(dispatcher)
        if sizes is None:
            self._make_room(dispatcher, counts_PP2, counts_PP2, _choices(counts_PP2))
        elif (counts_PP2 > sizes.room_PP2).any():
            self._see(sizes, counts_PP2)
            self._make_room(dispatcher, sizes.largest_PP2, sizes.before_PP2, sizes.choices, sizes.passes)

    def _see(self, sizes: Sizes, counts_PP2: Tensor) -> None:
        sizes.largest_PP2 = torch.maximum(sizes.largest_PP2, counts_PP2)
        sizes.choices = max(sizes.choices, _choices(counts_PP2))

    def _make_room(
        self, dispatcher: Any, largest_PP2: Tensor, before_PP2: Tensor, choices: int, passes: int = 0
    ) -> None:
        """Room for the largest counts and some more, unless it would exceed `mesh.buffer` times an even share."""
        room_PP2 = (torch.maximum(largest_PP2, before_PP2) * (1 + _MARGIN)).ceil().long() + _EXTRA
        ranks = len(room_PP2)
        exceeds = room_PP2[..., 1].sum(0).max() > dispatcher.buffer * choices / ranks + _EXTRA * ranks
        if exceeds or dispatcher in self._always_exact:
            self._sizes.pop(dispatcher, None)
            return
        room_P2 = dispatcher.room_by_slot(room_PP2)
        rows = int(room_P2[:, 0].sum())
        if self.device.type == "cuda":
            room_P2 = room_P2.pin_memory().to(self.device, non_blocking=True)
        self._sizes[dispatcher] = Sizes(
            room_PP2=room_PP2,
            room=(room_P2, rows),
            largest_PP2=largest_PP2,
            before_PP2=before_PP2,
            choices=choices,
            passes=passes,
        )

    def _check(self, dispatcher: Any, counts_PP2: Tensor, sizes: Sizes) -> bool:
        """Whether a dispatch with these sizes had room for all; makes room for the next one."""
        self._see(sizes, counts_PP2)
        sizes.passes += 1
        fits = bool((counts_PP2 <= sizes.room_PP2).all())
        if sizes.passes >= _WINDOW:
            self._make_room(dispatcher, counts_PP2, sizes.largest_PP2, sizes.choices)
        elif not fits:
            self._make_room(dispatcher, sizes.largest_PP2, sizes.before_PP2, sizes.choices, sizes.passes)
        return fits

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A forward pass; where there was too little room, a second one.

        Sizes are exact without gradients, and outside an observed pass, where a recomputation could not find them.
        """
        observed = all(context.runs for context in self.contexts)
        if self._runs or not observed or in_backward() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        random = _random_state()
        recorded = [(layer, layer.record.calls(layer)) for layer in self.layers if layer.record is not None]
        self._runs, self._exact = True, self._exact_passes > 0
        self._exact_passes -= self._exact
        try:
            result = forward(*args, **kwargs)
            if self._exact:
                return result
            fits = self._check_all()
            self._count_pass(repeated=not fits)
            if fits:
                return result
            del result  # and what its backward pass would need
            log.info("a forward pass is repeated with exact sizes of messages, %d so far", self.repeated)
            _restore_random_state(*random)
            for layer, calls in recorded:
                layer.record.keep(layer, calls)
            for context in self.contexts:
                context.restart()
            self._called.clear()
            self._exact = True
            return forward(*args, **kwargs)
        finally:
            self._runs = self._exact = False
            self._called.clear()
            self._sent.clear()

    def _check_all(self) -> bool:
        """Whether all dispatches on all ranks had room. Waits for the counts of the last one."""
        if any(dispatcher in self._always_exact for dispatcher, _, _ in self._sent):
            fits = False  # its first call could not know of the second
        else:  # dispatches behind one without room were of wrong tokens, and their counts are not looked at
            fits = all(self._check(dispatcher, counts(), sizes) for dispatcher, counts, sizes in self._sent)
        return fits if self.repeat_group is None else _all_of(fits, self.device, self.repeat_group)

    def _count_pass(self, *, repeated: bool) -> None:
        """Sets how many of the next passes have exact sizes. A repetition takes longer than waits for counts do."""
        self.repeated += repeated
        self._fitting = 0 if repeated else self._fitting + 1
        if repeated:
            self._exact_passes, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        elif self._fitting % _FITTING == 0:
            self._pause = max(self._pause // 2, _PAUSE)


def _choices(counts_PP2: Tensor) -> int:
    return int(counts_PP2[..., 1].sum())


def expect_counts(
    model: nn.Module, layers: Sequence[Any], device: torch.device, repeat_group: dist.ProcessGroup | None
) -> ExpectedCounts:
    """Has the forward passes of `model` send with expected sizes. Arguments are those of `ExpectedCounts`."""
    expected = ExpectedCounts(layers, device, repeat_group)
    for layer in layers:
        layer.dispatcher.expected = expected
    for context in expected.contexts:
        context.observe(model)
    forward = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return expected.run(forward, *args, **kwargs)

    model.forward = run
    return expected


def _all_of(fits: bool, device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether it holds on all ranks. The host waits for the message, not for the kernels that are queued."""
    with torch.cuda.stream(side_stream(device)):
        number = torch.tensor(int(fits), device=device)
        dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
        return bool(number)


def _random_state() -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _restore_random_state(cpu: Tensor, cuda: Tensor | None) -> None:
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
