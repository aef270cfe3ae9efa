"""Memory of each rank of a group that the others write to: symmetric memory of GPUs, shared memory of CPU processes."""

from __future__ import annotations

import os
import socket
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.ops.peer_rows import PeerRegion
from foundry_moe.parallel.timeout import group_timeout

_PAGE = 4096  # bytes


def can_reach(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ranks of a group run on one host and their devices reach each other's memory; the same on all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (_host(), device.index), group=group)
    reached = len({host for host, _ in everyone}) == 1
    if reached and device.type == "cuda":
        others = {index for _, index in everyone} - {device.index}
        reached = all(torch.cuda.can_device_access_peer(device.index, other) for other in others)
    answers: list[Any] = [None] * len(everyone)
    dist.all_gather_object(answers, reached, group=group)
    return all(answers)


def _host() -> tuple[str, str]:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return socket.gethostname(), file.read()
    except OSError:
        return socket.gethostname(), ""


class PeerMemory:
    """As many bytes on each rank, or some more. Made by all ranks of the group at once, where `can_reach`.

    region: the memory.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
        size = max(-(-size // _PAGE), 1) * _PAGE
        self.group, self.size = group, size
        self._timeout_ms = max(int(group_timeout(group).total_seconds() * 1000), 1)
        self._handle = None
        if device.type == "cuda":
            from torch.distributed import _symmetric_memory as symmetric_memory

            self._own = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
            self._handle = symmetric_memory.rendezvous(self._own, group)
            memory = tuple(
                self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(dist.get_world_size(group))
            )
        else:
            memory = _shared(group, size)
        pointers_P = torch.tensor([part.data_ptr() for part in memory], device=device)
        self.region = PeerRegion(memory=memory, pointers_P=pointers_P, me=dist.get_rank(group), size=size)

    def barrier(self) -> None:
        """The current stream goes on once those of all ranks have come here: what was stored before can be read.

        A rank that does not come within the group's time limit makes the others' device fail.
        """
        if self._handle is not None:
            self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)
        else:
            dist.barrier(self.group)


def _shared(group: dist.ProcessGroup, size: int) -> tuple[Tensor, ...]:
    """The same file of each rank, mapped by all; files are gone from the file system once they are."""
    ranks = dist.get_world_size(group)
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    handle, own = tempfile.mkstemp(prefix="foundry_moe_", dir=folder)
    os.close(handle)
    try:
        os.truncate(own, size)
        paths: list[str] = [""] * ranks
        dist.all_gather_object(paths, own, group=group)
        mapped = tuple(torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths)
        dist.barrier(group)
    finally:
        os.unlink(own)
    return mapped
