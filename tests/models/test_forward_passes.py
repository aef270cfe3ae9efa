"""A layer reads ids, padding and progress of its own forward pass, whoever calls the model and whatever runs between.

Gradients are in fp64, and equal ones are bit-equal: the same operations run on the same numbers.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from foundry_moe.config import MoEConfig
from foundry_moe.layers.lookup import batch_context, moe_layers
from foundry_moe.layers.schedule import Progress
from foundry_moe.models.conversion import apply_dmoe
from tests.helpers.gates import GATE_IDS, GATES

LOSSES = {"loss": {"balance": 1.0, "z": 0.1}}
NOISY = {"gate": {"name": "topk", "noise": True}, "loss": {"balance": 1.0, "importance": 0.1, "load": 0.1}}
SETTINGS = {
    **{name: {"gate": gate, "top_k": top_k} for name, (gate, top_k) in zip(GATE_IDS, GATES, strict=True)},
    "balance": LOSSES,
    "sequence": {**LOSSES, "balance_over": "sequence"},
    "jitter": {"gate": {"name": "topk", "jitter": 0.3}, **LOSSES},
    "capacity": {**LOSSES, "capacity": 1.0},
    "noise": NOISY,
}


def build(**moe: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=40, use_cache=False
    )
    model = LlamaForCausalLM(config).double()
    apply_dmoe(model, MoEConfig(**{"num_experts": 8, "top_k": 2, "init_std": 0.3, **moe}))
    context = batch_context(model)
    assert context is not None
    context.progress = Progress(ba=3, dur=0.1)
    return model.train()


def draw(seed: int, sequences: int, positions: int, padding: int) -> dict[str, Tensor]:
    """A batch whose first sequence ends with `padding` tokens of padding."""
    ids = torch.randint(40, (sequences, positions), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, positions - padding :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


A, SAME_SHAPE, OTHER_SHAPE = draw(1, 4, 12, 5), draw(2, 4, 12, 0), draw(3, 2, 9, 3)


def take_gradients(model: nn.Module) -> Tensor:
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    loss.backward()
    return take_gradients(model)


@pytest.mark.filterwarnings("ignore:gate expert_choice", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", SETTINGS)
def test_recomputation_reads_its_own_forward_pass(name):
    model = build(**SETTINGS[name])
    expected, of_other = (gradients(model, model(**batch).loss) for batch in (A, OTHER_SHAPE))
    context = batch_context(model)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        for between in (SAME_SHAPE, OTHER_SHAPE):
            loss = model(**A).loss
            context.progress = Progress(ba=9, dur=0.9)
            with torch.no_grad():
                model(**between)
            context.progress = Progress(ba=3, dur=0.1)
            assert torch.equal(gradients(model, loss), expected)
        for order in ((0, 1), (1, 0)):
            losses = [model(**batch).loss for batch in (A, OTHER_SHAPE)]
            for index in order:
                assert torch.equal(gradients(model, losses[index]), (expected, of_other)[index])
        both = gradients(model, model(**A).loss + model(**OTHER_SHAPE).loss)
        torch.testing.assert_close(both, expected + of_other, rtol=1e-12, atol=1e-14)


def loss_of(logits_BSV: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """In fp64; the model's own loss is in fp32."""
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def backbone_and_head(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss as trainers of preferences compute it: the head by hand."""
    hidden = model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    return loss_of(model.lm_head(hidden), batch)


class Wrapper(nn.Module):
    """As peft's `LoraModel`: calls the forward of the model that it holds, without its hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


def through_wrapper(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return loss_of(Wrapper(model)(**batch).logits, batch)


@pytest.mark.filterwarnings("ignore:auxiliary losses are added with factor 1")
@pytest.mark.parametrize("call", [backbone_and_head, through_wrapper])
@pytest.mark.parametrize("name", ["balance", "sequence", "jitter", "capacity", "noise", "hash"])
def test_padding_and_ids_are_those_of_the_pass_whoever_calls(call: Callable[[Any, Any], Tensor], name):
    def gate_gradient(model: Any, loss: Tensor) -> Tensor:
        loss.backward()
        layer = moe_layers(model)[0]
        return torch.cat([p.grad.flatten() for p in (*layer.gate.parameters(), *layer.experts.parameters())])

    expected, model = build(**SETTINGS[name]), build(**SETTINGS[name])
    with torch.no_grad():
        model(**SAME_SHAPE)  # a mask of as many tokens
    of_loss = gate_gradient(expected, loss_of(expected(**A).logits, A))
    torch.testing.assert_close(gate_gradient(model, call(model, A)), of_loss, rtol=1e-12, atol=1e-14)
    real = int(A["attention_mask"].sum())
    if "loss" in SETTINGS[name]:
        assert moe_layers(model)[0].statistics.counts_E.sum() == 2 * real


def test_a_layer_outside_of_a_pass_reads_no_earlier_batch():
    model = build(**SETTINGS["hash"])
    model(**A)
    with pytest.raises(ValueError, match="gate hash needs the token ids"):
        moe_layers(model)[0](torch.randn(4, 12, 16, dtype=torch.float64))


def scaled(model: Any, how: str) -> Tensor:
    if how == "divided":
        return model(**A).loss / 4
    if how == "num_items_in_batch":
        return model(**A, num_items_in_batch=4 * int((A["labels"][:, 1:] != -100).sum())).loss
    if how == "GradScaler":
        return torch.amp.GradScaler("cpu", init_scale=0.25).scale(model(**A).loss)
    if how == "tracked":
        return batch_context(model).track_scale(backbone_and_head(model, A)) / 4
    wrapped = Wrapper(model)
    batch_context(model).observe(wrapped)
    return wrapped(**A).loss / 4


@pytest.mark.parametrize("how", ["divided", "num_items_in_batch", "GradScaler", "tracked", "observed wrapper"])
def test_auxiliary_losses_are_scaled_as_the_loss_is(how, recwarn):
    models = [build(**LOSSES), build(**LOSSES)]
    models[0](**A).loss.backward()
    scaled(models[1], how).backward()
    whole, quarter = (moe_layers(model)[0].gate.weight_ED.grad for model in models)
    torch.testing.assert_close(quarter * 4, whole, rtol=1e-5, atol=1e-7)  # the model's own loss is in fp32
    assert not [warning for warning in recwarn if "auxiliary losses" in str(warning.message)]


def test_an_unknown_loss_is_warned_about_once():
    model = build(**LOSSES)
    with pytest.warns(UserWarning, match=r"auxiliary losses are added with factor 1.*track_scale\(loss\)") as caught:
        for _ in range(2):
            (backbone_and_head(model, A) / 4).backward()
    assert len([w for w in caught if "auxiliary losses" in str(w.message)]) == 1


def test_a_batch_without_targets_contributes_nothing():
    model = build(**LOSSES)
    batch = {**A, "labels": torch.full_like(A["labels"], -100)}
    loss = model(**batch).loss
    assert loss.item() == 0
    (loss * torch.nan).backward()  # a trainer's share of no targets: 0 / 0
    assert not take_gradients(model).any()


def mask_4d(mask_BS: Tensor, kind: str) -> Any:
    positions = mask_BS.shape[1]
    seen_BHSS = torch.ones(positions, positions).tril().bool() & mask_BS.bool()[:, None, None, :]
    if kind == "diagonal":  # padding attends to itself, so that no row of the softmax is empty
        seen_BHSS = seen_BHSS & mask_BS.bool()[:, None, :, None] | torch.eye(positions).bool()
    if kind == "boolean":
        return seen_BHSS
    return torch.zeros(seen_BHSS.shape, dtype=torch.float64).masked_fill(~seen_BHSS, torch.finfo(torch.float64).min)


@pytest.mark.parametrize("kind", ["boolean", "additive", "diagonal"])
def test_padding_is_read_from_a_mask_of_four_dimensions(kind):
    model = build(**LOSSES)
    model(**A).loss.backward()
    counts_E = moe_layers(model)[0].statistics.counts_E.clone()
    expected = take_gradients(model)
    moe_layers(model)[0].statistics.reset()
    mask = mask_4d(A["attention_mask"], kind)
    model(**{**A, "attention_mask": mask}).loss.backward()
    assert torch.equal(moe_layers(model)[0].statistics.counts_E, counts_E)
    torch.testing.assert_close(take_gradients(model), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", [LOSSES, {"loss": {}, "capacity": 1.0}, {**SETTINGS["jitter"], "loss": {}}])
def test_a_mask_whose_padding_is_unknown_is_refused_where_padding_counts(settings):
    model = build(**settings)
    mask = torch.zeros(4, 1, 12, 20, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"attention_mask \(\[4, 1, 12, 20\]\) does not tell which tokens are padding"):
        model(input_ids=A["input_ids"], attention_mask=mask)
