"""Records of a small expert-parallel trainer: healthy pairs are the same, and each planted fault is found and named."""

from __future__ import annotations

import itertools
import json
import random
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from foundry_moe.certify import Record, compare, read_record
from foundry_moe.cli import main
from tests.certify import toy_trainer
from tests.certify.toy_trainer import RESUME_FAULTS
from tests.helpers.pages import blocks

RANKS = 2
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
LATE_FAULTS = ("microbatches summed", "frozen", "loss without gradient")  # of one rank
LATE_SINCE = 6  # steps without the fault
SYMPTOMS = {
    "expert gradients undivided": r"gradients of all experts at step 1 are 2 times .*the expert parallel degree",
    "dense gradients summed": r"are 2 times .*the number of ranks",
    "microbatches summed": r"all gradients at step 1 are 2 times .*the number of microbatches",
    "loss without gradient": r"of gates alone|embedding",
    "experts of other ranks left out": r"the loss at step 1 is .*: the forward pass differs",
    "weight differs on a rank": r"weight of head differs between replicas after step 2",
    "frozen": r"bias never has a gradient",
    "another batch": r"step 1: another batch of as many tokens",
    "clips by its own norm": r"times those of .*: clipping by another norm",
    "another learning rate": r"the optimizer's lr of .* at step 1 is 0\.03 in place of 0\.01",
    "dense gradients of one rank": r"head.*differ",
    "experts of rank 1 lost": r"weight at the start: the experts of rank 1 .* differ, and all else agrees",
    "moments lost": r"state exp_avg of .* restarted at zero at the start",
    "moments of rank 1 lost": r"state exp_avg of the experts of rank 1 .* restarted at zero at the start",
    "stale weights": r"the weights at the start are those of step 1, not of step 2",
    "one rank's experts on all": r"weight at the start: the experts of rank 1 .* differ",
}
# Their factors, or the loss, differ by as much as rounding does, so these are found and not named.
UNNAMED_IN_BF16 = (
    "expert gradients undivided", "microbatches summed", "experts of other ranks left out", "clips by its own norm"
)  # fmt: skip


