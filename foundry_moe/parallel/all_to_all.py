"""The all-to-all of an expert group: rows from every rank to every rank, in uneven numbers, flat or hierarchical.

Both ways deliver the same rows in the same order (by source rank), and neither computes on them, so results are
the same to the bit. Must not know what a row holds.

Rows of a call may travel in chunks, each an all-to-all of its own; the numbers of all chunks are sent at once.

Shapes: P ranks of the group = N nodes x L ranks a node; H chunks; S rows sent, Q rows received, D their width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.parallel.mesh import HIERARCHICAL, Meshes


@dataclass(frozen=True, kw_only=True)
class Splits:
    """How many rows of a chunk go where: what the host must know before rows can move.

    sent, received: rows in all.
    received_choices: choices of the rows received: a second number, summed, that is sent with that of rows.
    stages: for each stage of the all-to-all, rows to and from each rank of the stage's group.
    blocks: rows of each block between the two stages, as [from a rank of this node][to a node]; empty for a flat one.
    """

    sent: int
    received: int
    received_choices: int
    stages: tuple[tuple[list[int], list[int]], ...]
    blocks: tuple[tuple[int, ...], ...] = ()


class Handle:
    """Rows under way. They may be used once `wait` has returned them; until then nothing waits, where there is NCCL."""

    def __init__(self, rows: Tensor, wait: Callable[[], object], sent: Tensor) -> None:
        self._rows, self._wait, self._sent = rows, wait, sent  # what is sent must outlive the message

    def wait(self) -> Tensor:
        self._wait()
        return self._rows


class HostCopy:
    """A small tensor on its way to the host, past what the device has still to do.

    Args:
        ready: makes the current stream wait for the tensor's last values; None = the current stream makes them.
    """

    def __init__(self, tensor: Tensor, ready: Callable[[], object] | None = None) -> None:
        self._tensor, self._event = tensor, None
        if not tensor.is_cuda:
            if ready is not None:
                ready()
            return
        stream = _copy_stream(tensor.device)
        if ready is None:
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            if ready is not None:
                ready()
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def tolist(self) -> list[Any]:
        """The values; waits for them."""
        if self._event is None:
            return self._tensor.tolist()
        self._event.synchronize()
        return self._host.tolist()


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class AllToAll(Protocol):
    """Moves rows between the ranks of an expert group.

    size, rank: of the group.
    nodes: rows to send lie by slot: by a rank's index on its node, then by the node; 1 = by rank.
    """

    size: int
    rank: int
    nodes: int

    def exchange_counts(self, counts_2PH2: Tensor) -> HostCopy:
        """Sends every rank the number of rows that it will get, and starts a copy of all numbers to the host.

        Args:
            counts_2PH2: int64; [0] has, by slot and chunk, rows for that rank, and the choices of
                these rows; [1] is overwritten.
        """
        ...

    def wait_for_splits(self, counts: HostCopy) -> tuple[Splits, ...]:
        """What is sent and received of each chunk. Waits for the copy: the only host synchronisation of a call."""
        ...

    def send(self, rows_SD: Tensor, splits: Splits) -> Handle:
        """Sends rows, by slot, to their ranks: rows [Q, D] by source rank."""
        ...

    def send_back(self, rows_QD: Tensor, splits: Splits, into: Tensor | None = None) -> Handle:
        """The inverse of `send`: rows [S, D] by slot, in `into` if given."""
        ...


def all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, into: Tensor | None = None
) -> Handle:
    """Starts to send rows, sorted by rank, to the ranks of a group: so many to each, and so many from each."""
    rows = rows.contiguous()
    output = rows.new_empty(sum(received), *rows.shape[1:]) if into is None else into
    work = dist.all_to_all_single(output, rows, received, sent, group=group, async_op=True)
    assert work is not None
    return Handle(output, work.wait, rows)


class FlatAllToAll:
    """Every rank sends to every rank: one message for each pair."""

    nodes = 1

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def exchange_counts(self, counts_2PH2: Tensor) -> HostCopy:
        work = dist.all_to_all_single(counts_2PH2[1], counts_2PH2[0], group=self.group, async_op=True)
        assert work is not None
        return HostCopy(counts_2PH2, work.wait)

    def wait_for_splits(self, counts: HostCopy) -> tuple[Splits, ...]:
        return tuple(
            self._splits(to_ranks, from_ranks)
            for to_ranks, from_ranks in zip(*map(_by_chunk, counts.tolist()), strict=True)
        )

    def _splits(self, sent: list[list[int]], received: list[list[int]]) -> Splits:
        to, from_ = [rows for rows, _ in sent], [rows for rows, _ in received]
        return Splits(
            sent=sum(to),
            received=sum(from_),
            received_choices=sum(choices for _, choices in received),
            stages=((to, from_),),
        )

    def send(self, rows_SD: Tensor, splits: Splits) -> Handle:
        to, from_ = splits.stages[0]
        return all_to_all(rows_SD, to, from_, self.group)

    def send_back(self, rows_QD: Tensor, splits: Splits, into: Tensor | None = None) -> Handle:
        to, from_ = splits.stages[0]
        return all_to_all(rows_QD, from_, to, self.group, into)


class HierarchicalAllToAll:
    """First within the node, to the rank with the destination's index; then between nodes, among ranks of one index.

    A message between nodes is L times as long, and there are L times fewer: 2DH of Tutel (Hwang et al. 2022,
    arXiv 2206.03382, section 4.3), the balanced form of HetuMoE's gather, exchange and scatter (Nie et al. 2022,
    arXiv 2203.14685, section 3.2), which sends all of a node through one of its ranks.
    """

    def __init__(self, node_group: dist.ProcessGroup, peer_group: dist.ProcessGroup) -> None:
        self.node_group, self.peer_group = node_group, peer_group
        self.local, self.nodes = dist.get_world_size(node_group), dist.get_world_size(peer_group)
        self.size = self.local * self.nodes
        self.rank = dist.get_rank(peer_group) * self.local + dist.get_rank(node_group)

    def exchange_counts(self, counts_2PH2: Tensor) -> HostCopy:
        chunks = counts_2PH2.shape[2]
        sent_LNH2 = counts_2PH2[0].view(self.local, self.nodes, chunks, 2)
        middle_LNH2 = torch.empty_like(sent_LNH2)
        dist.all_to_all_single(middle_LNH2, sent_LNH2, group=self.node_group)
        middle_NLH2 = middle_LNH2.transpose(0, 1).contiguous()
        received_NLH2 = torch.empty_like(middle_NLH2)
        dist.all_to_all_single(received_NLH2, middle_NLH2, group=self.peer_group)
        return HostCopy(torch.stack([counts.flatten(0, 1) for counts in (sent_LNH2, middle_LNH2, received_NLH2)]))

    def wait_for_splits(self, counts: HostCopy) -> tuple[Splits, ...]:
        return tuple(self._splits(*stages) for stages in zip(*map(_by_chunk, counts.tolist()), strict=True))

    def _splits(self, *stages: list[list[int]]) -> Splits:
        sent = _rows_of(stages[0], self.local, self.nodes)
        middle = _rows_of(stages[1], self.local, self.nodes)
        received = _rows_of(stages[2], self.nodes, self.local)
        to_local, from_local = [sum(row) for row in sent], [sum(row) for row in middle]
        to_node, from_node = [sum(column) for column in zip(*middle, strict=True)], [sum(row) for row in received]
        return Splits(
            sent=sum(to_local),
            received=sum(from_node),
            received_choices=sum(choices for _, choices in stages[2]),
            stages=((to_local, from_local), (to_node, from_node)),
            blocks=tuple(map(tuple, middle)),
        )

    def send(self, rows_SD: Tensor, splits: Splits) -> Handle:
        (to_local, from_local), (to_node, from_node) = splits.stages
        middle = all_to_all(rows_SD, to_local, from_local, self.node_group).wait()
        return all_to_all(_transpose_blocks(middle, splits.blocks), to_node, from_node, self.peer_group)

    def send_back(self, rows_QD: Tensor, splits: Splits, into: Tensor | None = None) -> Handle:
        (to_local, from_local), (to_node, from_node) = splits.stages
        middle = all_to_all(rows_QD, from_node, to_node, self.peer_group).wait()
        by_node = tuple(zip(*splits.blocks, strict=True))
        return all_to_all(_transpose_blocks(middle, by_node), from_local, to_local, self.node_group, into)


def _by_chunk(counts: list[list[list[int]]]) -> list[list[list[int]]]:
    """Pairs of numbers by rank and chunk, as [chunk][rank]."""
    return [list(pairs) for pairs in zip(*counts, strict=True)]


def _rows_of(pairs: list[list[int]], outer: int, inner: int) -> list[list[int]]:
    """The first of each pair of numbers, as [outer][inner]."""
    rows = [rows for rows, _ in pairs]
    return [rows[i * inner : (i + 1) * inner] for i in range(outer)]


def _transpose_blocks(rows: Tensor, blocks: tuple[tuple[int, ...], ...]) -> Tensor:
    """Blocks of rows in row-major order of [i][j], put in row-major order of [j][i]."""
    inner = len(blocks[0])
    parts = rows.split([size for row in blocks for size in row])
    return torch.cat([parts[i * inner + j] for j in range(inner) for i in range(len(blocks))])


def build_all_to_all(meshes: Meshes) -> AllToAll:
    """The all-to-all that a plan asks for."""
    if meshes.plan.all_to_all == HIERARCHICAL:
        assert meshes.node_group is not None and meshes.peer_group is not None
        return HierarchicalAllToAll(meshes.node_group, meshes.peer_group)
    return FlatAllToAll(meshes.expert.get_group())
