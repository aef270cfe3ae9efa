"""Floating-point operations of training, for MFU and for `foundry-moe plan`. Imports neither torch nor Composer."""

from typing import Any


def flops_per_token(num_active_params: float, *, layers: int, width: int, sequence: int) -> float:
    """Forward and backward: 6 per parameter, and attention, not halved for causality, as torchtitan counts.

    Args:
        num_active_params: that a token is multiplied by; see `num_active_params`. Embeddings are only looked up.
        layers: with attention.
        width: of the queries of all heads.
        sequence: tokens in a sequence.
    """
    return 6.0 * num_active_params + 12.0 * layers * width * sequence


def query_width(config: Any) -> int:
    """Columns of the queries of all heads, of a configuration of Hugging Face."""
    heads = config.num_attention_heads
    # DeepSeek's head_dim is that of positions alone
    width = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(heads * width)
