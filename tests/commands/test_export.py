"""`foundry-moe export`: what leaves is the checkpoint's model, in plain transformers, or nothing leaves."""

from __future__ import annotations

import json
import re
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.store import StoreOptions
from foundry_moe.commands import export_certificate as certificate
from foundry_moe.launch.run_config import load_run, plain
from foundry_moe.models.mpt import DMoECausalLM
from foundry_moe.models.native.architecture import architecture_of
from foundry_moe.models.native.state_dict import native_of
from tests.helpers.checkpoints import damage
from tests.helpers.commands import export
from tests.helpers.exporting import BELOW_ZERO, MODEL_KINDS, MPTS, STRETCHED, Wrapped, commit, mpt, of_hugging_face
from tests.helpers.families import small
from tests.helpers.forging import manifest_of, packed, put_manifest

ROOT = Path(__file__).parents[2]
IDS = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(3))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("name", MPTS)
def test_an_mpt_leaves_as_the_family_that_computes_the_same(name: str, tmp_path: Path) -> None:
    model = mpt(**MPTS[name])
    assert export(commit(model, tmp_path / "run"), tmp_path / "out", "--certify") == 0
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert there.config.model_type == name.split(",")[0]
    # fp32, another order of sums
    torch.testing.assert_close(logits(there), logits(model.model), rtol=1e-4, atol=1e-5)
    found = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert found["good"] and found["logits"]["largest_difference"] < 1e-5 and not found["problems"]
    assert set(there.state_dict()) - {"lm_head.weight"} == set(found["tensors"]) - {"lm_head.weight"}


@pytest.mark.parametrize("kind", [*MODEL_KINDS, STRETCHED])
def test_a_model_of_hugging_face_leaves_as_its_family(kind: str, tmp_path: Path) -> None:
    model = of_hugging_face(kind)
    assert export(commit(Wrapped(model), tmp_path / "run"), tmp_path / "out", "--certify") == 0
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(there), logits(model), rtol=1e-4, atol=1e-5)


def test_deepseeks_biases_below_zero_leave_as_they_are_and_certified(tmp_path: Path) -> None:
    model = of_hugging_face(BELOW_ZERO)
    assert export(commit(Wrapped(model), tmp_path / "run"), tmp_path / "out", "--certify") == 0
    assert json.loads((tmp_path / "out" / "certificate.json").read_text())["logits"]["biases_raised"]
    there = load_file(next((tmp_path / "out").glob("*.safetensors")))
    biases = [tensor for name, tensor in there.items() if name.endswith("e_score_correction_bias")]
    assert biases and all(tensor.max() < 0 for tensor in biases)


def test_a_native_model_leaves_bit_for_bit_as_it_came(tmp_path: Path) -> None:
    untouched = small("mixtral").state_dict()
    assert export(commit(Wrapped(of_hugging_face("mixtral")), tmp_path / "run"), tmp_path / "out") == 0
    left = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert left.keys() == untouched.keys()
    assert all(torch.equal(left[name], untouched[name]) for name in left)


def test_cast_to_bf16_in_small_files_it_is_the_rounded_model(tmp_path: Path) -> None:
    model = mpt()
    assert export(commit(model, tmp_path / "run"), tmp_path / "out", "--dtype", "bf16", "--file-gb", 2e-5) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "out", torch_dtype="auto")
    assert there.dtype == torch.bfloat16
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.copy_(parameter.bfloat16())
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    torch.testing.assert_close(logits(there), logits(model.model), rtol=1e-4, atol=1e-5)


def test_the_newest_good_checkpoint_leaves_where_data_is_damaged(tmp_path: Path, capsys: Any) -> None:
    run = commit(mpt(), tmp_path / "run", steps=(7, 8))
    damage(open_store(str(run)), 8, "bit flipped")
    assert export(run, tmp_path / "out", "--tokenizer", "none", "--step", 8) == 1
    assert "other steps: 7" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert export(run, tmp_path / "out", "--tokenizer", "none") == 0
    told = capsys.readouterr()
    assert "step 8 is damaged, trying the one before" in told.err and "step 7 as Mixtral" in told.out


