"""`elastic_checkpoint` in Composer's Trainer, from YAML through LLM Foundry: resumed runs equal uninterrupted ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from foundry_moe.parallel.mesh import can_replicate
from tests.helpers.stacks import needs_replicas
from tests.helpers.tiny_runs import BATCHES, MIXED, launch, run

BREAK = 4
FIRST = (2, 1, 2) if can_replicate("cpu") else (1, 2, 2)  # mesh of four; another goes on
OTHER = (1, 2, 2) if can_replicate("cpu") else (1, 1, 4)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> dict[str, Any]:
    """On 4 processes: a run of 6 batches; one broken off after a save at batch 4 and a lost batch 5; and its
    continuations on the same mesh and another. Copies of its folder are left for other numbers of processes."""
    root = tmp_path_factory.mktemp("elastic")
    whole, broken = launch(4, run(root / "whole", FIRST), run(root / "broken", FIRST, break_at=BREAK))
    for name in ("same", "other", "two", "one"):
        shutil.copytree(root / "broken", root / name)
    same, other = launch(4, run(root / "same", FIRST), run(root / "other", OTHER))
    return {"root": root, "whole": whole, "broken": broken, "same": same, "other": other}


def check_continues(result: dict[str, Any], whole: dict[str, Any], began: dict[str, str]) -> None:
    """The state is that of the save, bit for bit; each batch has the samples it would have had; losses agree."""
    assert result["began_at"] == BREAK and result["began"] == began
    assert sorted(result["losses"]) == [BREAK + 1, BREAK + 2]
    for batch, samples in result["samples"].items():
        assert sorted(samples) == sorted(whole["samples"][batch])
    for batch, loss in result["losses"].items():
        # sums in another order: some 1e-7 a batch in fp32
        assert loss == pytest.approx(whole["losses"][batch], rel=1e-5)


def test_same_mesh_goes_on_as_if_uninterrupted(four) -> None:
    whole, same = four["whole"], four["same"]
    assert same["losses"] == {batch: whole["losses"][batch] for batch in (5, 6)}
    assert same["samples"] == {batch: whole["samples"][batch] for batch in (4, 5)}
    assert same["ended"] == whole["ended"] and len(whole["ended"]) > 60
    assert four["broken"]["losses"][5] == whole["losses"][5], "what was lost is done again, equally"


def test_other_mesh_of_as_many_processes_goes_on(four) -> None:
    check_continues(four["other"], four["whole"], four["same"]["began"])


@pytest.fixture(scope="module")
def fewer(four) -> dict[str, Any]:
    """The broken run's continuations on two processes and on one, and runs of other optimizers from two to one."""
    root, optimizers = four["root"], {"no_op": {}, "decoupled_lionw": {"lr": 1e-3}}
    keys = {name: {"optimizer": {"name": name, **more}} for name, more in optimizers.items()}
    begun = [run(root / name, (1, 2, 1), break_at=BREAK, **more) for name, more in keys.items()]
    two, *broken = launch(2, run(root / "two", (1, 1, 2)), *begun)
    gone_on = [run(root / name, (1, 1, 1), **more) for name, more in keys.items()]
    whole = [run(root / f"{name}-whole", (1, 1, 1), **more) for name, more in keys.items()]
    one, *rest = launch(1, run(root / "one", (1, 1, 1), break_at=None), *gone_on, *whole)
    others = zip(broken, rest[:2], rest[2:], strict=True)
    return {"two": two, "one": one, **dict(zip(keys, others, strict=True))}


def test_two_processes_go_on(four, fewer) -> None:
    check_continues(fewer["two"], four["whole"], four["same"]["began"])
    assert fewer["two"]["metrics"]["checkpoint/resumed_step"] == [BREAK]


@pytest.mark.parametrize("optimizer", ["no_op", "decoupled_lionw"])
def test_other_optimizers_go_on_from_two_processes_on_one(fewer, optimizer) -> None:
    broken, resumed, whole = fewer[optimizer]
    check_continues(resumed, whole, resumed["began"])
    for batch, loss in broken["losses"].items():
        assert loss == pytest.approx(whole["losses"][batch], rel=1e-5)
    moved = resumed["began"] != resumed["ended"]
    assert moved == (optimizer != "no_op")


def test_one_process_goes_on_and_back_to_four(four, fewer) -> None:
    one = fewer["one"]
    check_continues(one, four["whole"], four["same"]["began"])
    (back,) = launch(4, run(four["root"] / "one", (1, 1, 4), max_duration="7ba"))
    assert back["began_at"] == BATCHES and back["began"] == one["ended"]


