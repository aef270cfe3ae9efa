"""What single ranks do in the tests of gates over processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.config import MeshConfig
from foundry_moe.ops.assignment import assign
from foundry_moe.parallel.parity import Case, run_case
from foundry_moe.parallel.sharing import RankSums

LOSS = {"balance": 0.1, "z": 0.01}
# gates by which a token's choice does not depend on the other tokens of its rank
ALONE: dict[str, dict[str, Any]] = {
    "switch": {"top_k": 1, "gate": {"name": "switch", "jitter": {"start": 0.3, "end": 0.1, "until": "2ba"}}},
    "gshard": {"top_k": 2, "gate": {"name": "gshard"}},
    "noisy, in groups, with bias": {
        "top_k": 2,
        "gate": {
            "name": "topk", "score": "sigmoid", "noise": True, "groups": 4, "group_limit": 2, "bias_balance": True,
            "bias_step": 0.1,
        },
    },
    "ktop1": {"top_k": 2, "gate": {"name": "ktop1"}},
    "hierarchical": {"top_k": 2, "gate": {"name": "hierarchical", "groups": 4}, "loss": {**LOSS, "alignment": 0.1}},
    "dense_to_sparse": {"top_k": 1, "gate": {"name": "dense_to_sparse", "temperature": 0.3, "threshold": 0.1}},
    "hash": {"top_k": 1, "gate": {"name": "hash", "table": "bigram"}, "loss": {}},
}  # fmt: skip
TOGETHER: dict[str, dict[str, Any]] = {
    "base": {"top_k": 1, "gate": {"name": "base"}, "loss": {}},
    "expert_choice": {"top_k": 2, "gate": {"name": "expert_choice"}, "loss": {"z": 0.01}},
}


def case_of(name: str) -> Case:
    moe = {"num_experts": 8, "loss": LOSS, **(ALONE | TOGETHER)[name]}
    return Case(name=name, moe=moe, microbatches=2)


def on_meshes(names: list[str], meshes: list[tuple[int, int, int]]) -> list[dict[str, dict[str, Tensor]]]:
    """For each mesh (replicate, shard, expert), each case's results."""
    return [
        {name: run_case(case_of(name), MeshConfig(replicate=r, shard=s, expert=e)) for name in names}
        for r, s, e in meshes
    ]


def shuffled_assignment() -> dict[str, Tensor]:
    """Uneven ranks shuffle their scores, assign, and take experts back; rank 0 gets everybody's."""
    rank = dist.get_rank()
    scores_TE = torch.randn(21 + 3 * rank, 8, generator=torch.Generator().manual_seed(rank))
    sums = RankSums()
    rows_SX, give_back = sums.shuffle(scores_TE, stream=-5)
    again_SX, _ = sums.shuffle(scores_TE, stream=-5)
    other_SX, _ = sums.shuffle(scores_TE, stream=6)
    expert_T = give_back(assign(rows_SX))
    gathered: list[Any] = [None] * dist.get_world_size()
    mine = {
        "scores": scores_TE,
        "shuffled": rows_SX,
        "returned": give_back(rows_SX),
        "experts": expert_T,
        "same": torch.tensor(torch.equal(rows_SX, again_SX)),
        "differs": torch.tensor(rows_SX.shape != other_SX.shape or not torch.equal(rows_SX, other_SX)),
        "largest": sums.largest(torch.tensor(rank)),
        "sum": sums.sum(torch.tensor([rank, 1])),
    }
    dist.all_gather_object(gathered, mine)
    return gathered  # type: ignore[return-value]
