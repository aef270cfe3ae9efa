"""Tensors of a commit whole in memory, one process: for tools that compare, not for training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from foundry_moe.checkpoint.codec import DTYPES
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.export import Source
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.range_reads import Fetcher, block_of, coalesce, narrow_to
from foundry_moe.checkpoint.store import Store


def read_whole(store: Store, found: Found, sources: Mapping[str, Source], names: Iterable[str]) -> dict[str, Tensor]:
    """Each block's hash is checked.

    Raises:
        CheckpointError: data is damaged.
    """
    tensors: dict[str, Tensor] = {}
    items: dict[int, str] = {}
    for name in names:
        source = sources[name]
        if source.inline is not None:
            tensors[name] = source.inline
        else:
            assert source.item is not None
            items[source.item] = name
            tensors[name] = torch.empty(source.shape, dtype=DTYPES[source.dtype])
    entries = list(found.manifest.tensors.values())
    blocks = [block_of(entries[item], item, index) for item in items for index in range(len(entries[item].object_B))]
    ranges = coalesce(found.manifest, blocks)
    fetcher = Fetcher(store, found.commit.attempt, found.manifest)
    for part, data in zip(ranges, fetcher.stream(ranges), strict=True):
        if isinstance(data, CheckpointError):
            raise data
        for block, start in part.blocks:
            whole = tensors[items[block.item]]
            raw = torch.frombuffer(data[0][start : start + block.size_bytes], dtype=torch.uint8)
            narrow_to(whole, (0,) * whole.ndim, block.box).copy_(raw.view(whole.dtype).reshape(block.box[1]))
    return tensors
