"""LLM Foundry's `hf_checkpointer`, unchanged, on meshes; a model that is imported, trained and exported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.launch.processes import run_processes
from tests.distributed import hugging_face_worker
from tests.helpers.commands import export, tool
from tests.helpers.families import small
from tests.helpers.launching import PRELOAD

YAML = str(Path(__file__).with_name("tiny.yaml"))
MPT: dict[str, Any] = {
    **{"name": "dmoe_causal_lm", "d_model": 16, "n_heads": 2, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 16},
    **{"vocab_size": 64, "no_bias": True, "tie_word_embeddings": True, "use_train_metrics": False},
    **{"norm_type": "low_precision_rmsnorm", "learned_pos_emb": False, "init_device": "cpu"},
    "attn_config": {"rope": True, "rope_impl": "hf"},
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2, "expert_hidden_size": 24, "activation": "swiglu", "loss": {}}


def mesh(world: int) -> dict[str, int]:
    return {"replicate": 1, "shard": max(world // 2, 1), "expert": min(world, 2)}


def of_mixtral(folder: Path, world: int) -> dict[str, Any]:
    """Two batches on a Mixtral that was read from a folder."""
    return {
        "model": {
            **{"name": "hf_causal_lm", "pretrained_model_name_or_path": str(folder), "pretrained": True},
            **{"init_device": "cpu", "use_train_metrics": False, "use_flash_attention_2": False},
        },
        "algorithms.dmoe": {"num_experts": 6, "top_k": 2, "loss": {}, "mesh": mesh(world)},
    }


def of_mpt(world: int, **moe: Any) -> dict[str, Any]:
    return {
        "model": {**MPT, "moe": {**EXPERTS, "mesh": mesh(world), **moe}},
        "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 0.5}},
    }


def read_by_rank(folder: Path, checkpoints: Path) -> dict[str, Any]:
    """A batch on the meta device's Mixtral with a learning rate of 0: its commit has the weights that were read."""
    run = of_mixtral(folder, 4)
    return {
        **run,
        "model": {**run["model"], "init_device": "meta"},
        "optimizer": {"name": "decoupled_adamw", "lr": 0.0, "weight_decay": 0.0},
        "max_duration": "1ba",
        "train_loader.vocab_size": 60,
        "callbacks": {"elastic_checkpoint": {"folder": str(checkpoints), "interval": "1ba", "async": False}},
    }


def saved(run: dict[str, Any], checkpoints: Path, save_folder: str) -> dict[str, Any]:
    return {
        **run,
        "max_duration": "2ba",
        "train_loader.vocab_size": 60,
        "callbacks": {
            "elastic_checkpoint": {"folder": str(checkpoints), "interval": "2ba", "async": False},
            "hf_checkpointer": {"save_folder": save_folder, "save_interval": "1ba"},
        },
    }


def save_mixtral(root: Path) -> Path:
    small("mixtral", num_local_experts=6, intermediate_size=40).save_pretrained(root / "mixtral")
    return root / "mixtral"


