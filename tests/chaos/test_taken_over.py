"""A newer process of a run takes its folder: the older one ends with exit code 4, and no launcher starts it anew."""

from __future__ import annotations

import subprocess

import pytest

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.owners import Identity, Owners
from foundry_moe.launch.user_errors import TAKEN_OVER
from tests.helpers import entrypoint
from tests.helpers.entrypoint import START_S, STOP_S, kill_group, wait_for
from tests.helpers.kills import ROOT, read_log


@pytest.mark.timeout(1500)
def test_the_older_process_leaves_the_folder_to_the_newer_one(tiny_text, tmp_path) -> None:
    log, folder = tmp_path / "log.jsonl", tmp_path / "run"
    arguments = entrypoint.arguments(tiny_text, folder, log, 100_000)
    with open(tmp_path / "printed", "w") as printed:
        older = subprocess.Popen(
            ["/bin/sh", entrypoint.SCRIPT, *arguments, "callbacks.elastic_checkpoint.interval=1ba"],
            cwd=ROOT,
            env=entrypoint.environment(NPROC="2", MAX_RESTARTS="3"),
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_for(lambda: len(read_log(log)) >= 2 or older.poll() is not None, START_S)
            store = open_store(str(folder))
            owners = Owners(store)
            before = owners.newest()
            assert before is not None and older.poll() is None, (tmp_path / "printed").read_text()[-5000:]
            newer = owners.acquire(Identity(run_name=before.run_name, model=before.model), has_commits=lambda: True)
            began = len(read_log(log))
            wait_for(lambda: older.poll() is not None, STOP_S)
        finally:
            kill_group(older)
    said = (tmp_path / "printed").read_text()
    assert older.returncode == TAKEN_OVER == 4, said[-5000:]
    assert "error: another process has taken over" in said and "Traceback" not in said, said[-5000:]
    assert owners.newest() == newer, "no other life took the folder back"
    assert newer.run == before.run and newer.number == before.number + 1
    assert len(read_log(log)) - began < 10, "within two intervals, as this test's clock sees them"
    ledger = Ledger(store)
    for key in ledger.newest_first():
        ledger.open(key)
