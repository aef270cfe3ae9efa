"""A checkpoint with LoRA adapters and bf16 frozen weights loads on any other mesh, bit for bit."""

from __future__ import annotations

from pathlib import Path

from foundry_moe.launch.processes import run_processes
from tests.distributed import lora_worker
from tests.helpers.launching import PRELOAD

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
