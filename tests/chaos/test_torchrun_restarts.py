"""Real training under `torchrun --max-restarts`, as the image's entrypoint starts it: a rank dies, the run goes on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.range_reads import verify
from tests.helpers import entrypoint, faults
from tests.helpers.kills import ROOT, Outcome, check, read_log

BATCHES = 8


def torchrun(data: Path, folder: Path, log: Path, fault: str | None, *more: str) -> subprocess.CompletedProcess[str]:
    """The demo's tiny run on two processes through the entrypoint; `fault` strikes the first life alone."""
    words = ["/bin/sh", entrypoint.SCRIPT, *entrypoint.arguments(data, folder, log, BATCHES), *more]
    striking = {faults.VARIABLE: fault} if fault else {}
    environment = entrypoint.environment(NPROC="2", MAX_RESTARTS="2", **striking)
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_run_goes_on_after_a_rank_died_between_data_and_commit(tiny_text, tmp_path) -> None:
    calm = torchrun(tiny_text, tmp_path / "calm", tmp_path / "calm.jsonl", None)
    assert calm.returncode == 0, calm.stderr[-5000:]
    done = torchrun(tiny_text, tmp_path / "run", tmp_path / "chaos.jsonl", "commit.manifest_written:0:2")
    assert done.returncode == 0, done.stderr[-5000:]
    lines = read_log(tmp_path / "chaos.jsonl")
    batches = [line["batch"] for line in lines]
    again = [at for at in range(1, len(batches)) if batches[at] <= batches[at - 1]]
    # the save of batch 4 died before its commit: the run goes back to batch 2, once
    assert len(again) == 1 and batches[again[0]] == 3 and batches[again[0] - 1] >= 4, batches
    check(Outcome(), lines, read_log(tmp_path / "calm.jsonl"), BATCHES)
    store = open_store(str(tmp_path / "run"))
    ledger = Ledger(store)
    keys = ledger.newest_first()
    assert keys[0].step == BATCHES and all(verify(store, ledger.open(key)) == [] for key in keys)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_of_another_model_ends_the_job_at_once(tiny_text, tmp_path) -> None:
    first = torchrun(tiny_text, tmp_path / "run", tmp_path / "first.jsonl", None, "max_duration=2ba")
    assert first.returncode == 0, first.stderr[-5000:]
    other = torchrun(tiny_text, tmp_path / "run", tmp_path / "other.jsonl", None, "model.moe.top_k=1")
    assert other.returncode == 2, other.stderr[-5000:]
    assert "error: experts.top_k (1): the checkpoint was trained with 2" in other.stderr
    assert other.stderr.count("error: experts.top_k") == 2, "each of two ranks said so once"
