"""Blocks are compiled in the first batch and first evaluation, and never again, for any choice of the gate."""

from __future__ import annotations

from typing import Any

from foundry_moe.launch.processes import run_processes
from tests.distributed import compile_worker
from tests.helpers.launching import PRELOAD
from tests.helpers.tiny_runs import YAML, mesh

ROPE = {
    "model.attn_config": {"attn_impl": "torch", "rope": True, "rope_impl": "hf"},
    "model.norm_type": "low_precision_rmsnorm",
    "model.learned_pos_emb": False,
}
RUN: dict[str, Any] = {
    **ROPE,
    "algorithms.dmoe.mesh.compile": "blocks",
    "max_duration": "8ba",
    "device_train_microbatch_size": 2,
}
EVALUATION = {
    "eval_interval": "2ba",
    "eval_loader": {"name": "random_tokens", "max_seq_len": 16, "vocab_size": 64, "samples": 8},
    "device_eval_batch_size": 2,
}
# what a block is cut into: up to its experts, from there on, and the frames of the calls between
MOST_GRAPHS = 10


def test_no_load_compiles_anew_and_layers_share_their_graphs() -> None:
    jitter = {"algorithms.dmoe.gate": {"name": "switch", "jitter": 0.1}, "algorithms.dmoe.top_k": 1}
    runs = [
        mesh(1, 1, 2, **RUN, **EVALUATION, **{"algorithms.dmoe.mesh.buffer": 1.0}),
        mesh(1, 1, 2, **RUN, **jitter, **{"model.n_layers": 3}),
        mesh(1, 2, 1, **RUN, **{"model.n_layers": 3}),
    ]
    seen = run_processes(compile_worker.compiled_graphs, YAML, runs, world_size=2, preload=PRELOAD)
    evaluated, *others = seen
    assert set(evaluated) == {("batch", 0), ("eval", 2)}
    assert all(set(compiled) == {("batch", 0)} for compiled in others)
    assert all(1 < compiled["batch", 0] <= MOST_GRAPHS for compiled in seen), seen
