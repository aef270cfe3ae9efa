"""An MPT with dMoE layers as Mixtral, OLMoE or Qwen3-MoE, which have its attention, rope and norms under other names.

Which of them follows from how queries and keys are normalised: not at all (Mixtral), over all heads together
(`qk_ln`, OLMoE), or over each head (`qk_gn`, Qwen3-MoE). All other settings must be the same in all three. MPT's code
is LLM Foundry's `models/mpt` and `models/layers`; the families' is transformers' `models/{mixtral,olmoe,qwen3_moe}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from foundry_moe.models.blocks import Blocks, WeightPart, gate_keys, whole
from foundry_moe.models.families import FAMILIES, Family
from foundry_moe.schema import UserError, yaml_value

_RMS_NORMS = ("rmsnorm", "low_precision_rmsnorm", "triton_rmsnorm")
_OLMOE_EPS = 1e-5
# the value that a key must have, and has where it is missing; `norm_type` may be any of `_RMS_NORMS`
_WANTED: Mapping[str, Any] = {
    "attn_config.rope": True,
    "attn_config.alibi": False,
    "attn_config.rope_hf_config.type": "no_scaling",
    "attn_config.rope_dail_config.type": "original",
    "attn_config.clip_qkv": None,
    "attn_config.sliding_window_size": -1,
    "attn_config.attn_logit_softcapping": None,
    "attn_config.attn_temperature_tuning.attn_scale": 0.0,
    "attn_config.kv_dim": None,
    "attn_config.reuse_kv_layer_idx": None,
    "attn_config.reuse_kv_x_layer_idx": None,
    "no_bias": True,
    "attention_bias": False,
    "norm_type": "rmsnorm",
    "logit_scale": None,
    "final_logit_softcapping": None,
    "block_overrides": None,
    "fuse_norm_attn_norm": False,
}
_UNREAD = {"rope_hf_config": "hf", "rope_dail_config": "dail"}  # parts that only one `rope_impl` reads
_BLOCK = re.compile(r"transformer\.blocks\.(\d+)\.(.+)")
_OUTSIDE = {
    "transformer.wte.weight": "model.embed_tokens.weight",
    "transformer.norm_f.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_INSIDE = {
    "norm_1.weight": "input_layernorm.weight",
    "norm_2.weight": "post_attention_layernorm.weight",
    "attn.Wq.weight": "self_attn.q_proj.weight",
    "attn.Wk.weight": "self_attn.k_proj.weight",
    "attn.Wv.weight": "self_attn.v_proj.weight",
    "attn.q_ln.weight": "self_attn.q_norm.weight",
    "attn.k_ln.weight": "self_attn.k_norm.weight",
    "attn.out_proj.weight": "self_attn.o_proj.weight",
    "ffn.gate_proj.weight": "mlp.gate_proj.weight",
    "ffn.up_proj.weight": "mlp.up_proj.weight",
    "ffn.down_proj.weight": "mlp.down_proj.weight",
}


def config_of_mpt(config: Mapping[str, Any], blocks: Blocks) -> tuple[Family, dict[str, Any]]:
    """The family that computes what this MPT does, and the keys of its configuration."""
    attention = config["attn_config"]
    family = FAMILIES["qwen3_moe" if attention.get("qk_gn") else "olmoe" if attention.get("qk_ln") else "mixtral"]
    for key, value, valid in _differences(config, family, normalize=gate_keys(blocks)["normalize"]):
        raise UserError(
            f"{key} ({yaml_value(value)}): the model would be exported as {family.name}, which does not support this; "
            f"use {valid}"
        )
    keys = {
        "vocab_size": config["vocab_size"],
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": _kv_heads(config),
        "head_dim": _head_width(config),
        "max_position_embeddings": config["max_seq_len"],
        "rms_norm_eps": config["norm_eps"],
        "rope_theta": float(attention["rope_theta"]),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", True)),
        "attention_dropout": float(attention.get("attn_pdrop") or 0.0),
        **{name: config.get(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
        **family.write(blocks),
    }
    if len(blocks.layers) < blocks.num_layers:
        keys["intermediate_size"] = _dense_width(config, keys["hidden_act"])
    return family, keys


def rename_mpt(config: Mapping[str, Any]) -> Callable[[str, tuple[int, ...]], list[WeightPart]]:
    """From a tensor of MPT outside its MoE layers to the family's; `Wqkv` is three of these."""
    head = _head_width(config)
    queries, keys = config["n_heads"] * head, _kv_heads(config) * head

    def rename(name: str, shape: tuple[int, ...]) -> list[WeightPart]:
        if name in _OUTSIDE:
            return [whole(name, _OUTSIDE[name], *shape)]
        match = _BLOCK.fullmatch(name)
        if match is not None and match[2] in _INSIDE:
            return [whole(name, f"model.layers.{match[1]}.{_INSIDE[match[2]]}", *shape)]
        if match is not None and match[2] == "attn.Wqkv.weight":
            ends = (0, queries, queries + keys, queries + 2 * keys)
            prefix = f"model.layers.{match[1]}.self_attn"
            return [
                replace(whole(name, f"{prefix}.{kind}_proj.weight", stop - start, *shape[1:]), first_row=start)
                for kind, (start, stop) in zip("qkv", pairwise(ends), strict=True)
            ]
        raise UserError(f"{name} has no counterpart in a Hugging Face MoE family")

    return rename


