"""Flat against hierarchical all-to-all over hosts with limited links, made of network namespaces on one machine.

    python benchmarks/hierarchical.py [--mbit 200] [--packet-bytes 0] [--hosts 4] [--ranks-per-host 2]  (root)

Each host is a namespace whose one link to a bridge is shaped by a token bucket; ranks of a host reach each other
over its loopback. `--packet-bytes N` makes each packet cost as N bytes more, which limits packets a second as cloud
networks do. Every message also pays gloo's, TCP's and this machine's scheduler's own costs.
Prints, for each size, milliseconds of a round (counts, rows there, rows back) and the ratio.
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

WIDTH = 64  # fp32 numbers a row: 256 bytes
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
    from foundry_moe.parallel.all_to_all import AllToAll, FlatAllToAll, build_all_to_all
    from foundry_moe.parallel.mesh import build_meshes, plan_mesh

    config = MeshConfig(expert=world_size, shard=1, all_to_all="hierarchical")
    plan = plan_mesh(config, world_size=world_size, ranks_per_node=ranks_per_host)
    exchanges = {
        "flat": FlatAllToAll(dist.group.WORLD),
        "hierarchical": build_all_to_all(build_meshes(plan, "cpu")),
    }
    results = []
    for rows in rows_of_messages:
        counts = torch.full((world_size, 1, 2), rows, dtype=torch.int64)
        tokens = torch.randn(world_size * rows, WIDTH)

        def there_and_back(all_to_all: AllToAll, counts: torch.Tensor = counts, tokens: torch.Tensor = tokens) -> None:
            (splits,) = all_to_all.splits(all_to_all.exchange_counts(counts).wait())
            all_to_all.send_back(all_to_all.send(tokens, splits).wait(), splits).wait()

        medians = _in_turn({name: partial(there_and_back, exchange) for name, exchange in exchanges.items()}, rounds)
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
    """Sets hosts up, runs the ranks in them, prints the table; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--packet-bytes", type=int, default=0)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="from each rank to each rank")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = (arguments.hosts, arguments.ranks_per_host)
    if arguments.rank is not None:
        work(arguments.rank, *shape, arguments.folder, arguments.rows, arguments.rounds)
        return
    results = measure(shape, arguments.mbit, arguments.packet_bytes, rows=arguments.rows, rounds=arguments.rounds)
    print(
        f"{shape[0]} hosts x {shape[1]} ranks, gloo, links of {arguments.mbit} Mbit/s, each packet costing "
        f"{arguments.packet_bytes} bytes more; median of {arguments.rounds} rounds"
    )
    print(f"{'bytes a pair':>14}{'flat, ms':>12}{'hierarchical, ms':>20}{'ratio':>8}")
    for line in results:
        ratio = line["flat"] / line["hierarchical"]
        print(f"{line['bytes']:14}{line['flat']:12.2f}{line['hierarchical']:20.2f}{ratio:8.2f}")


if __name__ == "__main__":
    main()
