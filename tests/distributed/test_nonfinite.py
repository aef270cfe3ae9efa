"""A run whose numbers or data go wrong on one of two ranks: stopped with a sentence, or rewound, on both alike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.launch.processes import run_processes
from tests.distributed import poisoned_worker
from tests.helpers.launching import PRELOAD
from tests.helpers.tiny_runs import YAML, run

NAMES = ("weights", "gradients", "rewound", "ignored", "data", "hopeless")


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, Any]:
    """Runs of up to 9 batches that save each batch and keep one checkpoint; by name."""
    root = tmp_path_factory.mktemp("poisoned")

    def poisoned(name: str, kind: str, batch: int, **keys: Any) -> dict[str, Any]:
        keys = {"interval": "1ba", "keep": 1, **keys}
        overrides = run(root / name, (1, 2, 1), keys=keys, max_duration="9ba", may_fail=True)
        return {**overrides, "poison": {"kind": kind, "batch": batch}}

    runs = [
        poisoned("weights", "weights", 4),
        poisoned("gradients", "gradients", 4, max_nonfinite=2),
        poisoned("rewound", "gradients", 4, on_nonfinite="rewind", max_nonfinite=2),
        poisoned("ignored", "weights", 3, max_nonfinite=None, keep=2),
        poisoned("data", "data", 3),
        poisoned("hopeless", "weights", 1, on_nonfinite="rewind", max_nonfinite=1),
    ]
    results = run_processes(poisoned_worker.run_all, YAML, runs, world_size=2, preload=PRELOAD)
    return {"root": root, **dict(zip(NAMES, results, strict=True))}


def commits(folder: Path) -> dict[int, bool]:
    """Step to `finite`, of all commits that are there."""
    records = [json.loads(path.read_text()) for path in sorted((folder / "commits").iterdir())]
    return {record["step"]: record["summary"]["finite"] for record in records}


def test_bad_weights_stop_the_run_with_batch_and_layer(two) -> None:
    error = two["weights"]["error"]
    assert "the last 3 batches were not finite, from batch 4 on: the weights were not finite before it" in error
    assert "first in " in error and "blocks.1.norm_2" in error
    assert sorted(two["weights"]["losses"]) == [1, 2, 3, 4, 5, 6]
    assert commits(two["root"] / "weights")[3] is True, "the last finite checkpoint stays"


def test_a_bad_backward_pass_is_not_blamed_on_clipping(two) -> None:
    error = two["gradients"]["error"]
    assert "the last 2 batches were not finite, from batch 4 on: the loss was finite and gradients were not" in error
    assert "blocks.0.norm_1" in error


def test_rewind_goes_back_to_finite_weights_and_on_with_the_data(two) -> None:
    result = two["rewound"]
    assert result["error"] is None and sorted(result["losses"]) == list(range(1, 10))
    assert [batch for batch, loss in result["losses"].items() if not math.isfinite(loss)] == [5]
    assert result["metrics"]["checkpoint/rewound_to"] == [3]
    samples = [sample for batch in result["samples"].values() for sample in batch]
    assert len(samples) == 9 * 8, "data went on"
    kept = commits(two["root"] / "rewound")
    assert kept[9] is True
    ledger = Ledger(open_store(str(two["root"] / "rewound")))
    assert ledger.choose("auto").found.commit.step == 9


def test_a_rewind_without_a_finite_checkpoint_stops(two) -> None:
    assert "its weights are not finite" in two["hopeless"]["error"]
    assert two["hopeless"]["error"].startswith("NonfiniteError: batch 1 was not finite")


def test_commits_say_that_they_are_not_finite_and_the_last_good_one_outlives_keep(two) -> None:
    assert two["ignored"]["error"] is None, "max_nonfinite: null looks at nothing"
    assert commits(two["root"] / "ignored") == {2: True, 8: False, 9: False}
    choice = Ledger(open_store(str(two["root"] / "ignored"))).choose("auto")
    assert choice.found.commit.step == 2 and choice.rejected[0].endswith("its weights are not finite")
    assert choice.generation == 1, "what follows is newer than the bad ones"


def test_uneven_data_are_told_before_the_batch(two) -> None:
    error = two["data"]["error"]
    assert "UserError: batch 3 does not have the same number of microbatches on all ranks" in error
    assert "(1 on rank 1; 2 on all others)" in error
    assert sorted(two["data"]["losses"]) == [1, 2]
