"""`ParallelTrainer` on CPU processes: the program of docs/how-to/transformers_parallel.md, and TRL's SFTTrainer."""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from foundry_moe.integrations import transformers as integration
from foundry_moe.schema import UserError

if find_spec("accelerate") is None or find_spec("trl") is None:
    pytest.skip("needs accelerate and trl", allow_module_level=True)
ROOT = Path(__file__).parents[2]


def command(processes: int, folder: Path, *tasks: str) -> dict:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return {
        "args": [*launcher, "tests/integrations/trainer_worker.py", str(folder), *tasks], "cwd": ROOT, "text": True,
        "env": os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
    }  # fmt: skip


def launch(processes: int, folder: Path, *tasks: str) -> None:
    done = subprocess.run(**command(processes, folder, *tasks), capture_output=True, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def interrupt(folder: Path, step: int) -> str:
    """Sends SIGINT to torchrun after a step, as Ctrl-C does. All that it printed."""
    running = subprocess.Popen(**command(2, folder, "interrupted"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed, steps = [], 0
    for line in running.stdout:
        printed.append(line)
        steps += "'grad_norm'" in line
        if steps == step:
            running.send_signal(signal.SIGINT)
            steps += 100
    running.wait(60)
    return "".join(printed)


@pytest.fixture
def folder(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, bos_token_id=None,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path


def test_two_processes_train_save_and_resume_as_one(folder):
    """In one test, since processes import for seconds."""
    printed = interrupt(folder, step=3)
    (checkpoint,) = (path.name for path in (folder / "interrupted").glob("checkpoint-*"))
    assert checkpoint in [f"checkpoint-{step}" for step in range(3, 10)], printed[-4000:]
    (folder / "interrupted.json").unlink()

    launch(2, folder, "two", "interrupted", "SFT")
    for name in ("resumed on two", "resumed on one"):
        shutil.copytree(folder / "two/checkpoint-10", folder / name / "checkpoint-10")
    launch(2, folder, "resumed on two")
    launch(1, folder, "resumed on one", "one process", "one process SFT")

    logs = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    parameters = {name: torch.load(folder / f"{name}.pt") for name in logs}
    assert all(log["step"] == 20 and len(log["loss"]) == 20 for log in logs.values())
    for name, one in (("two", "one process"), ("resumed on one", "one process"), ("SFT", "one process SFT")):
        assert logs[one]["loss"][-1] < logs[one]["loss"][0] and min(logs[one]["grad_norm"]) > 0.5  # all steps clip
        for key in ("loss", "grad_norm", "eval_loss"):
            assert logs[name][key] == pytest.approx(logs[one][key], rel=1e-5), (name, key)  # sums in another order
    for name in ("two", "resumed on one"):  # after SFT AdamW has amplified the noise of <eos>, whose gradient is zero
        for parameter, value in parameters["one process"].items():
            torch.testing.assert_close(parameters[name][parameter], value, rtol=0, atol=1e-5)
    for name in ("interrupted", "resumed on two"):  # on as many processes: the same numbers
        assert logs[name] == logs["two"], name
        assert all(torch.equal(value, parameters["two"][key]) for key, value in parameters[name].items()), name

    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(folder / "two/trained").state_dict()
    assert all(torch.equal(trained[key], value) for key, value in parameters["two"].items())


def test_arguments_and_checkpoints_that_would_fail_later_are_refused(folder):
    from transformers import AutoModelForCausalLM, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    settings = {"output_dir": str(folder / "out"), "report_to": [], "use_cpu": True}
    best = TrainingArguments(**settings, load_best_model_at_end=True, eval_strategy="steps", save_steps=1, eval_steps=1)
    with pytest.raises(UserError, match="load_best_model_at_end: not supported by ParallelTrainer; set to False"):
        integration.ParallelTrainer(model, best, eval_dataset=[{}])
    (folder / "out/checkpoint-5").mkdir(parents=True)
    trainer = integration.ParallelTrainer(model, TrainingArguments(**settings), train_dataset=[{}])
    with pytest.raises(UserError, match=r"resume_from_checkpoint \(.*checkpoint-5\) is not complete: give an earlier"):
        trainer.train(resume_from_checkpoint=True)
