"""A small random model of the same family in place of a run's Hugging Face model, of which the configuration is read.

Layers, widths, heads and vocabulary shrink; all other keys of the configuration are unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foundry_moe.commands.plan.shape import read_config
from foundry_moe.commands.verify import shrink
from foundry_moe.config import MoEConfig
from foundry_moe.models.families import FAMILIES
from foundry_moe.schema import UserError, section

_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_DROPOUT = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout")


def write_small_model(
    run: Mapping[str, Any], experts: MoEConfig, folder: Path
) -> tuple[dict[str, Any], float, str, tuple[str, ...]]:
    """Writes the model to `folder` and names it in the run.

    Returns:
        The run; the scale of widths; the folder where the run loads weights whose meaning it keeps, else empty; and
        what was changed.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    small: dict[str, Any] = copy.deepcopy(dict(run))
    model, config = small["model"], read_config(section(run, "model"))
    before = config.to_dict()
    scale = _shrink(small, config, experts)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model["pretrained_model_name_or_path"] = str(folder)
    for key in ("config_overrides", "use_auth_token", "trust_remote_code", "load_in_8bit"):
        model.pop(key, None)
    keeps = model.get("pretrained", True) and (config.model_type in FAMILIES or experts.init != "random")
    return small, scale, str(folder) if keeps else "", tuple(shrink.changes(before, config.to_dict(), "config."))


def _shrink(run: dict[str, Any], config: Any, experts: MoEConfig) -> float:
    """Shrinks the configuration; returns the scale of widths."""
    try:
        width, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    except AttributeError as error:
        where = f"model.pretrained_model_name_or_path ({run['model']['pretrained_model_name_or_path']})"
        raise UserError(f"{where}: {config.model_type} has sizes that verify does not know: {error}") from None
    attention: Any = getattr(config, "attn_config", None)
    kv_heads = getattr(attention, "kv_n_heads", None) or getattr(config, "num_key_value_heads", None) or heads
    small, small_heads, small_kv = shrink.shrink_heads(width, heads, kv_heads)
    few = _few_layers(run, config, experts, layers)
    for key, value in vars(config).copy().items():
        if isinstance(value, list) and len(value) == layers and key != "mlp_only_layers":
            setattr(config, key, value[:few])  # one entry per layer
    if small < width:
        if getattr(config, "head_dim", None):
            config.head_dim = shrink.HEAD
        if hasattr(attention, "kv_n_heads"):
            attention.kv_n_heads = small_kv
        elif getattr(config, "num_key_value_heads", None):
            config.num_key_value_heads = small_kv
        _set_widths(run, config, experts, small / width)
        if getattr(config, "kv_lora_rank", None):
            _replace(config, _LATENT)
            config.qk_head_dim = config.qk_rope_head_dim + config.qk_nope_head_dim
            config.head_dim = config.qk_rope_head_dim
    config.hidden_size, config.num_attention_heads, config.num_hidden_layers = small, small_heads, few
    config.vocab_size = shrink.VOCABULARY
    _replace(config, _TOKENS)
    scaling = getattr(config, "rope_scaling", None)
    if isinstance(scaling, dict) and any(isinstance(value, list) for value in scaling.values()):
        config.rope_scaling = None  # its factors are for heads of another width
    _replace(config, dict.fromkeys(_DROPOUT, 0.0))  # one process draws other numbers than several
    config.torch_dtype = torch.float32
    return small / width


def _replace(config: Any, values: Mapping[str, Any]) -> None:
    """Sets those keys that the configuration has."""
    for key, value in values.items():
        if getattr(config, key, None) is not None:
            setattr(config, key, value)


def _few_layers(run: dict[str, Any], config: Any, experts: MoEConfig, layers: int) -> int:
    """As many as keep a dense layer beside one with experts, where there are both."""
    few = min(layers, max(shrink.shrink_layers(run, experts, layers), getattr(config, "decoder_sparse_step", 1) or 1))
    if getattr(config, "first_k_dense_replace", 0):
        config.first_k_dense_replace = 1
        few = min(layers, max(few, shrink.LAYERS))
    dense = getattr(config, "mlp_only_layers", None)
    if dense:
        kept = [layer for layer in dense if layer < few]
        config.mlp_only_layers = kept if len(kept) < few else [0]
    return few


def _set_widths(run: dict[str, Any], config: Any, experts: MoEConfig, scale: float) -> None:
    before = getattr(config, "intermediate_size", None)
    for key in _WIDTHS:
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, shrink.even_width(getattr(config, key) * scale))
    ffn: Any = getattr(config, "ffn_config", None)
    if isinstance(getattr(ffn, "ffn_hidden_size", None), int):
        ffn.ffn_hidden_size = shrink.even_width(ffn.ffn_hidden_size * scale)
    if config.model_type in FAMILIES:
        for key in ("expert_hidden_size", "shared_expert_hidden_size"):
            shrink.moe_keys(run).pop(key, None)  # the family's own
        return
    width = experts.expert_hidden_size
    if isinstance(width, int) and before and before % width == 0:  # shards of the dense block stay shards of it
        config.intermediate_size = shrink.even_width(width * scale) * (before // width)
