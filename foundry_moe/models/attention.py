"""Attention for MPT on torch's `scaled_dot_product_attention`: fast on any GPU, and needs no flash-attn package."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from foundry_moe.schema import UserError


def _allowed(
    queries: int, keys: int, is_causal: bool, window: int, key_padding_mask: Tensor | None, device: torch.device
) -> Tensor | None:
    """True where a query attends: [queries, keys], or [batch, 1, queries, keys] with padding. None = everywhere."""
    position_Q1 = torch.arange(keys - queries, keys, device=device)[:, None]
    position_K = torch.arange(keys, device=device)
    allowed = None
    if is_causal:
        allowed = position_K <= position_Q1
    if window != -1:
        near = (position_K - position_Q1).abs() <= window
        allowed = near if allowed is None else allowed & near
    if key_padding_mask is not None:
        present = key_padding_mask.bool()[:, None, None, :]
        allowed = present if allowed is None else allowed & present
    return allowed


def sdpa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_heads: int,
    kv_n_heads: int,
    past_key_value: tuple[Tensor, Tensor] | tuple[()] | None = None,
    softmax_scale: float | None = None,
    attn_bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    training: bool = False,
    needs_weights: bool = False,
    attn_logit_softcapping: float | None = None,
    sliding_window_size: int = -1,
) -> tuple[Tensor, None, tuple[Tensor, Tensor] | None]:
    """An `attn_impl` for LLM Foundry; its arguments and caches are those of `torch`, the plain implementation.

    Args:
        query, key, value: [batch, positions, heads * head width].
        past_key_value: caches [batch, heads, head width, positions] and [batch, heads, positions, head width].
        key_padding_mask: [batch, key positions], True for real tokens. In training MPT pads on the right only, where
            the causal mask hides the padding from every real token, so it is not needed then.
    """
    if needs_weights or attn_logit_softcapping is not None:
        raise UserError(
            "attn_impl sdpa gives neither attention weights nor attn_logit_softcapping: use attn_impl: torch"
        )
    q = query.unflatten(-1, (n_heads, -1)).transpose(1, 2)
    k = key.unflatten(-1, (kv_n_heads, -1)).transpose(1, 2)
    v = value.unflatten(-1, (kv_n_heads, -1)).transpose(1, 2)
    cache = None
    if past_key_value is not None:
        if past_key_value:
            k = torch.cat([past_key_value[0].transpose(2, 3), k], dim=2)
            v = torch.cat([past_key_value[1], v], dim=2)
        cache = (k.transpose(2, 3), v)

    queries, keys = q.shape[2], k.shape[2]
    hides_padding = training and is_causal and queries == keys
    mask = None if hides_padding else key_padding_mask
    plain = attn_bias is None and mask is None and sliding_window_size == -1
    bias: Tensor | None = None
    causal_here = plain and is_causal and queries == keys
    if not (causal_here or (plain and (not is_causal or queries == 1))):
        bias = _allowed(queries, keys, is_causal, sliding_window_size, mask, q.device)
        if attn_bias is not None:
            shown = attn_bias[:, :, -queries:, -keys:].to(q.dtype)
            bias = shown if bias is None else shown.masked_fill(~bias, torch.finfo(q.dtype).min)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=bias,
        is_causal=causal_here,
        dropout_p=dropout_p if training else 0.0,
        scale=softmax_scale,
        enable_gqa=n_heads != kv_n_heads,
    )
    return out.transpose(1, 2).flatten(2), None, cache
