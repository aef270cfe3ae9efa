"""Time, memory and bytes of saving and resuming, against Composer's own checkpoints and plain DCP in the same run.

    python benchmarks/checkpoint.py [--processes 4] [--width 512] [--repeats 3] [--store files|moto|both|s3]

One training state is saved and loaded by all three. "Plain DCP" is `torch.distributed.checkpoint.save` to files; for
S3, where PyTorch has no writer, each rank uploads its file with boto3 before training continues. Composer saves and
loads as its Trainer does, with its own object store. `--store s3` is the server that AWS_ENDPOINT_URL names, with a new
bucket: `scripts/ceph_rgw.sh start FOLDER; . FOLDER/env.sh`. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
YAML = str(ROOT / "tests" / "distributed" / "tiny.yaml")
MIB = 2**20


def build(processes: int, width: int, folder: str) -> Any:
    """A Trainer of LLM Foundry after one batch, on a mesh of (2, 1, processes / 2)."""
    os.environ["FSDP_VERSION"] = "2"
    from llmfoundry.command_utils import train
    from omegaconf import OmegaConf

    config = OmegaConf.load(YAML)
    for key, value in {
        "model.d_model": width,
        "model.n_layers": 4,
        "model.n_heads": 8,
        "algorithms.dmoe.num_experts": 8,
        "algorithms.dmoe.expert_hidden_size": 3 * width,
        "algorithms.dmoe.mesh": {"replicate": 2, "shard": 1, "expert": processes // 2},
        "max_duration": "1ba",
        "global_train_batch_size": processes,
        "fsdp_config.state_dict_type": "sharded",
        "run_name": "benchmark",
        "save_folder": f"{folder}/unused",
        "save_interval": "1000ba",
    }.items():
        OmegaConf.update(config, key, value, force_add=True)
    return train(config)


class Peak:
    """The highest resident memory of this process while it is open, above what it was at the start, in bytes."""

    def __enter__(self) -> Peak:
        self._process = psutil.Process()
        self._start = self.highest = self._process.memory_info().rss
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.003):
            self.highest = max(self.highest, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def extra(self) -> int:
        return self.highest - self._start


def slowest(value: float) -> float:
    """The largest of a number over the ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def total(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


class Clock:
    """Times of named actions: what is compared is measured in turns, so that other work on the machine meets both."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}  # of the slowest rank
        self.core_seconds: dict[str, list[float]] = {}  # of all ranks together

    def __call__(self, name: str, action: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> None:
        before()
        if dist.get_rank() == 0:
            os.sync()  # what the action before this one wrote is not to be written meanwhile
        dist.barrier()
        began, cores = time.perf_counter(), sum(os.times()[:2])
        action()
        self.seconds.setdefault(name, []).append(slowest(time.perf_counter() - began))
        self.core_seconds.setdefault(name, []).append(total(sum(os.times()[:2]) - cores))

    def results(self) -> dict[str, float]:
        """Medians; the first of several was a warm-up."""
        return {
            name + suffix: statistics.median(values[1:] or values)
            for suffix, by_name in (("", self.seconds), ("_cores", self.core_seconds))
            for name, values in by_name.items()
        }


def measure(processes: int, width: int, repeats: int, folder: str, endpoint: str | None) -> dict[str, float]:
    """All measurements on one store, on every rank; see the module's text."""
    import torch.distributed.checkpoint as dcp
    from composer.utils import checkpoint as composer_checkpoint

    from foundry_moe.callbacks.elastic_state import collect
    from foundry_moe.checkpoint import open_store
    from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
    from foundry_moe.checkpoint.store import StoreOptions

    if endpoint:
        os.environ["S3_ENDPOINT_URL"] = endpoint  # where Composer looks
    rank = dist.get_rank()
    local = Path(folder) / "local"
    trainer = build(processes, width, folder)
    state = trainer.state

    where = "s3://bucket/elastic" if endpoint else f"{folder}/elastic"
    group = dist.new_group(backend="gloo")
    engine = CheckpointEngine(
        open_store(where, StoreOptions(endpoint_url=endpoint)), group=group, policy=Policy(keep=1)
    )
    engine.prepare(collect(state))
    clock, whole, traffic = Clock(), [], []

    def elastic_save(step: int) -> None:
        engine.save(collect(state), step)

    def plain_dcp() -> None:
        dcp.save(collect(state), checkpoint_id=str(local / "dcp"))
        if endpoint:
            upload(local / "dcp", rank, endpoint)

    def composer_save() -> None:
        name = f"{local}/composer/ep0-ba1"
        composer_checkpoint.save_checkpoint(state=state, filename=name + "-rank{rank}.pt", weights_only=False)
        dist.barrier()  # the callback's own

    for step in range(1, repeats + 2):
        clock("elastic_blocked", functools.partial(elastic_save, step))
        report = engine.wait()
        assert report is not None and report.error is None, report
        whole.append(slowest(report.seconds_total))
        clock("dcp_blocked", plain_dcp, lambda: remove(local / "dcp", rank))
        clock("composer_blocked", composer_save, lambda: remove(local / "composer", rank))
    source = next((local / "composer").iterdir())
    if endpoint:
        clock("composer_upload", lambda: upload(source, rank, endpoint))

    def load() -> None:
        loaded = CheckpointEngine(engine.ledger.store, group=group).load(lambda info: collect(state))
        assert loaded is not None
        traffic.append((loaded.traffic.bytes_fetched, loaded.summary["bytes"], loaded.traffic.bytes_sent))

    def composer_load() -> None:
        store = None
        path = str(source)
        if endpoint:
            from composer.utils import S3ObjectStore

            store = S3ObjectStore(bucket="bucket", prefix="")
            path = f"plain/{source.name}"
        composer_checkpoint.load_checkpoint(
            path=path, state=state, logger=trainer.logger, object_store=store, strict_model_weights=True
        )

    for _ in range(repeats + 1):
        clock("elastic_load", load)
        clock("composer_load", composer_load)

    extra, part = [], 0
    for step in range(repeats + 2, repeats + 4):  # not timed: looking at memory every 3 ms takes its share of a core
        dist.barrier()
        with Peak() as peak:
            engine.save(collect(state), step)
            report = engine.wait()
        assert report is not None and report.error is None, report
        part = report.bytes_staged
        extra.append(slowest(peak.extra / max(part, 1)))
    return clock.results() | {
        "elastic_saved": statistics.median(whole[1:]),
        "elastic_extra": max(extra),
        "part_mib": slowest(part / MIB),
        "checkpoint_mib": traffic[-1][1] / MIB,
        "amplification": total(traffic[-1][0]) / traffic[-1][1],
        "sent": total(traffic[-1][2]) / traffic[-1][1],
    }


def remove(path: Path, rank: int) -> None:
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def upload(source: Path, rank: int, endpoint: str) -> None:
    """Each rank uploads the files that it wrote; rank 0 the index as well."""
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint)
    for path in source.iterdir():
        if path.name.startswith(f"__{rank}_") or (path.name == ".metadata" and rank == 0):
            client.upload_file(str(path), "bucket", f"plain/{source.name}/{path.name}")
    dist.barrier()


