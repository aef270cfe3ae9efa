"""The store of a folder: a cloud's or a file system, by the folder's address."""

from __future__ import annotations

from foundry_moe.checkpoint.store import Store, StoreOptions, folder_problem


def is_remote(folder: str) -> bool:
    """Whether a folder is an address (`s3://...`) and not a path."""
    return "://" in folder


def open_store(folder: str, options: StoreOptions | None = None) -> Store:
    """The store for `s3://bucket/prefix`, `gs://...`, `az://...`, `/a/path` or `file:///a/path`. Nothing is asked of it
    yet.

    Raises:
        ValueError: an address of another kind, a path at which something else is, or the cloud's client is missing.
    """
    options = options or StoreOptions()
    problem = folder_problem(folder)
    if problem:
        raise ValueError(f"folder {folder!r}: {problem}")
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
        extra = {"gs": "gcs", "az": "azure"}[scheme]
        raise ValueError(
            f"folder {folder!r}: {scheme}:// needs obstore ({error}): pip install 'foundry_moe[{extra}]'"
        ) from error
    return CloudStore(folder, options)
