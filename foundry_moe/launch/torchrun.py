"""`torchrun` that waits for the save of a stop, does not restart after a user's mistake, and notices silent nodes.

Usage: `python -m foundry_moe.launch.torchrun --nnodes ... SCRIPT ...`

**Stops.** torchrun passes a signal on, waits 30 s and exits with 1 and a traceback. This launcher waits for
`elastic_checkpoint.grace` and exits with 75. When a process fails, torchrun sends SIGTERM to the others, which requests
a save that they cannot complete without it: here they are killed.

**Mistakes.** A wrong checkpoint folder, or a checkpoint of another model, would fail again on every restart. The
processes exit with 2 then (`user_errors.run_cleanly`), and so does the launcher. This holds for the first start with
all nodes only: a configuration that has run was right, and a mesh that does not fit fewer nodes waits for the others. A
run whose values are not finite (exit code 3), or whose folder a newer process has taken over (4), is never restarted:
it would fail again, or stop the process that took over.

**Lost nodes.** The agents of several nodes exchange heartbeats (`lost_nodes`). When a node is silent, or its processes
failed, each agent kills its own processes, which wait for it, and all restart. The last call of a restart is shorter
than the first, because the nodes that are left join within seconds.

The private functions of torch that are replaced here are listed in `foundry_moe.launch`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from foundry_moe.launch.checkpoint_settings import RESTART
from foundry_moe.launch.ending import INTERRUPTED, SLACK_S, stop_settings
from foundry_moe.launch.fork_server import ForkServer, serves
from foundry_moe.launch.lost_nodes import LAST_CALL_S, NodeWatch, silent_s
from foundry_moe.launch.user_errors import NO_RESTART, USER_ERROR

SECOND_S = 1.0  # one Ctrl-C may arrive from the terminal and from a parent process
OF_TORCHRUN = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # its default for --signals-to-handle


def launch(arguments: list[str]) -> int:
    """Runs torchrun with these arguments.

    Returns:
        0; 2 for a user's mistake, 3 for values that are not finite, 4 for a folder that was taken over, 75 for a stop,
        130 after a second Ctrl-C.

    Raises:
        ChildFailedError: as torchrun does, after `--max-restarts` failures.
    """
    parsed = run.parse_args(arguments)
    config = stop_settings(parsed.training_script_args)
    if hasattr(parsed, "signals_to_handle") and not any(word.startswith("--signals") for word in arguments):
        arguments = [f"--signals-to-handle={','.join(dict.fromkeys((*OF_TORCHRUN, *config.signals)))}", *arguments]
    _, nodes = run.parse_min_max_nnodes(parsed.nnodes)
    final: list[int] = []
    watched = _watching_nodes() if nodes > 1 else contextlib.nullcontext()
    patches = _waiting(config.signals, config.grace_s + SLACK_S, final), watched, _ending_at_once(nodes, final)
    with contextlib.ExitStack() as stack:
        for patch in (*patches, _forking(parsed)):
            stack.enter_context(patch)
        try:
            run.main(arguments)
        except ChildFailedError as error:
            if final:
                return final[0]
            if any(failure.exitcode == RESTART for failure in error.failures.values()):
                return RESTART
            raise
        except SignalException as error:
            if error.sigval.name not in config.signals:
                raise
            return final[0] if final else RESTART
    return 0


@contextlib.contextmanager
def _forking(parsed: Any) -> Iterator[None]:
    """Takes processes from a fork server, if the training script has one."""
    if parsed.module or parsed.no_python or parsed.run_path or not serves(parsed.training_script):
        yield
        return
    several = run.determine_local_world_size(parsed.nproc_per_node) > 1
    threads = {"OMP_NUM_THREADS": "1"} if several else {}  # as torchrun sets it
    server = ForkServer([sys.executable, "-u", parsed.training_script, *parsed.training_script_args], threads)
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
        kind._popen = popen
        server.close()


@contextlib.contextmanager
def _ending_at_once(nodes: int, final: list[int]) -> Iterator[None]:
    """Appends to `final` the exit codes after which there is no restart, and prevents one."""
    kind: Any = LocalElasticAgent
    look = kind._monitor_workers

    def look_for_mistakes(agent: Any, role: str) -> Any:
        result, group = look(agent, role), agent.get_worker_group(role)
        codes = {failure.exitcode for failure in result.failures.values()}
        first_start = agent._remaining_restarts == group.spec.max_restarts
        if ended := [code for code in NO_RESTART if code in codes]:
            final.extend(ended)
        elif USER_ERROR in codes and first_start and group.group_world_size == nodes:
            final.append(USER_ERROR)
        if final:
            agent._remaining_restarts = 0
        return result

    kind._monitor_workers = look_for_mistakes
    try:
        yield
    finally:
        kind._monitor_workers = look


@contextlib.contextmanager
def _watching_nodes() -> Iterator[None]:
    """Kills processes that wait for a lost node; torchrun then sees them as failed and restarts."""
    kind: Any = LocalElasticAgent
    start, look, stop = kind._start_workers, kind._monitor_workers, kind._stop_workers
    watches: list[NodeWatch] = []  # one while processes run, if there are other nodes

    def leave() -> None:
        while watches:
            watches.pop().stop()

    def start_and_watch(agent: Any, group: Any) -> Any:
        _shorten_last_call(group.spec.rdzv_handler)
        if group.group_world_size > 1:
            watches.append(NodeWatch(group.store, group.group_rank, group.group_world_size, silent_s=silent_s()))
            watches[-1].start()
        return start(agent, group)

    def look_at_nodes(agent: Any, role: Any) -> Any:
        result = look(agent, role)
        codes = {failure.exitcode for failure in result.failures.values()}
        if result.state == WorkerState.SUCCEEDED:
            leave()  # this agent waits for the others to succeed, and sends no more heartbeats
        for watch in list(watches):
            if codes - {RESTART} and not codes & {USER_ERROR, *NO_RESTART}:
                watch.report_failed()
            elif result.state == WorkerState.HEALTHY and watch.over:
                print(f"torchrun: {watch.over}; restarting", file=sys.stderr, flush=True)
                watch.report_failed()
                leave()
                for process in agent._pcontext.pids().values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
        return result

    def stop_watching(agent: Any, *keys: Any, **more: Any) -> Any:
        leave()
        return stop(agent, *keys, **more)

    kind._start_workers, kind._monitor_workers, kind._stop_workers = start_and_watch, look_at_nodes, stop_watching
    try:
        yield
    finally:
        leave()
        kind._start_workers, kind._monitor_workers, kind._stop_workers = start, look, stop


def _shorten_last_call(handler: Any) -> None:
    """For the next rendezvous: the nodes that are left join at once, and no others are expected."""
    timeout: Any = getattr(getattr(handler, "_settings", None), "timeout", None)
    if getattr(timeout, "_last_call", None) is not None:
        timeout._last_call = min(timeout._last_call, datetime.timedelta(seconds=LAST_CALL_S))


@contextlib.contextmanager
def _waiting(names: tuple[str, ...], wait_s: float, final: list[int]) -> Iterator[None]:
    """Gives processes that were asked to stop `wait_s` for it, and no time to those whose peer has failed.

    A second SIGINT kills them and appends its exit code to `final`.
    """
    agent_kind: Any = LocalElasticAgent
    processes_kind: Any = SubprocessContext
    shut_down, close = agent_kind._shutdown, processes_kind.close

    @functools.wraps(shut_down)
    def shut_down_once(agent: Any, *keys: Any, **more: Any) -> None:
        if isinstance(sys.exc_info()[1], SignalException):
            asked_s = time.monotonic()

            def interrupt(number: int, frame: FrameType | None) -> None:
                if time.monotonic() - asked_s > SECOND_S:
                    final.append(INTERRUPTED)
                    for process in agent._pcontext.pids().values():
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(process, signal.SIGKILL)  # torchrun starts each rank in a session of its own

            for name in names:  # with torch's handler a second signal ends the wait and leaves processes behind
                signal.signal(signal.Signals[name], signal.SIG_IGN)
            signal.signal(signal.SIGINT, interrupt)
        shut_down(agent, *keys, **more)

    @functools.wraps(close)
    def close_in_time(processes: Any, death_sig: signal.Signals | None = None, timeout: float = 0) -> None:
        codes = {failure.exitcode for failure in processes._failures.values()}
        if death_sig is None and codes - {RESTART}:
            death_sig = signal.SIGKILL
        close(processes, death_sig, timeout or wait_s)

    agent_kind._shutdown, processes_kind.close = shut_down_once, close_in_time
    try:
        yield
    finally:
        agent_kind._shutdown, processes_kind.close = shut_down, close


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
