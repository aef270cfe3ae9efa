"""What a user did wrong is one line; what went wrong elsewhere keeps its traceback."""

import json
import subprocess
import sys

import pytest
import torch
from foundry_moe_kernels import permute_plan

from foundry_moe.checkpoint.errors import DamagedError, ResumeError, StoreError, TakenOverError
from foundry_moe.config import MoEConfig
from foundry_moe.launch.user_errors import NONFINITE, PASSING_ERROR, TAKEN_OVER, USER_ERROR, NonfiniteError, run_cleanly
from tests.helpers.demo import DEMO

pytestmark = pytest.mark.quick


def refuse_top_k():
    MoEConfig(num_experts=2, top_k=3)


def refuse_experts():
    permute_plan.plan_permute(torch.zeros(2, 2, dtype=torch.int64), 5000)


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
        (refuse_top_k, USER_ERROR),
        (refuse_experts, USER_ERROR),
        (refuse_checkpoint, USER_ERROR),
        (lose_folder, TAKEN_OVER),
        (lose_numbers, NONFINITE),
        (miss_store, PASSING_ERROR),
        (find_damage, PASSING_ERROR),
    ],
)
def test_a_mistake_in_any_of_our_packages_is_one_line(mistake, code, capsys):
    assert run_cleanly(mistake) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_errors_of_other_code_and_of_a_package_with_a_longer_name_keep_their_traceback():
    with pytest.raises(ValueError, match="Expecting"):
        run_cleanly(lambda: json.loads("{"))
    file = permute_plan.__file__.replace("kernels/", "kernels_of_others/")
    code = compile("raise ValueError('not ours')", file, "exec")
    with pytest.raises(ValueError, match="not ours"):
        run_cleanly(lambda: exec(code))


def test_a_command_that_fails_early_does_not_import_the_kernels():
    code = "import sys, foundry_moe.launch.user_errors; sys.exit('triton' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_output_that_nobody_reads_is_no_error():
    command = f"{sys.executable} -m foundry_moe.cli check {DEMO} | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
