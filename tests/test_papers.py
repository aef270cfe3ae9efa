"""The papers' claims that can be rerun: each script lives."""

import re
from pathlib import Path

import pytest

from benchmarks.papers import gradient_scale
from benchmarks.papers.__main__ import CLAIMS

ROOT = Path(__file__).parents[1]


@pytest.mark.quick
def test_every_command_names_a_script_that_exists():
    for _, command in CLAIMS:
        found = re.search(r"-m ([\w.]+)|(benchmarks/\w+\.py)", command)
        path = found[2] or found[1].replace(".", "/") + ".py"
        assert (ROOT / path).exists(), command


def test_the_scale_of_experts_gradients_is_that_of_one_process_with_the_factor_alone(tmp_path):
    with_factor, without = gradient_scale.rows_of([(1, 1, 2)])
    assert with_factor[1:3] == ["1/2", "1.0000"] and float(with_factor[3]) < 1e-12
    assert without[1:3] == ["none", "2.0000"] and float(without[5]) > 0.01
    gradient_scale.plot([with_factor, without], tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 1000
