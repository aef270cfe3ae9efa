"""`base`: the assignment's loads, its weights, its embeddings."""

import pytest
import torch

from foundry_moe.ops.assignment import assign
from tests.helpers.gates import WIDTH, batch, build, context_of


def test_training_assigns_evenly_and_weighs_by_the_sigmoid():
    gate = build({"name": "base"}, 1).train()
    ids_BS, x_TD = batch(sequences=5, positions=7)
    choices = gate(x_TD, context_of(ids_BS))
    loads_E = torch.bincount(choices.experts_TK[:, 0], minlength=8)
    assert sorted(loads_E.tolist()) == [4, 4, 4, 4, 4, 5, 5, 5]  # 35 tokens over 8 experts
    logits_TE = x_TD @ gate.weight_ED.T
    assert torch.equal(choices.experts_TK[:, 0], assign(logits_TE.detach()))
    torch.testing.assert_close(choices.weights_TK, logits_TE.gather(1, choices.experts_TK).sigmoid())


def test_tokens_are_shuffled_anew_in_each_layer_and_step_and_experts_taken_back():
    gate = build({"name": "base"}, 1).train()
    ids_BS, x_TD = batch(sequences=1, positions=8)  # as many tokens as experts
    streams = []

    def reverse(rows_TX, stream):
        streams.append(stream)
        return rows_TX.flip(0), lambda expert_S: expert_S.flip(0)

    for layer, step in ((1, 0), (1, 1), (2, 0)):
        choices = gate(x_TD, context_of(ids_BS, layer=layer, step=step, shuffle=reverse))
    logits_TE = (x_TD @ gate.weight_ED.T).detach()
    assert torch.equal(choices.experts_TK[:, 0], assign(logits_TE.flip(0)).flip(0))
    assert len(set(streams)) == 3


def test_evaluation_takes_each_tokens_best_expert():
    gate = build({"name": "base"}, 1).eval()
    ids_BS, x_TD = batch(sequences=1, positions=3)  # fewer tokens than experts
    choices = gate(x_TD, context_of(ids_BS, training=False))
    assert torch.equal(choices.experts_TK[:, 0], (x_TD @ gate.weight_ED.T).argmax(-1))


@pytest.mark.parametrize("experts", [4, 6, 9])
def test_embeddings_start_orthogonal(experts):
    weight_ED = build({"name": "base"}, 1, experts=experts).weight_ED / 0.1
    product = weight_ED @ weight_ED.T if experts <= WIDTH else weight_ED.T @ weight_ED
    # drawn and decomposed in fp32
    torch.testing.assert_close(product, torch.eye(min(experts, WIDTH)).double(), atol=1e-5, rtol=0)


def test_embeddings_of_chosen_experts_learn():
    gate = build({"name": "base"}, 1).train()
    ids_BS, x_TD = batch()
    gate(x_TD, context_of(ids_BS)).weights_TK.sum().backward()
    assert (gate.weight_ED.grad.norm(dim=1) > 0).all()


def test_padding_has_no_expert():
    gate = build({"name": "base"}, 1).train()
    ids_BS, x_TD = batch()
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[:, 6:] = 0
    choices = gate(x_TD, context_of(ids_BS, mask_BS))
    real_T = mask_BS.flatten().bool()
    assert (choices.experts_TK[~real_T] == -1).all() and (choices.weights_TK[~real_T] == 0).all()
    assert torch.bincount(choices.experts_TK[real_T][:, 0], minlength=8).tolist() == [3] * 8


def test_fewer_tokens_than_experts_are_refused_in_training():
    gate = build({"name": "base"}, 1).train()
    ids_BS, x_TD = batch(sequences=1, positions=7)
    with pytest.raises(ValueError, match=r"7 tokens are fewer than num_experts \(8\)"):
        gate(x_TD, context_of(ids_BS))
