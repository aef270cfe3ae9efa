"""docs/how-to/plain_pytorch.md: its commands run as printed, and its code is that of the example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foundry_moe import MoEConfig, MoELayer
from tests.helpers.demo import ROOT
from tests.helpers.pages import blocks, link_tree, run_block

PAGE = "how-to/plain_pytorch.md"
EXAMPLE = (ROOT / "examples" / "plain_pytorch.py").read_text()


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss ([\d.]+)$", output, re.M)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    link_tree(tmp_path)
    return tmp_path


def test_a_run_of_four_processes_continues_on_two_as_if_uninterrupted(folder):
    first, second = blocks(PAGE, "bash")
    four = run_block(first, folder)
    two = run_block(second, folder)
    assert "loaded step 6 on 2 processes" in two
    assert list(losses(four)) == [1, 2, 3, 4, 5, 6] and list(losses(two)) == [7, 8, 9, 10]
    whole = losses(run_block(second.replace("runs/plain", "runs/whole"), folder))
    for step, loss in {**losses(four), **losses(two)}.items():
        # fp32 sums in another order, printed with five digits
        assert loss == pytest.approx(whole[step], abs=2e-4)
    assert whole[10] < whole[1]


@pytest.mark.quick
def test_the_code_of_the_page_is_the_examples():
    shown = [line.strip() for block in blocks(PAGE, "python") for line in block.splitlines()]
    example = {line.strip() for line in EXAMPLE.splitlines()}
    assert shown and not [line for line in shown if line and not line.startswith("#") and line not in example]


@pytest.mark.quick
def test_a_layer_on_its_own_refuses_a_mesh():
    keys = {"num_experts": 4, "expert_hidden_size": 8, "activation": "gelu"}
    with pytest.raises(ValueError, match=r"does not place itself on a mesh; .* foundry_moe.parallelize\(model, mesh\)"):
        MoELayer(8, MoEConfig(**keys, mesh={"expert": 2}))
    assert "4 experts, 8 -> 8 -> 8" in repr(MoELayer(8, MoEConfig(**keys)))
