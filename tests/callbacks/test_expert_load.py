"""Load figures against their definitions, and what reaches a logger over microbatches."""

from __future__ import annotations

import math

import pytest
import torch
from composer.loggers import InMemoryLogger
from composer.utils import dist

from foundry_moe.callbacks.expert_load import ExpertLoad, _worst_ranks, load_metrics
from foundry_moe.callbacks.run_report import RunReport
from foundry_moe.layers.lookup import moe_layers
from tests.helpers.training import fit, mpt

pytestmark = pytest.mark.quick


def test_figures_of_an_even_load():
    figures = load_metrics(torch.tensor([5, 5, 5, 5]))
    assert (figures["max_over_mean"], figures["dead"], figures["std"]) == (1.0, 0.0, 0.0)
    assert figures["entropy"] == pytest.approx(1.0)


def test_figures_of_an_uneven_load():
    figures = load_metrics(torch.tensor([6, 2, 0]))
    assert (figures["min"], figures["max"], figures["dead"]) == (0.0, 6.0, 1.0)
    assert figures["max_over_mean"] == pytest.approx(6 / (8 / 3))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(3)
    assert figures["entropy"] == pytest.approx(entropy)


def test_no_token_at_all_divides_by_nothing():
    assert all(math.isfinite(value) for value in load_metrics(torch.zeros(4, dtype=torch.int64)).values())


@pytest.mark.parametrize("microbatch", [4, 1])
def test_every_microbatch_of_every_batch_counts(microbatch):
    logger, callback = InMemoryLogger(), ExpertLoad(interval="2ba", shares=True)
    fit(mpt(), callbacks=[callback], microbatch=microbatch, duration="4ba", loggers=[logger])
    # 2 batches of 4 sequences of 16 tokens, 2 choices each, for each of 2 layers
    assert callback.latest_LE.sum(1).tolist() == [256, 256]
    metrics = logger.data
    means = [value for _, value in metrics["dmoe/layer1/mean"]]
    assert means == [256 / 4] * 2
    assert sum(metrics[f"dmoe/share/expert{e}"][-1][1] for e in range(4)) == pytest.approx(1.0)
    # the balance loss is 1 for an even load; the gate of a new model is nearly even
    assert metrics["dmoe/loss/balance"][-1][1] == pytest.approx(1.0, abs=0.2)


def test_the_state_of_an_older_version_is_ignored():
    ExpertLoad().load_state_dict({"total_LE": torch.tensor([[4, 0], [1, 1]])})


@pytest.mark.parametrize(
    ("callback", "keys", "sentence"),
    [
        (ExpertLoad, {"interval": "often"}, r"callbacks.expert_load.interval \('often'\) must be a time such as 10ba"),
        (RunReport, {"interval": None}, r"callbacks.run_report.interval \(None\) must be a time such as 10ba"),
        (ExpertLoad, {"intervall": "1ba"}, "expert_load.intervall is not a key of .*; did you mean 'interval'"),
        (RunReport, {"promt": "The"}, "run_report.promt is not a key of .*; did you mean 'prompt'"),
        (RunReport, {"facts": "/nowhere/facts.json"}, r"run_report.facts \(/nowhere/facts.json\): .* leave it out"),
    ],
)
def test_a_wrong_key_or_value_is_named(callback, keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        callback(**keys)


def test_the_fullest_rank_is_that_of_the_worst_group(monkeypatch):
    model = mpt()
    layers = moe_layers(model)
    assert _worst_ranks(layers).numel() == 0, "all experts are on this rank"
    for layer, counts in zip(layers, ([3, 1, 2, 2], [8, 0, 0, 0]), strict=True):
        layer.dispatcher.local_experts = 2
        layer.statistics.counts_E = torch.tensor(counts)
    largest = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, reduce_operation: largest.append(reduce_operation))
    layers[1].experts.most_rounds = 3
    assert _worst_ranks(layers).tolist() == [[1.0, 2.0], [1.0, 3.0]] and largest == ["MAX"]
    layers[0].context.sum_over_group = lambda counts: counts + torch.tensor([9, 0, 0, 0, 0, 0, 0, 8])
    assert _worst_ranks(layers)[0].tolist() == [pytest.approx(13 / 8.5), 1.0], "over the ranks that share experts"
