"""The YAML of every page is part of a run that passes `check`, and its layer trains; `foundry-moe` commands parse."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from foundry_moe.cli import parse
from foundry_moe.config import MoEConfig
from foundry_moe.launch.run_config import check_whole_run, plain
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.moe import MoELayer
from foundry_moe.layers.schedule import Progress
from tests.helpers.demo import DEMO, ROOT
from tests.helpers.pages import blocks

pytestmark = pytest.mark.quick

PAGES = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
README = "../README.md"
OF_EXPERTS = {item.name for item in fields(MoEConfig)}


def run_with(block: str) -> DictConfig:
    """The demo's run with a page's keys. Keys of experts alone stand for `model.moe`."""
    keys: dict[str, Any] = yaml.safe_load(block)
    if "moe" in keys or set(keys) <= OF_EXPERTS:
        experts = keys.pop("moe", None) or {key: keys.pop(key) for key in list(keys)}
        keys = {**keys, "model": {"moe": {"num_experts": 64, **experts}}}
    run: Any = OmegaConf.load(DEMO)
    if "dmoe" in keys.get("algorithms", {}):
        run.model = {"name": "hf_causal_lm", "pretrained_model_name_or_path": "a/b"}
    for part in ("train_loader", "optimizer", "loggers"):
        if "name" in (keys.get(part) or {}):
            run[part] = {}  # the page's, not a mixture
    if "gate" in keys.get("model", {}).get("moe", {}):
        run.model.moe.gate, run.model.moe.loss = {}, "auto"
    return OmegaConf.merge(run, keys)


@pytest.mark.parametrize("page", [*PAGES, README])
def test_yaml_of_a_page_is_that_of_a_run_and_its_layer_trains(page: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counts.json").write_text(str(list(range(32))))  # of reference/gates/hash.md
    for block in blocks(page, "yaml"):
        config = check_whole_run(plain(run_with(block)))
        assert config is not None
        if isinstance(config.expert_hidden_size, tuple) or config.lora is not None:
            continue  # other tests train these
        context = BatchContext()
        context.progress = Progress(ba=1, dur=0.01)
        widths = {"expert_hidden_size": 8, "activation": "swiglu", "bias": False, "init": "random"}
        layer = MoELayer(16, replace(config, mesh=None, layers="all", backend="reference", **widths), context=context)
        layer.reset_parameters()
        context.set_tokens(torch.arange(128).reshape(2, 64) % 32)
        y = layer(torch.randn(2, 64, 16, requires_grad=True))
        y.square().mean().backward()
        assert all(bool(p.grad.isfinite().all()) for p in layer.parameters() if p.grad is not None)
        assert layer.experts.w2_EDF.grad is not None


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_parse(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for block in re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.partition("   #")[0].strip()
            if command.startswith("foundry-moe ") and "[" not in command:
                words = shlex.split(command, comments=True)[1:]
                if "--help" not in words:
                    assert parse(words).run
