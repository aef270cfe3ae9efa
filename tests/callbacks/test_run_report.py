"""What `run_report` prints: values of the batch and evaluation that they are printed for, in any order of callbacks."""

from __future__ import annotations

import logging
import re
import time
from types import SimpleNamespace

import pytest
import torch
from composer import Evaluator
from composer.core import Callback
from composer.loggers import InMemoryLogger
from llmfoundry.models.mpt.modeling_mpt import ComposerMPTCausalLM

from foundry_moe.algorithms.dmoe import DMoE
from foundry_moe.algorithms.gate_steps import GateSteps
from foundry_moe.callbacks import run_checkpoints
from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.callbacks.expert_load import ExpertLoad
from foundry_moe.callbacks.run_report import RunReport, sample_text
from foundry_moe.checkpoint.store_file import FileStore
from foundry_moe.flops import query_width
from foundry_moe.schema import UserError
from tests.helpers.training import MOE, MPT, batches, fit, llama, mpt

LOSS = "LanguageCrossEntropy"


def evaluator(label: str, interval: str, dataloader=None) -> Evaluator:
    return Evaluator(label=label, dataloader=dataloader or batches(1), metric_names=[LOSS], eval_interval=interval)


def test_each_evaluator_prints_its_own_values_when_it_ends(capfd) -> None:
    report = RunReport()
    fit(
        mpt(), callbacks=[report], duration="2ba", eval_dataloader=[evaluator("often", "1ba"), evaluator("rare", "2ba")]
    )
    lines = capfd.readouterr().out.splitlines()
    evaluated = [line.rpartition(" ")[0] for line in lines if line.startswith("batch ") and "validation" in line]
    assert evaluated == [
        "batch 1: validation loss (often)",
        "batch 2: validation loss (often)",
        "batch 2: validation loss (rare)",
    ]
    assert not any("nan" in line for line in lines if "validation" in line), lines
    page = [line for line in lines if line.startswith("validation loss")]
    values = {line.split(": ")[1] for line in lines if line.startswith("batch 2: validation")}
    assert len(page) == 2 and set(page) == values, "the summary has the last value of each"


class Letters(torch.nn.Module):
    """A model of five letters that notes whether it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.trained = torch.nn.Parameter(torch.zeros(5)), []

    def forward(self, batch):
        self.trained.append(self.training)
        return SimpleNamespace(logits=self.weight.expand(1, batch["input_ids"].shape[1], 5))

    class tokenizer:
        def __new__(cls, text):
            return {"input_ids": [0]}

        decode = staticmethod(lambda ids: str(len(ids)))


@pytest.mark.quick
@pytest.mark.parametrize("text", ["[1.5]", '{"unigram_loss": "low"}', '{"unigram_loss": true}', "{", "\xff"])
def test_facts_are_a_mapping_of_numbers(tmp_path, text) -> None:
    (tmp_path / "facts.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"^callbacks.run_report.facts \(.*facts.json\): "):
        RunReport(facts=str(tmp_path / "facts.json"))
    (tmp_path / "facts.json").write_text('{"unigram_loss": 1.5, "vocab_size": 8}')
    assert RunReport(facts=str(tmp_path / "facts.json")).facts["unigram_loss"] == 1.5


@pytest.mark.quick
@pytest.mark.parametrize("training", [True, False])
def test_a_sample_is_of_an_evaluated_model_and_leaves_its_mode(training) -> None:
    model = Letters().train(training)
    assert sample_text(model, "a", 3) == "4"
    assert model.trained == [False] * 3 and model.training is training


@pytest.mark.quick
def test_a_sample_may_be_longer_than_the_sequences_of_an_mpt() -> None:
    model = mpt()
    model.tokenizer = Letters.tokenizer
    longest = model.model.config.max_seq_len
    assert sample_text(model, "a", longest + 2) == str(longest + 3)


def test_the_first_loss_is_that_of_the_first_batch_also_after_a_resume() -> None:
    report, logger, resumed = RunReport(), InMemoryLogger(), RunReport()
    fit(mpt(), callbacks=[report], duration="3ba", loggers=[logger])
    losses = [loss for _, loss in logger.data["loss/train/total"]]
    assert (report.losses["first"], report.losses["last"]) == (losses[0], losses[-1]) and len(losses) == 3
    resumed.load_state_dict(report.state_dict())
    assert resumed.losses == report.losses


def test_the_value_of_an_older_version_is_that_of_one_evaluator() -> None:
    report = RunReport()
    report.load_state_dict({"losses": {"validation": 2.5}})
    assert report.losses == {"validation loss": 2.5}


@pytest.mark.parametrize("report_first", [True, False])
def test_the_fullest_expert_is_that_of_the_batch_of_the_line(capfd, report_first) -> None:
    loads = ExpertLoad(interval="1ba")
    shares: list[float] = []

    class Shares(Callback):
        def batch_checkpoint(self, state, logger) -> None:
            counts_LE = loads.latest_LE
            shares.append((counts_LE / counts_LE.sum(1, keepdim=True)).max().item())

    callbacks = [RunReport(interval="1ba"), loads] if report_first else [loads, RunReport(interval="1ba")]
    fit(mpt(), callbacks=[*callbacks, Shares()])
    printed = re.findall(r"fullest expert ([0-9.]+%)", capfd.readouterr().out)
    assert printed == [f"{share:.1%}" for share in shares] and len(printed) == 3


def test_loads_of_an_earlier_batch_are_named_so(capfd) -> None:
    fit(mpt(), callbacks=[RunReport(interval="1ba"), ExpertLoad(interval="2ba")])
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("batch ")]
    assert ["fullest" in line for line in lines] == [False, True, True]
    assert [" in batch " in line for line in lines] == [False, False, False], "the end of training is logged too"
    report = RunReport(interval="1ba")
    fit(mpt(), callbacks=[report, ExpertLoad(interval="2ba")], duration="4ba")
    assert "fullest expert in batch 2 " in capfd.readouterr().out.splitlines()[2]


class Slow(torch.utils.data.Dataset):
    """One sample, which takes its time."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.5)
        ids = torch.arange(16)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones(16, dtype=torch.bool)}


