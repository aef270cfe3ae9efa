"""`init_device: meta` with pretrained weights: each rank reads its own slices, and the model is the one on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.checkpoint.codec import tensor_bytes
from foundry_moe.launch.processes import run_processes
from tests.distributed import pretrained_worker
from tests.helpers.commands import export, tool
from tests.helpers.exporting import Wrapped, commit, of_hugging_face
from tests.helpers.families import SIZES, small
from tests.helpers.launching import PRELOAD
from tests.helpers.tiny_runs import launch

MESH = {"replicate": 1, "shard": 2, "expert": 2}
# of four experts, so that two ranks can divide them
KEYS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {"n_routed_experts": 16},
    "dbrx": {"moe_num_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4},
}


def moe_of(model_type: str) -> dict[str, Any]:
    experts = next(iter(KEYS[model_type].values()))
    return {"num_experts": experts, "top_k": 3 if model_type == "deepseek_v3" else 2, "loss": {}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each layout, in several files, and a dense Llama."""
    root = tmp_path_factory.mktemp("models")
    for model_type, keys in KEYS.items():
        small(model_type, **keys).save_pretrained(root / model_type, max_shard_size="40KB")
    torch.manual_seed(2)
    sizes = {**SIZES, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).save_pretrained(root / "llama")
    return {path.name: path for path in root.iterdir()}


def test_each_rank_reads_its_own_slices_and_the_model_is_the_one_on_disk(folders: dict[str, Path]) -> None:
    upcycled: dict[str, Any] = {"num_experts": 8, "top_k": 2, "expert_hidden_size": 22, "loss": {}}
    runs = [(model_type, moe_of(model_type), MESH) for model_type in KEYS]
    # experts that no file has, in their block's group of FSDP2
    runs += [("llama", upcycled, MESH), ("llama", {**upcycled, "init": "random"}, {**MESH, "shard": 4, "expert": 1})]
    jobs = [(str(folders[name]), moe, mesh) for name, moe, mesh in runs]
    found = run_processes(pretrained_worker.read_models, jobs, world_size=4, preload=PRELOAD)
    for (name, moe, _), result in zip(runs, found, strict=True):
        model = AutoModelForCausalLM.from_pretrained(folders[name], torch_dtype=torch.float32).eval()
        apply_dmoe(model, MoEConfig(**moe))
        for key, weight in model.state_dict().items():
            assert torch.equal(result["weights"][key], weight), (name, key)
        with torch.no_grad():
            truth = model(input_ids=pretrained_worker.IDS).logits
        # sums in another order, of weights far larger than trained ones
        torch.testing.assert_close(result["logits"], truth, rtol=1e-3, atol=1e-3)
        if name != "llama":  # of a dense FFN two ranks read the same
            # a quarter of all matrices; norms and biases are few, but rows of these sizes do not divide evenly
            assert result["read"] < 0.3 * pretrained_worker.files_of(str(folders[name])), name


