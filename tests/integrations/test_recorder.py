"""Records of Accelerate's FSDP2: one process and two train a model of transformers 5 alike, and so do resumptions."""

import multiprocessing
import socket
from pathlib import Path

import pytest
from torch.multiprocessing import start_processes

from foundry_moe.certify import compare, read_record

pytest.importorskip("accelerate")
from tests.integrations.fsdp2_worker import worker


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    multiprocessing.set_forkserver_preload(["tests.integrations.fsdp2_worker"])  # imports transformers once
    start_processes(worker, (folder, ports), nprocs=3, start_method="forkserver")
    return folder


@pytest.mark.quick
def test_one_rank_and_two_are_the_same_and_so_are_resumptions(records: Path) -> None:
    alone = read_record(records / "1")
    for name, steps in (("2", (1, 2, 3)), ("1 resumed ", (3,)), ("2 resumed ", (3,))):
        other = read_record(records / name)
        report = compare(alone, other)
        assert report.same and report.steps == steps, report
        assert report.largest < 2e-5  # fp32 sums in another order: 1.3e-5 on one of the processors
        assert {"state exp_avg", "state exp_avg_sq", "weight"} <= set(other.begin.kinds) | set(other.steps[0].kinds)
    two = read_record(records / "2")
    assert any(two.held[name][0] != two.held[name][1] for name in two.held), "nothing is sharded"


@pytest.mark.quick
def test_a_resumption_without_moments_is_named(records: Path) -> None:
    for ranks in (1, 2):
        report = compare(read_record(records / "1"), read_record(records / f"{ranks} resumed moments lost"))
        assert any("restarted at zero at the start" in symptom for symptom in report.symptoms), report