def test_into_the_folder_that_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = commit(mpt(), tmp_path / "run")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert export(run, ".", "--tokenizer", "none", "--no-certify") == 0
    assert (tmp_path / "here" / "config.json").is_file()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and its export."""
    folder = tmp_path_factory.mktemp("good")
    assert export(commit(mpt(), folder / "run"), folder / "out", "--certify") == 0
    return folder / "run", folder / "out"


def swap_experts(tensors: dict[str, torch.Tensor]) -> None:
    for kind in ("w1", "w2", "w3"):
        one, other = (f"model.layers.1.block_sparse_moe.experts.{e}.{kind}.weight" for e in (0, 2))
        tensors[one], tensors[other] = tensors[other], tensors[one]


def transpose(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    tensors[name] = tensors[name].T.contiguous()


def drop_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        del tensors[name]


def exchange_gate_and_up(tensors: dict[str, torch.Tensor]) -> None:
    for e in range(4):
        gate, up = (f"model.layers.0.block_sparse_moe.experts.{e}.{kind}.weight" for kind in ("w1", "w3"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


def turn_a_bit(tensors: dict[str, torch.Tensor]) -> None:
    raw = tensors["lm_head.weight"].view(torch.int32)
    raw[3, 3] ^= 1


SPOILS = [swap_experts, transpose, drop_a_layer, exchange_gate_and_up]


def spoiled(folder: Path, spoil: Any) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    spoil(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file.name for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if spoil is drop_a_layer:
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))


def spoiled_export(spoil: Any, run: Path, out: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of an export whose folder is spoiled before it is certified."""

    def certify(exported: Any, folder: Path, **options: Any) -> dict[str, Any]:
        spoiled(folder, spoil)
        return original(exported, folder, **options)

    original = certificate.certify
    monkeypatch.setattr("foundry_moe.commands.export.certify", certify)
    assert export(run, out, "--certify") == 1 and not out.exists()
    error = capsys.readouterr().err
    assert "the exported tensors, logits or tokenizer differ from the checkpoint" in error
    return error


