"""Forks training processes from a server that has done their imports, which would take each of them 10 to 30 s.

`launch.torchrun` starts the training script once more as a server, during the rendezvous. The server imports and waits;
for each process of each start it forks one, which continues the script where the server stopped. The process becomes
the launcher's own child, in a session of its own, as if the launcher had started it. Where no server runs, or it has
ended, the launcher starts processes as torchrun does. This module must not know torch's launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from foundry_moe.launch.console import quiet_third_parties
from foundry_moe.launch.ending import LAUNCHER, heeded

SERVER = "FOUNDRY_MOE_FORK_SERVER"  # names the server's socket in its environment; 0 in a launcher's: no server
# modules that a training process imports before its first batch, some of them only at their first use;
# after a colon: a cached function that the server calls, because its first call takes a second
MODULES = (
    "llmfoundry.command_utils",
    "foundry_moe.registry",
    "foundry_moe.launch.foundry_keys:installed_names",
    "composer.utils.collect_env:get_cpu_model",
)
PARENT_S = 5.0
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl


def serve() -> None:
    """In the server, imports modules and finally exits; returns in each forked process. Elsewhere, has no effect."""
    number = os.environ.pop(SERVER, None)
    if number is None or number == "0":
        return
    launcher = os.getppid()
    requests = socket.socket(fileno=int(number))
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # with the launcher, also during the imports
    if os.environ.get(LAUNCHER) not in (None, str(launcher)):
        os._exit(0)  # the launcher has ended before
    os.environ.setdefault("FSDP_VERSION", "2")
    quiet_third_parties()
    # without NVML, `torch.cuda.is_available` starts CUDA, and processes forked from this one could not use it
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import_modules()
    if _cuda_is_open():
        print("fork server: an import has started CUDA; processes start without it", file=sys.stderr, flush=True)
        os._exit(0)
    freeze()
    while True:
        with requests.makefile() as lines:
            request = lines.readline()
        if not request.endswith("\n"):
            os._exit(0)  # the launcher has ended
        between = os.fork()
        if between:
            os.waitpid(between, 0)  # when it ends, the launcher adopts its child
            continue
        if os.fork():
            os._exit(0)
        child = _become(json.loads(request), launcher)
        requests.sendall(f"{os.getpid() if child else 0}\n".encode())
        if not child:
            os._exit(1)
        requests.close()
        return


def import_modules() -> None:
    """Imports `MODULES` and calls their functions."""
    for module, _, function in (entry.partition(":") for entry in MODULES):
        with contextlib.suppress(Exception):  # each process reports it
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()


def freeze() -> None:
    """Collections in the forked processes skip what exists now, and do not copy its memory."""
    gc.collect()
    gc.freeze()


def _become(request: Mapping[str, str], launcher: int) -> bool:
    """Gives this process the environment and session of one that the launcher starts; False if it is not its child."""
    deadline = time.monotonic() + PARENT_S
    while os.getppid() != launcher:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    os.setsid()
    for number in heeded(_SIGNALS):  # which imports may have changed
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request)
    return True


def _cuda_is_open() -> bool:
    files = (os.path.realpath(path) for path in Path("/proc/self/fd").iterdir())
    return any(file.startswith("/dev/nvidia") for file in files)


class Forked:
    """The part of `subprocess.Popen` that torchrun uses, for a child that this process has not started itself."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid, self.args = pid, args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(0.01)
        return code


class ForkServer:
    """A launcher's side.

    command: that of the training processes: python, script and arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, SERVER: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(self, environment: Mapping[str, str]) -> Forked | None:
        """A new process with this environment; None if the server has ended."""
        if self._process.poll() is not None:
            return None
        libc = ctypes.CDLL(None)
        libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # for this moment: orphans of lost processes go to the init process
        try:
            self._connection.sendall(json.dumps(dict(environment)).encode() + b"\n")
            pid = int(self._connection.makefile().readline() or 0)
        except OSError:
            return None
        finally:
            libc.prctl(_SUBREAPER, 0, 0, 0, 0)
        return Forked(pid, self.command) if pid else None

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


def serves(script: str) -> bool:
    """Whether a script calls `serve`, and this machine and user allow it."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return os.environ.get(SERVER) != "0" and sys.platform == "linux" and "fork_server" in Path(script).read_text()
    return False