def row(name: str, value: str, against: str, floor: str, aim: str) -> str:
    return f"| {name} | {value} | {against} | {floor} | {aim} |"


def table(title: str, r: dict[str, float]) -> str:
    share = r["elastic_blocked"] / r["dcp_blocked"]
    resume = r["elastic_load"] / r["composer_load"]
    return "\n".join(
        [
            f"**{title}**: checkpoint {r['checkpoint_mib']:.0f} MiB, a rank's part {r['part_mib']:.0f} MiB",
            "",
            "| | here | against | floor | aim |",
            "|---|---|---|---|---|",
            row(
                "time that a save blocks training",
                f"{r['elastic_blocked']:.3f} s = {share:.1%}",
                f"plain DCP {r['dcp_blocked']:.2f} s, Composer {r['composer_blocked']:.2f} s",
                "10%",
                "2%",
            ),
            row("until committed, in the background", f"{r['elastic_saved']:.2f} s", "", "", ""),
            row(
                "extra memory while saving, of the rank's part",
                f"{r['elastic_extra']:.2f}x",
                "",
                "0.3x",
                "0.1x",
            ),
            row(
                "resume on (2,1,2)",
                f"{r['elastic_load']:.2f} s = {resume:.0%}",
                f"Composer {r['composer_load']:.2f} s",
                "50%",
                "20%",
            ),
            row(
                "core-seconds of that, in all ranks",
                f"{r['elastic_load_cores']:.2f} = {r['elastic_load_cores'] / r['composer_load_cores']:.0%}",
                f"Composer {r['composer_load_cores']:.2f}",
                "",
                "",
            ),
            row("bytes fetched, of the checkpoint", f"{r['amplification']:.3f}", "", "1.05", "1.0"),
            row("bytes sent between ranks, of the checkpoint", f"{r['sent']:.3f}", "", "", ""),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--width", type=int, default=512, help="512: 625 MiB of parameters and AdamW state")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--store", choices=("files", "moto", "both", "s3"), default="both")
    arguments = parser.parse_args()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):  # before the fork server starts: it keeps what it saw
        os.environ.setdefault(name, "testing")
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    sys.path.insert(0, str(ROOT))
    from foundry_moe.launch.processes import run_processes
    from tests.helpers.launching import PRELOAD
    from tests.helpers.s3 import Moto

    def run(endpoint: str | None) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            return run_processes(
                measure,
                *(arguments.processes, arguments.width, arguments.repeats, folder, endpoint),
                world_size=arguments.processes,
                preload=PRELOAD,
                timeout_s=1800,
            )

    print(f"{arguments.processes} processes on {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    if arguments.store in ("files", "both"):
        print("\n" + table("Local path", run(None)), flush=True)
    if arguments.store in ("moto", "both"):
        with Moto() as moto:
            print("\n" + table("S3 (moto)", run(moto.url)), flush=True)
    if arguments.store == "s3":
        import boto3

        endpoint = os.environ["AWS_ENDPOINT_URL"]
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="bucket")
        print("\n" + table(f"S3 ({endpoint})", run(endpoint)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
