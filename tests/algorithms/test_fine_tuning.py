"""Fine-tuning of a model with experts: a frozen gate, and documents packed into one row."""

from __future__ import annotations

import pytest
import torch
from composer.optim import DecoupledAdamW

from foundry_moe.algorithms.dmoe import DMoE
from foundry_moe.algorithms.gate_steps import GateSteps
from foundry_moe.layers.lookup import moe_layers
from tests.helpers.training import MOE, fit, llama, mpt

BIASED = {"name": "topk", "score": "sigmoid", "bias_balance": True}


def gates(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if ".gate." in name}


@pytest.mark.quick
@pytest.mark.parametrize("freeze", [[], ["gate"]])
def test_a_frozen_gate_has_no_gradient_no_decay_and_no_step_of_its_bias(freeze):
    model = mpt(moe={**MOE, "gate": BIASED, "loss": {"balance": 0.5}, "freeze": freeze})
    before, others = gates(model), {n: p.clone() for n, p in model.named_parameters() if ".gate." not in n}
    optimizer = DecoupledAdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    fit(model, algorithms=[GateSteps()], optimizer=optimizer, duration="1ba")
    after = gates(model)
    assert any(name.endswith("bias_E") for name in after) and any(name.endswith("weight_ED") for name in after)
    for name, value in before.items():
        assert torch.equal(after[name], value) == bool(freeze), name
    assert all(not torch.equal(p, others[n]) for n, p in model.named_parameters() if n in others), "all else trains"


@pytest.mark.quick
def test_a_gate_is_frozen_in_a_model_that_is_converted():
    model = llama()
    fit(model, algorithms=[DMoE(**MOE, freeze=["gate"])], duration="1ba")
    assert [layer.gate.weight_ED.requires_grad for layer in moe_layers(model)] == [False, False]
    assert all(layer.gate.weight_ED.grad is None for layer in moe_layers(model))


@pytest.mark.quick
def test_a_frozen_gate_leaves_the_other_gradients_as_they_are():
    made = [mpt(moe={**MOE, "freeze": freeze}) for freeze in ([], ["gate"])]
    batch = {"input_ids": torch.randint(0, 50, (2, 16)), "attention_mask": torch.ones(2, 16, dtype=torch.bool)}
    batch["labels"] = batch["input_ids"]
    for model in made:
        model.loss(model(batch), batch).backward()
    free, frozen = ({n: p.grad for n, p in model.named_parameters()} for model in made)
    assert all(torch.equal(free[name], grad) for name, grad in frozen.items() if grad is not None)
    assert [name for name, grad in frozen.items() if grad is None] == [name for name in free if ".gate." in name]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"freeze": ["router"]}, r"freeze: 'router' is not one of gate"),
        ({"freeze": ["gte"]}, r"freeze: 'gte' is not one of gate; did you mean 'gate'\?"),
        ({"freeze": "gate"}, r"freeze must be a list of parts such as \[gate\], not 'gate'"),
        (
            {"freeze": ["gate"], "gate": {"name": "hash"}, "top_k": 1, "loss": {}},
            r"freeze \(gate\): gate hash has no",
        ),
    ],
)
def test_what_cannot_be_frozen_is_named(keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        mpt(moe={**MOE, **keys})


def packed_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 50, (2, 16))
    documents = torch.tensor([[0] * 5 + [1] * 7 + [-1] * 4, [0] * 16])
    return {"input_ids": ids, "labels": ids, "attention_mask": documents >= 0, "sequence_id": documents}


@pytest.mark.quick
@pytest.mark.parametrize("family", ["mpt", "llama"])
def test_packed_documents_reach_the_layers(family):
    keys = {**MOE, "balance_over": "sequence"}
    if family == "mpt":
        model = mpt(moe=keys)
    else:
        model = llama()
        fit(model, algorithms=[DMoE(**keys)], duration="1ba")
    batch, layer, seen = packed_batch(), moe_layers(model)[0], []

    def note(*_):
        wanted = {"losses": frozenset({"balance"}), "balance_over": "sequence", "training": True}
        seen.append(layer.context.for_tokens(batch["input_ids"].numel(), **wanted).sequences)

    layer.register_forward_hook(note)
    model(batch)
    assert seen[0].index_T.tolist() == [0] * 5 + [1] * 7 + [0] * 4 + [16] * 16
    del batch["sequence_id"]
    model(batch)
    assert seen[1].num_sequences == 2, "not the documents of the batch before"


@pytest.mark.quick
def test_packed_documents_without_padding_have_no_mask():
    """As from LLM Foundry's collators, whose mask is then all ones: the layers compute without one."""
    model, batch, seen = mpt(moe=MOE), packed_batch(), []
    layer = moe_layers(model)[0]
    layer.register_forward_hook(lambda *_: seen.append(layer.context.for_tokens(batch["input_ids"].numel()).mask_T))
    model(batch)
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    batch["sequence_id"] = batch["sequence_id"].clamp(min=0)
    model(batch)
    assert seen[0].sum() == 28 and seen[1] is None


@pytest.mark.quick
def test_documents_in_one_row_compute_what_they_do_alone():
    model = mpt(
        attn_config={"attn_uses_sequence_id": True, "rope": True, "rope_impl": "hf"}, learned_pos_emb=False
    ).eval()
    batch = packed_batch()
    together = model(batch).logits[0, 5:12]
    alone = {key: value[:1, 5:12] for key, value in batch.items()}
    alone["sequence_id"] = torch.zeros_like(alone["sequence_id"])
    torch.testing.assert_close(together, model(alone).logits[0], rtol=1e-4, atol=1e-5)
