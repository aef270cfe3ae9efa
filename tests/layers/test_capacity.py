"""Token dropping: who is dropped, what the others get, and that dropping nothing is the dropless layer."""

from dataclasses import replace

import pytest
import torch

from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.dispatch import Dispatcher
from foundry_moe.layers.gates.gate import Choices
from foundry_moe.layers.moe import MoELayer
from foundry_moe.ops.capacity import capacity_of, drop_beyond_capacity

CONFIG = MoEConfig(num_experts=5, top_k=2, expert_hidden_size=7, activation="swiglu", init_std=0.5, loss={})


def build(config=CONFIG, context=None) -> MoELayer:
    layer = MoELayer(
        6, config, layer_index=1, num_layers=3, context=context or BatchContext(), dtype=torch.float64
    )  # fmt: skip
    layer.reset_parameters()
    return layer


def dropless(layer, x_TD, experts_TK, weights_TK):
    """What the layer's experts make of choices of which none is dropped."""
    dispatcher = Dispatcher(layer.num_experts)
    rows = dispatcher.dispatch(x_TD, Choices(experts_TK=experts_TK, weights_TK=weights_TK))
    return dispatcher.combine(layer.experts(rows))


@pytest.mark.parametrize(
    ("factor", "tokens", "top_k", "experts", "slots"),
    [(1.0, 100, 1, 10, 10), (1.25, 100, 2, 10, 25), (1.0, 7, 2, 5, 3), (1.1, 100, 1, 1, 110), (0.01, 5, 1, 5, 1)],
)
def test_places_are_the_factor_times_the_even_share_rounded_up(factor, tokens, top_k, experts, slots):
    assert capacity_of(factor, tokens, top_k, experts) == slots


@pytest.mark.parametrize("mask_T", [None, torch.ones(100, dtype=torch.bool)])
def test_a_factor_that_binary_numbers_round_up_gives_no_place_more(mask_T):
    """0.07 * 100 is 7.000000000000001."""
    kept_TK = drop_beyond_capacity(torch.zeros(100, 1, dtype=torch.long), 1, top_k=1, factor=0.07, mask_T=mask_T)
    assert (kept_TK >= 0).sum() == 7


def naive_places(experts_TK, experts, room):
    """First choices before second ones, earlier tokens before later ones: algorithm 1 of GShard, in a loop."""
    taken = [0] * experts
    kept = torch.zeros_like(experts_TK, dtype=torch.bool)
    for k in range(experts_TK.shape[1]):
        for t in range(experts_TK.shape[0]):
            e = int(experts_TK[t, k])
            if e >= 0 and taken[e] < room:
                taken[e] += 1
                kept[t, k] = True
    return kept


@pytest.mark.quick
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 3.0])
@pytest.mark.parametrize("kind", ["random", "ragged", "all to one", "none chosen"])
@pytest.mark.parametrize("weighted", [False, True])
def test_places_go_to_first_choices_first_or_to_the_heaviest(factor, kind, weighted):
    """Offsets taken from the wrong choice's mask make first and second choices collide in one place."""
    generator = torch.Generator().manual_seed(0)
    experts_TK = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(23)])
    if kind == "ragged":
        experts_TK[torch.rand(23, 3, generator=generator) < 0.4] = -1
    elif kind == "all to one":
        experts_TK[:, 0] = 4
        experts_TK[:, 1:] = -1
    elif kind == "none chosen":
        experts_TK.fill_(-1)
    # few different weights, so that many choices are equal
    weights_TK = torch.randint(4, (23, 3), generator=generator) / 3
    room = capacity_of(factor, 23, 3, 5)
    truth_TK = naive_places(experts_TK, 5, room)
    if weighted:
        truth_TK = torch.zeros_like(truth_TK)
        for e in range(5):
            mine = [(t, k) for k in range(3) for t in range(23) if experts_TK[t, k] == e]
            for at in sorted(mine, key=lambda at: -weights_TK[at].item())[:room]:  # stable: first choices first
                truth_TK[at] = True
    kept_TK = drop_beyond_capacity(experts_TK, 5, top_k=3, factor=factor, weights_TK=weights_TK if weighted else None)
    assert torch.equal(kept_TK, experts_TK.masked_fill(~truth_TK, -1))


@pytest.mark.quick
def test_dropping_nothing_is_the_dropless_layer_in_outputs_and_every_gradient():
    x_TD = torch.randn(17, 6, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x_TD)
    results = []
    for config in (CONFIG, replace(CONFIG, capacity=5.0)):
        layer = build(config)
        y_TD = layer(x_TD)
        results.append([y_TD, *torch.autograd.grad(y_TD, [x_TD, *layer.parameters()], direction)])
    for dropless, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, dropless)


