"""Load figures against their definitions, and what reaches a logger over microbatches."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from composer.core import Algorithm, Event
from composer.loggers import InMemoryLogger
from composer.utils import dist

from foundry_moe.algorithms.gate_steps import GateSteps
from foundry_moe.callbacks import expert_load
from foundry_moe.callbacks.expert_load import ExpertLoad, _worst_ranks, load_metrics, over_layers
from foundry_moe.callbacks.run_report import RunReport
from foundry_moe.layers.lookup import moe_layers
from tests.helpers.training import MOE, batches, fit, mpt

pytestmark = pytest.mark.quick


def test_figures_of_an_even_load():
    figures = load_metrics(torch.tensor([5, 5, 5, 5]))
    assert figures == {"max_violation": 0.0, "load_entropy": pytest.approx(1.0), "fullest_share": 0.25, "dead": 0.0}


def test_figures_of_an_uneven_load():
    figures = load_metrics(torch.tensor([6, 2, 0]))
    assert (figures["fullest_share"], figures["dead"]) == (0.75, pytest.approx(1 / 3))
    assert figures["max_violation"] == pytest.approx(6 / (8 / 3) - 1)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(3)
    assert figures["load_entropy"] == pytest.approx(entropy)


def test_figures_do_not_depend_on_the_number_of_tokens():
    assert load_metrics(torch.tensor([60, 20, 0])) == pytest.approx(load_metrics(torch.tensor([6, 2, 0])))


def test_the_worst_entropy_is_the_lowest_and_of_other_figures_the_highest():
    found = over_layers([{"load_entropy": 0.5, "dead": 0.0}, {"load_entropy": 0.9, "dead": 0.5}])
    assert found == {
        "load_entropy/worst": 0.5,
        "load_entropy/mean": pytest.approx(0.7),
        "dead/worst": 0.5,
        "dead/mean": 0.25,
    }


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_layers_own_figures_are_logged_on_request(per_layer):
    logger = InMemoryLogger()
    moe = {**MOE, "gate": {"name": "topk", "bias_balance": True, "bias_step": 0.1}}
    callback = ExpertLoad(per_layer=per_layer)
    fit(mpt(moe=moe), callbacks=[callback], algorithms=[GateSteps()], duration="2ba", loggers=[logger])
    names = {name.removeprefix("dmoe/") for name in logger.data if name.startswith("dmoe/")}
    figures = {"max_violation", "load_entropy", "fullest_share", "dead", "gate_entropy", "loss/balance", "loss/z"}
    figures |= {"router_bias", "rank_max_over_mean", "rounds"}
    of_layers = {f"layer{layer}/{figure}" for layer in (0, 1) for figure in figures}
    assert names == {f"{f}/{over}" for f in figures for over in ("worst", "mean")} | (of_layers if per_layer else set())
    assert logger.data["dmoe/rounds/worst"][-1][1] == logger.data["dmoe/rank_max_over_mean/mean"][-1][1] == 1.0
    assert logger.data["dmoe/router_bias/worst"][0][1] == pytest.approx(0.1)


def test_no_token_at_all_divides_by_nothing():
    assert all(math.isfinite(value) for value in load_metrics(torch.zeros(4, dtype=torch.int64)).values())


def test_loads_are_those_of_all_ranks_and_logged_when_an_epoch_ends_too(monkeypatch):
    twice = SimpleNamespace(all_reduce=lambda tensor, reduce_operation="SUM": tensor.mul_(2), get_global_rank=lambda: 0)
    monkeypatch.setattr(expert_load, "dist", twice)
    callback = ExpertLoad(interval="1ep")
    fit(mpt(), callbacks=[callback], duration="1ep", train_dataloader=batches(2))
    assert callback.latest_LE.sum(1).tolist() == [512, 512] and callback.latest_batch == 2


@pytest.mark.parametrize("microbatch", [4, 1])
def test_every_microbatch_of_every_batch_counts(microbatch):
    logger, callback = InMemoryLogger(), ExpertLoad(interval="2ba", shares=True)
    fit(mpt(), callbacks=[callback], microbatch=microbatch, duration="4ba", loggers=[logger])
    # 2 batches of 4 sequences of 16 tokens, 2 choices each, for each of 2 layers
    assert callback.latest_LE.sum(1).tolist() == [256, 256]
    metrics = logger.data
    assert [value for _, value in metrics["dmoe/fullest_share/worst"]][-1] == callback.latest_LE.max() / 256
    assert sum(metrics[f"dmoe/share/expert{e}"][-1][1] for e in range(4)) == pytest.approx(1.0)
    # the balance loss is 1 for an even load; the gate of a new model is nearly even
    assert metrics["dmoe/loss/balance/mean"][-1][1] == pytest.approx(1.0, abs=0.2)


class _RunsLongest(Algorithm):
    """As Composer's SeqLengthWarmup: a pass that trains nothing, before the first batch."""

    def match(self, event, state):
        return event == Event.AFTER_DATALOADER and state.timestamp.batch == 0

    def apply(self, event, state, logger):
        state.model.loss(state.model(state.batch), state.batch).backward()
        state.model.zero_grad()


def test_a_pass_before_the_first_batch_is_not_counted():
    callback = ExpertLoad()
    fit(mpt(), algorithms=[_RunsLongest()], callbacks=[callback], duration="1ba")
    assert callback.latest_LE.sum(1).tolist() == [128, 128]


def test_the_state_of_an_older_version_is_ignored():
    ExpertLoad().load_state_dict({"total_LE": torch.tensor([[4, 0], [1, 1]])})


@pytest.mark.parametrize(
    ("callback", "keys", "sentence"),
    [
        (ExpertLoad, {"interval": "often"}, r"callbacks.expert_load.interval \('often'\) must be a time such as 10ba"),
        (RunReport, {"interval": None}, r"callbacks.run_report.interval must be text such as '10ba', not None"),
        (ExpertLoad, {"intervall": "1ba"}, "expert_load.intervall is not a key of .*; did you mean 'interval'"),
        (ExpertLoad, {"file": "a", "html": "a"}, r"expert_load.html \(a\) would replace `file`: give it another name"),
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
    assert _worst_ranks(layers).tolist() == [[1.0, 1.0]] * 2, "all experts are on this rank"
    for layer, counts in zip(layers, ([3, 1, 2, 2], [8, 0, 0, 0]), strict=True):
        layer.dispatcher.local_experts = 2
        layer.statistics.counts_E = torch.tensor(counts)
    largest = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, reduce_operation: largest.append(reduce_operation))
    layers[1].experts.most_rounds = 3
    assert _worst_ranks(layers).tolist() == [[1.0, 2.0], [1.0, 3.0]] and largest == ["MAX"]
    assert layers[1].experts.most_rounds == 1, "of the next interval"
    layers[0].context.sum_over_group = lambda counts: counts + torch.tensor([9, 0, 0, 0, 0, 0, 0, 8])
    assert _worst_ranks(layers)[0].tolist() == [pytest.approx(13 / 8.5), 1.0], "over the ranks that share experts"
