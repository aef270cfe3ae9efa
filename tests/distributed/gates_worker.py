"""What single ranks do in the tests of gates over processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.config import MeshConfig
from foundry_moe.layers.gates.gate import Gate
from foundry_moe.layers.lookup import batch_context, moe_layers
from foundry_moe.ops.assignment import assign
from foundry_moe.parallel.collectives import GateCollectives
from foundry_moe.parallel.placement import parallelize
from tests.helpers.small_training import Case, build_model, run_case

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
    "base, no tokens": {"top_k": 1, "gate": {"name": "base"}, "loss": {}},
    "expert_choice": {"top_k": 2, "gate": {"name": "expert_choice"}, "loss": {"z": 0.01}},
}
# rank 0 of two has all tokens
EMPTY: dict[str, dict[str, Any]] = {
    f"{name}, capacity {capacity}, no tokens": {**moe, "capacity": capacity}
    for name, moe in (ALONE | {"expert_choice": TOGETHER["expert_choice"]}).items()
    for capacity in (None, 1.25)
}


def case_of(name: str) -> Case:
    moe = {"num_experts": 8, "loss": LOSS, **(ALONE | TOGETHER | EMPTY)[name]}
    return Case(name=name, moe=moe, microbatches=2, share=(1, 0) if name.endswith("no tokens") else (1,))


def on_meshes(names: list[str], meshes: list[tuple[int, int, int]]) -> list[dict[str, dict[str, Tensor]]]:
    """For each mesh (replicate, shard, expert), each case's results."""
    return [
        {name: run_case(case_of(name), MeshConfig(replicate=r, shard=s, expert=e)) for name in names}
        for r, s, e in meshes
    ]


def shuffled_assignment() -> dict[str, Tensor]:
    """Uneven ranks shuffle their scores, assign, and take experts back; rank 0 gets everybody's."""
    rank = dist.get_rank()
    scores_TE = torch.randn(20 + 3 * rank, 8, generator=torch.Generator().manual_seed(rank))
    sums = GateCollectives()
    rows_SX, give_back = sums.shuffle(scores_TE, stream=-5)
    again_SX, _ = sums.shuffle(scores_TE, stream=-5)
    other_SX, _ = sums.shuffle(scores_TE, stream=6)
    expert_T = give_back(assign(rows_SX))
    equal_S, _ = sums.shuffle(torch.arange(30)[:, None], stream=6)  # as many on all ranks
    number, ones = torch.tensor(rank), torch.tensor([rank, 1])
    reduced = {"largest": sums.largest(number), "sum": sums.sum(ones)}
    gathered: list[Any] = [None] * dist.get_world_size()
    mine = {
        "scores": scores_TE,
        "shuffled": rows_SX,
        "returned": give_back(rows_SX),
        "experts": expert_T,
        "same": torch.tensor(torch.equal(rows_SX, again_SX)),
        "differs": torch.tensor(rows_SX.shape != other_SX.shape or not torch.equal(rows_SX, other_SX)),
        **reduced,
        "kept": torch.stack([number, *ones]),
        "places": equal_S.view(dist.get_world_size(), -1).sort(1).values,
    }
    dist.all_gather_object(gathered, mine)
    return gathered  # type: ignore[return-value]


def _of_all(mine: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def _noted(name: str, mesh: MeshConfig | None) -> tuple[dict[Any, list[Any]], dict[str, Tensor]]:
    """What this process's gates chose in a training, by (layer, step, sequence), and their state after it."""
    chosen: dict[Any, list[Any]] = {}
    gates: dict[int, Gate] = {}

    def note(module: Any, inputs: Any, output: Any) -> None:
        if not isinstance(module, Gate):
            return
        context = inputs[1]
        gates[context.layer] = module
        shape = context.token_ids_BS.shape
        experts_BSK, weights_BSK = output.experts_TK.unflatten(0, shape), output.weights_TK.detach().unflatten(0, shape)
        for ids_S, experts_SK, weights_SK in zip(context.token_ids_BS, experts_BSK, weights_BSK, strict=True):
            key = (context.layer, context.progress.ba, tuple(ids_S.tolist()))
            chosen[key] = [
                {e: w for e, w in zip(experts, weights, strict=True) if e >= 0}
                for experts, weights in zip(experts_SK.tolist(), weights_SK.tolist(), strict=True)
            ]

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        run_case(case_of(name), mesh)
    finally:
        hook.remove()
    state = {f"{n}/{key}": b.clone() for n, gate in sorted(gates.items()) for key, b in gate.named_buffers()}
    return chosen, state


def choices_and_states(names: list[str], mesh: tuple[int, int, int] | None) -> dict[str, Any]:
    """For each gate: the choices of all ranks together, and the state of each rank."""
    results = {}
    for name in names:
        if mesh is None:
            chosen, state = _noted(name, None)
            results[name] = {"chosen": chosen, "states": [state]}
            continue
        replicate, shard, expert = mesh
        ranks = _of_all(_noted(name, MeshConfig(replicate=replicate, shard=shard, expert=expert)))
        together: dict[Any, list[Any]] = {}
        for chosen, _ in ranks:
            together.update(chosen)
        results[name] = {"chosen": together, "states": [state for _, state in ranks]}
    return results


def balance_of_ranks(scopes: list[str], mesh: tuple[int, int, int]) -> dict[str, list[dict[str, Tensor]]]:
    """For each scope, of each rank: inputs, weights and choices of the last gate, its balance loss and gradient."""
    replicate, shard, expert = mesh
    results = {}
    for scope in scopes:
        moe = {"num_experts": 8, "top_k": 2, "loss": {"balance": 1.0}, "balance_over": scope}
        model = build_model(Case(name=scope, moe=moe), torch.float64, torch.device("cpu"))
        config = MeshConfig(replicate=replicate, shard=shard, expert=expert)
        parallelize(model, config)
        layer, context = moe_layers(model)[-1], batch_context(model)
        seen: list[Any] = []
        layer.gate.register_forward_hook(lambda gate, inputs, output, seen=seen: seen.extend((inputs[0], output)))
        rank = dist.get_rank()
        # ranks have different numbers of tokens of different texts
        ids = torch.randint(40, (2 + rank, 6), generator=torch.Generator().manual_seed(rank))
        loss = context.track_scale((model(ids) * 0).sum())  # type: ignore[union-attr]
        loss.backward()
        results[scope] = _of_all(
            {
                "x": seen[0].detach(),
                "weight": layer.gate.weight_ED.detach().clone(),
                "experts": seen[1].experts_TK,
                "loss": layer.statistics.losses_L.clone(),
                "gradient": layer.gate.weight_ED.grad.clone(),
            }
        )
    return results
