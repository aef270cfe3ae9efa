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
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.parallel.mesh import HIERARCHICAL, Meshes


@dataclass(frozen=True, kw_only=True)
class Splits:
    """How many rows of a chunk go where: what the host must know before rows can move.

    sent, received: rows in all.
    stages: for each stage of the all-to-all, rows to and from each rank of the stage's group.
    blocks: rows of each block between the two stages, as [from a rank of this node][to a node]; empty for a flat one.
    """

    sent: int
    received: int
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

    def wait(self) -> Tensor:
        """The values, on the host."""
        if self._event is None:
            return self._tensor
        self._event.synchronize()
        return self._host


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

    def exchange_counts(self, counts_PH2: Tensor) -> HostCopy:
        """Tells every rank how many rows each sends to each, and starts a copy of these numbers to the host.

        Args:
            counts_PH2: int64; by slot and chunk, rows for that rank, and the choices of these rows.

        Returns:
            counts_PPH2: the same from every rank, by rank and not by slot: [from][to].
        """
        ...

    def splits(self, counts_PPH2: Tensor) -> tuple[Splits, ...]:
        """What is sent and received of each chunk. `counts_PPH2`: of `exchange_counts`, on the host."""
        ...

    def largest(self, number: int, device: torch.device) -> int:
        """Of the ranks' numbers. Waits for the device."""
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


def _gather(counts_XH2: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Callable[[], object]]:
    """The counts of each rank, one after the other, and what waits for them."""
    output = counts_XH2.new_empty(dist.get_world_size(group) * counts_XH2.shape[0], *counts_XH2.shape[1:])
    work = dist.all_gather_into_tensor(output, counts_XH2, group=group, async_op=True)
    assert work is not None
    return output, work.wait


class FlatAllToAll:
    """Every rank sends to every rank: one message for each pair."""

    nodes = 1

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def exchange_counts(self, counts_PH2: Tensor) -> HostCopy:
        gathered, wait = _gather(counts_PH2, self.group)
        return HostCopy(gathered.view(self.size, *counts_PH2.shape), wait)

    def splits(self, counts_PPH2: Tensor) -> tuple[Splits, ...]:
        rows_PPH = counts_PPH2[..., 0]
        to_HP, from_HP = rows_PPH[self.rank].T.tolist(), rows_PPH[:, self.rank].T.tolist()
        return tuple(
            Splits(sent=sum(to), received=sum(from_), stages=((to, from_),))
            for to, from_ in zip(to_HP, from_HP, strict=True)
        )

    def largest(self, number: int, device: torch.device) -> int:
        return _largest(number, device, self.group)

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

    def exchange_counts(self, counts_PH2: Tensor) -> HostCopy:
        of_node, wait = _gather(counts_PH2, self.node_group)
        wait()
        of_all, wait = _gather(of_node, self.peer_group)
        wait()
        by_slot = of_all.view(self.size, self.local, self.nodes, *counts_PH2.shape[1:])
        return HostCopy(by_slot.transpose(1, 2).flatten(1, 2))

    def splits(self, counts_PPH2: Tensor) -> tuple[Splits, ...]:
        node, local = divmod(self.rank, self.local)
        rows_HNLNL = counts_PPH2[..., 0].movedim(2, 0).unflatten(2, (-1, self.local)).unflatten(1, (-1, self.local))
        sent_HNL = rows_HNLNL[:, node, local]
        middle_HLN = rows_HNLNL[:, node, :, :, local]
        received_HNL = rows_HNLNL[:, :, :, node, local]
        return tuple(
            Splits(
                sent=sum(to_local),
                received=sum(from_node),
                stages=((to_local, from_local), (to_node, from_node)),
                blocks=tuple(map(tuple, blocks)),
            )
            for to_local, from_local, to_node, from_node, blocks in zip(
                sent_HNL.sum(1).tolist(),
                middle_HLN.sum(2).tolist(),
                middle_HLN.sum(1).tolist(),
                received_HNL.sum(2).tolist(),
                middle_HLN.tolist(),
                strict=True,
            )
        )

    def largest(self, number: int, device: torch.device) -> int:
        return _largest(number, device, self.node_group, self.peer_group)

    def send(self, rows_SD: Tensor, splits: Splits) -> Handle:
        (to_local, from_local), (to_node, from_node) = splits.stages
        middle = all_to_all(rows_SD, to_local, from_local, self.node_group).wait()
        return all_to_all(_transpose_blocks(middle, splits.blocks), to_node, from_node, self.peer_group)

    def send_back(self, rows_QD: Tensor, splits: Splits, into: Tensor | None = None) -> Handle:
        (to_local, from_local), (to_node, from_node) = splits.stages
        middle = all_to_all(rows_QD, from_node, to_node, self.peer_group).wait()
        by_node = tuple(zip(*splits.blocks, strict=True))
        return all_to_all(_transpose_blocks(middle, by_node), from_local, to_local, self.node_group, into)


def _largest(number: int, device: torch.device, *groups: dist.ProcessGroup) -> int:
    tensor = torch.tensor(number, device=device)
    for group in groups:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return int(tensor)


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
