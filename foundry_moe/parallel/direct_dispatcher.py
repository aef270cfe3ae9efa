"""The token dispatcher inside a host: ranks store tokens straight into each other's memory, without NCCL.

Rows come to the same places as by all-to-all (see `expert_dispatcher.py`): results are equal to the bit. One kernel
copies tokens from where they lie to where they are received, in place of a copy, an all-to-all and a wait for the host,
which learns the numbers of rows while tokens travel.

All layers share two regions of each rank's memory: one for rows that come to experts, one for rows that come back. A
rank may store into another's once that one has read what lay there: it has, when it comes to the barrier that ends
the next message, since every message begins after all that its rank has computed before. A layer sends choices, tokens,
results, and backward their gradients; so nothing is read later than one message after it has come.

Shapes: T tokens of this rank, K choices a token, P ranks of the group, C = min(P, K) ranks a token goes to at most,
H chunks, S rows sent, Q rows received of a chunk, D width of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.ops.dispatch_plan import DispatchPlan, sum_rows
from foundry_moe.ops.peer_rows import PeerRegion, plan_places, store_blocks, store_counts, store_tokens
from foundry_moe.parallel.all_to_all import HostCopy
from foundry_moe.parallel.expert_dispatcher import ExpertDispatcher, Sent
from foundry_moe.parallel.peer_memory import PeerMemory

COUNTS, ROUNDS = "counts", "rounds"
_SPARE_ROOM = 1.25  # a load that grows does not ask for new memory at each step


class DirectExchange:
    """What the layers of a model share: memory that ranks of a group store into, and the stream of messages.

    The memory grows with the most rows that any rank sends or receives; every rank knows these, so that all grow at
    once.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._memory: dict[str, PeerMemory] = {}

    def region(self, name: str, wanted: int) -> tuple[PeerRegion, bool]:
        """The memory of a name, and whether it is new and empty, since it had to grow to `wanted` bytes.

        All ranks call with the same arguments; nothing that has arrived there waits to be read.
        """
        memory = self._memory.get(name)
        if memory is not None and memory.size >= wanted:
            return memory.region, False
        if self.stream is not None:
            torch.cuda.synchronize(self.device)
        self._memory.pop(name, None)
        del memory  # the old one goes before the new one comes
        self._memory[name] = PeerMemory(self.group, math.ceil(wanted * _SPARE_ROOM), self.device)
        return self._memory[name].region, True

    def has(self, name: str) -> bool:
        """Whether there is memory of that name, however small."""
        return name in self._memory

    def tell(self, name: str, numbers: Tensor) -> Callable[[], Tensor]:
        """Tells all ranks numbers (int64, as many from each); what waits for theirs: [P, ...], in memory of that name.

        Which must be read before the message after the next one, and may be told again only after another.
        """
        region, _ = self.region(name, self.size * numbers.nbytes)
        told = _Message(self, numbers)
        with told:
            store_counts(numbers, region)

        def heard() -> Tensor:
            told.wait()
            return region.rows(region.me, numbers.numel(), torch.int64)[: self.size].view(self.size, *numbers.shape)

        return heard

    def barrier(self) -> None:
        """See `PeerMemory.barrier`."""
        self._memory[COUNTS].barrier()


