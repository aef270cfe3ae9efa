"""Dense models of transformers, upcycled, compute exactly what they did, or are refused with what is unsupported."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, MptConfig, MptForCausalLM
from transformers.activations import ACT2FN

from foundry_moe import MoEConfig, apply_dmoe
from tests.helpers.fp64 import fp64_throughout

IDS = torch.randint(5, 61, (2, 9), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 61, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32},
    **{"initializer_range": 0.3},
}
GPT: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 32, "rotary_dim": 4, "resid_pdrop": 0.0}
SHORT_NAMES: dict[str, Any] = {"d_model": 16, "n_layers": 1, "n_layer": 1, "n_heads": 4, "n_head": 4}
DECODER: dict[str, Any] = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}

EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in (
            *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "gpt_neox", "starcoder2"),
            *("stablelm", "olmo", "olmo2", "cohere", "cohere2", "granite", "helium", "nemotron", "persimmon"),
            *("diffllama", "recurrent_gemma"),
        )
    },
    **{name: (name, GPT) for name in ("gpt2", "gptj", "openai-gpt", "gpt_bigcode")},
    "gpt_neo": ("gpt_neo", {"num_layers": 1, "num_heads": 4, "attention_types": [[["global"], 1]]}),
    "llama, biases": ("llama", {"mlp_bias": True, "attention_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one key for all heads": ("llama", {"num_key_value_heads": 1}),
    "llama, a key for each head": ("llama", {"num_key_value_heads": 4}),
    "llama, four layers": ("llama", {"num_hidden_layers": 4}),
    "llama, odd widths": ("llama", {"hidden_size": 20, "intermediate_size": 7}),
    "llama, scaled positions": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "qwen2, a window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "gpt_neox, in sequence": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox, without attention's biases": ("gpt_neox", {"attention_bias": False}),
    "falcon": ("falcon", {}),
    "falcon, new": ("falcon", {"new_decoder_architecture": True, "bias": True}),
    "stablelm, norms": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True}),
    "starcoder2, without biases": ("starcoder2", {"use_bias": False}),
    "granite, multipliers": ("granite", {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    # the two maps of its GLU are one tensor
    "phi3": ("phi3", {}, "Phi3ForCausalLM has no feed-forward block of a known kind"),
    "glm": ("glm", {}, "GlmForCausalLM has no feed-forward block"),
    "glm4": ("glm4", {}, "Glm4ForCausalLM has no feed-forward block"),
    "moshi": ("moshi", {"ffn_dim": 24, "audio_vocab_size": 8}, "MoshiForCausalLM has no feed-forward block"),
    # the block adds the residual
    "mpt": ("mpt", SHORT_NAMES, "MptForCausalLM has no feed-forward block"),
    "bloom": ("bloom", SHORT_NAMES, "BloomForCausalLM has no feed-forward block"),
    "mamba": ("mamba", {}, "MambaForCausalLM has no feed-forward block"),
    # the two maps are in the decoder's layer
    "opt": ("opt", {"ffn_dim": 24, "word_embed_proj_dim": 16}, r"\(OPTDecoderLayer\) also holds self_attn"),
    "bart": ("bart", DECODER, r"\(BartDecoderLayer\) also holds self_attn"),
    "xglm": ("xglm", {**DECODER, "num_layers": 1, "attention_heads": 4, "ffn_dim": 24}, r"\(XGLMDecoderLayer\) also"),
    "gpt2, dropout": ("gpt2", {**GPT, "resid_pdrop": 0.1}, r"h\.0\.mlp drops 0\.1 of its output in training"),
    "starcoder2, dropout": ("starcoder2", {"residual_dropout": 0.2}, r"layers\.0\.mlp drops 0\.2 of its output"),
}
MLP = {"gelu", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "relu", "relu2", "silu", "swish"}
GLU = MLP - {"relu2"}


def build(model_type: str, **keys: Any) -> Any:
    torch.manual_seed(3)
    sizes = {key: value for key, value in SIZES.items() if (model_type, key) != ("falcon", "head_dim")}  # no setter
    if model_type == "mpt":  # Composer registers LLM Foundry's configuration under this type
        model = MptForCausalLM(MptConfig(**{**sizes, **keys}))
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **keys}))
    model = model.double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return model


def change(model: Any, num_experts: int = 3) -> float:
    """The largest relative difference of the logits after upcycling; a warning is an error."""
    config = MoEConfig(num_experts=num_experts, top_k=min(num_experts, 2), init="upcycle")
    with torch.no_grad(), fp64_throughout():
        before = model(input_ids=IDS).logits
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            apply_dmoe(model, config)
        return ((model(input_ids=IDS).logits - before).abs().max() / before.abs().max()).item()


@pytest.mark.parametrize("name", EXACT)
def test_an_upcycled_model_computes_what_it_did(name: str) -> None:
    model_type, keys = EXACT[name]
    # weights that sum to one times equal outputs: rounding of fp64
    assert change(build(model_type, **keys), num_experts=1 + len(name) % 3) < 1e-12


@pytest.mark.parametrize("name", REFUSED)
def test_what_experts_do_not_compute_is_named(name: str) -> None:
    model_type, keys, sentence = REFUSED[name]
    with pytest.raises((ValueError, UserWarning), match=sentence), warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_dmoe(build(model_type, **keys), MoEConfig(num_experts=2, init="upcycle"))


def test_a_block_that_multiplies_by_a_constant_is_refused() -> None:
    """As FalconH1's, which transformers has since 4.53."""
    model = build("llama")
    block = model.model.layers[0].mlp
    block.forward = lambda x_BSD: type(block).forward(block, x_BSD) * 0.9
    with pytest.raises(ValueError, match=r"init \(upcycle\): model\.layers\.0\.mlp \(LlamaMLP\) computes more than"):
        change(model)


@pytest.mark.parametrize(("model_type", "supported"), [("llama", GLU), ("phi", MLP)])
def test_every_activation_is_computed_or_named(model_type: str, supported: set[str]) -> None:
    exact = set()
    for activation in ACT2FN:
        model = build(model_type, hidden_act=activation)
        try:
            gap = change(model)
        except ValueError as error:
            sentences = "is not one of swiglu", "also holds a"  # prelu has a weight
            assert "model.layers.0.mlp" in str(error) and any(sentence in str(error) for sentence in sentences)
        else:
            assert gap < 1e-12, activation
            exact.add(activation)
    assert exact == supported
