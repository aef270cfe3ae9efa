"""Gates in Composer's Trainer: time, loads of a step, losses over the whole batch, a gate of another package."""

import logging
import sys
import textwrap

import pytest
import torch
from composer import Algorithm, ComposerModel, Trainer
from composer.algorithms import EMA
from composer.core import DataSpec, Event
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from foundry_moe.algorithms.dmoe import DMoE
from foundry_moe.algorithms.gate_steps import GateSteps, add_steps_algorithm
from foundry_moe.config import MoEConfig
from foundry_moe.layers.lookup import batch_context, moe_layers

VOCABULARY, WIDTH, POSITIONS, BATCH = 24, 8, 6, 8


class FFN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 12, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(12, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Body(nn.Module):
    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.ffns = nn.ModuleList(FFN() for _ in range(2))
        self.checkpointing = checkpointing

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for ffn in self.ffns:
            if self.checkpointing == "none":
                x = x + ffn(x)
            else:
                x = x + checkpoint(ffn, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x)


class Model(ComposerModel):
    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Body(checkpointing).double()

    def forward(self, batch):
        return self.body(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"))

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def data(batches: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (batches * BATCH, POSITIONS + 1), generator=generator)
    return DataLoader([{"input_ids": r[:-1], "labels": r[1:]} for r in ids], batch_size=BATCH)


def uneven_data(batches: int) -> DataSpec:
    """Rows whose numbers of real tokens, and of those that are trained, have no common ratio."""
    rows = []
    for index, row in enumerate(data(batches).dataset):
        real, trained = ((6, 1), (5, 5), (3, 2), (2, 1), (4, 1), (6, 6), (1, 1), (2, 2))[index % BATCH]
        position = torch.arange(POSITIONS)
        labels = row["labels"].masked_fill((position < real - trained) | (position >= real), -100)
        rows.append({**row, "labels": labels, "attention_mask": (position < real).long()})

    def count(batch):
        return {"total": int(batch["attention_mask"].sum()), "loss_generating": int((batch["labels"] != -100).sum())}

    return DataSpec(DataLoader(rows, batch_size=BATCH), get_num_tokens_in_batch=count)


class Record(Algorithm):
    """Gradients before the step, and what a function says at the end of each batch."""

    def __init__(self, say=lambda state: None) -> None:
        self.gradients, self.said, self.say = [], [], say

    def match(self, event, state):
        return event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END)

    def apply(self, event, state, logger):
        if event == Event.AFTER_TRAIN_BATCH:
            self.gradients.append([p.grad.clone() for p in state.model.parameters()])
        else:
            self.said.append(self.say(state))


def fit(
    moe,
    *,
    microbatch=BATCH,
    batches=2,
    checkpointing="none",
    record=None,
    until=None,
    loader=data,
    model=None,
    **trainer_keys,
):
    record = record or Record()
    model = model or Model(checkpointing)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=loader(batches),
        max_duration=f"{until or batches}ba",
        device_train_microbatch_size=microbatch,
        algorithms=[DMoE(num_experts=4, init_std=0.5, **moe), record],
        device="cpu",
        progress_bar=False,
        log_to_console=False,
        **trainer_keys,
    )
    trainer.fit()
    trainer.close()
    return model, record


LOSSES = {"balance": 0.3, "z": 0.05}


def test_a_run_says_once_what_computes_its_experts(caplog):
    with caplog.at_level(logging.INFO):
        fit({}, batches=1)
    said = [record.getMessage() for record in caplog.records if "dMoE experts: " in record.getMessage()]
    assert said == ["dMoE experts: reference, plain torch, one expert after another: there is no GPU"]


def test_a_backend_that_cannot_run_here_ends_the_run_before_its_first_batch():
    record = Record()
    with pytest.raises(ValueError, match="backend grouped needs bf16 on a CUDA device"):
        fit({"backend": "grouped"}, record=record)
    assert not record.gradients


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_balance_over_these_is_exact_under_accumulation_and_checkpointing(checkpointing, scope):
    moe = {"loss": LOSSES, "balance_over": scope}
    _, whole = fit(moe)
    _, parts = fit(moe, microbatch=2, checkpointing=checkpointing)
    for step in range(2):
        for a, b in zip(whole.gradients[step], parts.gradients[step], strict=True):
            torch.testing.assert_close(b, a)  # fp64: sums in another order
    if checkpointing == "non-reentrant":  # the other kind adds gradients in another order
        _, kept = fit(moe, microbatch=2)
        for step in range(2):
            assert all(map(torch.equal, kept.gradients[step], parts.gradients[step]))


