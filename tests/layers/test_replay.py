"""Router replay: choices of another forward pass, or from outside, in every gate that has `top_k` of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from foundry_moe import BatchContext, MoEConfig, MoELayer, Progress, record_choices, replay_choices
from tests.helpers.gates import GATE_IDS, GATES

pytestmark = pytest.mark.quick
WIDTH, EXPERTS, VOCABULARY = 6, 8, 30
VARIABLE = ("dense_to_sparse", "expert_choice")


class Model(nn.Module):
    """Two residual MoE layers after an embedding; `mode` is plain, reentrant or non-reentrant."""

    def __init__(self, gate={"name": "topk"}, top_k=2, mode="plain", **keys):  # noqa: B006
        super().__init__()
        torch.manual_seed(3)
        config = MoEConfig(
            num_experts=EXPERTS, top_k=top_k, gate=gate, expert_hidden_size=5, activation="swiglu", init_std=0.7, **keys
        )
        context = BatchContext()
        context.progress = Progress(ba=0, dur=0.0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            MoELayer(WIDTH, config, layer_index=index, num_layers=2, context=context) for index in range(2)
        )
        self.mode = mode
        self.double()
        context.observe(self)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + (layer(x) if self.mode == "plain" else checkpoint(layer, x, use_reentrant=self.mode == "reentrant"))
        return x


def batch(seed=0, sequences=4):
    return torch.randint(VOCABULARY, (sequences, 8), generator=torch.Generator().manual_seed(seed))


def moved(model):
    """Changes every gate, so that it would choose other experts."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for layer in model.layers:
            for weight in layer.gate.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


def gradients(model, y):
    model.zero_grad()
    y.sin().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(found, expected):
    """Reentrant checkpointing adds a token's two gradients in another order: rounding of fp64."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-13, msg=name)


def looped(layer, x_TD, experts_TK):
    """The layer's output, token by token, for a topk gate with normalised weights."""
    rows, experts = [], layer.experts
    sigmoid = layer.gate.config.score == "sigmoid"
    for x_D, chosen_K in zip(x_TD, experts_TK.tolist(), strict=True):
        logits_E, y_D = layer.gate.weight_ED @ x_D, torch.zeros_like(x_D)
        probs_E = logits_E.sigmoid() if sigmoid else logits_E.softmax(-1)
        chosen = [e for e in chosen_K if e >= 0]
        for e in chosen:
            h_F = nn.functional.silu(experts.w1_EFD[e] @ x_D) * (experts.v1_EFD[e] @ x_D)
            y_D = y_D + probs_E[e] / probs_E[chosen].sum() * (experts.w2_EDF[e] @ h_F)
        rows.append(y_D)
    return torch.stack(rows)


@pytest.mark.parametrize(("dtype", "score"), [(torch.int16, "softmax"), (torch.int32, "sigmoid")])
def test_choices_from_outside_are_those_of_a_loop(dtype, score):
    model, ids = Model({"name": "topk", "score": score}, loss={}), batch()
    choices = torch.stack([torch.rand(32, 2, EXPERTS).argsort(-1)[..., 0], torch.randint(EXPERTS, (32, 2))], -1)
    choices[..., 1] = (choices[..., 0] + 1 + choices[..., 1] % (EXPERTS - 1)) % EXPERTS
    choices[5:8], choices[9, 0, 1] = -1, -1
    with record_choices(model) as record, replay_choices(model, choices.to(dtype)):
        ours = model(ids)
    assert (record.weights_TLK[choices < 0] == 0).all(), "no weight without an expert, and no 0 / 0"
    found = gradients(model, ours)
    x_TD = model.embed(ids.flatten())
    for column, layer in enumerate(model.layers):
        x_TD = x_TD + looped(layer, x_TD, choices[:, column])
    expected = gradients(model, x_TD.view_as(ours))
    torch.testing.assert_close(ours.flatten(0, 1), x_TD, rtol=1e-12, atol=1e-13)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-13, msg=name)
    assert model.layers[0].gate.weight_ED.grad.abs().max() > 0


def generated(model, ids):
    """The record of a generation with a cache: the prompts, then one position of all sequences after the other."""
    with torch.no_grad(), record_choices(model) as record:
        for first, end in ((0, 6), (6, 7), (7, 8)):
            model(ids[:, first:end])
    return record


