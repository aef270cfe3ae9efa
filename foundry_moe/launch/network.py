"""Measures the network between the nodes of a run when it starts."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

MEASURE_S = 1.0
GPU_BYTES, CPU_BYTES = 256 << 20, 4 << 20
ASSUMED_GB_S = 45.0  # of one GPU, as `foundry-moe plan` assumes (network.bytes_per_s)
SLOW = 0.1  # of that: TCP in place of RDMA
MOST = 200  # all-reduces


def log_network_speed() -> None:
    """Collective over the default group. Rank 0 prints the bandwidth between nodes, and a warning if it is low.

    Not after a restart by torchrun, which it would delay.
    """
    nodes = dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
    if nodes < 2:
        return
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    restarts = torch.tensor([int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))], device=device)
    dist.broadcast(restarts, src=0)  # nodes that joined later have counted fewer
    if restarts.item():
        return
    speed = all_reduce_gb_s(nodes, device)
    if dist.get_rank() == 0:
        print(f"network: {speed:.3g} GB/s a {'GPU' if gpu else 'process'} between {nodes} nodes", flush=True)
        if gpu and (warning := warning_of(speed)):
            print(warning, file=sys.stderr, flush=True)


def warning_of(speed: float) -> str:
    """A sentence for GB/s a GPU that make the estimates of `plan` meaningless; "" otherwise."""
    if speed >= SLOW * ASSUMED_GB_S:
        return ""
    return (
        f"warning: the network between nodes has {speed:.3g} GB/s a GPU, less than a tenth of the {ASSUMED_GB_S:g} "
        "GB/s that foundry-moe plan assumes: see docs/how-to/network.md"
    )


def all_reduce_gb_s(nodes: int, device: torch.device, seconds: float = MEASURE_S) -> float:
    """Collective. GB/s that each process sends to other nodes in all-reduces of all ranks.

    An all-reduce of S bytes over N nodes makes each node send at least 2 S (N - 1) / N.
    """
    values = torch.ones((GPU_BYTES if device.type == "cuda" else CPU_BYTES) // 4, device=device)
    dist.all_reduce(values)  # opens the connections
    once = torch.tensor([_seconds(values, 1)], device=device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)  # all ranks repeat equally often
    count = min(MOST, max(1, round(seconds / once.item())))
    took_s = _seconds(values, count)
    sent = count * values.numel() * values.element_size() * 2 * (nodes - 1) / nodes
    return sent / took_s / (dist.get_world_size() / nodes) / 1e9


def _seconds(values: torch.Tensor, count: int) -> float:
    began = time.monotonic()
    for _ in range(count):
        dist.all_reduce(values.zero_())
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
    return time.monotonic() - began