def spawn(folder: Path, runs: list[dict[str, Any]]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.start_processes(
        toy_trainer.worker, (RANKS, port, str(folder), runs), nprocs=RANKS, start_method="spawn"
    )


def healthy_runs() -> list[dict[str, Any]]:
    """Ten groups of four runs of the same training: named `GROUP RANKS MICROBATCHES`."""
    draw, runs = random.Random(5), []
    for group in range(10):
        keys = {"dtype": DTYPES[group % len(DTYPES)], "seed": group, "steps": draw.choice([2, 3])}
        for ranks in (1, RANKS):
            for microbatches in draw.sample([1, 2, 4], 2):
                runs.append({"name": f"{group} {ranks} {microbatches}", "microbatches": microbatches, **keys})
    return runs


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`alone` on one rank, `two` on two, runs for each fault and type, and `healthy_runs`."""
    folder = tmp_path_factory.mktemp("records")
    toy_trainer.run(folder / "alone", steps=3)
    runs: list[dict[str, Any]] = [{"name": "two", "steps": 3, "microbatches": 2}]
    for dtype in DTYPES:
        toy_trainer.run(folder / f"{dtype} alone", steps=3, dtype=dtype)
        for fault in SYMPTOMS:
            keys = {"steps": 3 if fault in RESUME_FAULTS else 2, "dtype": dtype, "microbatches": 2}
            runs.append({"name": f"{dtype} {fault}", "fault": fault, **keys})
    for healthy in healthy_runs():
        if healthy["name"].split()[1] == "1":
            toy_trainer.run(folder / healthy.pop("name"), **healthy)
        else:
            runs.append(healthy)
    spawn(folder, runs)
    return folder


def test_one_rank_and_two_are_the_same_and_so_is_a_resumption(records: Path) -> None:
    alone = read_record(records / "alone/run")
    for other in ("two/run", "two/resumed", "alone/resumed"):
        report = compare(alone, read_record(records / other))
        assert report.same, report
        assert report.largest < 1e-12
    assert compare(alone, read_record(records / "two/run")).steps == (1, 2, 3)


@pytest.mark.parametrize("fault", SYMPTOMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_planted_fault_is_found_and_named(fault: str, dtype: torch.dtype, records: Path) -> None:
    part = "resumed" if fault in RESUME_FAULTS else "run"
    report = compare(read_record(records / f"{dtype} alone/run"), read_record(records / f"{dtype} {fault}" / part))
    assert not report.same
    if dtype != torch.bfloat16 or fault not in UNNAMED_IN_BF16:
        assert any(re.search(SYMPTOMS[fault], symptom) for symptom in report.symptoms), report


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fault_that_begins_late_is_found_at_its_step(dtype: torch.dtype, tmp_path: Path) -> None:
    def run(name: str, microbatches: int = 2, fault: str = "") -> Record:
        keys = {"steps": LATE_SINCE + 1, "fault_since": LATE_SINCE, "fault": fault}
        toy_trainer.run(tmp_path / name, dtype=dtype, microbatches=microbatches, **keys)
        return read_record(tmp_path / name / "run")

    healthy = run("whole", microbatches=1)
    report = compare(healthy, run("healthy"))
    assert report.same and report.largest < 0.06
    for fault in LATE_FAULTS:
        first = compare(healthy, run(fault, fault=fault)).first
        assert first is not None and first.step == LATE_SINCE + 1, fault


def test_two_hundred_healthy_pairs_are_the_same(records: Path) -> None:
    """Pairs of records of the same training, on other ranks, in other microbatches, whole or resumed."""
    draw, compared = random.Random(6), 0
    for group in {run["name"].split()[0] for run in healthy_runs()}:
        of_group = [run["name"] for run in healthy_runs() if run["name"].split()[0] == group]
        read = [read_record(records / name / part) for name in of_group for part in ("run", "resumed")]
        for a, b in draw.sample(list(itertools.combinations(read, 2)), 20):
            report = compare(a, b)
            assert report.same, (a.name, b.name, report)
            compared += 1
    assert compared == 200


def test_the_command_prints_the_diagnosis_and_exits_as_others_do(records: Path, capsys: Any) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["certify", *arguments])
        found = capsys.readouterr()
        return int(ended.value.code or 0), found.out + found.err

    alone = str(records / "alone/run")
    code, text = run(alone, str(records / "two/run"))
    assert code == 0 and "same" in text
    code, text = run(alone, str(records / "torch.float64 expert gradients undivided/run"), "--json")
    assert code == 1 and json.loads(text)["first"]["kind"] == "unclipped"
    code, text = run(alone, str(records / "nowhere"))
    assert code == 2 and "holds no record.jsonl" in text


def test_a_torn_last_line_is_left_out_and_a_wrong_one_is_named(records: Path, tmp_path: Path) -> None:
    lines = (records / "alone/run/record.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "record.jsonl").write_text("".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    assert [step.number for step in read_record(tmp_path).steps] == [1, 2]
    (tmp_path / "record.jsonl").write_text(lines[0] + lines[1] + lines[2].replace("[[", "[[[", 1))
    with pytest.raises(ValueError, match=r"record\.jsonl, line 3: this is no record"):
        read_record(tmp_path)


def test_a_folder_with_a_record_is_not_overwritten(records: Path) -> None:
    model, optimizer = toy_trainer.build(0, 1, torch.float64, "")
    with pytest.raises(ValueError, match="exists: give each run, and each resume, a folder of its own"):
        toy_trainer.Recorder(model, optimizer, records / "alone/run")


def test_every_rank_refuses_what_rank_0_refuses(records: Path) -> None:
    for name, sentence in (("run", "exists: give each run"), ("wrong", "experts has 320 elements, and ranks hold 256")):
        for rank in range(RANKS):
            assert sentence in (records / f"refused {name} {rank}").read_text()


class Scored(torch.nn.Sequential):
    """A model whose output is its loss, as the page's program has it."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = batch["input_ids"]
        return torch.nn.functional.cross_entropy(super().forward(ids).flatten(0, 1), ids.flatten())


def test_the_program_and_the_command_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,), (command, _) = (blocks("how-to/certify.md", language) for language in ("python", "bash"))
    for name, sequences in (("one_rank", 4), ("two_ranks", 2)):  # half of the batch, as a rank of two has it
        torch.manual_seed(1)
        model = Scored(torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11))
        ids = torch.arange(20).view(4, 5)[:sequences] % 11
        names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "loader": [{"input_ids": ids}] * 2}
        names["clip_grad_norm_"] = torch.nn.utils.clip_grad_norm_
        exec(program.replace("records/two_ranks", f"records/{name}"), names)
    with pytest.raises(SystemExit) as ended:
        main(command.split()[1:])
    assert ended.value.code == 1
    assert "step 1: another batch: 10 tokens, not 20" in capsys.readouterr().out
