"""What all gates have in common, whichever experts they choose."""

import copy
import dataclasses

import pytest
import torch

from foundry_moe.ops import plan_permute
from foundry_moe.ops.select_topk import count_choices
from tests.helpers.gates import GATE_IDS, GATES, batch, build, context_of

every_gate = pytest.mark.parametrize(("settings", "top_k"), GATES, ids=GATE_IDS)
pytestmark = pytest.mark.filterwarnings("ignore:gate expert_choice")


def wanted(gate):
    return gate.LOSSES - {"load"} if not getattr(gate.config, "noise", False) else gate.LOSSES


@pytest.mark.quick
@every_gate
@pytest.mark.parametrize("training", [True, False])
def test_choices_are_well_formed(settings, top_k, training):
    gate = build(settings, top_k).train(training)
    ids_BS, x_TD = batch()
    choices = gate(x_TD, context_of(ids_BS, training=training, losses=wanted(gate)))
    experts_TK, weights_TK = choices.experts_TK, choices.weights_TK
    assert experts_TK.shape == weights_TK.shape and experts_TK.dtype == torch.int64
    assert experts_TK.min() >= -1 and experts_TK.max() < 8
    assert (weights_TK[experts_TK < 0] == 0).all() and torch.isfinite(weights_TK).all()
    for row in experts_TK.tolist():
        present = [e for e in row if e >= 0]
        assert len(set(present)) == len(present), "a token has an expert twice"
    if choices.rows is not None:
        assert (experts_TK >= 0).sum() <= choices.rows
    assert set(choices.losses) == (wanted(gate) if training else set())
    plan_permute(experts_TK, 8, choices.rows)


@pytest.mark.quick
@every_gate
@pytest.mark.parametrize("training", [True, False])
def test_a_token_that_is_nan_has_an_expert_with_weight_nan(settings, top_k, training):
    """So that the layer's output is not finite, which the watch of the training reports."""
    if settings["name"] == "hash":
        pytest.skip("hash does not weigh by the token")
    gate = build(settings, top_k).train(training)
    ids_BS, x_TD = batch()
    x_TD[3] = torch.nan
    choices = gate(x_TD, context_of(ids_BS, training=training, losses=wanted(gate)))
    assert choices.weights_TK[3][choices.experts_TK[3] >= 0].isnan().any()
    assert choices.rows is None or (choices.experts_TK >= 0).sum() <= choices.rows
    if choices.counts_E is not None:
        assert torch.equal(choices.counts_E, count_choices(choices.experts_TK, 8))


@every_gate
@pytest.mark.parametrize("padded", [False, True])
def test_loads_that_a_gate_has_counted_are_those_of_its_choices(settings, top_k, padded):
    """The layer does not count again what the gate gives it; without losses gates need not count."""
    gate = build(settings, top_k).train()
    ids_BS, x_TD = batch()
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[:, 5:] = 0
    context = context_of(ids_BS, mask_BS if padded else None, losses=wanted(gate))
    choices = gate(x_TD, context)
    if "balance" in gate.LOSSES and settings["name"] != "gshard":  # gshard's loss is over first choices
        assert choices.counts_E is not None
    if choices.counts_E is not None:
        assert choices.counts_E.dtype is torch.int64
        assert torch.equal(choices.counts_E, count_choices(choices.experts_TK, 8, context.mask_T))


@every_gate
def test_the_same_batch_gives_the_same_choices_whatever_was_drawn_before(settings, top_k):
    """As when a layer is recomputed under activation checkpointing, or a run is resumed."""
    gate = build(settings, top_k).train()
    ids_BS, x_TD = batch()
    first = gate(x_TD, context_of(ids_BS, losses=frozenset()))
    torch.manual_seed(99)
    torch.rand(7)
    again = gate(x_TD, context_of(ids_BS, losses=frozenset()))
    assert torch.equal(first.experts_TK, again.experts_TK) and torch.equal(first.weights_TK, again.weights_TK)


