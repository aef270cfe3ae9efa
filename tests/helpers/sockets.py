"""Where processes listen."""

import psutil

LOCAL = ("127.0.0.1", "::1")


def listening(pid: int) -> list[tuple[str, str, int]]:
    """Command, address and port of each listening socket of a process and those that it has started."""
    started = psutil.Process(pid)
    return [
        (" ".join(process.cmdline())[:200], connection.laddr.ip, connection.laddr.port)
        for process in [started, *started.children(recursive=True)]
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def reachable(pid: int) -> list[tuple[str, str, int]]:
    """Those that another machine reaches."""
    return [found for found in listening(pid) if found[1] not in LOCAL]
