"""Runs Python commands in processes forked from one that has imported LLM Foundry, whose imports take 10 s per process.

For tests of documented commands and recipes; tests of processes (launch, distributed, chaos, end_to_end/test_yaml.py)
start commands as users do. One server per test session, started at its first use. `programs` is a folder of executables
(`composer`, `foundry-moe`, `llmfoundry`, `torchrun`, `python`) that start a command from a shell. The process tree is
the one without a server: a launcher's ranks are forked too, as its children, with their command line. There is no
server where there is a GPU, since a process with CUDA must not fork, and none outside Linux. The executables import
this module: at the top it imports only the standard library, and a module that does.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.helpers.demo import BIN, ROOT

PROGRAMS = ("composer", "foundry-moe", "llmfoundry", "torchrun", "python")
ADDRESS = "FOUNDRY_MOE_TESTS_WARM"  # of the server's socket
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
MODULES = (
    "foundry_moe.commands.export",
    "foundry_moe.commands.verify.trial",
    "foundry_moe.commands.verify.recorder",
    "composer.cli.launcher",
    "foundry_moe.launch.torchrun",
    "transformers.models.mixtral.modeling_mixtral",
)
_SUBREAPER, _CMDLINE_BYTES = 36, 16384


# --- the tests' side


@cache
def _start_server() -> str | None:
    """The socket's path; None where commands start without a server."""
    if address := os.environ.get(ADDRESS):
        return address
    import torch

    if sys.platform != "linux" or torch.cuda.is_available():
        return None
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    address = f"{folder.name}/socket"
    ours, theirs = socket.socketpair()  # the server ends when this process has
    with theirs, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.warm", str(listener.fileno()), "x" * _CMDLINE_BYTES],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdin=theirs,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    _KEPT.extend([ours, folder])
    os.environ[ADDRESS] = address
    return address


_KEPT: list[Any] = []  # as long as this process lives


@cache
def programs() -> Path:
    """The folder of executables; that of the environment without a server."""
    if _start_server() is None:
        return BIN
    folder = tempfile.TemporaryDirectory(prefix="warm-bin-")
    _KEPT.append(folder)
    text = f"#!{sys.executable} -IS\nimport sys\nsys.path.append({str(ROOT)!r})\n"
    text += f"from tests.helpers import warm\nwarm.forward({str(BIN)!r})\n"
    for name in PROGRAMS:
        program = Path(folder.name, name)
        program.write_text(text)
        program.chmod(0o755)
    return Path(folder.name)


