"""What gates have learnt and where their schedules are goes through a change of mesh: 2, then 1, then 4 processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from foundry_moe.checkpoint.codec import tensor_bytes
from tests.helpers.tiny_runs import launch, model_of, run

FALLING = {"start": 2.0, "end": 0.5, "until": "4ba", "shape": "linear"}
SHRINKING = {"start": 0.03, "end": 0.01, "until": "4ba", "shape": "linear"}  # equal steps may add up to nothing
GATES: dict[str, tuple[dict[str, Any], int, str]] = {  # keys, top_k, and the buffer that it keeps
    "topk": ({"score": "sigmoid", "bias_balance": True, "bias_step": SHRINKING}, 2, "bias_E"),
    "hash": ({"table": "balanced"}, 1, "table_V"),
    "dense_to_sparse": ({"temperature": FALLING, "hard_after": "3ba"}, 1, ""),
}


def runs(root: Path, mesh: tuple[int, int, int], **more: Any) -> list[dict[str, Any]]:
    """One run of each gate; `of` names whose folder it uses."""
    prefix = more.pop("of", "")
    found = []
    for name, (keys, top_k, _) in GATES.items():
        gate = {"name": name, **keys} | ({"frequencies": str(root / "counts.json")} if name == "hash" else {})
        moe = {"algorithms.dmoe.gate": gate, "algorithms.dmoe.top_k": top_k, "algorithms.dmoe.loss": {}}
        checkpoint = {"interval": "1ba", "keep": 9}
        found.append(run(root / f"{prefix}{name}", mesh, keys=checkpoint, **{"max_duration": "4ba", **moe, **more}))
    return found


@pytest.fixture(scope="module")
def phases(tmp_path_factory) -> dict[str, Any]:
    """Whole runs on 2 processes; and runs that change from 2 to 1 to 4, each broken off after a save."""
    root = tmp_path_factory.mktemp("gates")
    (root / "counts.json").write_text(json.dumps([5 + (7 * i) % 11 for i in range(64)]))
    both = launch(2, *runs(root, (1, 1, 2), of="whole-"), *runs(root, (1, 1, 2), break_at=2))
    one = launch(1, *runs(root, (1, 1, 1), break_at=3))
    four = launch(4, *runs(root, (1, 2, 2)))
    by_gate = {"whole": both[: len(GATES)], "one": one, "four": four}
    return {"root": root, **{phase: dict(zip(GATES, results, strict=True)) for phase, results in by_gate.items()}}


@pytest.mark.parametrize("gate", GATES)
def test_gate_goes_on_through_two_changes_of_mesh(phases, gate) -> None:
    whole, buffer = phases["whole"][gate], GATES[gate][2]
    for phase, step in (("one", 2), ("four", 3)):
        result = phases[phase][gate]
        assert result["began_at"] == step and result["ranks_agree"]
        saved = model_of(phases["root"] / gate, step)
        for name, tensor in saved.items():
            assert result["began"][f"model|{name}"] == xxhash.xxh3_64_hexdigest(tensor_bytes(tensor)), name
        kept = {name: tensor for name, tensor in saved.items() if buffer and name.endswith(buffer)}
        assert bool(kept) == bool(buffer)
        assert all(tensor.any() for tensor in kept.values()), "a gate that has learnt nothing tests nothing"
        for batch, loss in result["losses"].items():
            # sums in another order; a temperature or a table of another batch would be seen in the third digit
            assert loss == pytest.approx(whole["losses"][batch], rel=1e-5), (phase, batch)
    assert sorted(phases["four"][gate]["losses"]) == [4]