TOPK = {"top_k": 2, "gate": {"name": "topk", "noise": True}, "loss": {**LOSSES, "importance": 0.1, "load": 0.2}}


@pytest.mark.parametrize("on_tokens", [True, False])
@pytest.mark.parametrize(
    "moe",
    [
        {**TOPK, "balance_over": "batch"},
        {"loss": LOSSES, "balance_over": "sequence"},
        {"gate": {"name": "hierarchical", "groups": 2}, "loss": {"alignment": 0.3}},
    ],
    ids=["batch", "sequence", "alignment"],
)
def test_auxiliary_losses_of_uneven_rows_are_those_of_the_whole_batch(moe, on_tokens):
    """Microbatches are weighed by their real tokens, though the trainer weighs the loss by trained ones or rows."""

    def say(state):
        return [layer.statistics.losses_L / layer.statistics.scale_1 for layer in moe_layers(state.model)]

    class Auxiliary(Model):  # without the loss itself, which the trainer's weights change if they are not its tokens
        def loss(self, outputs, batch):
            mean = super().loss(outputs, batch)
            return mean if on_tokens else mean * 0

    seen = []
    for microbatch in (BATCH, 2, 1):
        record = Record(say)
        _, record = fit(
            {"top_k": 1, **moe}, microbatch=microbatch, record=record, loader=uneven_data, model=Auxiliary(),
            accumulate_train_batch_on_tokens=on_tokens,
        )  # fmt: skip
        seen.append(record)
    whole, *others = seen
    for parts in others:
        torch.testing.assert_close(parts.gradients, whole.gradients)  # fp64: sums in another order
        torch.testing.assert_close(parts.said, whole.said)  # the values that are logged, fp32


def test_what_has_no_targets_trains_nothing_and_is_reported(caplog):
    """The first batch has no targets; of the second, the first of two microbatches has none."""

    def without_targets(batches):
        rows = data(batches).dataset
        for index, row in enumerate(rows):
            if index < BATCH + BATCH // 2:
                row["labels"] = torch.full_like(row["labels"], -100)

        # tensors, as LLM Foundry counts them: the trainer's weight of no targets is 0 / 0
        def count(batch):
            return {"total": batch["input_ids"].numel(), "loss_generating": (batch["labels"] != -100).sum()}

        return DataSpec(DataLoader(rows, batch_size=BATCH), get_num_tokens_in_batch=count)

    _, record = fit(
        {"top_k": 2, "loss": LOSSES},
        microbatch=BATCH // 2,
        loader=without_targets,
        record=Record(lambda state: state.loss.item()),
        accumulate_train_batch_on_tokens=True,
    )
    first, second = record.gradients
    assert not any(gradient.any() for gradient in first) and record.said[0] == 0
    assert all(gradient.isfinite().all() for gradient in second) and any(gradient.any() for gradient in second)
    lines = [line for line in caplog.messages if "have no targets" in line]
    assert [line.partition(" have")[0] for line in lines] == [
        "batch 1: 2 of 2 microbatches of rank 0",
        "batch 2: 1 of 2 microbatches of rank 0",
    ]


def test_balance_over_microbatches_is_another_loss():
    """The test above would fail otherwise: the gradients of the two differ."""
    moe = {"loss": LOSSES, "balance_over": "microbatch"}
    _, whole = fit(moe, batches=1)
    model, parts = fit(moe, microbatch=2, batches=1)
    gate = [name for name, _ in model.named_parameters()].index("body.ffns.0.gate.weight_ED")
    assert not torch.allclose(whole.gradients[0][gate], parts.gradients[0][gate])


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_every_random_number_is_that_of_the_whole_batch(checkpointing):
    moe = {"top_k": 2, "gate": {"name": "topk", "noise": True, "jitter": 0.2}, "loss": {"z": 0.05}}
    _, whole = fit(moe)
    _, parts = fit(moe, microbatch=2, checkpointing=checkpointing)
    for a, b in zip(whole.gradients[1], parts.gradients[1], strict=True):
        torch.testing.assert_close(b, a)


def test_counting_a_batch_ahead_draws_no_number_of_dropout():
    def run(scope):
        model = Model()
        model.body.head = nn.Sequential(nn.Dropout(0.5), model.body.head)
        record = Record(lambda state: torch.rand(3).tolist())
        moe = {"loss": {"balance": 0.3}, "balance_over": scope}
        _, record = fit(moe, microbatch=2, model=model, record=record, seed=3)
        return record.said

    assert run("batch") == run("microbatch")


