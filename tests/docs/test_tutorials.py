"""The commands of the tutorials in order, as printed, but for fewer batches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.helpers.pages import blocks, link_tree, run_block

PAGE, HUGGING_FACE, INSTRUCTIONS, CLUSTER = (
    f"tutorials/{name}.md" for name in ("own_text", "hugging_face", "instructions", "cluster")
)
FIRST, WHOLE = 6, 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tutorials")
    link_tree(folder)
    return folder


@pytest.fixture(scope="module")
def said(folder) -> list[tuple[str, str]]:
    """Each block of the first page and its output."""
    pairs = []
    for block in blocks(PAGE, "bash"):
        command = block.replace("max_duration=60ba", f"max_duration={FIRST}ba")
        if block.startswith("foundry-moe train") and command == block:
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
    first, second = [output for block, output in said if block.startswith("foundry-moe train")]
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


@pytest.fixture(scope="module")
def hugging_face(folder, said) -> list[tuple[str, str]]:
    return [(block, run_block(block, folder)) for block in blocks(HUGGING_FACE, "bash")]


def test_a_hugging_face_model_is_trained_and_leaves_as_one(folder, hugging_face):
    assert output_of(hugging_face, "foundry-moe check").startswith("ok: hf_causal_lm")
    assert "as Mixtral" in output_of(hugging_face, "export runs/instructions")
    assert "as Mixtral" in output_of(hugging_face, "init=upcycle")
    for run in ("instructions", "upcycled"):
        model = AutoModelForCausalLM.from_pretrained(folder / "runs" / run / "exported")
        assert model.config.model_type == "mixtral"


def test_adapters_are_trained_on_instructions_exported_and_continued(folder, said):
    outputs = [(block, run_block(block, folder)) for block in blocks(INSTRUCTIONS, "bash")]
    assert output_of(outputs, "foundry-moe check").startswith("ok: hf_causal_lm")
    assert "Mixtral in the format peft" in output_of(outputs, "--adapter")
    runs = [output for block, output in outputs if block.startswith("composer")]
    first, second = (
        [float(found) for found in re.findall(r"^(?:first|last) loss ([\d.]+)$", run, re.M)] for run in runs
    )
    assert first[1] < first[0], "a base of few batches, and adapters of rank 4: not by much"
    assert second[0] < (first[0] + first[1]) / 2, "the second run starts where the first ended"
    assert "as Mixtral" in output_of(outputs, "--merge")
    assert "Who speaks?" in output_of(outputs, "AutoModelForCausalLM")


def test_a_lost_process_is_replaced_and_the_run_completes(folder, said):
    outputs = [(block, run_block(block, folder)) for block in blocks(CLUSTER, "bash")]
    assert output_of(outputs, "foundry-moe check").startswith("ok: ")
    assert "tokens/s per GPU" in output_of(outputs, "foundry-moe plan")
    rehearsal = output_of(outputs, "docker/entrypoint.sh")
    assert re.search(r"resuming at batch (10|20)\b", rehearsal) and "(batch 40)" in rehearsal
