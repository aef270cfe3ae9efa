"""Elastic checkpoints: written by all ranks, committed as one, read back on any mesh.

`Writer` and `Reader` are a StorageWriter and a StorageReader for torch.distributed.checkpoint, in any program.
`engine.CheckpointEngine` saves in the background and plans without communication; it knows neither Composer nor a
schedule, and `callbacks.elastic_checkpoint` is Composer's callback. All write one format
(docs/reference/checkpoint_format.md).
Public names are loaded when they are first used.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Writer": "foundry_moe.checkpoint.dcp_writer",
    "Reader": "foundry_moe.checkpoint.dcp_reader",
    "StoreOptions": "foundry_moe.checkpoint.store",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
