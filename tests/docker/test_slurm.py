"""docker/slurm.sbatch as shipped on a real Slurm of three nodes: lost nodes and preemption, and the run goes on."""

from __future__ import annotations

import functools
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers import entrypoint
from tests.helpers.kills import ROOT, Outcome, check, read_log
from tests.helpers.launching import free_port
from tests.helpers.slurm import NODES, Slurm, reason_without, wait_for

BATCHES = 100_000  # no run here comes so far
START_S = 600

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(bool(reason_without()), reason=reason_without() or "Slurm is here"),
]
# In place of pyxis, which starts containers: a node's task gets a /dev/shm, a working directory and a view of the
# nodes' names of its own, as in a container.
ENTER = """#!/bin/sh
cd {home}/$SLURMD_NODENAME
exec unshare --mount sh -c 'mount -t tmpfs tmpfs /dev/shm && mount --bind {home}/hosts /etc/hosts && exec "$0" "$@"' \\
    {entrypoint} {words}
"""
SRUN = """#!/bin/bash
words=()
for word in "$@"; do case $word in --container-*) ;; *) words+=("$word") ;; esac; done
exec {srun} "${{words[@]}}"
"""


def prepare(home: Path, data: Path, batches: int) -> dict[str, str]:
    """Folders of three nodes, and the job's environment."""
    (home / "bin").mkdir(parents=True)
    hosts = "".join(f"127.0.0.1 {name}\n" for name in ("localhost", *NODES))
    (home / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
    for node in NODES:
        shutil.copytree(data, home / node / "data")
    words = entrypoint.arguments(Path("data"), home / "checkpoints", home / "log.jsonl", batches)
    words += ["model.moe.mesh.replicate=auto", "model.moe.mesh.spares=true", "callbacks.elastic_checkpoint.grace=60s"]
    quoted = " ".join(f"'{word}'" for word in words)
    scripts = {
        "entrypoint.sh": ENTER.format(home=home, entrypoint=entrypoint.SCRIPT, words=quoted),
        "srun": SRUN.format(srun=shutil.which("srun")),
    }
    for name, text in scripts.items():
        (home / "bin" / name).write_text(text)
        (home / "bin" / name).chmod(0o755)
    more = {"IMAGE": "none", "MIN_NODES": "2", "NPROC": "1", "LAST_CALL_S": "5", "WATCH_S": "2"}
    more |= {"MASTER_PORT": str(free_port()), "PET_LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    environment = entrypoint.environment(**more)
    return environment | {"PATH": f"{home}/bin:{environment['PATH']}"}


def submit(slurm: Slurm, home: Path, environment: dict[str, str]) -> str:
    options = ["--gpus-per-node=0", "--cpus-per-task=1", "--nodes=2-3", f"--output={home}/output", "--parsable"]
    done = subprocess.run(
        ["sbatch", *options, f"{ROOT}/docker/slurm.sbatch"],
        env=slurm.environment | environment,
        cwd=home,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def start_again(slurm: Slurm, job: str) -> None:
    """A requeued job would wait for two minutes. Its nodes refuse it in the second in which they ended it."""
    time.sleep(3)

    def runs() -> bool:
        state = slurm.job(job)
        if state["JobState"] == "PENDING":
            slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
        return state["JobState"] == "RUNNING"

    wait_for(runs, 120)


def test_a_job_outlives_nodes_and_preemption(tiny_text, tmp_path) -> None:
    calm, home = tmp_path / "calm", tmp_path / "home"
    log = home / "log.jsonl"
    environment = prepare(home, tiny_text, BATCHES)
    (tmp_path / "slurm").mkdir()
    with Slurm(tmp_path / "slurm") as slurm:

        def batches_after(count: int) -> None:
            try:
                wait_for(lambda: len(read_log(log)) >= count + 3, START_S)
            except AssertionError:
                raise AssertionError((home / "output").read_text()[-6000:] + str(slurm.job(job))) from None

        job = submit(slurm, home, environment)
        batches_after(0)
        assert slurm.job(job)["NumNodes"] == "3"
        other = next(node for node in NODES if node != slurm.job(job)["BatchHost"])

        def requeued(before: dict[str, str]) -> bool:
            return int(slurm.job(job)["Restarts"]) > int(before["Restarts"])

        # another node is lost: the rest goes on without a requeue
        slurm.lose_node(other)
        batches_after(len(read_log(log)))
        wait_for(lambda: "down" in slurm.run("sinfo", "-h", "-n", other, "-o", "%T"), 90)
        batches_after(len(read_log(log)))
        assert slurm.job(job)["JobState"] == "RUNNING" and slurm.job(job)["Restarts"] == "0"
        slurm.start_node(other)

        # preempted with each signal: the last batch is saved, and the job is queued again
        for parameters in ((), ("SlurmctldParameters=preempt_send_user_signal",)):
            slurm.reconfigure(*parameters)
            before = slurm.job(job)
            wants = ["--partition=high", "--nodes=2-3", "--exclusive", "--output=/dev/null", "--wrap=sleep 999"]
            urgent = slurm.run("sbatch", "--parsable", *wants).strip()
            wait_for(functools.partial(requeued, before), 150)
            said = (home / "output").read_text()
            assert f"Stopped by {'SIGUSR1' if parameters else 'SIGTERM'}" in said, said[-3000:]
            last, seen = read_log(log)[-1]["batch"], len(read_log(log))
            slurm.run("scancel", urgent)
            start_again(slurm, job)
            batches_after(seen)
            assert read_log(log)[seen]["batch"] == last + 1, "a batch was lost or trained twice"

        # the batch node is lost: a watch on the others requeues the job
        before = slurm.job(job)
        slurm.lose_node(before["BatchHost"])
        wait_for(functools.partial(requeued, before), 120)
        start_again(slurm, job)
        assert slurm.job(job)["BatchHost"] != before["BatchHost"]
        batches_after(len(read_log(log)))

        # the same batches and losses as undisturbed
        slurm.run("scancel", job)
        slurm.start_node(before["BatchHost"])
        wait_for(lambda: slurm.run("sinfo", "-h", "-o", "%T %D", "-p", "low").strip() == "idle 3", 90)
        lines = read_log(log)
        last = max(line["batch"] for line in lines)
        job = submit(slurm, calm, prepare(calm, tiny_text, BATCHES))
        wait_for(lambda: len(read_log(calm / "log.jsonl")) >= last, START_S)
    check(Outcome(), lines, read_log(calm / "log.jsonl")[:last], last)