@pytest.mark.quick
@pytest.mark.parametrize("width", [7, (3, 5, 7, 9, 11)])
def test_a_dropped_choice_adds_nothing_and_the_share_is_reported(width):
    layer = build(replace(CONFIG, capacity=0.5, expert_hidden_size=width))
    x_TD = torch.randn(20, 6, dtype=torch.float64)
    y_TD = layer(x_TD)
    choices = layer.gate(x_TD, BatchContext().for_tokens(20))
    kept_TK = naive_places(choices.experts_TK, 5, 4)
    assert not kept_TK.all()
    truth_TD = dropless(layer, x_TD, choices.experts_TK.masked_fill(~kept_TK, -1), choices.weights_TK)
    torch.testing.assert_close(y_TD, truth_TD)
    assert (y_TD[~kept_TK.any(1)] == 0).all()
    y_TD.sum().backward()
    assert layer.statistics.losses_L.item() == pytest.approx(1 - kept_TK.double().mean().item())
    # the load is what tokens wanted, dropped or not
    assert layer.statistics.counts_E.sum() == 40


def test_dropping_by_weight_keeps_the_choices_that_weigh_most():
    x_TD = torch.randn(20, 6, dtype=torch.float64)
    layer = build(replace(CONFIG, capacity=0.5, drop="weight"))
    choices = layer.gate(x_TD, BatchContext().for_tokens(20))
    kept_TK = torch.zeros(20, 2, dtype=torch.bool)
    for e in range(5):
        mine = (choices.experts_TK == e).nonzero().tolist()
        for t, k in sorted(mine, key=lambda at: -choices.weights_TK[at[0], at[1]].item())[:4]:
            kept_TK[t, k] = True
    assert not torch.equal(kept_TK, naive_places(choices.experts_TK, 5, 4))
    truth_TD = dropless(layer, x_TD, choices.experts_TK.masked_fill(~kept_TK, -1), choices.weights_TK)
    torch.testing.assert_close(layer(x_TD), truth_TD)


def test_padding_takes_no_place():
    context = BatchContext()
    layer = build(replace(CONFIG, capacity=2.0, num_experts=2, top_k=1, gate={"name": "topk"}), context)
    with torch.no_grad():
        layer.gate.weight_ED[0], layer.gate.weight_ED[1] = 1.0, -1.0
    x = torch.ones(1, 8, 6, dtype=torch.float64)  # all to expert 0, which has 4 slots for 4 real tokens
    context.set_tokens(torch.zeros(1, 8, dtype=torch.long), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]))
    y = layer(x)
    assert (y[0, :4] == 0).all() and (y[0, 4:] != 0).all()
    y.sum().backward()
    assert layer.statistics.losses_L.item() == 0


@pytest.mark.parametrize("drop", ["position", "weight"])
@pytest.mark.parametrize("positions", [12, 24, 48])
def test_a_capacity_counts_real_tokens(positions, drop):
    """24 tokens in two rows drop what they drop without padding."""
    config = replace(CONFIG, capacity=0.5, drop=drop)
    x = torch.randn(2, positions, 6, dtype=torch.float64, requires_grad=True)
    x_TD = x.detach()[:, :12].reshape(-1, 6).requires_grad_()
    alone, padded = build(config), build(config)
    truth_TD = alone(x_TD)
    padded.context.set_tokens(torch.zeros(2, positions).long(), (torch.arange(positions) < 12).expand(2, -1))
    y = padded(x)
    torch.testing.assert_close(y[:, :12].reshape(-1, 6), truth_TD)
    y[:, :12].sum().backward()
    truth_TD.sum().backward()
    torch.testing.assert_close(x.grad[:, :12].reshape(-1, 6), x_TD.grad)
    assert alone.statistics.losses_L.item() > 0
    assert padded.statistics.losses_L.item() == pytest.approx(alone.statistics.losses_L.item())


@pytest.mark.parametrize("capacity", [0, -1, "static"])
def test_a_capacity_that_cannot_be_is_refused(capacity):
    from foundry_moe.schema import from_mapping

    with pytest.raises(ValueError, match="capacity"):
        from_mapping(MoEConfig, {"num_experts": 4, "capacity": capacity}, "algorithms.dmoe")


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"capacity": 1.0, "drop": "wieght"}, "did you mean 'weight'"),
        ({"drop": "weight"}, "needs a capacity factor"),
    ],
)
def test_a_way_to_drop_that_cannot_be_is_refused(keys, sentence):
    from foundry_moe.schema import from_mapping

    with pytest.raises(ValueError, match=sentence):
        from_mapping(MoEConfig, {"num_experts": 4, **keys}, "algorithms.dmoe")


def test_a_compiled_layer_drops_what_the_eager_one_drops():
    x_TD, direction = torch.randn(16, 6, dtype=torch.float64), torch.randn(16, 6, dtype=torch.float64)
    layers = [build(replace(CONFIG, capacity=0.6)) for _ in range(2)]
    layers[0](x_TD).backward(direction)
    torch.compile(layers[1], backend="aot_eager")(x_TD).backward(direction)
    for eager, compiled in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        torch.testing.assert_close(compiled.grad, eager.grad)
    torch.testing.assert_close(layers[1].statistics.losses_L, layers[0].statistics.losses_L)
