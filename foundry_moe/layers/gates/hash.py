"""`hash`: the expert is a fixed function of the token's id (Roller et al. 2021, Hash Layers, arXiv 2106.04426).

Shapes: B sequences, S positions, T tokens, E experts, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_moe.layers.context import GateContext
from foundry_moe.layers.gates.gate import Choices, Gate
from foundry_moe.layers.gates.keys import HashKeys, read_counts
from foundry_moe.ops import noise
from foundry_moe.schema import UserError

_TOKEN, _PAIR = 4, 5


class HashGate(Gate):
    """No parameters, no loss: weight 1 for the expert that a table names.

    `random`: a hash of the id. `balanced`: ids by falling frequency, each to the expert with the least load so far;
    ids that were never counted use `random`. `bigram`: a hash of the id before and the id. Tables but
    `balanced` differ from layer to layer.

    YAML: `gate: {name: hash, table: balanced, frequencies: counts.json}`, with `top_k: 1`.

    Raises:
        ValueError: `top_k` other than 1; a table without its frequencies; in forward, a model that is given no ids.
    """

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"frequencies"})  # the table itself is in the checkpoint
    CHOOSES_BY_SEED: ClassVar[bool] = True

    REPLAYS: ClassVar[bool] = True
    Config = HashKeys
    config: HashKeys
    table_V: Tensor | None

    def __init__(self, config: HashKeys, **shape: Any) -> None:
        super().__init__(config, **shape)
        self._file_table: list[int] | None = None
        if config.frequencies:
            self._file_table = balance_by_frequency(read_counts(config.frequencies), self.num_experts)
        self.register_buffer("table_V", None if self._file_table is None else torch.tensor(self._file_table))

    @torch.no_grad()
    def reset_parameters(self, *, seed: int, layer: int, std: float) -> None:
        if self.table_V is not None and self._file_table is not None:
            self.table_V.copy_(torch.tensor(self._file_table, device=self.table_V.device))

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. No losses."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        weights_TK = torch.ones(x_TD.shape[0], 1, dtype=dtype, device=x_TD.device)
        if context.experts_TK is not None:
            return Choices(experts_TK=context.experts_TK, weights_TK=weights_TK)
        if context.token_ids_BS is None:
            raise UserError(
                "gate hash needs the token ids: the model's forward must take `input_ids`, one id for each token that "
                "reaches the layer (a model fed with embeddings, or sequences packed otherwise, cannot use it)"
            )
        expert_T = self._expert(context.token_ids_BS, context).reshape(-1)
        return Choices(experts_TK=expert_T[:, None], weights_TK=weights_TK)

    def _expert(self, ids_BS: Tensor, context: GateContext) -> Tensor:
        """int64 [B, S]."""
        if self.config.table == "bigram":
            before_BS = torch.cat([torch.full_like(ids_BS[:, :1], -1), ids_BS[:, :-1]], dim=1)
            keys_BS = noise.mix(before_BS.int() ^ noise.stream_of(context.seed, context.layer, _PAIR)) ^ ids_BS.int()
            return _spread(noise.mix(keys_BS), self.num_experts)
        hashed_BS = _spread(
            noise.mix(ids_BS.int() ^ noise.stream_of(context.seed, context.layer, _TOKEN)), self.num_experts
        )
        if self.table_V is None:
            return hashed_BS
        known_BS = (ids_BS >= 0) & (ids_BS < self.table_V.shape[0])
        listed_BS = self.table_V[torch.where(known_BS, ids_BS, 0)]
        return torch.where(known_BS & (listed_BS >= 0), listed_BS, hashed_BS)


def _spread(hashed: Tensor, num_experts: int) -> Tensor:
    """int64 in [0, E), from int32 bits."""
    return (hashed.long() & 0x7FFFFFFF) % num_experts


def balance_by_frequency(counts_V: Sequence[int], num_experts: int) -> list[int]:
    """The expert of each id: most frequent first, each into the emptiest expert; -1 for ids that never occur.

    Ties go to the lower id and to the lower expert, so every process makes the same table.
    """
    table = [-1] * len(counts_V)
    emptiest = [(0, expert) for expert in range(num_experts)]
    for token in sorted(range(len(counts_V)), key=lambda token: -counts_V[token]):
        if counts_V[token] == 0:
            break
        load, expert = emptiest[0]
        table[token] = expert
        heapq.heapreplace(emptiest, (load + counts_V[token], expert))
    return table
