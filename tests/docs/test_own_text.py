"""The commands of docs/tutorials/own_text.md in order, as printed, but for fewer batches."""

from __future__ import annotations

import re

import pytest

from tests.helpers.pages import blocks, link_tree, run_block

PAGE = "tutorials/own_text.md"
FIRST, WHOLE = 6, 9


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[tuple[str, str]]:
    """Each block and its output."""
    folder = tmp_path_factory.mktemp("own_text")
    link_tree(folder)
    pairs = []
    for block in blocks(PAGE, "bash"):
        command = block.replace("max_duration=60ba", f"max_duration={FIRST}ba")
        if block.startswith("composer") and command == block:
            command = block.rstrip() + f" max_duration={WHOLE}ba"
        pairs.append((block, run_block(command, folder)))
    return pairs


def output_of(said: list[tuple[str, str]], word: str) -> str:
    (output,) = [output for block, output in said if word in block]
    return output


def test_a_folder_of_text_becomes_a_tokenizer_and_samples(said):
    assert "data/own/tokenizer: 4096 tokens" in output_of(said, "train_tokenizer")


def test_the_run_trains_resumes_and_is_exported(said):
    assert output_of(said, "foundry-moe check ").startswith("ok: dmoe_causal_lm, 4 layers of width 128, 8 experts")
    first, second = [output for block, output in said if block.startswith("composer")]
    losses = [float(re.search(rf"^{name} loss ([\d.]+)$", first, re.M)[1]) for name in ("first", "last")]
    assert losses[1] < losses[0] < 9
    assert f"resuming at batch {FIRST}" in second
    assert re.search(rf"^checkpoint .*\(batch {WHOLE}\)", second, re.M)
    assert str(WHOLE) in output_of(said, "checkpoints ls")


def test_the_exported_model_answers_in_plain_transformers(said):
    assert "The state of the union" in output_of(said, "AutoModelForCausalLM")


def test_the_numbers_of_parameters_are_those_of_the_page(said):
    plan = output_of(said, "foundry-moe plan")
    total, active = map(float, re.search(r"parameters: ([\d.]+) M, ([\d.]+) M active", plan).groups())
    assert (round(total / 1000, 2), round(active / 1000, 2)) == (0.23, 0.05)