@pytest.fixture(scope="module")
def runs(moto: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four processes left in folders and on S3, and what was refused."""
    root = tmp_path_factory.mktemp("hugging_face")
    mixtral = save_mixtral(root)
    (root / "bare").mkdir()
    shutil.copy(mixtral / "config.json", root / "bare")
    four = [
        saved(of_mixtral(mixtral, 4), root / "mixtral_run", str(root / "mixtral_saved")),
        saved(of_mpt(4), root / "mpt_run", str(root / "mpt_saved")),
        saved(of_mpt(4, gate={"name": "topk", "score": "sigmoid"}), root / "refused_run", str(root / "refused")),
        saved(of_mpt(4), root / "s3_run", "s3://bucket/exported"),
        read_by_rank(mixtral, root / "read_run"),
        # goes on from the commit: of the model's folder the configuration is left
        {**read_by_rank(root / "bare", root / "read_run"), "max_duration": "2ba"},
    ]
    url = f"http://{moto[0]}:{moto[1]}"
    store = {"S3_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    errors = run_processes(
        hugging_face_worker.train_all, YAML, four, store, world_size=4, timeout_s=500, preload=PRELOAD
    )
    return {"root": root, "errors": errors, "url": url}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_saved(root: Path, kind: str) -> None:
    """What the callback wrote loads in plain transformers, and is what a commit's certified export has."""
    folder = root / f"{kind}_saved" / "huggingface" / "ba2"
    assert (folder.parent / "ba1" / "config.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert export(root / f"{kind}_run", root / f"{kind}_exported", "--certify", "--tokenizer", "none") == 0
    assert equal(tensors(folder), tensors(root / f"{kind}_exported"))


@pytest.mark.parametrize("kind", ["mixtral", "mpt"])
def test_on_a_mesh_it_writes_what_plain_transformers_loads(kind: str, runs: dict[str, Any]) -> None:
    assert runs["errors"][:2] == [None, None]
    check_saved(runs["root"], kind)


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", [1, 2])
def test_on_gpus_it_writes_what_plain_transformers_loads(gpus: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    models = {"mixtral": of_mixtral(save_mixtral(tmp_path), gpus), "mpt": of_mpt(gpus)}
    runs = [saved(run, tmp_path / f"{kind}_run", str(tmp_path / f"{kind}_saved")) for kind, run in models.items()]
    train = hugging_face_worker.train_all
    assert run_processes(train, YAML, runs, {}, world_size=gpus, backend="nccl", preload=()) == [None, None]
    for kind in models:
        check_saved(tmp_path, kind)


def test_in_two_steps_out_and_in_again_is_bit_equal(runs: dict[str, Any]) -> None:
    root = runs["root"]
    if not (root / "mixtral_exported").exists():
        assert export(root / "mixtral_run", root / "mixtral_exported", "--tokenizer", "none") == 0
    again = AutoModelForCausalLM.from_pretrained(root / "mixtral_exported")
    apply_dmoe(again, MoEConfig(num_experts=6, top_k=2))
    assert tool("export", root / "mixtral_run", root / "plain") == 0
    trained = {name.removeprefix("model."): tensor for name, tensor in tensors(root / "plain").items()}
    assert equal(dict(again.state_dict()), trained)
    before = small("mixtral", num_local_experts=6, intermediate_size=40).state_dict()
    after = tensors(root / "mixtral_exported")
    assert after.keys() == before.keys() and not any(torch.equal(after[name], before[name]) for name in after)


def test_on_s3_it_writes_the_same(runs: dict[str, Any], tmp_path: Path) -> None:
    assert runs["errors"][3] is None
    client = boto3.client("s3", endpoint_url=runs["url"])
    prefix = "exported/huggingface/ba2/"
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket="bucket", Prefix=prefix)["Contents"]]
    for key in keys:
        client.download_file("bucket", key, str(tmp_path / key.removeprefix(prefix)))
    AutoModelForCausalLM.from_pretrained(tmp_path)
    out = runs["root"] / "s3_exported"
    assert export(runs["root"] / "s3_run", out, "--tokenizer", "none") == 0
    assert equal(tensors(tmp_path), tensors(out))


@pytest.mark.parametrize("step", [1, 2])
def test_on_the_meta_device_a_run_reads_a_folder_and_goes_on_without_it(step: int, runs: dict[str, Any]) -> None:
    assert runs["errors"][4:] == [None, None]
    root = runs["root"]
    assert export(root / "read_run", root / f"read_{step}", "--step", step, "--tokenizer", "none") == 0
    assert equal(tensors(root / f"read_{step}"), tensors(root / "mixtral"))


def test_what_no_family_computes_is_refused_before_the_first_batch(runs: dict[str, Any]) -> None:
    assert "callbacks.hf_checkpointer: gate.score (sigmoid)" in runs["errors"][2]
    assert "foundry-moe checkpoints export" in runs["errors"][2]
    assert not (runs["root"] / "refused").exists()
