"""The script that compares ways to train at equal loss, at toy size, and the tokens it trains on."""

import csv
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.papers import dropping, make_text
from benchmarks.papers.tokens import Tokens, read_tokens, write_tokens
from benchmarks.papers.transformer import Transformer, next_token_loss

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Tokens of the project's own pages."""
    path = tmp_path_factory.mktemp("text") / "text.bin.xz"
    write_tokens(make_text.tokens_of_folder(ROOT / "docs", 60_000, vocabulary=400, bpe_bytes=50_000), path)
    return path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dropping", *map(str, arguments)])
    dropping.main()


def row(seconds, loss, **changes):
    made = dropping.Row(
        size="XS", way="dense", seed=0, device="cpu", microbatch=1, step=1, tokens=int(10 * seconds), seconds=seconds,
        optimizer_seconds=0.0, loss=loss, dropped=0.0, peak_gib=0.0, constant=True, done=False,
    )  # fmt: skip
    return replace(made, **changes)


def test_held_out_text_is_of_files_that_are_not_trained_on(tmp_path):
    for index in range(200):
        (tmp_path / f"{index}.txt").write_text(f"file {index} " * 50)
    tokens = make_text.tokens_of_folder(tmp_path, 20_000, vocabulary=300, bpe_bytes=10_000)
    held_out, trained = ({tuple(d) for d in documents(part)} for part in (tokens.validation, tokens.train))
    assert len(tokens.validation) == 20_000 // make_text.HELD_OUT and held_out and trained
    assert not held_out & trained


def documents(ids):
    """What stands between two ends, whole."""
    ends = np.flatnonzero(ids == 0)
    return [ids[began + 1 : ended] for began, ended in pairwise(ends)] or [ids]


def test_tokens_come_back_as_they_were_written_and_a_file_cut_short_is_refused(tmp_path):
    ids = np.random.default_rng(0).integers(0, 65_536, 5000).astype(np.uint16)
    tokens = Tokens(vocabulary=65_536, train=ids[:4000], validation=ids[4000:], source="random")
    write_tokens(tokens, tmp_path / "text")
    back = read_tokens(tmp_path / "text")
    assert (back.train == tokens.train).all() and (back.validation == tokens.validation).all()
    with pytest.raises(ValueError, match="65536 at most"):
        write_tokens(replace(tokens, vocabulary=65_537), tmp_path / "text")


def test_an_mds_folder_is_taken_as_it_is(tmp_path):
    from streaming import MDSWriter

    for split, first in (("train", 0), ("val", 1000)):
        with MDSWriter(out=str(tmp_path / split), columns={"tokens": "ndarray:int32"}) as writer:
            for index in range(4):
                writer.write({"tokens": np.arange(first + 100 * index, first + 100 * index + 100, dtype=np.int32)})
    tokens = make_text.tokens_of_mds(tmp_path, 60_000)
    assert tokens.vocabulary == 1400 and (tokens.train == np.arange(400)).all()
    assert (tokens.validation == np.arange(1000, 1400)).all()


def test_a_loss_in_chunks_has_the_value_and_gradients_of_the_whole(monkeypatch):
    head, targets_T = torch.nn.Linear(8, 50), torch.randint(50, (37,))
    results = []
    for logits in (1 << 28, 10 * 50):
        monkeypatch.setattr("benchmarks.papers.transformer.LOGITS", logits)
        x_TD = torch.ones(37, 8).cumsum(0).div(37).requires_grad_()
        head.zero_grad()
        loss = next_token_loss(x_TD, head, targets_T)
        loss.backward()
        results.append([loss.detach(), x_TD.grad, head.weight.grad.clone()])
    torch.testing.assert_close(*results)


def test_the_largest_microbatch_that_fits_is_found_and_leaves_the_model_as_it_was(monkeypatch):
    device = torch.device("cpu")
    model = Transformer(16, 1, 50, device, experts=4)
    before = [weight.clone() for weight in model.model.parameters()]
    whole, seen = model.loss, []

    def loss(ids_NS, batch):
        seen.append(len(ids_NS))
        if len(ids_NS) > 3:
            raise torch.OutOfMemoryError
        return whole(ids_NS, batch)

    monkeypatch.setattr(model, "loss", loss)
    assert dropping.largest_microbatch(model, torch.randint(50, (16, 9))) == 2
    assert seen == [16, 8, 4, 2, 2, 2, 2] and not model.optimizer.state
    for weight, was in zip(model.model.parameters(), before, strict=True):
        assert torch.equal(weight, was) and weight.grad is None


def test_speed_at_equal_loss_is_read_where_both_are_before_the_decay():
    dropless = [row(t, 5 - t / 10) for t in (1.0, 5.0, 10.0, 20.0)]
    slower = [row(3 * r.seconds, r.loss, tokens=2 * r.tokens) for r in dropless[:3]]
    slower.append(row(40.0, 2.0, constant=False))
    level, in_time, in_tokens = dropping.speedups(slower, dropless)
    assert (level, in_time, in_tokens) == pytest.approx((4.0, 3.0, 2.0))


def test_ways_differ_in_their_ffns_alone_and_what_is_done_is_kept(text, tmp_path, monkeypatch, capsys):
    flags = (text, "--size", "toy", "--every", 4, "--out", tmp_path)
    run(monkeypatch, *flags, "--runs", "dmoe", "cap1", "dynamic", "dense")
    rows = dropping.read_rows(tmp_path / "curves.csv")
    curves = {way: [row for row in rows if row.way == way] for way in dropping.WAYS}
    assert curves["dmoe"][-1].loss < curves["dmoe"][0].loss - 0.3
    # dynamic drops none, so that it computes what dropless does
    for padded, dropless in zip(curves["dynamic"], curves["dmoe"], strict=True):
        assert padded.loss == pytest.approx(dropless.loss, abs=2e-3) and padded.dropped == 0
    assert all(row.dropped > 0.01 for row in curves["cap1"]) and curves["cap1"][-1].loss != curves["dmoe"][-1].loss
    assert [row.tokens for row in curves["dense"]] == [row.tokens for row in curves["dmoe"]]
    assert {row.done for row in rows if row.step == rows[-1].step} == {True}

    capsys.readouterr()
    dropping.write_rows(tmp_path / "curves.csv", [row(1.0, 9.0, size="toy", way="cap2")], "a")  # cut off
    run(monkeypatch, *flags, "--runs", "dmoe", "dmoe/1")
    said = capsys.readouterr().out
    assert "dmoe/0: microbatch" not in said and "dmoe/1: microbatch" in said
    with (tmp_path / "table.csv").open() as file:
        lines = {line["run"]: line for line in csv.DictReader(file)}
    assert list(lines) == ["dmoe/0", "cap1/0", "dynamic/0", "dense/0", "dmoe/1"]
    assert float(lines["dynamic/0"]["in tokens"]) == pytest.approx(1, abs=0.01) and not lines["dmoe/0"]["in tokens"]
    assert (tmp_path / "curves.png").stat().st_size > 1000
