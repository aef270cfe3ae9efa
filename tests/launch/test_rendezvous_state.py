"""The state of the rendezvous in its store: checked JSON, signed with a token, never a pickle."""

from __future__ import annotations

import base64
import json
import os
import pickle
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from foundry_moe.launch import rendezvous
from foundry_moe.launch.network import local_store
from foundry_moe.launch.rendezvous_state import _signature, decode, encode, shared_token

pytestmark = pytest.mark.quick
KEY = b"run"


def a_state() -> _RendezvousState:
    state = _RendezvousState()
    nodes = [_NodeDesc(f"host{number}.example", 100 + number, 0) for number in range(5)]
    state.round, state.complete, state.deadline = 3, True, datetime(2026, 1, 2, 3, 4, 5, 678, timezone.utc)
    state.participants = {nodes[1]: 0, nodes[0]: 1}
    state.wait_list, state.redundancy_list = {nodes[2]}, {nodes[3]}
    state.last_heartbeats = {nodes[0]: datetime.now(timezone.utc), nodes[2]: datetime(2026, 1, 1)}
    state.last_heartbeats[nodes[4]] = datetime(2026, 1, 2, tzinfo=timezone.utc)  # has left, or not joined yet
    return state


def test_a_state_is_read_as_it_was_written() -> None:
    for state in (a_state(), _RendezvousState()):
        assert vars(decode(encode(state, KEY), KEY)) == vars(state)


def test_all_nodes_are_alive_when_a_store_is_back_by_clocks_with_zones_and_without() -> None:
    backend = rendezvous.RestartableBackend.__new__(rendezvous.RestartableBackend)
    backend._key, backend._state = KEY, encode(before := a_state(), KEY)
    state = decode(backend._all_alive(), KEY)
    assert state.last_heartbeats.keys() == before.last_heartbeats.keys()
    for node, beat in state.last_heartbeats.items():
        assert beat.tzinfo == before.last_heartbeats[node].tzinfo
        assert abs(datetime.now(timezone.utc) - beat.replace(tzinfo=timezone.utc)).total_seconds() < 60
    assert vars(state) == {**vars(before), "last_heartbeats": state.last_heartbeats}


class Intruder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_the_store_is_not_run(tmp_path) -> None:
    server = local_store()
    parameters = RendezvousParameters(
        "foundry", f"127.0.0.1:{server.port}", "job", 1, 2, "127.0.0.1", is_host="false", last_call_timeout=1
    )
    handler = rendezvous.create_handler(parameters)
    stranger = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    stranger.set("torch.rendezvous.job", base64.b64encode(pickle.dumps(Intruder(tmp_path / "inside"))).decode())
    with pytest.raises(RendezvousStateError, match="the state of the rendezvous cannot be read"):
        handler.next_rendezvous()
    assert not (tmp_path / "inside").exists()


def signed(**changes: Any) -> bytes:
    values = json.loads(json.loads(encode(a_state(), KEY))["state"]) | changes
    content = json.dumps(values)
    return json.dumps({"state": content, "signature": _signature(content, KEY)}).encode()


@pytest.mark.parametrize(
    ("stored", "sentence"),
    [
        (b"[]", "not a JSON object"),
        (b"{}", "lacks state, signature"),
        (encode(a_state(), b"another run or token"), "is not signed with this node's token"),
        (signed(round=-1), "the round of the state of the rendezvous is -1"),
        (signed(complete=1), "a flag"),
        (signed(deadline="soon"), "a time of"),
        (signed(nodes=[["host", 1, 0, None, False, False]]), "not a list of 7"),
        (signed(nodes=[["host", 1, 0, "0", False, False, None]]), "a node's rank is '0'"),
        (signed(nodes=[["\x1b[2J", 1, 0, 0, False, False, None]]), "a node's address"),
        (b"[" * 100_000, "cannot be read"),
        (b" " * (2**24 + 1), "at most"),
    ],
)
def test_whatever_else_is_in_the_store_is_one_sentence(stored, sentence) -> None:
    with pytest.raises(RendezvousStateError, match=sentence) as refused:
        decode(stored, KEY)
    assert str(refused.value).isprintable()


def test_nodes_with_another_token_do_not_meet(monkeypatch, tmp_path) -> None:
    store = HashStore()
    monkeypatch.setattr(rendezvous, "create_backend", lambda parameters: (None, store))
    parameters = RendezvousParameters("foundry", "127.0.0.1:1", "job", 1, 2, last_call_timeout=1)
    (tmp_path / "token").write_text("a secret of the job\n")
    monkeypatch.setenv("FOUNDRY_MOE_TOKEN_FILE", str(tmp_path / "token"))
    first = rendezvous.RestartableBackend(parameters)
    written = first.set_state(pickle.dumps(a_state()))
    assert written is not None and written[2] and first.get_state() == written[:2]
    monkeypatch.delenv("FOUNDRY_MOE_TOKEN_FILE")
    with pytest.raises(RendezvousStateError, match="give all nodes the same FOUNDRY_MOE_TOKEN"):
        rendezvous.RestartableBackend(parameters).get_state()
    monkeypatch.setenv("FOUNDRY_MOE_TOKEN", "a secret of the job")
    assert rendezvous.RestartableBackend(parameters).get_state() == written[:2]


def test_a_token_file_that_cannot_be_read_is_one_sentence(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FOUNDRY_MOE_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"FOUNDRY_MOE_TOKEN_FILE \(.*none\) cannot be read: No such file"):
        shared_token()
    (tmp_path / "none").write_text("\n")
    with pytest.raises(ValueError, match="is empty: write the token"):
        shared_token()
