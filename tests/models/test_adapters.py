"""Adapters of experts are switched off alone, or with peft's."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.models import adapters
from foundry_moe.models.adapters import _of_rank, adapters_off
from tests.helpers.families import small

ROOT = Path(__file__).parents[2]
PEFT = Path(os.environ.get("PEFT_PYTHON", ROOT / ".venv-transformers" / "bin" / "python"))
IDS = torch.randint(1, 60, (2, 9), generator=torch.Generator().manual_seed(1))


def with_adapters(model: Any, **keys: Any) -> Any:
    apply_dmoe(model, MoEConfig(num_experts=5, top_k=2, loss={}, lora={"r": 2, "alpha": 8}, **keys))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_B_E" in name:
                parameter.normal_()
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.quick
def test_without_adapters_a_model_is_the_one_that_it_was() -> None:
    before, model = logits(small("mixtral")), with_adapters(small("mixtral"))
    with_them, switches = logits(model), [layer.experts.adapters_enabled for layer in moe_layers(model)]
    assert (with_them - before).abs().max() > 0.1
    with pytest.raises(RuntimeError, match="left"), adapters_off(model):
        torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
        raise RuntimeError("left by an error")
    assert torch.equal(logits(model), with_them)
    assert [layer.experts.adapters_enabled for layer in moe_layers(model)] == switches, "of each layer its own"
    with pytest.raises(ValueError, match="the model has no experts with lora"), adapters_off(small("mixtral")):
        pass


@pytest.mark.quick
@pytest.mark.parametrize(("matrix", "own"), [("w1", slice(0, 2)), ("v1", slice(2, 4)), ("w2", slice(0, 2))])
def test_only_columns_of_zeros_are_left_out_of_a_larger_rank(matrix: str, own: slice) -> None:
    """Gate and up of an export share one rank of twice the size."""
    a_EKM, b_ENM = torch.randn(3, 5, 4), torch.zeros(3, 6, 4)
    b_ENM[..., own] = torch.randn(3, 6, 2)
    a, b = _of_rank(a_EKM, b_ENM, matrix, 2, Path("folder"))
    assert torch.equal(b @ a.mT, b_ENM @ a_EKM.mT) and a.shape[2] == b.shape[2] == 2
    assert _of_rank(a_EKM, b_ENM, matrix, 4, Path("folder")) == (a_EKM, b_ENM)
    for wrong, rank in ((b_ENM + 1, 2), (b_ENM, 3), (b_ENM, 1)):
        with pytest.raises(ValueError, match=rf"lora.r \({rank}\) must be 4, the rank of lora.start \(folder\)"):
            _of_rank(a_EKM, wrong, matrix, rank, Path("folder"))


@pytest.mark.quick
@pytest.mark.parametrize("left", [0.0, 1.0])
def test_a_folder_may_hold_other_adapters_only_if_they_add_nothing(left: float, monkeypatch: Any) -> None:
    model = with_adapters(small("mixtral"))
    factors = {}
    for layer in moe_layers(model):
        for matrix, names in layer.experts.adapter_names.items():
            for factor, name in zip("AB", names, strict=True):
                factors[layer.layer_index, matrix, factor] = torch.randn(layer.experts.get_parameter(name).shape)
    given = dict(factors)
    factors |= {(1, "other", "A"): torch.ones(5, 4, 2), (1, "other", "B"): torch.full((5, 4, 2), left)}
    monkeypatch.setattr(adapters, "read_folder", lambda folder: ({}, {"r": 2, "lora_alpha": 16}))
    monkeypatch.setattr(adapters, "factors_of", lambda *_: factors)
    if left:
        with pytest.raises(ValueError, match="adapts other of layer 1, which the run does not"):
            adapters.load_adapter(model, "folder")
        return
    adapters.load_adapter(model, "folder")
    for layer in moe_layers(model):
        for matrix, names in layer.experts.adapter_names.items():
            for factor, name, scale in zip("AB", names, (1, 16 / 8), strict=True):  # B has the quotient
                expected = given[layer.layer_index, matrix, factor] * scale
                torch.testing.assert_close(layer.experts.get_parameter(name).data, expected)


def peft_folder(folder: Path, spoiled: dict[str, torch.Tensor] | None = None, **keys: Any) -> Path:
    """A pair of w1 for each of two experts, as peft writes it, and some other tensors or keys."""
    pairs = {
        f"base_model.model.model.layers.0.mlp.experts.{e}.gate_proj.lora_{factor}.weight": torch.ones(*shape)
        for e in range(2)
        for factor, shape in (("A", (2, 5)), ("B", (6, 2)))
    }
    plain = {"peft_type": "LORA", "use_rslora": False, "use_dora": False, "lora_bias": False, "alpha_pattern": {}}
    config = {**plain, "rank_pattern": {}, "r": 2, "lora_alpha": 4, **keys}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({**pairs, **(spoiled or {})}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.quick
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alpha_pattern", {"gate_proj": 100}),
        ("rank_pattern", {"gate_proj": 1}),
        ("use_dora", True),
        ("lora_bias", True),
        ("peft_type", "LOHA"),
        ("use_rslora", "false"),
    ],
)
def test_a_key_of_a_peft_folder_that_changes_its_products_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    tensors, config = adapters.read_folder(peft_folder(tmp_path))
    assert adapters.factors_of(tensors, config, 2, tmp_path)[0, "w1", "A"].shape == (2, 5, 2)
    with pytest.raises(ValueError, match=rf"lora.start: {key} \(.*peft's merge_and_unload"):
        adapters.read_folder(peft_folder(tmp_path, **{key: value}))


@pytest.mark.quick
def test_factors_of_another_rank_or_without_finite_numbers_are_refused(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.mlp.experts.1.gate_proj.lora_B.weight"
    for spoiled, keys, listed in ((torch.ones(6, 1), {}, r"\[6, 1\]"), (torch.ones(6, 2), {"r": 4}, r"\[2, 5\]")):
        read = adapters.read_folder(peft_folder(tmp_path, {name: spoiled}, **keys))
        with pytest.raises(ValueError, match=rf"{listed} of .* is not of its rank, r \({read[1]['r']}\)"):
            adapters.factors_of(*read, 2, tmp_path)
    with pytest.raises(ValueError, match=f"{name} of .* holds infinite or undefined numbers"):
        adapters.read_folder(peft_folder(tmp_path, {name: torch.full((6, 2), float("nan"))}))


@pytest.mark.quick
@pytest.mark.parametrize("order", ["peft before", "peft after", "copied"])
def test_pefts_switch_is_that_of_experts_too(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class TunerLayer(nn.Linear):
        disable_adapters = False

    peft: Any = ModuleType("peft.tuners.tuners_utils")
    peft.BaseTunerLayer = TunerLayer
    monkeypatch.setitem(sys.modules, "peft.tuners.tuners_utils", peft)
    model = small("mixtral")
    before = logits(model)
    if order == "peft after":
        model = with_adapters(model)
        logits(model)
    attention: Any = model.model.layers[1].self_attn
    attention.q_proj.__class__ = TunerLayer
    if order != "peft after":
        model = with_adapters(model)
    with_them = logits(model)
    if order == "copied":
        model = copy.deepcopy(model)
    switched: Any = model.model.layers[1].self_attn.q_proj
    with pytest.raises(ValueError, match=r"use peft's model.disable_adapter\(\)"), adapters_off(model):
        pass
    switched.disable_adapters = True
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
    switched.disable_adapters = False
    assert torch.equal(logits(model), with_them) and (with_them - before).abs().max() > 0.1


def test_a_reference_of_peft_is_the_model_before_both_kinds_of_adapters() -> None:
    if not list(PEFT.parents[1].glob("lib/python*/site-packages/peft")):
        pytest.skip("no environment with transformers 5 and peft: make peft-env")
    script = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from foundry_moe import MoEConfig, apply_dmoe

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=61, initializer_range=0.3)).eval()
ids = torch.arange(18).reshape(2, 9)
with torch.no_grad():
    before = model(input_ids=ids).logits
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    apply_dmoe(model, MoEConfig(num_experts=4, top_k=2, init="upcycle", lora={"r": 2}))
    for name, parameter in model.named_parameters():
        if "_B_E" in name:
            parameter.normal_()
    model.eval()
    changed = model(input_ids=ids).logits
    with model.disable_adapter():
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(input_ids=ids).logits, changed) and (changed - before).abs().max() > 0.1
"""
    run = subprocess.run([PEFT, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
