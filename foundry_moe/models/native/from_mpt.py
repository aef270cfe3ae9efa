"""An MPT with dMoE layers as Mixtral, OLMoE or Qwen3-MoE, which have its attention, rope and norms under other names.

Which of them follows from how queries and keys are normalised: not at all (Mixtral), over all heads together
(`qk_ln`, OLMoE), or over each head (`qk_gn`, Qwen3-MoE). All other settings must be the same in all three. MPT's code
is LLM Foundry's `models/mpt` and `models/layers`; the families' is transformers' `models/{mixtral,olmoe,qwen3_moe}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from foundry_moe.models.blocks import Blocks, WeightPart, gate_keys, whole
from foundry_moe.models.families import FAMILIES, Family
from foundry_moe.schema import yaml_value

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
    """The family that computes what this MPT does, and the keys of its configuration.

    Raises:
        ValueError: there is none; names the key that prevents it and a valid value.
    """
    attention = config["attn_config"]
    for key, valid in _WANTED.items():
        part = [*key.split("."), ""][1]
        if part in _UNREAD and attention.get("rope_impl") != _UNREAD[part]:
            continue
        value = _value(config, key, valid)
        if value != valid and not (key == "norm_type" and value in _RMS_NORMS):
            raise ValueError(
                f"model.{key} ({yaml_value(value)}): no Hugging Face MoE family computes this; "
                f"{_hint(config, key, valid)}"
            )
    _check_heads(config)
    family = FAMILIES[_family_type(attention, blocks)]
    if family.model_type != "mixtral":
        _check_query_key_norms(config)
    if family.model_type == "olmoe":
        _check_olmoe(config, blocks)
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
        raise ValueError(f"{name} has no counterpart in a Hugging Face MoE family")

    return rename


def _family_type(attention: Mapping[str, Any], blocks: Blocks) -> str:
    if attention.get("qk_gn"):
        return "qwen3_moe"
    if attention.get("qk_ln"):
        return "olmoe"
    if not gate_keys(blocks)["normalize"]:
        raise ValueError(
            "gate.normalize (false): of the Hugging Face MoE families only those that normalise queries and keys take "
            "weights as they are; use model.attn_config.qk_ln: true (OLMoE), qk_gn: true (Qwen3-MoE), or "
            "gate.normalize: true (Mixtral)"
        )
    return "mixtral"


def _head_width(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["d_model"] // config["n_heads"])


def _check_heads(config: Mapping[str, Any]) -> None:
    """Families scale scores by the head's width and rotate all of it; MPT uses d_model / n_heads for both."""
    attention, head, usual = config["attn_config"], _head_width(config), config["d_model"] // config["n_heads"]
    scale = attention.get("softmax_scale")
    if not math.isclose(usual**-0.5 if scale is None else scale, head**-0.5, rel_tol=1e-6):
        valid = "null" if head == usual else f"{head**-0.5}, one over the root of model.head_dim ({head})"
        raise ValueError(
            f"model.attn_config.softmax_scale ({yaml_value(scale)}): no Hugging Face MoE family computes this; "
            f"use {valid}"
        )
    if head != usual and attention.get("rope_impl") != "hf":
        raise ValueError(
            f"model.attn_config.rope_impl ({attention.get('rope_impl')}) turns {usual} of a head's {head} elements "
            "(model.head_dim), which no Hugging Face MoE family does; use hf"
        )


def _check_query_key_norms(config: Mapping[str, Any]) -> None:
    """MPT reads `norm_type` and `norm_eps` of these norms from `attn_config`, not from the model."""
    attention = config["attn_config"]
    kind, epsilon = attention.get("norm_type", "low_precision_layernorm"), attention.get("norm_eps", 1e-5)
    if kind not in _RMS_NORMS:
        raise ValueError(
            f"model.attn_config.norm_type ({kind}), of queries and keys: no Hugging Face MoE family computes this; "
            "use low_precision_rmsnorm"
        )
    if epsilon != config["norm_eps"]:
        raise ValueError(
            f"model.attn_config.norm_eps ({epsilon}), of queries and keys, must be model.norm_eps "
            f"({config['norm_eps']}) in every Hugging Face MoE family; use {config['norm_eps']}"
        )


def _check_olmoe(config: Mapping[str, Any], blocks: Blocks) -> None:
    """Checks what transformers and vLLM (`vllm/model_executor/models/olmoe.py`) assume and do not read."""
    usual = config["d_model"] // config["n_heads"]
    if _head_width(config) != usual:
        raise ValueError(
            f"model.head_dim ({config['head_dim']}): with model.attn_config.qk_ln the model is exported as OLMoE, "
            f"whose heads are d_model / n_heads ({usual}) wide; use {usual}, or qk_gn for qk_ln (Qwen3-MoE)"
        )
    if config["norm_eps"] != _OLMOE_EPS:
        raise ValueError(
            f"model.norm_eps ({config['norm_eps']}): with attn_config.qk_ln the model is exported as OLMoE, for which "
            f"servers take {_OLMOE_EPS}; use {_OLMOE_EPS}, or qk_gn in place of qk_ln (Qwen3-MoE)"
        )
    if gate_keys(blocks)["normalize"]:
        raise ValueError(
            "gate.normalize (true): with model.attn_config.qk_ln the model is exported as OLMoE, for which servers "
            "take weights as they are; use false, or qk_gn in place of qk_ln (Qwen3-MoE), or neither (Mixtral)"
        )


def _kv_heads(config: Mapping[str, Any]) -> int:
    attention = config["attn_config"]
    kind = attention.get("attn_type", "multihead_attention")
    if kind == "grouped_query_attention":
        return int(attention["kv_n_heads"])
    if kind in ("multihead_attention", "multiquery_attention"):
        return int(config["n_heads"]) if kind == "multihead_attention" else 1
    raise ValueError(f"model.attn_config.attn_type ({kind}) cannot be exported; use grouped_query_attention")


def _dense_width(config: Mapping[str, Any], hidden_act: str) -> int:
    """Width of the layers that stay dense, which are GLUs with the experts' activation in every family."""
    ffn = config["ffn_config"]
    act = (ffn.get("ffn_act_fn") or {"name": "gelu"}).get("name")
    if ffn.get("ffn_type") != "mptglu" or act != hidden_act:
        raise ValueError(
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


def _hint(config: Mapping[str, Any], key: str, valid: Any) -> str:
    if key == "attn_config.rope":
        what = "alibi" if _value(config, "attn_config.alibi", False) else "learned positions"
        return f"{what} have no counterpart; use attn_config: {{rope: true, rope_impl: hf}}"
    return f"use {yaml_value(valid)}"