def test_rate_and_eta_leave_evaluation_out(capfd) -> None:
    slow = evaluator("slow", "1ba", torch.utils.data.DataLoader(Slow(), batch_size=4))
    fit(mpt(), callbacks=[RunReport(interval="1ba")], duration="3ba", eval_dataloader=[slow])
    rates = [float(rate.replace(",", "")) for rate in re.findall(r"([0-9,]+) tokens/s", capfd.readouterr().out)]
    # 64 tokens per batch: with the 2 s of the evaluation before it, a batch would have 32 at most
    assert len(rates) == 3 and min(rates[1:]) > 64, rates


@pytest.mark.parametrize("report_first", [True, False])
def test_the_end_says_what_it_waits_for_and_the_summary_names_the_last_batch(
    tmp_path, capfd, caplog, monkeypatch, report_first
) -> None:
    put = FileStore.put

    def slow_put(store, key, data) -> None:
        put(store, key, data)
        if "/data/" in key and key.startswith("steps/000000000004"):
            time.sleep(1.0)

    monkeypatch.setattr(FileStore, "put", slow_put)
    monkeypatch.setattr(run_checkpoints, "PROGRESS_S", (0.2, 0.4))
    saves = ElasticCheckpoint(folder=str(tmp_path), interval="2ba", signals=[])
    callbacks = [RunReport(), saves] if report_first else [saves, RunReport()]
    with caplog.at_level(logging.INFO):
        fit(mpt(), callbacks=callbacks, duration="4ba")
    assert f"checkpoint {tmp_path} (batch 4)" in capfd.readouterr().out.splitlines()
    waits = [record.getMessage() for record in caplog.records if "Waiting for" in record.getMessage()]
    assert waits and len(waits) <= 5
    found = re.fullmatch(
        rf"Waiting for the checkpoint of batch 4: ([0-9.]+) of \1 MB are written to {tmp_path}\.", waits[0]
    )
    assert found and float(found[1]) > 0, waits


def test_parameters_are_counted_with_experts() -> None:
    logger, model = InMemoryLogger(), llama()
    dense = sum(p.numel() for p in model.parameters())
    trainer = fit(model, algorithms=[DMoE(**MOE)], loggers=[logger], duration="1ba")
    total = sum(p.numel() for p in model.parameters())
    # as LLM Foundry does once the trainer is made, with the numbers of the model before it
    names = ("n_params", "n_trainable_params", "n_active_params")
    trainer.logger.log_hyperparameters({**dict.fromkeys(names, dense), "other": 1})
    idle = 2 * 2 * 3 * 32 * 24  # two layers, two of four experts, three matrices
    assert [logger.hyperparameters[name] for name in (*names, "other")] == [total, total, total - idle, 1]


def test_flops_of_an_mpt_with_added_experts_are_those_of_one_built_with_them() -> None:
    model, twin = ComposerMPTCausalLM(**MPT, loss_fn="torch_crossentropy", attn_config={"attn_impl": "torch"}), mpt()
    assert model.n_total_params == model.n_active_params, "cached, as LLM Foundry's trainer leaves it"
    fit(model, algorithms=[DMoE(**MOE)], duration="1ba")
    batch = {"input_ids": torch.zeros(4, 16, dtype=torch.long)}
    assert model.n_total_params == twin.n_total_params
    assert model.flops_per_batch(batch) == twin.flops_per_batch(batch)


def test_flops_of_a_hugging_face_model_with_experts_are_of_the_parameters_that_a_token_passes() -> None:
    model = llama()
    fit(model, algorithms=[DMoE(**MOE)], duration="1ba")
    positions_apart = SimpleNamespace(num_attention_heads=4, hidden_size=64, head_dim=8, qk_head_dim=24)  # DeepSeek's
    assert query_width(positions_apart) == 96
    config = model.model.config
    assert not config.tie_word_embeddings
    multiplied = model.n_active_params - config.vocab_size * 32  # embeddings are looked up
    each = 6 * multiplied + 12 * 2 * config.num_attention_heads * config.head_dim * 16  # 2 layers, 16 tokens
    assert model.flops_per_batch({"input_ids": torch.zeros(4, 16, dtype=torch.long)}) == 4 * 16 * each


def test_frozen_parameters_of_a_model_with_experts_are_not_counted_as_trained() -> None:
    logger, model = InMemoryLogger(), mpt()
    next(iter(model.parameters())).requires_grad = False
    fit(model, algorithms=[GateSteps()], loggers=[logger], duration="1ba")
    counts = logger.hyperparameters
    assert counts["n_params"] - counts["n_trainable_params"] == next(iter(model.parameters())).numel()
    assert counts["n_active_params"] == mpt().n_active_params
