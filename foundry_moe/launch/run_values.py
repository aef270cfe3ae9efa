"""Checks values of a run that LLM Foundry, Composer or torch refuse late, without naming the key, or not at all.

`foundry_keys` checks the keys, and values that depend on no other. Each check yields a sentence for each mistake.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from foundry_moe.config import AUTO, MoEConfig, check_batch_size
from foundry_moe.launch.foundry_keys import MPTS
from foundry_moe.launch.run_files import datasets, loaders, local_json
from foundry_moe.launch.run_times import time_mistakes
from foundry_moe.models.families import names_of
from foundry_moe.optim.values import value_mistakes
from foundry_moe.schema import UserError, caught, fits, one_of, section, with_whole_key

_ANY_NAMES = ("0", "_", "wq", "model.lm_head.bias", "experts.w1_A_EDL")  # patterns that match every name
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer")  # names in config.json of the number of layers


def moe_path(run: Mapping[str, Any]) -> str:
    """Where the experts' keys are."""
    return "algorithms.dmoe" if "dmoe" in section(run, "algorithms") else "model.moe"


def whole_paths(run: Mapping[str, Any], sentences: Iterable[str]) -> list[str]:
    """Sentences about the experts' keys, with whole paths."""
    path = moe_path(run)
    mesh = f"{path}.mesh" if section(run, *path.split(".")).get("mesh") is not None else "algorithms.dmoe_mesh"
    if mesh == "algorithms.dmoe_mesh":  # which has no auto
        sentences = [text.partition(", or mesh=auto")[0] for text in sentences]
    keys = {item.name for item in fields(MoEConfig)}
    found = (re.sub(r"(?<![\w.])mesh(?=\.)", mesh, text.replace("mesh=", f"{path}.mesh=")) for text in sentences)
    return [with_whole_key(path, text, keys) for text in found]


def check_fit(run: Mapping[str, Any], *, used: int, config: MoEConfig | None) -> None:
    """Raises ValueError if the GPUs do not divide the batch, or a mesh has no `fsdp_config` for other modules."""
    batch = run.get("global_train_batch_size")
    if isinstance(batch, int):
        check_batch_size(batch, used)
    placed = config is not None and (config.mesh is not None or "dmoe_mesh" in section(run, "algorithms"))
    if placed and used > 1 and run.get("fsdp_config") is None:
        raise UserError("mesh needs FSDP2, which this run does not use: add `fsdp_config: {}`")


def _lengths(run: Mapping[str, Any], config: MoEConfig | None) -> Iterator[str]:
    longest = section(run, "model").get("max_seq_len", 2048)
    lengths = {f"{where}.max_seq_len": dataset.get("max_seq_len") for where, dataset in datasets(run)}
    lengths = {where: length for where, length in lengths.items() if length not in (None, run["max_seq_len"])}
    for where, length in {"max_seq_len": run["max_seq_len"], **lengths}.items():
        if not _is_least(length, 2):
            yield f"{where} ({length!r}) must be 2 or more: a token is predicted from those before it"
        elif section(run, "model").get("name") in MPTS and fits(longest, int) and length > longest:
            yield f"{where} ({length}) must not be above model.max_seq_len ({longest})"


def _is_least(value: Any, least: int) -> bool:
    return fits(value, float) and value >= least


def _model(run: Mapping[str, Any], config: MoEConfig | None) -> Iterator[str]:
    model = section(run, "model")
    name = model.get("name")
    upcycled = config is not None and config.init == "upcycle"
    if upcycled and name == "hf_causal_lm" and model.get("pretrained", True) is False:
        yield (
            "algorithms.dmoe.init (upcycle): model.pretrained is false, so there are no trained weights to copy; "
            "set model.pretrained: true, or init: random"
        )
    if name in MPTS:
        yield from _mpt(run, model, config)
    if name == "hf_causal_lm" and config is not None:
        yield from _hugging_face(run, model, config)


def _hugging_face(run: Mapping[str, Any], model: Mapping[str, Any], config: MoEConfig) -> Iterator[str]:
    """Keys that do not fit a model on this machine: its layers, FFN, or own experts, which keep their weights."""
    found = local_json(model.get("pretrained_model_name_or_path"), "config.json")
    found |= section(model, "config_overrides")
    yield from _layers(run, config, next((found[key] for key in _LAYERS if fits(found.get(key), int)), None))
    nested = found.get("ffn_config")
    blocks = {**found, **(nested if isinstance(nested, Mapping) else {})}
    theirs = {
        key: next((blocks[name] for name in names_of(key) if fits(blocks.get(name), int)), None)
        for key in ("num_experts", "top_k")
    }
    if (theirs["num_experts"] or 0) < 2:
        if model.get("pretrained", True):
            yield from _upcycled(run, config, found.get("intermediate_size"))
        return
    where = f"the model in {model['pretrained_model_name_or_path']} has MoE blocks"
    for key, value in theirs.items():
        if value not in (None, getattr(config, key)):
            yield f"algorithms.dmoe.{key} ({getattr(config, key)}): {where} with {value}: use {value}"
    if config.init == "upcycle":
        yield f"algorithms.dmoe.init (upcycle): {where}, whose weights are kept: remove init"


