"""Checks values of a run that LLM Foundry, Composer or torch refuse late, in words that do not name the key, or never.

Keys are `foundry_keys`' matter, and are known to be right here. Must not know experts beyond their number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from foundry_moe.checkpoint.settings import GUARDED_TWICE
from foundry_moe.config import MoEConfig, check_batch_size
from foundry_moe.launch.foundry_keys import MPTS, known_names, table
from foundry_moe.schema import one_of, section

_TIME = re.compile(r"\s*[0-9][0-9_]*(\.[0-9]+)?(e[+-]?[0-9]+)?\s*(ep|ba|sp|tok|dur|iter|sec)\s*")
_CLOCK = re.compile(r"(\s*[0-9]+(\.[0-9]+)?\s*(h|hr|hour|hours|m|min|minute|minutes|s|second|seconds)\s*)+")
# part of the model's keys, key, and the registry that its value is looked up in
_MPT_NAMES = (
    ("attn_config", "attn_type", "attention_classes"),
    ("attn_config", "attn_impl", "attention_implementations"),
    ("", "norm_type", "norms"),
    ("ffn_config", "ffn_type", "ffns"),
    ("init_config", "name", "param_init_fns"),
)
_DEVICES = ("cpu", "meta", "mixed")
_CLIPPING = ("norm", "value", "adaptive")
_LOSSES = ("torch_crossentropy", "fused_crossentropy")


def check_values(run: Mapping[str, Any], config: MoEConfig | None) -> None:
    """Checks numbers, times and names of a run.

    Args:
        config: the run's experts, if it has any.

    Raises:
        ValueError: names the key, the value and what would be valid.
    """
    _check_batches(run)
    _check_precision(run, config)
    _check_times(run)
    _check_model(run, config)
    _check_optimizer(run)
    clipping = section(run, "algorithms", "gradient_clipping")
    if clipping:
        one_of("algorithms.gradient_clipping.clipping_type", clipping.get("clipping_type"), _CLIPPING)
        _above("algorithms.gradient_clipping.clipping_threshold", clipping.get("clipping_threshold"), 0)
    _check_guard(section(run, "callbacks"))
    for loader in ("train_loader", "eval_loader"):
        if isinstance(run.get(loader), Mapping):
            _check_loader(loader, section(run, loader), run)


def check_fit(run: Mapping[str, Any], *, used: int, config: MoEConfig | None) -> None:
    """Checks a run against the number of GPUs that train.

    Raises:
        ValueError: the batch cannot be divided, or a mesh has no FSDP2 to place the rest of the model.
    """
    batch = run.get("global_train_batch_size")
    if isinstance(batch, int):
        check_batch_size(batch, used)
    placed = config is not None and (config.mesh is not None or "dmoe_mesh" in section(run, "algorithms"))
    if placed and used > 1 and run.get("fsdp_config") is None:
        raise ValueError("mesh is for FSDP2, which this run does not ask for: add `fsdp_config: {}` to it")


def _check_batches(run: Mapping[str, Any]) -> None:
    _at_least("global_train_batch_size", run["global_train_batch_size"], 1)
    micro = run["device_train_microbatch_size"]
    if micro != "auto":
        _above("device_train_microbatch_size", micro, 0, " or auto")
    if "device_eval_batch_size" in run:
        _above("device_eval_batch_size", run["device_eval_batch_size"], 0)
    _at_least("max_seq_len", run["max_seq_len"], 2, ": a token is predicted from those before it")
    _at_least("seed", run.get("seed", 0), 0)


def _check_precision(run: Mapping[str, Any], config: MoEConfig | None) -> None:
    precision = run.get("precision", "amp_bf16")
    one_of("precision", precision, table()["precision"])
    if config is not None and "fp8" in precision:
        raise ValueError(f"precision ({precision}): dMoE layers compute in bf16, fp16 or fp32; use amp_bf16")


def _check_times(run: Mapping[str, Any]) -> None:
    for key in ("max_duration", "eval_interval", "save_interval"):
        if key in run:
            _time(key, run[key], above_0=key == "max_duration")
    for section_name, keys in (("scheduler", ("t_warmup", "t_max")),):
        for key in keys:
            if section(run, section_name).get(key) is not None:
                _time(f"{section_name}.{key}", section(run, section_name)[key])
    for name, settings in section(run, "callbacks").items():
        interval = settings.get("interval") if isinstance(settings, Mapping) else None
        if interval is not None and name in ("expert_load", "run_report"):
            _time(f"callbacks.{name}.interval", interval, above_0=True)


def _time(where: str, value: Any, *, above_0: bool = False) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if isinstance(value, str):
        good = bool(_TIME.fullmatch(value) or (_CLOCK.fullmatch(value) and where == "max_duration"))
    if not good:
        raise ValueError(f"{where} ({value!r}) must be a time such as 100ba, 1ep, 5000sp, 10000tok or 0.1dur")
    if above_0 and not re.search(r"[1-9]", str(value)):
        raise ValueError(f"{where} ({value!r}) must be above 0")


def _check_model(run: Mapping[str, Any], config: MoEConfig | None) -> None:
    model = section(run, "model")
    name = model.get("name")
    if "init_device" in model:
        one_of("model.init_device", model["init_device"], _DEVICES)
    upcycled = config is not None and config.init == "upcycle"
    if upcycled and name == "hf_causal_lm" and model.get("pretrained", True) is False:
        raise ValueError(
            "algorithms.dmoe.init (upcycle): model.pretrained is false, so there are no trained weights to copy; "
            "set model.pretrained: true, or init: random"
        )
    if name in MPTS:
        _check_mpt(run, model, config)


def _check_mpt(run: Mapping[str, Any], model: Mapping[str, Any], config: MoEConfig | None) -> None:
    for key in ("d_model", "n_heads", "n_layers", "vocab_size", "max_seq_len"):
        if key in model:
            _at_least(f"model.{key}", model[key], 1)
    width, heads, layers = (
        model.get(key, usual) for key, usual in (("d_model", 2048), ("n_heads", 16), ("n_layers", 24))
    )
    if width % heads:
        raise ValueError(f"model.n_heads ({heads}) must divide model.d_model ({width})")
    if "expansion_ratio" in model:
        _above("model.expansion_ratio", model["expansion_ratio"], 0)
    longest = model.get("max_seq_len", 2048)
    if run["max_seq_len"] > longest:
        raise ValueError(f"max_seq_len ({run['max_seq_len']}) must not be above model.max_seq_len ({longest})")
    attention = section(model, "attn_config")
    if not run.get("code_paths"):  # which may register other names
        for part, key, registry in _MPT_NAMES:
            value = (section(model, part) if part else model).get(key)
            if value is not None:
                one_of(f"model.{f'{part}.' if part else ''}{key}", value, known_names(registry))
    if attention.get("rope"):
        one_of("model.attn_config.rope_impl", attention.get("rope_impl", "dail"), ("hf", "dail"))
        if (width // heads) % 2:
            raise ValueError(f"model.attn_config.rope needs heads of an even width, not {width // heads}")
    if model.get("head_dim") not in (None, width // heads):
        _check_head_width(model["head_dim"], width // heads, attention)
    kv = attention.get("kv_n_heads")
    if attention.get("attn_type") == "grouped_query_attention":
        _at_least("model.attn_config.kv_n_heads", kv, 1)
        if heads % kv:
            raise ValueError(f"model.attn_config.kv_n_heads ({kv}) must divide model.n_heads ({heads})")
    for where, key in ((model, "resid_pdrop"), (model, "emb_pdrop"), (attention, "attn_pdrop")):
        value = where.get(key, 0)
        if not _is_number(value) or not 0 <= value <= 1:
            raise ValueError(f"model.{key} ({value!r}) must be a probability, from 0 to 1")
    if isinstance(model.get("loss_fn"), str):
        one_of("model.loss_fn", model["loss_fn"], _LOSSES)
    if config is not None:
        _check_selection(config, layers)


def _check_head_width(head: Any, usual: int, attention: Mapping[str, Any]) -> None:
    """Heads of another width than d_model / n_heads, which not all of LLM Foundry's attention knows."""
    _at_least("model.head_dim", head, 1)
    told = f"model.head_dim ({head}) is not d_model / n_heads ({usual}), the only width that LLM Foundry "
    if attention.get("fused_qkv", True):
        raise ValueError(f"{told}splits fused queries, keys and values by: set model.attn_config.fused_qkv: false")
    if attention.get("rope") and attention.get("rope_impl", "dail") == "dail":
        raise ValueError(f"{told}rotates with rope_impl: dail: set model.attn_config.rope_impl: hf")


