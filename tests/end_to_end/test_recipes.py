"""Fine-tuning, evaluation and logging through the launcher, with the YAMLs of docs/how-to/recipes.md.

One run on two processes with divided experts, resumed on one, exported, and evaluated as any Hugging Face model.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

from tests.helpers.demo import ROOT
from tests.helpers.warm import programs

FINETUNE = ROOT / "yamls" / "finetune" / "instructions.yaml"
LORA = ROOT / "yamls" / "finetune" / "lora_cpu.yaml"
EVAL = ROOT / "yamls" / "eval" / "exported.yaml"
ANSWERS = [("Who speaks?", "The President"), ("To whom?", "Congress"), ("Count to three.", "One, two, three")]


def run(*command: Any, cwd: Path) -> str:
    """Output of a command that ends well. Evaluation in context leaves a copy of its tasks in the working directory."""
    done = subprocess.run(
        [str(programs() / command[0]), *map(str, command[1:])],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_text) -> Path:
    """`model`: a small Mixtral and a tokenizer; `data`: instructions and tasks."""
    folder = tmp_path_factory.mktemp("recipes")
    tokenizer = AutoTokenizer.from_pretrained(tiny_text / "tokenizer")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    config = MixtralConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **shape, **heads)
    MixtralForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    asked = [{"prompt": f"{ask} ({i})", "response": f" {answer}."} for i in range(80) for ask, answer in ANSWERS]
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    tasks = [{"context": ask, "continuation": answer} for ask, answer in ANSWERS * 2]
    (folder / "data" / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    return folder


def finetune(folder: Path, processes: int, duration: str, *overrides: str) -> str:
    places = [f"variables.{name}={folder / name}" for name in ("model", "data", "run")]
    return run(
        "composer", "-n", processes, ROOT / "foundry_moe" / "train.py", FINETUNE, *places, *overrides,
        "max_seq_len=128", f"max_duration={duration}", f"eval_interval={duration}", "optimizer.lr=1.0e-3",
        "icl_subset_num_batches=1", "scheduler.t_warmup=1ba",
        cwd=folder,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finetuned(folder) -> tuple[str, str]:
    """The output of a run on two processes, whose experts are divided, and of the one that goes on from it on one."""
    wandb = f"loggers.wandb.init_kwargs.dir={folder / 'run' / 'logs'}"  # a folder that nothing else creates
    board = f"loggers.tensorboard.log_dir={folder / 'run' / 'board'}"
    first = finetune(folder, 2, "3ba", "algorithms.dmoe.mesh.expert=2", board, wandb)
    offline = f"loggers.wandb={{init_kwargs: {{mode: offline, dir: {folder / 'run' / 'logs'}}}}}"
    second = finetune(folder, 1, "5ba", "loggers={}", offline, "icl_tasks=null")
    return first, second


@pytest.fixture(scope="module")
def exported(folder, finetuned) -> Path:
    run("foundry-moe", "export", folder / "run" / "checkpoints", folder / "out", cwd=folder)
    return folder / "out"


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "expert_load.jsonl").read_text().splitlines()]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_instructions_are_packed_and_trained_on_and_the_page_is_there(folder, finetuned):
    first, second = finetuned
    assert "batch 1/3ba" in first and "resuming at batch 3" in second and "batch 5/5ba" in second
    found = lines(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    asked = map(json.loads, (folder / "data" / "train.jsonl").read_text().splitlines())
    longest = max(len(tokenizer(row["prompt"] + row["response"])["input_ids"]) for row in asked)
    assert [line["batch"] for line in found] == [1, 2, 3, 4, 5]
    for line in found:
        # 8 rows of up to 128 tokens, 2 choices per token
        assert 2 * 8 * 2 * longest < sum(line["loads"]["0"]) <= 2 * 8 * 128, "rows hold more than two examples"
    assert found[0]["metrics"]["dmoe/rank_max_over_mean/worst"] > 1, "experts on two ranks"
    assert found[-1]["metrics"]["dmoe/rank_max_over_mean/worst"] == 1
    assert found[0]["metrics"].keys() == found[-1]["metrics"].keys()
    assert "5 lines" in (folder / "run" / "expert_load.html").read_text()


def test_tasks_of_a_yaml_are_evaluated_in_context(finetuned):
    for shots in (0, 2):
        assert f"metrics/answers/{shots}-shot/InContextLearningLMAccuracy" in finetuned[0]


def test_a_frozen_gate_is_the_one_it_was_after_a_mesh_a_resume_and_an_export(folder, exported):
    before, after = tensors(folder / "model"), tensors(exported)
    assert before.keys() == after.keys()
    gates = [name for name in before if name.endswith("block_sparse_moe.gate.weight")]
    assert len(gates) == 2
    same = {name for name in before if torch.equal(before[name].float(), after[name].float())}
    assert same >= set(gates)
    # an expert of the last layer that has tokens of prompts alone gets no gradient, since it has no loss
    assert all(".layers.1.block_sparse_moe.experts." in name for name in same - set(gates)), same


def test_figures_arrive_at_wandb_mlflow_and_tensorboard_without_a_network(folder, finetuned):
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = {line["batch"]: line["metrics"]["dmoe/max_violation/worst"] for line in lines(folder)[:3]}
    client = MlflowClient(str(folder / "run" / "mlflow"))
    (experiment,) = [e for e in client.search_experiments() if e.name.endswith("dmoe")]
    (mlflow_run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(mlflow_run.info.run_id, "dmoe/max_violation/worst")
    assert sorted(point.value for point in history) == pytest.approx(sorted(wanted.values()), rel=1e-6)
    board = EventAccumulator(str(next((folder / "run" / "board").rglob("events*")).parent))
    board.Reload()
    scalars = board.Scalars("dmoe/max_violation/worst")
    assert [point.value for point in scalars] == pytest.approx(list(wanted.values()), rel=1e-6)
    kept = sorted((folder / "run" / "logs" / "wandb").rglob("*.wandb"))
    assert len(kept) == 2 and len({path.name for path in kept}) == 1, "the resumed run has the same id"
    for name in ("dmoe/max_violation/worst", "lr-DecoupledAdamW/group0", "time/"):
        assert all(name.encode() in path.read_bytes() for path in kept), name


def test_llm_foundry_evaluates_an_exported_model(folder, exported):
    said = run(
        "llmfoundry", "eval", EVAL, f"variables.model={exported}", f"variables.data={folder / 'data'}",
        "max_seq_len=128", cwd=folder,
    )  # fmt: skip
    assert "Printing complete results for all models" in said
    assert "| answers" in said and "exported" in said


def test_adapters_are_trained_on_a_mesh_resumed_on_one_process_and_exported(folder):
    def train(processes: int, *overrides: str) -> str:
        places = [f"variables.{name}={folder / name}" for name in ("model", "data")]
        launcher = ("composer", "-n", processes, ROOT / "foundry_moe" / "train.py")
        return run(*launcher, LORA, *places, f"variables.run={folder / 'lora'}", *overrides, cwd=folder)

    def export(name: str, *words: str) -> dict[str, torch.Tensor]:
        tool = ("foundry-moe", "export", folder / "lora" / "checkpoints")
        run(*tool, folder / name, *words, cwd=folder)
        return tensors(folder / name)

    train(2, "algorithms.dmoe.mesh.expert=2", "max_duration=3ba", "callbacks.elastic_checkpoint.save_frozen=false")
    first = export("adapter", "--adapter", "--format", "per-expert")
    said = train(1, "max_duration=5ba")
    assert "resuming at batch 3" in said
    merged, pairs = export("merged", "--merge"), export("adapter_5", "--adapter", "--format", "per-expert")
    before = tensors(folder / "model")
    assert before.keys() == merged.keys() and first.keys() == pairs.keys()
    assert any(not torch.equal(first[name], pairs[name]) for name in pairs), "the resumed run trained"
    for name, weight in before.items():
        pair = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{pair}.lora_A.weight" in pairs:  # alpha is twice r
            weight = weight + 2 * pairs[f"{pair}.lora_B.weight"] @ pairs[f"{pair}.lora_A.weight"]
        torch.testing.assert_close(merged[name], weight, rtol=1e-5, atol=1e-6)
    assert any(bool(tensor.any()) for name, tensor in first.items() if ".lora_B." in name)
