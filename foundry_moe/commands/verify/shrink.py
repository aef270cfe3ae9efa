"""Shrinks a run to a few processes on two cores: sizes keep their ratios, and all other keys keep their meaning.

Reads and writes plain dictionaries. Must not know how a run is trained or compared. A Hugging Face model's own sizes
are `shrink_hugging_face`'s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foundry_moe.config import AUTO, MeshConfig, MoEConfig
from foundry_moe.launch.foundry_keys import MPT_VOCABULARY, MPTS
from foundry_moe.launch.run_config import MODEL, mesh_of, read_moe
from foundry_moe.parallel.mesh import DIMENSIONS, Mesh, can_replicate, divisors
from foundry_moe.schema import UserError, section

HEAD, LAYERS, POSITIONS, VOCABULARY = 16, 2, 32, 256
SEQUENCES, MICROBATCHES = 8, 2  # sequences in a microbatch of all ranks, and microbatches of a step
WIDTH_STEP = 16  # which all kernels take
LEARNING_RATE = 0.01  # so that three steps move the weights
# AdamW's usual 1e-8 would turn a gradient that is rounding alone into a step of +-LEARNING_RATE
EPSILON = 1e-4
THRESHOLD = {"norm": 0.1, "value": 1e-3}  # of clipping; low enough that gradients are clipped
BATCHES = 4  # three to compare, and the one after a resumption
SAVE_AFTER = BATCHES - 1
# keys that stay; batch sizes, schedule and data are set by `trial_of`, the others have no part in a training step
_KEPT = {
    *("accumulate_train_batch_on_tokens", "algorithms", "code_paths", "compile_config", "fsdp_config"),
    *("max_seq_len", "model", "optimizer", "precision", "seed"),
}
_DROPOUT = ("resid_pdrop", "emb_pdrop", "attn_pdrop")
# implementations that need a GPU, and their replacements on a CPU
_GPU_ONLY = {"fused_crossentropy": "torch_crossentropy", "triton_rmsnorm": "low_precision_rmsnorm"}


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """A run that trains in seconds.

    run: without the data and callbacks, which each trial adds.
    config: its experts.
    mesh: (replicate, shard, expert); None = data parallelism over two processes, as Composer does it.
    microbatch: sequences of a rank in one.
    alone: sequences in a microbatch of one process, so that it sees what a rank, a group or all ranks see.
    precision: fp64 | fp32.
    source: folder of the model that this one was converted from; empty = none.
    notes: sentences, one a change.
    """

    name: str = "run"
    run: Mapping[str, Any]
    config: MoEConfig
    mesh: Mesh | None
    processes: int
    microbatch: int
    alone: int
    precision: str
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def batch(self) -> int:
        return self.processes * self.microbatch * MICROBATCHES


def shrink(
    run: Mapping[str, Any], *, mesh: Mesh | None, device: str, precision: str = "fp32", scale: float = 1.0
) -> SmallRun:
    """The run at a small size.

    Args:
        run: one with experts that `check_whole_run` has passed.
        mesh: to train on; None = the run's, each axis above 1 as small as can be above 1.
        device: cpu | cuda.
        precision: fp64 | fp32; 16-bit rounding would move tokens to other experts.
        scale: of the widths of a model that is small already.
    """
    small = copy.deepcopy({key: value for key, value in run.items() if key in _KEPT})
    config = read_moe(small)
    assert config is not None
    keys = mesh_of(small, config)
    if keys is not None:
        mesh = mesh or _small_mesh(keys, config.num_experts)
        set_mesh(small, mesh)
    elif mesh is not None:
        raise UserError(f"--mesh {mesh}: the run has no mesh; give its MoE keys one, such as mesh: {{expert: 2}}")
    small["max_seq_len"] = min(int(run["max_seq_len"]), POSITIONS)
    if small["model"].get("name") in MPTS:
        scale = _shrink_mpt(small, config)
    _shrink_experts(moe_keys(small), scale)
    _shrink_training(small, precision)
    _fit_device(small, device, precision)
    processes = math.prod(mesh) if mesh else 2
    microbatch = max(1, SEQUENCES // processes)  # so that meshes share the trials of one process
    return SmallRun(
        run=small,
        config=config,
        mesh=mesh,
        processes=processes,
        microbatch=microbatch,
        alone=microbatch * _ranks_counted(small, config, mesh, processes),
        precision=precision,
    )


def changes(run: Mapping[str, Any], small: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """A sentence for each value of a run that is another one in the small run, by the path of its key."""
    for key, value in small.items():
        before = run.get(key, "default")
        if isinstance(value, dict) and isinstance(before, Mapping):
            yield from changes(before, value, f"{path}{key}.")
        elif value != before:
            yield f"{path}{key}: {before} -> {value}"


def moe_keys(run: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping that holds the run's experts, wherever it stands."""
    algorithms, model = section(run, "algorithms"), section(run, "model")
    found = algorithms.get("dmoe") if "dmoe" in algorithms else model.get("moe")
    assert isinstance(found, dict)
    return found


