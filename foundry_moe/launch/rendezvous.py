"""The rendezvous of several nodes (`--rdzv-backend foundry`), whose store may restart, and a server of that store.

`python -m foundry_moe.launch.rendezvous [PORT]` serves it from a machine that has no part in the run (`STORE` of
`docker/entrypoint.sh`); on node 0, where torchrun starts it otherwise, it ends with that node. It holds some kilobytes
per node and needs one core. With torch's backend, "c10d", all agents end within seconds of the store. Here they connect
again, and the first of them restores the state of the rendezvous; training continues meanwhile. On one
machine (`store_type=hash` of `--rdzv-conf`) the agent keeps the state in its own memory, and the store of its processes
listens on 127.0.0.1 only. The state is signed JSON (`rendezvous_state`). This module uses torch's interface for
other backends, and replaces nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from foundry_moe.launch.network import LOOPBACK, local_store
from foundry_moe.launch.rendezvous_state import decode, encode, shared_token

NAME = "foundry"
PORT = 29500
OUTAGE_S = 300.0  # how long agents wait for their store before they end and their cluster starts them again
RETRY_S = 0.5
STOPS = (signal.SIGTERM, signal.SIGINT)


class _Client(Store):
    """A client of the store that can be replaced; torch's code keeps this object."""

    client: Store


for _name in ("set", "get", "add", "check", "wait", "compare_set", "multi_get"):
    setattr(_Client, _name, lambda self, *arguments, name=_name: getattr(self.client, name)(*arguments))


class RestartableBackend(RendezvousBackend):
    """torch's backend on a store that may restart without its contents.

    wait_s: how long to wait for the store.
    """

    name = NAME

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.wait_s = OUTAGE_S
        self.store = _Client()
        self._parameters = parameters
        self._key = hmac.digest(shared_token(), parameters.run_id.encode(), hashlib.sha256)
        self._state = b""  # the newest that is known, as it is stored
        self._connect()

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._ask(lambda: self._backend.get_state())
        return found and (self._for_torch(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        stored = encode(pickle.loads(state), self._key)  # which torch's handler has pickled in this process
        found = self._ask(lambda: self._backend.set_state(stored, token))
        return found and (self._for_torch(found[0]), *found[1:])

    def _for_torch(self, stored: bytes) -> bytes:
        state = pickle.dumps(decode(stored, self._key))  # which torch's handler unpickles in the same call
        self._state = stored
        return state

    def _ask(self, request: Callable[[], Any]) -> Any:
        lost_s: float | None = None
        while True:
            try:
                if lost_s is not None:
                    self._reconnect()
                found = request()
            except RendezvousConnectionError:
                lost_s = lost_s or time.monotonic()
                if time.monotonic() - lost_s > self.wait_s:
                    raise
                time.sleep(RETRY_S)
            else:
                return found

    def _connect(self) -> None:
        self.store.client = HashStore() if is_local(self._parameters) else create_backend(self._parameters)[1]
        self._backend = C10dRendezvousBackend(self.store, self._parameters.run_id)

    def _reconnect(self) -> None:
        address = parse_rendezvous_endpoint(self._parameters.endpoint, default_port=PORT)
        try:  # torch would retry for a minute, and print each try
            socket.create_connection(address, timeout=RETRY_S).close()
        except OSError as error:
            raise RendezvousConnectionError(f"the store at {self._parameters.endpoint} does not answer") from error
        self._connect()
        if self._state and self._backend.get_state() is None:
            self._backend.set_state(self._all_alive())

    def _all_alive(self) -> bytes:
        """The state with a new heartbeat for each node: no node could send one while the store was down."""
        state = decode(self._state, self._key)
        now = datetime.now(timezone.utc)
        for node, beat in state.last_heartbeats.items():  # torch 2.7 has times without a zone
            state.last_heartbeats[node] = now if beat.tzinfo else now.replace(tzinfo=None)
        return encode(state, self._key)


def is_local(parameters: RendezvousParameters) -> bool:
    """Whether the run has one agent, so that no other process needs its state."""
    return parameters.get("store_type") == "hash"


class _Timeouts(RendezvousTimeout):
    """`last_call_timeout` of `--rdzv-conf` applies to the first start; after it no more nodes are expected."""

    nodes, restarting = 1, False

    @property
    def last_call(self) -> timedelta:
        first = super().last_call
        # nodes look once per second and join one after the other; one that is late makes all restart again
        return min(first, timedelta(seconds=1.5 + self.nodes / 100)) if self.restarting else first


class _Handler(DynamicRendezvousHandler):
    backend: RestartableBackend
    timeouts: _Timeouts
    local = False
    _of_processes: TCPStore | None = None  # the store of the processes of this round, if they are all here

    @property
    def use_agent_store(self) -> bool:
        """Whether rank 0 connects to a store of the agent in place of serving one."""
        return self.local or super().use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        found = super().next_rendezvous()
        self.timeouts.restarting = True
        if not self.local:
            return found
        self._of_processes = local_store()  # a new one for each round: the last one's has addresses of ended processes
        info = RendezvousStoreInfo(LOOPBACK, self._of_processes.port)
        return RendezvousInfo(found.store, found.rank, found.world_size, info)

    def shutdown(self) -> bool:
        self.backend.wait_s = 0.0  # the store may have ended with the run
        return super().shutdown()


def create_handler(parameters: RendezvousParameters) -> _Handler:
    """Makes torchrun's rendezvous of these parameters, with the keys of "c10d"."""
    backend = RestartableBackend(parameters)
    seconds = [parameters.get_as_int(f"{key}_timeout") for key in ("join", "last_call", "close", "heartbeat")]
    timeouts = _Timeouts(*(None if value is None else timedelta(seconds=value) for value in seconds))
    timeouts.nodes = parameters.max_nodes
    handler: _Handler = _Handler.from_backend(
        parameters.run_id,
        backend.store,
        backend,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        timeouts,
        keep_alive_interval=parameters.get_as_int("keep_alive_interval", 5) or 5,
        keep_alive_max_attempt=parameters.get_as_int("keep_alive_max_attempt", 3) or 3,
    )
    handler.backend, handler.timeouts, handler.local = backend, timeouts, is_local(parameters)
    return handler


def register() -> None:
    """Makes the backend known to torchrun in this process."""
    rendezvous_handler_registry.register(NAME, create_handler)


def serve(port: int) -> None:
    """Serves the store until SIGTERM or SIGINT."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # before the store starts its threads
    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, multi_tenant=True)
    print(f"store: serving port {store.port}", flush=True)
    signal.sigwait(STOPS)


if __name__ == "__main__":
    serve(int(sys.argv[1]) if len(sys.argv) > 1 else PORT)
