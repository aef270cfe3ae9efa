"""Checks the processors of this node before it joins a run: `python -m foundry_moe.launch.node_check`.

Each GPU writes and reads patterns in most of its free memory, multiplies matrices whose product is known, and takes
part in an all-reduce of the node's GPUs, whose result and bandwidth are compared. A node that fails prints a sentence
for each fault and exits with BAD_NODE: a restart on it would fail, or compute wrong numbers. Without GPUs the same code
checks the CPU. This module must not know the run.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import torch

from foundry_moe.launch.user_errors import BAD_NODE

MEMORY_SHARE = 0.9  # of what is free; another process may take some meanwhile
CPU_BYTES = 64 << 20
CHUNK_BYTES = 1 << 30
WIDTH = {"cuda": 8192, "cpu": 256}  # of the square matrices
PRODUCTS = {"cuda": 50, "cpu": 2}
LINK_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
# Least bandwidth of an all-reduce within a node, in GB/s per GPU by compute capability: a quarter of NVLink's. GPUs of
# other capabilities may be connected by PCIe only. The environment variable LINK_GB_S overrides it.
LEAST_LINK_GB_S = {(8, 0): 50.0, (9, 0): 90.0, (10, 0): 150.0}


def memory_fault(device: torch.device, size: int | None = None) -> str | None:
    """Writes two patterns and their sums to `size` bytes, 0.9 of the free memory by default, and reads them again."""
    if size is None:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else CPU_BYTES
        size = int(MEMORY_SHARE * free)
    chunk = min(CHUNK_BYTES, size)
    blocks = [torch.empty(chunk // 4, dtype=torch.int32, device=device) for _ in range(size // chunk)]
    bad = 0
    for pattern in (0x55555555, -0x55555556):  # alternating bits, and their complement
        for number, block in enumerate(blocks):
            block.fill_(pattern ^ number)
        bad += sum(int((block != pattern ^ number).sum()) for number, block in enumerate(blocks))
    return f"{bad} words of its memory do not hold what was written" if bad else None


def product_fault(device: torch.device) -> str | None:
    """Multiplies matrices of small whole numbers: every element of the product has an exact value in bfloat16."""
    width = WIDTH[device.type]
    numbers = torch.arange(width, device=device)
    rows, columns = (numbers % 4 + 1).bfloat16(), (numbers % 3 + 1).bfloat16()
    left, right = rows[:, None].expand(width, width).contiguous(), columns[None].expand(width, width).contiguous()
    expected = rows[:, None] * columns[None] * width  # at most 12 * width: four significant bits
    bad = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(PRODUCTS[device.type]):
        bad += (left @ right != expected).sum()
    return f"{int(bad)} elements of matrix products are wrong" if bad else None


def link_faults(devices: list[torch.device], least_gb_s: float) -> dict[int, str]:
    """All-reduces over all devices: a fault for each whose sum is wrong, and one for fewer GB/s than `least_gb_s`."""
    kind, count = devices[0].type, len(devices)
    if count == 1:
        return {}
    values = [torch.full((LINK_BYTES[kind] // 4,), float(n + 1), device=device) for n, device in enumerate(devices)]
    _all_reduce(values)
    total = count * (count + 1) / 2
    faults = {
        number: "its part of an all-reduce of this node is wrong"
        for number, value in enumerate(values)
        if not bool((value == total).all())
    }
    _synchronize(devices)
    began = time.monotonic()
    for _ in range(10):
        _all_reduce(values)
    _synchronize(devices)
    gb_s = 10 * LINK_BYTES[kind] * 2 * (count - 1) / count / (time.monotonic() - began) / 1e9
    if gb_s < least_gb_s:
        slow = f"an all-reduce of this node has {gb_s:.3g} GB/s per GPU, less than LINK_GB_S ({least_gb_s:g})"
        faults.setdefault(0, slow)
    return faults


def _all_reduce(values: list[torch.Tensor]) -> None:
    if values[0].is_cuda:
        from torch.cuda import nccl

        nccl.all_reduce(values)
    else:
        total = torch.stack(values).sum(0)
        for value in values:
            value.copy_(total)


def _synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def faults_of_node() -> list[str]:
    """A sentence for each fault of this node."""
    gpus = torch.cuda.device_count()
    devices = [torch.device("cuda", n) for n in range(gpus)] if gpus else [torch.device("cpu")]
    least = LEAST_LINK_GB_S.get(torch.cuda.get_device_capability(0), 0.0) if gpus else 0.0
    found: dict[str, str] = {}
    try:
        for device in devices:
            for check in (memory_fault, product_fault):
                if fault := check(device):
                    found.setdefault(str(device), fault)
            if gpus:
                torch.cuda.empty_cache()
        for number, fault in link_faults(devices, float(os.environ.get("LINK_GB_S") or least)).items():
            found.setdefault(str(devices[number]), fault)
    except RuntimeError as error:  # CUDA's: a GPU that does not answer
        found.setdefault("node", str(error).splitlines()[0])
    return [f"{where} of {socket.gethostname()}: {fault}" for where, fault in found.items()]


def main() -> int:
    """Returns BAD_NODE for a node with a fault, else 0."""
    began = time.monotonic()
    faults = faults_of_node()
    for fault in faults:
        print(f"error: {fault}; take this node out of service", file=sys.stderr)
    if not faults:
        print(f"node check: {max(torch.cuda.device_count(), 1)} devices in {time.monotonic() - began:.1f} s")
    return BAD_NODE if faults else 0


if __name__ == "__main__":
    sys.exit(main())
