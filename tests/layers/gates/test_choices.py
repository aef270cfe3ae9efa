"""Each gate against its paper, token by token, in fp64."""

import dataclasses
import json
import math
import warnings

import pytest
import torch

from foundry_moe.layers.gates import dense_to_sparse
from foundry_moe.layers.gates.hash import balance_by_frequency
from foundry_moe.layers.losses import alignment_loss, chosen_with_new_noise, variation_squared
from foundry_moe.layers.schedule import Progress
from foundry_moe.ops import noise
from tests.helpers.gates import WIDTH, batch, build, context_of

pytestmark = pytest.mark.quick


def probs_of(gate, x_TD):
    return (x_TD @ gate.weight_ED.T).softmax(-1)


def test_switch_weighs_by_the_probability_itself():
    gate = build({"name": "switch"}, 1).eval()
    ids_BS, x_TD = batch()
    choices = gate(x_TD, context_of(ids_BS, training=False))
    best = probs_of(gate, x_TD).max(-1)
    assert torch.equal(choices.experts_TK[:, 0], best.indices)
    torch.testing.assert_close(choices.weights_TK[:, 0], best.values)


def test_switch_jitter_stays_in_its_bounds_and_off_in_evaluation():
    gate = build({"name": "switch", "jitter": {"start": 0.0, "end": 0.3, "until": "4ba"}}, 1)
    with torch.no_grad():
        gate.weight_ED.zero_()[0] = 1.0  # the logit of expert 0 is the sum of the inputs
    ids_BS, _ = batch(sequences=64, positions=32)
    x_TD = torch.ones(ids_BS.numel(), WIDTH, dtype=torch.float64)
    assert (gate.train()(x_TD, context_of(ids_BS)).logits_TE[:, 0] == WIDTH).all()
    jittered = gate(x_TD, context_of(ids_BS, step=4)).logits_TE[:, 0] / WIDTH
    assert (jittered - 1).abs().max() <= 0.3 and jittered.unique().numel() > 0.9 * jittered.numel()
    # the mean of 6 draws of U[0.7, 1.3] has deviation 0.3 / sqrt(18); 2048 tokens
    assert jittered.mean().item() == pytest.approx(1.0, abs=0.01)
    assert jittered.std().item() == pytest.approx(0.3 / math.sqrt(18), rel=0.1)
    assert gate.eval()(x_TD, context_of(ids_BS, training=False)).logits_TE[0, 0] == WIDTH


def test_jitter_passes_the_gradient_of_what_it_computed():
    gate = build({"name": "switch", "jitter": 0.3}, 1).train()
    ids_BS, x_TD = batch(sequences=1, positions=3)
    context = context_of(ids_BS)
    x_TD = x_TD.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gate(x, context).logits_TE, (x_TD,))


def test_gshard_keeps_the_second_expert_with_twice_its_weight():
    gate = build({"name": "gshard"}, 2).train()
    ids_BS, x_TD = batch(sequences=400, positions=10, vocabulary=5)
    choices = gate(x_TD, context_of(ids_BS))
    best = probs_of(gate, x_TD).topk(2)
    normal_TK = best.values / best.values.sum(-1, keepdim=True)
    assert torch.equal(choices.experts_TK[:, 0], best.indices[:, 0])
    torch.testing.assert_close(choices.weights_TK[:, 0], normal_TK[:, 0])  # whether the second stays or not
    kept_T = choices.experts_TK[:, 1] >= 0
    torch.testing.assert_close(choices.weights_TK[kept_T, 1], normal_TK[kept_T, 1])
    for token in range(5):
        same_T = ids_BS.flatten() == token
        chance = min(1.0, 2 * normal_TK[same_T][0, 1].item())
        n = same_T.sum().item()
        # four standard deviations of a binomial share
        tolerance = 4 * math.sqrt(chance * (1 - chance) / n) + 1e-9
        assert kept_T[same_T].double().mean().item() == pytest.approx(chance, abs=tolerance)
    assert (gate.eval()(x_TD, context_of(ids_BS, training=False)).experts_TK >= 0).all()