def test_files_that_do_not_fit_are_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from foundry_moe.models.pretrained import SafetensorsFolder, read_pretrained

    model = small("mixtral", num_local_experts=4)
    apply_dmoe(model, MoEConfig(**moe_of("mixtral")))
    good = {name: t for path in folders["mixtral"].glob("*.safetensors") for name, t in load_file(path).items()}
    one = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    spoiled = {
        "missing": ({k: v for k, v in good.items() if k != one}, rf"has no tensor {one}: it is not a whole checkpoint"),
        "extra": ({**good, "more.weight": torch.zeros(2)}, r"has a tensor more.weight, which this MixtralForCausalLM"),
        "shape": ({**good, one: torch.zeros(3, 4)}, rf"{one}: .* has shape \[3, 4\], the model has \[44, 32\]"),
        "dtype": ({**good, one: good[one].to(torch.float8_e4m3fn)}, rf"{one}: .* has dtype F8_E4M3, not one of F64"),
    }
    for case, (tensors, sentence) in spoiled.items():
        (tmp_path / case).mkdir()
        save_file(tensors, tmp_path / case / "model.safetensors")
        with pytest.raises(ValueError, match=sentence):
            read_pretrained(model, SafetensorsFolder(tmp_path / case))
    read_pretrained(model, SafetensorsFolder(folders["mixtral"]))
    cut = tmp_path / "extra" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    (tmp_path / "nothing").mkdir()
    for case, index in {
        "away": {"a": "gone.safetensors"},
        "out": {"a": "../extra/model.safetensors"},
        "list": [],
    }.items():
        (tmp_path / case).mkdir()
        (tmp_path / case / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for path, sentence in (
        (cut.parent, "model.safetensors cannot be read as safetensors"),
        (tmp_path / "away", "names .*gone.safetensors.*, not safetensors files beside it"),
        (tmp_path / "out", "names .*extra/model.safetensors.*, not safetensors files beside it"),
        (tmp_path / "list", "cannot be read as an index of safetensors"),
        (tmp_path / "nothing", "nothing holds no safetensors files"),
        (tmp_path / "gone", "gone is not a folder with a Hugging Face model"),
    ):
        with pytest.raises(ValueError, match=sentence):
            SafetensorsFolder(path)


def test_a_run_on_one_process_loads_as_llm_foundry_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from foundry_moe.algorithms.gate_steps import add_steps_algorithm

    run = {
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "x", "init_device": "meta"},
        "algorithms": {"dmoe": {"num_experts": 4}},
    }
    monkeypatch.setenv("WORLD_SIZE", "1")
    kept = add_steps_algorithm({key: dict(value) for key, value in run.items()})
    assert kept["model"] == run["model"] and "weights_loaded" not in kept["algorithms"]["dmoe_steps"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    changed = add_steps_algorithm({key: dict(value) for key, value in run.items()})
    assert changed["model"]["pretrained"] is False and changed["algorithms"]["dmoe_steps"]["weights_loaded"] is True


def described(folder: Path, init_device: str) -> dict[str, Any]:
    """The keys of algorithms.dmoe_steps that a run of this folder gets."""
    from foundry_moe.algorithms.gate_steps import add_steps_algorithm

    model = {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(folder), "init_device": init_device}
    run = {"model": model, "algorithms": {"dmoe": moe_of("mixtral")}}
    return add_steps_algorithm(run)["algorithms"]["dmoe_steps"]


def test_missing_weights_are_refused_where_transformers_would_draw_them(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    from composer.core import Event
    from composer.models import HuggingFaceModel
    from safetensors.torch import load_file, save_file

    from foundry_moe.algorithms.dmoe import DMoE
    from foundry_moe.algorithms.gate_steps import GateSteps

    good = {name: t for path in folders["mixtral"].glob("*.safetensors") for name, t in load_file(path).items()}
    config = AutoConfig.from_pretrained(folders["mixtral"])
    experts, attention = "model.layers.1.block_sparse_moe.experts.2.w3.weight", "model.layers.1.self_attn.q_proj.weight"
    for lacking in ("", experts, attention):
        kept = {name: tensor for name, tensor in good.items() if name != lacking}
        folder = tmp_path / (lacking or "whole")
        config.save_pretrained(folder)
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        model = HuggingFaceModel(AutoModelForCausalLM.from_pretrained(folder), shift_labels=True)
        algorithm, steps = DMoE(**moe_of("mixtral")), GateSteps(**described(folder, "cpu"))
        state = SimpleNamespace(model=model, optimizers=(), fsdp_config=None, tp_config=None, algorithms=[steps])
        logger = SimpleNamespace(log_hyperparameters=lambda values: None)
        if lacking:
            with pytest.raises(ValueError, match=rf"{folder} has no tensor {lacking}: it is not a whole checkpoint"):
                algorithm.apply(Event.INIT, state, logger)  # type: ignore[arg-type]
        else:
            algorithm.apply(Event.INIT, state, logger)  # type: ignore[arg-type]


@pytest.mark.parametrize("init_device", ["cpu", "meta"])
def test_spoiled_files_are_refused_before_a_model_is_built(
    init_device: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    names = [path.name for path in sorted(folders["mixtral"].glob("*.safetensors"))]
    assert described(folders["mixtral"], init_device)["weights_source"] == str(folders["mixtral"])
    for case, sentence in {
        "truncated": f"{names[1]} cannot be read as safetensors",
        "missing": f"index.json names .*{names[1][:11]}.*, not safetensors files beside it",
        "pointer": rf"{names[1]} is a pointer of Git LFS, not the weights: run `git lfs pull`",
    }.items():
        folder = tmp_path / case
        shutil.copytree(folders["mixtral"], folder)
        spoiled = folder / names[1]
        data = spoiled.read_bytes()
        spoiled.unlink()
        if case != "missing":
            pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
            spoiled.write_bytes(pointer if case == "pointer" else data[:-10])
        with pytest.raises(ValueError, match=sentence):
            described(folder, init_device)


def test_tied_embeddings_stay_tied_from_files_and_from_a_commit(tmp_path: Path) -> None:
    """On two processes: from meta as from the CPU, with a copy of the embedding in the files, and after an import."""
    from safetensors.torch import load_file, save_file

    plain, doubled = tmp_path / "plain", tmp_path / "doubled"
    small("mixtral", num_local_experts=4, tie_word_embeddings=True).save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    assert "lm_head.weight" not in tensors
    shutil.copytree(plain, doubled)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, doubled / "model.safetensors", metadata={"format": "pt"})
    assert tool("import", tmp_path / "imported", plain) == 0

    def run_of(source: Path, init_device: str, folder: str) -> dict[str, Any]:
        keys = {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(source), "init_device": init_device}
        return {
            "model": {**keys, "use_train_metrics": False},
            "algorithms.dmoe": {**moe_of("mixtral"), "mesh": {"expert": 2}},
            "train_loader.vocab_size": 60,
            "callbacks.elastic_checkpoint": {"folder": str(tmp_path / folder), "interval": "3ba", "async": False},
        }

    runs = [run_of(plain, "cpu", "cpu"), run_of(plain, "meta", "meta")]
    runs += [run_of(doubled, "meta", "copied"), run_of(plain, "meta", "imported")]
    cpu, *others = launch(2, *runs)
    for other in others:
        assert len(cpu["losses"]) == 3 and other["losses"] == cpu["losses"] and other["ended"] == cpu["ended"]
    assert export(tmp_path / "meta", tmp_path / "out", "--tokenizer", "none", "--certify") == 0
    left = {name: t for path in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(path).items()}
    embedding = xxhash.xxh3_64_hexdigest(tensor_bytes(left["model.embed_tokens.weight"]))
    assert embedding == cpu["ended"]["model|model.model.embed_tokens.weight"]


def test_embeddings_that_were_trained_untied_are_not_exported_as_tied(tmp_path: Path, capsys: Any) -> None:
    model: Any = of_hugging_face("llama")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    assert export(commit(Wrapped(model), tmp_path / "run"), tmp_path / "out", "--tokenizer", "none") == 1
    assert "lm_head.weight is not model.embed_tokens.weight, though tie_word_embeddings" in capsys.readouterr().err
