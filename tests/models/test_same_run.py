"""What makes a checkpoint that of another model or another training, though every tensor fits."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

from foundry_moe.checkpoint.strict import clean
from foundry_moe.config import LoRAConfig, MoEConfig
from foundry_moe.layers.moe import MoELayer
from foundry_moe.models import same_run
from foundry_moe.models.mpt import DMoECausalLM
from foundry_moe.models.same_run import (
    check_model,
    describe_experts,
    describe_model,
    describe_training,
    training_changes,
)
from foundry_moe.schema import from_mapping

MPT = {"d_model": 16, "n_heads": 2, "n_layers": 1, "max_seq_len": 8, "vocab_size": 11, "no_bias": True}
MOE = {"num_experts": 2, "top_k": 1}


def mpt(**keys: Any) -> dict[str, Any]:
    with torch.device("meta"):
        return describe_model(DMoECausalLM(**{**MPT, "moe": MOE, "use_train_metrics": False, **keys}))


def llama(**keys: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 11}
    with torch.device("meta"):
        return describe_model(LlamaForCausalLM(LlamaConfig(**{"num_attention_heads": 2, **sizes, **keys})))


@pytest.mark.parametrize(
    ("describe", "key", "value"),
    [
        (mpt, "n_heads", 4),
        (mpt, "norm_type", "low_precision_rmsnorm"),
        (mpt, "attn_config", {"softmax_scale": 0.5}),
        (mpt, "logit_scale", 0.5),
        (llama, "num_attention_heads", 4),
        (llama, "rope_theta", 7.0),
        (llama, "rms_norm_eps", 1e-3),
        (llama, "tie_word_embeddings", True),
    ],
)
def test_what_changes_the_result_is_refused(describe: Any, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"model\.{key}\S* \(.*\): the checkpoint was trained with"):
        check_model(describe(**{key: value}), describe())


@pytest.mark.parametrize(
    ("describe", "keys"),
    [
        (mpt, {"norm_type": "layernorm"}),
        (mpt, {"attn_config": {"attn_impl": "torch"}}),
        (mpt, {"init_config": {"name": "baseline_", "init_std": 0.1}}),
        (mpt, {"resid_pdrop": 0.1, "emb_pdrop": 0.2, "attn_config": {"attn_pdrop": 0.1}}),
        (mpt, {"max_seq_len": 16}),
        (mpt, {"moe": {**MOE, "loss": {}}}),
        (llama, {"attention_dropout": 0.5, "use_cache": False, "pad_token_id": 3, "initializer_range": 0.7}),
    ],
)
def test_what_does_not_change_it_is_no_other_model(describe: Any, keys: dict[str, Any]) -> None:
    check_model(describe(**keys), describe())


def test_a_checkpoint_of_before_these_notes_is_taken() -> None:
    check_model(mpt(), {})
    assert training_changes({"optimizer.lr": 1.0}, {}) == []


def test_another_learning_rate_is_said_with_what_holds() -> None:
    model = torch.nn.Linear(2, 2)

    def state(lr: float, size: int = 4) -> Any:
        optimizer = torch.optim.AdamW(
            [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}], lr=lr
        )
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
        loader = SimpleNamespace(batch_size=size)
        return SimpleNamespace(model=model, optimizers=[optimizer], precision="fp32", train_dataloader=loader)

    before, asked = describe_training(state(0.1)), describe_training(state(0.2, 8))
    assert before["optimizer.lr"] == 0.1 and before["optimizer.param_groups.0.weight_decay"] == 0.0
    assert training_changes(before, before) == []
    assert training_changes(asked, before, {**asked, "optimizer.lr": 0.1, "optimizer.param_groups.0.lr": 0.1}) == [
        "global_train_batch_size: this run sets 8, the checkpoint was trained with 4, and 8 is used",
        "optimizer.lr: this run sets 0.2, the checkpoint was trained with 0.1, and 0.1 is used",
        "optimizer.param_groups.0.lr: this run sets 0.2, the checkpoint was trained with 0.1, and 0.1 is used",
    ]


def test_another_weight_of_a_loss_is_said() -> None:
    def state(loss: Any) -> Any:
        model = DMoECausalLM(
            d_model=16, n_heads=2, n_layers=1, max_seq_len=8, vocab_size=16, moe={"num_experts": 2, "loss": loss}
        )
        return SimpleNamespace(model=model, optimizers=[], precision="fp32", train_dataloader=None)

    before, asked = describe_training(state({"balance": 0.01, "z": 0.001})), describe_training(state({"balance": 0.1}))
    assert training_changes(asked, before) == [
        "moe.loss.balance: this run sets 0.1, the checkpoint was trained with 0.01, and 0.1 is used",
        "moe.loss.z: this run sets 0.0, the checkpoint was trained with 0.001, and 0.0 is used",
    ]


def test_every_key_of_the_experts_is_in_one_list() -> None:
    lora = {f"lora.{key.name}" for key in fields(LoRAConfig)}
    keys = [key.name for key in fields(MoEConfig) if key.name != "lora"] + sorted(lora)
    listed = [*same_run.MUST_AGREE, *same_run.MAY_CHANGE, *same_run.NO_EFFECT]
    assert sorted(listed) == sorted(keys), "a new key must be added to one of the lists"


LORA = {"r": 2, "alpha": 4.0}


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("lora.alpha", {"lora": LORA}, {"lora": {**LORA, "alpha": 32.0}}),
        ("lora.rslora", {"lora": LORA}, {"lora": {**LORA, "rslora": True}}),
        ("lora.r", {"lora": LORA}, {"lora": {**LORA, "r": 1}}),
        (
            "shared_expert_gate",
            {"shared_expert_hidden_size": 4},
            {"shared_expert_hidden_size": 4, "shared_expert_gate": True},
        ),
        ("gate.score", {}, {"gate": {"name": "topk", "score": "sigmoid"}}),
        ("seed", {"gate": {"name": "hash"}, "loss": {}}, {"gate": {"name": "hash"}, "loss": {}, "seed": 3}),
    ],
)
def test_a_key_that_changes_what_experts_compute_is_refused(key: str, before: Any, after: Any) -> None:
    described = [describe_experts([layer_of(**keys)]) for keys in (before, after)]
    check_model(described[0], described[0], "experts")
    with pytest.raises(ValueError, match=rf"experts\.{key} \(.*\): the checkpoint was trained with"):
        check_model(described[1], described[0], "experts")


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("moe.capacity", {}, {"capacity": 1.0}),
        ("moe.drop", {"capacity": 1.0}, {"capacity": 1.0, "drop": "weight"}),
        ("moe.balance_over", {}, {"balance_over": "batch"}),
        ("moe.freeze", {}, {"freeze": ["gate"]}),
        ("moe.seed", {}, {"seed": 3}),
        ("moe.gate.jitter", {}, {"gate": {"name": "topk", "jitter": 0.1}}),
        ("moe.lora.dropout", {"lora": LORA}, {"lora": {**LORA, "dropout": 0.1}}),
    ],
)
def test_a_key_that_changes_the_training_of_experts_is_said(key: str, before: Any, after: Any) -> None:
    layers = [layer_of(**keys) for keys in (before, after)]
    assert describe_experts(layers[:1]) == describe_experts(layers[1:])
    states = [SimpleNamespace(model=layer, optimizers=[], precision="fp32", train_dataloader=None) for layer in layers]
    described = [describe_training(state) for state in states]
    (line,) = training_changes(described[1], described[0])
    assert line.startswith(f"{key}: this run sets ")


def layer_of(**keys: Any) -> MoELayer:
    from_yaml = from_mapping(MoEConfig, {**MOE, "expert_hidden_size": 8, "activation": "gelu", **keys}, "model.moe")
    return MoELayer(8, from_yaml, device="meta")


def with_peft(**keys: Any) -> Any:
    """LLM Foundry's model of a run with `model.peft_config`: `to_dict` of peft's `LoraConfig` has sets."""
    keys = {"r": 2, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": {"q_proj", "v_proj"}, **keys}
    adapter = SimpleNamespace(to_dict=lambda: {"alpha_pattern": {}, "use_rslora": False, "revision": None, **keys})
    model = torch.nn.Module()
    model.config, model.model = PretrainedConfig(), SimpleNamespace(peft_config={"default": adapter})
    return SimpleNamespace(model=model, optimizers=[], precision="fp32", train_dataloader=None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_alpha", 64),
        ("use_rslora", True),
        ("target_modules", {"q_proj"}),
        ("alpha_pattern", {"q_proj": 64}),
        ("a_key_of_a_later_version", 1),
    ],
)
def test_adapters_of_peft_that_compute_something_else_are_refused(key: str, value: Any) -> None:
    there, here = (describe_model(with_peft(**keys).model) for keys in ({"a_key_of_a_later_version": 0}, {key: value}))
    check_model(there, there)
    with pytest.raises(ValueError, match=rf"model\.peft_config\.{key} \(.*\): the checkpoint was trained with"):
        check_model(here, there)


def test_dropout_of_pefts_adapters_may_change_with_a_line_and_their_source_without() -> None:
    before, after = with_peft(), with_peft(lora_dropout=0.1, revision="main", target_modules={"v_proj", "q_proj"})
    check_model(describe_model(after.model), describe_model(before.model))
    (line,) = training_changes(describe_training(after), describe_training(before))
    assert line.startswith("peft_config.lora_dropout: this run sets 0.1")


def test_a_text_with_line_breaks_is_the_same_in_a_checkpoint_that_is_read() -> None:
    here = describe_model(SimpleNamespace(config=PretrainedConfig(note="two\nlines\tand \u00a0")))
    assert here["note"] == "two\\nlines\\tand \\xa0"
    check_model(here, clean({"note": "two\nlines\tand \u00a0"}))
