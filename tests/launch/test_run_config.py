"""A run's YAML and what the command line says beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foundry_moe.launch.run_config import load_run, plain

DEMO = str(Path(__file__).parents[2] / "yamls" / "demo" / "cpu.yaml")


def load(*overrides: str) -> dict[str, Any]:
    return plain(load_run(DEMO, list(overrides)))


def test_another_gate_on_the_command_line_brings_its_own_keys_alone() -> None:
    assert load("model.moe.gate={name: switch, jitter: 0.1}")["model"]["moe"]["gate"] == {
        "name": "switch",
        "jitter": 0.1,
    }


def test_an_empty_mapping_on_the_command_line_empties_what_stood_there() -> None:
    assert load("model.moe.loss={}")["model"]["moe"]["loss"] == {}


@pytest.mark.parametrize("override", ["model.moe.gate={scale: 2.0}", "model.moe.gate={name: topk, scale: 2.0}"])
def test_keys_of_the_same_gate_are_added(override: str) -> None:
    gate = {"name": "topk", "score": "softmax", "normalize": True, "scale": 2.0}
    assert load(override)["model"]["moe"]["gate"] == gate


def test_an_override_may_name_other_keys_of_the_run() -> None:
    assert (
        load("model.max_seq_len=${max_seq_len}", "tokenizer={name: x, kwargs: {a: '${seed}'}}")["model"]["max_seq_len"]
        == 256
    )


@pytest.mark.parametrize("key", ["eval_loader.1.label", "eval_loader[1].label"])
def test_an_override_may_name_an_item_of_a_list(key: str) -> None:
    sets = [{"label": "a", "name": "text"}, {"label": "c", "name": "text"}]
    assert load("eval_loader=[{label: a, name: text}, {label: b, name: text}]", f"{key}=c")["eval_loader"] == sets


@pytest.mark.parametrize(
    "override",
    ["a=${nope}", "a=${a}", "model.moe.gate={name: topk", "a={b: 1, b: 2}", pytest.param(f"a={'[' * 3000}", id="deep")],
)
def test_an_override_that_cannot_be_read_is_one_sentence(override: str) -> None:
    with pytest.raises(ValueError, match=r"has no value|cannot be read") as caught:
        load(override)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


LONG = {"deep": "a: " + "[" * 5000, "deep mapping": "{a: " * 5000, "number": f"a: {'9' * 5000}", "long": "#" * 2**23}


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "3",
        "- 1",
        "a: !!python/none x",
        "a: &x [*x]",
        "\x00",
        "a: ${b}",
        *(pytest.param(text, id=name) for name, text in LONG.items()),
    ],
)
def test_a_file_that_is_no_run_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        plain(load_run(str(path), []))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_one_word_is_no_run_and_a_key_without_a_value_is_one_of_several(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\nload_path:\n")
    assert plain(load_run(str(path), [])) == {"seed": 1, "load_path": None}
    path.write_text("word")
    with pytest.raises(ValueError, match="must be a mapping of keys to values"):
        load_run(str(path), [])
