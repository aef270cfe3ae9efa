"""Shrinks a run to a few processes on two cores: sizes keep their ratios, and all other keys keep their meaning.

Reads and writes plain dictionaries. Must not know how a run is trained or compared. A Hugging Face model's own sizes
are `shrink_hugging_face`'s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foundry_moe.config import AUTO, MeshConfig, MoEConfig, can_cut_rows
from foundry_moe.launch.foundry_keys import MPTS
from foundry_moe.launch.run_config import MODEL, mesh_of
from foundry_moe.parallel.mesh import DIMENSIONS, Mesh, can_replicate, divisors
from foundry_moe.schema import section

HEAD, LAYERS, POSITIONS, VOCABULARY, SEQUENCES = 16, 2, 32, 256, 2
WIDTH_STEP = 16  # which all kernels take
LEARNING_RATE = 0.01
# AdamW's usual 1e-8 would turn a gradient that is rounding alone into a step of +-LEARNING_RATE
EPSILON = 1e-4
THRESHOLD = {"norm": 0.1, "value": 1e-3}  # of clipping; low enough that gradients are clipped
BATCHES = 4  # three to compare, and the one after a resumption
SAVE_AFTER = BATCHES - 1
LOADER = "synthetic_tokens"
# keys that are not part of the training step, or that need files, hubs or servers
_LEFT_OUT = (
    "callbacks", "loggers", "eval_loader", "eval_first", "eval_subset_num_batches", "eval_gauntlet",
    "eval_gauntlet_config", "icl_tasks", "icl_tasks_str", "icl_subset_num_batches", "icl_seq_len",
    "device_eval_batch_size", "load_path", "load_weights_only", "load_strict_model_weights", "load_ignore_keys",
    "save_folder", "save_interval", "save_latest_filename", "save_filename", "save_num_checkpoints_to_keep",
    "save_overwrite", "save_weights_only", "save_ignore_keys", "autoresume", "profiler", "only_hf_checkpoint",
    "only_composer_checkpoint",
)  # fmt: skip
_DROPOUT = ("resid_pdrop", "emb_pdrop", "attn_pdrop")
# implementations that need a GPU, and their replacements on a CPU
_GPU_ONLY = {"fused_crossentropy": "torch_crossentropy", "triton_rmsnorm": "low_precision_rmsnorm"}


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """A run that trains in seconds.

    run: without the data, callbacks and mesh sizes, which each trial adds.
    config: its experts.
    mesh: (replicate, shard, expert); None = data parallelism over two processes, as Composer does it.
    microbatch: sequences of a rank in one.
    alone: sequences in a microbatch of one process, so that it sees what a rank, a group or all ranks see.
    precision: fp64 | fp32.
    vocabulary: tokens are drawn below it.
    source: folder of the model that this one was converted from; empty = none.
    notes: sentences, one a change that matters.
    """

    name: str = "run"
    run: Mapping[str, Any]
    config: MoEConfig
    mesh: Mesh | None
    microbatch: int
    microbatches: int
    alone: int
    precision: str
    vocabulary: int = VOCABULARY
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def processes(self) -> int:
        return math.prod(self.mesh) if self.mesh else 2

    @property
    def batch(self) -> int:
        return self.processes * self.microbatch * self.microbatches


@dataclass(kw_only=True)
class _Work:
    """A run while it is shrunk."""

    run: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def set(self, where: dict[str, Any], key: str, value: Any, why: str = "") -> None:
        """Sets a key; adds a note if a reason is given."""
        if key in where and where[key] != value and why:
            self.notes.append(f"{key}: {where[key]} -> {value} ({why})")
        where[key] = value


def shrink(
    run: Mapping[str, Any],
    config: MoEConfig,
    *,
    mesh: Mesh | None,
    device: str,
    precision: str = "fp32",
    scale: float = 1.0,
) -> SmallRun:
    """The run at a small size; `check_whole_run` has passed it.

    Args:
        config: its experts.
        mesh: to train on; None = the run's, each axis above 1 as small as can be above 1.
        device: cpu | cuda.
        precision: fp64 | fp32; 16-bit rounding would move tokens to other experts.
        scale: of the widths of a model that is small already.

    Raises:
        ValueError: a mesh that does not fit the experts, or a model whose sizes are not known.
    """
    work = _Work(run=copy.deepcopy({key: value for key, value in run.items() if key not in _LEFT_OUT}))
    keys = mesh_of(run)
    chosen = _choose_mesh(work, keys, config, mesh)
    microbatch, microbatches = _shrink_batches(work, run, keys)
    length = min(int(run["max_seq_len"]), POSITIONS)
    vocabulary = VOCABULARY
    if section(run, "model").get("name") in MPTS:
        scale, vocabulary = _shrink_mpt(work, length, config)
    _shrink_experts(work, config, scale, chosen)
    _shrink_training(work)
    _fit_device(work, device, precision)
    notes = [f"sequences of {run['max_seq_len']} -> {length} tokens, drawn at random in place of the run's data"]
    work.run["max_seq_len"] = length
    alone = _alone(work, config, chosen, microbatch)
    return SmallRun(
        run=work.run,
        config=config,
        mesh=chosen,
        microbatch=microbatch,
        microbatches=microbatches,
        alone=alone,
        precision=precision,
        vocabulary=vocabulary,
        notes=(*notes, *work.notes),
    )


def moe_keys(run: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping that holds the run's experts, wherever it stands."""
    algorithms, model = section(run, "algorithms"), section(run, "model")
    found = algorithms.get("dmoe") if "dmoe" in algorithms else model.get("moe")
    assert isinstance(found, dict)
    return found


