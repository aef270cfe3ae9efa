"""Hosts with limited links, made of network namespaces on one machine. Needs root, `ip` and `tc`."""

from __future__ import annotations

import os
import subprocess
import sys


class Hosts:
    """Namespaces on a bridge, each with one link whose two directions a token bucket shapes; gone on exit.

    Args:
        count: of hosts.
        mbit: of each link, Mbit/s.
        packet_bytes: each packet costs as that many bytes more, which limits packets per second as cloud networks do.
        name: two or three letters that names of interfaces begin with; other users of this class need others.
        subnet: its first three numbers; host i has `.i+1`, this machine `.254`.
        burst_kb: what a bucket lets through at once.
    """

    def __init__(
        self,
        count: int,
        mbit: int,
        packet_bytes: int = 0,
        *,
        name: str = "moe",
        subnet: str = "10.77.0",
        burst_kb: int = 16,
    ) -> None:
        self.count, self.mbit, self.packet_bytes = count, mbit, packet_bytes
        self.name, self.subnet, self.burst_kb = name, subnet, burst_kb

    def namespace(self, host: int) -> str:
        return f"{self.name}{host}"

    def address(self, host: int) -> str:
        return f"{self.subnet}.{host + 1}"

    @property
    def outside(self) -> str:
        """This machine's address, over a link that nothing limits."""
        return f"{self.subnet}.254"

    def inside(self, host: int) -> list[str]:
        """The prefix of a command that runs on a host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def processes(self, host: int) -> list[int]:
        """Ids of everything that runs there."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace(host)], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    def unplug(self, host: int) -> None:
        """Cuts a host's link: what others send to it is lost, and they hear nothing of it."""
        _run("ip", "link", "set", f"{self.name}v{host}", "down")

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0:
            sys.exit("error: root is needed, to make network namespaces and to limit their links")
        self.__exit__()
        bridge = f"{self.name}br"
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.outside}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for host in range(self.count):
            there, link, inside = self.namespace(host), f"{self.name}v{host}", self.inside(host)
            _run("ip", "netns", "add", there)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "net0", "netns", there)
            _run("ip", "link", "set", link, "master", bridge, "up")
            shape = ("tbf", "rate", f"{self.mbit}mbit", "burst", f"{self.burst_kb}kb", "latency", "400ms")
            shape += ("overhead", str(self.packet_bytes))
            _run("tc", "qdisc", "add", "dev", link, "root", *shape)
            _run(*inside, "ip", "addr", "add", f"{self.address(host)}/24", "dev", "net0")
            _run(*inside, "ip", "link", "set", "net0", "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "tc", "qdisc", "add", "dev", "net0", "root", *shape)
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(self.count):
            _run("ip", "netns", "del", self.namespace(host), check=False)
            _run("ip", "link", "del", f"{self.name}v{host}", check=False)
        _run("ip", "link", "del", f"{self.name}br", check=False)


def _run(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, capture_output=not check)
