"""The layer: what it computes, what it attaches to the graph, and what it counts."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from foundry_moe.config import MoEConfig
from foundry_moe.layers import init
from foundry_moe.layers.aux_loss import LoadStatistics
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.losses import gate_entropy
from foundry_moe.layers.moe import MoELayer
from foundry_moe.ops.softmax_topk import balance

pytestmark = pytest.mark.quick

CONFIG = MoEConfig(num_experts=5, top_k=2, expert_hidden_size=7, activation="swiglu", init_std=0.5, loss={})


def build(config=CONFIG, context=None, dtype=torch.float64, **keys) -> MoELayer:
    layer = MoELayer(6, config, layer_index=1, num_layers=3, context=context or BatchContext(), dtype=dtype, **keys)
    layer.reset_parameters()
    return layer


def test_an_input_of_another_width_is_refused():
    """24 numbers would also be 4 tokens of width 6."""
    with pytest.raises(ValueError, match="the layer's width is 6, and the last dimension of its input 3"):
        build()(torch.zeros(8, 3, dtype=torch.float64))


def naive(layer: MoELayer, x_TD, normalize, score):
    """Token by token, from the definition."""
    out = []
    for x_D in x_TD:
        logits_E = layer.gate.weight_ED @ x_D
        scores_E = logits_E.softmax(0) if score == "softmax" else logits_E.sigmoid()
        weights_K, experts_K = scores_E.topk(layer.config.top_k)
        weights_K = weights_K / weights_K.sum() if normalize else weights_K
        y_D = torch.zeros_like(x_D)
        for w, e in zip(weights_K, experts_K.tolist(), strict=True):
            w1, v1, w2 = layer.experts.w1_EFD[e], layer.experts.v1_EFD[e], layer.experts.w2_EDF[e]
            y_D = y_D + w * (w2 @ (F.silu(w1 @ x_D) * (v1 @ x_D)))
        if layer.shared_expert is not None:
            y_D = y_D + layer.shared_expert(x_D[None])[0]
        out.append(y_D)
    return torch.stack(out)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shared", [0, 4])
def test_layer_equals_a_loop_over_tokens_in_outputs_and_every_gradient(score, normalize, shared):
    gate = {"name": "topk", "score": score, "normalize": normalize}
    layer = build(replace(CONFIG, gate=gate, shared_expert_hidden_size=shared))
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    y, truth = layer(x), naive(layer, x.reshape(-1, 6), normalize, score).view_as(x)
    torch.testing.assert_close(y, truth)
    direction = torch.randn_like(y)
    inputs = [x, *layer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(y, inputs, direction), torch.autograd.grad(truth, inputs, direction), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_one_token_and_no_token_pass():
    layer = build()
    assert layer(torch.randn(1, 6, dtype=torch.float64)).shape == (1, 6)
    empty = torch.randn(0, 6, dtype=torch.float64, requires_grad=True)
    layer(empty).sum().backward()
    assert layer.experts.w1_EFD.grad.abs().sum() == 0


def test_gate_computes_in_fp32_in_a_bf16_model_and_under_autocast():
    layer = build(dtype=torch.bfloat16)
    x_TD = torch.randn(64, 6, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        choices = layer.gate(x_TD, BatchContext().for_tokens(64))
    truth_TE = x_TD.double() @ layer.gate.weight_ED.double().T
    # fp32 has 24 bits; bf16 would be off by 2^-9
    assert (choices.logits_TE - truth_TE).abs().max() < 1e-5 * truth_TE.abs().max()
    assert layer(x_TD.float()).dtype is torch.bfloat16, "experts cast rows to their dtype"
    seen = []  # also for gates of other packages, which may not turn autocast off themselves
    layer.gate.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.bfloat16):
        layer(x_TD)
    assert seen == [False]


def test_weights_depend_on_seed_layer_and_expert_alone():
    a, b = build(), build()
    torch.manual_seed(99)
    b.reset_parameters()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    wider = build(replace(CONFIG, num_experts=9))
    assert torch.equal(wider.experts.w1_EFD[:5], a.experts.w1_EFD)
    other = build(replace(CONFIG, seed=18))
    assert not torch.isclose(other.experts.w1_EFD, a.experts.w1_EFD).any()
    assert not torch.equal(a.experts.w1_EFD[0], a.experts.w1_EFD[1])


@pytest.mark.parametrize(
    ("gpu", "groups", "where"),
    [
        (False, None, "cpu"),
        (True, None, "cuda"),
        (True, "cuda:nccl", "cuda"),
        (True, "cpu:gloo,cuda:nccl", "cuda"),
        (True, "cpu:gloo,cuda:gloo", "cpu"),
    ],
)
def test_a_process_that_trains_on_a_gpu_draws_there_for_tensors_on_the_cpu_too(gpu, groups, where, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: groups is not None)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: groups)
    assert init.drawing_device(torch.device("cpu")).type == where
    assert init.drawing_device(torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_every_random_weight_follows_the_rule(monkeypatch):
    asked = []
    monkeypatch.setattr(init, "drawing_device", lambda device: asked.append(device) or device)
    MoELayer(6, replace(CONFIG, shared_expert_hidden_size=4, shared_expert_gate=True))
    assert len(asked) == 1 + 3 * CONFIG.num_experts + 4  # gate, experts, shared expert with a gate


PARTS = {
    "shared expert": {"shared_expert_hidden_size": 4, "shared_expert_gate": True},
    "biases": {"bias": True},
    "widths": {"expert_hidden_size": (3, 5, 7, 2, 4)},
    "noise and bias": {"gate": {"name": "topk", "noise": True, "bias_balance": True}},
    "adapters": {"lora": {"r": 2}},
    "orthogonal": {"gate": {"name": "base"}, "top_k": 1},
}


@pytest.mark.parametrize("part", PARTS)
def test_no_layer_has_memory_that_nothing_wrote(part):
    config = replace(CONFIG, **PARTS[part])
    torch.use_deterministic_algorithms(True)  # new memory is then filled with NaN
    try:
        layer = MoELayer(6, config, context=BatchContext())
        from_meta = nn.Sequential(MoELayer(6, config, device="meta", context=BatchContext())).to_empty(device="cpu")[0]
    finally:
        torch.use_deterministic_algorithms(False)
    ours, theirs = layer.state_dict(), from_meta.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.isfinite().all() and torch.equal(tensor, theirs[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["topk", "base"])
def test_weights_on_the_cpu_are_those_on_the_gpu(gate):
    config = replace(CONFIG, gate={"name": gate}, top_k=1, shared_expert_hidden_size=4, shared_expert_gate=True)
    on_cpu, on_gpu = build(config, dtype=torch.bfloat16), build(config, dtype=torch.bfloat16, device="cuda")
    for ours, theirs in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True):
        assert not ours.is_cuda and torch.equal(ours, theirs.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("moved", [True, False])
def test_first_forward_pass_on_a_gpu_may_be_compiled(moved):
    layer = build(replace(CONFIG, loss=WEIGHTS), **({} if moved else {"device": "cuda"})).cuda()
    layer.measure_gate()
    x = torch.randn(2, 16, 6, device="cuda")
    torch.compile(layer, backend="aot_eager")(x).sum().backward()
    assert layer.statistics.counts_E.sum() == 2 * 16 * CONFIG.top_k


def test_statistics_move_with_the_weights(monkeypatch):
    moves = []
    monkeypatch.setattr(LoadStatistics, "move_to", lambda _, device: moves.append(device.type))
    MoELayer(6, CONFIG, device="meta", context=BatchContext())
    assert moves == []
    layer = build()
    layer.double()
    layer.measure_gate()
    assert moves == ["cpu"] * 3


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_made_on_the_meta_device_counts_after_it_has_left_it(compiled):
    with torch.device("meta"):
        layer = MoELayer(6, CONFIG, context=BatchContext())
    layer.load_state_dict(build(dtype=torch.float32).state_dict(), assign=True)
    if compiled:
        layer.compile(backend="aot_eager")
    layer(torch.randn(4, 6)).sum().backward()
    assert layer.statistics.counts_E.sum() == 4 * CONFIG.top_k


def test_residual_projections_are_scaled_down_by_depth():
    layer = MoELayer(
        64,
        replace(CONFIG, expert_hidden_size=64, init_std=0.3, shared_expert_hidden_size=64),
        layer_index=0,
        num_layers=8,
        context=BatchContext(),
    )
    layer.reset_parameters()
    # 20,480 draws: the deviation of the sample is within 2% at four sigma
    assert layer.experts.w1_EFD.std().item() == pytest.approx(0.3, rel=0.02)
    assert layer.experts.w2_EDF.std().item() == pytest.approx(0.3 / 4, rel=0.02)
    for name, std in (("w1", 0.3), ("v1", 0.3), ("w2", 0.3 / 4)):  # 4096 draws: within 4.5%
        assert getattr(layer.shared_expert, name).weight.std().item() == pytest.approx(std, rel=0.045)


def test_an_upcycled_layer_starts_with_equal_gate_rows_per_group_and_a_silent_shared_expert():
    layer = build(replace(CONFIG, num_experts=6, shared_expert_hidden_size=4))
    layer.gate_groups, layer.zero_init_shared = 3, True
    layer.reset_parameters()
    first, second = layer.gate.weight_ED.view(2, 3, 6)
    assert (first == first[0]).all() and (second == second[0]).all() and not (first == second).any()
    assert not layer.shared_expert.w2.weight.any() and layer.shared_expert.w1.weight.all()


WEIGHTS = {"z": 0.05, "balance": 0.3}  # not in the order in which gates compute them


class Block(nn.Module):
    """A residual block around the layer, as in a transformer."""

    def __init__(self, layer: MoELayer, mode: str) -> None:
        super().__init__()
        self.layer, self.mode = layer, mode

    def forward(self, x):
        if self.mode == "plain":
            return x + self.layer(x)
        return x + checkpoint(self.layer, x, use_reentrant=self.mode == "reentrant")


def explicit_loss(layer: MoELayer, x_TD) -> torch.Tensor:
    """The weighted auxiliary losses from their formulas."""
    logits_TE = x_TD @ layer.gate.weight_ED.T
    probs_TE = logits_TE.softmax(-1)
    counts_E = torch.bincount(probs_TE.topk(2).indices.flatten(), minlength=5)
    balance = 5 * (counts_E / counts_E.sum() * probs_TE.mean(0)).sum()
    return WEIGHTS["balance"] * balance + WEIGHTS["z"] * logits_TE.logsumexp(-1).square().mean()


@pytest.mark.parametrize("mode", ["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_auxiliary_losses_count_exactly_once(mode, microbatches):
    """As a trainer does it: each microbatch's loss is scaled by its share, after the model has returned it."""
    context = BatchContext()
    layer = build(replace(CONFIG, loss=WEIGHTS), context)
    layer.measure_gate()
    block = Block(layer, mode)
    batches = torch.randn(microbatches, 8, 6, dtype=torch.float64)
    for x_TD in batches:
        loss = context.track_scale(block(x_TD.requires_grad_()).square().mean())
        (loss / microbatches).backward()
    ours = layer.gate.weight_ED.grad.clone()

    plain = build()
    total = sum((x + plain(x)).square().mean() + explicit_loss(plain, x) for x in batches.detach()) / microbatches
    total.backward()
    torch.testing.assert_close(ours, plain.gate.weight_ED.grad)
    statistics = layer.statistics
    assert statistics.scale_1.item() == pytest.approx(1)
    assert statistics.counts_E.sum() == microbatches * 8 * 2
    means = dict(zip(statistics.names, statistics.losses_L.tolist(), strict=True))
    logits_TE = (batches.detach().flatten(0, 1) @ plain.gate.weight_ED.T).detach()  # equal microbatches
    assert means["z"] == pytest.approx(logits_TE.logsumexp(-1).square().mean().item(), rel=1e-6)
    assert means["gate_entropy"] == pytest.approx(gate_entropy(logits_TE).item(), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives_are_refused_in_a_sentence(training):
    layer = build(replace(CONFIG, loss=WEIGHTS)).train(training)
    x_TD = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    y_TD = layer(x_TD)
    with pytest.raises(ValueError, match=r"create_graph \(True\): MoE layers have no second derivatives"):
        torch.autograd.grad(y_TD.square().sum(), x_TD, create_graph=True)
    torch.autograd.grad(layer(x_TD).square().sum(), x_TD)


def test_without_an_anchor_the_losses_weigh_one():
    layer = build(replace(CONFIG, loss=WEIGHTS))
    x_TD = torch.randn(8, 6, dtype=torch.float64)
    layer(x_TD).sum().backward()
    plain = build()
    (plain(x_TD).sum() + explicit_loss(plain, x_TD)).backward()
    torch.testing.assert_close(layer.gate.weight_ED.grad, plain.gate.weight_ED.grad)


def test_evaluation_and_inference_neither_count_nor_attach():
    layer = build(replace(CONFIG, loss=WEIGHTS))
    x_TD = torch.randn(8, 6, dtype=torch.float64)
    layer.eval()
    layer(x_TD).sum().backward()
    with torch.no_grad():
        layer.train()(x_TD)
    assert layer.statistics.scale_1.item() == 0 and layer.statistics.counts_E.sum() == 0


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("loss", [{"balance": 0.3}, {}], ids=["balance", "no-losses"])
def test_padding_takes_part_in_neither_loss_nor_statistics(loss, score):
    context = BatchContext()
    layer = build(replace(CONFIG, loss=loss, gate={"name": "topk", "score": score}), context)
    layer.measure_gate()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    mask_BS = torch.tensor([[True, True, False, False], [True, True, True, False]])
    context.set_tokens(None, mask_BS)
    layer(x).sum().backward()
    real_TD = x.reshape(-1, 6)[mask_BS.flatten()]
    logits_TE = real_TD @ layer.gate.weight_ED.T
    probs_TE = logits_TE.softmax(-1) if score == "softmax" else logits_TE.sigmoid()
    probs_TE = probs_TE / probs_TE.sum(-1, keepdim=True)
    counts_E = torch.bincount(probs_TE.topk(2).indices.flatten(), minlength=5)
    assert torch.equal(layer.statistics.counts_E, counts_E)
    expected = [balance(probs_TE.mean(0), counts_E).item()] if loss else []
    expected.append(torch.special.entr(probs_TE).sum(-1).mean().item() / math.log(5))
    assert layer.statistics.losses_L.tolist() == pytest.approx(expected, rel=1e-6)


def test_rows_of_the_input_are_sequences_where_no_ids_are_known():
    layer = build(replace(CONFIG, loss={"balance": 0.3}, balance_over="sequence"))
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    layer(x).sum().backward()
    probs_BSE = (x @ layer.gate.weight_ED.T).softmax(-1)
    counts = [torch.bincount(probs_SE.topk(2).indices.flatten(), minlength=5) for probs_SE in probs_BSE]
    expected = (
        sum(balance(probs_SE.mean(0), counts_E) for probs_SE, counts_E in zip(probs_BSE, counts, strict=True)) / 3
    )
    assert layer.statistics.losses_L.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_loss_that_the_gate_lacks_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"loss.balanse: gate topk has no such loss; did you mean 'balance'"):
        build(replace(CONFIG, loss={"balanse": 0.1}))
    with pytest.raises(ValueError, match=r"loss.load needs gate.noise: true and top_k \(5\) below num_experts \(5\)"):
        build(replace(CONFIG, top_k=5, gate={"name": "topk", "noise": True}, loss={"load": 0.1}))
    noisy = {"name": "topk", "noise": True}
    with pytest.raises(
        ValueError, match=r"loss.load does not support gate.bias_balance: true: .* remove load from loss"
    ):
        build(replace(CONFIG, gate={**noisy, "bias_balance": True}, loss={"load": 0.1}))
    limited = replace(CONFIG, num_experts=6, gate={**noisy, "groups": 3, "group_limit": 2}, loss={"load": 0.1})
    with pytest.raises(ValueError, match=r"loss.load does not support gate.group_limit \(2\)"):
        build(limited)
    build(replace(limited, gate={**limited.gate, "group_limit": 3}))
    assert build(replace(CONFIG, loss={"balance": 0, "z": 0.1})).wanted_losses == {"z"}


