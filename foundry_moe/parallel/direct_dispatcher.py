"""A token dispatcher inside a host: ranks store tokens straight into each other's memory, without NCCL.

A token goes once to each rank that has one of its experts, as `all_to_all_dispatcher` has it, and comes to the same
place: results are equal to the bit. One kernel copies tokens from where they lie to where they are received, in place
of a copy, an all-to-all and a wait for the host, which learns the numbers of rows while tokens travel.

All layers share two regions of each rank's memory: one for rows that come to experts, one for rows that come back. A
rank may store into another's once that one has read what lay there: it has, when it comes to the barrier that ends
the next message, since every message begins after all that its rank has computed before. A layer sends choices, tokens,
results, and backward their gradients; so nothing is read later than one message after it has come.

Shapes: T tokens of this rank, K choices a token, P ranks of the group, C = min(P, K) ranks a token goes to at most,
H chunks, S rows sent, Q rows received of a chunk, D width of rows.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.layers.gates.gate import Choices
from foundry_moe.layers.token_dispatcher import Chunk
from foundry_moe.ops.dispatch_plan import DispatchPlan, sum_rows
from foundry_moe.ops.peer_rows import PeerRegion, plan_places, store_blocks, store_counts, store_tokens
from foundry_moe.parallel.all_to_all import HostCopy
from foundry_moe.parallel.all_to_all_dispatcher import as_sent
from foundry_moe.parallel.messages import Way, combine
from foundry_moe.parallel.peer_memory import PeerMemory

COUNTS = "counts"
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
class _Call:
    """Of one call: where rows go, and, once the host knows, how many.

    row_TC, experts_TK, places_H23P: see `DispatchPlan` and `plan_places`.
    received: rows of each chunk. sent: rows in all. most: rows that any rank sends or receives.
    """

    exchange: DirectExchange
    row_TC: Tensor
    experts_TK: Tensor
    local_experts: int
    places_H23P: Tensor
    received: list[int] = field(default_factory=list)
    sent: int = 0
    most: int = 0

    def learn(self, counts_PPH: list[list[list[int]]]) -> None:
        """Takes the rows that go from each rank to each in each chunk."""
        me = self.exchange.rank
        self.received = [sum(chunk) for chunk in zip(*(to_ranks[me] for to_ranks in counts_PPH), strict=True)]
        sent = [sum(map(sum, to_ranks)) for to_ranks in counts_PPH]
        received = [sum(map(sum, from_ranks)) for from_ranks in zip(*counts_PPH, strict=True)]
        self.sent, self.most = sent[me], max(*sent, *received)

    def tokens_of(self, chunk: int) -> range:
        """As `DispatchPlan` divides tokens."""
        tokens, chunks = self.row_TC.shape[0], len(self.places_H23P)
        step = -(-tokens // chunks)
        return range(min(chunk * step, tokens), min((chunk + 1) * step, tokens))


class _DirectMessages:
    """Rows are stored where they are read, in memory whose names begin with `name`.

    Args:
        kept: rows received are copied, for a backward pass; otherwise they are read where they came.
    """

    def __init__(self, call: _Call, name: str, *, kept: bool = False) -> None:
        self.call, self.name, self.kept = call, name, kept
        self.chunks = len(call.places_H23P)
        self._messages: list[_Message | None] = [None] * self.chunks
        self._rows = torch.empty(0)

    def ready(self) -> bool:
        """Whether there is room for some rows, so that they may be sent before it is known how many there are."""
        return self.call.exchange.has(f"{self.name} received")

    def make_room(self, like: Tensor) -> bool:
        """For all rows, now that these are known; whether what was sent before is lost."""
        return self._region("received", like)[1]

    def _region(self, way: str, like: Tensor) -> tuple[PeerRegion, bool]:
        wide = like.shape[1] * like.element_size()
        region, grown = self.call.exchange.region(f"{self.name} {way}", self.call.most * wide)
        self._rows = region.rows(region.me, like.shape[1], like.dtype)
        return region, grown

    def send(self, x_TD: Tensor, *, backward: bool = False) -> None:
        call, x_TD = self.call, x_TD.contiguous()
        region, _ = self._region("received", x_TD)
        for chunk in reversed(range(self.chunks)) if backward else range(self.chunks):
            places, tokens = call.places_H23P[chunk, 0], call.tokens_of(chunk)
            message = self._messages[chunk] = _Message(call.exchange, x_TD)
            with message:
                store_tokens(x_TD, call.row_TC, call.experts_TK, call.local_experts, places, region, tokens)

    def send_rows(self, rows_SD: Tensor) -> None:
        """Starts to send what is sorted by chunk and rank already."""
        region, _ = self._region("received", rows_SD)
        for chunk, (places, _) in enumerate(self.call.places_H23P):
            message = self._messages[chunk] = _Message(self.call.exchange, rows_SD)
            with message:
                store_blocks(rows_SD, places, region)

    def send_back(self, rows_QD: Tensor, chunk: int) -> None:
        rows_QD = rows_QD.contiguous()
        region, _ = self._region("returned", rows_QD)
        message = self._messages[chunk] = _Message(self.call.exchange, rows_QD)
        with message:
            store_blocks(rows_QD, self.call.places_H23P[chunk, 1], region)

    def wait(self, chunk: int) -> Tensor:
        self._wait(chunk)
        end = sum(self.call.received[: chunk + 1])
        rows_QD = self._rows[end - self.call.received[chunk] : end]
        return rows_QD.clone() if self.kept else rows_QD

    def wait_and_sum(self) -> Tensor:
        for chunk in range(self.chunks):
            self._wait(chunk)
        return sum_rows(self._rows[: self.call.sent], self.call.row_TC)

    def _wait(self, chunk: int) -> None:
        message, self._messages[chunk] = self._messages[chunk], None
        assert message is not None, "no message is under way"
        message.wait()


class DirectDispatcher:
    """For an MoE layer whose experts are divided over ranks of one host. Arguments as for `AllToAllDispatcher`."""

    def __init__(
        self, exchange: DirectExchange, *, num_experts: int, chunks: int = 1, buffer: float = math.inf
    ) -> None:
        assert num_experts % exchange.size == 0
        self.exchange = exchange
        self.local_experts = num_experts // exchange.size
        self.chunks = chunks
        self.buffer = buffer

    # sizes are read on the host and other ranks fill memory: a compiled block's graph breaks here
    @torch.compiler.disable
    def dispatch(self, x_TD: Tensor, choices: Choices) -> tuple[Chunk, ...]:
        """Sends tokens, and before them their choices, so that rows of local experts are planned while these travel."""
        x_TD, weights_TK = as_sent(x_TD, choices.weights_TK)
        kept = torch.is_grad_enabled()
        with torch.no_grad():
            call, packed, counts = self._plan(choices.experts_TK.contiguous(), weights_TK)
            chosen, tokens = _DirectMessages(call, "choices"), _DirectMessages(call, "tokens", kept=kept)
            ahead = chosen.ready() and tokens.ready()
            if ahead:  # the host learns meanwhile how many rows there are
                chosen.send_rows(packed)
                tokens.send(x_TD)
            received_choices = self._learn(call, counts)
            grown = [chosen.make_room(packed), tokens.make_room(x_TD)]
            if not ahead or any(grown):
                chosen.send_rows(packed)
                tokens.send(x_TD)
        way = Way(
            choices=chosen,
            tokens=tokens,
            results=_DirectMessages(call, "tokens"),
            received_choices=received_choices,
            local_experts=self.local_experts,
            num_tokens=call.row_TC.shape[0],
            ranks=self.exchange.size,
            buffer=self.buffer,
        )
        return way.chunks(weights_TK, x_TD)

    def combine(self, outputs: tuple[Chunk, ...]) -> Tensor:
        """y_TD: each rank's sum for a token, summed."""
        return combine(outputs)

    def _plan(self, experts_TK: Tensor, weights_TK: Tensor) -> tuple[_Call, Tensor, HostCopy]:
        """Tells the ranks how many rows each gets; what travels beside tokens, by row, and all ranks' counts."""
        exchange = self.exchange
        plan = DispatchPlan(
            experts_TK, weights_TK, local_experts=self.local_experts, ranks=exchange.size, chunks=self.chunks
        )
        counts_PH2 = plan.counts_2PH2[0]
        region, _ = exchange.region(COUNTS, exchange.size * counts_PH2.nbytes)
        told = _Message(exchange, counts_PH2)
        with told:
            store_counts(counts_PH2, region)
        row_TC, packed = plan.assign_rows()
        told.wait()
        stored_P = region.rows(region.me, counts_PH2.numel(), torch.int64)[: exchange.size]
        counts_PPH2, places_H23P = plan_places(stored_P.view(exchange.size, *counts_PH2.shape), region.me)
        call = _Call(
            exchange=exchange,
            row_TC=row_TC,
            experts_TK=experts_TK,
            local_experts=self.local_experts,
            places_H23P=places_H23P,
        )
        return call, packed, HostCopy(counts_PPH2)

    def _learn(self, call: _Call, counts: HostCopy) -> list[int]:
        """Has the call know its numbers of rows; the choices received in each chunk.

        Raises:
            RuntimeError: a rank did not come to a message in time.
        """
        try:
            counts_PPH2 = counts.tolist()
        except RuntimeError as error:
            raise RuntimeError(
                "the device failed while ranks of an expert group exchanged tokens (all_to_all: direct): a rank that "
                "has died, or hangs for longer than dist_timeout, makes the others fail so; its own log says more"
            ) from error
        call.learn([[[rows for rows, _ in chunks] for chunks in to_ranks] for to_ranks in counts_PPH2])
        to_me = [to_ranks[self.exchange.rank] for to_ranks in counts_PPH2]
        return [sum(choices for _, choices in chunk) for chunk in zip(*to_me, strict=True)]