def _mpt(run: Mapping[str, Any], model: Mapping[str, Any], config: MoEConfig | None) -> Iterator[str]:
    sizes = {"d_model": 2048, "n_heads": 16, "n_layers": 24}
    sizes |= {key: model[key] for key in sizes if key in model}
    if not all(_is_least(size, 1) for size in sizes.values()):
        return
    attention = section(model, "attn_config")
    yield from _heads(model, attention, sizes["d_model"], sizes["n_heads"])
    if attention.get("qk_ln") and attention.get("qk_gn"):
        yield "model.attn_config: qk_ln and qk_gn are alternatives: delete one"
    sdpa = attention.get("attn_impl", "sdpa" if model["name"] == "dmoe_causal_lm" else "flash") == "sdpa"
    if sdpa and attention.get("attn_logit_softcapping") is not None:
        yield "model.attn_config.attn_logit_softcapping: attn_impl sdpa does not support it: use attn_impl: torch"
    padded = section(run, "train_loader").get("name") == "finetuning"
    if padded and section(run, "tokenizer", "kwargs").get("padding_side") == "left":
        yield "tokenizer.kwargs.padding_side (left): an MPT trains with padding on the right only: use right"
    if config is not None:
        yield from _layers(run, config, sizes["n_layers"])
    width = section(model, "ffn_config").get("ffn_hidden_size") or sizes["d_model"] * model.get("expansion_ratio", 4)
    if not fits(width, float):
        return
    if width % 1:
        yield f"model.expansion_ratio times d_model, or ffn_config.ffn_hidden_size, must be a whole number, not {width}"
    elif config is not None and config.init == "upcycle":
        yield from _upcycled(run, config, int(width))


def _layers(run: Mapping[str, Any], config: MoEConfig, layers: int | None) -> Iterator[str]:
    if layers is None:
        return
    mistakes = caught(config.check_layers_of, layers)
    yield from whole_paths(run, mistakes)
    if not mistakes and not any(config.selects(index) for index in range(layers)):
        yield f"{moe_path(run)}.layers ({config.layers}) selects none of the model's {layers} layers"


def _upcycled(run: Mapping[str, Any], config: MoEConfig, width: Any) -> Iterator[str]:
    """Keys that copies of an FFN of this width do not support; all widths are checked again when weights are copied."""
    if fits(width, int) and config.init in (AUTO, "upcycle"):
        yield from whole_paths(run, caught(config.shards_of, width, "the model's FFN"))


def _heads(model: Mapping[str, Any], attention: Mapping[str, Any], width: int, heads: int) -> Iterator[str]:
    if width % heads:
        yield f"model.n_heads ({heads}) must divide model.d_model ({width})"
        return
    usual, rope = width // heads, attention.get("rope") and attention.get("rope_impl", "dail")
    if rope and usual % 2:
        yield f"model.attn_config.rope needs heads of an even width, not {usual}"
    if rope:
        yield from caught(one_of, "model.attn_config.rope_impl", rope, ("hf", "dail"))
    if model.get("head_dim") not in (None, usual):
        differs = f"model.head_dim ({model['head_dim']}) differs from d_model / n_heads ({usual}), which LLM Foundry's "
        if attention.get("fused_qkv", True):
            yield f"{differs}fused queries, keys and values require: set model.attn_config.fused_qkv: false"
        if rope == "dail":
            yield f"{differs}rope_impl: dail requires: set model.attn_config.rope_impl: hf"
    kv: Any = attention.get("kv_n_heads")
    if attention.get("attn_type") == "grouped_query_attention" and (not _is_least(kv, 1) or heads % kv):
        yield f"model.attn_config.kv_n_heads ({kv}) must be a whole number that divides model.n_heads ({heads})"


