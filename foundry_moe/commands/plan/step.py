"""What one GPU computes and sends in a step of a run. How fast it is, is in step_time.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foundry_moe.commands.plan.shape import ModelShape
from foundry_moe.config import MeshConfig, MoEConfig
from foundry_moe.parallel.mesh import HIERARCHICAL, MeshPlan

GATHER, REDUCE, ALL_REDUCE, TOKENS, COUNTS = "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "counts"
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


@dataclass(frozen=True, kw_only=True)
class Message:
    """One kind of message of a step, as one GPU sends it.

    kind: `GATHER` and so on. count: in a step. ranks: of its group, on so many nodes. bytes: sent by this GPU in one.
    network_bytes: of them, by way of this GPU's network card; GPUs of a node that are in one group share its traffic.
    """

    name: str
    kind: str
    count: int
    ranks: int
    nodes: int
    bytes: float
    network_bytes: float = 0.0

    @property
    def across(self) -> bool:
        """Whether it leaves the node."""
        return self.network_bytes > 0

    @property
    def alone(self) -> bool:
        """Whether the group has one rank a node, so that nothing goes over NVLink."""
        return self.across and self.nodes == self.ranks


def _nodes(mesh: MeshPlan, *, ranks: int, stride: int) -> int:
    """Nodes that a group touches whose ranks lie `stride` apart."""
    if (ranks - 1) * stride < mesh.ranks_per_node and mesh.ranks_per_node % stride == 0:
        return 1
    here = max(1, min(ranks, mesh.ranks_per_node // stride))
    return -(-ranks // here)


def _network_bytes(whole: float, *, ranks: int, nodes: int) -> float:
    """What an all-gather or a reduce-scatter of `whole` bytes sends over one GPU's network card.

    Ranks on one node pass on to each other what comes from other nodes.
    """
    return whole * (nodes - 1) / nodes / (ranks / nodes)


def messages_of(shape: ModelShape, mesh: MeshPlan, step: Step) -> tuple[Message, ...]:
    """What one GPU sends in a step."""
    found = _of_parameters(shape, mesh, step)
    if mesh.expert > 1:
        found += _of_tokens(shape, mesh, step)
    found.append(
        Message(
            name="all-reduce expert counts",
            kind=COUNTS,
            count=shape.moe_layers * step.microbatches,
            ranks=mesh.world_size,
            nodes=mesh.nodes,
            bytes=8 * shape.num_experts,
            network_bytes=8 * shape.num_experts if mesh.nodes > 1 else 0,
        )
    )
    return tuple(message for message in found if message.ranks > 1)


def _of_parameters(shape: ModelShape, mesh: MeshPlan, step: Step) -> list[Message]:
    gathers = 2 if step.resharded else 1
    # units of FSDP, parameters of one, ranks that it is cut over, how far apart they lie
    units = {"dense": (shape.layers + 1, shape.dense / (shape.layers + 1), mesh.dense_shard, 1)}
    if shape.moe_layers:
        units["experts"] = (shape.moe_layers, shape.experts_a_layer / mesh.expert, mesh.shard, mesh.expert)
    found = []
    for what, (count, parameters, ranks, stride) in units.items():
        part = (ranks - 1) / ranks
        copies = {"ranks": mesh.replicate, "stride": mesh.dense_shard}
        for kind, often, width, group, whole, share in (
            (GATHER, gathers * step.microbatches, step.width, {"ranks": ranks, "stride": stride}, parameters, part),
            (REDUCE, step.reductions, 4, {"ranks": ranks, "stride": stride}, parameters, part),
            # a reduce-scatter and an all-gather of this rank's part
            (ALL_REDUCE, 1, 8, copies, parameters / ranks, (mesh.replicate - 1) / mesh.replicate),
        ):
            found.append(
                Message(
                    name=f"{kind} {what}",
                    kind=kind,
                    count=count * often,
                    ranks=group["ranks"],
                    nodes=_nodes(mesh, **group),
                    bytes=whole * width * share,
                    network_bytes=_network_bytes(whole * width, ranks=group["ranks"], nodes=_nodes(mesh, **group)),
                )
            )
    return found


def _of_tokens(shape: ModelShape, mesh: MeshPlan, step: Step) -> list[Message]:
    again = 1 if step.checkpointed else 0
    layers = shape.moe_layers * step.microbatches
    leave = ranks_per_token(shape.num_experts, shape.top_k, mesh.expert) * (1 - 1 / mesh.expert)
    stages = 2 if mesh.all_to_all == HIERARCHICAL else 1
    # of a flat one the ranks of other nodes; of a hierarchical one a stage is all between nodes, in the mean half
    here = mesh.expert_ranks_per_node
    elsewhere = 0.0 if mesh.expert_nodes == 1 else (mesh.expert - here) / (mesh.expert - 1)
    found = []
    for name, count, width in (
        (f"all-to-all tokens ({mesh.all_to_all})", 4 + again, shape.d_model * step.width),
        ("all-to-all weights and counts", 3 + 2 * again, 2 * shape.top_k * 4),
    ):
        sent = step.tokens * leave * width
        found.append(
            Message(
                name=name,
                kind=TOKENS,
                count=layers * count * stages,
                ranks=mesh.expert,
                nodes=mesh.expert_nodes,
                bytes=sent,
                network_bytes=sent * elsewhere / stages,
            )
        )
    return found
