"""SIGTERM to a real run of four processes: the batch that was trained last is committed, and nothing is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.ledger import Ledger
from tests.helpers import entrypoint
from tests.helpers.entrypoint import START_S, STOP_S, kill_group, wait_for
from tests.helpers.kills import ROOT, read_log

LONG = 100_000  # batches: no run here comes so far


def words(tiny_arguments: Callable[[Path], list[str]], folder: Path, log: Path, batches: int) -> list[str]:
    """Of the training script: the tiny run, whose own interval never comes."""
    return [
        f"{ROOT}/yamls/demo/cpu.yaml",
        *tiny_arguments(folder),
        f"max_duration={batches}ba",
        "eval_interval=0",
        "callbacks.elastic_checkpoint.interval=1h",
        "train_loader.num_workers=1",
        "train_loader.prefetch_factor=2",
        f"code_paths=[{ROOT}/tests/chaos/loss_log.py]",
        f"callbacks.loss_log.path={log}",
    ]


def launcher_words(way: str) -> list[str]:
    if way == "entrypoint":
        return ["/bin/sh", entrypoint.SCRIPT]
    return [sys.executable, "-m", "composer.cli.launcher", "-n", "4", f"{ROOT}/foundry_moe/train.py"]


def ranks_of(launcher: int) -> list[psutil.Process]:
    """The four training processes below a launcher, without those of their data loaders."""
    found = [child for child in psutil.Process(launcher).children() if "train.py" in " ".join(child.cmdline())]
    # under torchrun the process that forks them has their command line too, and started first
    return sorted(found, key=psutil.Process.create_time)[-4:]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("way", "whom", "code"),
    [
        ("entrypoint", "launcher", 75),
        # a node's processes get Slurm's warning, others none; the entrypoint's launcher starts all anew, here never
        pytest.param("entrypoint", "one rank", 75, marks=pytest.mark.slow),
        pytest.param("entrypoint", "all", 75, marks=pytest.mark.slow),
        pytest.param("composer", "launcher", 75, marks=pytest.mark.slow),
    ],
)
def test_a_signal_loses_no_batch(tiny_arguments, tmp_path, way, whom, code) -> None:
    log = tmp_path / "log.jsonl"
    four = ["fsdp_config={}", "model.moe.mesh={expert: 2, shard: 2, replicate: 1}", "device_train_microbatch_size=1"]
    environment = entrypoint.environment(NPROC="4", MAX_RESTARTS="0")
    with open(tmp_path / "printed", "w") as printed:
        launcher = subprocess.Popen(
            [*launcher_words(way), *words(tiny_arguments, tmp_path, log, LONG), *four],
            cwd=ROOT,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_for(lambda: len(read_log(log)) >= 2 or launcher.poll() is not None, START_S)
            ranks = ranks_of(launcher.pid)
            assert len(ranks) == 4, (tmp_path / "printed").read_text()[-5000:]
            if whom == "launcher":
                launcher.terminate()
            elif whom == "one rank":
                ranks[2].send_signal(signal.SIGUSR1)
            else:  # as Slurm and `docker stop` with `tini -g` do: processes of data loaders too
                for process in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
                    process.send_signal(signal.SIGTERM)
            wait_for(lambda: launcher.poll() is not None and not any(rank.is_running() for rank in ranks), STOP_S)
        finally:
            kill_group(launcher)
    # the last line is printed once the launcher has ended
    wait_for(lambda: "Stopped by" in (tmp_path / "printed").read_text(), STOP_S)
    said = (tmp_path / "printed").read_text()
    assert launcher.returncode == code, said[-5000:]
    assert "Traceback" not in said or way == "composer", said[-5000:]  # Composer's own launcher shows its frames
    trained = read_log(log)
    last = trained[-1]["batch"]
    ledger = Ledger(open_store(str(tmp_path / "checkpoints")))
    assert [key.step for key in ledger.newest_first()] == [last]
    seen = {sample for line in trained for sample in line["samples"]}
    done = subprocess.run(
        [sys.executable, f"{ROOT}/foundry_moe/train.py", *words(tiny_arguments, tmp_path, log, last + 1)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    after = read_log(log)[len(trained) :]
    assert [line["batch"] for line in after] == [last + 1]
    assert not seen & set(after[0]["samples"]), "a batch was trained twice"
