"""Programs in examples/ that train models of transformers have the same losses with our experts as with eager."""

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def gpu_of(processes: int) -> dict[str, str]:
    """One GPU for one process, which else trains with DataParallel: TRL refuses that."""
    if processes > 1 or not torch.cuda.is_available():
        return {}
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def run(program: str, folder: Path, experts: str, processes: int = 1) -> str:
    """Its output; a process that exits with another status than 0 fails the test.

    Without a GPU one program runs the kernels in Triton's interpreter, which takes minutes, and the others plain torch.
    """
    kernels, launcher = {"TRITON_INTERPRET": "0"}, []
    if program == "transformers_trainer":
        kernels, launcher = {}, ["-m", "tests.helpers.interpreter"]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [sys.executable, *launcher, f"examples/{program}.py", str(folder), "--experts", experts],
        cwd=ROOT, capture_output=True, text=True, timeout=550, env=os.environ | gpu_of(processes) | kernels,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("program", "library", "processes"),
    [
        ("transformers_trainer", "accelerate", 1),
        ("transformers_sft", "trl", 1),
        ("transformers_fsdp2", "accelerate", 2),
    ],
)
def test_twenty_steps_have_the_losses_of_eager_to_fp32_rounding(program, library, processes, tmp_path):
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
    outputs = [run(program, tmp_path / experts, experts, processes) for experts in ("eager", "foundry_moe")]
    eager, ours = ([float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", text, re.M)] for text in outputs)
    assert len(eager) == 20 and eager[-1] < 0.8 * eager[0]
    # sums in another order, over twenty updates
    assert ours == pytest.approx(eager, rel=1e-4)
    if program != "transformers_sft":
        assert "reloaded model is equal: True" in outputs[1]


def test_a_batch_that_processes_cannot_share_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(sys, "argv", ["transformers_parallel.py", "folder"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples/transformers_parallel.py"))
    assert "--sequences (4) must be a multiple of the number of processes (3)" in capsys.readouterr().err


def losses_of_one_process(folder: Path, program: Path, steps: int) -> list[float]:
    """Of the same model and batches in transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(program.read_bytes()))
    batches = text[: len(text) // 128 * 128].view(-1, 4, 32)
    losses = []
    for step in range(1, steps + 1):
        loss = model(batches[step], labels=batches[step], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_plain_loop_continues_on_one_process_where_two_ended(tmp_path):
    program = ROOT / "examples/transformers_parallel.py"
    outputs = []
    for processes, steps in ((2, 4), (1, 6)):
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(program)]
        done = subprocess.run(
            [sys.executable, *command, str(tmp_path), "--steps", str(steps)],
            cwd=ROOT, capture_output=True, text=True, timeout=200,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"},
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        outputs.append(done.stdout)
    assert "expert 2)" in outputs[0] and "expert 1)" in outputs[1]
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", "".join(outputs), re.M)]
    # printed with six decimals; sums in another order
    assert losses == pytest.approx(losses_of_one_process(tmp_path / "model", program, 6), abs=1e-5)
    assert {path.name for path in (tmp_path / "trained").iterdir()} == {
        path.name for path in (tmp_path / "model").iterdir()
    }
