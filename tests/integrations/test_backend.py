"""Whole models of transformers 5 with our experts: expert parallelism, types, compilation, checkpointing, saving."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from foundry_moe.integrations import transformers as integration
from tests.helpers import transformers_experts as certificate
from tests.helpers.transformers_experts import without_kernels
from tests.helpers.transformers_models import tiny_model


def family(model: str) -> certificate.Family:
    return next(found for found in certificate.families() if found.model == model)


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss", "muse_spark"])
def test_sentinels_of_expert_parallelism_are_no_choice(model, monkeypatch):
    without_kernels(monkeypatch)
    experts = certificate.build(family(model))
    experts._is_expert_parallel = True
    x_TD, index_TK, weights_TK = certificate.inputs(experts)
    local_TK = torch.rand(index_TK.shape) < 0.5
    weights_TK = weights_TK * local_TK
    with_sentinels = x_TD, index_TK.where(local_TK, experts.num_experts), weights_TK
    integration.register()
    ours = certificate.outputs(experts, integration.NAME, with_sentinels)
    # of a choice of weight 0 the output and all gradients are zeros, but for that of the weight
    truth = certificate.outputs(experts, "eager", (x_TD, index_TK, weights_TK))
    truth["combine weights"] = truth["combine weights"] * local_TK
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_with_fp32_combine_weights(dtype, monkeypatch):
    without_kernels(monkeypatch)
    experts = certificate.build(family("mixtral"), dtype=dtype)
    x_TD, index_TK, weights_TK = certificate.inputs(experts)
    assert weights_TK.dtype is torch.float32
    y_TD = integration.experts_forward(experts, x_TD, index_TK, weights_TK)
    assert y_TD.dtype is dtype
    found = certificate.differences(experts, certificate.build(family("mixtral")))
    assert max(found.values()) < 20 * torch.finfo(dtype).eps, found


def test_autocast_computes_in_its_dtype_and_returns_that_of_tokens(monkeypatch):
    without_kernels(monkeypatch)
    experts = certificate.build(family("mixtral"))
    given = certificate.inputs(experts)
    exact = integration.experts_forward(experts, *given)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = integration.experts_forward(experts, *given)
    assert rounded.dtype is torch.float32
    assert 0 < float((rounded - exact).abs().max()) < 0.05 * float(exact.abs().max())


def test_weights_of_another_kind_are_left_to_transformers(monkeypatch, caplog):
    without_kernels(monkeypatch)
    experts = certificate.build(family("qwen3_moe"))

    class Quantized(nn.Parameter):
        pass

    given = certificate.inputs(experts)
    expected = integration.experts_forward(experts, *given)
    experts.gate_up_proj = Quantized(experts.gate_up_proj.data)
    integration._log_once.cache_clear()
    torch.testing.assert_close(integration.experts_forward(experts, *given), expected, rtol=1e-5, atol=1e-4)
    assert "Qwen3MoeExperts is computed by transformers' grouped_mm: its weights are of type Quantized" in caplog.text


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens, monkeypatch):
    without_kernels(monkeypatch)
    experts = certificate.build(family("gpt_oss"))
    x_TD, index_TK, weights_TK = (tensor[:tokens] for tensor in certificate.inputs(experts))
    y_TD = integration.experts_forward(experts, x_TD, index_TK, weights_TK)
    experts.config._experts_implementation = "eager"
    torch.testing.assert_close(y_TD, experts(x_TD, index_TK, weights_TK), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_decoder_layer_compiles_without_graph_breaks(kind, monkeypatch):
    without_kernels(monkeypatch)
    integration.register()
    model = tiny_model(kind)
    model.set_experts_implementation(integration.NAME)
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 5, model.config.hidden_size)
    eager, compiled = mlp(x), torch.compile(mlp, fullgraph=True, backend="aot_eager")(x)
    eager, compiled = (y[0] if isinstance(y, tuple) else y for y in (eager, compiled))
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    compiled.sum().backward()
    assert mlp.experts.gate_up_proj.grad is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant, monkeypatch):
    without_kernels(monkeypatch)
    integration.register()
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation(integration.NAME)
    model.train()
    ids = torch.arange(12).view(2, 6)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)


def test_generation_equals_eager(monkeypatch):
    without_kernels(monkeypatch)
    integration.register()
    model = tiny_model("qwen3_moe").eval()
    ids = torch.arange(6)[None]
    found = []
    for implementation in ("eager", integration.NAME):
        model.set_experts_implementation(implementation)
        found.append(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist())
    assert found[0] == found[1]


def test_saved_and_loaded_with_our_experts_is_equal(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    without_kernels(monkeypatch)
    name = integration.register()
    model = tiny_model("qwen3_moe").eval()
    model.set_experts_implementation(name)
    ids = torch.arange(6)[None]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=name).eval()
    assert loaded.config._experts_implementation == name
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_register_without_transformers_5_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers.integrations.moe", SimpleNamespace())
    with pytest.raises(ImportError, match="needs transformers 5"):
        integration.register()
