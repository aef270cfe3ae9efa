"""What tests show on CPU processes, on one GPU and on two: certificates, initial weights, and resuming elsewhere.

Each fixture launches a number of processes once for all its tests: imports are most of their time. Resuming has
fixtures of its own, so that it can be run alone.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from foundry_moe.commands.verify.rows import TOLERANCE
from foundry_moe.launch.processes import run_processes
from tests.distributed import elastic_worker, gates_worker, parity_worker, trainer_worker
from tests.distributed.test_parity_lora import CROWDED, MIXED
from tests.helpers.launching import call_each
from tests.helpers.small_training import CASES, Case, compare, run_meshes
from tests.helpers.tiny_runs import YAML, mesh, run

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

MESHES = [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
EVERYWHERE = [*CASES, MIXED, CROWDED]
GATES = [gates_worker.case_of(name) for name in gates_worker.ALONE]
ON_GPU = {"dtype": torch.float32, "device": "cuda"}
BREAK = 4
RUNS = {
    "all weights": {},
    "adapters": {"keys": {"save_frozen": False}, "algorithms.dmoe.lora": {"r": 2, "alpha": 4}},
}

# the first update is zero, so a run ends with its initial weights
AT_START = {"max_duration": "1ba", "optimizer.lr": 0.0, "optimizer.weight_decay": 0.0}
UPCYCLED = {"algorithms.dmoe.init": "upcycle", "algorithms.dmoe.gate": {"name": "topk", "noise": True}}
SHARED = {"algorithms.dmoe.shared_expert_hidden_size": 8}
STARTS = {
    "random": SHARED,
    "upcycled, with noise": {**SHARED, **UPCYCLED},
    "meta": {"model.init_device": "meta", "algorithms.dmoe.mesh.compile": "blocks", **SHARED},
    "orthogonal": {"algorithms.dmoe.gate": {"name": "base"}, "algorithms.dmoe.top_k": 1, "algorithms.dmoe.loss": None},
}


def launch(gpus: int, *functions: Any) -> list[Any]:
    # without preload: a process that has started CUDA must not fork, and LLM Foundry may start it at import
    return run_processes(call_each, list(functions), world_size=gpus, backend="nccl", preload=())


def cases_on(meshes: list[Any], cases: tuple[Case, ...] | list[Case]) -> Any:
    return partial(run_meshes, meshes, cases, {}, **ON_GPU)


def train(*overrides: dict[str, Any]) -> Any:
    return partial(trainer_worker.train_runs, YAML, [{**AT_START, **keys} for keys in overrides])


def resumable(*overrides: dict[str, Any]) -> Any:
    return partial(elastic_worker.run_all, YAML, list(overrides))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpus")


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    """On two GPUs: all cases on each mesh, and initial weights."""
    functions = [cases_on(MESHES, EVERYWHERE), cases_on(MESHES[:1], GATES)]
    functions += [partial(parity_worker.draw_on_meta, mesh, 4, 6, device="cuda") for mesh in MESHES]
    functions.append(train(*(mesh(*sizes, **keys) for sizes in MESHES for keys in STARTS.values())))
    cases, gates, *gaps, starts = launch(2, *functions)
    return {"cases": cases | gates, "gaps": gaps, "starts": starts}


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """On one GPU: all cases, and initial weights."""
    cases, starts = launch(1, cases_on([None], [*EVERYWHERE, *GATES]), train(*STARTS.values()))
    return {"cases": cases, "starts": dict(zip(STARTS, starts, strict=True))}


@pytest.fixture(scope="module")
def whole_on_two(root: Path) -> dict[str, Any]:
    """On two GPUs, of each kind a whole run, whose results these are, and one that is broken off."""
    functions = []
    for kind, keys in RUNS.items():
        whole, broken = (root / f"{name} {kind}" for name in ("whole", "broken"))
        functions.append(resumable(run(whole, (1, 1, 2), **keys), run(broken, (1, 1, 2), break_at=BREAK, **keys)))
    return {kind: whole for kind, (whole, _) in zip(RUNS, launch(2, *functions), strict=True)}


@pytest.fixture(scope="module")
def on_one(root: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """On one GPU, runs that go on: its own, and those of two GPUs if there are any."""
    own = [
        run(root / "own", (1, 1, 1)),
        run(root / "parted", (1, 1, 1), break_at=BREAK),
        run(root / "parted", (1, 1, 1)),
    ]
    if torch.cuda.device_count() > 1:
        request.getfixturevalue("whole_on_two")
        for kind, keys in RUNS.items():
            shutil.copytree(root / f"broken {kind}", root / f"one {kind}")
            own.append(run(root / f"one {kind}", (1, 1, 1), **keys))
    ((whole, _, parted, *others),) = launch(1, resumable(*own))
    # no others on a machine of one GPU
    return {"whole": whole, "parted": parted, "others": dict(zip(RUNS, others, strict=False))}


def check_continues(result: dict[str, Any], whole: dict[str, Any]) -> None:
    """The next batches have the samples and losses of a run that was not interrupted."""
    assert result["began_at"] == BREAK and result["ranks_agree"]
    assert sorted(result["losses"]) == [BREAK + 1, BREAK + 2]
    for batch, samples in result["samples"].items():
        assert sorted(samples) == sorted(whole["samples"][batch])
    for batch, loss in result["losses"].items():
        assert loss == pytest.approx(whole["losses"][batch], rel=TOLERANCE["fp32"])


@two_gpus
@pytest.mark.parametrize(
    ("mesh", "case"),
    [*((mesh, case) for mesh in MESHES for case in EVERYWHERE), *((MESHES[0], case) for case in GATES)],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_two_gpus_train_as_one_does(two: dict[str, Any], one: dict[str, Any], mesh: Any, case: Case) -> None:
    rows = compare(two["cases"][mesh, case.name], one["cases"][None, case.name])
    assert max(rows.values()) < TOLERANCE["fp32"], rows


@two_gpus
@pytest.mark.parametrize("start", STARTS)
def test_initial_weights_are_the_same_on_every_mesh(two: dict[str, Any], one: dict[str, Any], start: str) -> None:
    expected = one["starts"][start]["weights"]
    results = two["starts"][list(STARTS).index(start) :: len(STARTS)]
    assert len(results) == len(MESHES)
    for result in results:
        assert result["weights"].keys() == expected.keys()
        for name, weight in result["weights"].items():
            if start != "meta" or any(part in name for part in (".experts.", ".gate.", ".shared_expert.")):
                assert torch.equal(weight, expected[name]), name


@two_gpus
def test_weights_from_meta_are_those_drawn_whole(two: dict[str, Any]) -> None:
    assert two["gaps"] == [0.0] * len(MESHES)


def test_fsdp1_is_refused_in_the_first_forward_pass() -> None:
    sentences = launch(1, parity_worker.wrapped_by_fsdp1)[0]
    assert len(sentences) == 4 and all("dMoE layers need FSDP2" in sentence for sentence in sentences)


def test_one_gpu_resumes_as_if_uninterrupted(on_one: dict[str, Any]) -> None:
    check_continues(on_one["parted"], on_one["whole"])


@two_gpus
@pytest.mark.parametrize("kind", RUNS)
def test_two_gpus_resume_on_one_and_on_two_again(
    whole_on_two: dict[str, Any], on_one: dict[str, Any], root: Path, kind: str
) -> None:
    there, whole, keys = on_one["others"][kind], whole_on_two[kind], RUNS[kind]
    check_continues(there, whole)
    ((same,), (back,)) = launch(
        2,
        resumable(run(root / f"broken {kind}", (1, 1, 2), **keys)),
        resumable(run(root / f"one {kind}", (1, 2, 1), max_duration="7ba", **keys)),
    )
    check_continues(same, whole)
    assert same["began"] == there["began"]
    assert back["began_at"] == 6 and back["began"] == there["ended"] and back["ranks_agree"]
