"""`torchrun` that waits for the save of a stop, does not restart after a user's mistake, and notices silent nodes.

Usage: `python -m foundry_moe.launch.torchrun --nnodes ... SCRIPT ...`; `foundry-moe train` calls `launch_here`.

**Stops.** torchrun passes a signal on, waits 30 s and exits with 1 and a traceback. This launcher waits for
`elastic_checkpoint.grace` and exits with 75. When a process fails, torchrun sends SIGTERM to the others, which requests
a save that they cannot complete without it: here they are killed.

**Mistakes.** A wrong checkpoint folder, or a checkpoint of another model, would fail again on every restart. The
processes exit with 2 then (`user_errors.run_cleanly`), and so does the launcher. This holds for the first start with
all nodes only: a configuration that has run is valid, and a mesh that does not fit fewer nodes waits for the others. A
run whose values are not finite (exit code 3), or whose folder a newer process has taken over (4), is never restarted:
it would fail again, or stop the process that took over.

**Lost nodes.** The agents of several nodes exchange heartbeats (`lost_nodes`). When a node is silent, or its processes
failed, each agent kills its own processes, which wait for it, and all restart. `--rdzv-backend foundry` (`rendezvous`)
waits for fewer seconds for other nodes in a restart, and outlives a restart of its store.

docs/explanation/design.md lists the private functions of torch that are replaced here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.launcher import api

from foundry_moe.launch import rendezvous
from foundry_moe.launch.checkpoint_settings import RESTART, CheckpointConfig
from foundry_moe.launch.ending import (
    DEFAULTS,
    INTERRUPTED,
    LAUNCHER,
    SECOND_S,
    SLACK_S,
    exit_on,
    heeded,
    let_go,
    stop_settings,
    stopped_early,
)
from foundry_moe.launch.failures import keep_logs, print_cause
from foundry_moe.launch.fork_server import SERVER, ForkServer, serves
from foundry_moe.launch.lost_nodes import NodeWatch, silent_s
from foundry_moe.launch.network import LOOPBACK
from foundry_moe.launch.processes import settle
from foundry_moe.launch.user_errors import NO_RESTART, PASSING_ERROR, USER_ERROR, run_cleanly

CUT_SHORT = "Ended by a second SIGINT before the save was complete: the next start resumes the newest checkpoint."
OF_TORCHRUN = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # its default for --signals-to-handle


class Agent(LocalElasticAgent):
    """torchrun's agent of one node.

    signals, wait_s: those that stop the run, and how long its processes may take to save then.
    nodes: of the first start, with all of them.
    final: the exit code after which there is no restart; None while there is none.
    """

    signals: tuple[str, ...] = ()
    wait_s = 0.0
    nodes = 1
    final: int | None = None  # on the class, because torchrun does not expose its agent
    first: ClassVar[dict[int, int]] = {}  # exit codes of the local ranks that ended before the others were killed
    last: ClassVar[dict[int, int]] = {}  # exit codes of all local ranks
    _watch: NodeWatch | None = None  # while processes run, if there are other nodes

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        number, nodes = worker_group.group_rank, worker_group.group_world_size
        if nodes > 1:
            self._watch = NodeWatch(worker_group.store, number, nodes, silent_s=silent_s())
            self._watch.start()
        _raise_signals(self.signals)  # processes must end too now
        hang_up = signal.getsignal(signal.SIGHUP)
        started = super()._start_workers(worker_group)
        if hang_up == signal.SIG_IGN:  # by `nohup`; torch 2.7 handles SIGHUP all the same
            signal.signal(signal.SIGHUP, hang_up)
        processes: Any = self._pcontext
        close = processes.close

        def close_in_time(death_sig: signal.Signals | None = None, timeout: float = 0) -> None:
            ended = {rank: failure.exitcode for rank, failure in processes._failures.items()}
            Agent.first = Agent.first or ended  # the next call has those that this one kills
            codes = set(ended.values())
            if death_sig is None and codes - {RESTART}:
                if codes & {USER_ERROR, *NO_RESTART}:
                    # all ranks have this error, and rank 0 prints it
                    settle(lambda: any(h.proc.poll() is None for h in processes.subprocess_handlers.values()))
                death_sig = signal.SIGKILL  # they cannot save without the one that failed
            close(death_sig, timeout or self.wait_s)
            Agent.last = {rank: handler.proc.poll() for rank, handler in processes.subprocess_handlers.items()}

        processes.close = close_in_time
        return started

    def _stop_workers(self, *keys: Any, **more: Any) -> None:
        self._leave()
        super()._stop_workers(*keys, **more)

    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()}
        self._look_at_nodes(result.state, codes)
        first_start = self._remaining_restarts == worker_group.spec.max_restarts
        final = [code for code in NO_RESTART if code in codes]
        if USER_ERROR in codes and first_start and worker_group.group_world_size == self.nodes:
            final.append(USER_ERROR)
        if final:
            Agent.final = final[0]
            self._remaining_restarts = 0
        return result

    def _look_at_nodes(self, state: WorkerState, codes: set[int]) -> None:
        """Kills processes that wait for a lost node; torchrun then sees them as failed and restarts."""
        if self._watch is None:
            return
        if state == WorkerState.SUCCEEDED:
            self._leave()  # this agent waits for the others to succeed, and sends no more heartbeats
        elif codes - {RESTART} and not codes & {USER_ERROR, *NO_RESTART}:
            self._watch.report_failed()
        elif state == WorkerState.HEALTHY and self._watch.over:
            print(f"torchrun: {self._watch.over}; restarting", file=sys.stderr, flush=True)
            self._watch.report_failed()
            self._leave()
            self._kill(os.kill)

    def _kill(self, kill: Any) -> None:
        assert self._pcontext is not None
        for process in self._pcontext.pids().values():
            with contextlib.suppress(ProcessLookupError):
                kill(process, signal.SIGKILL)

    def _shutdown(self, *keys: Any, **more: Any) -> None:
        """After a signal, a second one does not shorten the wait for the save; a second SIGINT ends the processes."""
        if isinstance(sys.exc_info()[1], SignalException):
            asked_s = time.monotonic()

            def interrupt(number: int, frame: FrameType | None) -> None:
                if time.monotonic() - asked_s > SECOND_S:
                    Agent.final = INTERRUPTED
                    self._kill(os.killpg)  # torchrun starts each rank in a session of its own

            for name in self.signals:  # with torch's handler a second signal ends the wait and leaves processes behind
                signal.signal(signal.Signals[name], signal.SIG_IGN)
            signal.signal(signal.SIGINT, interrupt)
        super()._shutdown(*keys, **more)


def launch(arguments: list[str], logs: Path | None = None) -> int:
    """Runs torchrun with these arguments.

    Args:
        logs: the folder of the ranks' output; see `launch_here`.

    Returns:
        0; 2 for a user's mistake, 3 for values that are not finite, 4 for a folder that was taken over, 75 for a stop,
        130 after a second Ctrl-C.

    Raises:
        ChildFailedError: as torchrun does, after `--max-restarts` failures.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's value for several processes, here for one too
    os.environ[LAUNCHER] = str(os.getpid())
    rendezvous.register()
    parsed = run.parse_args(arguments)
    config = stop_settings(parsed.training_script_args)
    exit_on(config.signals)  # until processes start, also while torch waits for a store
    if hasattr(parsed, "signals_to_handle") and not any(word.startswith("--signals") for word in arguments):
        parsed.signals_to_handle = ",".join(dict.fromkeys(n.name for n in heeded((*OF_TORCHRUN, *config.signals))))
    Agent.signals, Agent.wait_s = config.signals, config.grace_s + SLACK_S
    api.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        if parsed.standalone:
            _stay_here(parsed)
        Agent.nodes = run.parse_min_max_nnodes(parsed.nnodes)[1]
        with _forking(parsed):
            record(run.run)(parsed)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        stopped = RESTART in codes if logs is None else _print_failure(error, logs, config)
        if Agent.final is not None:
            return Agent.final
        if stopped:
            return RESTART
        if logs is None:
            raise
        return PASSING_ERROR
    except RendezvousStateError as error:
        print(f"error: {error}", file=sys.stderr)
        return PASSING_ERROR
    except SignalException as error:
        if error.sigval.name not in config.signals:
            raise
        let_go(error.sigval)
        if Agent.final == INTERRUPTED:
            print(CUT_SHORT, file=sys.stderr)
        elif Agent.last.get(0, -error.sigval) == -error.sigval:  # rank 0 did not handle it, and has printed nothing
            print(stopped_early(error.sigval), file=sys.stderr)
        return RESTART if Agent.final is None else Agent.final
    return 0


