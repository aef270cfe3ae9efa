"""The store of a folder: S3 or a file system, by the folder's address."""

from __future__ import annotations

from foundry_moe.checkpoint.store import Store, StoreOptions, folder_problem


def is_remote(folder: str) -> bool:
    """Whether a folder is an address (`s3://...`) and not a path."""
    return "://" in folder


def open_store(folder: str, options: StoreOptions | None = None) -> Store:
    """The store for `s3://bucket/prefix`, `/a/path` or `file:///a/path`. Nothing is asked of it yet.

    Raises:
        ValueError: an address of another kind, or a path at which something else is.
    """
    options = options or StoreOptions()
    problem = folder_problem(folder)
    if problem:
        raise ValueError(f"folder {folder!r}: {problem}")
    scheme, separator, rest = folder.partition("://")
    if not separator or scheme == "file":
        from foundry_moe.checkpoint.store_file import FileStore

        return FileStore(rest if separator else folder, options)
    from foundry_moe.checkpoint.store_s3 import S3Store

    return S3Store(folder, options)