@pytest.mark.parametrize(
    ("gate", "sentence"),
    [
        ({"name": "topq"}, "there is no gate 'topq'"),
        ({"name": "topk", "scores": "softmax"}, "gate.scores is not a key of gate; did you mean 'score'"),
        ({"name": "topk", "score": "softmin"}, "'softmin' is not one of softmax, sigmoid"),
        ({"name": "topk", "jitter": 1.5}, r"jitter \(1.5\) must be at least 0 and below 1"),
    ],
)
def test_a_mistake_in_the_gate_is_named(gate, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(replace(CONFIG, gate=gate))


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("loss", [{}, WEIGHTS], ids=["no-losses", "losses"])
def test_compiled_layer_equals_the_eager_one(loss, on_mesh):
    """The reference experts break the graph, the rest is compiled. A gradient that differs from row to row.

    On a mesh the outputs of experts enter a graph as an input, and leave it as an alias of this input.
    """
    x_TD, direction = torch.randn(16, 6), torch.randn(16, 6)
    layers = [build(replace(CONFIG, loss=loss), dtype=torch.float32) for _ in range(2)]
    if on_mesh:
        layers[1].compute_experts = torch.compiler.disable(layers[1].compute_experts)
    layers[0](x_TD).backward(direction)
    torch.compile(layers[1], backend="aot_eager")(x_TD).backward(direction)
    for eager, compiled in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        torch.testing.assert_close(compiled.grad, eager.grad)
    assert torch.equal(layers[1].statistics.counts_E, layers[0].statistics.counts_E)
    assert layers[1].statistics.counts_E.sum() == 32
