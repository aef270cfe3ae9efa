"""What a user did wrong is one line; what went wrong elsewhere keeps its traceback."""

import json
import subprocess
import sys

import pytest
import torch
from foundry_moe_kernels.permute_plan import plan_permute

from foundry_moe.checkpoint.errors import DamagedError, ResumeError, StoreError, TakenOverError
from foundry_moe.checkpoint.layout import intersect
from foundry_moe.config import MoEConfig
from foundry_moe.launch import user_errors
from foundry_moe.launch.checkpoint_settings import parse_interval
from foundry_moe.launch.user_errors import NonfiniteError, raise_on_all_ranks, run_cleanly
from foundry_moe.schema import UserError, caught
from tests.helpers.demo import DEMO, ROOT

pytestmark = pytest.mark.quick


def refuse_top_k():
    MoEConfig(num_experts=2, top_k=3)


def refuse_checkpoint():
    raise ResumeError("the folder holds no checkpoint of step 3")


def lose_folder():
    raise TakenOverError("another process has taken over")


def lose_numbers():
    raise NonfiniteError("batch 3 was not finite")


def miss_store():
    raise StoreError("no answer from the store")


def find_damage():
    raise DamagedError("a block is damaged")


@pytest.mark.parametrize(
    ("mistake", "code"),
    [
        (refuse_top_k, 2),
        (refuse_checkpoint, 2),
        (lose_folder, 4),
        (lose_numbers, 3),
        (miss_store, 1),
        (find_damage, 1),
    ],
)
def test_a_mistake_in_any_of_our_packages_is_one_line(mistake, code, capsys):
    assert run_cleanly(mistake) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_mistake_that_all_ranks_make_is_printed_once_and_hidden_from_composers_launcher(
    everywhere, rank, monkeypatch, capsys
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(user_errors, "code_here", lambda code: code if rank == "0" else 0)

    def fail():
        raise_on_all_ranks(UserError("lr (-1)")) if everywhere else refuse_top_k()

    alone = everywhere and rank == "1"
    assert run_cleanly(fail) == (0 if alone else 2)
    assert capsys.readouterr().err.count("error: ") == (not alone)


@pytest.mark.parametrize(
    "fault",
    [
        lambda: intersect(((0,), (1,)), ((0, 0), (1, 1))),  # zip of other lengths
        lambda: parse_interval("1ba", unit="ba"),  # a TypeError
        lambda: plan_permute(torch.zeros(2, 2, dtype=torch.int64), 5000),  # the config refuses so many
        lambda: caught(int, "x"),
        lambda: json.loads("{"),
    ],
)
def test_an_error_that_is_no_mistake_of_a_user_keeps_its_traceback_and_its_restart(fault, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises((ValueError, TypeError)) as raised:
        run_cleanly(fault)
    assert not isinstance(raised.value, UserError)
    assert "Traceback" in json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]


def test_parts_that_read_what_a_user_writes_raise_no_plain_value_error():
    """Its message would be printed below a traceback, and a launcher would restart the run."""
    kept = {"ops", "sparse", "checkpoint"}  # errors of their callers
    for path in (ROOT / "foundry_moe").rglob("*.py"):
        if path.relative_to(ROOT / "foundry_moe").parts[0] not in kept:
            assert "raise ValueError(" not in path.read_text(), f"{path}: raise foundry_moe.schema.UserError"


def test_a_command_that_fails_early_does_not_import_the_kernels():
    code = "import sys, foundry_moe.launch.user_errors; sys.exit('triton' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_output_that_nobody_reads_is_no_error():
    command = f"{sys.executable} -m foundry_moe.cli check {DEMO} | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
