"""Every run in `yamls/` is built at its own size for its own cluster, without memory, and trains at a small size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from foundry_moe.commands.plan.planner import Machine, plan_run
from foundry_moe.commands.plan.step import GIB
from foundry_moe.launch.processes import run_processes
from foundry_moe.layers.lookup import named_moe_layers
from foundry_moe.parallel import placement
from tests.distributed import trainer_worker
from tests.helpers.launching import PRELOAD

ROOT = Path(__file__).parents[2]
# GPUs, GPUs per node
CLUSTERS = {
    "bench/olmoe_1b_7b": (4, 4),
    "bench/dbrx_wide": (4, 4),
    "bench/qwen3_30b_a3b": (4, 4),
    "own_text/1gpu": (1, 1),
    "pretrain/1gpu": (1, 1),
    "pretrain/4gpu": (4, 4),
    "pretrain/8gpu": (8, 8),
    "cluster/64x8gpu": (512, 8),
    "cluster/olmoe_1b_7b": (8, 8),
    "cluster/qwen3_30b_a3b": (64, 8),
}


def load(name: str) -> dict[str, Any]:
    run = OmegaConf.to_container(OmegaConf.load(ROOT / "yamls" / f"{name}.yaml"), resolve=True)
    assert isinstance(run, dict)
    return {str(key): value for key, value in run.items()}


def test_all_runs_for_gpus_are_here() -> None:
    """The others have tests of their own (tests/end_to_end, tests/docs)."""
    found = {str(path.relative_to(ROOT / "yamls").with_suffix("")) for path in (ROOT / "yamls").rglob("*.yaml")}
    finetune = {"finetune/instructions", "finetune/lora", "finetune/lora_cpu"}
    assert found == {*CLUSTERS, *finetune, "demo/cpu", "own_text/cpu", "eval/exported"}


@pytest.mark.parametrize("name", [name for name in CLUSTERS if "bench" not in name])
def test_a_run_goes_on_by_itself_with_the_machines_that_are_left(name: str) -> None:
    run = load(name)
    assert run["callbacks"]["elastic_checkpoint"]["folder"].startswith(run["variables"]["run"] + "/")
    assert "save_folder" not in run


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_run_is_built_for_its_cluster_with_the_planned_bytes_on_a_rank(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foundry_moe.registry import DMoECausalLM

    gpus, per_node = CLUSTERS[name]
    run = load(name)
    plan = plan_run(run, Machine(gpus=gpus, gpus_per_node=per_node, gpu_bytes=141 * GIB))
    keys = {key: value for key, value in run["model"].items() if key not in ("name", "init_device")}
    mesh = keys["moe"].pop("mesh")
    with torch.device("meta"):
        model = DMoECausalLM(tokenizer=None, init_device="meta", **keys)
    assert sum(p.numel() for p in model.parameters()) == plan.shape.num_params
    # the last rank has the short pieces, where something does not divide
    dist.init_process_group("fake", store=FakeStore(), rank=gpus - 1, world_size=gpus)
    try:
        for draw in ("draw_experts", "draw_replicated"):
            monkeypatch.setattr(placement, draw, lambda *_: None)
        monkeypatch.setattr(torch.nn.Module, "to_empty", lambda module, **_: module)  # stays without memory
        placed = placement.parallelize(model, mesh, ranks_per_node=per_node)
        assert placed.plan == plan.mesh and len(named_moe_layers(model)) == plan.shape.moe_layers
        for block in model.model.transformer.blocks:
            fully_shard(block, mesh=placed.mesh)
        fully_shard(model, mesh=placed.mesh)
        here = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
        assert 4 * here == pytest.approx(plan.memory["weights"], rel=0.01)
        for layer in named_moe_layers(model).values():
            # of the whole layer, not of the part of a rank
            assert layer.experts.w1_EFD.shape[0] == run["model"]["moe"]["num_experts"]
    finally:
        dist.destroy_process_group()


def small(name: str, text: Path, folder: Path, processes: int) -> list[str]:
    """Arguments that make a run fit two CPU processes; everything else stays as it is."""
    run = load(name)
    heads = 4 if "kv_n_heads" not in run["model"]["attn_config"] else 8
    expert = min(run["model"]["moe"]["mesh"]["expert"], processes)
    found = [
        str(ROOT / "yamls" / f"{name}.yaml"),
        "max_seq_len=64",
        "model.init_device=cpu",
        f"model.d_model={8 * heads}",
        f"model.n_heads={heads}",
        *(["model.head_dim=16"] if "head_dim" in run["model"] else []),
        "model.n_layers=2",
        "model.moe.expert_hidden_size=32",
        f"model.moe.mesh={{expert: {expert}, shard: {processes // expert}, replicate: auto}}",
        f"global_train_batch_size={2 * processes}",
        "device_train_microbatch_size=1",
        "max_duration=2ba",
        "precision=fp32",
        "expandable_segments=false",
        "scheduler.t_warmup=1ba",
        "loggers={inmemory: {}}",
        "log_to_console=false",
        "python_log_level=WARNING",
    ]
    if "bench" in name:
        loader = "{name: random_tokens, max_seq_len: 64, vocab_size: 256, samples: 64}"
        return [
            *found,
            "model.vocab_size=256",
            f"train_loader={loader}",
            f"code_paths=[{ROOT}/benchmarks/random_tokens.py]",
        ]
    return [
        *found,
        f"variables.data={text}",
        f"variables.run={folder / name}",
        "model.vocab_size=4096",
        f"tokenizer={{name: {text}/tokenizer, kwargs: {{model_max_length: 64}}}}",
        "train_loader.num_workers=0",
        "train_loader.prefetch_factor=null",
        "train_loader.persistent_workers=false",
        "eval_loader=null",
        "eval_interval=0",
    ]


@pytest.mark.parametrize("processes", [1, 2])
def test_every_run_trains_through_the_training_command(processes: int, tiny_text: Path, tmp_path: Path) -> None:
    names = [name for name, (gpus, _) in CLUSTERS.items() if (gpus == 1) == (processes == 1)]
    runs = [small(name, tiny_text, tmp_path, processes) for name in names]
    results = run_processes(
        trainer_worker.train_through_the_door, runs, world_size=processes, preload=PRELOAD, timeout_s=600
    )
    for name, result in zip(names, results, strict=True):
        assert len(result["losses"]) == 2 and all(math.isfinite(loss) for loss in result["losses"]), name
        assert result["losses"][1] != result["losses"][0]
        assert result["resharded"] is (None if processes == 1 else True), name
        assert all(("Shard(dim=0)" in placed) == (processes > 1) for placed in result["placements"]), name