@pytest.mark.parametrize("spoil", [*SPOILS, turn_a_bit])
def test_a_spoiled_folder_fails_by_its_tensors(
    spoil: Any, good: tuple[Path, Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = spoiled_export(spoil, good[0], tmp_path / "out", capsys, monkeypatch)
    assert "is not what the checkpoint has" in error or "is not in the folder" in error


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_spoiled_folder_fails_by_its_logits_alone(
    spoil: Any, good: tuple[Path, Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "_compare_tensors", lambda *_: [])
    assert "logits differ by" in spoiled_export(spoil, good[0], tmp_path / "out", capsys, monkeypatch)


def test_logits_beside_the_folder_are_ours(good: tuple[Path, Path]) -> None:
    saved = np.load(good[1] / "certificate.npz")
    with torch.no_grad():
        ours = mpt().model.eval()(input_ids=torch.from_numpy(saved["tokens"])).logits
    np.testing.assert_allclose(saved["logits"], ours.numpy(), rtol=1e-4, atol=1e-5)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attn_config": {"rope": False}, "learned_pos_emb": True}, "model.attn_config.rope (false)"),
    (
        {"norm_type": "layernorm"},
        "model.norm_type (layernorm): the model would be exported as Mixtral, which does not support this; use rmsnorm",
    ),
    ({"no_bias": False}, "model.no_bias (false): the model would be exported as Mixtral"),
    ({"logit_scale": 0.5}, "model.logit_scale (0.5)"),
    ({"attn_config": {"clip_qkv": 6.0}}, "model.attn_config.clip_qkv (6.0)"),
    ({"attn_config": {"softmax_scale": 0.3}}, "model.attn_config.softmax_scale (0.3)"),
    (
        {"head_dim": 16, "attn_config": {"fused_qkv": False, "qk_gn": True, "norm_type": "rmsnorm"}},
        "which does not support this; use 0.25, one over the root of model.head_dim (16)",
    ),
    (
        {
            "head_dim": 16,
            "attn_config": {"fused_qkv": False, "softmax_scale": 0.25, "qk_ln": True, "norm_type": "rmsnorm"},
        },
        "model.head_dim (16): the model would be exported as OLMoE, which does not support this; use d_model / n_heads",
    ),
    ({"attn_config": {"qk_ln": True}}, "use low_precision_rmsnorm for queries and keys"),
    (
        {"attn_config": {"qk_ln": True, "norm_type": "rmsnorm"}},
        "gate.normalize (true): the model would be",
    ),
    ({"attn_config": {"rope_hf_config": {"type": "linear", "factor": 2.0}}}, "model.attn_config.rope_hf_config.type"),
    ({"moe": {"gate": {"name": "topk", "normalize": False}}}, "gate.normalize (false)"),
    ({"moe": {"gate": {"name": "topk", "score": "sigmoid"}}}, "gate.score (sigmoid)"),
    ({"moe": {"gate": {"name": "ktop1"}}}, "gate.name (ktop1)"),
    ({"moe": {"activation": "gelu"}}, "activation (gelu)"),
    ({"moe": {"capacity": 1.25}}, "capacity (1.25)"),
    ({"moe": {"shared_expert_hidden_size": 8}}, "shared_expert_hidden_size (8)"),
    ({"moe": {"layers": [0]}}, "[1] are dense"),
]


@pytest.mark.parametrize(("keys", "sentence"), REFUSED)
def test_what_no_family_computes_is_named_and_nothing_is_written(
    keys: dict[str, Any], sentence: str, tmp_path: Path, capsys: Any
) -> None:
    run = commit(mpt(**keys), tmp_path / "run")
    capsys.readouterr()  # what others say while the model is built
    assert export(run, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and "; use " in error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_rope_that_turns_a_part_of_a_head_is_named() -> None:
    """LLM Foundry's `dail`, which flash-attn has, takes d_model over n_heads for the width of a head."""
    architecture = architecture_of(mpt(**MPTS["qwen3_moe, wide heads"]))
    assert architecture is not None
    attention = {**architecture.config["attn_config"], "rope_impl": "dail"}
    with pytest.raises(ValueError, match=r"rope_impl \(dail\): .* use hf, which rotates all of a head \(16\)"):
        native_of(replace(architecture, config={**architecture.config, "attn_config": attention}))


def test_a_stretched_rope_that_mixtral_does_not_have_is_named() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=61, rope_scaling={"rope_type": "linear", "factor": 2.0}))
    apply_dmoe(model, MoEConfig(num_experts=4, top_k=2))
    architecture = architecture_of(model)
    assert architecture is not None
    with pytest.raises(
        ValueError, match=r"rope_scaling \(.*linear.*\) of this llama model is not one that Mixtral has"
    ):
        native_of(architecture)


LEAVES_AS = {
    "olmoe": ("pretrain/4gpu", "pretrain/8gpu", "cluster/olmoe_1b_7b"),
    "mixtral": ("demo/cpu", "own_text/cpu", "own_text/1gpu", "pretrain/1gpu", "cluster/64x8gpu"),
    "qwen3_moe": ("cluster/qwen3_30b_a3b", "bench/qwen3_30b_a3b"),
    # steps on random tokens, of which nothing is to leave
    "gate.normalize (false)": ("bench/olmoe_1b_7b",),
    "model.norm_type (low_precision_layernorm)": ("bench/dbrx_wide",),
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in LEAVES_AS.items() for name in names])
def test_every_run_we_ship_leaves_but_two_of_random_tokens(family: str, name: str) -> None:
    path = ROOT / "yamls" / f"{name}.yaml"
    run = OmegaConf.load(path)
    keys = plain(load_run(str(path), [f"model.n_layers={min(2, run.model.n_layers)}", "model.init_device=meta"]))
    model = {key: value for key, value in keys["model"].items() if key != "name"}
    architecture = architecture_of(DMoECausalLM(**model))
    assert architecture is not None
    if "(" in family:
        with pytest.raises(ValueError, match=re.escape(family)):
            native_of(architecture)
        return
    native = native_of(architecture)
    assert native.family.model_type == family
    assert native.config.head_dim == run.model.get("head_dim", run.model.d_model // run.model.n_heads)


def test_no_run_is_left_out_of_those_above() -> None:
    shipped = {
        str(path.relative_to(ROOT / "yamls").with_suffix(""))
        for path in (ROOT / "yamls").rglob("*.yaml")
        if OmegaConf.load(path).get("model", {}).get("name") == "dmoe_causal_lm"
    }
    assert shipped == {name for names in LEAVES_AS.values() for name in names}


def test_a_commit_that_does_not_record_its_model_is_refused(tmp_path: Path, capsys: Any) -> None:
    run = commit(mpt(), tmp_path / "run", architecture=None)
    assert export(run, tmp_path / "out") == 2
    assert "does not record its model, as imported weights do not" in capsys.readouterr().err


def test_a_tokenizer_goes_along_or_is_asked_for(tiny_text: Path, tmp_path: Path, capsys: Any) -> None:
    model = mpt(vocab_size=4096)
    model.tokenizer = type("Tokenizer", (), {"name_or_path": "nowhere/at/all"})()
    run = commit(model, tmp_path / "run")
    assert export(run, tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert "the run's tokenizer (nowhere/at/all) cannot be read" in told and "give its folder with --tokenizer" in told
    assert export(run, tmp_path / "out", "--tokenizer", tiny_text / "tokenizer") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").is_file() and config["eos_token_id"] == config[
        "bos_token_id"
    ] is not None
    tokens = len(AutoTokenizer.from_pretrained(tiny_text / "tokenizer"))
    small_run = commit(mpt(vocab_size=tokens - 1), tmp_path / "other")  # one token too few
    assert export(small_run, tmp_path / "other_out", "--tokenizer", tiny_text / "tokenizer") == 2
    told = capsys.readouterr().err
    assert f"it has {tokens} tokens, and the model {tokens - 1}: give the tokenizer of this model" in told


def test_the_tokenizer_of_the_run_leaves_with_its_tokens_template_side_and_length(
    tiny_text: Path, tmp_path: Path, capsys: Any
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_text / "tokenizer", padding_side="left", model_max_length=77)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|end|>"], "pad_token": "<pad>"})
    tokenizer.add_tokens(["kilowatt"])
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    model = mpt(vocab_size=len(tokenizer))
    model.tokenizer = tokenizer
    run = commit(model, tmp_path / "run")
    assert export(run, tmp_path / "out") == 0
    there = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "<|user|>a kilowatt<|end|> of <pad>"
    assert there(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (there.padding_side, there.model_max_length, there.pad_token) == ("left", 77, "<pad>")
    chat = [{"role": "user", "content": "Hello"}]
    assert there.apply_chat_template(chat, tokenize=False) == "<|user|>Hello<|end|>"
    found = json.loads((tmp_path / "out" / "certificate.json").read_text())["tokenizer"]
    assert all(token in found["sentence"] for token in ("<|user|>", "<|end|>", "kilowatt", "<pad>"))
    assert found["ids_of_the_run"] and found["ids"] == tokenizer(found["sentence"])["input_ids"]
    # another tokenizer, as asked, and one that changed under its name
    assert export(run, tmp_path / "other", "--tokenizer", tiny_text / "tokenizer", "--no-certify") == 0
    other = json.loads((tmp_path / "other" / "certificate.json").read_text())["tokenizer"]
    assert other["ids_of_the_run"] is False
    tokenizer.add_tokens(["megawatt"])
    tokenizer.name_or_path = str(tmp_path / "changed")
    tokenizer.save_pretrained(tmp_path / "changed")
    changed = json.loads((tmp_path / "changed" / "tokenizer.json").read_text())
    changed["added_tokens"][-1]["content"] = "gigawatt"
    (tmp_path / "changed" / "tokenizer.json").write_text(json.dumps(changed))
    model = mpt(vocab_size=len(tokenizer) + 8)
    model.tokenizer = tokenizer
    capsys.readouterr()
    assert export(commit(model, tmp_path / "run2"), tmp_path / "out2", "--no-certify") == 2
    assert "cannot be read (its token ids differ from those of the run)" in capsys.readouterr().err


def test_a_folders_tokenizer_that_differs_fails(tiny_text: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    model = mpt(vocab_size=4096)
    model.tokenizer = AutoTokenizer.from_pretrained(tiny_text / "tokenizer")
    original = certificate.certify

    def certify(exported: Any, folder: Path, **options: Any) -> dict[str, Any]:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "padding_side": "left"}))
        return original(exported, folder, **options)

    monkeypatch.setattr("foundry_moe.commands.export.certify", certify)
    assert export(commit(model, tmp_path / "run"), tmp_path / "out", "--no-certify") == 1
    assert "the folder's tokenizer differs from the run's in padding_side" in capsys.readouterr().err


