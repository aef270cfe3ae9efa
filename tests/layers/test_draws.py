"""Random streams: independent where they must be."""

import dataclasses
import itertools

import pytest
import torch

from foundry_moe.callbacks.elastic_state import reseed
from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext, GateContext
from foundry_moe.layers.gates import base, dense_to_sparse, gate, gshard, hash, topk
from foundry_moe.layers.moe import MoELayer
from foundry_moe.layers.schedule import Progress
from foundry_moe.ops import noise
from tests.helpers.gates import batch, build, context_of

pytestmark = pytest.mark.quick


def drawn_matrices(seed: int, layer_index: int) -> dict[str, torch.Tensor]:
    """Every drawn matrix of a layer, by layer, name and expert, over its deviation."""
    config = MoEConfig(
        num_experts=3, top_k=2, expert_hidden_size=6, activation="swiglu", shared_expert_hidden_size=6,
        shared_expert_gate=True, loss={}, seed=seed,
    )  # fmt: skip
    layer = MoELayer(6, config, layer_index=layer_index, num_layers=3, context=BatchContext(), dtype=torch.float64)
    layer.reset_parameters()
    matrices = {}
    for name, parameter in layer.named_parameters():
        for expert, matrix in enumerate(parameter if parameter.dim() == 3 else [parameter]):
            if matrix.any():
                std = 1 / layer.config.init_std if "w2" not in name else 6**0.5 / layer.config.init_std
                matrices[f"{seed}/{layer_index}/{name}/{expert}"] = std * matrix.detach().flatten()[:6]
    return matrices


def test_no_two_matrices_of_any_seed_layer_name_or_expert_start_equal():
    matrices = {}
    for seed, layer in itertools.product((1, 2), (0, 1)):
        matrices |= drawn_matrices(seed, layer)
    assert len(matrices) == 4 * (3 * 3 + 1 + 3 + 1)  # experts, gate, shared expert and its gate
    for (one, a), (other, b) in itertools.combinations(matrices.items(), 2):
        assert not torch.isclose(a, b, rtol=1e-4, atol=1e-4).all(), f"{one} starts as {other}"


@pytest.mark.parametrize(
    ("settings", "top_k"),
    [
        ({"name": "switch", "jitter": 0.3}, 1),
        ({"name": "topk", "noise": True}, 2),
        ({"name": "topk", "jitter": 0.3}, 2),
        ({"name": "gshard"}, 2),
        ({"name": "dense_to_sparse", "threshold": 0.05}, 1),
    ],
)
def test_what_a_gate_draws_differs_by_seed_layer_and_step(settings, top_k):
    gate = build(settings, top_k).train()
    ids_BS, x_TD = batch(sequences=16)
    context = context_of(ids_BS, losses=frozenset())
    outcomes = {}
    for seed, layer, step in itertools.product((5, 6), (1, 2), (0, 1)):
        where = dataclasses.replace(context, seed=seed, layer=layer, progress=Progress(ba=step, dur=0.0))
        choices, again = gate(x_TD, where), gate(x_TD, where)
        assert torch.equal(choices.weights_TK, again.weights_TK), "a recomputed layer draws other numbers"
        outcomes[seed, layer, step] = torch.zeros(x_TD.shape[0], 9, dtype=torch.float64).scatter(
            1, choices.experts_TK.clamp(min=-1) + 1, choices.weights_TK.detach()
        )[:, 1:]
    for (one, a), (other, b) in itertools.combinations(outcomes.items(), 2):
        assert not torch.equal(a, b), f"(seed, layer, step) {one} draws as {other}"


def test_the_first_number_of_a_token_without_ids_differs_by_seed_layer_and_step():
    drawn = set()
    for seed, layer, step in itertools.product(range(3), repeat=3):
        context = GateContext(seed=seed, layer=layer, progress=Progress(ba=step))
        drawn.add(noise.uniform(context.token_keys(1, torch.device("cpu")), 1, context.stream(0)).item())
    assert len(drawn) == 27


def test_initial_weights_do_not_depend_on_torchs_default_dtype():
    expected = drawn_matrices(1, 0)
    torch.set_default_dtype(torch.float64)
    try:
        found = drawn_matrices(1, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[name], matrix) for name, matrix in expected.items())


def test_no_two_purposes_share_a_stream():
    """Of (seed, layer, step): jitter, noise, second choices and so on of one layer."""
    purposes = [gate._JITTER, topk._NOISE, gshard._SECOND, dense_to_sparse._GUMBEL, hash._TOKEN, hash._PAIR]
    assert len({*purposes, base._SHUFFLE}) == 7


def test_generators_differ_by_seed_batch_and_rank_alone():
    def draw(*key: int) -> tuple[float, ...]:
        reseed(*key)
        return tuple(torch.rand(3).tolist())

    keys = list(itertools.product((1, 2), (3, 4), (0, 1)))
    assert len({draw(*key) for key in keys}) == len(keys)
    assert draw(1, 3, 0) == draw(1, 3, 0)
