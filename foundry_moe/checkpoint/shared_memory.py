"""Memory that the ranks of one host share while they load, so that bytes do not pass through the network's stack.

On two cores a loopback connection moves some 0.5 GB/s for each rank, shared memory 5. The memory has no name: it is a
memfd that peers open through /proc, and it is gone with its process, however that ends. Where that does not work
(other containers, another user) the exchange sends.
"""

from __future__ import annotations

import mmap
import os
import platform

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.checkpoint.collective_errors import FirstError


class SharedSlots:
    """This rank's slots, and those of the ranks whose memory it can read.

    Attributes:
        readers: ranks that can read this one's slots.
    """

    def __init__(self, slots: int, slot_bytes: int, group: dist.ProcessGroup | None, failure: FirstError) -> None:
        """Collective over `group`; the sizes may differ from rank to rank. None is a single process.

        Args:
            failure: is told if this rank has no memory for its slots; it takes part to the end all the same.
        """
        self.slots, self.slot_bytes = slots, slot_bytes
        self.readers: frozenset[int] = frozenset()
        self._peers: dict[int, tuple[Tensor, int, int]] = {}
        world = dist.get_world_size(group) if group is not None else 1
        made = failure.guard(_allocate, slots * slot_bytes, shared=world > 1)
        self._own, handle = made or (torch.empty(0, dtype=torch.uint8), -1)
        if world == 1:
            return
        me = (_host(), os.getpid(), handle, slots, slot_bytes)
        everyone: list[tuple[str, int, int, int, int]] = [me] * world
        dist.all_gather_object(everyone, me, group=group)
        rank = dist.get_rank(group)
        for peer, (host, pid, peer_handle, peer_slots, peer_slot_bytes) in enumerate(everyone):
            if peer != rank and host == me[0] and min(peer_handle, handle) >= 0 and peer_slot_bytes:
                memory = failure.guard(_map_of_peer, pid, peer_handle, peer_slots * peer_slot_bytes)
                if memory is not None:
                    self._peers[peer] = (memory, peer_slots, peer_slot_bytes)
        readable: list[set[int]] = [set()] * world
        dist.all_gather_object(readable, set(self._peers), group=group)
        self.readers = frozenset(peer for peer, opened_by in enumerate(readable) if rank in opened_by)
        if handle >= 0:
            os.close(handle)  # all have mapped it

    def own(self, number: int, size_bytes: int) -> Tensor:
        """The first `size_bytes` of the slot of round `number`, as uint8."""
        start = number % self.slots * self.slot_bytes
        return self._own[start : start + size_bytes]

    def reads(self, peer: int) -> bool:
        """Whether this rank can read a peer's slots."""
        return peer in self._peers

    def of_peer(self, peer: int, number: int, start: int, size_bytes: int) -> Tensor:
        """Bytes of a peer's slot of round `number`; they are the peer's until it is told that they were read."""
        memory, slots, slot_bytes = self._peers[peer]
        begin = number % slots * slot_bytes + start
        return memory[begin : begin + size_bytes]


def _host() -> str:
    """Equal for processes that see the same /proc of the same running machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{platform.node()} {os.getpid()}"


def _allocate(size_bytes: int, *, shared: bool) -> tuple[Tensor, int]:
    """Memory, and the handle by which peers can open it: -1 if they cannot."""
    if shared and hasattr(os, "memfd_create"):
        handle = -1
        try:
            handle = os.memfd_create("checkpoint-load")
            return _map(handle, size_bytes), handle
        except OSError:  # no handles left, or forbidden: then it is sent
            if handle >= 0:
                os.close(handle)
    return torch.empty(size_bytes, dtype=torch.uint8), -1


def _map_of_peer(pid: int, handle: int, size_bytes: int) -> Tensor | None:
    """A peer's memory; None if this process cannot open it."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{handle}", os.O_RDWR)
        try:
            return _map(opened, size_bytes)
        finally:
            os.close(opened)
    except OSError:
        return None


def _map(handle: int, size_bytes: int) -> Tensor:
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    if os.fstat(handle).st_size < size_bytes:
        os.ftruncate(handle, size_bytes)
    return torch.frombuffer(mmap.mmap(handle, size_bytes), dtype=torch.uint8)