def test_settings_of_generation_leave_as_they_came_with_the_cache(tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "source"
    small("mixtral").save_pretrained(source)
    settings = {"eos_token_id": [0, 5, 7], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(settings))
    for name in ("LICENSE.txt", "README.md", "modeling.py", "scores.csv"):
        (source / name).write_text(name)
    model: Any = MixtralForCausalLM.from_pretrained(source, use_cache=False)
    model.config.quantization_config = {"quant_method": "fp8"}  # a CPU does not load such weights
    apply_dmoe(model, MoEConfig(num_experts=5, top_k=2))
    model.save_pretrained(tmp_path / "saved")
    out = tmp_path / "out"
    assert export(commit(Wrapped(model), tmp_path / "run"), out, "--certify") == 0
    assert "README.md, modeling.py, scores.csv not copied" in capsys.readouterr().out
    for folder in (out, tmp_path / "saved"):
        config = json.loads((folder / "config.json").read_text())
        assert config["use_cache"] is True and "quantization_config" not in config
        found = json.loads((folder / "generation_config.json").read_text())
        assert {key: found.get(key) for key in settings} == settings and found.get("use_cache", True)
    assert (out / "LICENSE.txt").read_text() == "LICENSE.txt" and not (out / "modeling.py").exists()
    written = json.loads((out / "certificate.json").read_text())
    assert written["not_copied"] == ["README.md", "modeling.py", "scores.csv"]
    assert written["logits"]["generated"] == 32


def test_a_folder_without_a_cache_fails_its_certificate(
    good: tuple[Path, Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn_off(exported: Any, folder: Path, **options: Any) -> dict[str, Any]:
        path = folder / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "use_cache": False}))
        return original(exported, folder, **options)

    original = certificate.certify
    monkeypatch.setattr("foundry_moe.commands.export.certify", turn_off)
    assert export(good[0], tmp_path / "out", "--certify") == 1
    assert "turns off the KV cache" in capsys.readouterr().err


