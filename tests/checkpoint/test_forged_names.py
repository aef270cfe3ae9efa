"""Objects in a folder whose names have numbers that no writer chose: nothing is lost by them, or a sentence says so."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from foundry_moe.checkpoint import Writer
from foundry_moe.checkpoint.engine import CheckpointEngine
from foundry_moe.checkpoint.errors import CheckpointError, OwnedError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.owners import Identity, Lease, Owners
from foundry_moe.checkpoint.records import CommitKey, file_hash
from tests.helpers.checkpoints import blank, check, save
from tests.helpers.forging import key_of, record_of

JUNK = "commits/999999999-000000000001.json"
A = Identity(run_name="a", model="m")


def lease(store) -> Lease:
    return Owners(store).acquire(A, has_commits=lambda: False)


@pytest.mark.parametrize("junk", [JUNK, "commits/000000-999999999999999.json", "commits/000001-000000000009.json"])
def test_a_name_without_a_record_hides_no_later_save(store, junk, caplog) -> None:
    save(store, 1, 2)
    store.put(junk, b"junk")
    for step in (3, 4):
        check(CheckpointEngine(store).load(blank()), step - 1)
        save(store, step)
    check(CheckpointEngine(store).load(blank()), 4)
    assert f"{junk}: the commit record cannot be read" in caplog.text


def test_default_planners_take_no_number_from_a_name_without_a_record(tmp_path) -> None:
    store = Writer(tmp_path)._store
    for junk in (JUNK, "commits/000001-000000000002.json"):
        store.put(junk, b"junk")
    for step in (1, 2, 2, None):
        dcp.save({"a": torch.ones(1)}, storage_writer=Writer(tmp_path), checkpoint_id=step, no_dist=True)
    keys = {entry.key for entry in store.scan("commits/")} - {JUNK, "commits/000001-000000000002.json"}
    assert keys == {
        *("commits/000000-000000000001.json", "commits/000000-000000000002.json"),
        *("commits/000002-000000000002.json", "commits/000002-000000000003.json"),
    }


def test_a_forged_record_with_the_last_number_is_a_sentence_and_not_an_unreadable_name(store) -> None:
    save(store, 1)
    attempt = "steps/000000000001/20260102T030405-deadbeef"
    body = {**record_of(store, 1), "generation": 999_999_999, "attempt": attempt}
    body.pop("xxh3")
    body["xxh3"] = file_hash(json.dumps(body, sort_keys=True).encode())
    store.put(JUNK, json.dumps(body).encode())
    with pytest.raises(CheckpointError, match=r"no commit can have generation 1000000000 .* remove the record"):
        CheckpointEngine(store).load(blank())
    store.delete([JUNK])
    check(CheckpointEngine(store).load(blank()), 1)


@pytest.mark.parametrize("numbers", [(10**9, 1), (0, 10**15), (-1, 1), (0, -1)])
def test_no_commit_has_a_name_that_no_listing_reads(numbers) -> None:
    with pytest.raises(CheckpointError, match="the largest are 999999999 and 999999999999999"):
        CommitKey(generation=numbers[0], step=numbers[1])
    assert CommitKey.parse(CommitKey(generation=10**9 - 1, step=10**15 - 1).key) is not None


def test_the_last_number_of_a_lease_gives_the_folder_to_nobody(store) -> None:
    """Two processes once got numbers of ten digits, which no listing read, and both were told that they own it."""
    first = lease(store)
    last = Lease(**{**vars(first), "number": 999_999_999, "nonce": "x"})
    store.put(last.key, last.to_bytes())
    for _ in range(2):
        with pytest.raises(OwnedError, match=r"owners/999999999.json has the largest number .* delete that object"):
            lease(store)
    with pytest.raises(OwnedError, match="largest number"):
        Owners(store).release()
    assert {entry.key for entry in store.scan("owners/") if entry.key.endswith("json")} == {first.key, last.key}


def test_a_lease_under_another_spelling_of_its_number_counts_for_nothing(store, caplog) -> None:
    first = lease(store)
    store.put("owners/0000001.json", b"junk")
    store.put("owners/999999999.json", b"junk")
    second = lease(store)
    assert (first.number, second.number) == (1, 2)
    Owners(store).check(second)
    assert "Passed over owners/999999999.json" in caplog.text and "0000001" not in caplog.text


def test_names_that_a_terminal_would_obey_are_not_listed(store, tmp_path) -> None:
    save(store, 1)
    key = "commits/\x1b[2Jx"
    with pytest.raises(CheckpointError, match="cannot be the name of an object"):
        store.put(key, b"1")
    if (tmp_path / "store").exists():
        (tmp_path / "store" / key).write_bytes(b"1")
    else:
        store._client.put_object(Bucket=store.bucket, Key=store.prefix + "commits/\x9b2Jx", Body=b"1")
    assert [entry.key for entry in store.scan("commits/")] == [key_of(1)]
    assert Ledger(store).newest_first() == [CommitKey(generation=0, step=1)]
