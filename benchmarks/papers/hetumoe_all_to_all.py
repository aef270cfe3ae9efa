"""Hierarchical all-to-all beside a flat one, over message size and hosts (HetuMoE, Nie et al. 2022). On a CPU, as root:

    python -m benchmarks.papers.hetumoe_all_to_all [--hosts 2 4 8] [--ranks-per-host 2] [--mbit 50]
                                                   [--packet-bytes 1500] [--csv FILE] [--plot FILE]

The paper: 1.66 times NCCL's all-to-all on 4 nodes and 2 times on 8, of 8 GPUs and one network card each.
Here hosts are network namespaces of one machine (`benchmarks/hosts.py`), with ranks over gloo, and each link is a token
bucket that counts a packet as so many bytes more. What limits it: the ranks share the machine's cores, so that times
include its scheduler; few ranks a host, while a hierarchical exchange gains by sending messages that are as many times
larger as a host has ranks; no GPU copies, no NCCL. Sizes are small because that gain is in the cost of a message: where
bytes limit the link both ways send the same. `--mbit 0` makes no namespaces and limits nothing.
"""

from __future__ import annotations

from pathlib import Path

from hierarchical import ROUNDS, ROWS, measure

from benchmarks.papers.table import finish, parser_of

PAPER = {4: "1.66", 8: "2"}  # by nodes
COLUMNS = (
    "hosts",
    "ranks",
    "bytes a pair of ranks",
    "flat ms",
    "hierarchical ms",
    "speedup",
    "the paper, 8 GPUs a node",
)


def rows_of(
    hosts: list[int],
    ranks_per_host: int,
    mbit: int | None,
    packet_bytes: int,
    rows: tuple[int, ...] = ROWS,
    rounds: int = ROUNDS,
) -> list[list[str]]:
    """The table."""
    table = []
    for count in hosts:
        for line in measure((count, ranks_per_host), mbit, packet_bytes, rows=rows, rounds=rounds):
            figures = [
                f"{line['flat']:.2f}",
                f"{line['hierarchical']:.2f}",
                f"{line['flat'] / line['hierarchical']:.2f}",
            ]
            table.append([str(count), str(count * ranks_per_host), str(line["bytes"]), *figures, PAPER.get(count, "")])
    return table


def plot(rows: list[list[str]], path: Path) -> None:
    """Speedup over message size, a line for each number of hosts."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    for hosts in sorted({int(row[0]) for row in rows}):
        of = [row for row in rows if row[0] == str(hosts)]
        axes.plot([int(row[2]) for row in of], [float(row[5]) for row in of], marker="o", label=f"{hosts} hosts")
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(xscale="log", xlabel="bytes a pair of ranks", ylabel="flat over hierarchical", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = parser_of(__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--mbit", type=int, default=50)
    parser.add_argument("--packet-bytes", type=int, default=1500)
    arguments = parser.parse_args()
    rows = rows_of(arguments.hosts, arguments.ranks_per_host, arguments.mbit or None, arguments.packet_bytes)
    links = f"{arguments.mbit} Mbit/s, a packet {arguments.packet_bytes} bytes more" if arguments.mbit else "no limits"
    print(f"gloo, links of {links}; median of {ROUNDS} rounds of counts, rows there, rows back")
    finish(COLUMNS, rows, plot, arguments)


if __name__ == "__main__":
    main()
