"""`foundry-moe verify run.yaml`: a clean run passes, and each planted fault is found and named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("certificates") / "all.json"
    command = [sys.executable, "-m", "tests.commands.trial_faults", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def wrong(certificate: dict[str, Any]) -> set[str]:
    return {row["quantity"] for row in certificate["rows"] if row["verdict"] == "differs"}


@pytest.mark.parametrize("name", ["clean", "clean, biased"])
def test_a_clean_run_passes_and_every_row_was_compared(certificates: dict[str, Any], name: str) -> None:
    certificate = certificates[name]
    assert certificate["verdict"] == "pass", wrong(certificate)
    left = {row["quantity"]: row["why"] for row in certificate["rows"] if row["verdict"] == "not compared"}
    assert left == {
        "shared expert's gradients": "there is none",
        "step 0 of the converted model against its source": "the model is not converted from another",
    }
    assert certificate["mesh"].startswith("(1, 1, 2)") and len(certificate["rows"]) >= 18
    assert any("2 microbatches" in note for note in certificate["notes"])


FAULTS = {
    "multiplied": {"experts' gradients", "gradients' norm", "weights after 3 steps"},
    "dropped": {
        "router's gradient, by its formula",
        "auxiliary loss z: scale on one process",
        "auxiliary loss z: scale on the mesh",
    },
    "counted twice": {
        "router's gradient",
        "auxiliary loss z: scale on the mesh",
        "auxiliary loss balance: scale on the mesh",
    },
    "softmax twice": {"layer's output, by its formula", "router's gradient, by its formula"},
    "one bias stays": {"router's bias, equal on all ranks"},
    "swapped": {"state saved, resumed on (1, 2, 1)"},
}
UNTOUCHED = {
    "multiplied": {"router's gradient", "dense gradients", "auxiliary loss z: scale on the mesh"},
    "dropped": {"router's gradient", "layer's output, by its formula", "auxiliary loss balance: scale on the mesh"},
    "counted twice": {"auxiliary loss z: scale on one process", "layer's output, by its formula"},
    "softmax twice": {"router's gradient", "experts' gradients"},
    "one bias stays": {"layer's output, by its formula", "experts' gradients, by formula"},
    "swapped": {"router's gradient", "weights after 3 steps"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_the_row_that_names_it(certificates: dict[str, Any], fault: str) -> None:
    certificate = certificates[fault]
    assert certificate["verdict"] == "differs"
    assert wrong(certificate) >= FAULTS[fault], certificate["rows"]
    assert not wrong(certificate) & UNTOUCHED[fault], "it would say that all is wrong"


def test_a_run_that_fails_is_one_sentence(certificates: dict[str, Any]) -> None:
    assert certificates["failing"].endswith("ended with: RuntimeError: this rank had enough")