def set_mesh(run: dict[str, Any], mesh: Mesh) -> None:
    """Sets the sizes of the run's mesh; the other keys are unchanged."""
    sizes = dict(zip(DIMENSIONS, mesh, strict=True))
    algorithms, keys = run.get("algorithms") or {}, moe_keys(run)
    if keys.get("mesh") is not None:
        keys["mesh"] = {**({} if keys["mesh"] == AUTO else keys["mesh"]), **sizes}
    if "dmoe_mesh" in algorithms:
        algorithms["dmoe_mesh"] = {**algorithms["dmoe_mesh"], **sizes}


def _small_mesh(keys: MeshConfig, num_experts: int) -> Mesh:
    smallest = next((size for size in divisors(num_experts) if size > 1), 1)
    expert = smallest if keys.expert not in (1, AUTO) or (keys.expert == AUTO and keys.shard != AUTO) else 1
    replicate = 2 if keys.replicate != 1 and can_replicate("cpu") else 1
    shard = 1 if keys.shard == 1 or (keys.shard == AUTO and expert * replicate > 1) else 2
    return replicate, shard, expert


def _ranks_counted(run: dict[str, Any], config: MoEConfig, mesh: Mesh | None, processes: int) -> int:
    """The ranks whose tokens losses and capacity count together; one process has as many in a microbatch.

    Sums over one rank can only be compared with microbatches of a rank's size.
    """
    if config.gate["name"] == "expert_choice" or config.capacity is not None:
        if config.balance_over in ("microbatch", "group"):
            moe_keys(run)["balance_over"] = "rank"
        return 1
    return {"rank": 1, "group": mesh[2] if mesh else 1}.get(config.balance_over, processes)


def even_width(width: float) -> int:
    """The nearest multiple of WIDTH_STEP."""
    return max(WIDTH_STEP, round(width / WIDTH_STEP) * WIDTH_STEP)