def test_ktop1_takes_the_best_of_each_prototype():
    gate = build({"name": "ktop1"}, 2)
    ids_BS, x_TD = batch()
    choices = gate(x_TD, context_of(ids_BS))
    logits_TE = x_TD @ gate.weight_ED.T
    for t in range(len(x_TD)):
        for k in range(2):
            p_M = logits_TE[t, 4 * k : 4 * k + 4].softmax(0)
            assert choices.experts_TK[t, k] == 4 * k + p_M.argmax()
            torch.testing.assert_close(choices.weights_TK[t, k], p_M.max())
    z = sum(logits_TE[:, 4 * k : 4 * k + 4].logsumexp(-1).square().mean() for k in range(2))
    torch.testing.assert_close(choices.losses["z"], z)


def test_hierarchical_chooses_inside_the_group_with_most_probability():
    """Four groups of two: a group size taken for the number of groups would give two of four."""
    gate = build({"name": "hierarchical", "groups": 4}, 2)
    ids_BS, x_TD = batch()
    choices = gate(x_TD, context_of(ids_BS))
    probs_TE = probs_of(gate, x_TD)
    for t in range(len(x_TD)):
        group = max(range(4), key=lambda g, t=t: probs_TE[t, 2 * g : 2 * g + 2].sum().item())
        inside = sorted(range(2 * group, 2 * group + 2), key=lambda e, t=t: -probs_TE[t, e].item())
        assert choices.experts_TK[t].tolist() == inside
        torch.testing.assert_close(choices.weights_TK[t], probs_TE[t, inside])
    inside_TE = torch.arange(8) // 2 == choices.experts_TK[:, :1] // 2
    expected = alignment_loss(probs_TE, inside_TE, choices.weights_TK.amin(-1))
    torch.testing.assert_close(choices.losses["alignment"], expected)