BIAS = {"top_k": 2, "loss": {}, "gate": {"name": "topk", "bias_balance": True, "bias_step": 0.25}}


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("microbatch", [BATCH, 2])
def test_bias_moves_once_per_step_by_the_loads_of_all_its_microbatches(checkpointing, microbatch):
    def say(state):
        layer = moe_layers(state.model)[0]
        return layer.statistics.counts_E.clone(), layer.gate.bias_E.clone()

    record = Record(say)
    fit(BIAS, microbatch=microbatch, batches=3, checkpointing=checkpointing, record=record)
    total_E = torch.zeros(4, dtype=torch.int64)
    bias_E = torch.zeros(4)
    for counts_E, seen_E in record.said:
        load_E, total_E = counts_E - total_E, counts_E
        assert load_E.sum() == BATCH * POSITIONS * 2
        bias_E = bias_E + 0.25 * torch.sign(load_E.sum() - 4 * load_E)
        assert torch.equal(seen_E, bias_E)
    assert bias_E.any()


def test_composers_ema_averages_the_bias_of_the_batch_that_has_ended():
    """Listed before the algorithm that steps the bias; an average starts from the state before its first batch."""
    name = "body.ffns.0.gate.bias_E"
    ema = EMA(half_life="1ba", update_interval="1ba")
    record = Record(
        lambda state: (state.model.get_buffer(name).clone(), ema.ema_model.named_buffers_dict[name].clone())
    )
    model = Model()
    trainer = Trainer(
        model=model, algorithms=[ema, DMoE(num_experts=4, init_std=0.5, **BIAS), record], device="cpu",
        train_dataloader=data(3), optimizers=torch.optim.SGD(model.parameters(), lr=0.1), max_duration="3ba",
        progress_bar=False, log_to_console=False,
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    expected_E = torch.zeros(4)
    for bias_E, mean_E in record.said:
        expected_E = (expected_E + bias_E) / 2
        torch.testing.assert_close(mean_E, expected_E)
    assert expected_E.any()


def test_a_gate_that_somebody_freezes_keeps_its_bias():
    """By `requires_grad`, as LLM Foundry's and peft's freezing do, not by our key."""

    class Freeze(Algorithm):
        def match(self, event, state):
            return event == Event.FIT_START

        def apply(self, event, state, logger):
            moe_layers(state.model)[0].gate.requires_grad_(False)

    model = Model()
    trainer = Trainer(
        model=model, algorithms=[DMoE(num_experts=4, init_std=0.5, **BIAS), Freeze()], device="cpu",
        train_dataloader=data(1), optimizers=torch.optim.SGD(model.parameters(), lr=0.1), max_duration="1ba",
        progress_bar=False, log_to_console=False,
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    frozen, other = moe_layers(model)
    assert not frozen.gate.bias_E.any() and other.gate.bias_E.any()


def test_bias_and_schedules_resume_as_if_nothing_had_happened(tmp_path):
    moe = {
        "top_k": 1,
        "loss": {"balance": 0.1},
        "gate": {"name": "switch", "jitter": {"start": 0.4, "end": 0.0, "until": "4ba"}},
    }
    for settings in (BIAS, moe):
        unbroken, _ = fit(settings, batches=4)
        folder = str(tmp_path / settings["gate"]["name"])
        fit(settings, batches=4, until=2, save_folder=folder, save_interval="2ba", run_name="x")
        resumed, _ = fit(settings, batches=4, load_path=f"{folder}/latest-rank0.pt")
        for name, tensor in unbroken.state_dict().items():
            torch.testing.assert_close(resumed.state_dict()[name], tensor, msg=name)


def test_progress_is_composers_time():
    said = Record(lambda state: batch_context(state.model).progress)
    fit({"gate": {"name": "topk"}}, batches=3, record=said)
    assert [p.ba for p in said.said] == [0, 1, 2]
    assert [p.sp for p in said.said] == [0, BATCH, 2 * BATCH]
    assert said.said[1].ep == pytest.approx(1 / 3) and said.said[1].dur == pytest.approx(1 / 3)


def test_a_gate_of_another_package_trains_from_yaml(tmp_path, monkeypatch):
    """A package beside ours: one class, one entry point."""
    (tmp_path / "othergates.py").write_text(
        textwrap.dedent(
            '''
            from dataclasses import dataclass

            import torch
            from foundry_moe.layers.gates.gate import Choices, Gate

            class RoundRobin(Gate):
                """Token t to expert (t + offset) mod E, with a learned weight per expert."""

                @dataclass(frozen=True, kw_only=True)
                class Config(Gate.Config):
                    offset: int = 0

                    def check(self, num_experts, top_k):
                        if self.offset >= num_experts:
                            raise ValueError(f"gate.offset ({self.offset}) must be below {num_experts}")

                def __init__(self, config, **shape):
                    super().__init__(config, **shape)
                    self.scale_E = torch.nn.Parameter(
                        torch.ones(self.num_experts, dtype=shape["dtype"], device=shape["device"])
                    )

                def forward(self, x_TD, context):
                    experts_T = (torch.arange(len(x_TD)) + self.config.offset) % self.num_experts
                    return Choices(experts_TK=experts_T[:, None], weights_TK=self.scale_E[experts_T][:, None])
            '''
        )
    )
    info = tmp_path / "othergates-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: othergates\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[foundry_moe_gates]\nround_robin = othergates:RoundRobin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = OmegaConf.to_container(
        OmegaConf.create(
            """
            algorithms:
              dmoe:
                top_k: 1
                gate: {name: round_robin, offset: 3}
            """
        )
    )["algorithms"]["dmoe"]
    said = Record(lambda state: moe_layers(state.model)[0].statistics.counts_E.tolist())
    model, _ = fit(settings, record=said)
    assert said.said[0] == [12, 12, 12, 12]  # 48 tokens over 4 experts
    assert (moe_layers(model)[1].gate.scale_E != 1).all()
    with pytest.raises(ValueError, match="did you mean 'round_robin'"):
        fit({**settings, "gate": {"name": "round_robyn"}})
    with pytest.raises(ValueError, match=r"gate.offset \(4\) must be below 4"):
        fit({**settings, "gate": {"name": "round_robin", "offset": 4}})
    sys.modules.pop("othergates", None)


def test_a_model_built_with_experts_gets_the_algorithm_from_foundry():
    config = add_steps_algorithm({"model": {"name": "dmoe_causal_lm"}})
    assert config["algorithms"] == {"dmoe_steps": {}}
    assert add_steps_algorithm({"model": {"name": "mpt_causal_lm"}}) == {"model": {"name": "mpt_causal_lm"}}


def test_only_one_algorithm_drives_the_gates():
    model = Model()
    trainer = Trainer(
        model=model, algorithms=[GateSteps(), DMoE(num_experts=4)], device="cpu", train_dataloader=data(1),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1), max_duration="1ba", progress_bar=False,
        log_to_console=False,
    )  # fmt: skip
    assert sum(isinstance(a, GateSteps) for a in trainer.state.algorithms) == 1
    trainer.close()


