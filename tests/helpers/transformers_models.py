"""Tiny random models of transformers 5."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY = 64


def tiny_model(kind: str) -> nn.Module:
    """A model of two layers, fp32, with the same weights on every call. kind: a model type of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 24,
        "num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0,
        "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    if kind != "gpt_oss":
        del sizes["layer_types"]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32)
