"""Flat against hierarchical all-to-all between hosts with limited links (network namespaces of one machine).

    python benchmarks/hierarchical.py [--hosts 4] [--ranks-per-host 2] [--mbit 200] [--packet-bytes 0]     (root)

A token bucket limits each host's link to a bridge; ranks of one host use its loopback. `--packet-bytes N` adds N bytes
to the cost of each packet, which limits the packet rate as cloud networks do. All ranks share the cores of this
machine, and every message also pays the costs of gloo, TCP and the scheduler.
Prints, for each number of hosts and message size, the milliseconds of a round: counts, rows sent, rows returned.

HetuMoE (Nie et al. 2022) reports 1.66 times NCCL's all-to-all on 4 nodes and 2 times on 8, with 8 GPUs and one network
card per node. The hierarchical form sends fewer, larger messages, so it gains where the cost of a message dominates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from hosts import Hosts

WIDTH = 64  # fp32 numbers per row: 256 bytes
ROWS = (1, 4, 16, 64)  # from each rank to each rank
ROUNDS = 40  # and a fifth of as many before them


def work(rank: int, hosts: int, ranks_per_host: int, folder: str, rows: Sequence[int], rounds: int) -> None:
    """One rank, from process start to its end."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world_size = hosts * ranks_per_host
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    results = _time_exchanges(world_size, ranks_per_host, rows, rounds)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _in_turn(steps: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, float]:
    """Median milliseconds of the slowest rank, each step in turn, so that all see the same machine."""
    import torch
    import torch.distributed as dist

    times: dict[Any, list[float]] = {name: [] for name in steps}
    for round_ in range(-(rounds // 5), rounds):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            slowest = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if round_ >= 0:
                times[name].append(1e3 * slowest.item())
    return {name: statistics.median(values) for name, values in times.items()}


def _time_exchanges(
    world_size: int, ranks_per_host: int, rows_of_messages: Sequence[int], rounds: int
) -> list[dict[str, float]]:
    import torch
    import torch.distributed as dist

    from foundry_moe.config import MeshConfig
    from foundry_moe.parallel.all_to_all import AllToAllDispatcher
    from foundry_moe.parallel.mesh import build_meshes, plan_mesh

    config = MeshConfig(expert=world_size, shard=1, all_to_all="hierarchical")
    plan = plan_mesh(config, world_size=world_size, ranks_per_node=ranks_per_host)
    groups = {"flat": (dist.group.WORLD,), "hierarchical": build_meshes(plan, "cpu").token_groups}
    dispatchers = {name: AllToAllDispatcher(group, num_experts=world_size) for name, group in groups.items()}
    results = []
    for rows in rows_of_messages:
        counts = torch.full((world_size, 2), rows, dtype=torch.int64)
        tokens = torch.randn(world_size * rows, WIDTH)

        def there_and_back(
            dispatcher: AllToAllDispatcher, counts: torch.Tensor = counts, tokens: torch.Tensor = tokens
        ) -> None:
            exchange = dispatcher.plan_exchange(dispatcher.gather_counts(counts)(), torch.empty(0))
            received = dispatcher.start(tokens, exchange, back=False)()
            dispatcher.start(received, exchange, back=True)()

        medians = _in_turn(
            {name: partial(there_and_back, dispatcher) for name, dispatcher in dispatchers.items()}, rounds
        )
        results.append({"rows": rows, "bytes": rows * WIDTH * 4, **medians})
    return results


def measure(
    shape: tuple[int, int],
    mbit: int | None,
    packet_bytes: int = 0,
    *,
    rows: Sequence[int] = ROWS,
    rounds: int = ROUNDS,
) -> list[dict[str, float]]:
    """Runs the ranks, and gives what rank 0 measured.

    Args:
        shape: hosts, and ranks of each.
        mbit: of each host's link; None = no namespaces, all ranks on this machine's loopback.
        rows: from each rank to each rank.

    Raises:
        RuntimeError: a rank failed.
    """
    hosts, ranks_per_host = shape
    command = [sys.executable, __file__, "--hosts", str(hosts), "--ranks-per-host", str(ranks_per_host)]
    command += ["--rounds", str(rounds), "--rows", *map(str, rows)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if mbit is None else "net0", "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        inside = [[]] * hosts
        if mbit is not None:
            made = stack.enter_context(Hosts(hosts, mbit, packet_bytes))
            inside = [made.inside(host) for host in range(hosts)]
        ranks = [
            subprocess.Popen(
                [*inside[rank // ranks_per_host], *command, "--rank", str(rank), "--folder", folder], env=environment
            )
            for rank in range(hosts * ranks_per_host)
        ]
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return json.loads(Path(folder, "results.json").read_text())


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4])
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--mbit", type=int, default=200, help="of each host's link; 0 = no namespaces and no limit")
    parser.add_argument("--packet-bytes", type=int, default=0)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="from each rank to each rank")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ranks_per_host, sizes = arguments.ranks_per_host, {"rows": arguments.rows, "rounds": arguments.rounds}
    if arguments.rank is not None:
        work(arguments.rank, arguments.hosts[0], ranks_per_host, arguments.folder, **sizes)
        return
    print(
        f"gloo, links of {arguments.mbit} Mbit/s, each packet costs {arguments.packet_bytes} bytes more; "
        f"median of {arguments.rounds} rounds"
    )
    columns = "| hosts | ranks | bytes per pair of ranks | flat ms | hierarchical ms | speedup |\n|" + " --- |" * 6
    print(columns, flush=True)
    for hosts in arguments.hosts:
        for line in measure((hosts, ranks_per_host), arguments.mbit or None, arguments.packet_bytes, **sizes):
            flat, hierarchical = line["flat"], line["hierarchical"]
            print(
                f"| {hosts} | {hosts * ranks_per_host} | {line['bytes']} | {flat:.2f} | {hierarchical:.2f} "
                f"| {flat / hierarchical:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
