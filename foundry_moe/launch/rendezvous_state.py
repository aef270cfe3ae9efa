"""The state of a rendezvous as signed JSON, in place of the pickle that torch's handler exchanges with its backend.

Whoever reaches a store can write to it, so no bytes from a store are unpickled: `decode` builds torch's state from
checked values. This module must not know stores.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from foundry_moe.checkpoint.errors import DamagedError
from foundry_moe.checkpoint.strict import fail, integer, mapping, parse_json, sequence, text
from foundry_moe.schema import UserError

TOKEN, TOKEN_FILE = "FOUNDRY_MOE_TOKEN", "FOUNDRY_MOE_TOKEN_FILE"
STATE_BYTES = 2**24  # 100 bytes per node
_WHERE = "the state of the rendezvous"


def shared_token() -> bytes:
    """The token that all nodes share, from the environment or the file that it names; empty without one."""
    path = os.environ.get(TOKEN_FILE)
    if not path:
        return os.environ.get(TOKEN, "").encode()
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise UserError(f"{TOKEN_FILE} ({path}) cannot be read: {error.strerror}") from error
    if not token:
        raise UserError(f"{TOKEN_FILE} ({path}) is empty: write the token that all nodes share into it")
    return token


def encode(state: _RendezvousState, key: bytes) -> bytes:
    """The state as JSON with a signature. key: from the token and the run's name."""
    nodes = {*state.participants, *state.wait_list, *state.redundancy_list, *state.last_heartbeats}
    beats = {node: beat.isoformat() for node, beat in state.last_heartbeats.items()}
    values = {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "deadline": state.deadline.isoformat() if state.deadline else None,
        "nodes": [
            [
                *(node.addr, node.pid, node.local_id, state.participants.get(node)),
                *(node in state.wait_list, node in state.redundancy_list, beats.get(node)),
            ]
            for node in sorted(nodes)
        ],
    }
    content = json.dumps(values)
    return json.dumps({"state": content, "signature": _signature(content, key)}).encode()


def decode(stored: bytes, key: bytes) -> _RendezvousState:
    """The state in bytes from a store; raises RendezvousStateError unless `encode` writes them with this key."""
    try:
        if len(stored) > STATE_BYTES:
            fail(_WHERE, f"{len(stored)} bytes", f"at most {STATE_BYTES}")
        signed = mapping(parse_json(stored, _WHERE), _WHERE, ("state", "signature"))
        content = text(signed["state"], _WHERE, most=STATE_BYTES)
        signature = text(signed["signature"], "the signature of the rendezvous")
        if not hmac.compare_digest(signature.encode(), _signature(content, key).encode()):
            raise DamagedError(f"{_WHERE} is not signed with this node's token: give all nodes the same {TOKEN}")
        return _checked(parse_json(content.encode(), _WHERE))
    except DamagedError as error:
        raise RendezvousStateError(f"{error}; keep others away from the port of the store") from error


def _signature(content: str, key: bytes) -> str:
    return hmac.digest(key, content.encode(), hashlib.sha256).hex()


def _checked(values: Any) -> _RendezvousState:
    keys = mapping(values, _WHERE, ("round", "complete", "closed", "deadline", "nodes"))
    state = _RendezvousState()
    state.round = integer(keys["round"], f"the round of {_WHERE}")
    state.complete, state.closed = (_bool(keys[key]) for key in ("complete", "closed"))
    state.deadline = None if keys["deadline"] is None else _time(keys["deadline"])
    for entry in sequence(keys["nodes"], f"the nodes of {_WHERE}"):
        addr, pid, local_id, rank, waits, redundant, beat = sequence(entry, f"a node of {_WHERE}", 7)
        node = _NodeDesc(text(addr, "a node's address"), integer(pid, "a process id"), integer(local_id, "a node's id"))
        if rank is not None:
            state.participants[node] = integer(rank, "a node's rank")
        if _bool(waits):
            state.wait_list.add(node)
        if _bool(redundant):
            state.redundancy_list.add(node)
        if beat is not None:
            state.last_heartbeats[node] = _time(beat)
    return state


def _bool(value: Any) -> bool:
    return value if type(value) is bool else fail(f"a flag of {_WHERE}", value, "true or false")


def _time(value: Any) -> datetime:
    try:
        return datetime.fromisoformat(text(value, f"a time of {_WHERE}", most=40))
    except ValueError:
        fail(f"a time of {_WHERE}", value, "a date and time")