@pytest.mark.parametrize("sequences", [1, 4])
def test_whole_sequences_take_what_was_recorded_while_they_were_generated(sequences):
    model, ids = Model(loss={}), batch(sequences=sequences)
    record = generated(model, ids)
    expected = model(ids).detach()
    moved(model)
    with replay_choices(model, record, weights=record.weights_TLK):
        again = [model(part) for part in ids.chunk(2)]
    torch.testing.assert_close(torch.cat(again), expected, rtol=1e-12, atol=1e-13)
    with replay_choices(model, record, weights=record.weights_TLK):
        steps = [model(part) for part in ids.split([6, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(1, 64), (4, 16), (16, 4)], ids=str)
def test_passes_of_one_length_are_replayed_in_their_order_in_any_form(shape):
    model, ids = Model(loss={}), batch(sequences=8)
    with torch.no_grad(), record_choices(model) as record:
        expected = torch.cat([model(part) for part in ids.chunk(2)])
    moved(model)
    with replay_choices(model, record, weights=record.weights_TLK):
        packed = model(ids.view(shape))
    torch.testing.assert_close(packed.view_as(expected), expected, rtol=1e-12, atol=1e-13)


def test_sequences_of_another_length_than_generated_are_refused():
    model, ids = Model(loss={}), batch()
    record = generated(model, ids)
    wrong = r"calls of .* \[4, 6\], \[4, 1\], \[4, 1\], and .* \[8, 4\]: .* of 8 positions"
    with pytest.raises(ValueError, match=wrong), replay_choices(model, record):
        model(ids.view(8, 4))


@pytest.mark.parametrize(("gate", "top_k"), GATES, ids=GATE_IDS)
def test_replaying_its_own_choices_changes_no_number_and_others_are_kept(gate, top_k):
    keys = {"loss": {}} if gate["name"] in ("base", "hash") else {}
    if gate.get("noise"):
        keys["loss"] = {"balance": 0.1, "z": 0.1, "importance": 0.1}
    if gate["name"] == "hierarchical":
        keys["loss"] = {"balance": 0.1, "alignment": 0.1}
    with pytest.warns(UserWarning) if gate["name"] == "expert_choice" else torch.enable_grad():
        model = Model(gate, top_k, **keys)
    ids = batch()
    if gate["name"] in VARIABLE:
        with pytest.raises(ValueError, match=f"gate {gate['name']} cannot be replayed"), record_choices(model):
            pass
        return
    with record_choices(model) as choices:
        y = model(ids)
    expected, counts = gradients(model, y), model.layers[1].statistics.counts_E.clone()
    assert choices.experts_TLK.shape == (32, 2, top_k) and choices.experts_TLK.dtype == torch.int16
    assert not choices.weights_TLK.requires_grad
    with record_choices(model) as again, replay_choices(model, choices):
        replayed = model(ids)
    assert torch.equal(again.experts_TLK, choices.experts_TLK)
    torch.testing.assert_close(replayed, y, rtol=1e-13, atol=1e-13)
    for name, gradient in gradients(model, replayed).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-11, atol=1e-12, msg=name)
    assert torch.equal(model.layers[1].statistics.counts_E, 2 * counts)
    moved(model)
    with record_choices(model) as others:
        model(ids)
    with record_choices(model) as again, replay_choices(model, choices):
        model(ids)
    assert gate["name"] == "hash" or not torch.equal(others.experts_TLK, choices.experts_TLK)
    assert torch.equal(again.experts_TLK, choices.experts_TLK)
    same = torch.equal(again.weights_TLK, choices.weights_TLK)
    assert same == (gate["name"] == "hash"), "weights are computed anew"
    with record_choices(model) as again, replay_choices(model, choices, weights=choices.weights_TLK):
        model(ids)
    assert torch.equal(again.weights_TLK, choices.weights_TLK)


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_a_recomputation_replays_what_its_own_pass_did(mode):
    """Microbatches, other passes in between, and backward passes after the context: as without checkpointing."""
    seen = {}
    for kind in ("plain", mode):
        model = Model(mode=kind)
        with record_choices(model) as choices:
            for seed in range(3):
                model(batch(seed))
        moved(model)
        with replay_choices(model, choices):
            outputs = [model(batch(seed)) for seed in range(3)]
        model(batch(7))
        with record_choices(model) as late, replay_choices(model, choices.experts_TLK[:32]):
            model(batch(9))
            seen[kind] = [gradients(model, y) for y in reversed(outputs)]
        assert len(late.experts_TLK) == 32, "a recomputation records nothing"
        seen[kind].append({"counts": model.layers[1].statistics.counts_E.clone()})
    for expected, found in zip(*seen.values(), strict=True):
        same(found, expected)


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_two_passes_of_one_backward_pass_keep_their_own(mode):
    seen = []
    for kind in ("plain", mode):
        model = Model(mode=kind)
        with record_choices(model) as choices:
            model(batch(0)), model(batch(1, 2))
        moved(model)
        with replay_choices(model, choices):
            first, second = model(batch(0)), model(batch(1, 2))
        seen.append(gradients(model, torch.cat([first, second])))
    same(*seen)


