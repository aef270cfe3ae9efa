"""Checks the configuration of a model from an untrusted checkpoint or folder, before the model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foundry_moe.checkpoint.strict import shown
from foundry_moe.config import MOST_EXPERTS

MOST_LAYERS = 10_000
MOST_SIZE = 2**24  # of a width, a vocabulary or a sequence
MOST_NUMBER = 1e15  # of any number in a configuration
WIDTH, HEADS, LAYERS = (
    ("d_model", "hidden_size"),
    ("n_heads", "num_attention_heads"),
    ("n_layers", "num_hidden_layers"),
)
_SIZES = (
    *(*WIDTH, *HEADS, *LAYERS, "vocab_size", "max_seq_len", "max_position_embeddings", "num_key_value_heads"),
    *("kv_n_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "n_group", "topk_group"),
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_top_k")
_MAY_LACK = ("num_key_value_heads", *_SIZES[_SIZES.index("kv_n_heads") :])
_POSITIVE = ("norm_eps", "rms_norm_eps", "rope_theta")
_CHANCES = ("attn_pdrop", "resid_pdrop", "emb_pdrop", "attention_dropout", "hidden_dropout")
_PARTS = ("attn_config", "ffn_config", "init_config", "rope_scaling", "rope_hf_config", "rope_dail_config")


def first_of(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def check_configuration(config: Mapping[str, Any], where: str) -> None:
    """Checks the types of a configuration's parts and the limits of its numbers.

    Raises:
        ValueError: an invalid value; names its key.
    """
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"{where}.model_type ({shown(config.get('model_type'))}) must be a text")
    todo: list[tuple[str, Any]] = [(where, config)]
    while todo:
        name, value = todo.pop()
        key = name.rpartition(".")[2]
        if key in _PARTS and not (value is None or isinstance(value, Mapping)):
            raise ValueError(f"{name} ({shown(value)}) must be a mapping")
        if key in _POSITIVE and not (type(value) in (int, float) and value > 0):
            raise ValueError(f"{name} ({shown(value)}) must be a number above 0")
        if key in _CHANCES and not (value is None or (type(value) in (int, float) and 0 <= value <= 1)):
            raise ValueError(f"{name} ({shown(value)}) must be a number from 0 to 1")
        if (
            key in _SIZES
            and not (value is None and key in _MAY_LACK)
            and not (type(value) is int and 1 <= value <= MOST_SIZE)
        ):
            raise ValueError(f"{name} ({shown(value)}) must be a whole number from 1 to {MOST_SIZE}")
        if isinstance(value, int | float) and not abs(value) <= MOST_NUMBER:
            raise ValueError(f"{name} ({shown(value)}) must be a number of at most {MOST_NUMBER}")
        if isinstance(value, Mapping):
            todo.extend((f"{name}.{shown(inner)[1:-1]}", item) for inner, item in value.items())
    heads, width, groups = (first_of(config, keys) for keys in (HEADS, WIDTH, ("num_key_value_heads",)))
    if heads is not None and width is not None and heads > width:
        raise ValueError(f"{where}: {heads} heads of a model of width {width}")
    if groups is not None and heads is not None and heads % groups:
        raise ValueError(f"{where}.num_key_value_heads ({groups}) must divide the {heads} heads")
    layers = first_of(config, LAYERS)
    if layers is not None and layers > MOST_LAYERS:
        raise ValueError(f"{where}: {layers} layers are more than {MOST_LAYERS}")
    parts = (config, config.get("ffn_config") or {})
    for count in (part[key] for part in parts for key in EXPERTS if part.get(key) is not None):
        if not (type(count) is int and 1 <= count <= MOST_EXPERTS):
            raise ValueError(f"{where}: {shown(count)} experts: there must be 1 to {MOST_EXPERTS}")
    experts = next((part[key] for part in parts for key in EXPERTS if part.get(key) is not None), MOST_EXPERTS)
    for count in (part[key] for part in parts for key in TOP_K if part.get(key) is not None):
        if not (type(count) is int and 1 <= count <= experts):
            raise ValueError(f"{where}: {shown(count)} experts for a token: there must be 1 to {experts}")
