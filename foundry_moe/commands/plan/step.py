"""What a GPU does in a step of a run, as far as memory, messages and time depend on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foundry_moe.config import MeshConfig, MoEConfig

# Bytes a parameter of optimizer state: two fp32 moments, or one.
OPTIMIZER_BYTES = {"adam": 8, "lion": 4}


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a GPU does in a step, as far as memory and messages depend on it.

    tokens: T. microbatches: in a step.
    reductions: how often in a step gradients are summed over `shard`; once for all microbatches, they are held
        unsharded until then.
    buffer, hot_experts: of `MeshConfig`; backend, memory: of `MoEConfig`.
    width: bytes of a number in matrix products. state: bytes of optimizer state for a parameter.
    skew: rows of the fullest rank over the mean of those that divide the experts.
    checkpointed: activations are computed again. resharded: weights are gathered again for the backward pass.
    """

    tokens: int
    microbatches: int
    reductions: int
    buffer: float
    hot_experts: int
    backend: str
    memory: str
    width: int
    state: int
    skew: float
    checkpointed: bool
    resharded: bool

    @property
    def in_later_rounds(self) -> float:
        """Which share of the tokens is sent and computed again in the backward pass."""
        return max(1 - self.buffer / self.skew, 0.0)


def ranks_per_token(num_experts: int, top_k: int, ranks: int) -> float:
    """Expected ranks that a token goes to, with `top_k` different experts chosen evenly of `num_experts`."""
    local = num_experts // ranks
    missed = math.comb(num_experts - local, top_k) / math.comb(num_experts, top_k)
    return ranks * (1.0 - missed)


def read_step(
    run: Mapping[str, Any], moe: MoEConfig, mesh: MeshConfig, *, tokens: int, microbatches: int, skew: float
) -> Step:
    """The step of a run whose GPUs have so many microbatches of so many tokens."""
    fsdp = run.get("fsdp_config") or {}
    optimizer = str((run.get("optimizer") or {}).get("name", "decoupled_adamw"))
    return Step(
        tokens=tokens,
        microbatches=microbatches,
        reductions=1 if mesh.reduce == "batch" else microbatches,
        buffer=mesh.buffer,
        hot_experts=mesh.hot_experts,
        backend=moe.backend,
        memory=moe.memory,
        width=2 if "16" in str(run.get("precision", "amp_bf16")) else 4,
        state=next((size for name, size in OPTIMIZER_BYTES.items() if name in optimizer), 0),
        skew=skew,
        checkpointed=bool(fsdp.get("activation_checkpointing")),
        resharded=bool(fsdp.get("reshard_after_forward", True)),
    )
