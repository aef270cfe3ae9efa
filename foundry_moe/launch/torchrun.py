"""`torchrun`, but a stop is waited for, what starting anew does not mend ends the job at once, and a node that was lost
without a word is noticed.

Usage: `python -m foundry_moe.launch.torchrun --nnodes ... SCRIPT ...`

**Stops.** On a signal torchrun passes it on, waits 30 s and exits with 1 and a stack of frames. This one waits for
`elastic_checkpoint.grace` and exits with 75. When a process fails, torchrun sends the others SIGTERM, which asks them
for a save that they cannot make without it: here they are killed.

**Mistakes.** A wrong checkpoint folder, or a checkpoint of another model, would stay wrong as often as torchrun starts
the processes anew. They exit with 2 then (`errors.run_cleanly`), and so does this. Only in the first life, with all
nodes there: what has run before was right, and a mesh that does not fit fewer nodes waits for the others. A run whose
numbers are not finite (exit code 3), or whose folder a newer process has taken over (4), is not started anew in any
life: the restart would take it back.

**Lost nodes.** Agents of several nodes watch each other (`lost_nodes`). When one is silent, or its processes failed,
each kills its own, which wait for it, and all start anew. The last call of a restart is shorter than the first: nodes
that are left come to it within seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from foundry_moe.checkpoint.settings import RESTART
from foundry_moe.launch.lost_nodes import LAST_CALL_S, NodeWatch, silent_s
from foundry_moe.launch.stop_settings import SLACK_S, stop_settings
from foundry_moe.launch.user_errors import NO_OTHER_LIFE, USER_ERROR

OF_TORCHRUN = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # that it handles without being asked


def launch(arguments: list[str]) -> int:
    """Runs torchrun with these arguments; 0, 2 for a user's mistake, 3 for numbers that are not finite, 4 for a folder
    that was taken over, 75 for a stop.

    Raises:
        ChildFailedError: as torchrun does, where processes failed as often as they may.
    """
    parsed = run.parse_args(arguments)
    config = stop_settings(parsed.training_script_args)
    if hasattr(parsed, "signals_to_handle") and not any(word.startswith("--signals") for word in arguments):
        arguments = [f"--signals-to-handle={','.join(dict.fromkeys((*OF_TORCHRUN, *config.signals)))}", *arguments]
    _, nodes = run.parse_min_max_nnodes(parsed.nnodes)
    final: list[int] = []
    watched = _watching_nodes() if nodes > 1 else contextlib.nullcontext()
    with _waiting(config.signals, config.grace_s + SLACK_S), watched, _ending_at_once(nodes, final):
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
            return RESTART
    return 0


@contextlib.contextmanager
def _ending_at_once(nodes: int, final: list[int]) -> Iterator[None]:
    """Appends to `final` the exit codes after which there is no other life, and lets there be none."""
    kind: Any = LocalElasticAgent  # torchrun takes no other class, so this one looks twice
    look = kind._monitor_workers

    def look_for_mistakes(agent: Any, role: str) -> Any:
        result, group = look(agent, role), agent.get_worker_group(role)
        codes = {failure.exitcode for failure in result.failures.values()}
        first_life = agent._remaining_restarts == group.spec.max_restarts
        if ended := [code for code in NO_OTHER_LIFE if code in codes]:
            final.extend(ended)
        elif USER_ERROR in codes and first_life and group.group_world_size == nodes:
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
    """Ends processes that wait for a node which is lost; they have failed then."""
    kind: Any = LocalElasticAgent
    start, look, stop = kind._start_workers, kind._monitor_workers, kind._stop_workers
    watches: list[NodeWatch] = []  # of this life, if there are other nodes

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
            leave()  # waiting for the others to succeed keeps the store's connection
        for watch in list(watches):
            if codes - {RESTART} and not codes & {USER_ERROR, *NO_OTHER_LIFE}:
                watch.tell_failed()
            elif result.state == WorkerState.HEALTHY and watch.over:
                print(f"torchrun: {watch.over}; starting anew", file=sys.stderr, flush=True)
                watch.tell_failed()
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
    """For the rendezvous to come: those that are left take part in it at once, and nobody else is expected."""
    timeout: Any = getattr(getattr(handler, "_settings", None), "timeout", None)
    if getattr(timeout, "_last_call", None) is not None:
        timeout._last_call = min(timeout._last_call, datetime.timedelta(seconds=LAST_CALL_S))


@contextlib.contextmanager
def _waiting(names: tuple[str, ...], wait_s: float) -> Iterator[None]:
    """Gives processes that were asked to stop `wait_s` to do so, and none to those whose peer has failed."""
    agent_kind: Any = LocalElasticAgent
    processes_kind: Any = SubprocessContext
    shut_down, close = agent_kind._shutdown, processes_kind.close

    @functools.wraps(shut_down)
    def shut_down_once(agent: Any, *keys: Any, **more: Any) -> None:
        if isinstance(sys.exc_info()[1], SignalException):  # one more would end the wait, and leave processes behind
            for name in names:
                signal.signal(signal.Signals[name], signal.SIG_IGN)
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
