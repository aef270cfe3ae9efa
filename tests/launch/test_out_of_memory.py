"""A GPU that runs out of memory: a sentence and code 2 in the first batches, the code that restarts later."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from composer.core import Callback

from foundry_moe import train
from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from tests.helpers.plans import ROOT, load
from tests.helpers.tiny_runs import YAML
from tests.helpers.training import batches, fit, mpt

GIB = 2**30
SIZE = "device_train_microbatch_size"


class Full(Callback):
    """Runs out of memory in one batch, or in its evaluation."""

    def __init__(self, batch: int, event: str = "before_forward") -> None:
        self.batch = batch
        setattr(self, event, self.fail)

    def fail(self, state, logger) -> None:
        if state.timestamp.batch.value + 1 == self.batch:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def error_of(*callbacks, **keys) -> BaseException:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(mpt(), callbacks=callbacks, duration="8ba", **keys)
    return caught.value


def test_only_the_first_batches_of_a_process_are_the_users(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(train, "_memory_bytes", lambda: 40 * GIB)
    run = load("yamls/pretrain/1gpu.yaml", **{SIZE: 64, "global_train_batch_size": 64})
    sentence = train.explain_out_of_memory(error_of(Full(2)), run, 1)
    assert sentence.startswith(f"out of memory in batch 2 on a GPU with 40.0 GiB for this run: {SIZE} (64) needs ")
    assert f"these fit: {SIZE}: " in sentence
    assert train.explain_out_of_memory(error_of(Full(5)), run, 1) is None
    saves = {"folder": str(tmp_path), "interval": "1ba", "signals": []}
    fit(mpt(), callbacks=[ElasticCheckpoint(**saves)], duration="4ba")
    resumed = error_of(Full(5), ElasticCheckpoint(**saves))
    assert "out of memory in batch 5 " in train.explain_out_of_memory(resumed, run, 1), "of this process the first"
    assert train.explain_out_of_memory(ValueError("another"), run, 1) is None
    before = torch.OutOfMemoryError("CUDA out of memory.")
    for error in (before, RuntimeError("CUDA error: out of memory")):
        assert "out of memory before the first batch on a GPU" in train.explain_out_of_memory(error, run, 1)
    evaluated = error_of(Full(2, "eval_before_forward"), eval_dataloader=batches(1), eval_interval="1ba")
    text = train.explain_out_of_memory(evaluated, {**run, "device_eval_batch_size": 9}, 1)
    assert text == "out of memory in an evaluation: lower device_eval_batch_size (9)"


def test_the_command_ends_with_one_sentence_and_code_2(capsys, monkeypatch) -> None:
    def full(config) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("llmfoundry.command_utils.train", full)
    monkeypatch.setattr(train, "_memory_bytes", lambda: 40 * GIB)
    monkeypatch.setattr(train, "exit_on", lambda signals: None)  # handlers that would stay
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setattr(sys, "argv", ["train.py", YAML, "global_train_batch_size=8", f"{SIZE}=4"])
    with pytest.raises(SystemExit) as ended:
        train.main()
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(lines) == 1 and lines[0].startswith("error: out of memory before the first batch on a GPU"), lines


BIG = """
code_paths: [benchmarks/random_tokens.py]
max_seq_len: 1024
model:
  name: dmoe_causal_lm
  init_device: cpu
  d_model: 512
  n_heads: 8
  n_layers: 4
  max_seq_len: 1024
  vocab_size: 50304
  no_bias: true
  use_train_metrics: false
  moe: {num_experts: 8, top_k: 2, expert_hidden_size: 512}
tokenizer: {}
train_loader: {name: random_tokens, max_seq_len: 1024, vocab_size: 50304, samples: 100000}
optimizer: {name: decoupled_adamw, lr: 1.0e-4}
scheduler: {name: constant_with_warmup, t_warmup: 0ba}
fsdp_config: {}
max_duration: 4ba
eval_interval: 0
precision: amp_bf16
progress_bar: false
"""


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_microbatch_that_does_not_fit_is_a_sentence_and_auto_trains(tmp_path, gpus) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    path = tmp_path / "big.yaml"
    path.write_text(BIG)
    sequences = 4096
    words = [f"global_train_batch_size={sequences * gpus}"]
    words += ["model.init_device=meta", "model.moe.mesh={expert: 2}"] if gpus > 1 else []

    def command(size: int | str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "foundry_moe.cli", "train", "-n", gpus, path, *words, f"{SIZE}={size}"]
        return subprocess.run([*map(str, line)], cwd=ROOT, capture_output=True, text=True, timeout=280)

    full = command(sequences)
    print(full.stdout[-3000:], full.stderr[-3000:])
    assert full.returncode == 2, "out of memory in the first batch"
    assert "error: out of memory in batch 1 on a GPU with " in full.stderr and f"these fit: {SIZE}: " in full.stderr
    chosen = command("auto")
    print(chosen.stdout[-3000:], chosen.stderr[-3000:])
    assert chosen.returncode == 0
    assert f"{SIZE}: " in chosen.stdout and "(auto: " in chosen.stdout