def test_a_balance_scope_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"balance_over: 'bach' is not one of .*did you mean 'batch'"):
        MoEConfig(num_experts=4, balance_over="bach")


@pytest.mark.parametrize("which", ["train", "eval"])
def test_a_loader_without_a_batch_is_refused_before_training(which):
    samples = [{"input_ids": torch.zeros(4, dtype=torch.int64)}] * 3
    empty = DataLoader(samples, batch_size=4, drop_last=True)  # Composer waits for its first batch for ever
    loaders = {"train_dataloader": empty if which == "train" else data(1)}
    if which == "eval":
        loaders |= {"eval_dataloader": empty, "eval_interval": "1ba"}
    trainer = Trainer(
        model=Model(), algorithms=[DMoE(num_experts=4)], device="cpu", max_duration="1ba", progress_bar=False,
        log_to_console=False, **loaders,
    )  # fmt: skip
    with pytest.raises(ValueError, match=rf"{which}_loader.* has no batch on rank 0: 3 samples are fewer than the 4"):
        trainer.fit()
    trainer.close()


@pytest.mark.parametrize("experts", [{"model": {"name": "dmoe_causal_lm"}}, {"algorithms": {"dmoe": {}}}])
def test_runs_with_experts_log_learning_rate_and_speed(experts):
    callbacks = add_steps_algorithm({**experts, "callbacks": {"speed_monitor": {"window_size": 3}}})["callbacks"]
    assert callbacks.keys() >= {"lr_monitor", "speed_monitor"} and callbacks["speed_monitor"] == {"window_size": 3}
    assert "callbacks" not in add_steps_algorithm({"model": {"name": "mpt_causal_lm"}})
