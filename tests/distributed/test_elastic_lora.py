"""A checkpoint with LoRA adapters and bf16 frozen weights loads on any other mesh, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.codec import inline_tensors
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.launch.processes import run_processes
from tests.distributed import lora_worker
from tests.helpers.launching import PRELOAD
from tests.helpers.tiny_runs import launch, run

MESHES = {1: [(1, 1, 1)], 2: [(1, 1, 2)], 4: [(1, 2, 2)]}


def test_adapters_and_their_moments_load_on_other_meshes_bit_for_bit(tmp_path: Path) -> None:
    root = str(tmp_path)
    saved: dict[str, dict[str, str]] = {}
    for world, meshes in MESHES.items():
        saved |= run_processes(lora_worker.save_each, root, meshes, world_size=world, preload=PRELOAD)
    for digests in saved.values():
        assert any(name.endswith("w1_A_EDL|exp_avg") for name in digests), sorted(digests)[:5]
        assert not any("w1_EFD" in name and not name.startswith("model|") for name in digests), "frozen: no moments"
    for world, meshes in MESHES.items():
        for found in run_processes(lora_worker.load_each, root, list(saved), meshes, world_size=world, preload=PRELOAD):
            wrong = [name for name, value in saved[found["folder"]].items() if found["digests"][name] != value]
            assert not wrong, f"{found['folder']} on {found['mesh']}: {wrong}"


def test_a_run_whose_checkpoints_leave_frozen_weights_out_goes_on_with_other_processes(tmp_path: Path) -> None:
    """From YAML through the trainer, from two processes to one and from one to two: bit for bit what was saved."""
    more = {"keys": {"save_frozen": False}, "algorithms.dmoe.lora": {"r": 2, "alpha": 4}}
    short = {**more, "max_duration": "4ba"}
    whole, two = launch(2, run(tmp_path / "whole", (1, 1, 2), **more), run(tmp_path / "two", (1, 1, 2), **short))
    two_to_one, one = launch(1, run(tmp_path / "two", (1, 1, 1), **more), run(tmp_path / "one", (1, 1, 1), **short))
    (one_to_two,) = launch(2, run(tmp_path / "one", (1, 2, 1), **more))
    assert any("w1_A_EDL" in name for name in two["ended"]) and any("w1_EFD" in name for name in two["ended"])
    assert not [item for item in tensors_of(tmp_path / "one") if item.endswith("w1_EFD")]
    for resumed, before in ((two_to_one, two), (one_to_two, one)):
        assert resumed["began_at"] == 4 and resumed["began"] == before["ended"]
        for batch in (5, 6):  # sums in another order: some 1e-7 a batch in fp32
            assert resumed["losses"][batch] == pytest.approx(whole["losses"][batch], rel=1e-5)


def tensors_of(folder: Path) -> set[str]:
    found = Ledger(open_store(str(folder))).choose("auto").found
    assert found is not None
    return set(found.manifest.tensors) | set(inline_tensors(found.manifest.values))
