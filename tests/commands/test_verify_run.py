"""`foundry-moe verify`: its cases and a clean run pass, and each injected fault is detected and named."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from foundry_moe import MoEConfig
from foundry_moe.cli import main
from foundry_moe.commands.verify import certify
from foundry_moe.commands.verify.formula import why_not
from foundry_moe.commands.verify.rows import Row, difference, formula_rows, step_zero_row
from foundry_moe.commands.verify.shrink import shrink
from foundry_moe.commands.verify.shrink_hugging_face import write_small_model
from foundry_moe.commands.verify.trial import Trial
from foundry_moe.launch.processes import run_processes
from foundry_moe.launch.run_config import check_whole_run, load_run, plain, read_moe
from tests.commands.trial_faults import converted_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("certificates") / "all.json"
    command = [sys.executable, "-m", "tests.commands.trial_faults", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def wrong(certificate: dict[str, Any]) -> set[str]:
    return {row["quantity"] for row in certificate["rows"] if row["verdict"] == "differs"}


def test_cases_on_a_mesh_equal_one_process_in_fp64(certificates: dict[str, Any]) -> None:
    assert len(certificates["cases"]) == 5
    for certificate in certificates["cases"]:
        assert certificate["verdict"] == "pass", (certificate["run"], wrong(certificate))
        rows = {row["quantity"]: row["difference"] for row in certificate["rows"]}
        assert rows["optimizer's state after 3 steps"] < 1e-13  # rounding over three steps of AdamW measures 4e-15
        formula = rows["experts' gradients, by formula"]
        assert formula is None if "widths" in certificate["run"] else formula < 1e-12


@pytest.mark.gpu
def test_cases_on_gpus_equal_one_gpu() -> None:
    command = [sys.executable, "-m", "foundry_moe.cli", "verify", "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]


def test_a_run_in_fp64_differs_by_rounding_alone(certificates: dict[str, Any]) -> None:
    certificate = certificates["clean, fp64"]
    assert certificate["verdict"] == "pass", wrong(certificate)
    scales = {row["difference"] for row in certificate["rows"] if row["quantity"].startswith("auxiliary")}
    assert max(row["difference"] or 0.0 for row in certificate["rows"] if row["difference"] not in scales) < 1e-12


def test_losses_of_each_rank_are_compared_by_the_microbatches_of_their_mesh(certificates: dict[str, Any]) -> None:
    assert certificates["on two meshes"] == ["pass", "pass"]


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
    assert "algorithms.dmoe.mesh.replicate: default -> 1" in certificate["notes"]


def test_a_converted_model_begins_as_the_one_it_came_from(certificates: dict[str, Any]) -> None:
    certificate = certificates["converted"]
    assert certificate["verdict"] == "pass", wrong(certificate)
    rows = {row["quantity"]: row for row in certificate["rows"]}
    assert rows["step 0 of the converted model against its source"]["difference"] < 1e-5
    assert {"config.num_hidden_layers: 6 -> 2", "config.hidden_size: 256 -> 64"} <= set(certificate["notes"])


FAULTS = {
    "multiplied": {"experts' gradients", "gradients' norm", "weights after 3 steps"},
    "dropped": {
        "gate's gradient, by its formula",
        "auxiliary loss z: scale on one process",
        "auxiliary loss z: scale on the mesh",
    },
    "counted twice": {
        "gate's gradient",
        "auxiliary loss z: scale on the mesh",
        "auxiliary loss balance: scale on the mesh",
    },
    "weighed as the loss": {
        "gate's gradient",
        "gate's gradient, by its formula",
        "auxiliary loss balance: scale on the mesh",
    },
    "softmax twice": {"layer's output, by its formula", "gate's gradient, by its formula"},
    "one bias stays": {"gate's bias, equal on all ranks"},
    "swapped": {"state saved, resumed on (1, 2, 1)"},
}
UNTOUCHED = {
    "multiplied": {"gate's gradient", "dense gradients", "auxiliary loss z: scale on the mesh"},
    "dropped": {"gate's gradient", "layer's output, by its formula", "auxiliary loss balance: scale on the mesh"},
    "counted twice": {"auxiliary loss z: scale on one process", "layer's output, by its formula"},
    "weighed as the loss": {"layer's output, by its formula", "experts' gradients, by formula"},
    "softmax twice": {"gate's gradient", "experts' gradients"},
    "one bias stays": {"layer's output, by its formula", "experts' gradients, by formula"},
    "swapped": {"gate's gradient", "weights after 3 steps"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_the_row_that_names_it(certificates: dict[str, Any], fault: str) -> None:
    certificate = certificates[fault]
    assert certificate["verdict"] == "differs"
    assert wrong(certificate) >= FAULTS[fault], certificate["rows"]
    assert not wrong(certificate) & UNTOUCHED[fault], "it would say that all is wrong"


@pytest.mark.parametrize("side_by_side", [1, 3])
def test_each_trial_is_launched_once_and_resumes_what_is_saved_before(side_by_side: int) -> None:
    def trial(name: str, processes: int) -> Trial:
        return Trial(name=name, run={}, processes=processes, precision="fp64")

    alone = trial("alone", 1)
    roles = [
        {"mesh": trial(f"mesh {n}", 2), "alone": alone, "resumed": trial(f"resumed {n}", 1 if n == 3 else 2)}
        for n in range(4)
    ]
    first, later = certify._launches(roles, 2, side_by_side)
    assert len(first) == side_by_side + 1
    assert [[trial.name for trial in launch] for launch in later] == [["resumed 3"]]
    assert all(len({trial.processes for trial in launch}) == 1 for launch in first)
    names = [trial.name for launch in first for trial in launch]
    assert sorted(names) == sorted({"alone", *(f"mesh {n}" for n in range(4)), *(f"resumed {n}" for n in range(3))})
    assert all(names.index(f"mesh {n}") + 1 == names.index(f"resumed {n}") for n in range(3))


def test_an_error_ends_the_launches_beside_it() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 of 1 failed"):
        certify._run_together(partial(run_processes, sleep_or_fail, world_size=1, preload=()), [[60.0], [], [60.0]])
    assert time.monotonic() - began < 50


def sleep_or_fail(seconds: list[float]) -> None:
    time.sleep(seconds[0])


def test_a_run_that_fails_is_one_sentence(certificates: dict[str, Any]) -> None:
    assert certificates["failing"].endswith("ended with: RuntimeError: this rank had enough")


# those that build a model from its sizes; others begin from a folder that somebody has to make
YAMLS = sorted(
    str(path.relative_to(ROOT))
    for kind in ("demo", "bench", "own_text", "pretrain", "cluster")
    for path in (ROOT / "yamls" / kind).glob("*.yaml")
)


@pytest.mark.quick
@pytest.mark.parametrize("name", YAMLS)
def test_each_shipped_run_shrinks_and_keeps_what_it_means(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = plain(load_run(name, []))
    config = check_whole_run(run)
    assert config is not None
    shrunk = shrink(run, mesh=None, device="cpu")
    small = read_moe(shrunk.run)
    assert small is not None and small.expert_hidden_size != config.expert_hidden_size
    for key in ("num_experts", "top_k", "activation", "gate", "loss", "balance_over", "capacity", "layers"):
        assert getattr(small, key) == getattr(config, key), key
    model = shrunk.run["model"]
    assert model["d_model"] <= 256 and model["n_layers"] == 2 and model["d_model"] % model["n_heads"] == 0
    scale = (model.get("attn_config") or {}).get("softmax_scale")
    if scale is not None:  # one over the root of a head's width, in all of these
        assert scale == pytest.approx((model.get("head_dim") or model["d_model"] / model["n_heads"]) ** -0.5)
    assert shrunk.batch % shrunk.alone == 0 and shrunk.processes <= 8
    if shrunk.mesh is not None and config.mesh_config is not None:
        axes = (config.mesh_config.replicate, config.mesh_config.shard, config.mesh_config.expert)
        for written, chosen in zip(axes, shrunk.mesh, strict=True):
            assert written == "auto" or (written > 1) == (chosen > 1), (axes, shrunk.mesh)


@pytest.mark.quick
def test_experts_of_a_hugging_face_model_stay_shards_of_its_dense_block(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "top_k": 4, "expert_hidden_size": 512, "shared_expert_hidden_size": 256}
    run = converted_run(tmp_path / "llama")
    run["algorithms"]["dmoe"] |= experts
    config = read_moe(run)
    assert config is not None
    run, scale, _, _ = write_small_model(run, config, tmp_path / "small")
    small = read_moe(shrink(run, mesh=None, device="cpu", scale=scale).run)
    assert small is not None and (small.expert_hidden_size, small.shared_expert_hidden_size) == (128, 64)
    assert json.loads((tmp_path / "small" / "config.json").read_text())["intermediate_size"] == 256


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["yamls/pretrain/8gpu.yaml", "model.moe.top_k=65"], "top_k (65) must be between 1 and num_experts (64)"),
        (["yamls/pretrain/8gpu.yaml", "--mesh", "1,1,3"], "expert (3) must divide num_experts (64)"),
        (["yamls/demo/cpu.yaml", "--mesh", "1,1,2"], "the run has no mesh"),
        (["no/such.yaml"], "no/such.yaml: there is no such file"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        main(["verify", *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: ") and sentence in error and error.count("\n") == 1


@pytest.mark.quick
def test_what_is_missing_or_no_number_differs() -> None:
    some = torch.ones(3)
    for measured, expected in ((None, some), (some, None), (some[:2], some), (some * math.nan, some)):
        assert Row(quantity="x", difference=difference(measured, expected)).verdict == "differs"
    assert difference(some * (1 + 1e-6), some) < 1e-5
    assert Row(quantity="x", why="no formula").verdict == "not compared"
    assert step_zero_row({"converted": (some, some * 2)}).verdict == "differs"
    base = MoEConfig(num_experts=4, top_k=1, gate={"name": "base"})
    assert why_not(base, {}) == "gate base has no independent formula"
    switch = MoEConfig(num_experts=4, top_k=1, gate={"name": "switch"})
    assert not why_not(switch, {"jitter": 0.01})


@pytest.mark.quick
def test_a_loss_whose_gradient_is_nothing_but_rounding_is_not_compared() -> None:
    """Such as a balance where each token has all experts."""
    gate = torch.ones(2, 3, dtype=torch.float64)

    def scales(balance: float) -> list[Row]:
        layer = {"main": {"gate.weight_ED": gate}, "losses": {"balance": balance * gate}, "output": 0.0}
        alone = {"formula": {"ffn": layer}, "gradient/ffn.gate.weight_ED": (1 + balance) * gate}
        return [row for row in formula_rows({"alone": alone, "mesh": alone}, 1e-4) if "auxiliary" in row.quantity]

    assert [row.verdict for row in scales(1e-17)] == ["not compared"]
    assert {row.verdict for row in scales(1e-3)} == {"same"}
