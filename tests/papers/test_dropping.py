"""The script that compares ways to train at equal loss, at toy size, and the tokens it trains on."""

import csv
import lzma
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.papers import dropping, make_text, recipe
from benchmarks.papers.tokens import END, HELD_OUT, read_tokens
from benchmarks.papers.transformer import Transformer, next_token_loss

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The project's own pages, in two parts."""
    folder = tmp_path_factory.mktemp("text")
    make(ROOT / "docs", folder, parts=2, part_bytes=100_000, held_out_bytes=20_000)
    return folder


def make(texts, folder, **sizes):
    make_text.make_text(make_text.texts_of(texts), folder, vocabulary=400, **sizes)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dropping", *map(str, arguments)])
    dropping.main()


def row(seconds, loss, **changes):
    made = dropping.Row(
        size="XS", way="dense", seed=0, lr=1e-3, device="cpu", microbatch=1, step=1, tokens=int(10 * seconds),
        seconds=seconds, optimizer_seconds=0.0, loss=loss, dropped=0.0, entropy=0.0, top_share=0.0, peak_gib=0.0,
        constant=True, done=False,
    )  # fmt: skip
    return replace(made, **changes)


def test_texts_are_in_one_part_each_and_tokens_of_a_part_are_made_once(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(200):
        (texts / f"{index}.txt").write_text(f"file {index} " * 50)
    (texts / "copy.txt").write_text("file 7 " * 50)
    (texts / "other.bin").write_text("no text")
    make(texts, tmp_path / "text", parts=3, part_bytes=30_000, held_out_bytes=10_000)
    files = [tmp_path / "text" / name for name in (HELD_OUT, "part1.xz", "part2.xz", "part3.xz")]
    parts = [lzma.decompress(path.read_bytes()).split(END) for path in files]
    assert all(parts) and len(set().union(*parts)) == sum(map(len, parts)) == 200

    (tmp_path / "text" / "part3.xz").rename(tmp_path / "later")
    tokens = read_tokens(tmp_path / "text")
    assert len(tokens.train) == 2 and all(
        (ids == 0).sum() == len(p) for ids, p in zip(tokens.train, parts[1:3], strict=True)
    )
    assert int(max(ids.max() for ids in tokens.train)) < tokens.vocabulary <= 400
    (tmp_path / "text" / "part1.xz").write_bytes(b"")  # not read again
    (tmp_path / "later").rename(tmp_path / "text" / "part3.xz")
    again = read_tokens(tmp_path / "text")
    assert len(again.train) == 3 and (again.train[0] == tokens.train[0]).all()


def test_a_folder_without_text_and_a_part_that_is_too_large_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no tokenizer\.json, held_out\.xz, part1\.xz: run"):
        read_tokens(tmp_path)
    monkeypatch.setattr(make_text, "LARGEST_PART_BYTES", 10)
    with pytest.raises(ValueError, match="give a smaller --part-bytes"):
        make(ROOT / "docs", tmp_path, parts=1)


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
    run(monkeypatch, *flags, "--runs", "dmoe", "cap1", "dense")
    rows = dropping.read_rows(tmp_path / "curves.csv")
    curves = {way: [row for row in rows if row.way == way] for way in dropping.WAYS}
    assert curves["dmoe"][-1].loss < curves["dmoe"][0].loss - 0.15, "0.26 on the pages of November 2026"
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
    assert list(lines) == ["dmoe/0", "cap1/0", "dense/0", "dmoe/1"]
    assert float(lines["dense/0"]["in tokens"]) > 0 and not lines["dmoe/0"]["in tokens"]
    assert (tmp_path / "curves.svg").stat().st_size > 1000


def test_a_run_that_was_cut_off_continues_as_if_it_was_not_also_with_more_text(text, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    way = "fine,experts=16,shared_width=0.5,top_k=4,gate.normalize=False,gate_lr=0.5"
    flags = ("--size", "toy", "--every", 4, "--runs", way, "--tokens", 70_000)
    run(monkeypatch, text, *flags, "--out", whole)
    first = tmp_path / "first"
    first.mkdir()
    for name in ("tokenizer.json", HELD_OUT, "part1.xz"):
        (first / name).symlink_to(text / name)
    run(monkeypatch, first, *flags, "--out", parts, "--seconds", 0)
    assert len(dropping.read_rows(parts / "curves.csv")) == 1 and len(list((parts / "state").iterdir())) == 1
    run(monkeypatch, first, *flags, "--out", parts)
    rows = dropping.read_rows(parts / "curves.csv")
    assert not rows[-1].done and 4 < rows[-1].step < 68
    run(monkeypatch, text, *flags, "--out", parts)
    rows = {row.step: row for row in dropping.read_rows(parts / "curves.csv")}
    expected = {row.step: row for row in dropping.read_rows(whole / "curves.csv")}
    assert expected[68].done and rows[68].done and not list((parts / "state").iterdir())
    for step, row in expected.items():
        assert rows[step].loss == pytest.approx(row.loss, abs=1e-4) and rows[step].lr == row.lr
    assert 0 < rows[68].entropy <= 1 and 1 / 16 <= rows[68].top_share < 1


def test_a_run_with_an_unknown_way_or_a_key_without_value_is_refused(text, tmp_path, monkeypatch, capsys):
    for way, said in (("fin", "fin is none of dmoe, dense"), ("fine,lr", "lr has no value; write lr=VALUE")):
        with pytest.raises(SystemExit):
            run(monkeypatch, text, "--out", tmp_path, "--runs", way)
        assert said in capsys.readouterr().err


def test_compiled_parts_have_the_loss_and_gradients_of_the_model(monkeypatch):
    monkeypatch.setattr("benchmarks.papers.transformer.compiled", lambda function: function)  # inductor takes minutes
    monkeypatch.setattr("benchmarks.papers.transformer.COMPILED_LOGITS", 50 * 10)
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="eager"))
    ids_NS, results = torch.randint(50, (4, 17)), []
    for compile in (False, True, "blocks"):
        model = Transformer(
            16, 2, 50, torch.device("cpu"), experts=4, top_k=2, gate={"name": "topk"}, dense_layers=1, shared_width=0.5,
            balance_over="rank", compile=compile,
        )  # fmt: skip
        model.backward(ids_NS, 1, 4)
        results.append([parameter.grad for parameter in model.model.parameters()])
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_a_balancing_bias_follows_the_loads_of_each_step_also_after_they_were_read():
    gate = {"name": "topk", "bias_balance": True, "bias_step": 0.5}
    model = Transformer(16, 1, 50, torch.device("cpu"), experts=4, top_k=2, gate=gate, loss={})
    bias_E, loads = model.moes[0].gate.bias_E, []
    model.moes[0].after_step = lambda counts_E, _: loads.append(counts_E.clone())
    ids_NS = torch.randint(50, (4, 9))
    for step in range(3):
        model.backward(ids_NS, step, 2)
        model.update()
        if step == 1:
            dropping.gate_figures(model, [])
    assert [int(counts_E.sum()) for counts_E in loads] == [4 * 8 * 2] * 3

    del model.moes[0].after_step
    before = [buffer.clone() for buffer in model.model.buffers()]
    assert dropping.largest_microbatch(model, ids_NS) == 4  # whose steps leave the bias as it was
    assert all(torch.equal(*pair) for pair in zip(before, model.model.buffers(), strict=True))
    model.step(ids_NS, 3)
    assert bias_E.abs().max() == 0.5


