"""A store on a file system with the guarantees of `store.Store`: atomic objects, one winner of a conditional write.

A file is written under a temporary name, flushed to the device, and then linked or renamed. No symbolic link below the
folder is followed: each folder is opened relative to its parent, so that other writers cannot redirect reads or
deletions. obstore's LocalStore is not used because it follows links out of its folder and does not flush files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from foundry_moe.checkpoint.errors import FREE_SPACE, DeniedError, NotAnObjectError, NotFoundError, StoreError
from foundry_moe.checkpoint.store import SMALL_BYTES, Entry, See, Store, StoreOptions, checked_key, folder_problem

log = logging.getLogger(__name__)

SEEN_BYTES = 2**18  # fits the core's cache: hashing takes a third of the time that it takes from memory
RACES = 100  # retries of a write whose folder another process has removed while it was empty
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO must not block
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FileStore(Store):
    """Objects are files below `folder`, which the first write creates."""

    range_bytes = 2**18  # requests are cheap, and a block that is read alone goes to its final memory

    def __init__(self, folder: str, options: StoreOptions | None = None) -> None:
        self.root = Path(folder).expanduser().absolute()
        self.url = str(self.root)
        self.options = options or StoreOptions()
        self._warned: set[str] = set()
        with contextlib.suppress(OSError):
            self.host = Path("/proc/sys/kernel/random/boot_id").read_text()

    def check(self) -> None:
        problem = folder_problem(self.url)
        if problem:
            raise NotFoundError(f"could not write to {self.url}: {problem}")
        super().check()

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._write(key, data, _replace)

    def put_new(self, key: str, data: bytes) -> bool:
        return self._write(key, data, self._link)

    def _link(self, part: str, name: str, folder: int) -> bool:
        try:
            os.link(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except FileExistsError:
            return False
        except OSError as error:
            # writing has just succeeded, so permissions are not the cause: FAT and some FUSE mounts have no links
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise DeniedError(
                    f"could not write {name} in {self.url}: this file system has no hard links "
                    f"({error.strerror}), which conditional writes need; use a folder on another one (local disks, "
                    "NFS, Lustre), or s3://"
                ) from error
            raise
        return True

    def _write(self, key: str, data: bytes | memoryview, publish: Callable[[str, str, int], bool]) -> bool:
        above, _, name = checked_key(key).rpartition("/")
        part = f".unfinished-{secrets.token_hex(8)}-{name}"
        try:
            with self._new(above, part) as (folder, handle):
                try:
                    with open(handle, "wb", buffering=0) as file:
                        for start in range(0, len(data), self.options.part_bytes):
                            piece = memoryview(data[start : start + self.options.part_bytes])
                            while piece:
                                count = file.write(piece)
                                self.sent_bytes += count
                                piece = piece[count:]
                        os.fdatasync(file.fileno())
                    won = publish(part, name, folder)
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(part, dir_fd=folder)
                os.fsync(folder)
        except OSError as error:
            self._remove_empty(above)
            size = f" ({len(data):,} bytes)" if data else ""
            raise self._translate(error, f"write {key}{size}", key) from error
        return won

    @contextlib.contextmanager
    def _new(self, path: str, name: str) -> Iterator[tuple[int, int]]:
        """A folder, created if needed, and a new file in it. Another process may remove the folder in between."""
        for _ in range(RACES):
            with contextlib.ExitStack() as opened:
                try:
                    folder = opened.enter_context(self._opened(path, make=True))
                    handle = os.open(name, NEW, 0o666, dir_fd=folder)
                except FileNotFoundError:
                    continue
                yield folder, handle
                return
        raise FileNotFoundError

    @contextlib.contextmanager
    def _opened(self, path: str = "", *, make: bool = False) -> Iterator[int]:
        """A folder below the root, opened without following links."""
        if make:
            os.makedirs(self.root, exist_ok=True)
        with contextlib.ExitStack() as opened:
            folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, folder)
            for part in path.split("/") if path else ():
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                        os.fsync(folder)
                folder = os.open(part, FOLDER, dir_fd=folder)
                opened.callback(os.close, folder)
            yield folder

    @contextlib.contextmanager
    def _file(self, key: str, action: str = "read") -> Iterator[int]:
        """Opens an object for reading, and translates errors of the action."""
        above, _, name = checked_key(key).rpartition("/")
        try:
            with self._opened(above) as folder:
                handle = os.open(name, READ, dir_fd=folder)
            try:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise NotAnObjectError(f"{self.url}/{key} is not a regular file: delete it")
                yield handle
            finally:
                os.close(handle)
        except OSError as error:
            raise self._translate(error, f"{action} {key}", key) from error

    def get(self, key: str, most_bytes: int = SMALL_BYTES) -> bytes:
        with self._file(key) as handle, open(handle, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise NotAnObjectError(f"{self.url}/{key} has more than the limit of {most_bytes} bytes")
        return data

    def read_into(self, key: str, start: int, out: memoryview, see: See = lambda piece: None) -> None:
        with self._file(key) as handle:
            done = 0
            while done < len(out):
                count = os.preadv(handle, [out[done : done + SEEN_BYTES]], start + done)
                if not count:
                    raise StoreError(f"{self.url}/{key} ends {len(out) - done} bytes before byte {start + len(out)}")
                see(out[done : done + count])
                done += count

    def size_bytes(self, key: str) -> int | None:
        try:
            with self._file(key, "look at") as handle:
                return os.fstat(handle).st_size
        except NotFoundError as error:
            if isinstance(error, NotAnObjectError):
                raise
            return None

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """Includes temporary files of killed processes, so that they are deleted with their attempt."""
        found: list[Entry] = []
        top = prefix.rpartition("/")[0]
        try:
            with self._opened(checked_key(top) if top else "") as folder:
                found.extend(self._walk(folder, f"{top}/" if top else "", prefix))
        except OSError as error:
            translated = self._translate(error, f"list {prefix}".rstrip(), top)
            if isinstance(translated, NotAnObjectError) or not isinstance(translated, NotFoundError):
                raise translated from error
        return iter(sorted(found, key=lambda entry: entry.key))

    def _walk(self, folder: int, above: str, prefix: str) -> Iterator[Entry]:
        """The files below an open folder, without those that are deleted meanwhile."""
        with os.scandir(folder) as items:
            for item in items:
                key = above + item.name
                with contextlib.suppress(FileNotFoundError):
                    if item.is_dir(follow_symlinks=False):
                        if f"{key}/".startswith(prefix):
                            below = os.open(item.name, FOLDER, dir_fd=folder)
                            try:
                                yield from self._walk(below, f"{key}/", prefix)
                            finally:
                                os.close(below)
                    elif key.startswith(prefix):
                        if item.is_file(follow_symlinks=False) and key.isprintable():
                            status = item.stat(follow_symlinks=False)
                            yield Entry(key=key, size_bytes=status.st_size, modified_s=status.st_mtime)
                        else:
                            self._warn(key)

    def _warn(self, key: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("Passed over %r in %s: a checkpoint has no links, pipes or names like this.", key, self.url)

    def delete(self, keys: Iterable[str]) -> None:
        folders: dict[str, list[str]] = {}
        for key in keys:
            above, _, name = checked_key(key).rpartition("/")
            folders.setdefault(above, []).append(name)
        for above, names in folders.items():
            try:
                with self._opened(above) as folder:
                    for name in names:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._translate(error, f"delete from {above or 'the folder'}", above) from error
        for above in folders:
            self._remove_empty(above)

    def _remove_empty(self, path: str) -> None:
        """Removes a folder and those above it, as far as they are empty."""
        while path:
            above, _, name = path.rpartition("/")
            try:
                with self._opened(above) as folder:
                    os.rmdir(name, dir_fd=folder)
            except OSError:
                return  # not empty, or gone already
            path = above

    def free_bytes(self) -> int | None:
        try:
            found = os.statvfs(next(path for path in (self.root, *self.root.parents) if path.exists()))
        except OSError:
            return None
        return found.f_bavail * found.f_frsize if found.f_blocks else None  # some FUSE mounts report nothing

    def now_s(self) -> float:
        """The clock of modification times: on a network file system the server's, which may be hours off."""
        name = f".unfinished-{secrets.token_hex(8)}-clock"
        try:
            with self._opened() as folder, open(os.open(name, NEW, 0o666, dir_fd=folder), "wb", buffering=0) as file:
                os.unlink(name, dir_fd=folder)
                file.write(b"t")  # the server sets the time of a write
                os.fsync(file.fileno())
                return os.fstat(file.fileno()).st_mtime
        except OSError:
            return time.time()  # without permission to write, nothing is deleted by this clock

    def _translate(self, error: OSError, action: str, key: str) -> StoreError:
        where = f"could not {action} in {self.url}"
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            paths = [self.root / key, *(self.root / key).parents]
            links = [path for path in paths if self.root in path.parents and path.is_symlink()]
            if links:
                return NotAnObjectError(
                    f"{where}: {links[-1]} is a symbolic link, which is not followed inside a folder of checkpoints; "
                    "delete it"
                )
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return NotFoundError(f"{where}: no such file or folder")
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            return DeniedError(f"{where}: no permission ({error.strerror}); give user {os.getuid()} access")
        if error.errno == errno.EFBIG:
            return StoreError(f"{where}: {error.strerror}, by a limit of file size (ulimit -f, or the file system's)")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            left = f"{error.strerror}, {self.free_bytes() or 0:,} bytes are free"
            return StoreError(f"{where}: the disk is full ({left}); {FREE_SPACE}")
        return StoreError(f"{where}: {error.strerror or error}")


def _replace(part: str, name: str, folder: int) -> bool:
    os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    return True