def test_a_tokenizers_own_code_is_not_run(tiny_text: Path, tmp_path: Path, capsys: Any) -> None:
    folder, ran = tmp_path / "tokenizer", tmp_path / "ran"
    shutil.copytree(tiny_text / "tokenizer", folder)
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = mpt(vocab_size=4096)
    model.tokenizer = type("Tokenizer", (), {"name_or_path": str(folder)})()
    assert export(commit(model, tmp_path / "run"), tmp_path / "out") == 2
    assert "cannot be read" in capsys.readouterr().err and not ran.exists()


def test_without_space_nothing_stays(good: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        assert export(good[0], tmp_path / "out") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_damage_and_a_folder_in_use_are_one_sentence(good: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(good[0], tmp_path / "run")
    store = open_store(str(tmp_path / "run"))
    (key,) = [entry.key for entry in store.scan("steps/") if entry.key.endswith(".bin")]
    raw = bytearray(store.get(key))
    raw[len(raw) // 2] ^= 1
    store.put(key, bytes(raw))
    assert export(tmp_path / "run", tmp_path / "out") == 1
    assert "do not have the recorded hash" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert export(good[0], tmp_path / "used") == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert export(tmp_path / "nothing", tmp_path / "out") == 2
    assert "there is nothing at" in capsys.readouterr().err


def test_from_s3_it_is_the_same(good: tuple[Path, Path], tmp_path: Path, moto: tuple[str, int]) -> None:
    url = f"http://{moto[0]}:{moto[1]}"
    store = open_store("s3://bucket/to-export", StoreOptions(endpoint_url=url))
    for path in good[0].rglob("*"):
        if path.is_file() and path.relative_to(good[0]).parts[0] in ("commits", "steps"):
            store.put(str(path.relative_to(good[0])), path.read_bytes())
    assert export("s3://bucket/to-export", tmp_path / "out", "--endpoint-url", url) == 0
    (there,), (here,) = tmp_path.glob("out/*.safetensors"), good[1].glob("*.safetensors")
    assert _header_and_data(there) == _header_and_data(here)


def _header_and_data(file: Path) -> tuple[dict[str, Any], bytes]:
    """The content of a safetensors file, of which the library writes the metadata's keys in any order."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def test_safetensors_own_reader_takes_every_file(good: tuple[Path, Path]) -> None:
    for path in good[1].glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            assert file.metadata() == {"format": "pt", "step": "7"} and len(list(file.keys())) == 41


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        *above, last = path.split(".")
        part = body["info"]["architecture"]
        for name in above:
            part = part[name]
        part[last] = value

    return change


HUGE = 10**7
FORGED = [
    *((f"config.{key}", value) for key in ("d_model", "n_heads", "n_layers", "vocab_size", "max_seq_len")
      for value in (-1, 0, "auto", 1.5, HUGE, 10**30, None, [1], {}, True, float("nan"))),
    *((f"config.{key}", value) for key in ("attn_config", "ffn_config", "init_config", "config")
      for value in ("text", 3, [["a", 1]])),
    *((f"config.attn_config.{key}", value) for key in ("kv_n_heads", "rope_theta", "attn_type", "rope_hf_config")
      for value in ("auto", {}, [0], -1, 0, 10**30, True)),
    *((key, value) for key in ("layers", "num_layers", "prefix", "tokenizer", "experts", "config")
      for value in (-1, "auto", [-1], [HUGE], HUGE, None, 1.5, {}, [[0]])),
    *((f"experts.{key}", value) for key in ("num_experts", "top_k", "expert_hidden_size", "activation", "gate")
      for value in (-1, 0, "x", HUGE, [HUGE], {})),
    *((f"config.{key}", value) for key in ("model_type", "norm_eps", "head_dim", "no_bias", "norm_type", "resid_pdrop")
      for value in ("text", -1, {}, [1], HUGE, 10**30)),
]  # fmt: skip


def test_a_forged_architecture_is_one_sentence_before_a_model_is_built(tmp_path: Path, capsys: Any) -> None:
    """What says another model than the tensors are is refused; a few values here say the same, or nothing."""
    run = commit(mpt(), tmp_path / "run")
    store = open_store(str(run))
    good = manifest_of(store, 7)
    capsys.readouterr()
    for number, (path, value) in enumerate(FORGED):
        body = json.loads(json.dumps(good))
        _set(path, value)(body)
        put_manifest(store, 7, packed(body))
        began_s = time.monotonic()
        code = export(run, tmp_path / str(number), "--tokenizer", "none", "--no-certify")
        told = capsys.readouterr()
        assert time.monotonic() - began_s < 60, (path, value)
        assert code in (0, 2) and "Traceback" not in told.err, (path, value, told.err)
        if code:
            assert told.err.startswith("error: ") and len(told.err) < 1000, (path, value, told.err)
            assert not (tmp_path / str(number)).exists()
        else:
            shutil.rmtree(tmp_path / str(number))
        if path.rpartition(".")[2] in ("d_model", "n_layers", "n_heads", "vocab_size", "num_layers", "num_experts"):
            assert code == 2, (path, value)
