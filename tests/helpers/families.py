"""A small random model of each family, as transformers builds it: odd sizes, and every feature that the family has."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    DbrxConfig,
    DbrxForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 61
WIDTH = int(os.environ.get("EXPORT_WIDTH", "32"))  # servers have no heads as narrow as a quarter of this
SPREAD = 0.3 * (32 / WIDTH) ** 0.5  # of initial weights
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "initializer_range": SPREAD,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def _deepseek(**keys: Any) -> PreTrainedModel:
    sizes = {**SIZES, "num_key_value_heads": 4, "num_experts_per_tok": 3}
    attention = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    moe = {"n_routed_experts": 12, "moe_intermediate_size": 20, "n_shared_experts": 2, "n_group": 4, "topk_group": 2}
    config = DeepseekV3Config(**{**sizes, **attention, **moe, "first_k_dense_replace": 1, **keys})
    model = DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(0.0, 0.2)
    return model


def _qwen(kind: Any, config: Any, **keys: Any) -> PreTrainedModel:
    moe = {"num_experts": 5, "moe_intermediate_size": 24, "mlp_only_layers": [1], "norm_topk_prob": True}
    return kind(config(**{**SIZES, **moe, **keys}))


def _dbrx(**keys: Any) -> PreTrainedModel:
    ffn = {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 2, "moe_normalize_expert_weights": None}
    model = DbrxForCausalLM(
        DbrxConfig(
            d_model=WIDTH,
            n_heads=4,
            n_layers=2,
            max_seq_len=64,
            vocab_size=VOCABULARY,
            attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            ffn_config={**ffn, **keys},
            initializer_range=SPREAD,
            pad_token_id=0,
        )
    )
    return model


_BUILD: dict[str, Callable[..., PreTrainedModel]] = {
    "mixtral": lambda **keys: MixtralForCausalLM(MixtralConfig(**{**SIZES, "num_local_experts": 5, **keys})),
    "olmoe": lambda **keys: OlmoeForCausalLM(OlmoeConfig(**{**SIZES, "num_experts": 5, **keys})),
    "qwen3_moe": lambda **keys: _qwen(Qwen3MoeForCausalLM, Qwen3MoeConfig, **{"head_dim": WIDTH // 4, **keys}),
    "qwen2_moe": lambda **keys: _qwen(
        Qwen2MoeForCausalLM, Qwen2MoeConfig, **{"shared_expert_intermediate_size": 28, **keys}
    ),
    "deepseek_v3": _deepseek,
    "dbrx": _dbrx,
    "granitemoe": lambda **keys: GraniteMoeForCausalLM(
        GraniteMoeConfig(**{**SIZES, "num_local_experts": 5, "residual_multiplier": 0.7, **keys})
    ),
}
MODEL_TYPES = tuple(_BUILD)


def small(model_type: str, seed: int = 5, **keys: Any) -> PreTrainedModel:
    """A model of this family; `keys` go to its configuration (DBRX: its `ffn_config`)."""
    torch.manual_seed(seed)
    return _BUILD[model_type](**keys).eval()
