"""`foundry-moe export --merge` and `--adapter`: what leaves computes what the run with adapters computed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.models import HuggingFaceModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.models.adapters import load_adapter
from foundry_moe.models.families import family_of
from tests.helpers.commands import export
from tests.helpers.exporting import Wrapped, commit, mpt
from tests.helpers.families import small
from tests.helpers.training import fit

ROOT = Path(__file__).parents[2]
PEFT = Path(os.environ.get("PEFT_PYTHON", ROOT / ".venv-transformers" / "bin" / "python"))
IDS = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(3))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def drawn(model: nn.Module) -> nn.Module:
    """With adapters as if they had been trained: B starts as zeros."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_B_E" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


def adapted(kind: str, native: Any = None, **lora: Any) -> nn.Module:
    """A small model of a family whose experts have adapters."""
    native = native or small(kind)
    blocks = family_of(native.config.model_type).read(native.config)
    keys: Any = {"r": 3, "alpha": 4, **lora}
    apply_dmoe(native, MoEConfig(num_experts=blocks.num_experts, top_k=blocks.top_k, lora=keys))
    return drawn(native)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "dbrx", "granitemoe"])
def test_a_merged_export_is_the_model_with_adapters(kind: str, tmp_path: Path) -> None:
    model = adapted(kind, rslora=True)
    assert export(commit(Wrapped(model), tmp_path / "run"), tmp_path / "out", "--merge", "--certify") == 0
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(there), logits(model), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(there), logits(small(kind)), rtol=1e-2, atol=1e-2)
    assert json.loads((tmp_path / "out" / "certificate.json").read_text())["good"]


def test_a_merged_mpt_in_bf16_is_certified(tmp_path: Path) -> None:
    model = drawn(mpt(moe={"lora": {"r": 4, "targets": ["w1", "w2"]}}))
    assert export(commit(model, tmp_path / "run"), tmp_path / "out", "--merge", "--dtype", "bf16", "--certify") == 0


def test_a_sum_of_bf16_weights_and_adapters_is_rounded_once(tmp_path: Path) -> None:
    plain = small("mixtral").bfloat16().state_dict()
    run = commit(Wrapped(adapted("mixtral", small("mixtral").bfloat16())), tmp_path / "run")
    assert export(run, tmp_path / "out", "--merge", "--dtype", "fp32", "--certify") == 0
    assert export(run, tmp_path / "pairs", "--adapter", "--format", "per-expert") == 0
    merged = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    pairs = load_file(tmp_path / "pairs" / "adapter_model.safetensors")
    for name in (name for name in plain if ".experts." in name):
        a, b = (pairs[f"base_model.model.{name.removesuffix('weight')}lora_{f}.weight"].double() for f in "AB")
        expected = (plain[name].double() + 4 / 3 * b @ a).float()
        torch.testing.assert_close(merged[name], expected, rtol=1e-6, atol=1e-6)  # bf16 rounds by 4e-3


def trained(base: Path, folder: Path, save_frozen: bool, beside: str = "none", **optimizer_settings: Any) -> None:
    """Adapters, and parameters with `beside` in their name, of a model in a folder whose weights are kept in bf16."""
    model = AutoModelForCausalLM.from_pretrained(base, torch_dtype=torch.bfloat16)
    blocks = family_of("mixtral").read(model.config)
    apply_dmoe(model, MoEConfig(num_experts=blocks.num_experts, top_k=blocks.top_k, loss={}, lora={"r": 3, "alpha": 4}))
    drawn(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("_A_E" in name or "_B_E" in name or beside in name)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, **optimizer_settings)
    callback = ElasticCheckpoint(folder=str(folder), interval="100ba", save_frozen=save_frozen)
    composed = HuggingFaceModel(model, use_logits=True, shift_labels=True)
    fit(composed, optimizer=optimizer, duration="1ba", callbacks=[callback], run_name="adapters")