def set_precision(run: dict[str, Any], precision: str) -> None:
    """Sets the run's precision. In fp64 nothing is cast; the trial draws fp64 weights.

    Flash attention, which supports 16 bits only, is replaced.
    """
    fsdp, attention = run.get("fsdp_config"), run["model"].get("attn_config")
    run["precision"] = "fp32"
    if isinstance(fsdp, dict):
        fsdp.pop("mixed_precision", None)
        if precision == "fp64":
            fsdp["mixed_precision"] = "FULL"
    if attention and attention.get("attn_impl") == "flash":
        attention["attn_impl"] = "sdpa" if run["model"].get("name") == MODEL else "torch"
    if run["model"].get("use_flash_attention_2"):
        run["model"]["use_flash_attention_2"] = False


def set_mesh(run: dict[str, Any], mesh: Mesh) -> None:
    """Sets the sizes of the run's mesh; the other keys are unchanged."""
    sizes = dict(zip(DIMENSIONS, mesh, strict=True))
    algorithms, keys = run.get("algorithms") or {}, moe_keys(run)
    if keys.get("mesh") is not None:
        keys["mesh"] = {**keys["mesh"], **sizes}
    if "dmoe_mesh" in algorithms:
        algorithms["dmoe_mesh"] = {**algorithms["dmoe_mesh"], **sizes}


def _choose_mesh(work: _Work, keys: MeshConfig | None, config: MoEConfig, mesh: Mesh | None) -> Mesh | None:
    if keys is None:
        if mesh is not None:
            raise ValueError(f"--mesh {mesh}: the run has no mesh; give its MoE keys one, such as mesh: {{expert: 2}}")
        work.notes.append("no mesh in the run: two processes of data parallelism")
        return None
    if mesh is not None:
        if config.num_experts % mesh[2]:
            raise ValueError(
                f"--mesh {','.join(map(str, mesh))}: expert ({mesh[2]}) must divide num_experts ({config.num_experts})"
            )
        chosen = mesh
    else:
        smallest = next(size for size in [*divisors(config.num_experts), 0] if size != 1)
        expert = smallest if keys.expert not in (1, AUTO) or (keys.expert == AUTO and keys.shard != AUTO) else 1
        replicate = 1 if keys.replicate == 1 else 2
        others = expert * replicate
        shard = 1 if keys.shard == 1 or (keys.shard == AUTO and others > 1) else 2
        if replicate > 1 and not can_replicate("cpu"):
            replicate = 1
            work.notes.append("mesh.replicate: this torch has no replicas on a CPU")
        chosen = (replicate, shard, expert)
    written = f"(replicate {keys.replicate}, shard {keys.shard}, expert {keys.expert})"
    work.notes.append(f"mesh {written} -> {chosen} on {math.prod(chosen)} processes")
    return chosen


