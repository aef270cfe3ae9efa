"""Loads over time: the file of JSON lines, and layers that collapse."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from composer.loggers import InMemoryLogger

from foundry_moe.callbacks.expert_load import ExpertLoad
from foundry_moe.callbacks.load_health import CollapseWatch, LoadFile
from foundry_moe.layers.losses import gate_entropy
from foundry_moe.loads.history import collapse_entropy, entropy_of
from tests.helpers.training import MOE, fit, mpt

pytestmark = pytest.mark.quick

EVEN, ONE = torch.tensor([[4, 4, 4, 4]]), torch.tensor([[16, 0, 0, 0]])


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_entropy_is_one_when_even_and_zero_when_one_expert_has_all():
    assert entropy_of(EVEN[0].numpy()) == pytest.approx(1.0) and entropy_of(ONE[0].numpy()) == pytest.approx(0.0)
    assert entropy_of(np.array([8, 8, 0, 0])) == pytest.approx(0.5)  # sqrt(4) experts
    assert entropy_of(np.zeros(4)) == entropy_of(np.ones(1)) == 1.0


def test_a_run_writes_its_loads_and_a_resumed_one_goes_on_where_it_was(tmp_path):
    path = tmp_path / "deep" / "load.jsonl"
    logger = InMemoryLogger()
    fit(mpt(), callbacks=[ExpertLoad(interval="2ba", file=str(path))], duration="4ba", loggers=[logger])
    lines = lines_of(path)
    assert [line["batch"] for line in lines] == [2, 4]
    assert [sum(loads) for loads in lines[-1]["loads"].values()] == [256, 256]
    found = lines[-1]["metrics"]
    worst = max(found["dmoe/layer0/max_violation"], found["dmoe/layer1/max_violation"])
    assert worst == found["dmoe/max_violation/worst"] == logger.data["dmoe/max_violation/worst"][-1][1]
    assert found["loss/train/total"] == logger.data["loss/train/total"][-1][1]
    path.write_text(path.read_text() + '{"batch": 5, "lo')  # killed while it wrote
    LoadFile(str(path)).add(4, [0], EVEN, {"loss": float("nan")}, top_k=1)
    assert [line["batch"] for line in lines_of(path)] == [2, 4], "a line of a batch that is repeated goes"
    assert lines_of(path)[-1]["metrics"] == {"loss": None}  # JSON has no NaN
    # another run, whose first line has the loads of batches that the file has lines of
    fit(mpt(), callbacks=[ExpertLoad(interval="3ba", file=str(path))], duration="3ba")
    assert [line["batch"] for line in lines_of(path)] == [3]
    later = LoadFile(str(path))
    later.start = 3
    later.add(9, [0], EVEN, {}, top_k=1)
    assert [line["batch"] for line in lines_of(path)] == [3, 9]


def test_a_file_in_a_bucket_is_refused():
    with pytest.raises(ValueError, match=r"expert_load.file \(s3://b/x.jsonl\) must be a local path"):
        ExpertLoad(file="s3://b/x.jsonl")


def test_a_layer_that_collapses_is_told_once_until_it_recovers():
    watch = CollapseWatch()

    def look(counts_LE):
        return watch.look([7], counts_LE, [entropy_of(counts_LE[0].numpy())], top_k=1)

    assert look(ONE) == [], "one look may be chance"
    (sentence,) = look(ONE)
    assert sentence.startswith("layer 7 collapses onto few of its 4 experts: the entropy of its loads is 0.00")
    assert "3 experts have no tokens" in sentence
    assert look(ONE) == look(EVEN) == look(ONE) == [] and len(look(ONE)) == 1


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (8, 4), (64, 8), (128, 8), (8, 1)])
def test_no_load_is_less_even_than_that_of_the_experts_of_one_token(experts, top_k):
    watch = CollapseWatch()
    collapsed, even = torch.zeros(1, experts), torch.ones(1, experts)
    collapsed[0, :top_k] = 100
    for counts_LE, warned in ((collapsed, 1), (even, 0), (collapsed + 2, 1)):
        entropy_L = [entropy_of(counts_LE[0].double().numpy())]
        said = [sentence for _ in range(3) for sentence in watch.look([0], counts_LE, entropy_L, top_k=top_k)]
        assert len(said) == warned, (counts_LE, entropy_L)
    assert collapse_entropy(top_k, top_k) == 0, "each token has all experts"


@pytest.mark.parametrize("experts", [4, 16])
def test_a_run_whose_gate_collapses_says_so(experts, caplog):
    model = mpt(moe={**MOE, "num_experts": experts})
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight_ED"):
            parameter.data.zero_()  # ties go to the lower expert: all tokens to the same two
    with caplog.at_level(logging.WARNING):
        still = torch.optim.SGD(model.parameters(), lr=0.0)
        fit(model, callbacks=[ExpertLoad()], duration="3ba", optimizer=still)
    said = [r.getMessage() for r in caplog.records if "collapses onto few of its" in r.getMessage()]
    assert len(said) == 2, "each layer once"


def test_the_gates_entropy_is_of_its_probabilities_and_not_of_the_loads(tmp_path):
    model, logger = mpt(), InMemoryLogger()
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight_ED"):
            parameter.data.zero_()  # no preference at all, and yet all tokens to the same two experts
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    path = tmp_path / "load.jsonl"
    fit(model, callbacks=[ExpertLoad(file=str(path))], duration="2ba", optimizer=still, loggers=[logger])
    metrics = lines_of(path)[-1]["metrics"]
    assert metrics["dmoe/layer0/gate_entropy"] == metrics["dmoe/gate_entropy/mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["dmoe/layer0/load_entropy"] == pytest.approx(0.5, abs=1e-5), "two experts of four"
    assert logger.data["dmoe/gate_entropy/mean"][-1][1] == metrics["dmoe/gate_entropy/mean"]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gate_entropy_against_its_definition_without_padding(score):
    logits_TE, mask_T = torch.randn(5, 3, dtype=torch.float64), torch.tensor([True, True, False, True, True])
    probs_TE = logits_TE.softmax(-1) if score == "softmax" else logits_TE.sigmoid()
    probs_TE = (probs_TE / probs_TE.sum(-1, keepdim=True))[mask_T]
    wanted = -(probs_TE * probs_TE.log()).sum(-1).mean() / torch.tensor(3.0).double().log()
    torch.testing.assert_close(gate_entropy(logits_TE, mask_T, score=score), wanted)
    one = torch.tensor([[0.0, -torch.inf]])
    assert gate_entropy(one).item() == 0.0


def test_a_gate_without_logits_has_no_entropy_and_dropped_choices_are_told_by_layer(tmp_path):
    path = tmp_path / "load.jsonl"
    moe = {**MOE, "gate": {"name": "hash"}, "top_k": 1, "loss": {}, "capacity": 0.5}
    fit(mpt(moe=moe), callbacks=[ExpertLoad(file=str(path))], duration="1ba")
    metrics = lines_of(path)[-1]["metrics"]
    assert not any("gate_entropy" in name for name in metrics)
    dropped = [metrics[f"dmoe/layer{layer}/dropped"] for layer in (0, 1)]
    assert min(dropped) >= 0.5 and metrics["dmoe/dropped/mean"] == pytest.approx(sum(dropped) / 2)
