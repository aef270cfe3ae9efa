"""The collectives of gates: sums of counts, the largest of sizes, and the shuffle of BASE layers.

Must not know gates, layers or Composer.

Shapes: T tokens of this rank, S tokens that come to it, X numbers a row, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class GateCollectives:
    """Reductions and a shuffle over the ranks of a group; callables for `foundry_moe.layers.context.BatchContext`.

    Args:
        group: None = all ranks.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group

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
        """Sends each rank an equal share of this rank's rows, drawn at random, and returns what came.

        Args:
            stream: seeds the draw, together with the rank.

        Returns:
            rows_SX, and the function that sends rows of S back to the positions in T that they came from.
        """
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        tokens, device = rows_TX.shape[0], rows_TX.device
        generator = torch.Generator().manual_seed((stream & 0xFFFFFFFF) * 65_537 + rank)
        order_T = torch.randperm(tokens, generator=generator).to(device)
        # the ranks that get a row more differ from rank to rank, so that what comes is even too
        sent_P = torch.tensor([tokens // ranks + ((p - rank) % ranks < tokens % ranks) for p in range(ranks)])
        received_P = torch.empty_like(sent_P).to(device)
        dist.all_to_all_single(received_P, sent_P.to(device), group=self.group)
        sent, received = sent_P.tolist(), received_P.tolist()

        def all_to_all(rows: Tensor, outgoing: list[int], incoming: list[int]) -> Tensor:
            out = rows.new_empty(sum(incoming), *rows.shape[1:])
            dist.all_to_all_single(out, rows.contiguous(), incoming, outgoing, group=self.group)
            return out

        def give_back(rows_S: Tensor) -> Tensor:
            rows_T = all_to_all(rows_S, received, sent)
            return torch.empty_like(rows_T).index_copy(0, order_T, rows_T)

        return all_to_all(rows_TX[order_T], sent, received), give_back