def _shrink_batches(work: _Work, run: Mapping[str, Any], keys: MeshConfig | None) -> tuple[int, int]:
    """Sequences in a microbatch, and the number of microbatches: above 1 if the run has several."""
    given = run["device_train_microbatch_size"]
    fixed = [size for size in (keys.replicate, keys.shard, keys.expert) if size != AUTO] if keys else []
    several = given == "auto" or run["global_train_batch_size"] > given * math.prod(map(int, fixed))
    microbatch = SEQUENCES if given == "auto" else max(1, min(SEQUENCES, int(given)))
    count = 2 if several else 1
    work.notes.append(
        f"batch of {run['global_train_batch_size']} sequences -> {count} microbatch{'es' if count > 1 else ''} of "
        f"{microbatch} on each process"
    )
    return microbatch, count


def _alone(work: _Work, config: MoEConfig, mesh: Mesh | None, microbatch: int) -> int:
    """Sequences in a microbatch of one process, so that losses and capacity see as many tokens as on the mesh.

    What a rank counts by itself can be compared with microbatches of a rank's size alone.
    """
    ranks = math.prod(mesh) if mesh else 2
    wanted = set() if config.loss == AUTO else {name for name, weight in config.loss.items() if weight}
    chosen_by_rank = config.gate["name"] == "expert_choice"
    by_rank = chosen_by_rank or isinstance(config.capacity, int | float) or bool(wanted & {"importance", "load"})
    seen = {"rank": 1, "group": mesh[2] if mesh else 1}.get(config.balance_over, ranks)
    if by_rank and seen != 1 and not chosen_by_rank:
        what = "capacity counts places" if isinstance(config.capacity, int | float) else "a loss counts tokens"
        if config.balance_over in ("microbatch", "group"):
            moe_keys(work.run)["balance_over"] = "rank"
            work.notes.append(f"balance_over: {config.balance_over} -> rank ({what} on each rank by itself)")
        return microbatch
    return microbatch * (1 if by_rank else seen)


def even_width(width: float) -> int:
    """The nearest multiple of WIDTH_STEP."""
    return max(WIDTH_STEP, round(width / WIDTH_STEP) * WIDTH_STEP)


