"""The small runs of `foundry-moe verify` without a YAML: five models, on each mesh.

They are runs of LLM Foundry, small enough for fp64 on a CPU, and are trained and compared as a user's run is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foundry_moe.commands.verify.shrink import SmallRun, moe_keys, set_mesh, set_precision
from foundry_moe.config import MeshConfig, can_cut_rows
from foundry_moe.launch.run_config import read_moe
from foundry_moe.parallel.mesh import Mesh, can_replicate, check_replicas, divisors, listed, plan_mesh

DEFAULT_MESHES: tuple[Mesh, ...] = (
    (1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2), (1, 1, 8),
)  # fmt: skip
WIDTH, HIDDEN, SEQUENCES = 16, 24, 8
_RUN: Mapping[str, Any] = {
    "seed": 17,
    "max_seq_len": 6,
    "model": {
        "name": "mpt_causal_lm", "init_device": "cpu", "d_model": WIDTH, "n_heads": 2, "n_layers": 2, "max_seq_len": 6,
        "vocab_size": 40, "no_bias": True, "use_train_metrics": False, "loss_fn": "torch_crossentropy",
        "attn_config": {"attn_impl": "torch"}, "init_config": {"name": "baseline_", "init_std": 0.2},
        "ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": HIDDEN},
    },
    "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 0.1}},
    # AdamW's usual eps of 1e-8 would turn a gradient that is rounding alone into a step of +-lr
    "optimizer": {"name": "decoupled_adamw", "lr": 0.01, "eps": 1e-3, "weight_decay": 1e-4},
    "fsdp_config": {},
}  # fmt: skip
# by name: keys of the experts and of the model; and the vocabulary that tokens are drawn from
CASES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], int]] = {
    "random, recomputed, in rounds, hot experts": (
        {"num_experts": 8, "top_k": 3, "loss": {"balance": 0.1, "z": 0.01}, "mesh": {"buffer": 1.0, "hot_experts": 2}},
        {"tie_word_embeddings": False},
        40,
    ),
    "upcycled, shared expert": (
        # normalised weights of equal experts would leave only rounding in the gate's gradient
        {
            "num_experts": 8, "top_k": 2, "init": "upcycle", "shared_expert_hidden_size": 8, "shared_expert_gate": True,
            "gate": {"name": "topk", "normalize": False},
        },
        {},
        40,
    ),
    # with one token in the vocabulary and no positions, all hidden states are equal
    "every token to one expert, in rounds, biases": (
        {
            "num_experts": 8, "top_k": 1, "activation": "gelu", "bias": True, "loss": {"z": 0.01},
            "mesh": {"buffer": 1.0, "hot_experts": 1},
        },
        {"learned_pos_emb": False},
        2,
    ),
    "balance over sequences, sigmoid scores": (
        {
            "num_experts": 8, "top_k": 2, "gate": {"name": "topk", "score": "sigmoid"}, "loss": {"balance": 0.1},
            "balance_over": "sequence",
        },
        {},
        40,
    ),
    "experts of different widths": (
        {"num_experts": 16, "top_k": 3, "expert_hidden_size": [5, 11, 8, 8, 12, 4, 15, 1] * 2},
        {},
        40,
    ),
}  # fmt: skip


def small_runs(meshes: Sequence[Mesh], *, precision: str, backend: str) -> Iterator[SmallRun]:
    """Every case on every mesh.

    Args:
        precision: fp64 | fp32.
        backend: of the experts.
    """
    for mesh in meshes:
        for name, (experts, model, vocabulary) in CASES.items():
            run: dict[str, Any] = copy.deepcopy(dict(_RUN))
            run["model"] |= model
            run["fsdp_config"]["activation_checkpointing"] = "recomputed" in name
            run["algorithms"]["dmoe"] = {
                "init_std": 0.3,
                "backend": backend,
                "mesh": {},
                **copy.deepcopy(dict(experts)),
            }
            set_mesh(run, mesh)
            set_precision(run, precision)
            config = read_moe(run)
            assert config is not None and moe_keys(run)["mesh"]
            microbatch = max(1, SEQUENCES // math.prod(mesh))
            yield SmallRun(
                name=name,
                run=run,
                config=config,
                mesh=mesh,
                microbatch=microbatch,
                microbatches=2,
                alone=microbatch * math.prod(mesh),
                precision=precision,
                vocabulary=vocabulary,
            )


def default_meshes(devices: int | None) -> list[Mesh]:
    """Those of `DEFAULT_MESHES` that fit the machine and the installed torch; `devices` as in `check_mesh`."""
    if devices is not None:
        return [mesh for mesh in DEFAULT_MESHES if math.prod(mesh) <= max(devices, 1)]
    return [mesh for mesh in DEFAULT_MESHES if mesh[0] == 1 or can_replicate("cpu")]


def check_mesh(mesh: Mesh) -> None:
    """Checks that the cases' models fit a mesh.

    Raises:
        ValueError: names the mesh and what would do.
    """
    replicate, shard, expert = mesh
    check_replicas(replicate, "cpu")
    config, ranks = MeshConfig(replicate=replicate, shard=shard, expert=expert), math.prod(mesh)
    for experts, _, _ in CASES.values():
        plan_mesh(config, world_size=ranks, ranks_per_node=ranks, num_experts=experts["num_experts"])
    rows = math.gcd(WIDTH, HIDDEN)
    if not can_cut_rows(rows, shard=shard, expert=expert):
        raise ValueError(
            f"--mesh {replicate},{shard},{expert}: shard ({shard}) must divide the rows of the experts' matrices "
            f"({WIDTH} and {HIDDEN}): use {listed(divisors(rows))}"
        )
