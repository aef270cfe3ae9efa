"""The demo's run under Composer's launcher, killed again and again, against a run that nobody disturbs.

    python -m tests.chaos.run_kills --data data/demo --kills 24                # moto, and a proxy with faults
    python -m tests.chaos.run_kills --data data/demo --folder s3://bucket/run --endpoint-url http://host:port

Each life runs on the next of `--meshes`, (replicate, shard, expert), and is killed at a named point of the checkpoint
engine or at a random time. At the end: every commit reads back, every batch was trained on the samples that it should
have had, none twice and none skipped in what counts, and losses are those of the undisturbed run. What each resume
fetched, sent between ranks and took is printed too.

On GPUs, where there are some, a life takes as many of them as its mesh has ranks:

    python -m tests.chaos.run_kills --data data/demo --kills 2 --meshes 2,2,2 1,2,2 2,1,4
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import psutil

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.range_reads import verify
from foundry_moe.checkpoint.store import StoreOptions
from foundry_moe.parallel.mesh import Mesh, parse_mesh
from tests.helpers import faults
from tests.helpers.kills import ROOT, Outcome, check, command, read_log
from tests.helpers.s3 import Moto, Proxy, at_random

LIFE_S = 600
FIRST_AFTER = {"load": 4, "retention": 8}  # batches: before, there is nothing to load, and too little to delete
MESHES: list[Mesh] = [(1, 2, 2), (2, 1, 1), (2, 2, 2), (1, 1, 1), (2, 1, 2), (1, 1, 2)]


def start(words: list[str], fault: str | None, output: IO[str]) -> subprocess.Popen[str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop(faults.VARIABLE, None)
    if fault:
        environment[faults.VARIABLE] = fault
    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)


def live(words: list[str], fault: str | None, log: Path, kill_after: int | None) -> tuple[int, str, bool]:
    """Runs one life. With `kill_after` a random process is killed once so many more batches are logged.

    Returns:
        The launcher's exit code, the end of its output, and whether a process was killed here.
    """
    begun = len(read_log(log))
    printed = Path(f"{log}.launcher")
    killed, deadline = False, time.monotonic() + LIFE_S
    with open(printed, "w") as file:
        launcher = start(words, fault, file)
        while launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            if kill_after is not None and not killed and len(read_log(log)) >= begun + kill_after:
                time.sleep(random.uniform(0, 0.4))
                children = psutil.Process(launcher.pid).children()
                if children:
                    random.choice(children).kill()
                    killed = True
    if launcher.poll() is None:
        for child in psutil.Process(launcher.pid).children(recursive=True):
            child.kill()
        launcher.kill()
        raise AssertionError(f"a life of {LIFE_S} s did not end:\n{printed.read_text()[-8000:]}")
    return launcher.returncode, printed.read_text()[-8000:], killed


def storm(
    data: str,
    folder: str,
    endpoint: str | None,
    *,
    kills: int,
    batches: int,
    meshes: Sequence[Mesh],
    seed: int,
    fault_rate: float = 0.02,
    proxied: bool = True,
) -> Outcome:
    """Runs until the training is complete and `kills` kills have struck; checks all that the module's text says."""
    random.seed(seed)
    outcome, points = Outcome(), list(faults.POINTS)
    random.shuffle(points)
    proxy, proxied_endpoint = None, endpoint
    if endpoint and proxied:
        server = urlsplit(endpoint)
        assert server.hostname and server.port, endpoint
        proxy = Proxy((server.hostname, server.port), at_random(fault_rate, seed), stall_s=6.0)
        proxied_endpoint = proxy.url + server.path
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "chaos.jsonl"
        calm = Path(scratch) / "calm.jsonl"
        calm_words = command(data, str(Path(scratch) / "calm"), None, calm, (1, 1, 1), batches)
        code, output, _ = live(calm_words, None, calm, None)
        assert code == 0, output
        done, trained = False, 0
        while not done:
            mesh = meshes[outcome.lives % len(meshes)]
            world = math.prod(mesh)
            point = fault = kill_after = None
            if outcome.kills < kills:
                share = (batches - trained) // (kills - outcome.kills + 1)  # lest the run be over before the last kill
                kill_after = random.randint(2, min(5, max(2, share)))
                reachable = [p for p in points if trained >= FIRST_AFTER.get(p.partition(".")[0], 0)]
                if outcome.lives % 2 == 0 and reachable:
                    point = reachable[-1]
                    points.remove(point)
                    rank = random.randrange(world) if point.startswith(("save", "load.range")) else 0
                    fault = f"{point}:{rank}:1"
                    kill_after += 2  # by then the point should have been met
            words = command(data, folder, proxied_endpoint, log, mesh, batches)
            before = len(read_log(log))
            code, output, killed = live(words, fault, log, kill_after)
            lines = read_log(log)
            trained = lines[-1]["batch"] if lines else 0
            outcome.lives += 1
            outcome.resumes += [f"{mesh}: {line}" for line in resumed(Path(f"{log}.launcher"))]
            if before < len(lines) and before:
                lost = lines[before - 1]["batch"] - lines[before]["batch"] + 1
                assert lost >= 0, f"batches were skipped: {lines[before - 1]['batch']} to {lines[before]['batch']}"
                outcome.steps_lost.append(lost)
            if code == 0:
                done = bool(lines) and lines[-1]["batch"] == batches
                assert done, output
            else:
                assert fault or killed, f"a life on {mesh} failed without a kill:\n{output}"
                outcome.kills += 1
                outcome.causes.append(f"{mesh}: {fault if fault and not killed else 'random time'}")
                if point and killed:
                    points.insert(0, point)  # it was not met: again in a later life
        assert outcome.kills == kills, f"the run was over after {outcome.kills} of {kills} kills: give it more batches"
        check(outcome, read_log(log), read_log(calm), batches)
        store = open_store(folder, StoreOptions(endpoint_url=endpoint))
        ledger = Ledger(store)
        keys = ledger.newest_first()
        assert keys and keys[0].step == batches
        for key in keys:
            assert verify(store, ledger.open(key)) == []
        outcome.commits = len(keys)
    if proxy:
        outcome.faults_met = dict(proxy.seen)
        proxy.close()
    return outcome


