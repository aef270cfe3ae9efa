"""Users' programs as processes: HF Trainer, TRL's SFTTrainer, FSDP2 through Accelerate. Losses equal eager's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.transformers_experts import without_kernels
from tests.helpers.transformers_models import losses, tiny_model

ROOT = Path(__file__).parents[2]
# fp32 rounding after 20 steps of AdamW at losses of about 4; the logs round to 1e-6, Trainer's to 1e-4 or finer
TOLERANCE = 2e-5


def losses_of(*arguments: str) -> list[float]:
    # without the interpreter, as a user on a CPU has it
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("losses "))
    return [float(word) for word in line.split()[1:]]


def equal(ours: list[float], eager: list[float], steps: int) -> None:
    assert len(ours) == len(eager) == steps
    assert ours == pytest.approx(eager, abs=TOLERANCE)
    assert len(set(ours)) > 1, "nothing was trained"


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_twenty_steps_equal_eager(kind, monkeypatch):
    from foundry_moe.integrations.transformers import register

    without_kernels(monkeypatch)
    equal(losses(tiny_model(kind), register(), 20), losses(tiny_model(kind), "eager", 20), 20)


def test_trainer(tmp_path):
    def run(experts: str) -> list[float]:
        return losses_of("examples/hf_trainer.py", "--experts", experts, "--out", str(tmp_path / experts))

    equal(run("foundry_moe"), run("eager"), 20)


def test_sft_trainer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(["<eos>", *map(chr, range(32, 95))])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(tmp_path)
    tiny_model("qwen3_moe").save_pretrained(tmp_path)

    def run(experts: str) -> list[float]:
        return losses_of(
            "examples/trl_sft.py", str(tmp_path), "--experts", experts, "--out", str(tmp_path / experts), "--steps", "5"
        )

    equal(run("foundry_moe"), run("eager"), 5)


def test_fsdp2_through_accelerate_on_two_processes():
    def run(experts: str) -> list[float]:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        endpoint = ["--rdzv-endpoint", "localhost:0", "-m", "tests.helpers.accelerate_fsdp2_worker"]
        return losses_of(*torchrun, *endpoint, experts, "5")

    equal(run("foundry_moe"), run("eager"), 5)


def test_core_imports_neither_composer_nor_llm_foundry():
    """Every module that is not named as the trainer's is importable where neither is installed."""
    code = """
import importlib, importlib.util, pathlib
from tests.test_layering import KNOWS_TRAINER, PACKAGE, modules, name_of
assert importlib.util.find_spec("composer") is None and importlib.util.find_spec("llmfoundry") is None
count = 0
for path in modules():
    if not str(path.relative_to(PACKAGE)).startswith(KNOWS_TRAINER):
        importlib.import_module(f"foundry_moe.{name_of(path)}".removesuffix(".__init__"))
        count += 1
from foundry_moe.checkpoint import Reader, Writer
assert count > 60, count
print("losses 0")
"""
    losses_of("-c", code)


def test_training_command_names_the_extra(tmp_path):
    done = subprocess.run(
        [sys.executable, "foundry_moe/train.py", str(tmp_path / "run.yaml")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "pip install 'foundry_moe[foundry]'" in done.stderr
    assert "Traceback" not in done.stderr
