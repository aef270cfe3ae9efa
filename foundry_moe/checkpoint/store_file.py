"""A store on a file system, with the promises of `store.Store`: visible whole or not at all, one winner of a race.

Files are written beside their place and linked or renamed into it after their bytes are on the device.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from foundry_moe.checkpoint.errors import DeniedError, FullError, NotFoundError, StoreError
from foundry_moe.checkpoint.store import Entry, Store, StoreOptions

UNFINISHED = ".unfinished-"
SEEN_BYTES = 2**18  # is in the core's cache when it is hashed: a third of the time that hashing takes from memory


class FileStore(Store):
    """Objects are files below `folder`, which is made when something is first written."""

    def __init__(self, folder: str, options: StoreOptions | None = None) -> None:
        self.root = Path(folder).expanduser().absolute()
        self.url = str(self.root)
        self.options = options or StoreOptions()

    def put(self, key: str, data: bytes) -> None:
        self._write(key, memoryview(data), os.replace)

    def put_new(self, key: str, data: bytes) -> bool:
        try:
            self._write(key, memoryview(data), self._link)
        except FileExistsError:
            return False
        return True

    def _link(self, part: Path, path: Path) -> None:
        try:
            os.link(part, path)
        except OSError as error:
            # the file was written a moment ago, so a denial here means links, not rights; FAT and some FUSE mounts
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise DeniedError(
                    f"could not write {path.name} in {self.url}: this file system has no hard links "
                    f"({error.strerror}), by which one of several writers wins; use a folder on another (local disks, "
                    "NFS, Lustre have them), or s3://"
                ) from error
            raise

    def put_large(self, key: str, data: memoryview, *, on_part: Callable[[], None] = lambda: None) -> None:
        self._write(key, data, os.replace, on_part)

    def _write(
        self,
        key: str,
        data: memoryview,
        publish: Callable[[Path, Path], object],
        on_part: Callable[[], None] = lambda: None,
    ) -> None:
        path = self.root / key
        part = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(part, "wb", buffering=0) as file:
                    for start in range(0, len(data), self.options.part_bytes):
                        piece = data[start : start + self.options.part_bytes]
                        while piece:
                            piece = piece[file.write(piece) :]
                        on_part()
                    os.fdatasync(file.fileno())
                publish(part, path)
            finally:
                part.unlink(missing_ok=True)
            self._sync_folder(path.parent)
        except FileExistsError:
            raise
        except OSError as error:
            raise self._translate(error, f"write {key}") from error

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def get(self, key: str) -> bytes:
        try:
            return (self.root / key).read_bytes()
        except OSError as error:
            raise self._translate(error, f"read {key}") from error

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self._read(key, start, out, len(out), lambda piece: None)

    def read_seen(self, key: str, start: int, out: memoryview, see: Callable[[memoryview], None]) -> None:
        self._read(key, start, out, SEEN_BYTES, see)

    def _read(self, key: str, start: int, out: memoryview, most: int, see: Callable[[memoryview], None]) -> None:
        try:
            handle = os.open(f"{self.url}/{key}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < len(out):
                    count = os.preadv(handle, [out[done : done + most]], start + done)
                    if not count:
                        raise StoreError(
                            f"{self.url}/{key} ends {len(out) - done} bytes before byte {start + len(out)}"
                        )
                    see(out[done : done + count])
                    done += count
            finally:
                os.close(handle)
        except OSError as error:
            raise self._translate(error, f"read {key}") from error

    def identity(self, key: str) -> str | None:
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                host = file.read().strip()
            stat = (self.root / key).stat()
        except OSError:
            return None
        return f"{host} {stat.st_dev} {stat.st_ino}"

    def size_bytes(self, key: str) -> int | None:
        try:
            return (self.root / key).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._translate(error, f"look at {key}") from error

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return iter(sorted(self._walk(prefix, unfinished=False), key=lambda entry: entry.key))

    def _walk(self, prefix: str, *, unfinished: bool) -> list[Entry]:
        found: list[Entry] = []
        top = self.root / prefix.rpartition("/")[0]

        def raise_unless_missing(error: OSError) -> None:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise self._translate(error, f"list {prefix}") from error

        for folder, _, names in os.walk(top, onerror=raise_unless_missing):
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self.root).as_posix()
                if name.startswith(UNFINISHED) is unfinished and (unfinished or key.startswith(prefix)):
                    try:
                        stat = path.stat()
                    except FileNotFoundError:
                        continue  # deleted while we look
                    found.append(Entry(key=key, size_bytes=stat.st_size, modified_s=stat.st_mtime))
        return found

    def delete(self, keys: Iterable[str]) -> None:
        folders = set()
        try:
            for key in keys:
                path = self.root / key
                path.unlink(missing_ok=True)
                folders.add(path.parent)
        except OSError as error:
            raise self._translate(error, f"delete {key}") from error
        for folder in sorted(folders, key=lambda path: -len(path.parts)):
            while folder != self.root:
                try:
                    folder.rmdir()
                except OSError:
                    break  # not empty, or gone already
                folder = folder.parent

    def discard_unfinished(self, prefix: str, *, older_than_s: float) -> int:
        limit_s = self.now_s() - older_than_s
        stale = [entry.key for entry in self._walk(prefix, unfinished=True) if entry.modified_s <= limit_s]
        self.delete(stale)
        return len(stale)

    def now_s(self) -> float:
        return time.time()

    def _translate(self, error: OSError, action: str) -> StoreError:
        where = f"could not {action} in {self.url}"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return NotFoundError(f"{where}: no such file or folder")
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            return DeniedError(f"{where}: no permission ({error.strerror}); let user {os.getuid()} write there")
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return FullError(f"{where}: the disk is full ({error.strerror}); free some space or lower `keep`")
        return StoreError(f"{where}: {error.strerror or error}")
