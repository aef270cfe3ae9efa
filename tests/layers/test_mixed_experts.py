"""`expert_hidden_size` as a list: what is refused, what is drawn, and how ranks share it."""

import pytest
import torch

from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.experts import Experts, MixedExperts
from foundry_moe.layers.moe import MoELayer
from foundry_moe.optim.matrices import find_matrices
from foundry_moe.parallel.mesh import check_expert_widths

pytestmark = pytest.mark.quick


def config(widths, **more):
    return MoEConfig(**{"num_experts": 4, "top_k": 2, "expert_hidden_size": widths, "activation": "swiglu", **more})


def test_widths_must_be_one_for_each_expert_and_positive():
    with pytest.raises(ValueError, match="has 3 widths, but num_experts is 4"):
        config((8, 8, 16))
    with pytest.raises(ValueError, match=r"\[8, 0, 16, 8\].: every width must be 1 or more"):
        config((8, 0, 16, 8))


def test_equal_widths_are_one_width():
    assert config((8, 8, 8, 8)).expert_hidden_size == 8


@pytest.mark.parametrize(
    ("key", "value", "use"),
    [
        ("backend", "grouped", "auto or blocksparse or reference"),
        ("init", "upcycle", "auto"),
    ],
)
def test_what_wants_one_width_is_refused(key, value, use):
    with pytest.raises(ValueError, match=f"{key} .{value}. does not support .* different widths: use {key}: {use}"):
        config((8, 16, 8, 16), **{key: value})


def test_each_expert_is_drawn_as_it_would_be_among_others_of_its_width():
    mixed = MixedExperts(widths=(8, 16, 8, 24), d_model=12, activation="swiglu", num_layers=2)
    mixed.reset_parameters(seed=3, layer=1)
    alike = Experts(num_experts=4, hidden_size=16, d_model=12, activation="swiglu", num_layers=2)
    alike.reset_parameters(seed=3, layer=1)
    for name, expected in (("w1_HD", alike.w1_EFD), ("v1_HD", alike.v1_EFD), ("w2_HD", alike.w2_EDF.mT)):
        assert torch.equal(mixed.get_parameter(name)[8:24], expected[1])
        assert mixed.get_parameter(name).std() > 0


def test_parts_are_drawn_as_slices_of_the_whole():
    mixed = MixedExperts(widths=(8, 16, 8, 24), d_model=12, activation="swiglu", num_layers=2)
    mixed.reset_parameters(seed=3, layer=1)
    part = torch.empty(20, 6)
    for name in ("w1_HD", "w2_HD"):
        mixed.draw_(name, part, range(5, 25), range(6, 12), seed=3, layer=1)
        assert torch.equal(part, mixed.get_parameter(name)[5:25, 6:])
    alike = Experts(num_experts=4, hidden_size=16, d_model=12, activation="swiglu", num_layers=2)
    alike.reset_parameters(seed=3, layer=1)
    part = torch.empty(2, 5, 12)
    alike.draw_("w1_EFD", part, range(1, 3), range(6, 11), seed=3, layer=1)
    assert torch.equal(part, alike.w1_EFD[1:3, 6:11])


def test_a_rank_computes_with_the_widths_of_the_experts_that_it_holds():
    mixed = MixedExperts(widths=(8, 16, 4, 24), d_model=12, activation="swiglu", num_layers=2)
    mixed.held = range(1, 3)
    assert mixed.options()["widths"] == (16, 4)
    assert find_matrices(mixed)[mixed.w1_HD].blocks == (slice(0, 16), slice(16, 20))  # of its rows


def test_weights_of_other_widths_with_the_same_sum_are_refused(tmp_path):
    models = [
        torch.nn.Sequential(MixedExperts(widths=widths, d_model=12, activation="swiglu", num_layers=2))
        for widths in ((8, 16, 4, 24), (16, 8, 4, 24))
    ]
    for seed, model in enumerate(models):
        model[0].reset_parameters(seed=seed, layer=0)
    torch.save(models[0].state_dict(), tmp_path / "weights.pt")
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    models[0].load_state_dict(saved)
    assert sorted(saved) == ["0.v1_HD", "0.w1_HD", "0.w2_HD"]
    kept = models[1][0].w1_HD.clone()
    with pytest.raises(RuntimeError, match=r"0 has experts of widths \(16, 8, 4, 24\), .* of \(8, 16, 4, 24\)"):
        models[1].load_state_dict(saved)
    assert torch.equal(models[1][0].w1_HD, kept)
    models[1].load_state_dict(dict(saved))  # without torch's metadata there are tensors alone


def test_a_layer_trains_every_expert():
    layer = MoELayer(12, config((8, 16, 4, 24)), layer_index=0, num_layers=1, context=BatchContext())
    layer.reset_parameters()
    x = torch.randn(64, 12, requires_grad=True)
    layer(x).square().sum().backward()
    rows = layer.experts.w1_HD.grad.abs().sum(1)
    assert all(part.any() for part in rows.split([8, 16, 4, 24])) and x.grad.any()


def test_ranks_hold_equal_bytes():
    check_expert_widths((8, 24, 16, 16), 2)
    with pytest.raises(ValueError, match=r"consecutive experts are 16 or 48; use another order of the widths"):
        check_expert_widths((8, 8, 24, 24), 2)
    with pytest.raises(ValueError, match=r"are 16 or 40; use another order"):
        check_expert_widths((8, 8, 16, 24), 2)
