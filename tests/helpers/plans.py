"""Run configurations of the tree, and the machines that they are meant for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]


RUNS = {
    "yamls/bench/olmoe_1b_7b.yaml": (4, 4, 141),
    "yamls/bench/dbrx_wide.yaml": (4, 4, 139),
    "yamls/bench/qwen3_30b_a3b.yaml": (4, 4, 139),
    "yamls/own_text/1gpu.yaml": (1, 1, 24),
    "yamls/pretrain/1gpu.yaml": (1, 1, 40),
    "yamls/pretrain/4gpu.yaml": (4, 4, 141),
    "yamls/pretrain/8gpu.yaml": (8, 8, 80),
    "yamls/cluster/64x8gpu.yaml": (512, 8, 80),
    "yamls/cluster/olmoe_1b_7b.yaml": (8, 8, 80),
    "yamls/cluster/qwen3_30b_a3b.yaml": (64, 8, 80),
}


def load(path: str, **overrides: Any) -> dict[str, Any]:
    config = OmegaConf.load(ROOT / path)
    for key, value in overrides.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
