"""Muon on meshes in fp64: losses, updates and checkpoints of one process, with and without LLM Foundry's trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foundry_moe.commands.verify.certify import certify as verify
from foundry_moe.commands.verify.certify import small_cases
from foundry_moe.commands.verify.trial import Trial, train_trials
from tests.helpers.small_training import CASES, TOLERANCE, certify, largest
from tests.helpers.stacks import trainable

MESHES = trainable([(1, 2, 2), (1, 4, 1), (2, 1, 2)])
# experts and their rows divided; rows alone; experts divided, with replicas


def train_with_muon(trials: Sequence[Trial]) -> dict[str, dict[str, Any]]:
    from llmfoundry import registry

    from foundry_moe import Muon

    if "muon" not in registry.optimizers.get_all():  # in a checkout that is not installed
        registry.optimizers.register("muon", func=Muon)
    return train_trials(trials)


def test_a_mesh_equals_one_process() -> None:
    """One launch of four processes."""
    # ranks hold experts of other widths, so they have other numbers of batches before those of the shared expert
    widths = {"num_experts": 4, "expert_hidden_size": (8, 8, 4, 12), "shared_expert_hidden_size": 8}
    mixed = replace(CASES[4], moe=CASES[4].moe | widths)
    cases = [replace(case, muon=True) for case in (CASES[1], mixed)]
    table = certify(MESHES, cases=cases)
    rows = {row for cases in table.values() for found in cases.values() for row in found}
    assert {"weights w1_EFD", "weights w2_HD", "weights mix", "weights embed", "checkpoint"} <= rows
    assert largest(table)[0] < TOLERANCE, largest(table)


def test_a_run_of_llm_foundry_resumes_on_another_mesh() -> None:
    run = small_cases()["random, recomputed, in rounds"]
    run["optimizer"] = {"name": "muon", "adamw_lr": 0.003}
    (certificate,) = verify({"muon": run}, [(1, 1, 2)], precision="fp64", train=train_with_muon)
    assert certificate.verdict == "pass", certificate.as_text()
    assert not any("optimizer.name" in note for note in certificate.notes)
