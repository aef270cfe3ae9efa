"""`foundry-moe plan`: parameters as the real model has them, every YAML of the tree, and what will not do."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from foundry_moe import flops_per_token, num_active_params, num_params
from foundry_moe.cli import parse
from foundry_moe.commands.plan.command import format_plan, plan_command, planned_backend
from foundry_moe.commands.plan.constants import shipped_constants
from foundry_moe.commands.plan.planner import Machine, RunPlan, plan_run
from foundry_moe.commands.plan.shape import read_shape
from foundry_moe.commands.plan.step import GATHER, GIB, Message, Step, _exposed_s, message_s, ranks_per_token
from tests.helpers.plans import ROOT, RUNS, load

pytestmark = pytest.mark.quick

REUSED = {
    "order": [{"name": "default"}, {"repeat": 2, "order": [{"name": "reuse"}]}, {"name": "default"}],
    "overrides": {"reuse": {"attn_config": {"reuse_kv_layer_idx": -1}}},
}


def planned(run: dict[str, Any], *, gpus: int, per_node: int, gib: float) -> RunPlan:
    return plan_run(run, Machine(gpus=gpus, gpus_per_node=per_node, gpu_bytes=gib * GIB))


@pytest.mark.parametrize("path", RUNS)
def test_every_run_of_the_tree_fits_its_machine(path: str) -> None:
    gpus, gpus_per_node, gib = RUNS[path]
    plan = planned(load(path), gpus=gpus, per_node=gpus_per_node, gib=gib)
    assert not [warning for warning in plan.warnings if "fit" in warning]
    assert plan.mesh.world_size == gpus and plan.mesh.expert_nodes == 1
    text = format_plan(plan)
    assert f"= {gpus} GPU" in text and "in all" in text


def test_a_small_plan_on_one_gpu_is_readable() -> None:
    text = format_plan(planned(load("yamls/demo/cpu.yaml"), gpus=1, per_node=1, gib=80))
    assert "= 1 GPU on 1 node;" in text and "on a GPU, whole; other parameters: whole" in text
    assert "step: 2 microbatches of 2 sequences of 256 tokens on a GPU, 1,024 tokens in all" in text
    assert not re.search(r"\b0\.0+ (M|B|GiB|MiB|ms|us)\b", text)


def test_yamls_are_all_planned() -> None:
    folders = ("bench", "own_text", "pretrain", "cluster")
    found = {str(p.relative_to(ROOT)) for folder in folders for p in (ROOT / "yamls" / folder).glob("*")}
    assert found == {*RUNS, "yamls/own_text/cpu.yaml"}


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tie_word_embeddings": True, "no_bias": False, "norm_type": "low_precision_layernorm"},
        {"learned_pos_emb": True, "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2}},
        {"moe": {"num_experts": 4, "top_k": 2, "layers": {"every": 2}, "shared_expert_hidden_size": 24}},
        {"moe": {"num_experts": 4, "expert_hidden_size": [8, 24, 15, 16]}},
        {"moe": {"num_experts": 4, "bias": True}, "no_bias": False},
        {"moe": {"num_experts": 4, "gate": {"name": "topk", "noise": True}}, "learned_pos_emb": True},
        {"moe": {"num_experts": 4, "shared_expert_hidden_size": 24, "shared_expert_gate": True}},
        {"learned_pos_emb": True, "attn_config": {"rope": True, "rope_impl": "hf"}},
        {"learned_pos_emb": True, "attn_config": {"alibi": True}},
        {"block_overrides": REUSED, "no_bias": False, "attn_config": {"qk_ln": True}},
        {"block_overrides": REUSED, "no_bias": True, "attn_config": {"qk_gn": True}},
        {"head_dim": 24, "no_bias": False, "attn_config": {"fused_qkv": False}},
        {"moe": {"num_experts": 4, "activation": "gelu"}, "ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 40}},
    ],
)
def test_parameters_equal_those_of_the_model_that_is_built(model: dict[str, Any]) -> None:
    from foundry_moe.registry import DMoECausalLM

    small = {"d_model": 32, "n_heads": 4, "n_layers": 4, "vocab_size": 96, "max_seq_len": 16, "init_device": "meta"}
    run = load("yamls/bench/olmoe_1b_7b.yaml")
    merged = {**run["model"], **small, "attn_config": {}, **model}
    merged["moe"] = {key: value for key, value in merged["moe"].items() if key != "mesh"}
    run |= {"model": dict(merged), "max_seq_len": 12}  # the table of positions has the model's length, not the run's
    shape = read_shape(run)
    merged.pop("name")
    with torch.device("meta"):
        built = DMoECausalLM(tokenizer=None, **merged)
    assert sum(p.numel() for p in built.parameters()) == shape.num_params == num_params(built) == num_params(run)
    assert num_active_params(built) == num_active_params(run) < num_params(run)
    for sequence in (12, 48):
        assert flops_per_token(built, sequence) == flops_per_token(run, sequence)
    assert flops_per_token(run, 12) == shape.flops_per_token
    experts = sum(p.numel() for name, p in built.named_parameters() if ".experts." in name)
    assert experts == shape.experts


@pytest.mark.parametrize("optimizer", ["decoupled_adamw_fused", "muon", "decoupled_lionw"])
def test_an_optimizers_state_has_the_dtype_of_master_weights(optimizer: str) -> None:
    run = load("yamls/bench/olmoe_1b_7b.yaml", optimizer__name=optimizer)
    narrow = load("yamls/bench/olmoe_1b_7b.yaml", optimizer__name=optimizer, model__master_weights_dtype="bf16")
    of_fp32, of_bf16 = (planned(keys, gpus=4, per_node=4, gib=141).memory["optimizer"] for keys in (run, narrow))
    assert of_bf16 == of_fp32 / 2 > 0


def test_olmoe_has_the_parameters_of_its_paper() -> None:
    shape = read_shape(load("yamls/bench/olmoe_1b_7b.yaml"))
    # Muennighoff et al. 2024: 6.9 B in all, 1.3 B active
    assert round(shape.num_params / 1e9, 2) == 6.92
    assert round(shape.num_active_params / 1e9, 2) == 1.28


@pytest.mark.parametrize(
    ("gpus", "overrides", "gib"),
    [
        (4, {}, 52.59),
        (4, {"model__moe__backend": "grouped"}, 78.30),
        (4, {"model__n_layers": 4, "model__moe__mesh": {"expert": 1}}, 19.75),
        (2, {"model__n_layers": 4, "model__moe__mesh": {"expert": 1}, "global_train_batch_size": 8}, 25.01),
        (1, {"model__n_layers": 4, "model__moe__mesh": {"expert": 1}, "global_train_batch_size": 4}, 38.86),
        # predicted before they ran
        (2, {"model__n_layers": 4, "model__moe__mesh": {"expert": 2}, "global_train_batch_size": 8}, 25.18),
        (
            2,
            {
                "model__n_layers": 6,
                "model__d_model": 1536,
                "model__n_heads": 12,
                "model__moe__expert_hidden_size": 768,
                "model__moe__memory": "recompute",
                "model__moe__mesh": {"expert": 1, "shard": 1, "replicate": 2},
                "global_train_batch_size": 8,
            },
            29.79,
        ),
        (
            2,
            {
                "model__n_layers": 8,
                "model__moe__mesh": {"expert": 1},
                "fsdp_config__activation_checkpointing": True,
                "global_train_batch_size": 8,
            },
            30.84,
        ),
    ],
)
def test_memory_is_what_h200s_showed(gpus: int, overrides: dict[str, Any], gib: float) -> None:
    # torch.cuda.max_memory_allocated of benchmarks/train_step.py, 2026-11-21; the floor is 10%, the worst of these 4.1%
    run = load("yamls/bench/olmoe_1b_7b.yaml", model__loss_fn="torch_crossentropy", **overrides)
    plan = planned(run, gpus=gpus, per_node=4, gib=141)
    allocated = sum(plan.memory.values()) - plan.memory["CUDA and NCCL"]
    assert allocated / GIB == pytest.approx(gib, rel=0.045)


def test_muon_holds_one_moment_of_hidden_matrices() -> None:
    run = load("yamls/bench/olmoe_1b_7b.yaml")
    adamw, muon = (
        planned({**run, "optimizer": {"name": name}}, gpus=4, per_node=4, gib=141)
        for name in ("decoupled_adamw_fused", "muon")
    )
    shape = adamw.shape
    saved = adamw.memory["optimizer"] - muon.memory["optimizer"]
    assert saved == 4 * (shape.num_params - shape.outside_blocks) / 4
    assert muon.time["optimizer"] > adamw.time["optimizer"]


def test_a_fused_loss_holds_no_logits() -> None:
    def memory(loss_fn: str, **keys: Any) -> float:
        run = load("yamls/bench/qwen3_30b_a3b.yaml", model__loss_fn=loss_fn, **keys)
        return sum(planned(run, gpus=4, per_node=4, gib=141).memory.values())

    plain = memory("torch_crossentropy")
    # 16,384 tokens and 151,936 words: logits twice in bf16 and twice in fp32, less than a seventh of which stays
    assert plain - memory("auto") > 0.85 * 16384 * 151936 * 12
    assert memory("auto", model__use_train_metrics=True) == plain


def test_a_token_reaches_as_many_ranks_as_chance_says() -> None:
    generator = torch.Generator().manual_seed(0)
    choices = torch.rand(20_000, 64, generator=generator).topk(8).indices // 16
    measured = sum((choices == rank).any(1).double().mean().item() for rank in range(4))
    assert ranks_per_token(64, 8, 4) == pytest.approx(measured, rel=0.005)
    assert ranks_per_token(64, 8, 1) == 1.0
    assert math.isclose(ranks_per_token(8, 8, 8), 8.0)


def test_more_experts_ranks_mean_fewer_bytes_and_replicas_do_not() -> None:
    def held(**mesh: Any) -> float:
        run = load("yamls/bench/olmoe_1b_7b.yaml", global_train_batch_size=64, model__moe__mesh=mesh)
        return planned(run, gpus=16, per_node=8, gib=80).memory["optimizer"]

    assert held(expert=8, shard=2) == pytest.approx(held(expert=4, shard=4)) == pytest.approx(held(expert=1, shard=16))
    assert held(expert=8, shard=1, replicate=2) == pytest.approx(2 * held(expert=8, shard=2))


RESHARD = "fsdp_config__reshard_after_forward"


@pytest.mark.parametrize(("resharded", "gathers", "reductions"), [(False, 1, 1), (True, 2 * 8, 8)])
def test_kept_weights_are_gathered_and_reduced_once_per_batch(resharded: bool, gathers: int, reductions: int) -> None:
    keys = {RESHARD: resharded, "device_train_microbatch_size": 1, "global_train_batch_size": 64}
    plan = planned(load("yamls/bench/olmoe_1b_7b.yaml", **keys), gpus=8, per_node=8, gib=141)
    counts = {message.name: message.count for message in plan.messages}
    assert (counts["all-gather dense"], counts["all-gather experts"]) == (17 * gathers, 16 * gathers)
    assert (counts["reduce-scatter dense"], counts["reduce-scatter experts"]) == (17 * reductions, 16 * reductions)


@pytest.mark.parametrize(
    ("mesh", "resharded", "first", "second", "later"),
    [
        # cast and laid out, and the part of a GPU to its place and, after the first, to the sum
        ((1, 2, 1), True, 6 + 4, 6 + 4 + 6, 6 + 4 + 6),
        # kept, or replicas of whole weights: cast; added as they come; the last time, the sum is laid out and a GPU's
        # part to its place, in place of the one gradient
        ((1, 2, 1), False, 6 + 4, 10 + 8, 10),
        ((2, 1, 1), True, 6 + 8, 10 + 8, 10),
        ((2, 1, 1), False, 6 + 8, 10 + 8, 10),
    ],
)
def test_bytes_of_gradients_by_microbatch(
    mesh: tuple[int, int, int], resharded: bool, first: float, second: float, later: float
) -> None:
    widths = dict(zip(("replicate", "shard", "expert"), mesh, strict=True))
    times = []
    for microbatches in (1, 2, 3, 4):
        keys = {RESHARD: resharded, "model__moe__mesh": widths, "global_train_batch_size": 2 * 4 * microbatches}
        plan = planned(load("yamls/bench/olmoe_1b_7b.yaml", **keys), gpus=2, per_node=2, gib=141)
        assert plan.step.microbatches == microbatches
        per_s = plan.machine.constants.memory_bytes_per_s / plan.shape.num_params
        gathered = plan.step.gathers * (6 / mesh[1] + 4)  # the cast of the part of a GPU, and the copy of all
        times.append(plan.time["FSDP's copies"] * per_s - gathered)
    assert times == pytest.approx([first + n for n in (0, second, second + later, second + 2 * later)])


def test_kept_gradients_are_held_whole_until_the_last_microbatch() -> None:
    """By the planner, in fp32, when the loss is computed; one GPU's part of them otherwise."""
    held = []
    for microbatches, resharded in itertools.product((1, 2), (True, False)):
        keys = {RESHARD: resharded, "model__moe__mesh": {"expert": 1}, "global_train_batch_size": 8 * microbatches}
        plan = planned(load("yamls/bench/olmoe_1b_7b.yaml", **keys), gpus=2, per_node=2, gib=141)
        held.append(plan.memory["activations and logits"] / plan.shape.num_params)
    once, kept, part, whole = held
    assert (part - once, whole - kept) == (pytest.approx(4 / 2), pytest.approx(4))


