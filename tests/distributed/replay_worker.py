"""Router replay and recomputed dispatches on each rank of a mesh."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from foundry_moe import MeshConfig, record_choices, replay_choices
from tests.helpers.small_training import CASES, build_model, draw_batch, place, take_share, whole

CASE = replace(CASES[0], moe={**CASES[0].moe, "loss": {}})
COUNTS = ("all_gather_into_tensor", "all_reduce")  # of a dispatch; parameters are gathered by other functions


def placed(mode: str, buffer: float) -> Any:
    model = build_model(CASE, torch.float64, torch.device("cpu"))
    if mode != "plain":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=mode == "reentrant")
    mesh = MeshConfig(expert=2, shard=dist.get_world_size() // 2, buffer=buffer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    place(model, mesh, optimizer, policy, torch.device("cpu"), None)
    return model


def my_batch(number: int) -> Tensor:
    """Uneven over ranks."""
    return take_share(draw_batch(0, number), (2, 1), dist.get_rank(), dist.get_world_size())[:, :-1]


def gradients(model: Any, outputs: list[Tensor]) -> dict[str, Tensor]:
    for y in outputs:
        y.sin().sum().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def count_collectives(mode: str, buffer: float) -> tuple[dict[str, Tensor], dict[str, int], int]:
    """Gradients, the calls that exchange counts in the forward and in the backward pass, and the most rounds.

    Two passes are in flight at once.
    """
    model = placed(mode, buffer)
    calls: Counter[str] = Counter()
    phase = "forward"

    def counted(call: Any, *args: Any, **kwargs: Any) -> Any:
        calls[phase] += args[0].dtype == torch.int64 if isinstance(args[0], Tensor) else 0
        return call(*args, **kwargs)

    originals = {name: getattr(dist, name) for name in COUNTS}
    for name, call in originals.items():
        setattr(dist, name, partial(counted, call))
    try:
        outputs = [model(my_batch(number)) for number in range(2)]
        phase = "backward"
        found = gradients(model, outputs)
    finally:
        for name, call in originals.items():
            setattr(dist, name, call)
    return found, dict(calls), max(block.ffn.experts.most_rounds for block in model.blocks)


def replay(mode: str, buffer: float) -> dict[str, dict[str, Tensor]]:
    """Gradients of two microbatches, from the gate's own choices and replayed ones after the gates have moved."""
    model = placed(mode, buffer)
    with record_choices(model) as choices:
        own = gradients(model, [model(my_batch(number)) for number in range(2)])
    model.zero_grad()
    with replay_choices(model, choices.experts_TLK.int()):
        again = gradients(model, [model(my_batch(number)) for number in range(2)])
    model.zero_grad()
    with torch.no_grad():
        for block in model.blocks:
            block.ffn.gate.weight_ED.neg_()
    with record_choices(model) as kept, replay_choices(model, choices):
        outputs = [model(my_batch(number)) for number in range(2)]
    assert torch.equal(kept.experts_TLK, choices.experts_TLK)
    moved = gradients(model, outputs)
    whole_batch = [None] * dist.get_world_size()
    dist.all_gather_object(whole_batch, [choices.experts_TLK.split([my_batch(n).numel() for n in range(2)])])
    return {"own": own, "again": again, "moved": moved, "choices": whole_batch}  # type: ignore[dict-item]