def _check_selection(config: MoEConfig, layers: int) -> None:
    if isinstance(config.layers, tuple) and max(config.layers) >= layers:
        raise ValueError(f"layers ({list(config.layers)}): the model has {layers}, so use 0 to {layers - 1}")
    if not any(config.selects(index) for index in range(layers)):
        raise ValueError(f"layers ({config.layers}) selects none of the model's {layers} layers")


def _check_optimizer(run: Mapping[str, Any]) -> None:
    optimizer = section(run, "optimizer")
    for where, settings in (
        ("optimizer", optimizer),
        *((f"optimizer.param_groups.{i}", group) for i, group in enumerate(optimizer.get("param_groups") or ())),
    ):
        for key in ("lr", "weight_decay", "eps"):
            if settings.get(key) is not None:
                _at_least(f"{where}.{key}", settings[key], 0)
        betas = settings.get("betas")
        if betas is not None and not (len(betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in betas)):
            raise ValueError(f"{where}.betas ({betas!r}) must be two numbers from 0 to below 1, such as [0.9, 0.95]")
    patterns = optimizer.get("disable_grad") or []
    groups = [group["param_str_match"] for group in optimizer.get("param_groups") or ()]
    for pattern in [*([patterns] if isinstance(patterns, str) else patterns), *groups]:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"optimizer: {pattern!r} is no regular expression of names of parameters: {error}"
            ) from None