@pytest.mark.parametrize(
    ("settings", "top_k"), [case for case in GATES if case[0]["name"] not in ("base", "expert_choice")],
    ids=[i for i, case in zip(GATE_IDS, GATES, strict=True) if case[0]["name"] not in ("base", "expert_choice")],
)  # fmt: skip
def test_a_tokens_choice_does_not_depend_on_the_microbatch_or_rank_that_holds_it(settings, top_k):
    """`base` and `expert_choice` are left out: there tokens compete."""
    gate = build(settings, top_k).train()
    ids_BS, x_TD = batch(sequences=4, positions=8)
    whole = gate(x_TD, context_of(ids_BS, losses=frozenset()))
    for rows in ([2, 0], [3, 1]):
        part_BS = ids_BS[rows]
        tokens = torch.cat([torch.arange(r * 8, r * 8 + 8) for r in rows])
        part = gate(x_TD[tokens], context_of(part_BS, losses=frozenset()))
        k = part.experts_TK.shape[1]
        assert torch.equal(whole.experts_TK[tokens][:, :k], part.experts_TK)
        assert (whole.experts_TK[tokens][:, k:] == -1).all()
        # fp64, and matrix products of other shapes round elsewhere
        torch.testing.assert_close(whole.weights_TK[tokens][:, :k], part.weights_TK)


@every_gate
def test_padding_takes_part_in_no_loss(settings, top_k):
    gate = build(settings, top_k).train()
    ids_BS, x_TD = batch()
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[:, 5:] = 0
    context = context_of(ids_BS, mask_BS, losses=wanted(gate))
    losses = gate(x_TD, context).losses
    x_TD = torch.where(context.mask_T[:, None], x_TD, 50 * torch.randn_like(x_TD))
    for name, value in gate(x_TD, context).losses.items():
        torch.testing.assert_close(value, losses[name])


@pytest.mark.quick
@every_gate
def test_losses_of_parts_with_sums_over_all_are_those_of_the_whole(settings, top_k):
    """Ranks or microbatches with different numbers of tokens, weighed by these, in values and gradients."""
    gate = build(settings, top_k).train()
    ids_BS, x_TD = batch()
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[0, 5:] = 0
    parts = [slice(0, 1), slice(1, 4)]
    for name in wanted(gate) & {"balance", "importance", "load"}:

        def loss(rows, sum_over_ranks, name=name):
            context = context_of(
                ids_BS[rows], mask_BS[rows], losses=frozenset({name}), balance_over="microbatch",
                sum_over_ranks=sum_over_ranks,
            )  # fmt: skip
            return gate(x_TD.view(4, 8, -1)[rows].flatten(0, 1), context).losses[name]

        whole, sums = loss(slice(None), lambda total: total), []
        for rows in parts:
            loss(rows, lambda total, sums=sums: sums.append(total) or total)
        weighed = [mask_BS[rows].sum() / mask_BS.sum() * loss(rows, lambda _, sums=sums: sum(sums)) for rows in parts]
        torch.testing.assert_close(sum(weighed), whole)
        (expected,) = torch.autograd.grad(whole, gate.weight_ED)
        torch.testing.assert_close(torch.autograd.grad(sum(weighed), gate.weight_ED)[0], expected)


BY_TOKENS_ALONE = [
    ({"name": "topk"}, True),
    ({"name": "topk", "score": "sigmoid", "bias_balance": True}, True),
    ({"name": "topk", "noise": True}, False),
    ({"name": "topk", "jitter": 0.1}, False),
    ({"name": "topk", "jitter": {"start": 0.0, "end": 0.1, "until": "5ba"}}, False),
    ({"name": "gshard"}, False),
    ({"name": "hash"}, False),
]


@pytest.mark.quick
@pytest.mark.parametrize(("settings", "alone"), BY_TOKENS_ALONE)
def test_a_gate_says_whether_choices_depend_on_tokens_alone(settings, alone):
    """Compiled blocks of several layers would otherwise share the numbers of one layer or batch."""
    assert build(settings, 1 if settings["name"] == "hash" else 2).chooses_by_tokens_alone == alone