def shrink_heads(width: int, heads: int, kv_heads: int) -> tuple[int, int, int]:
    """Shrunk width, query heads and key heads, with the same ratio of heads; an already small model is unchanged."""
    ratio = max(1, heads // kv_heads)
    small, small_kv = (4, 4) if ratio == 1 else (ratio, 1) if ratio > 2 else (4, 2)
    return (small * HEAD, small, small_kv) if small * HEAD < width else (width, heads, kv_heads)


def shrink_layers(run: dict[str, Any], config: MoEConfig, layers: int) -> int:
    """The number of layers that keeps dense layers beside those with experts; a list of layers is made to fit."""
    if isinstance(config.layers, dict):
        return min(layers, max(LAYERS, config.layers["every"]))
    few = min(layers, LAYERS)
    if isinstance(config.layers, tuple):
        kept = sorted(index for index in config.layers if index < few)
        moe_keys(run)["layers"] = kept or [few - 1]
    return few


def _shrink_mpt(run: dict[str, Any], config: MoEConfig) -> float:
    """Shrinks the model; returns the scale of its widths."""
    model = run["model"]
    attention = model["attn_config"] = dict(model.get("attn_config") or {})
    width, heads, layers = model.get("d_model", 2048), model.get("n_heads", 16), model.get("n_layers", 24)
    kv_heads = {"multiquery_attention": 1, "grouped_query_attention": attention.get("kv_n_heads", heads)}.get(
        attention.get("attn_type", ""), heads
    )
    attention.pop("head_dim", None)
    small, small_heads, small_kv = shrink_heads(width, heads, kv_heads)
    if small < width:  # keeps the ratio of a head's width to D / heads
        head = model.get("head_dim") or width // heads
        small_head = head * HEAD * heads // width
        if "kv_n_heads" in attention:
            attention["kv_n_heads"] = small_kv
        if model.get("head_dim"):
            model["head_dim"] = small_head
        if attention.get("softmax_scale"):  # one over the root of a head's width
            attention["softmax_scale"] *= (head / small_head) ** 0.5
    model.update(d_model=small, n_heads=small_heads, max_seq_len=run["max_seq_len"])
    model["n_layers"] = layers if model.get("block_overrides") else shrink_layers(run, config, layers)
    model["vocab_size"] = min(int(model.get("vocab_size", MPT_VOCABULARY)), VOCABULARY)
    ffn = model.get("ffn_config")
    if isinstance(ffn, dict) and ffn.get("ffn_hidden_size") and small < width:
        ffn["ffn_hidden_size"] = even_width(ffn["ffn_hidden_size"] * small / width)
    for where in (model, attention):
        where.update({key: 0.0 for key in _DROPOUT if where.get(key)})  # one process draws other numbers than several
    return small / width


def _shrink_experts(keys: dict[str, Any], scale: float) -> None:
    widths, shared = keys.get("expert_hidden_size", AUTO), keys.get("shared_expert_hidden_size")
    if isinstance(widths, tuple | list):
        common = math.gcd(*widths)
        unit = max(1, min(common, 64 * common // max(widths)))
        keys["expert_hidden_size"] = [width // common * unit for width in widths]
    elif isinstance(widths, int) and scale < 1:
        keys["expert_hidden_size"] = even_width(widths * scale)
    if shared and scale < 1:
        keys["shared_expert_hidden_size"] = even_width(shared * scale)


def _shrink_training(run: dict[str, Any], precision: str) -> None:
    name = str(run["optimizer"].get("name"))
    optimizer = run["optimizer"] if "adam" in name or name == "muon" else {"name": "decoupled_adamw"}
    run["optimizer"] = {**optimizer, "lr": LEARNING_RATE, "eps": EPSILON}
    if name == "muon":  # rounding of bf16 would differ from mesh to mesh
        run["optimizer"]["dtype"] = {"fp64": "float64", "fp32": "float32"}[precision]
    clipping = section(run, "algorithms").get("gradient_clipping")
    if isinstance(clipping, dict) and clipping.get("clipping_type") in THRESHOLD:
        clipping["clipping_threshold"] = THRESHOLD[clipping["clipping_type"]]


def _fit_device(run: dict[str, Any], device: str, precision: str) -> None:
    """Sets the precision, and on a CPU the implementations that it has.

    In fp64 nothing is cast; the trial draws fp64 weights. Flash attention, which supports 16 bits only, is replaced.
    """
    model, fsdp, attention = run["model"], run.get("fsdp_config"), run["model"].get("attn_config")
    # weights drawn from meta are drawn for each shard, so they would depend on the mesh
    model["init_device"] = "cpu"
    run["precision"] = "fp32"
    if isinstance(fsdp, dict):
        fsdp.pop("mixed_precision", None)
        if precision == "fp64":
            fsdp["mixed_precision"] = "FULL"
    if attention and attention.get("attn_impl") == "flash":
        attention["attn_impl"] = "sdpa" if model.get("name") == MODEL else "torch"
    if model.get("use_flash_attention_2"):
        model["use_flash_attention_2"] = False
    if device == "cuda":
        return
    for where in (model, attention or {}):
        where.update({key: _GPU_ONLY[where[key]] for key in ("loss_fn", "norm_type") if where.get(key) in _GPU_ONLY})
    if model.get("name") == "mpt_causal_lm":
        model.setdefault("loss_fn", "torch_crossentropy")
        model["attn_config"].setdefault("attn_impl", "torch")