@needs_replicas
def test_download_is_one_per_cluster(four) -> None:
    """On (2,1,2) two replicas share every byte: the store sends it once."""
    metrics = four["same"]["metrics"]
    size = sum(path.stat().st_size for path in (four["root"] / "broken").glob("steps/*4/*/data/*"))
    assert size < metrics["checkpoint/load_bytes_fetched"][0] * 1.001 <= 1.05 * size
    assert metrics["checkpoint/load_bytes_sent"][0] >= 0.9 * size


def test_background_saves_give_the_same_run(four, tmp_path) -> None:
    keys = {"async": True, "interval": "1ba", "keep": 2}
    fresh, late = launch(
        2,
        run(tmp_path / "a", (1, 2, 1), keys=keys),
        run(tmp_path / "a", (1, 2, 1), keys=keys, max_duration="7ba"),
    )
    for batch, loss in fresh["losses"].items():
        assert loss == pytest.approx(four["whole"]["losses"][batch], rel=1e-5)
    assert late["began_at"] == BATCHES and late["began"] == fresh["ended"], "the end is always saved"
    assert len(list((tmp_path / "a" / "commits").iterdir())) == 2
    assert max(fresh["metrics"]["checkpoint/seconds_blocked"]) > 0


def test_damage_falls_back_and_conflicts_are_one_sentence(four, tmp_path) -> None:
    root = four["root"]
    shutil.copytree(root / "broken", tmp_path / "flipped")
    data = sorted((tmp_path / "flipped").glob("steps/*4/*/data/000000.bin"))[0]
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    folder = tmp_path / "flipped"
    flipped, step, never, missing, wrong_model, other_formula, new = launch(
        1,
        run(folder, (1, 1, 1)),
        run(root / "broken", (1, 1, 1), keys={"resume": 2}, max_duration="3ba"),
        run(root / "broken", (1, 1, 1), keys={"resume": "never"}, may_fail=True),
        run(root / "broken", (1, 1, 1), keys={"resume": 5}, may_fail=True),
        run(root / "broken", (1, 1, 1), may_fail=True, **{"model.n_layers": 1}),
        run(root / "broken", (1, 1, 1), may_fail=True, **{"model.n_heads": 4}),
        run(tmp_path / "new", (1, 1, 1), keys={"resume": "never"}, max_duration="1ba"),
    )
    assert flipped["began_at"] == 2 and flipped["error"] is None
    assert step["began_at"] == 2 and sorted(step["losses"]) == [3]
    assert "holds" in never["error"] and "resume is never" in never["error"]
    assert "holds no checkpoint of step 5; it holds: 2, 3, 4" in missing["error"]
    assert "belongs to another model" in wrong_model["error"] and "blocks.1" in wrong_model["error"]
    assert "model.n_heads (4): the checkpoint was trained with 2" in other_formula["error"]
    assert new["error"] is None
    # the run that fell back committed again, in a generation that is newer than the damaged commit
    names = sorted(path.name for path in (folder / "commits").iterdir())
    assert names[-1] == "000001-000000000006.json"


@needs_replicas
@pytest.mark.parametrize("microbatch", [4, 2], ids=["in bf16", "sums in fp32"])
def test_ranks_that_send_gradients_resume_to_the_last_bit(microbatch: int, tmp_path: Path) -> None:
    """Two replicas of whole weights, which replace FSDP2's mesh, and two shards; then the other mesh."""
    keys = {**MIXED, "device_train_microbatch_size": microbatch}
    meshes = [(2, 1, 1), (1, 2, 1)]
    runs = [
        run(tmp_path / f"{name} {mesh}", mesh, **keys, **more)
        for mesh in meshes
        for name, more in (("whole", {}), ("broken", {"break_at": BREAK}), ("broken", {}))
    ]
    results = launch(2, *runs)
    for whole, _, resumed in (results[:3], results[3:]):
        assert resumed["began_at"] == BREAK and resumed["ranks_agree"]
        assert resumed["losses"] == {batch: whole["losses"][batch] for batch in (BREAK + 1, BREAK + 2)}
        assert resumed["ended"] == whole["ended"]
    other = launch(2, run(tmp_path / f"whole {meshes[0]}", meshes[1], max_duration="7ba", **keys))[0]
    assert other["began"] == results[0]["ended"] and other["ranks_agree"]
