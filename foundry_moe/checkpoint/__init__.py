"""Elastic checkpoints: written by all ranks, committed as one, read back on any mesh.

`Writer` and `Reader` are a StorageWriter and a StorageReader for torch.distributed.checkpoint, in any program.
`engine.CheckpointEngine` saves in the background and plans without communication. It depends neither on Composer nor on
a schedule; `callbacks.elastic_checkpoint` is Composer's callback. All of them use one format
(docs/reference/checkpoint_format.md). `Writer` and `Reader` are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from foundry_moe.checkpoint.store import Store, StoreOptions, folder_problem
from foundry_moe.schema import UserError

_PUBLIC = {"Writer": "dcp_writer", "Reader": "dcp_reader"}

__all__ = ["StoreOptions", "open_store", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"foundry_moe.checkpoint.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def open_store(folder: str, options: StoreOptions | None = None) -> Store:
    """The store for `s3://bucket/prefix`, `gs://...`, `az://...`, `/a/path` or `file:///a/path`. No request is sent.

    Raises:
        ValueError: the scheme is not supported, the path is not a folder, or the cloud's client is not installed.
    """
    options = options or StoreOptions()
    problem = folder_problem(folder)
    if problem:
        raise UserError(f"folder {folder!r}: {problem}")
    scheme, separator, rest = folder.partition("://")
    if not separator or scheme == "file":
        from foundry_moe.checkpoint.store_file import FileStore

        return FileStore(rest if separator else folder, options)
    if scheme == "s3":
        from foundry_moe.checkpoint.store_s3 import S3Store

        return S3Store(folder, options)
    try:
        from foundry_moe.checkpoint.store_cloud import CloudStore
    except ImportError as error:
        raise UserError(
            f"folder {folder!r}: {scheme}:// needs obstore ({error}): pip install 'obstore>=0.12,<1'"
        ) from error
    return CloudStore(folder, options)