def test_padded_tokens_have_no_choice_and_losses_count_what_was_computed():
    model, ids, mask = Model(loss={"balance": 0.1}), batch(), torch.ones(4, 8)
    mask[1, 5:] = 0
    with record_choices(model) as choices:
        y = model(ids, mask)
    padded_T = mask.flatten() == 0
    assert (choices.experts_TLK[padded_T] == -1).all() and (choices.experts_TLK[~padded_T] >= 0).all()
    moved(model)
    for layer in model.layers:
        layer.statistics.reset()
    with replay_choices(model, choices):
        gradients(model, model(ids, mask))
    for column, layer in enumerate(model.layers):
        counts = torch.bincount(choices.experts_TLK[~padded_T, column].flatten().long(), minlength=EXPERTS)
        assert torch.equal(layer.statistics.counts_E, counts)
    del y


@pytest.mark.parametrize("drop", ["position", "weight"])
@pytest.mark.parametrize("balance_over", ["rank", "sequence"])
def test_capacity_and_losses_over_sequences_are_those_of_the_first_pass(drop, balance_over):
    model, ids = Model(capacity=1.0, drop=drop, balance_over=balance_over, loss={"balance": 0.1}), batch()
    with record_choices(model) as choices:
        y = model(ids)
    expected = gradients(model, y)
    with replay_choices(model, choices):
        found = gradients(model, model(ids))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


GOOD = torch.zeros(32, 2, 2, dtype=torch.int16)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (GOOD[:31], "choices has 31 tokens, and the forward passes have 32 or more"),
        (torch.cat([GOOD, GOOD[:1]]), "choices has 33 tokens, and the forward passes took 32"),
        (GOOD[:, :1], "choices has 1 layers, and the model's MoE layers 2"),
        (GOOD[..., :1], r"choices has 1 choices per token \(top_k\), and the model's MoE layers 2"),
        (GOOD + 8, "choices has expert 8: use 0 to 7, or -1 for none"),
        (GOOD - 2, "choices has expert -2: use 0 to 7, or -1 for none"),
        (GOOD.float(), r"choices \(torch.float32, \[32, 2, 2\]\) must be int16 or int32"),
    ],
)
def test_wrong_choices_are_refused_in_a_sentence(choices, message):
    model = Model()
    with pytest.raises(ValueError, match=message), replay_choices(model, choices):
        model(batch())
    assert model.layers[0].context.replay is None


def test_a_pass_that_counts_ahead_leaves_the_choices_to_the_microbatches():
    model, ids = Model(balance_over="batch", loss={"balance": 0.1}), batch()
    with record_choices(model) as choices:
        model(ids)
    moved(model)
    with replay_choices(model, choices), record_choices(model) as again:
        model.layers[0].context.count_ahead(lambda: [model(part) for part in ids.split(2)])
        for part in ids.split(2):
            model(part)
    assert torch.equal(again.experts_TLK, choices.experts_TLK.repeat(2, 1, 1))


def test_an_outer_record_and_replay_continue_after_an_inner_one():
    model, outside, inside = Model(), torch.cat([GOOD, GOOD + 1]), GOOD + 2
    with record_choices(model) as outer, replay_choices(model, outside):
        model(batch())
        with record_choices(model) as inner, replay_choices(model, inside):
            model(batch())
        model(batch())
    assert torch.equal(inner.experts_TLK, inside) and torch.equal(outer.experts_TLK, outside)


def test_other_misuses_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="need a model with MoE layers"), record_choices(nn.Linear(2, 2)):
        pass
    model = Model()
    with record_choices(model) as choices:
        pass
    with pytest.raises(ValueError, match=r"recorded \[0, 0\] tokens"), replay_choices(model, choices):
        pass
    with pytest.raises(ValueError, match=r"weights \[1\] must have the shape"):
        with replay_choices(model, GOOD, weights=torch.ones(1)):
            pass


def test_each_layer_is_recorded_again_as_it_was_before():
    model, ids = Model(), batch()
    with record_choices(model.layers[1]) as part:
        with record_choices(model) as whole:
            model(ids)
        model(batch(1))
        assert model.layers[0].record is None
    assert model.layers[1].record is None and len(part.experts_TLK) == len(whole.experts_TLK) == ids.numel()
    assert whole.experts_TLK.shape[1] == 2 and part.experts_TLK.shape[1] == 1
    assert not torch.equal(part.experts_TLK[:, 0], whole.experts_TLK[:, 1])
