"""README and docs are true: their tables name every key there is, their YAML is accepted, their paths exist."""

import re
from pathlib import Path

import matplotlib
import pytest
import yaml

from benchmarks.plot_layer import CASES, PICTURE, WAYS, read_times
from benchmarks.plot_recipes import draw
from foundry_moe.cli import EXIT_CODES
from foundry_moe.config import ACTIVATIONS, MoEConfig
from foundry_moe.schema import from_mapping

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
KEYS = (ROOT / "docs" / "reference" / "configuration.md").read_text()
DESIGN = (ROOT / "docs" / "explanation" / "design.md").read_text()


def test_every_activation_is_named():
    row = next(line for line in KEYS.splitlines() if line.startswith("| `activation`"))
    assert set(re.findall(r"\w+", row.split("|", 3)[3].split(";")[0])) == set(ACTIVATIONS)


def test_the_yaml_to_copy_is_accepted():
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", README, re.S)]
    assert from_mapping(MoEConfig, blocks[0]["model"]["moe"], "model.moe").num_experts == 64
    assert from_mapping(MoEConfig, blocks[1]["algorithms"]["dmoe"], "algorithms.dmoe").init == "upcycle"


def test_tables_and_chart_of_layers_have_the_figures_of_their_csv_files():
    times = read_times()
    for text in (README, (ROOT / "benchmarks" / "RESULTS.md").read_text()):
        for case in CASES:
            row = re.findall(rf"^\| {case} \| (?:[\d.]+ \| \d+ \| )([\d.]+) \| ([\d.]+) \|", text, re.M)
            assert [tuple(map(float, cells)) for cells in row] == [(times[case, "ours"], times[case, "torch grouped"])]
    chart = re.findall(r">([\d.]+)</text>", PICTURE.read_text())
    for way in WAYS:
        bars = [f"{times[case, way]:.2f}" for case in CASES]
        assert any(chart[place : place + len(bars)] == bars for place in range(len(chart))), way


def test_the_tree_names_every_folder_of_the_package_and_no_other():
    tree = DESIGN[DESIGN.index("## The tree") :].split("```")[1]
    inside = {path.parent.name for path in (ROOT / "foundry_moe").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/", tree, re.M)) == inside
    for name in re.findall(r"^(\w+)/", tree, re.M):
        assert (ROOT / name).is_dir(), name
    for line in tree.splitlines():
        folder = re.match(r"  (\w+)/ ", line)
        for name in re.findall(r"\b(\w+\.py)\b", line):
            assert (ROOT / "foundry_moe" / (folder[1] if folder else "") / name).exists(), line


def test_what_the_status_names_exists():
    """A claim that points at a test or a script that is gone has no proof any more."""
    status = (ROOT / "docs" / "reference" / "status.md").read_text()
    named = set(re.findall(r"`((?:tests|benchmarks|docker)/[\w/.]+)`", status))
    assert len(named) > 10 and not [name for name in named if not (ROOT / name).exists()]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([\w-]+)", status + README)) <= set(targets)


def test_the_table_of_exit_codes_is_that_of_the_command():
    table = KEYS[KEYS.index("### Exit codes") :]
    codes = re.findall(r"^\| (\d+) \|", table, re.M)
    assert codes == re.findall(r"(?:: |; )(\d+) ", EXIT_CODES)


def test_charts_of_recipes_are_drawn_from_their_csv_files(tmp_path):
    draw(tmp_path)
    for path in tmp_path.glob("*.svg"):
        committed = (PICTURE.parent / path.name).read_text()
        if f"Matplotlib v{matplotlib.__version__}" not in committed:
            pytest.skip("another version of matplotlib draws other bytes")
        drawn, before = (re.sub(r"\bp[0-9a-f]{10}\b", "", text) for text in (path.read_text(), committed))
        assert drawn == before  # but the names of clip paths, which depend on the machine