def _differences(config: Mapping[str, Any], family: Family, *, normalize: bool) -> Iterator[tuple[str, Any, str]]:
    """Keys with values that the family does not have, their values, and what to use.

    Of OLMoE, also what transformers and vLLM (`vllm/model_executor/models/olmoe.py`) assume and do not read.
    """
    attention = config["attn_config"]
    for key, valid in _WANTED.items():
        part = [*key.split("."), ""][1]
        if part in _UNREAD and attention.get("rope_impl") != _UNREAD[part]:
            continue
        value = _value(config, key, valid)
        if value != valid and not (key == "norm_type" and value in _RMS_NORMS):
            yield f"model.{key}", value, yaml_value(valid)
    # families scale scores by the head's width and rotate all of it; MPT uses d_model / n_heads for both
    head, usual, scale = _head_width(config), config["d_model"] // config["n_heads"], attention.get("softmax_scale")
    if not math.isclose(usual**-0.5 if scale is None else scale, head**-0.5, rel_tol=1e-6):
        valid = "null" if head == usual else f"{head**-0.5}, one over the root of model.head_dim ({head})"
        yield "model.attn_config.softmax_scale", scale, valid
    if head != usual and attention.get("rope_impl") != "hf":
        yield "model.attn_config.rope_impl", attention.get("rope_impl"), f"hf, which rotates all of a head ({head})"
    if family.model_type == "mixtral":
        if not normalize:
            yield "gate.normalize", False, "true, or model.attn_config.qk_ln: true (OLMoE) or qk_gn: true (Qwen3-MoE)"
        return
    # of queries and keys, which MPT does not read from model.norm_type and model.norm_eps
    kind, epsilon = attention.get("norm_type", "low_precision_layernorm"), attention.get("norm_eps", 1e-5)
    if kind not in _RMS_NORMS:
        yield "model.attn_config.norm_type", kind, "low_precision_rmsnorm for queries and keys"
    if epsilon != config["norm_eps"]:
        yield "model.attn_config.norm_eps", epsilon, f"that of model.norm_eps ({config['norm_eps']})"
    if family.model_type == "olmoe":
        if head != usual:
            yield "model.head_dim", head, f"d_model / n_heads ({usual}), or qk_gn in place of qk_ln (Qwen3-MoE)"
        if config["norm_eps"] != _OLMOE_EPS:
            yield "model.norm_eps", config["norm_eps"], f"{_OLMOE_EPS}, or qk_gn in place of qk_ln (Qwen3-MoE)"
        if normalize:
            yield "gate.normalize", True, "false, or qk_gn in place of qk_ln (Qwen3-MoE), or neither (Mixtral)"


def _head_width(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["d_model"] // config["n_heads"])


def _kv_heads(config: Mapping[str, Any]) -> int:
    attention = config["attn_config"]
    kind = attention.get("attn_type", "multihead_attention")
    if kind == "grouped_query_attention":
        return int(attention["kv_n_heads"])
    if kind in ("multihead_attention", "multiquery_attention"):
        return int(config["n_heads"]) if kind == "multihead_attention" else 1
    raise UserError(f"model.attn_config.attn_type ({kind}) cannot be exported; use grouped_query_attention")


def _dense_width(config: Mapping[str, Any], hidden_act: str) -> int:
    """Width of the layers that stay dense, which are GLUs with the experts' activation in every family."""
    ffn = config["ffn_config"]
    act = (ffn.get("ffn_act_fn") or {"name": "gelu"}).get("name")
    if ffn.get("ffn_type") != "mptglu" or act != hidden_act:
        raise UserError(
            f"model.ffn_config (ffn_type {ffn.get('ffn_type')}, ffn_act_fn {act}): in every family dense layers "
            f"are GLUs with the experts' activation; use ffn_type: mptglu, ffn_act_fn: {{name: {hidden_act}}}"
        )
    return int(ffn.get("ffn_hidden_size") or config["d_model"] * config["expansion_ratio"])


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    inner: Any = config
    for part in key.split("."):
        if not isinstance(inner, Mapping) or part not in inner:
            return default
        inner = inner[part]
    return inner