def forward(folder: str) -> None:
    """The executables' main: starts the command of the same name, passes signals on, and ends as it does."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[ADDRESS])
    words = [f"{folder}/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    _send(connection, {"words": words, "env": dict(os.environ), "cwd": os.getcwd()}, (0, 1, 2))
    lines = connection.makefile()
    pid = int(lines.readline())

    def pass_on(number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    code = int(lines.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _send(connection: socket.socket, request: Mapping[str, Any], files: Sequence[int]) -> None:
    data = json.dumps(request).encode()
    socket.send_fds(connection, [len(data).to_bytes(8, "big")], list(files))
    connection.sendall(data)


# --- the server's side


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """A request and its files; None at the end."""
    header, files, _, _ = socket.recv_fds(connection, 8, 16)
    if not header:
        return None
    left, data = int.from_bytes(header, "big"), b""
    while len(data) < left:
        data += connection.recv(left - len(data))
    return json.loads(data), list(files)


def _serve(listener: socket.socket) -> dict[str, Any]:
    """Returns in each forked process, with its request; the server exits when the session's process has ended."""
    import selectors

    reads, writes = os.pipe()
    for end in (reads, writes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    for file in (listener, reads, 0):
        selector.register(file, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                for pid in running:
                    _kill(pid)
                os._exit(0)
            if key.fileobj is listener:
                connection = listener.accept()[0]
                received = _receive(connection)
                if received is None:
                    connection.close()
                    continue
                request, files = received
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    for file in (reads, writes):
                        os.close(file)
                    for opened in (listener, connection, *running.values()):
                        opened.close()
                    os.setsid()
                    _enter(request, dict(zip(files, range(3), strict=True)))
                    return request
                for file in files:
                    os.close(file)
                running[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
                with contextlib.suppress(OSError):
                    connection.sendall(f"{pid}\n".encode())
            elif key.data is not None:  # nobody waits for this command any more
                selector.unregister(key.fileobj)
                _kill(key.data)
        with contextlib.suppress(BlockingIOError):
            os.read(reads, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = running.pop(ended[0])
                with contextlib.suppress(KeyError):
                    selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
                connection.close()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _enter(request: Mapping[str, Any], files: Mapping[int, int]) -> None:
    """Gives this process the files (received: wanted), environment, folder and signals of the request."""
    high = {}
    for received, wanted in files.items():  # above all wanted numbers, so that none is overwritten
        import fcntl

        high[fcntl.fcntl(received, fcntl.F_DUPFD, 512)] = wanted
        os.close(received)
    for received, wanted in high.items():
        os.dup2(received, wanted)
        os.close(received)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])


def _parse(words: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Options, and the rest from script, `-m` or `-c` on, of a command of Python's; None if it is not run here."""
    if os.path.realpath(words[0]) != os.path.realpath(sys.executable):
        return ([], list(words)) if Path(words[0]).name in PROGRAMS and Path(words[0]).parent == BIN else None
    options, rest = [], list(words[1:])
    while rest and rest[0] in ("-u", "-B"):
        options.append(rest.pop(0))
    if not rest or (rest[0] == "-c" and "forkserver" not in rest[1]):
        return None
    return (options, rest) if rest[0] in ("-m", "-c") or rest[0].endswith(".py") else None


def _become(request: Mapping[str, Any]) -> None:
    """Runs the command as Python's main program; the interpreter's exit is this process's."""
    import types

    words = request["words"]
    parsed = _parse(words)
    if parsed is None:
        os.execve(words[0], words, os.environ)
    options, rest = parsed
    _show(words)
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = number == 2 or "-u" in options or "PYTHONUNBUFFERED" in os.environ
        stream = io.TextIOWrapper(
            open(number, "wb", 0 if raw else -1, closefd=False),  # noqa: SIM115
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "strict",
            write_through=raw,
            line_buffering=number == 2,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = os.getcwd() if rest[0] in ("-m", "-c") else str(Path(rest[0]).parent.resolve())
    sys.path[:] = [first, *given, *request["path"]]
    sys.path_importer_cache.clear()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if rest[0] == "-m":
        import runpy

        sys.argv[:] = rest[1:]
        sys.modules.pop(rest[1], None)  # else it warns that it is imported already
        runpy._run_module_as_main(rest[1])  # type: ignore[attr-defined]
    elif rest[0] == "-c":
        sys.argv[:] = ["-c", *rest[2:]]
        exec(compile(rest[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = rest
        main.__file__ = rest[0]
        exec(compile(Path(rest[0]).read_bytes(), rest[0], "exec"), main.__dict__)


def _show(words: Sequence[str]) -> None:
    """Writes the command over the server's arguments, for tests that look for a rank by its command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = "\0".join(words).encode()[: end - start - 1].ljust(end - start, b"\0")
    with open("/proc/self/mem", "r+b", 0) as memory:
        memory.seek(start)
        memory.write(text)


def _fork_for_children(path: Sequence[str]) -> dict[str, Any] | None:
    """Starts a process that forks this command's own Python children, and takes them from it.

    Returns the request in each of these children; None in the command. A copy of the server, for a command with threads
    could not fork.
    """
    import _posixsubprocess
    import ctypes

    ours, theirs = socket.socketpair()
    command = os.getpid()
    if not os.fork():
        ours.close()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # sent to the group; it ends with the command
        _show(["warm"])
        while (received := _receive(theirs)) is not None:
            request, files = received
            between = os.fork()
            if between:
                os.waitpid(between, 0)  # the command adopts its child
                for file in files:
                    os.close(file)
                continue
            if os.fork():
                os._exit(0)
            while os.getppid() != command:
                time.sleep(0.001)
            theirs.sendall(f"{os.getpid()}\n".encode())
            theirs.close()
            if request["session"]:
                os.setsid()
            _enter(request, dict(zip(files, request["files"], strict=True)))
            return {**request, "path": path}
        os._exit(0)
    theirs.close()
    executed, one_at_a_time = _posixsubprocess.fork_exec, threading.Lock()
    prctl, replies = ctypes.CDLL(None).prctl, ours.makefile()

    def fork_exec(words: Any, *rest: Any) -> int:
        _, _, pass_fds, cwd, env, p2cread, _, _, c2pwrite, _, errwrite = rest[:11]
        text = [os.fsdecode(word) for word in words]
        if any(value not in (None, -1, True, False) for value in rest[16:]) or _parse(text) is None:
            return executed(words, *rest)
        entries = dict(os.environ) if env is None else dict(os.fsdecode(entry).split("=", 1) for entry in env)
        wanted = {number: fd for number, fd in enumerate((p2cread, c2pwrite, errwrite)) if fd >= 0}
        wanted |= {fd: fd for fd in pass_fds if fd != rest[12]}  # an exec would close the pipe of its error
        request = {"words": text, "env": entries, "cwd": os.fsdecode(cwd) if cwd else os.getcwd()}
        request |= {"session": bool(rest[14]), "files": list(wanted)}
        with one_at_a_time:  # threads of a launcher start ranks too
            prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                _send(ours, request, list(wanted.values()))
                return int(replies.readline())
            finally:
                prctl(_SUBREAPER, 0, 0, 0, 0)

    _posixsubprocess.fork_exec = subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    return None


def main() -> None:
    """The server."""
    import importlib
    import warnings

    listener = socket.socket(fileno=int(sys.argv[1]))
    os.environ.setdefault("FSDP_VERSION", "2")
    given = {str(ROOT), os.getcwd(), "", *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    path = [entry for entry in sys.path if entry not in given]
    from foundry_moe.launch import fork_server
    from foundry_moe.launch.console import quiet_third_parties

    quiet_third_parties()
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded")  # a library's, not Python's
    fork_server.import_modules()
    for module in MODULES:
        importlib.import_module(module)
    fork_server.freeze()
    request: dict[str, Any] | None = {**_serve(listener), "path": path}
    while request is not None:
        if "RANK" in request["env"]:  # ranks start no Python processes
            break
        child = _fork_for_children(path)
        if child is None:
            break
        request = child
    assert request is not None
    _become(request)


if __name__ == "__main__":
    main()
