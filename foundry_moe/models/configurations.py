"""Checks the configuration of a model from an untrusted checkpoint or folder, before the model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foundry_moe.checkpoint.strict import shown
from foundry_moe.config import MOST_EXPERTS
from foundry_moe.models.families import names_of
from foundry_moe.schema import UserError

MOST_LAYERS = 10_000
MOST_SIZE = 2**24  # of a width, a vocabulary or a sequence
MOST_NUMBER = 1e15  # of any number in a configuration
WIDTH, HEADS, LAYERS = (
    ("d_model", "hidden_size"),
    ("n_heads", "num_attention_heads"),
    ("n_layers", "num_hidden_layers"),
)
_EXPERTS = (*names_of("num_experts"), *names_of("top_k"))
_POSITIVE = ("norm_eps", "rms_norm_eps", "rope_theta")
_SIZES = (*WIDTH, *HEADS, "vocab_size", "max_seq_len", "max_position_embeddings")
_OPTIONAL_SIZES = (
    *("num_key_value_heads", "kv_n_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "n_group", "topk_group"),
)
_CHANCES = ("attn_pdrop", "resid_pdrop", "emb_pdrop", "attention_dropout", "hidden_dropout")
# key -> types, smallest and largest value
_LIMITS: dict[str, tuple[tuple[type, ...], float, float]] = {
    **dict.fromkeys((*_SIZES, *_OPTIONAL_SIZES), ((int,), 1, MOST_SIZE)),
    **dict.fromkeys(LAYERS, ((int,), 1, MOST_LAYERS)),
    **dict.fromkeys(_EXPERTS, ((int,), 1, MOST_EXPERTS)),
    **dict.fromkeys(_POSITIVE, ((int, float), 1e-30, MOST_NUMBER)),
    **dict.fromkeys(_CHANCES, ((int, float), 0, 1)),
}
_MAY_BE_NULL = {*_OPTIONAL_SIZES, *_EXPERTS, *_CHANCES}
_PARTS = ("attn_config", "ffn_config", "init_config", "rope_scaling", "rope_hf_config", "rope_dail_config")


def first_of(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def check_configuration(config: Mapping[str, Any], where: str) -> None:
    """Checks the types of a configuration's parts and the limits of its numbers."""
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{where}.model_type ({shown(config.get('model_type'))}) must be a text")
    todo: list[tuple[str, Any]] = [(where, config)]
    while todo:
        name, value = todo.pop()
        key = name.rpartition(".")[2]
        if key in _PARTS and not (value is None or isinstance(value, Mapping)):
            raise UserError(f"{name} ({shown(value)}) must be a mapping")
        kinds, least, most = _LIMITS.get(key, ((), -MOST_NUMBER, MOST_NUMBER))
        wrong = kinds and type(value) not in kinds and (value is not None or key not in _MAY_BE_NULL)
        if wrong or (isinstance(value, int | float) and not least <= value <= most):
            kind = "whole number" if kinds == (int,) else "number"
            raise UserError(f"{name} ({shown(value)}) must be a {kind} from {least} to {most}")
        if isinstance(value, Mapping):
            todo.extend((f"{name}.{shown(inner)[1:-1]}", item) for inner, item in value.items())
    heads, width, groups = (first_of(config, keys) for keys in (HEADS, WIDTH, ("num_key_value_heads",)))
    if heads is not None and width is not None and heads > width:
        raise UserError(f"{where}: {heads} heads of a model of width {width}")
    if groups is not None and heads is not None and heads % groups:
        raise UserError(f"{where}.num_key_value_heads ({groups}) must divide the {heads} heads")
