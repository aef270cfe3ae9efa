"""A model of the hub by its name, through the launcher, read by each rank: from a cache as the hub lays it out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.commands import export
from tests.helpers.families import small

ROOT = Path(__file__).parents[2]
NAME, REVISION = "someone/small-olmoe", "0" * 40


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """`HF_HOME` with the model in two files and an index."""
    model = tmp_path / "home" / "hub" / f"models--{NAME.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    small("olmoe", num_experts=4).save_pretrained(model / "snapshots" / REVISION, max_shard_size="150KB")
    return tmp_path / "home"


@pytest.mark.timeout(500)
def test_composer_trains_a_model_of_the_hub_that_no_process_holds(cache: Path, tmp_path: Path) -> None:
    files = list(cache.rglob("*.safetensors"))
    assert len(files) > 1
    run = [
        str(ROOT / "tests" / "distributed" / "tiny.yaml"),
        f"model={{name: hf_causal_lm, pretrained_model_name_or_path: {NAME}, init_device: meta}}",
        "model.use_train_metrics=false",
        "algorithms={dmoe: {num_experts: 4, top_k: 2, loss: {}, mesh: {expert: 2}}}",
        "optimizer={name: decoupled_adamw, lr: 0.0, weight_decay: 0.0}",
        "train_loader.vocab_size=60",
        "max_duration=1ba",
        f"callbacks={{elastic_checkpoint: {{folder: {tmp_path / 'run'}, interval: 1ba}}}}",
    ]
    words = [sys.executable, "-m", "composer.cli.launcher", "-n", "2", str(ROOT / "foundry_moe" / "train.py"), *run]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert export(tmp_path / "run", tmp_path / "out", "--tokenizer", "none") == 0
    there = {name: tensor for file in files for name, tensor in load_file(file).items()}
    left = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    assert there.keys() == left.keys() and all(torch.equal(left[name], there[name]) for name in there)