def _raise_signals(names: Sequence[str]) -> None:
    """Signals raise as in torch's handlers, which replace these when processes start; `exit_on` has no effect."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise SignalException("", signal.Signals(number))

    for number in heeded(names):
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)


def _stay_here(parsed: Any) -> None:
    """`--standalone` with a store that listens on 127.0.0.1 only, in place of torch's."""
    _raise_signals(Agent.signals)  # nothing here waits for a store, and this removes the folder of logs
    parsed.standalone, parsed.nnodes = False, "1:1"  # whatever PET_NNODES says
    parsed.rdzv_backend, parsed.rdzv_conf = rendezvous.NAME, "store_type=hash"
    parsed.rdzv_id, parsed.rdzv_endpoint, parsed.local_addr = str(uuid.uuid4()), "localhost:0", LOOPBACK
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # torch's agent would serve one on all interfaces


def launch_here(processes: int, words: list[str]) -> int:
    """Runs a script with its arguments in processes of this machine. The console shows rank 0.

    Returns:
        As `launch`; 1 where that raises, after the first error that is no lost connection.
    """
    os.environ.setdefault(SERVER, "0")  # no restarts here, so no fork server
    logging.disable(logging.ERROR)  # torchrun's own lines about signals and exit codes
    with tempfile.TemporaryDirectory(prefix="foundry-moe-") as logs:
        others = ",".join(f"{rank}:3" for rank in range(1, processes)) or "0"  # both streams of each go to files
        options = ["--standalone", f"--nproc-per-node={processes}", "--max-restarts=0"]
        return launch([*options, f"--log-dir={logs}", f"--redirects={others}", *words], Path(logs))


