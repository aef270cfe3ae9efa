"""Agents of a job on several nodes tell each other that they are alive, and that a life of the job is over.

torchrun alone learns of a lost node from its own processes, when a collective fails. The system of a process that was
killed closes its connections, and that is quick; a node without power closes nothing, and all others wait for it until
`dist_timeout` (600 s in LLM Foundry). Nor does a node whose processes failed tell the others: they ask healthy
processes, which wait for the failed ones, for a save, and wait for that until `elastic_checkpoint.grace`.

Knows the store of a rendezvous, which is another in each life, and no processes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Protocol

BEAT_S = 5.0
LAST_CALL_S = 10.0  # of restarts: how long the nodes that are there wait for others
SILENT_S = 30.0  # six beats; the environment's NODE_SILENCE_S instead


class _Store(Protocol):
    """What is used of torch's `Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


def silent_s() -> float:
    """The environment's NODE_SILENCE_S, or the default where it is no number above two beats."""
    try:
        return max(float(os.environ.get("NODE_SILENCE_S", SILENT_S)), 2 * BEAT_S)
    except ValueError:
        return SILENT_S


class NodeWatch:
    """One agent's view of the nodes of one life. A thread of its own beats and looks, whatever the agent waits for.

    Only this node's monotonic clock counts. Silence is counted while the store answers: if this node could not look for
    a while, all others have their time anew.
    """

    def __init__(self, store: _Store, node: int, nodes: int, *, silent_s: float = SILENT_S, beat_s: float = BEAT_S):
        self.over: str | None = None  # a sentence: why this life is over
        self._store, self._node, self._silent_s, self._beat_s = store, node, silent_s, beat_s
        self._keys = [f"foundry_moe/beat/{number}" for number in range(nodes)]
        self._beats, self._looked_s = 0, time.monotonic()
        self._heard: list[tuple[bytes, float]] = [(b"", self._looked_s)] * nodes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """This life is over here, or the agent leaves in order: nobody takes it for lost."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(self._beat_s)  # lest its last beat come after this word
        self._tell(self._keys[self._node], "left")

    def tell_failed(self) -> None:
        """This node's processes failed: the others' wait for nothing."""
        self._tell("foundry_moe/failed", str(self._node))

    def _tell(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):  # of torch's store: node 0 is gone
            self._store.set(key, value)

    def _run(self) -> None:
        while not self._ended.wait(self._beat_s / 5):
            try:
                if self._store.check(["foundry_moe/failed"]):
                    self.over = f"processes of node {self._store.get('foundry_moe/failed').decode()} failed"
                elif time.monotonic() - self._looked_s >= self._beat_s or not self._beats:
                    self.look()
            except RuntimeError:
                continue  # the store does not answer: for torchrun to notice

    def look(self) -> None:
        """Beats, and hears the others."""
        self._beats += 1
        self._store.set(self._keys[self._node], str(self._beats))
        if self._store.check(self._keys):
            said = self._store.multi_get(self._keys)
        else:
            said = [self._store.get(key) if self._store.check([key]) else b"" for key in self._keys]
        now = time.monotonic()
        if now - self._looked_s > 3 * self._beat_s:
            self._heard = [(beat, now) for beat in said]
        self._looked_s = now
        for number, beat in enumerate(said):
            if beat != self._heard[number][0]:
                self._heard[number] = (beat, now)
            silent = now - self._heard[number][1]
            if beat != b"left" and number != self._node and silent > self._silent_s:
                self.over = f"node {number} of {len(said)} has been silent for {silent:.0f} s"