def resumed(printed: Path) -> list[str]:
    """What a life's first rank, which prints to the launcher's output, said about its resume."""
    lines = printed.read_text().splitlines()
    return [line[line.index("Resumed at batch") :] for line in lines if "Resumed at batch" in line]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the demo's data: python examples/demo_data.py FOLDER")
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--meshes", type=parse_mesh, nargs="+", default=MESHES, metavar="R,S,E")
    parser.add_argument("--folder", default="s3://bucket/run")
    parser.add_argument("--endpoint-url", help="default: moto, started here")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args(argv)
    print(f"seed {arguments.seed}", flush=True)

    def run(endpoint: str) -> Outcome:
        return storm(
            str(Path(arguments.data).absolute()),
            arguments.folder,
            endpoint,
            kills=arguments.kills,
            batches=arguments.batches,
            meshes=arguments.meshes,
            seed=arguments.seed,
        )

    if arguments.endpoint_url:
        outcome = run(arguments.endpoint_url)
    else:
        with Moto() as moto:
            outcome = run(moto.url)
    print(f"{outcome.kills} kills in {outcome.lives} lives, {outcome.batches} batches trained")
    print(f"steps lost at each restart: {outcome.steps_lost}")
    print(f"{outcome.commits} commits at the end, all good; largest difference of a loss {outcome.largest_gap:.1e}")
    print(f"faults of the proxy: {outcome.faults_met}")
    for resume in outcome.resumes:
        print(f"  {resume}")
    for cause in outcome.causes:
        print(f"  {cause}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
