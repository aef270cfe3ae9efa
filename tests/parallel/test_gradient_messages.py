"""Gradients that ranks send in bf16: which modules, and what FSDP2's own reduction gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from foundry_moe.launch.processes import run_processes
from foundry_moe.parallel.gradient_messages import GradientMessages, send_own_dtype
from foundry_moe.parallel.mesh import can_replicate
from tests.helpers.fake_ranks import fake_ranks

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
pytestmark = pytest.mark.skipif(not can_replicate("cpu"), reason="FSDP2 of torch 2.7 reduces by itself")


def sharded(replicate: int, shard: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False))
    mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
    return fully_shard(module, mesh=mesh if replicate > 1 else mesh["shard"], mp_policy=MIXED)


@pytest.fixture
def rank_0_of_4() -> Iterator[None]:
    """This process as rank 0 of 4, of which the others do not exist."""
    with fake_ranks(4):
        yield


@pytest.mark.quick
@pytest.mark.usefixtures("rank_0_of_4")
@pytest.mark.parametrize(
    ("mesh", "ranks_per_node", "changed"),
    [
        ((1, 4), 4, True),
        ((1, 4), 1, True),  # each rank on its own node
        ((1, 4), 2, False),
        ((2, 2), 2, True),  # shards within a node, replicas across
        ((4, 1), 4, False),  # more than two replicas
    ],
)
def test_messages_are_changed_where_they_are_shorter(mesh: tuple[int, int], ranks_per_node: int, changed: bool) -> None:
    messages = send_own_dtype(sharded(*mesh), torch.bfloat16, ranks_per_node)
    assert isinstance(messages, GradientMessages) == changed


def gradients_of(module: Any, messages: GradientMessages | None, *, microbatches: int, added: bool) -> list[Tensor]:
    """This rank's gradients after some microbatches, each reduced or their sum."""
    torch.manual_seed(10 + dist.get_rank())
    for number in range(microbatches):
        last = number == microbatches - 1
        if added:
            module.set_requires_gradient_sync(last)
        if messages is not None:
            messages.begin(sums=added and microbatches > 1)
        module(torch.randn(4, 5)).square().sum().backward()
    return [parameter.grad.to_local().clone() for parameter in module.parameters()]


def compare_with_fsdp2(meshes: list[tuple[int, int]]) -> list[str]:
    """What differs, by mesh, factor and number of microbatches."""
    wrong = []
    for mesh in meshes:
        # gloo has no sum with a factor, which FSDP2 takes over shards
        for factor in (None, 1.0) if mesh[1] == 1 else (None,):
            for microbatches, added in ((1, False), (2, False), (2, True)):
                found = []
                for own in (False, True):
                    module = sharded(*mesh)
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
                    messages = send_own_dtype(module, torch.bfloat16, 8) if own else None
                    assert own == (messages is not None)
                    found.append(gradients_of(module, messages, microbatches=microbatches, added=added))
                if not all(map(torch.equal, *found)) or not all(part.dtype == torch.float32 for part in found[1]):
                    wrong.append(f"{mesh}, factor {factor}, {microbatches} microbatches, added {added}")
    return wrong


def test_gradients_are_bit_for_bit_those_of_fsdp2() -> None:
    """Uneven shards, gradients added up or reduced one by one, and a user's factor."""
    assert run_processes(compare_with_fsdp2, [(1, 2), (2, 1)], world_size=2) == []