def shrink_heads(width: int, heads: int, kv_heads: int) -> tuple[int, int, int]:
    """Shrunk width, query heads and key heads, with the same ratio of heads; an already small model is unchanged."""
    ratio = max(1, heads // kv_heads)
    small, small_kv = (4, 4) if ratio == 1 else (ratio, 1) if ratio > 2 else (4, 2)
    return (small * HEAD, small, small_kv) if small * HEAD < width else (width, heads, kv_heads)


def _shrink_mpt(work: _Work, length: int, config: MoEConfig) -> tuple[float, int]:
    """Scale of widths, and the vocabulary."""
    model = work.run["model"]
    attention = model["attn_config"] = dict(model.get("attn_config") or {})
    width, heads, layers = model.get("d_model", 2048), model.get("n_heads", 16), model.get("n_layers", 24)
    kv_heads = {"multiquery_attention": 1, "grouped_query_attention": attention.get("kv_n_heads", heads)}.get(
        attention.get("attn_type", ""), heads
    )
    attention.pop("head_dim", None)
    small, small_heads, small_kv = shrink_heads(width, heads, kv_heads)
    if "kv_n_heads" in attention and small < width:
        attention["kv_n_heads"] = small_kv
    if small < width:  # keeps the ratio of a head's width to D / heads
        head = model.get("head_dim") or width // heads
        small_head = head * HEAD * heads // width
        if model.get("head_dim"):
            model["head_dim"] = small_head
        if attention.get("softmax_scale"):  # one over the root of a head's width
            scale = attention["softmax_scale"] * (head / small_head) ** 0.5
            work.set(attention, "softmax_scale", scale, "narrower heads")
    small_layers = layers if model.get("block_overrides") else shrink_layers(work.run, config, layers)
    vocabulary = min(int(model.get("vocab_size", 50368)), VOCABULARY)
    work.notes.append(
        f"{layers} layers of width {width}, {heads} heads -> {small_layers} of width {small}, {small_heads} heads; "
        f"vocabulary {model.get('vocab_size', 50368)} -> {vocabulary}"
    )
    model.update(d_model=small, n_heads=small_heads, n_layers=small_layers, vocab_size=vocabulary, max_seq_len=length)
    ffn = model.get("ffn_config")
    if isinstance(ffn, dict) and ffn.get("ffn_hidden_size"):
        ffn["ffn_hidden_size"] = even_width(ffn["ffn_hidden_size"] * small / width)
    for where in (model, attention):
        for key in _DROPOUT:
            if where.get(key):
                work.set(where, key, 0.0, "one process draws other numbers than several")
    return small / width, vocabulary


def shrink_layers(run: dict[str, Any], config: MoEConfig, layers: int) -> int:
    """The number of layers that keeps dense layers beside those with experts; a list of layers is made to fit."""
    if isinstance(config.layers, dict):
        return min(layers, max(LAYERS, config.layers["every"]))
    few = min(layers, LAYERS)
    if isinstance(config.layers, tuple):
        kept = sorted(index for index in config.layers if index < few)
        moe_keys(run)["layers"] = kept or [few - 1]
    return few


def _shrink_experts(work: _Work, config: MoEConfig, scale: float, mesh: Mesh | None) -> None:
    keys = moe_keys(work.run)
    widths, shared = keys.get("expert_hidden_size", AUTO), keys.get("shared_expert_hidden_size")
    if isinstance(widths, tuple | list):
        common = math.gcd(*widths)
        unit = max(1, min(common, 64 * common // max(widths)))
        keys["expert_hidden_size"] = [width // common * unit for width in widths]
    elif isinstance(widths, int):
        keys["expert_hidden_size"] = even_width(widths * scale) if scale < 1 else widths
    if shared and scale < 1:
        keys["shared_expert_hidden_size"] = even_width(shared * scale)
    if scale < 1:
        work.notes.append(
            f"{config.num_experts} experts, top {config.top_k}, of width {_short(widths)} -> as many of width "
            f"{_short(keys.get('expert_hidden_size', AUTO))}"
        )
    small = keys.get("expert_hidden_size")
    if mesh and isinstance(small, int) and not can_cut_rows(small, shard=mesh[1], expert=mesh[2]):
        raise ValueError(f"mesh.shard ({mesh[1]}) must divide the shrunk experts' width ({small})")


def _short(widths: Any) -> str:
    return f"{min(widths)} to {max(widths)}" if isinstance(widths, tuple | list) else str(widths)


def _shrink_training(work: _Work) -> None:
    run = work.run
    optimizer = run["optimizer"] = dict(run["optimizer"])
    if "adam" not in str(optimizer.get("name")):
        work.notes.append(f"optimizer: {optimizer.get('name')} -> decoupled_adamw")
        run["optimizer"] = optimizer = {"name": "decoupled_adamw"}
    work.set(optimizer, "lr", LEARNING_RATE, "so that three steps move the weights")
    work.set(optimizer, "eps", EPSILON, "so that rounding does not become a step")
    clipping = section(run, "algorithms").get("gradient_clipping")
    if isinstance(clipping, dict) and clipping.get("clipping_type") in THRESHOLD:
        clipping["clipping_threshold"] = THRESHOLD[clipping["clipping_type"]]
        work.notes.append(f"clipping_threshold: {clipping['clipping_threshold']}, so that gradients are clipped")


def _fit_device(work: _Work, device: str, precision: str) -> None:
    run, model = work.run, work.run["model"]
    # weights drawn from meta are drawn for each shard, so they would depend on the mesh
    work.set(model, "init_device", "cpu", "the same initial weights on every mesh")
    own = str(run.get("precision", "amp_bf16"))
    set_precision(run, precision)
    if own != precision:
        work.notes.append(f"precision: {own} -> {precision}")
    if device == "cuda":
        return
    for where in (model, model.get("attn_config") or {}):
        for key in ("loss_fn", "norm_type"):
            if where.get(key) in _GPU_ONLY:
                work.set(where, key, _GPU_ONLY[where[key]], "on a CPU")
    if model.get("name") == "mpt_causal_lm":
        model.setdefault("loss_fn", "torch_crossentropy")
        model["attn_config"].setdefault("attn_impl", "torch")