def _check_guard(callbacks: Mapping[str, Any]) -> None:
    if "nonfinite_guard" not in callbacks:
        return
    if "elastic_checkpoint" in callbacks:
        raise ValueError(GUARDED_TWICE)
    most = section(callbacks, "nonfinite_guard").get("max_nonfinite", 1)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"callbacks.nonfinite_guard.max_nonfinite ({most!r}) must be a whole number from 1")


def _check_loader(where: str, loader: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    workers = loader.get("num_workers")
    if workers is not None:
        _at_least(f"{where}.num_workers", workers, 0)
        for key, usual in (("prefetch_factor", 2), ("persistent_workers", True)):
            value = loader.get(key, usual)
            if workers == 0 and value and loader.get("name") in ("text", "finetuning"):
                valid = "null" if key == "prefetch_factor" else "false"
                raise ValueError(
                    f"{where}.{key} ({value}) needs worker processes: with num_workers: 0 write {key}: {valid}"
                )
    length = section(loader, "dataset").get("max_seq_len")
    if length is not None:
        _at_least(f"{where}.dataset.max_seq_len", length, 2)
        longest = section(run, "model").get("max_seq_len", 2048)
        if section(run, "model").get("name") in MPTS and length > longest:
            raise ValueError(f"{where}.dataset.max_seq_len ({length}) must not be above model.max_seq_len ({longest})")


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) != float("inf")
    )


def _at_least(where: str, value: Any, least: int, why: str = "") -> None:
    if not _is_number(value) or value < least:
        raise ValueError(f"{where} ({value!r}) must be {least} or more{why}")


def _above(where: str, value: Any, limit: int, more: str = "") -> None:
    if not _is_number(value) or value <= limit:
        raise ValueError(f"{where} ({value!r}) must be a number above {limit}{more}")
