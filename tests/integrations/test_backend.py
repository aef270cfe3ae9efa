"""Whole models of transformers 5 with our experts: expert parallelism, types, compilation, checkpointing, saving."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.integrations import transformers as integration
from tests.helpers import transformers_experts as certificate
from tests.helpers.transformers_experts import without_kernels
from tests.helpers.transformers_models import tiny_model


def family(model: str) -> certificate.Family:
    found = [family for family in certificate.families() if family.model == model]
    if not found:
        pytest.skip(f"this transformers has no {model}")
    return found[0]


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss", "muse_spark"])
def test_sentinels_of_expert_parallelism_are_no_choice(model, monkeypatch):
    without_kernels(monkeypatch)
    experts = certificate.build(family(model))
    experts._is_expert_parallel = True
    x_TD, index_TK, weights_TK = certificate.inputs(experts)
    local_TK = torch.rand(index_TK.shape) < 0.5
    weights_TK = weights_TK * local_TK
    # their weights count for nothing, whatever they are
    with_sentinels = x_TD, index_TK.where(local_TK, experts.num_experts), weights_TK.where(local_TK, 0.5)
    integration.register()
    planned, plan = [], integration.plan_permute
    monkeypatch.setattr(integration, "plan_permute", lambda index, number: planned.append(index) or plan(index, number))
    ours = certificate.outputs(experts, integration.NAME, with_sentinels)
    assert torch.equal(planned[0], index_TK.where(local_TK, -1))
    # of a choice of weight 0 the output and all gradients are zeros, but for that of the weight
    truth = certificate.outputs(experts, "eager", (x_TD, index_TK, weights_TK))
    truth["combine weights"] = truth["combine weights"] * local_TK
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)


@pytest.mark.parametrize(
    ("model", "formula"), [("qwen3_moe", "silu"), ("gpt_oss", "silu 1.702 7.0 1.0"), ("mixtral", "silu")]
)
def test_the_gates_that_kernels_compute_are_recognised(model, formula):
    assert integration.formula_of(certificate.build(family(model))) == formula


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_with_fp32_combine_weights(dtype, monkeypatch):
    without_kernels(monkeypatch)
    experts = certificate.build(family("mixtral"), dtype=dtype)
    x_TD, index_TK, weights_TK = certificate.inputs(experts)
    assert weights_TK.dtype is torch.float32
    y_TD = integration.experts_forward(experts, x_TD, index_TK, weights_TK)
    assert y_TD.dtype is dtype


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


def decoder_layer(kind: str, device: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Any]]:
    """A whole decoder layer (attention, router, experts, norms) with our experts, and what its model calls it with."""
    integration.register()
    model = tiny_model(kind).to(device, dtype)
    model.set_experts_implementation(integration.NAME)
    layer, calls = model.model.layers[0], []
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    model(torch.arange(24, device=device).view(2, 12), use_cache=False)
    hook.remove()
    (args, kwargs), signature = calls[0], inspect.signature(layer.forward)
    return layer, {name: detached(value) for name, value in signature.bind(*args, **kwargs).arguments.items()}


def detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return type(value)(map(detached, value)) if isinstance(value, (tuple, list)) else value


def layer_results(layer: nn.Module, call: Any, given: dict[str, Any]) -> list[Tensor]:
    """The output and the gradients of the hidden states and of every parameter."""
    kwargs = {**given, **given.get("kwargs", {})}
    kwargs.pop("kwargs", None)
    hidden = kwargs.pop("hidden_states").clone().requires_grad_()
    y = call(hidden, **kwargs)
    y = y[0] if isinstance(y, tuple) else y
    weight = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    return [y, *torch.autograd.grad((y * weight).sum(), [hidden, *layer.parameters()])]


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_a_whole_decoder_layer_compiles_without_graph_breaks(kind, monkeypatch):
    without_kernels(monkeypatch)
    layer, given = decoder_layer(kind, "cpu")
    plain = layer_results(layer, layer, given)
    compiled = layer_results(layer, torch.compile(layer, fullgraph=True, backend="aot_eager"), given)
    for theirs, ours in zip(plain, compiled, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_whole_decoder_layer_compiles_on_a_gpu(kind):
    layer, given = decoder_layer(kind, "cuda")
    assert integration.way_of(layer.mlp.experts, torch.float32) == "fused"
    plain = layer_results(layer, layer, given)
    compiled = layer_results(layer, torch.compile(layer, fullgraph=True), given)
    for theirs, ours in zip(plain, compiled, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def devices_of_calls(model: nn.Module) -> list[str]:
    """The device type of the tokens of each layer's experts, in the order of their calls."""
    found: list[str] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: found.append(args[0].device.type))
    return found


def loss_and_gradients(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    ids = torch.arange(24, device=next(model.model.embed_tokens.parameters()).device).view(2, 12)
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


def test_experts_that_accelerate_keeps_on_a_disk_are_loaded_for_their_call(tmp_path, monkeypatch):
    """Until then they are on the meta device."""
    accelerate = pytest.importorskip("accelerate")
    without_kernels(monkeypatch)
    integration.register()
    ids = torch.arange(24).view(2, 12)
    model = tiny_model("gpt_oss").eval()
    expected = model(ids).logits
    model.set_experts_implementation(integration.NAME)
    places = {"model.layers.1.mlp.experts": "disk", "model.layers.1.mlp.router": "cpu"}
    rest = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    rest += [f"model.layers.1.{name}" for name in ("self_attn", "input_layernorm", "post_attention_layernorm")]
    model = accelerate.dispatch_model(model, places | dict.fromkeys(rest, "cpu"), "cpu", offload_dir=tmp_path)
    assert model.model.layers[1].mlp.experts.gate_up_proj.is_meta
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_on_a_gpu_and_a_cpu_are_computed_where_they_are(kind):
    accelerate = pytest.importorskip("accelerate")
    integration.register()
    model = tiny_model(kind)
    loss, gradients = loss_and_gradients(model)
    model.set_experts_implementation(integration.NAME)
    last = 1 if torch.cuda.device_count() > 1 else "cpu"  # else the second layer on the second GPU
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.rotary_emb": 0, "model.layers.1": last}
    places |= {"model.norm": last, "lm_head": last}
    model = accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    devices = devices_of_calls(model)
    found_loss, found = loss_and_gradients(model)
    assert devices == ["cuda", torch.device(last).type]
    assert found_loss == pytest.approx(loss, rel=1e-5)
    for name, value in gradients.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4 * float(value.abs().max()), msg=name)


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


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "granitemoe", "gpt_oss"])
def test_apply_dmoe_names_the_backend_for_experts_of_transformers_5(kind):
    with pytest.raises(ValueError, match=r"set_experts_implementation\('foundry_moe'\)"):
        apply_dmoe(tiny_model(kind), MoEConfig(num_experts=6, top_k=2))


def test_an_upcycled_model_of_transformers_5_trains_and_says_that_it_is_not_saved_as_a_family(tmp_path):
    model = tiny_model("llama")
    apply_dmoe(model, MoEConfig(num_experts=4, top_k=2))
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(ValueError, match=r"save_pretrained: transformers 5.* use transformers 4; save its state_dict"):
        model.save_pretrained(tmp_path)
