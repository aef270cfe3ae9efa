"""Runs LLM Foundry's trainer on a shrunk run in the child processes of a certificate.

The parent process only names these functions; children import Composer and LLM Foundry. This module must not know which
trials are compared.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foundry_moe.commands.verify.shrink import BATCHES, SAVE_AFTER, VOCABULARY, SmallRun, set_mesh
from foundry_moe.parallel.mesh import Mesh

# modules that the fork server imports once for all children
PRELOAD = (
    "foundry_moe.registry",
    "foundry_moe.commands.verify.trial",
    "foundry_moe.commands.verify.recorder",
    "foundry_moe.launch.preloaded",
)
RECORDER, LOADER = "trial_recorder", "synthetic_tokens"
# keys of every trial: a constant learning rate, no evaluation and no output
_KEYS: Mapping[str, Any] = {
    "tokenizer": {},
    "scheduler": {"name": "constant_with_warmup", "t_warmup": "0ba"},
    "eval_interval": 0,
    "progress_bar": False,
    "log_to_console": False,
    "log_config": False,
    "python_log_level": "ERROR",
    "expandable_segments": False,
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training: a run of LLM Foundry's, the number of processes that train together, and fp64 | fp32."""

    name: str
    run: Mapping[str, Any]
    processes: int
    precision: str


def trial_of(
    small: SmallRun,
    mesh: Mesh | None,
    name: str,
    *,
    processes: int = 0,
    microbatch: int = 0,
    steps: int = BATCHES,
    with_formula: bool = False,
    folder: str = "",
    resume: int = 0,
) -> Trial:
    """A small run with data and callbacks.

    Args:
        mesh: None = data parallelism, as the run has it.
        processes, microbatch: sequences of a rank; 0 = those of the small run.
        with_formula: compare the layers' first step with `formula`; on one process.
        folder: of checkpoints; empty = none.
        resume: the step to continue from; 0 = a new run.
    """
    run = copy.deepcopy(dict(small.run))
    if mesh is not None:
        set_mesh(run, mesh)
    processes, microbatch = processes or small.processes, microbatch or small.microbatch
    length, vocabulary = run["max_seq_len"], run["model"].get("vocab_size", VOCABULARY)
    data = {"length": length, "vocabulary": vocabulary, "steps": steps, "microbatch": microbatch}
    # weighed by rows, the mean loss of uneven ones depends on the microbatches
    data["uneven"] = bool(run.get("accumulate_train_batch_on_tokens", True))
    recorded = {"microbatches": small.batch // processes // microbatch, "with_formula": with_formula}
    callbacks: dict[str, Any] = {RECORDER: {**recorded, "source": small.source if with_formula else ""}}
    if folder:
        saving = {"folder": folder, "interval": f"{SAVE_AFTER}ba", "keep": 4, "resume": resume or "never"}
        callbacks["elastic_checkpoint"] = saving
    run |= {
        **_KEYS,
        "global_train_batch_size": small.batch,
        "device_train_microbatch_size": microbatch,
        "max_duration": f"{steps}ba",
        "train_loader": {"name": LOADER, **data},
        "callbacks": callbacks,
    }
    return Trial(name=f"{small.name}, {name}", run=run, processes=processes, precision=small.precision)


def train_trials(trials: Sequence[Trial]) -> dict[str, dict[str, Any]]:
    """Several trainings, one after another, in one launch; returns what each `TrialRecorder` has seen, by name.

    Rank 0 writes a line to stderr after each.
    """
    os.environ.update(FSDP_VERSION="2", NODE_RANK="0")  # Composer reads NODE_RANK when it saves
    # warnings of the trainer would hide the table
    warnings.showwarning = lambda *_, **__: None
    logging.disable(logging.WARNING)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)  # products are tiny: more threads cost more than they save
    from llmfoundry import registry
    from llmfoundry.command_utils import train
    from omegaconf import OmegaConf

    from foundry_moe.commands.verify.recorder import TrialRecorder, build_loader

    if LOADER not in registry.dataloaders.get_all():
        registry.dataloaders.register(LOADER, func=build_loader)
        registry.callbacks.register(RECORDER, func=TrialRecorder)
    seen = {}
    for trial in trials:
        began = time.monotonic()
        torch.set_default_dtype(torch.float64 if trial.precision == "fp64" else torch.float32)
        trainer = train(OmegaConf.create(dict(trial.run)))
        seen[trial.name] = TrialRecorder.last.seen
        trainer.close()
        if os.environ["RANK"] == "0":
            line = f"trained on {trial.processes}: {trial.name}, {time.monotonic() - began:.1f} s\n"
            sys.stderr.write(line)  # in one piece, since launches run side by side
    return seen
