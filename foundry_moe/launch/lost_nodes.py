"""Heartbeats between the agents of a job on several nodes, through the store of their rendezvous.

Without them torchrun notices a lost node when a collective of its own processes fails. The operating system of a killed
process closes its connections at once; a node without power closes nothing, and all others wait for `dist_timeout`
(600 s in LLM Foundry). A node whose processes failed does not notify the others either: they would request a save from
healthy processes that wait for the failed ones, and wait for `elastic_checkpoint.grace`.

Each restart has a store of its own. This module must not know processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from foundry_moe.checkpoint.errors import printable

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

BEAT_S = 2.5
SILENT_S = 10.0  # four heartbeats; overridden by the environment variable NODE_SILENCE_S


def silent_s() -> float:
    """NODE_SILENCE_S of the environment, at least two heartbeats; the default where it is not a number."""
    try:
        return max(float(os.environ.get("NODE_SILENCE_S", SILENT_S)), 2 * BEAT_S)
    except ValueError:
        return SILENT_S


def beat() -> None:
    """Touches the file that HEARTBEAT of the environment names, which `docker/healthcheck.sh` reads."""
    if (path := os.environ.get("HEARTBEAT")) and os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            Path(path).touch()
        except OSError as error:
            _warn_once(f"HEARTBEAT ({path}) cannot be touched: {error.strerror}")


@cache
def _warn_once(sentence: str) -> None:
    log.warning("%s", sentence)


class NodeWatch:
    """One agent's heartbeats, and its view of the other nodes, until the next restart.

    A thread sends and reads them, whatever the agent waits for. Only this node's monotonic clock is used. Silence
    counts while the store answers: if this node could not read it for a while, the time of all others starts again.

    over: why the processes of all nodes are to restart, as a sentence; None while none is lost.
    """

    def __init__(self, store: Store, node: int, nodes: int, *, silent_s: float = SILENT_S, beat_s: float = BEAT_S):
        self.over: str | None = None
        self._store, self._node, self._silent_s, self._beat_s = store, node, silent_s, beat_s
        self._keys = [f"foundry_moe/beat/{number}" for number in range(nodes)]
        self._beats, self._looked_s = 0, time.monotonic()
        self._heard: list[tuple[bytes, float]] = [(b"", self._looked_s)] * nodes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the heartbeats in order: the other nodes do not take this one for lost."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(self._beat_s)  # otherwise its last heartbeat might overwrite "left"
        self._set(self._keys[self._node], "left")

    def report_failed(self) -> None:
        """Reports to the other nodes that processes of this one failed, so that theirs stop waiting."""
        self._set("foundry_moe/failed", str(self._node))

    def _set(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store may be lost
            self._store.set(key, value)

    def _run(self) -> None:
        while not self._ended.wait(self._beat_s / 5):
            try:
                if self._store.check(["foundry_moe/failed"]):
                    node = printable(self._store.get("foundry_moe/failed")[:8].decode(errors="replace"))
                    self.over = f"processes of node {node} failed"
                elif time.monotonic() - self._looked_s >= self._beat_s or not self._beats:
                    self.look()
            except RuntimeError:
                continue  # the store does not answer, which torchrun notices itself

    def look(self) -> None:
        """Sends a heartbeat and reads those of the others."""
        self._beats += 1
        self._store.set(self._keys[self._node], str(self._beats))
        if self._store.check(self._keys):
            beats = self._store.multi_get(self._keys)
        else:
            beats = [self._store.get(key) if self._store.check([key]) else b"" for key in self._keys]
        now = time.monotonic()
        if now - self._looked_s > 3 * self._beat_s:
            self._heard = [(beat, now) for beat in beats]
        self._looked_s = now
        for number, beat in enumerate(beats):
            if beat != self._heard[number][0]:
                self._heard[number] = (beat, now)
            silent = now - self._heard[number][1]
            if beat != b"left" and silent > self._silent_s:
                self.over = f"node {number} of {len(beats)} has been silent for {silent:.0f} s"