class _Message:
    """What is stored inside of `with` stands in the memory of its ranks once `wait` has been called.

    Begins after all that was computed before; what is computed after overlaps with it.

    Args:
        sent: must outlive the message.
    """

    def __init__(self, exchange: DirectExchange, sent: Tensor) -> None:
        self._exchange = exchange
        self._sent: Tensor | None = sent
        self._arrived: torch.cuda.Event | None = None
        self._within: AbstractContextManager[Any] = nullcontext()
        if exchange.stream is not None:
            self._within = torch.cuda.stream(exchange.stream)

    def __enter__(self) -> None:
        stream = self._exchange.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._within.__enter__()

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._exchange.barrier()
        if self._exchange.stream is not None:
            self._arrived = self._exchange.stream.record_event()
        self._within.__exit__(*error)

    def wait(self) -> None:
        """What is computed from here on may read what ranks have stored here."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._exchange.device).wait_event(self._arrived)
        self._sent = None


@dataclass(kw_only=True)
class _Rows:
    """Of one call: where rows go, and, once the host knows, how many.

    row_TC, places_H23P: of `plan` and `plan_places`.
    received: rows of each chunk. sent: rows in all. most: rows that any rank sends or receives.
    """

    exchange: DirectExchange
    plan: DispatchPlan
    row_TC: Tensor
    places_H23P: Tensor
    received: list[int] = field(default_factory=list)
    sent: int = 0
    most: int = 0

    def learn(self, rows_PPH: Tensor) -> None:
        """Takes the rows that go from each rank to each in each chunk."""
        me, rows_PP = self.exchange.rank, rows_PPH.sum(2)
        self.received = rows_PPH[:, me].sum(0).tolist()
        self.sent = int(rows_PP[me].sum())
        self.most = int(torch.maximum(rows_PP.sum(0), rows_PP.sum(1)).max())


class _DirectMessages:
    """Rows are stored where they are read, in memory whose names begin with `name`.

    Args:
        kept: rows received are copied, for a backward pass; otherwise they are read where they came.
    """

    def __init__(self, rows: _Rows, name: str, *, kept: bool = False) -> None:
        self.rows, self.name, self.kept = rows, name, kept
        self.chunks = rows.plan.chunks
        self._messages: list[_Message | None] = [None] * self.chunks
        self._stored = torch.empty(0)

    def ready(self) -> bool:
        """Whether there is room for some rows, so that they may be sent before it is known how many there are."""
        return self.rows.exchange.has(f"{self.name} received")

    def make_room(self, like: Tensor) -> bool:
        """For all rows, now that these are known; whether what was sent before is lost."""
        return self._region("received", like)[1]

    def _region(self, way: str, like: Tensor) -> tuple[PeerRegion, bool]:
        wide = like.shape[1] * like.element_size()
        region, grown = self.rows.exchange.region(f"{self.name} {way}", self.rows.most * wide)
        self._stored = region.rows(region.me, like.shape[1], like.dtype)
        return region, grown

    def send(self, x_TD: Tensor, *, backward: bool = False) -> None:
        rows, plan, x_TD = self.rows, self.rows.plan, x_TD.contiguous()
        region, _ = self._region("received", x_TD)
        for chunk in reversed(range(self.chunks)) if backward else range(self.chunks):
            places, tokens = rows.places_H23P[chunk, 0], plan.tokens_of(chunk)
            message = self._messages[chunk] = _Message(rows.exchange, x_TD)
            with message:
                store_tokens(x_TD, rows.row_TC, plan.experts_TK, plan.local_experts, places, region, tokens)

    def send_rows(self, rows_SD: Tensor) -> None:
        """Starts to send what is sorted by chunk and rank already."""
        region, _ = self._region("received", rows_SD)
        for chunk, (places, _) in enumerate(self.rows.places_H23P):
            message = self._messages[chunk] = _Message(self.rows.exchange, rows_SD)
            with message:
                store_blocks(rows_SD, places, region)

    def send_back(self, rows_QD: Tensor, chunk: int) -> None:
        rows_QD = rows_QD.contiguous()
        region, _ = self._region("returned", rows_QD)
        message = self._messages[chunk] = _Message(self.rows.exchange, rows_QD)
        with message:
            store_blocks(rows_QD, self.rows.places_H23P[chunk, 1], region)

    def wait(self, chunk: int) -> Tensor:
        self._wait(chunk)
        end = sum(self.rows.received[: chunk + 1])
        rows_QD = self._stored[end - self.rows.received[chunk] : end]
        return rows_QD.clone() if self.kept else rows_QD

    def wait_and_sum(self) -> Tensor:
        self.wait_for_all()
        return sum_rows(self._stored[: self.rows.sent], self.rows.row_TC)

    def wait_for_all(self) -> None:
        """Of all chunks, without a look at the rows."""
        for chunk in range(self.chunks):
            self._wait(chunk)

    def _wait(self, chunk: int) -> None:
        message, self._messages[chunk] = self._messages[chunk], None
        assert message is not None, "no message is under way"
        message.wait()


class _Call:
    """Tokens are stored before the host knows how many there are, where there is memory already."""

    def __init__(self, exchange: DirectExchange, plan: DispatchPlan, x_TD: Tensor, kept: bool) -> None:
        heard = exchange.tell(COUNTS, plan.counts_PH2)
        row_TC, self._packed = plan.assign_rows()
        counts_PPH2, places_H23P = plan_places(heard(), exchange.rank)
        self._counts = HostCopy(counts_PPH2)
        self._x_TD = x_TD
        self._rows = _Rows(exchange=exchange, plan=plan, row_TC=row_TC, places_H23P=places_H23P)
        self._choices = _DirectMessages(self._rows, "choices")
        self._tokens = _DirectMessages(self._rows, "tokens", kept=kept)
        self._ahead = self._choices.ready() and self._tokens.ready()
        if self._ahead:
            self._store()

    def wait_for_counts(self) -> Tensor:
        """See `Call`.

        Raises:
            RuntimeError: a rank did not come to a message in time.
        """
        try:
            return self._counts.wait()
        except RuntimeError as error:
            raise RuntimeError(
                "the device failed while ranks of an expert group exchanged tokens (all_to_all: direct): a rank that "
                "has died, or hangs for longer than dist_timeout, makes the others fail so; its own log says more"
            ) from error

    def send(self, counts_PPH2: Tensor) -> Sent:
        self._rows.learn(counts_PPH2[..., 0])
        grown = [self._choices.make_room(self._packed), self._tokens.make_room(self._x_TD)]
        if not self._ahead or any(grown):
            self._store()
        return Sent(self._choices, self._tokens, _DirectMessages(self._rows, "tokens"))

    def drop(self) -> None:
        if self._ahead:  # what is sent must outlive the messages
            self._choices.wait_for_all()
            self._tokens.wait_for_all()

    def _store(self) -> None:
        self._choices.send_rows(self._packed)
        self._tokens.send(self._x_TD)


class DirectDispatcher(ExpertDispatcher):
    """See `ExpertDispatcher`; for ranks of one host."""

    def __init__(
        self, exchange: DirectExchange, *, num_experts: int, chunks: int = 1, buffer: float = math.inf
    ) -> None:
        super().__init__(
            ranks=exchange.size, rank=exchange.rank, nodes=1, num_experts=num_experts, chunks=chunks, buffer=buffer
        )
        self.exchange = exchange

    def _begin(self, plan: DispatchPlan, x_TD: Tensor, kept: bool) -> _Call:
        return _Call(self.exchange, plan, x_TD, kept)

    def _largest(self, number: int, device: torch.device) -> int:
        # not in the memory of counts, which another rank may still read
        return int(self.exchange.tell(ROUNDS, torch.tensor([number], device=device))().max())
