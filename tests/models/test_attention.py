"""`attn_impl: sdpa` against LLM Foundry's plain attention, which it replaces."""

import pytest
import torch
from llmfoundry.models.layers.attention import scaled_multihead_dot_product_attention as plain

from foundry_moe.models.attention import sdpa_attention

HEADS, WIDTH, POSITIONS, BATCH = 4, 8, 7, 2


def tensors(kv_heads: int, queries: int = POSITIONS, keys: int = POSITIONS):
    sizes = ((queries, HEADS), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(BATCH, n, heads * WIDTH, dtype=torch.float64, requires_grad=True) for n, heads in sizes]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_equals_the_plain_implementation_in_outputs_and_gradients(kv_heads, causal, window, bias, padding):
    q, k, v = tensors(kv_heads)
    keywords = {
        "n_heads": HEADS,
        "kv_n_heads": kv_heads,
        "is_causal": causal,
        "sliding_window_size": window,
        "softmax_scale": 0.7 if bias else None,
        "dropout_p": 0.9,  # of training alone
        "attn_bias": torch.randn(1, HEADS, 1, POSITIONS, dtype=torch.float64) if bias else None,
        "key_padding_mask": torch.tensor([[True] * 7, [True] * 4 + [False] * 3]) if padding else None,
    }
    # a padded query whose window holds padding alone may look nowhere, and what it gets means nothing
    real = keywords["key_padding_mask"] if padding else torch.ones(BATCH, POSITIONS, dtype=torch.bool)
    ours, _, _ = sdpa_attention(q, k, v, **keywords)
    wanted, _, _ = plain(q, k, v, **keywords)
    torch.testing.assert_close(ours[real], wanted[real])
    direction = torch.randn_like(ours) * real[..., None]
    for mine, truth in zip(
        torch.autograd.grad(ours, (q, k, v), direction), torch.autograd.grad(wanted, (q, k, v), direction), strict=True
    ):
        torch.testing.assert_close(mine, truth)


@pytest.mark.parametrize("new", [1, 3])
def test_decoding_with_a_cache_equals_the_plain_implementation(new):
    bias = torch.randn(1, HEADS, 1, POSITIONS + new + 2, dtype=torch.float64)  # of more positions than there are
    keywords = {"n_heads": HEADS, "kv_n_heads": HEADS, "is_causal": True, "attn_bias": bias}
    empty = ()
    outputs = []
    for attention in (sdpa_attention, plain):
        torch.manual_seed(1)
        _, _, cache = attention(*tensors(HEADS), **keywords, past_key_value=empty)
        out, _, cache = attention(*tensors(HEADS, new, new), **keywords, past_key_value=cache)
        outputs.append((out, *cache))
    for mine, truth in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, truth)


def test_padding_on_the_right_leaves_real_tokens_as_they_are_in_training():
    q, k, v = tensors(HEADS)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    keywords = {"n_heads": HEADS, "kv_n_heads": HEADS, "is_causal": True, "key_padding_mask": mask}
    ours, _, _ = sdpa_attention(q, k, v, **keywords, training=True)
    wanted, _, _ = plain(q, k, v, **keywords)
    torch.testing.assert_close(ours[mask], wanted[mask])


@pytest.mark.parametrize("keywords", [{"needs_weights": True}, {"attn_logit_softcapping": 30.0}])
def test_what_torch_does_not_give_is_refused(keywords):
    with pytest.raises(ValueError, match="use attn_impl: torch"):
        sdpa_attention(*tensors(HEADS), n_heads=HEADS, kv_n_heads=HEADS, **keywords)
