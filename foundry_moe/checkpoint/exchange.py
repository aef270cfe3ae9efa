"""Ranks send each other what they fetched: tensors over a CPU process group, in rounds of one range each.

Every rank first tells the others which pieces it will send in which round; after that each round is point-to-point
between ranks that share something, so that a large job's replica groups do not wait for each other. A rank whose
fetch failed goes on sending (zeros), so that no rank waits for ever; the failure is raised when all rounds are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.layout import Block
from foundry_moe.checkpoint.ranges import Range

Place = Callable[[int, int, Tensor], None]  # (item, index of the block, the piece of it that this rank holds as uint8)
Cut = Callable[[Block, Tensor, int], Tensor]  # (block, its bytes, rank): the contiguous piece that the rank needs
PieceBytes = Callable[[int, int], int]  # (item, index): bytes of the piece of a block that this rank needs


@dataclass(kw_only=True)
class Traffic:
    """What a load cost this rank."""

    bytes_fetched: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


def exchange(
    ranges: Sequence[Range],
    stream: Iterator[Tensor | CheckpointError],
    receivers: Callable[[Block], Sequence[int]],
    cut: Cut,
    piece_bytes: PieceBytes,
    place: Place,
    group: dist.ProcessGroup | None,
    traffic: Traffic,
) -> None:
    """Fetches, keeps and sends this rank's ranges, and receives the others'.

    Args:
        ranges: what this rank fetches, in the order in which `stream` yields it.
        receivers: for a block, all ranks that need some of it, this one perhaps among them.
        group: a CPU group over all ranks; None for a single process.

    Raises:
        CheckpointError: a range of this rank could not be read. All ranks have finished the rounds by then.
    """
    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    outgoing = [
        {
            to: [block for block, _ in part.blocks if to in receivers(block)]
            for to in sorted({r for block, _ in part.blocks for r in receivers(block)} - {rank})
        }
        for part in ranges
    ]
    incoming = _tell(outgoing, world, group) if group is not None and world > 1 else {}
    rounds = max([len(ranges), *(max(sent, default=-1) + 1 for sent in incoming.values())])
    error: CheckpointError | None = None
    for number in range(rounds):
        arriving = []
        for source, sent in incoming.items():
            if pieces := sent.get(number):
                sizes = [piece_bytes(item, index) for item, index in pieces]
                buffer = torch.empty(sum(sizes), dtype=torch.uint8)
                work = dist.irecv(buffer, source, group=group, tag=number)
                arriving.append((work, pieces, sizes, buffer))
        leaving: list[tuple[dist.Work | None, Tensor]] = []
        if number < len(ranges):
            data = next(stream)
            if isinstance(data, CheckpointError):
                error = error or data
                data = torch.zeros(ranges[number].size_bytes, dtype=torch.uint8)
            blocks = {
                (block.item, block.index): (block, data[start : start + block.size_bytes])
                for block, start in ranges[number].blocks
            }
            ready: dict[tuple, Tensor] = {}
            for to, wanted in outgoing[number].items():
                pieces_out = [cut(block, blocks[block.item, block.index][1], to) for block in wanted]
                key = tuple((piece.data_ptr(), piece.numel()) for piece in pieces_out)
                if key not in ready:  # replicas that need the same bytes share one buffer
                    ready[key] = pieces_out[0] if len(pieces_out) == 1 else torch.cat(pieces_out)
                message = ready[key]
                leaving.append((dist.isend(message, to, group=group, tag=number), message))
                traffic.bytes_sent += message.numel()
            if error is None:
                for (item, index), (block, raw) in blocks.items():
                    if rank in receivers(block):
                        place(item, index, cut(block, raw, rank))
        for receiving, pieces, sizes, buffer in arriving:
            _wait(receiving)
            traffic.bytes_received += buffer.numel()
            for (item, index), piece in zip(pieces, buffer.split(sizes), strict=True):
                place(item, index, piece)
        for sending, _ in leaving:
            _wait(sending)
    if error is not None:
        raise error


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def _tell(
    outgoing: Sequence[dict[int, list[Block]]], world: int, group: dist.ProcessGroup
) -> dict[int, dict[int, list[tuple[int, int]]]]:
    """Tells every rank what it will get: for each source, by round, the (item, index) of its blocks in order."""
    rows: list[list[int]] = [[] for _ in range(world)]
    for number, by_rank in enumerate(outgoing):
        for to, blocks in by_rank.items():
            for block in blocks:
                rows[to] += (number, block.item, block.index)
    counts_out = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    counts_in = torch.empty_like(counts_out)
    dist.all_to_all_single(counts_in, counts_out, group=group)
    flat_out = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
    flat_in = torch.empty(int(counts_in.sum()), dtype=torch.int64)
    dist.all_to_all_single(flat_in, flat_out, counts_in.tolist(), counts_out.tolist(), group=group)
    incoming: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for source, part in enumerate(flat_in.split(counts_in.tolist())):
        by_round: dict[int, list[tuple[int, int]]] = {}
        for number, item, index in part.reshape(-1, 3).tolist():
            by_round.setdefault(number, []).append((item, index))
        if by_round:
            incoming[source] = by_round
    return incoming