def _print_failure(error: ChildFailedError, logs: Path, config: CheckpointConfig) -> bool:
    """Prints the part of a failure on this machine that rank 0 has not printed; returns whether it is a stop."""
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    stops = {-signal.Signals[name] for name in config.signals}
    early = stops & set(codes.values())  # before they could handle the signal
    if early and codes.get(0) != RESTART:
        print(stopped_early(-min(early)), file=sys.stderr)
    if early or (RESTART in codes.values() and Agent.final is None):
        return True
    if codes.get(0) not in (USER_ERROR, *NO_RESTART):  # which rank 0 has printed
        print_cause(Agent.first, logs)
        keep_logs(Agent.first, logs, log_folder(config))
    return False


def log_folder(config: CheckpointConfig) -> Path:
    """Where the output of failed ranks is kept: beside a local checkpoint folder, else in the working directory."""
    folder = config.folder.removeprefix("file://")
    local = config is not DEFAULTS and "://" not in folder
    return Path(folder).expanduser().parent if local else Path()


@contextlib.contextmanager
def _forking(parsed: Any) -> Iterator[None]:
    """Takes processes from a fork server, if the training script has one."""
    if parsed.module or parsed.no_python or parsed.run_path or not serves(parsed.training_script):
        yield
        return
    server = ForkServer([sys.executable, "-u", parsed.training_script, *parsed.training_script_args])
    kind: Any = SubprocessHandler
    popen = kind._popen

    def fork(handler: Any, words: tuple[str, ...], environment: dict[str, str]) -> Any:
        redirected = handler._stdout or handler._stderr
        forked = server.start(environment) if list(words) == server.command and not redirected else None
        return forked or popen(handler, words, environment)

    kind._popen = fork
    try:
        yield
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(run_cleanly(lambda: launch(sys.argv[1:])))
