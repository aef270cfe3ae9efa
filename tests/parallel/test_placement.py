"""What placement decides for all layers, on one rank of four; parity tests hold that training is the same."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from foundry_moe.config import AUTO, MeshConfig, MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.moe import MoELayer
from foundry_moe.parallel import placement
from foundry_moe.parallel.mesh import MeshPlan, build_meshes
from foundry_moe.parallel.placement import (
    connect,
    local_weights,
    parallelize,
    plan_for_counts,
    plan_for_layers,
    replace_parameters,
)

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def rank_1_of_4() -> Iterator[None]:
    """This process as rank 1 of 4, of which the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def layer(hidden_size: Any = 6, num_experts: int = 8) -> MoELayer:
    config = MoEConfig(num_experts=num_experts, expert_hidden_size=hidden_size, activation="swiglu")
    return MoELayer(4, config)


def test_loads_are_summed_over_all_ranks_and_over_those_that_share_experts() -> None:
    meshes = build_meshes(MeshPlan(replicate=1, shard=2, expert=2, ranks_per_node=4), "cpu")
    stub: Any = SimpleNamespace(context=BatchContext(), compute_experts=lambda: None, num_experts=8)
    connect([stub], meshes, MeshConfig(expert=2, shard=2, buffer=3.0))
    assert stub.context.sum_over_ranks.__self__.group is None
    assert stub.context.sum_over_group.__self__.group is meshes.expert.get_group()
    assert (stub.dispatcher.local_experts, stub.dispatcher.buffer) == (4, 3.0)


def test_one_mesh_divides_the_experts_of_all_layers() -> None:
    plan = plan_for_counts({6, 8}, MeshConfig(expert=AUTO, shard=AUTO), 4)
    assert (plan.expert, plan.shard) == (2, 2)
    uneven = layer(hidden_size=(4, 4, 8, 8), num_experts=4)
    with pytest.raises(ValueError, match="the sums of the widths of 2 consecutive experts are 8 or 16"):
        plan_for_layers([layer(), uneven], MeshConfig(expert=2, shard=2), 4)


@pytest.mark.parametrize(("replicate", "expert", "bypasses"), [(1, 4, True), (2, 2, False), (4, 1, None)])
def test_gradients_bypass_fsdp2_only_where_no_other_rank_has_the_weights(
    replicate: int, expert: int, bypasses: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "cast_in_one_pass", lambda module: None)
    experts = layer().experts
    made = local_weights(experts, MeshPlan(replicate=replicate, shard=1, expert=expert, ranks_per_node=4))
    assert (None if made is None else made.unsharded is experts) is bypasses


def test_an_optimizer_gets_the_placed_parameters_in_all_groups_before_its_first_step() -> None:
    old, new = [[nn.Parameter(torch.ones(1)) for _ in range(2)] for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [old[0]]}, {"params": [old[1]]}])
    replace_parameters(optimizer, dict(zip(old, new, strict=True)))
    assert all(group["params"][0] is parameter for group, parameter in zip(optimizer.param_groups, new, strict=True))
    new[0].grad = torch.ones(1)
    optimizer.step()
    with pytest.raises(ValueError, match="before the optimizer's first step"):
        replace_parameters(optimizer, {})


@pytest.mark.parametrize("kind", ["real", "meta", "another dtype", "divided", "cut along rows"])
def test_experts_are_left_to_the_group_of_their_block_where_it_can_have_them(kind: str) -> None:
    experts = 6 if kind == "cut along rows" else 8
    config = MoEConfig(num_experts=experts, expert_hidden_size=8, activation="gelu")
    dtype = torch.bfloat16 if kind == "another dtype" else torch.float32
    moe = MoELayer(4, config, device="meta" if kind == "meta" else "cpu")
    block = nn.Sequential(nn.Linear(4, 4, dtype=dtype), moe)
    model = nn.Sequential(block)
    sizes = {"expert": 2, "shard": 2} if kind == "divided" else {"expert": 1, "shard": 4}
    placed = parallelize(model, MeshConfig(**sizes), blocks=[block])
    assert isinstance(moe.experts, FSDPModule) == (kind not in ("real", "meta"))
    assert hasattr(moe.experts, "param_init_fn") == (kind == "meta")
    if kind == "real":
        fully_shard(block, mesh=placed.mesh)
        shards: list[Any] = list(moe.experts.parameters())
        assert [shard.to_local().shape[0] for shard in shards] == [2, 2]