@pytest.mark.parametrize(("length", "moment"), [(64, "gradients and a layer"), (4096, "activations and logits")])
def test_gradients_have_the_dtype_of_master_weights(length: int, moment: str) -> None:
    short = {"max_seq_len": length, "model__moe__mesh": {"expert": 1}, "global_train_batch_size": 16}
    held = []
    for dtype in ("fp32", "bf16"):
        run = load("yamls/bench/olmoe_1b_7b.yaml", **short, model__master_weights_dtype=dtype)
        plan = planned(run, gpus=2, per_node=2, gib=141)
        held.append(plan.memory[moment])
    assert held[0] - held[1] == pytest.approx((4 - 2) * plan.shape.num_params / 2)


@pytest.mark.parametrize(("mesh", "laid_out"), [((2, 1, 2), 8 + 8), ((1, 1, 2), 0)])
def test_gradients_of_experts_of_one_rank_are_added_as_they_come(mesh: tuple[int, int, int], laid_out: int) -> None:
    widths = dict(zip(("replicate", "shard", "expert"), mesh, strict=True))
    gpus = math.prod(mesh)
    times = []
    for microbatches in (2, 3):
        keys = {RESHARD: True, "model__moe__mesh": widths, "global_train_batch_size": 4 * gpus * microbatches}
        plan = planned(load("yamls/bench/olmoe_1b_7b.yaml", **keys), gpus=gpus, per_node=4, gib=141)
        times.append(plan.time["FSDP's copies"] * plan.machine.constants.memory_bytes_per_s)
    dense, experts = plan.shape.num_params - plan.shape.experts, plan.shape.experts / 2
    gathered = 2 * ((6 / 2 + 4) * dense + (6 + 4) * experts)
    later = (6 + 4 + 6) * dense + 10 * experts + gathered
    assert times[1] - times[0] == pytest.approx(later)
    assert times[0] - later == pytest.approx((6 + 4) * dense + (6 + laid_out) * experts + gathered)


