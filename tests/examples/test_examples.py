"""The programs in examples/ run as they stand, from where a reader would start them, and do what they say."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.parametrize("launcher", [(), ("-m", "composer.cli.launcher", "-n", "2")], ids=["one", "two"])
def test_composer_script_trains_and_every_expert_has_tokens(launcher: tuple[str, ...]) -> None:
    output = run(*launcher, "examples/composer_script.py")
    loss = float(re.search(r"^loss ([\d.]+);", output, re.M)[1])
    # the frequencies of its bytes alone are worth 3.2 nats a byte
    assert 0.5 < loss < 3.2 < math.log(256)
    shares = [float(share) for share in re.search(r"share of tokens by expert: (.*)", output)[1].split()]
    assert len(shares) == 8 and 0 < min(shares) < max(shares) < 0.5 and sum(shares) == pytest.approx(1, abs=0.05)


@pytest.mark.quick
def test_converted_models_compute_what_they_did() -> None:
    output = run("examples/convert_hugging_face.py")
    differences = [float(number) for number in re.findall(r"largest difference of logits: (\S+)", output)]
    # fp32: sums of a few dozen terms in another order
    assert len(differences) == 2 and max(differences) < 1e-5
    assert float(re.search(r"experts 0 and 1 differ by (\S+)", output)[1]) > 1e-4


def test_a_gate_of_ones_own_is_installed_and_found_by_its_name(tmp_path: Path) -> None:
    # as `pip install examples/own_gate`, but into a folder, and without asking an index for setuptools
    package = tmp_path / "package"
    subprocess.run(["cp", "-r", str(ROOT / "examples" / "own_gate"), str(package)], check=True)
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*install, "--target", str(tmp_path / "site"), str(package))
    paths = os.pathsep.join([str(tmp_path / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    steps = re.findall(r"loss ([\d.]+), ([\d.]+) experts", run("-m", "top_p_gate", PYTHONPATH=paths))
    losses, experts = zip(*((float(loss), float(number)) for loss, number in steps), strict=True)
    assert len(steps) == 3 and losses[-1] < 0.7 * losses[0]
    assert all(1 <= number <= 4 for number in experts) and experts[-1] != experts[0]


@pytest.mark.quick
def test_router_replay_learns_and_its_choices_would_have_differed() -> None:
    steps = re.findall(r"reward ([\d.]+), ([\d.]+)% of", run("examples/router_replay.py"))
    rewards, shares = zip(*((float(reward), float(share)) for reward, share in steps), strict=True)
    assert len(rewards) == 30 and rewards[0] < 0.2 and sum(rewards[-5:]) / 5 > 0.6 and max(shares) > 1


@pytest.mark.quick
def test_a_pruned_layer_trains_back_to_the_dense_loss() -> None:
    output = run("examples/pruned_linear.py", TRITON_INTERPRET="0")
    dense, pruned, trained = (float(loss) for loss in re.findall(r"loss ([\d.]+)", output))
    assert dense < 0.01 and pruned > 4 * dense and trained < 2 * dense


def test_the_notebook_turns_a_dense_model_into_experts(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples" / "dense_to_experts.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "LICENSE").symlink_to(ROOT / "LICENSE")
    (tmp_path / "notebook.py").write_text("\n".join([*code, "figure.savefig('figure.png')"]))
    output = run("notebook.py", cwd=tmp_path, MPLBACKEND="agg", PYTHONPATH=str(ROOT))
    upcycled, saved = (float(number) for number in re.findall(r"largest difference of logits (\S+)", output))
    assert max(upcycled, saved) < 1e-4 and "MixtralForCausalLM" in output
    dense, experts = (float(loss) for loss in re.search(r"dense ([\d.]+), experts ([\d.]+)", output).groups())
    assert max(dense, experts) < float(re.search(r"held-out loss ([\d.]+)", output)[1])
    assert (tmp_path / "figure.png").stat().st_size > 10_000