@every_gate
def test_weights_pass_their_gradient_to_the_gate(settings, top_k):
    if settings["name"] == "hash":
        pytest.skip("hash has no parameters")
    gate = build(settings, top_k).train()
    ids_BS, x_TD = batch()
    choices = gate(x_TD, context_of(ids_BS, losses=frozenset()))
    (choices.weights_TK * torch.randn_like(choices.weights_TK)).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() and p.grad.any() for p in gate.parameters())


CASTS = {
    "to": (lambda gate: gate.to(torch.bfloat16), torch.bfloat16),
    "half": (lambda gate: gate.half(), torch.float16),
    "type": (lambda gate: gate.type(torch.float16), torch.float16),
    "copy": (lambda gate: copy.deepcopy(gate).bfloat16(), torch.bfloat16),
    "double": (lambda gate: gate.half().double(), torch.float64),
}


@every_gate
@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_leaves_state_in_its_dtype(settings, top_k, cast):
    gate = build(settings, top_k)
    for buffer in gate.buffers():
        buffer.copy_(torch.randperm(buffer.numel()) + (1 / 3 if buffer.is_floating_point() else 0))  # no bf16 number
    before = {name: buffer.clone() for name, buffer in gate.named_buffers()}
    apply, dtype = CASTS[cast]
    gate = apply(gate)
    for name, buffer in gate.named_buffers():
        assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name])
    assert all(p.dtype is dtype for p in gate.parameters())


@every_gate
def test_a_gate_built_on_meta_has_its_state_once_drawn(settings, top_k):
    """As FSDP does it: `to_empty`, then `reset_parameters`."""
    from foundry_moe.layers.gates.registry import build_gate

    gate = build_gate(settings, d_model=6, num_experts=8, top_k=top_k, dtype=torch.float64, device="meta")
    gate.to_empty(device="cpu")
    for buffer in gate.buffers():
        buffer.fill_(77)
    gate.reset_parameters(seed=3, layer=1, std=0.7)
    drawn = build(settings, top_k)
    for name, tensor in gate.state_dict().items():
        assert torch.equal(tensor, drawn.state_dict()[name]), name


@pytest.mark.quick
@every_gate
@pytest.mark.parametrize("packed", [False, True])
def test_balance_over_sequences_is_that_of_each_sequence_alone(settings, top_k, packed):
    """Rows, or the documents packed into them; and the gradient is the same as if each came in a microbatch alone."""
    gate = build(settings, top_k).train()
    if "balance" not in gate.LOSSES:
        pytest.skip(f"{settings['name']} has no balance loss")
    ids_BS, x_TD = batch()
    lengths = (5, 3) if packed else (8,)
    packed_BS = (
        torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand_as(ids_BS) if packed else None
    )
    only = frozenset({"balance"})
    context = context_of(ids_BS, losses=only, balance_over="sequence", packed_BS=packed_BS)
    keys_T = context.token_keys(ids_BS.numel(), x_TD.device)
    ours = gate(x_TD, context).losses["balance"]
    (gradient,) = torch.autograd.grad(ours, gate.weight_ED)
    total, expected = torch.zeros_like(ours), torch.zeros_like(gradient)
    first = 0
    for length in lengths * len(ids_BS):
        tokens = slice(first, first + length)
        alone = context_of(ids_BS.view(-1)[tokens][None], losses=only)
        alone = dataclasses.replace(alone, keys=lambda tokens=tokens: keys_T[tokens])  # the same random numbers
        loss = gate(x_TD[tokens], alone).losses["balance"] * length / ids_BS.numel()
        total, expected = total + loss.detach(), expected + torch.autograd.grad(loss, gate.weight_ED)[0]
        first += length
    torch.testing.assert_close(ours.detach(), total)
    torch.testing.assert_close(gradient, expected)