def _optimizer(run: Mapping[str, Any], config: MoEConfig | None) -> Iterator[str]:
    optimizer = section(run, "optimizer")
    groups = optimizer.get("param_groups") or ()
    for where, settings in (
        ("optimizer", optimizer),
        *((f"optimizer.param_groups.{index}", group) for index, group in enumerate(groups)),
    ):
        known = settings if optimizer.get("name") == "muon" else {"betas": settings.get("betas")}
        yield from value_mistakes(known, where)
    given = optimizer.get("disable_grad") or []
    frozen = [given] if isinstance(given, str) else list(given)
    for pattern in [*frozen, *(group["param_str_match"] for group in groups)]:
        try:
            everything = all(re.search(pattern, name) for name in _ANY_NAMES)
        except (re.error, TypeError) as error:
            yield f"optimizer: {pattern!r} is not a regular expression of names of parameters: {error}"
            continue
        if everything and pattern in frozen:
            yield f"optimizer.disable_grad ({pattern}) matches every parameter: nothing would be trained"


def _unsupported(run: Mapping[str, Any], config: MoEConfig | None) -> Iterator[str]:
    """Parts of Composer and LLM Foundry that fail with an error of their own, or in their first step."""
    if config is not None and run.get("precision") == "amp_fp8":
        yield "precision (amp_fp8): dMoE layers compute in bf16, fp16 or fp32; use amp_bf16"
    seed: Any = run.get("seed")
    if fits(seed, int) and not 0 <= seed < 2**32:
        yield f"seed ({seed}) must be 0 to {2**32 - 1}, as numpy's must"
    level = run.get("python_log_level")
    if isinstance(level, str) and not isinstance(logging.getLevelName(level.upper()), int):
        yield f"python_log_level ({level}) must be DEBUG, INFO, WARNING, ERROR or CRITICAL"
    callbacks, optimizer = section(run, "callbacks"), section(run, "optimizer").get("name")
    if "mono_checkpoint_saver" in callbacks and run.get("fsdp_config") is not None:
        yield "callbacks.mono_checkpoint_saver does not support FSDP2: use callbacks.elastic_checkpoint"
    if "loss_perp_v_len" in callbacks and "mlflow" not in section(run, "loggers"):
        yield "callbacks.loss_perp_v_len logs to MLflow only: add loggers.mlflow, or delete the callback"
    if "gated_linear_units" in section(run, "algorithms"):
        yield (
            "algorithms.gated_linear_units replaces the FFN of BERT models only: delete it; model.ffn_config.ffn_type: "
            "mptglu, and activation: swiglu of experts, are gated"
        )
    if optimizer in ("adalr_lion", "clip_lion"):
        yield (
            f"optimizer.name ({optimizer}) keeps records of outliers that FSDP2 and checkpoints do not support: use "
            "decoupled_lionw"
        )


def _callbacks(run: Mapping[str, Any], config: MoEConfig | None) -> Iterator[str]:
    loads = section(run, "callbacks", "expert_load")
    yield from load_file_mistakes(loads.get("file"), loads.get("html"))


def load_file_mistakes(file: str | None, html: str | None) -> Iterator[str]:
    """A sentence for each fault in the files of `expert_load`."""
    if html and not file:
        yield f"callbacks.expert_load.html ({html}) is a page of `file`: give file too"
    elif html and html == file:
        yield f"callbacks.expert_load.html ({html}) would replace `file`: give it another name"
    if "://" in str(file):
        yield f"callbacks.expert_load.file ({file}) must be a local path: lines are appended to it"


def _loaders(run: Mapping[str, Any], config: MoEConfig | None) -> Iterator[str]:
    labels = [loader.get("label") for where, loader in loaders(run) if where.startswith("eval_loader.")]
    if None in labels:
        yield f"eval_loader.{labels.index(None)}.label is missing: it names the losses of a loader of a list"
    if run.get("eval_subset_num_batches") == 0:
        yield "eval_subset_num_batches (0) evaluates nothing: use -1 for all batches, or eval_interval: 0"
    for label in sorted({str(label) for label in labels if label is not None and labels.count(label) > 1}):
        yield f"eval_loader: {labels.count(label)} have the label {label}, which names their losses: give each its own"
    for where, loader in loaders(run):
        if loader.get("num_workers") != 0:
            continue
        for key, usual, valid in (("prefetch_factor", 2, "null"), ("persistent_workers", True, "false")):
            value = loader.get(key, usual)
            if value and loader.get("name") in ("text", "finetuning"):
                yield f"{where}.{key} ({value}) needs worker processes: with num_workers: 0 write {key}: {valid}"


# mistakes in values that depend on others: each gets the run and its experts, if it has any
VALUE_CHECKS = (_lengths, time_mistakes, _model, _optimizer, _callbacks, _loaders, _unsupported)