@pytest.mark.parametrize(
    ("resharded", "sent_s", "first", "passes"),
    [
        # one of ten gathers, and all of them beside the first forward pass
        (False, 0.01, 0.001, [(0.01, 0.2)]),
        (False, 3.0, 0.3, [(3.0, 0.2)]),
        # four of ten gathers, and half of them beside all passes of each kind
        (True, 0.1, 0.04, [(0.05, 0.8), (0.05, 1.6)]),
        (True, 3.0, 1.2, [(1.5, 0.8), (1.5, 1.6)]),
    ],
)
def test_gathers_are_hidden_by_the_passes_that_wait_for_them(
    resharded: bool, sent_s: float, first: float, passes: list[tuple[float, float]]
) -> None:
    constants, busy_s = shipped_constants("h200"), 2.4  # of four microbatches; a forward pass of one takes 0.2
    step = Step(tokens=1, microbatches=4, width=2, state_bytes=8, checkpointed=False, resharded=resharded)
    link = constants.all_gather
    size = (sent_s - 10 * link.latency_s) * link.bytes_per_s / 10
    gathers = Message(name="", kind=GATHER, count=10, ranks=2, nodes=1, bytes=size)
    assert message_s(gathers, constants) == pytest.approx(sent_s)
    exposed = first + sum(max(sent - work, 0) + constants.contention * min(sent, work) for sent, work in passes)
    assert _exposed_s(step, (gathers,), busy_s, constants) == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        ({"device_train_microbatch_size": 64, "global_train_batch_size": 4096}, "will not fit"),
        ({"model__moe__mesh": {"expert": 16, "shard": 2}}, "spans 2 nodes"),
        ({"max_seq_len": 64, "device_train_microbatch_size": 1}, "tokens per expert in a microbatch"),
        (
            {"model__moe__mesh": {"expert": 1, "shard": 64}},
            "slow: .* s of a step of .* s are messages that arithmetic does not hide",
        ),
    ],
)
def test_plan_warns_of_what_will_not_fit_or_is_slow(overrides: dict[str, Any], warning: str) -> None:
    gpus = 64 if overrides.get("model__moe__mesh", {}).get("shard") == 64 else 32
    run = load("yamls/bench/olmoe_1b_7b.yaml", **{"global_train_batch_size": 64, **overrides})
    plan = planned(run, gpus=gpus, per_node=8, gib=80)
    assert [w for w in plan.warnings if re.search(warning, w)], plan.warnings


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"model__block_overrides": {"order": [{"repeat": 2}]}}, "block_overrides must have `overrides` and `order`"),
        ({"model__name": "some_model"}, r"model.name \(some_model\): plan supports mpt_causal_lm, dmoe_causal_lm"),
        ({"model__moe": None}, "model.moe.num_experts is missing"),
        ({"model__moe": None, "model__name": "mpt_causal_lm"}, "the run has no experts"),
        ({"model__moe__layers": [0, 99]}, r"layers \(\[0, 99\]\): the model has 16, so use 0 to 15"),
        ({"model__attn_config": "sdpa"}, "model.attn_config must be a mapping"),
        ({"global_train_batch_size": 30}, r"global_train_batch_size \(30\) must be a multiple of .* \(4\)"),
        ({"device_train_microbatch_size": 0.5}, "must be a whole number of 1 or more, or auto"),
        ({"model__moe__mesh": {"expert": 3}}, r"mesh.expert \(3\) must divide num_experts \(64\)"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(overrides: dict[str, Any], sentence: str) -> None:
    run = load("yamls/bench/olmoe_1b_7b.yaml", **overrides)
    with pytest.raises(ValueError, match=sentence):
        planned(run, gpus=4, per_node=4, gib=80)


def test_command_prints_the_plan_and_says_by_its_code_whether_it_fits() -> None:
    command = [sys.executable, "-m", "foundry_moe.cli", "plan", str(ROOT / "yamls/cluster/64x8gpu.yaml")]
    machine = ["--gpus", "512", "--gpus-per-node", "8"]
    fits = subprocess.run([*command, *machine], capture_output=True, text=True, cwd=ROOT, check=False)
    assert fits.returncode == 0, fits.stderr
    assert "replicate 8 x shard 32 x expert 2 = 512 GPUs on 64 nodes" in fits.stdout
    small = subprocess.run(
        [*command, *machine, "--gpu-memory-gib", "24"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert small.returncode == 1 and "will not fit" in small.stdout


def test_the_plan_says_which_kernels_the_chip_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foundry_moe.ops.backends.INTERPRETED", False)  # where tests run, kernels take no bf16
    run = [str(ROOT / "yamls/pretrain/8gpu.yaml"), "--gpus", "8"]
    constants = str(ROOT / "foundry_moe/commands/plan/constants_h200.json")
    for chip, expected in (("h100", "experts on h100"), ("a100", "blocksparse, portable kernels")):
        plan_command(parse(["plan", *run, "--chip", chip, "--constants", constants]))
        assert expected in capsys.readouterr().out


def test_a_backend_that_the_chip_does_not_have_is_an_error_of_the_plan() -> None:
    run = load("yamls/pretrain/8gpu.yaml", model__moe__backend="grouped")
    with pytest.raises(ValueError, match="backend grouped needs bf16 on a CUDA device"):
        planned_backend(run, read_shape(run), "a100")