def test_expert_choice_fills_each_expert_with_its_best_tokens():
    with pytest.warns(UserWarning, match="depends on the tokens after it"):
        gate = build({"name": "expert_choice"}, 2)
    ids_BS, x_TD = batch(vocabulary=1000)
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[0, 4:] = 0
    one_BS = torch.zeros_like(ids_BS)
    one_BS[0, 3] = 1
    for mask in (None, mask_BS, one_BS):
        choices = gate(x_TD, context_of(ids_BS, mask))
        probs_TE = probs_of(gate, x_TD)
        real = 32 if mask is None else int(mask.sum())
        for e in range(8):
            took = set(torch.nonzero(choices.experts_TK == e)[:, 0].tolist())
            candidates = [t for t in range(32) if mask is None or mask.flatten()[t]]
            best = sorted(candidates, key=lambda t, e=e: -probs_TE[t, e].item())[: max(real * 2 // 8, 1)]
            assert took == set(best)
        t, k = torch.nonzero(choices.experts_TK >= 0, as_tuple=True)
        torch.testing.assert_close(choices.weights_TK[t, k], probs_TE[t, choices.experts_TK[t, k]])


def test_dense_to_sparse_follows_its_temperature_and_ends_with_one_expert():
    settings = {
        "name": "dense_to_sparse",
        "temperature": {"start": 5.0, "end": 0.05, "until": "10ba", "shape": "exponential"},
        "hard_after": "20ba",
    }
    gate = build(settings, 1).train()
    ids_BS, x_TD = batch(vocabulary=1000)
    numbers = []
    for step in (0, 5, 10, 20):
        choices = gate(x_TD, context_of(ids_BS, step=step))
        assert (choices.experts_TK[:, 0] >= 0).all()
        numbers.append((choices.experts_TK >= 0).sum().item())
    assert numbers[0] == 32 * 8 and numbers[0] > numbers[1] > numbers[2] >= numbers[3] == 32
    assert torch.equal(choices.experts_TK[:, 0], probs_of(gate, x_TD).argmax(-1))


def test_dense_to_sparse_weighs_by_the_gumbel_softmax():
    gate = build({"name": "dense_to_sparse", "temperature": 0.7, "threshold": 0.0}, 1).train()
    ids_BS, x_TD = batch()
    choices = gate(x_TD, context_of(ids_BS))
    # threshold 0: all experts, and all of the distribution
    context = context_of(ids_BS)
    keys_T = context.token_keys(32, x_TD.device)
    noisy_TE = x_TD @ gate.weight_ED.T + noise.gumbel(keys_T, 8, context.stream(dense_to_sparse._GUMBEL)).double()
    expected_TK = (noisy_TE / 0.7).softmax(-1).gather(1, choices.experts_TK)
    torch.testing.assert_close(choices.weights_TK, expected_TK)
    other = gate(x_TD, context_of(ids_BS, step=1))
    assert not torch.equal(choices.experts_TK, other.experts_TK), "noise must be new at each step"


def test_dense_to_sparse_takes_the_best_of_those_above_the_threshold_where_their_number_is_bounded():
    settings = {"name": "dense_to_sparse", "temperature": 2.0, "threshold": 0.1}
    ids_BS, x_TD = batch(vocabulary=1000)
    free = build(settings, 1).train()(x_TD, context_of(ids_BS))
    bounded = build({**settings, "max_experts": 3}, 1).train()(x_TD, context_of(ids_BS))
    assert free.experts_TK.shape[1] > 3 and bounded.rows is None
    assert torch.equal(bounded.experts_TK, free.experts_TK[:, :3])
    torch.testing.assert_close(bounded.weights_TK, free.weights_TK[:, :3])
    assert (bounded.experts_TK < 0).any() and bounded.losses["balance"] != free.losses["balance"]
    best = build({**settings, "threshold": 0.9}, 1).train()(x_TD, context_of(ids_BS))
    assert torch.equal(best.experts_TK, free.experts_TK[:, :1]), "the best one in any case"


@pytest.mark.filterwarnings("ignore:gate expert_choice")
@pytest.mark.parametrize("settings", [{"name": "dense_to_sparse", "threshold": 0.2}, {"name": "expert_choice"}])
def test_ranks_agree_on_the_columns_of_choices(settings):
    gate = build(settings, 1).train()
    ids_BS, x_TD = batch()
    alone = gate(x_TD, context_of(ids_BS, losses=frozenset()))
    wider = gate(x_TD, context_of(ids_BS, losses=frozenset(), max_over_ranks=lambda most: torch.full_like(most, 8)))
    columns = alone.experts_TK.shape[1]
    assert columns < wider.experts_TK.shape[1] == 8 and torch.equal(wider.experts_TK[:, :columns], alone.experts_TK)
    assert (wider.experts_TK[:, columns:] == -1).all() and wider.rows == alone.rows


def test_topk_adds_shazeers_noise_in_training_alone():
    gate = build({"name": "topk", "noise": True}, 2)
    ids_BS, _ = batch(sequences=500, positions=8, vocabulary=1000)
    x_TD = torch.randn(1, WIDTH, dtype=torch.float64).expand(4000, WIDTH)
    clean_TE = x_TD @ gate.weight_ED.T
    with torch.no_grad():
        gate.weight_noise_ED.normal_(0, 0.3)
    # `logits_TE` of the result are those that were chosen by
    noisy_TE = gate.train()(x_TD, context_of(ids_BS)).logits_TE
    deviation_E = torch.nn.functional.softplus(x_TD[0] @ gate.weight_noise_ED.T)
    standard_TE = (noisy_TE - clean_TE) / deviation_E
    # 32,000 draws from N(0, 1): five standard errors
    assert abs(standard_TE.mean().item()) < 5 / math.sqrt(32_000)
    assert standard_TE.std().item() == pytest.approx(1.0, abs=5 / math.sqrt(2 * 32_000))
    evaluated = gate.eval()(x_TD, context_of(ids_BS, training=False)).logits_TE
    torch.testing.assert_close(evaluated, clean_TE)


def test_load_is_of_the_clean_logits_among_noisy_ones():
    gate = build({"name": "topk", "noise": True}, 2).train()
    with torch.no_grad():
        gate.weight_noise_ED.normal_(0, 0.3)
    ids_BS, x_TD = batch()
    choices = gate(x_TD, context_of(ids_BS))
    deviation_TE = torch.nn.functional.softplus(x_TD @ gate.weight_noise_ED.T)
    chances_TE = chosen_with_new_noise(x_TD @ gate.weight_ED.T, choices.logits_TE, deviation_TE, 2)
    torch.testing.assert_close(choices.losses["load"], variation_squared(chances_TE))


def test_one_expert_with_a_normalised_weight_warns_and_its_gate_has_no_gradient():
    ids_BS, x_TD = batch()
    with pytest.warns(
        UserWarning, match=r"top_k 1 and normalize \(true\) .*: use gate: {name: switch}, or normalize: fal"
    ):
        gate = build({"name": "topk"}, 1)
    (gate(x_TD, context_of(ids_BS, losses=frozenset())).weights_TK * x_TD[:, :1]).sum().backward()
    assert gate.weight_ED.grad.abs().max() < 1e-15
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for keys, top_k, experts in (({"normalize": False}, 1, 8), ({}, 2, 8), ({}, 1, 1)):
            build({"name": "topk", **keys}, top_k, experts)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_topk_chooses_inside_its_best_groups(score):
    gate = build({"name": "topk", "score": score, "groups": 4, "group_limit": 2, "normalize": False}, 4)
    ids_BS, x_TD = batch()
    choices = gate(x_TD, context_of(ids_BS, losses=frozenset()))
    logits_TE = x_TD @ gate.weight_ED.T
    scores_TE = logits_TE.softmax(-1) if score == "softmax" else logits_TE.sigmoid()
    for t in range(len(x_TD)):
        by_group = [scores_TE[t, 2 * g : 2 * g + 2].sum().item() for g in range(4)]
        groups = sorted(range(4), key=lambda g: -by_group[g])[:2]
        inside = [e for e in range(8) if e // 2 in groups]
        best = sorted(inside, key=lambda e, t=t: -scores_TE[t, e].item())
        assert choices.experts_TK[t].tolist() == best
        torch.testing.assert_close(choices.weights_TK[t], scores_TE[t, best])


def test_bias_has_a_say_in_the_choice_and_not_in_the_weight():
    gate = build({"name": "topk", "bias_balance": True, "normalize": False, "score": "sigmoid"}, 2)
    ids_BS, x_TD = batch()
    gate.bias_E[5] = 10.0
    choices = gate(x_TD, context_of(ids_BS, losses=frozenset()))
    assert (choices.experts_TK[:, 0] == 5).all()
    scores_TE = (x_TD @ gate.weight_ED.T).sigmoid()
    torch.testing.assert_close(choices.weights_TK, scores_TE.gather(1, choices.experts_TK))


def test_bias_moves_towards_the_mean_load_by_its_step():
    """E does not divide the sum: experts above and below the mean move, for every rounding of the mean."""
    bias_step = {"start": 0.0, "end": 0.5, "until": "2ba"}
    gate = build({"name": "topk", "bias_balance": True, "bias_step": bias_step}, 2)
    gate.after_step(torch.tensor([4, 4, 4, 4, 4, 4, 4, 5]), Progress(ba=1))
    assert gate.bias_E.tolist() == [0.25] * 7 + [-0.25]
    gate.after_step(torch.tensor([2, 2, 2, 2, 2, 2, 0, 4]), Progress(ba=2))
    assert gate.bias_E.tolist() == [0.25] * 6 + [0.75, -0.75]


def test_bias_balances_a_lopsided_gate():
    gate = build({"name": "topk", "bias_balance": True, "bias_step": 0.02, "score": "sigmoid"}, 2)
    ids_BS, x_TD = batch(sequences=32, positions=16, vocabulary=400)
    with torch.no_grad():
        gate.weight_ED[0] += 0.5 * x_TD.mean(0) / x_TD.mean(0).norm() * 12

    def loads():
        experts_TK = gate(x_TD, context_of(ids_BS, losses=frozenset())).experts_TK
        return torch.bincount(experts_TK.flatten(), minlength=8)

    before = loads().max().item()
    for step in range(60):
        gate.after_step(loads(), Progress(ba=step))
    assert loads().max().item() < 1.25 * 128 < 1.6 * 128 < before


def test_evaluation_and_forward_leave_the_bias_alone():
    gate = build({"name": "topk", "bias_balance": True}, 2)
    ids_BS, x_TD = batch()
    for training in (True, False):
        gate.train(training)(x_TD, context_of(ids_BS, training=training, losses=frozenset()))
    assert not gate.bias_E.any()


def test_state_survives_a_checkpoint_and_random_tables_need_none():
    gate = build({"name": "topk", "bias_balance": True, "bias_step": 0.25}, 2)
    gate.after_step(torch.arange(8), Progress(ba=1))
    other = build({"name": "topk", "bias_balance": True}, 2, seed=9)
    other.load_state_dict(gate.state_dict())
    assert torch.equal(other.bias_E, gate.bias_E) and other.bias_E.any()
    assert not build({"name": "hash"}, 1).state_dict()


@pytest.mark.parametrize("table", ["random", "bigram"])
def test_hash_depends_on_what_its_table_says(table):
    gate = build({"name": "hash", "table": table}, 1)
    ids_BS = torch.arange(640).view(20, 32)
    x_TD = torch.randn(640, WIDTH)
    first_BS = gate(x_TD, context_of(ids_BS)).experts_TK.view(20, 32)
    assert (gate(x_TD, context_of(ids_BS)).weights_TK == 1).all()
    swapped_BS = ids_BS.clone()
    swapped_BS[:, 4] = 7
    second_BS = gate(x_TD, context_of(swapped_BS)).experts_TK.view(20, 32)
    changed = (first_BS != second_BS).any(0).nonzero().flatten().tolist()
    assert changed == {"random": [4], "bigram": [4, 5]}[table]
    # 640 ids over 8 experts: 80 each, deviation 8.4
    assert torch.bincount(first_BS.flatten(), minlength=8).sub(80).abs().max() < 45
    other_BS = gate(x_TD, context_of(ids_BS, layer=2)).experts_TK.view(20, 32)
    assert (first_BS != other_BS).float().mean() > 0.5
    context = dataclasses.replace(context_of(ids_BS), seed=6)
    assert (first_BS != gate(x_TD, context).experts_TK.view(20, 32)).float().mean() > 0.5


def test_balanced_table_puts_the_most_frequent_into_the_emptiest():
    assert balance_by_frequency([5, 9, 4, 0, 4], 2) == [1, 0, 1, -1, 0]


def test_balanced_table_evens_out_what_a_random_one_does_not(tmp_path):
    counts = [int(10_000 / (rank + 1)) for rank in range(500)] + [0] * 3
    path = tmp_path / "counts.json"
    path.write_text(json.dumps(counts))
    gate = build({"name": "hash", "table": "balanced", "frequencies": str(path)}, 1)
    ids_BS = torch.arange(503)[None]
    experts_T = gate(torch.randn(503, WIDTH), context_of(ids_BS)).experts_TK.flatten()
    load_E = torch.zeros(8).index_add(0, experts_T, torch.tensor(counts, dtype=torch.float32))
    # the most frequent id alone is 1.18 of the mean load
    assert load_E.max() / load_E.mean() < 1.2 and load_E[1:].max() / load_E.mean() < 1.01
    assert "table_V" in gate.state_dict()
    beyond = gate(torch.randn(4, WIDTH), context_of(torch.tensor([[500, 502, 503, 9_999]]))).experts_TK
    assert ((beyond >= 0) & (beyond < 8)).all()
    table_V = gate.table_V.clone()
    gate.table_V.fill_(77)  # as `to_empty` leaves it
    gate.reset_parameters(seed=3, layer=1, std=0.7)
    assert torch.equal(gate.table_V, table_V)


def test_ties_go_to_the_lower_expert():
    x_TD = torch.ones(4, WIDTH, dtype=torch.float64)
    ids_BS = torch.zeros(1, 4, dtype=torch.long)
    for settings, top_k, truth in [
        ({"name": "switch", "jitter": 0.0}, 1, [0]),
        ({"name": "topk"}, 3, [0, 1, 2]),
        ({"name": "gshard", "random_second": False}, 2, [0, 1]),
        ({"name": "ktop1"}, 2, [0, 4]),
        ({"name": "hierarchical", "groups": 4}, 2, [0, 1]),
        ({"name": "topk", "groups": 4, "group_limit": 2}, 3, [0, 1, 2]),
    ]:
        gate = build(settings, top_k)
        with torch.no_grad():
            gate.weight_ED.fill_(0.1)
        assert gate(x_TD, context_of(ids_BS, losses=frozenset())).experts_TK.tolist() == [truth] * 4, settings


@pytest.mark.parametrize(
    ("settings", "top_k", "sentence"),
    [
        ({"name": "switch"}, 2, r"top_k \(2\) must be 1"),
        ({"name": "gshard"}, 1, r"top_k \(1\) must be 2"),
        ({"name": "ktop1"}, 3, r"top_k \(3\) must divide num_experts \(8\).*use 1, 2, 4, 8"),
        ({"name": "hierarchical", "groups": 3}, 2, r"gate.groups \(3\) must divide num_experts \(8\).*use 1, 2, 4"),
        ({"name": "hierarchical", "groups": 8}, 2, "use 1, 2, 4"),
        ({"name": "topk", "groups": 3}, 2, r"gate.groups \(3\) must divide num_experts \(8\): use 1, 2, 4, 8"),
        ({"name": "topk", "groups": 4, "group_limit": 1}, 3, "1 of 4 groups have 2 experts; raise gate.group_limit"),
        ({"name": "topk", "groups": 4, "group_limit": 5}, 3, "between 1 and groups"),
        ({"name": "base"}, 2, r"top_k \(2\) must be 1"),
        ({"name": "base", "epsilon": 0}, 1, "must be above 0"),
        ({"name": "hash", "table": "balanced"}, 1, "give both or neither"),
        ({"name": "hash", "table": "balanced", "frequencies": "nowhere.json"}, 1, "nowhere.json"),
        ({"name": "dense_to_sparse", "temperature": 0.0}, 1, "must be above 0"),
        ({"name": "dense_to_sparse", "threshold": 1.0}, 1, "below 1"),
        ({"name": "dense_to_sparse", "max_experts": -1}, 1, r"max_experts \(-1\) must be 0"),
        (
            {"name": "dense_to_sparse", "temperature": {"start": 1, "end": 0.5, "after": "20ba", "until": "10ba"}},
            1,
            r"the schedule ends \(until: 10ba\) before it starts \(after: 20ba\)",
        ),
        ({"name": "topk", "jitter": {"start": 0.1, "end": 2, "until": "5ba"}}, 2, "below 1"),
        ({"name": "topk", "jitter": {"start": 2, "end": 0.1, "until": "5ba"}}, 2, "below 1"),
        ({"name": "topk", "bias_step": {"start": 0.1, "end": -0.1, "until": "5ba"}}, 2, "must be 0 or more"),
        ({"name": "topk", "bias_step": -1}, 2, "must be 0 or more"),
        ({"name": "topk", "bias_step": 0.01}, 2, r"bias_step \(0.01\) has no effect without gate.bias_balance"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(settings, top_k, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(settings, top_k)


def test_hash_without_token_ids_says_what_is_missing():
    gate = build({"name": "hash"}, 1)
    from foundry_moe.layers.context import GateContext

    with pytest.raises(ValueError, match="gate hash needs the token ids"):
        gate(torch.randn(4, WIDTH), GateContext())


def test_a_gate_that_follows_time_refuses_to_stand_still():
    ids_BS, x_TD = batch()
    for settings, top_k in [
        ({"name": "topk", "bias_balance": True}, 2),
        ({"name": "dense_to_sparse"}, 1),
        ({"name": "dense_to_sparse", "temperature": 1.0, "hard_after": "9ba"}, 1),
        ({"name": "switch", "jitter": {"start": 0.1, "end": 0.0, "until": "5ba"}}, 1),
        ({"name": "switch", "jitter": {"start": 0.0, "end": 0.1, "until": "5ba"}}, 1),
    ]:
        gate = build(settings, top_k)
        with pytest.raises(ValueError, match="add `dmoe_steps"):
            gate(x_TD, context_of(ids_BS, progress=None))
        gate.eval()(x_TD, context_of(ids_BS, training=False, progress=None))