def test_a_checkpoint_without_the_base_is_merged_with_it(tmp_path: Path, capsys: Any) -> None:
    small("mixtral").save_pretrained(tmp_path / "base")
    for name, save_frozen in (("whole", True), ("parts", False)):
        trained(tmp_path / "base", tmp_path / name, save_frozen)
        words = ["--merge", "--certify"] if save_frozen else ["--merge", "--base", tmp_path / "base", "--certify"]
        assert export(tmp_path / name, tmp_path / f"{name}-out", *words) == 0
    whole, parts = (
        load_file(tmp_path / f"{name}-out" / "model-00001-of-00001.safetensors") for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert export(tmp_path / "parts", tmp_path / "by-record", "--merge") == 0, "the checkpoint says where its base is"
    other = small("mixtral")
    with torch.no_grad():
        next(other.parameters()).add_(0.1)
    other.save_pretrained(tmp_path / "other")
    for words, sentence in (
        (("parts", "--base", tmp_path / "other"), "does not hold the"),
        (("parts", "--base", tmp_path / "none"), "cannot be read"),
        (("whole", "--base", tmp_path / "base"), "this one holds all: drop it"),
    ):
        capsys.readouterr()
        assert export(tmp_path / words[0], tmp_path / "no", "--merge", *words[1:]) == 2
        assert sentence in capsys.readouterr().err


def test_a_run_that_also_trained_other_weights_has_no_adapter_folder(tmp_path: Path, capsys: Any) -> None:
    small("mixtral").save_pretrained(tmp_path / "base")
    for name, beside, code in (("alone", "none", 0), ("gate", "gate.weight", 2)):
        trained(tmp_path / "base", tmp_path / name, True, beside, momentum=0.9)
        assert export(tmp_path / name, tmp_path / f"{name}-out", "--adapter") == code
    error = capsys.readouterr().err
    assert "the run also trained" in error and "gate.weight_ED" in error and "use --merge" in error
    assert not (tmp_path / "gate-out").exists()


def tensors_of(
    model: nn.Module, tmp_path: Path, *words: str, tokenizer: Any = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    wrapped: Any = Wrapped(model)
    wrapped.tokenizer = tokenizer
    assert export(commit(wrapped, tmp_path / "run"), tmp_path / "out", "--adapter", *words) == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    return load_file(tmp_path / "out" / "adapter_model.safetensors"), config


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("targets", ["auto", ["v1", "w2"]])
def test_per_expert_pairs_add_up_to_the_model_in_plain_transformers(kind: str, targets: Any, tmp_path: Path) -> None:
    """As vLLM and SGLang apply them: every matrix of every expert has a pair, all of one rank."""
    model = adapted(kind, targets=targets)
    pairs, config = tensors_of(model, tmp_path, "--format", "per-expert")
    plain = small(kind)
    state = plain.state_dict()
    experts = [name for name in state if ".experts." in name]
    assert len(pairs) == 2 * len(experts) and {name.split(".")[-2] for name in experts} == set(config["target_modules"])
    for name in experts:
        pair = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = pairs[f"{pair}.lora_A.weight"], pairs[f"{pair}.lora_B.weight"]
        assert a.shape[0] == b.shape[1] == config["r"] == 3
        state[name] = state[name] + config["lora_alpha"] / config["r"] * b @ a
    plain.load_state_dict(state)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["peft", "per-expert"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_training_starts_from_an_exported_folder(kind: str, form: str, tmp_path: Path) -> None:
    model = adapted(kind, rslora=True)
    tensors_of(model, tmp_path, "--format", form)
    again = small(kind)
    blocks = family_of(again.config.model_type).read(again.config)
    lora = {"r": 3, "alpha": 9}  # another scale
    apply_dmoe(again, MoEConfig(num_experts=blocks.num_experts, top_k=blocks.top_k, lora=lora))
    load_adapter(again, tmp_path / "out")
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ({"r": 5}, r"lora.r \(5\) must be 6, the rank of lora.start"),
        ({"r": 3, "targets": ["w2"]}, "adapts v1 of layer 0, which the run does not: add it to lora.targets"),
    ],
)
def test_a_folder_of_other_adapters_is_refused(lora: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    tensors_of(adapted("mixtral"), tmp_path)
    again = small("mixtral")
    apply_dmoe(again, MoEConfig(num_experts=5, top_k=2, lora=lora))
    with pytest.raises(ValueError, match=sentence):
        load_adapter(again, tmp_path / "out")
    with pytest.raises(ValueError, match="cannot be read as a PEFT folder"):
        load_adapter(again, tmp_path)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_fused_tensors_are_pefts(kind: str, tmp_path: Path) -> None:
    """Expert e is A[e * r : (e + 1) * r] and B[:, e::E], gate above up."""
    model = adapted(kind)
    fused, config = tensors_of(model, tmp_path)
    plain = small(kind)
    family = family_of(kind)
    blocks = family.read(plain.config)
    state, rank, count = plain.state_dict(), config["r"], blocks.num_experts
    assert config["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    names = {part.ours[8:10]: part.theirs.split(".")[-2] for part in family.parts(blocks) if part.expert is not None}
    for layer in blocks.layers:
        below = f"base_model.model.model.layers.{layer}.mlp.experts."
        for e in range(count):

            def delta(place: str, e: int = e, below: str = below) -> torch.Tensor:
                a, b = (fused[f"{below}{place}lora_{factor}.weight"] for factor in "AB")
                return config["lora_alpha"] / rank * b[:, e::count] @ a[e * rank : (e + 1) * rank]

            gate, up = delta("base_layer.").chunk(2)
            for matrix, added in (("w1", gate), ("v1", up), ("w2", delta(""))):
                name = f"{family.block_name(layer)}.experts.{e}.{names[matrix]}.weight"
                state[name] = state[name] + added
    plain.load_state_dict(state)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-5)


def peft(script: str, *words: object, version: str = "newest") -> subprocess.CompletedProcess[str]:
    """Runs a script in the environment with transformers 5 and peft; `make peft-env` makes it."""
    newest = next(PEFT.parents[1].glob("lib/python*/site-packages/peft"), None)
    folder = newest if version == "newest" else PEFT.parents[1] / f"peft-{version}"
    if folder is None or not folder.is_dir():
        pytest.skip(f"no environment with transformers 5 and peft ({version}): make peft-env")
    return subprocess.run(
        [PEFT, "-W", "error::UserWarning:peft", "-c", script, *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "" if version == "newest" else str(folder)},
    )


# each folder in turn, in one process: imports take most of the time
LOADED = """
import sys, torch
from pathlib import Path
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoTokenizer
for folder in map(Path, sys.argv[1:]):
    expected = load_file(folder / "expected.safetensors")
    try:
        model = AutoPeftModelForCausalLM.from_pretrained(str(folder / "out"), dtype=torch.float32).eval()
    except RuntimeError as error:
        print(folder.name, "refused:", "size mismatch for base_model.model" in str(error))
        continue
    with torch.no_grad():
        found = model(input_ids=expected["ids"]).logits
    torch.testing.assert_close(found, expected["logits"], rtol=1e-4, atol=1e-5, msg=lambda text: f"{folder}: {text}")
    assert AutoTokenizer.from_pretrained(folder / "out")("to be")["input_ids"] == [1, 2]
    print(folder.name, "equal")
"""
# trained by peft: adapters of its own shapes, with numbers
TRAINED = """
import sys, torch
from pathlib import Path
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
for folder in map(Path, sys.argv[1:]):
    ids = load_file(folder / "ids.safetensors")["ids"]
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=3, lora_alpha=4, target_modules=[], target_parameters=targets, task_type="CAUSAL_LM")
    torch.manual_seed(7)
    model = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
        save_file({"ids": ids, "logits": model(input_ids=ids).logits.contiguous()}, folder / "expected.safetensors")
    model.save_pretrained(str(folder / "old"))
"""


def base_with_tokenizer(kind: str, folder: Path) -> nn.Module:
    """A model that was loaded from `folder`, which holds a tokenizer of two words."""
    model = small(kind)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "to": 1, "be": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    model.config._name_or_path = str(folder)
    return model


def loaded(folders: list[Path], version: str = "newest") -> list[str]:
    """What peft does with each folder."""
    done = peft(LOADED, *folders, version=version)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "missing adapter keys" not in done.stderr
    return done.stdout.splitlines()


def test_peft_loads_a_folder_alone_with_its_base_and_tokenizer(tmp_path: Path) -> None:
    kinds = ["mixtral", "qwen3_moe", "olmoe"]
    for kind in kinds:
        folder = tmp_path / kind
        model = adapted(kind, base_with_tokenizer(kind, folder / "base"))
        _, config = tensors_of(model, folder, tokenizer=AutoTokenizer.from_pretrained(folder / "base"))
        assert config["base_model_name_or_path"] == str(folder / "base")
        save_file({"ids": IDS, "logits": logits(model).contiguous()}, folder / "expected.safetensors")
    folders = [tmp_path / kind for kind in kinds]
    assert loaded(folders) == [f"{kind} equal" for kind in kinds]
    # its A has the outputs of a matrix, its B the inputs
    assert loaded(folders, version="0.18") == [f"{kind} refused: True" for kind in kinds]


def test_adapters_that_peft_trained_are_converted_and_continued(tmp_path: Path) -> None:
    folders = {(v, kind): tmp_path / f"{v}-{kind}" for v in ("0.18", "newest") for kind in ("mixtral", "qwen3_moe")}
    for (_, kind), folder in folders.items():
        base_with_tokenizer(kind, folder / "base")
        save_file({"ids": IDS}, folder / "ids.safetensors")
    for version in ("0.18", "newest"):
        done = peft(TRAINED, *(folder for (own, _), folder in folders.items() if own == version), version=version)
        assert done.returncode == 0, done.stderr[-3000:]
    for folder in folders.values():
        assert export(folder / "old", folder / "out", "--adapter", "--base", folder / "base") == 0
    assert loaded(list(folders.values())) == [f"{folder.name} equal" for folder in folders.values()]
    for (_, kind), folder in folders.items():
        continued = adapted(kind)
        load_adapter(continued, folder / "old")
        expected = load_file(folder / "expected.safetensors")["logits"]
        torch.testing.assert_close(logits(continued), expected, rtol=1e-4, atol=1e-5)


def test_the_layout_of_peft_0_18_is_converted(tmp_path: Path) -> None:
    """Its A [E r, N] and B [K, r E] are B and A of the folder that the newest writes."""
    model = adapted("mixtral")
    fused, config = tensors_of(model, tmp_path)
    count, rank = family_of("mixtral").read(small("mixtral").config).num_experts, config["r"]
    older = {}
    for name, tensor in fused.items():
        if ".lora_A." in name:
            older[name.replace("lora_A", "lora_B")] = tensor.view(count, rank, -1).permute(2, 1, 0).flatten(1)
        else:
            older[name.replace("lora_B", "lora_A")] = tensor.view(-1, rank, count).permute(2, 1, 0).flatten(0, 1)
    save_file({name: tensor.contiguous() for name, tensor in older.items()}, tmp_path / "out/adapter_model.safetensors")
    (tmp_path / "out/adapter_config.json").write_text(json.dumps({**config, "peft_version": "0.18.1"}))
    again = adapted("mixtral")
    load_adapter(again, tmp_path / "out")
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lora", "words", "sentence"),
    [
        (True, (), "use `foundry-moe export --merge` for the whole model or --adapter"),
        (False, ("--merge",), "are for runs with lora, and this checkpoint has no adapters"),
        (False, ("--adapter",), "are for runs with lora, and this checkpoint has no adapters"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_one_sentence(
    lora: bool, words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: Any
) -> None:
    run = commit(mpt(moe={"lora": {"r": 2}} if lora else {}), tmp_path / "run")
    assert export(run, tmp_path / "out", *words) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_family_with_fused_experts_has_no_adapter_folder(tmp_path: Path, capsys: Any) -> None:
    run = commit(Wrapped(adapted("dbrx")), tmp_path / "run")
    assert export(run, tmp_path / "out", "--adapter") == 2
    assert "DBRX has no matrix of its own for each expert; use --merge" in capsys.readouterr().err
    tensors_of(adapted("mixtral"), tmp_path / "mixtral")
    small("granitemoe").save_pretrained(tmp_path / "base")
    assert export(tmp_path / "mixtral/out", tmp_path / "out", "--adapter", "--base", tmp_path / "base") == 2
    assert "Granite-MoE has no matrix of its own for each expert" in capsys.readouterr().err


def test_the_base_of_upcycled_experts_is_no_dense_model(tmp_path: Path, capsys: Any) -> None:
    sizes: Any = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=61)).save_pretrained(tmp_path / "dense")
    upcycled, model = (LlamaForCausalLM.from_pretrained(tmp_path / "dense") for _ in range(2))
    apply_dmoe(upcycled, MoEConfig(num_experts=5, top_k=2))
    upcycled.save_pretrained(tmp_path / "upcycled")
    apply_dmoe(model, MoEConfig(num_experts=5, top_k=2, lora={"r": 3}))
    run = commit(Wrapped(model), tmp_path / "run")
    for words in ((), ("--base", tmp_path / "dense")):
        assert export(run, tmp_path / "out", "--adapter", *words) == 2
        assert "its upcycled model, which no folder holds: use --merge, or --base FOLDER" in capsys.readouterr().err
    assert export(run, tmp_path / "out", "--adapter", "--base", tmp_path / "upcycled") == 0


def test_the_base_of_adapters_has_the_tokens_of_the_run(tmp_path: Path, capsys: Any) -> None:
    model = adapted("mixtral", base_with_tokenizer("mixtral", tmp_path / "base"))
    model.resize_token_embeddings(64)
    run = commit(Wrapped(model), tmp_path / "run")
    assert export(run, tmp_path / "out", "--adapter") == 2
    assert f"the run's model has 64 tokens, {tmp_path / 'base'} has 61: use --merge" in capsys.readouterr().err
    small("mixtral", vocab_size=64).save_pretrained(tmp_path / "resized")
    assert export(run, tmp_path / "out", "--adapter", "--base", tmp_path / "resized") == 0


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_peft_folder_becomes_per_expert_pairs_and_back(kind: str, tmp_path: Path, capsys: Any) -> None:
    tensors_of(adapted(kind), tmp_path)
    small(kind).save_pretrained(tmp_path / "base")
    words = ("--adapter", "--base", tmp_path / "base", "--format")
    assert export(tmp_path / "out", tmp_path / "pairs", *words, "per-expert") == 0
    assert export(tmp_path / "pairs", tmp_path / "again", *words, "peft") == 0
    fused, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "again"))
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("out", "again")]
    scales = [config["lora_alpha"] / config["r"] for config in configs]
    count = family_of(kind).read(small(kind).config).num_experts
    for name in (name for name in fused if ".lora_A." in name):
        b = name.replace(".lora_A.", ".lora_B.")
        for e in range(count):
            ours, theirs = (
                scale * found[b][:, e::count] @ found[name][e * rank : (e + 1) * rank]
                for found, scale, rank in zip((fused, again), scales, (c["r"] for c in configs), strict=True)
            )
            torch.testing.assert_close(ours, theirs)
    pairs = load_file(tmp_path / "pairs" / "adapter_model.safetensors")
    down = ("w2.lora_A.weight", "down_proj.lora_A.weight")
    save_file(
        {k: v for k, v in pairs.items() if not k.endswith(down)}, tmp_path / "pairs" / "adapter_model.safetensors"
    )
    assert export(tmp_path / "pairs", tmp_path / "no", *words, "peft") == 2
    assert "has no lora_A of w2 in layer" in capsys.readouterr().err
    assert export(tmp_path / "out", tmp_path / "no", "--adapter") == 2
    assert "must be the folder of the model" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "num_local_experts": count}))
    assert export(tmp_path / "out", tmp_path / "no", "--adapter", "--base", tmp_path) == 2
    assert "model_type (gpt_oss) cannot be taken over or exported" in capsys.readouterr().err