def test_factors_of_initial_weights_are_those_of_gates_and_experts_alone():
    small, large = (
        Transformer(16, 1, 50, torch.device("cpu"), experts=4, gate_init=factor, expert_init=2 * factor)
        for factor in (1.0, 3.0)
    )
    for (name, weight), other in zip(small.model.named_parameters(), large.model.parameters(), strict=True):
        factor = 3 if ".gate." in name or ".experts." in name else 1
        torch.testing.assert_close(other, weight * factor, msg=name)


def test_one_command_runs_the_recipe_beside_a_dense_model_and_prints_ratios(text, tmp_path, capsys):
    recipe.main([str(text), "--plans", "toy", "--out", str(tmp_path)])
    with (tmp_path / "toy" / "ratios.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["experts"].split(",")[0] for line in lines} == {"toy-fine", "toy-cap1-0"}
    assert all(line["dense model"] == "toy-dense-0" and float(line["times fewer tokens"]) > 0 for line in lines)
    assert "times faster" in capsys.readouterr().out
    assert (tmp_path / "toy" / "gates.svg").stat().st_size > 1000
    rows = dropping.read_rows(tmp_path / "toy" / "curves.csv")
    assert all(0 < row.entropy <= 1 for row in rows if row.way.startswith("fine"))


def test_ratios_are_read_at_losses_that_both_reach():
    dense = [row(t, 6 - t / 10) for t in (1.0, 5.0, 10.0, 20.0)]  # to a loss of 4
    sparse = [row(r.seconds, r.loss, way="fine", tokens=r.tokens // 2) for r in dense[:3]]  # to a loss of 5
    other = replace(dense[0], seed=1)
    lines = recipe.ratios([*dense, *sparse, other, row(1.0, 1.0, way="fine", constant=False)])
    assert [line[2] for line in lines] == [5.75, 5.5, 5.25, 5.0]
    assert all(line[:2] == ("XS-fine-0", "XS-dense-0") for line in lines)
    assert all(line[3:] == pytest.approx((2.0, 1.0)) for line in lines)
