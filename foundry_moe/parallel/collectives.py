"""An all-to-all of rows, collectives of gates, a side stream, the time limit of groups. Independent of Composer.

Shapes: T tokens of this rank, S tokens received, X numbers per row, P ranks.
"""

from __future__ import annotations

import datetime
import functools
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from foundry_moe.layers.context import BatchContext


def all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None, into: Tensor | None = None
) -> Callable[[], Tensor]:
    """Starts to exchange rows, sorted by rank. The function that is returned waits for those received.

    With NCCL the wait is one of the current stream, not of the host.
    """
    rows = rows.contiguous()
    output = rows.new_empty(sum(received), *rows.shape[1:]) if into is None else into
    work = dist.all_to_all_single(output, rows, received, sent, group=group, async_op=True)
    assert work is not None

    def wait(outlives_the_message: Tensor = rows) -> Tensor:
        work.wait()
        return output

    return wait


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for small messages that the host waits for, beside the kernels of the current one; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class GateCollectives:
    """Reductions and a shuffle over the ranks of a group; callables for `foundry_moe.layers.context.BatchContext`.

    Args:
        group: None = all ranks.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group

    def connect(self, context: BatchContext) -> None:
        """Sets these in a context, for all gates that share it."""
        context.sum_over_ranks, context.max_over_ranks, context.shuffle = self.sum, self.largest, self.shuffle

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks of a tensor that carries no gradient."""
        summed = tensor.detach().clone()
        dist.all_reduce(summed, group=self.group)
        return summed

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest over the ranks, element by element."""
        most = tensor.detach().clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return most

    def shuffle(self, rows_TX: Tensor, stream: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Sends each rank a random, equal share of this rank's rows, and returns the rows received.

        Args:
            stream: seeds the draw, together with the rank.

        Returns:
            rows_SX, and a function that returns rows of S to the positions in T that they came from.
        """
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        tokens, device = rows_TX.shape[0], rows_TX.device
        generator = torch.Generator().manual_seed((stream & 0xFFFFFFFF) * 65_537 + rank)
        order_T = torch.randperm(tokens, generator=generator).to(device)
        # which ranks get one row more depends on the sender, so that received rows are even as well
        sent_P = torch.tensor([tokens // ranks + ((p - rank) % ranks < tokens % ranks) for p in range(ranks)])
        received_P = torch.empty_like(sent_P).to(device)
        dist.all_to_all_single(received_P, sent_P.to(device), group=self.group)
        sent, received = sent_P.tolist(), received_P.tolist()

        def restore(rows_S: Tensor) -> Tensor:
            rows_T = all_to_all(rows_S, received, sent, self.group)()
            return torch.empty_like(rows_T).index_copy(0, order_T, rows_T)

        return all_to_all(rows_TX[order_T], sent, received, self.group)(), restore


def group_timeout(
    group: dist.ProcessGroup | None = None, *, fallback: datetime.timedelta = dist.default_pg_timeout
) -> datetime.timedelta:
    """The time limit of a group's collectives: `dist_timeout` of a run.

    Read from private attributes: torch 2.7 to 2.15 have no public getter.

    Args:
        group: None = all ranks.
        fallback: for backends without a time limit.
    """
    try:
        group = group or dist.distributed_c10d._get_default_group()
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return fallback


def use_job_timeout(*groups: dist.ProcessGroup) -> None:
    """Sets the groups' time limit to that of the group of all ranks.

    `init_device_mesh` takes no timeout (torch 2.7 to 2.11), so its groups have torch's 10 (NCCL) or 30 minutes (gloo).
    """
    timeout = group_timeout()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # backends without a time limit warn
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
