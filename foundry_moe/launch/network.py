"""The network of a run: keeps a run on one machine off it, and measures it between nodes when a run starts."""

from __future__ import annotations

import os
import socket
import sys
import time

import torch
import torch.distributed as dist

MEASURE_S = 1.0
GPU_BYTES, CPU_BYTES = 256 << 20, 4 << 20
ASSUMED_GB_S = 45.0  # of one GPU, as `foundry-moe plan` assumes (network.bytes_per_s)
SLOW = 0.1  # of that: TCP in place of RDMA
MOST = 200  # all-reduces
LOOPBACK = "127.0.0.1"

_store: dist.TCPStore | None = None  # rank 0's, for as long as the process lives


def local_store(port: int = 0) -> dist.TCPStore:
    """Serves a store on 127.0.0.1; torch's own listens on all interfaces. port: 0 for a free one."""
    listener = socket.create_server((LOOPBACK, port))
    return dist.TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        use_libuv=False,  # torch 2.7's libuv server takes no socket
    )


def use_loopback() -> None:
    """Makes gloo and NCCL of this process listen on the loopback interface, unless the environment names another."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")  # without "=" NCCL takes it for a prefix


def stay_on_one_machine() -> None:
    """Makes a run whose ranks are all on this machine listen on 127.0.0.1 only, whichever launcher has started it.

    Rank 0 serves the store of the process group here, and all ranks connect to it as to a launcher's.
    """
    global _store
    ranks = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks:
        return
    use_loopback()
    if not {"MASTER_PORT", "RANK"} <= os.environ.keys() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    os.environ.update(MASTER_ADDR=LOOPBACK, TORCHELASTIC_USE_AGENT_STORE="True")
    if os.environ["RANK"] == "0":
        _store = local_store(int(os.environ["MASTER_PORT"]))


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
        print(f"network: {speed:.3g} GB/s per {'GPU' if gpu else 'process'} between {nodes} nodes", flush=True)
        if gpu and (warning := warning_of(speed)):
            print(warning, file=sys.stderr, flush=True)


def warning_of(speed: float) -> str:
    """A sentence for GB/s per GPU that make the estimates of `plan` meaningless; "" otherwise."""
    if speed >= SLOW * ASSUMED_GB_S:
        return ""
    return (
        f"warning: the network between nodes has {speed:.3g} GB/s per GPU, less than a tenth of the {ASSUMED_GB_S:g} "
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
