"""Planning of meshes as integers, from 1 to 100,000 ranks, and device meshes of 3,072 ranks on a fake process group."""

from __future__ import annotations

import argparse
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from foundry_moe.config import AUTO, MeshConfig
from foundry_moe.layers.experts import Experts
from foundry_moe.parallel import mesh
from foundry_moe.parallel.mesh import (
    FLAT,
    HIERARCHICAL,
    MeshPlan,
    build_meshes,
    check_expert_widths,
    check_replicas,
    divisors,
    parse_mesh,
    plan_mesh,
)
from foundry_moe.parallel.placement import place_experts, shard_dimension

pytestmark = pytest.mark.quick


def expert_group(plan: MeshPlan, rank: int) -> range:
    first = rank - rank % plan.expert
    return range(first, first + plan.expert)


def shard_group(plan: MeshPlan, rank: int) -> range:
    replicate, _, expert = plan.coordinates(rank)
    first = replicate * plan.dense_shard + expert
    return range(first, first + plan.dense_shard, plan.expert)


def dense_shard_group(plan: MeshPlan, rank: int) -> range:
    first = rank - rank % plan.dense_shard
    return range(first, first + plan.dense_shard)


def replicate_group(plan: MeshPlan, rank: int) -> range:
    return range(rank % plan.dense_shard, plan.world_size, plan.dense_shard)


WORLD_SIZES = [1, 2, 3, 6, 7, 8, 24, 64, 97, 512, 1000, 3072, 4096, 16384, 65536, 99991, 100_000]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("ranks_per_node", [1, 4, 8])
def test_auto_uses_every_rank_and_keeps_experts_on_a_node(world_size: int, ranks_per_node: int) -> None:
    if world_size > ranks_per_node and world_size % ranks_per_node:
        with pytest.raises(ValueError, match="do not fill nodes"):
            plan_mesh(MeshConfig(), world_size=world_size, ranks_per_node=ranks_per_node)
        return
    plan = plan_mesh(
        MeshConfig(expert=AUTO, shard=AUTO), world_size=world_size, ranks_per_node=ranks_per_node, num_experts=64
    )
    assert plan.replicate * plan.shard * plan.expert == world_size
    assert plan.expert_nodes == 1 and plan.all_to_all == FLAT
    assert ranks_per_node % plan.expert == 0 and 64 % plan.expert == 0
    assert plan.replicate == 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_groups_partition_the_ranks_and_agree_with_coordinates(world_size: int) -> None:
    generator = random.Random(world_size)
    expert = generator.choice(divisors(world_size))
    shard = generator.choice(divisors(world_size // expert))
    plan = MeshPlan(replicate=world_size // expert // shard, shard=shard, expert=expert, ranks_per_node=8)
    for rank in {0, world_size - 1, *(generator.randrange(world_size) for _ in range(50))}:
        replicate_index, shard_index, expert_index = plan.coordinates(rank)
        assert rank == (replicate_index * shard + shard_index) * expert + expert_index
        groups = {
            "expert": (expert_group(plan, rank), expert),
            "shard": (shard_group(plan, rank), shard),
            "dense": (dense_shard_group(plan, rank), shard * expert),
            "replicate": (replicate_group(plan, rank), plan.replicate),
        }
        for name, (group, size) in groups.items():
            assert len(group) == size and rank in group, name
        # an expert group holds each expert once, and it and a shard group meet in this rank alone
        assert set(expert_group(plan, rank)) & set(shard_group(plan, rank)) == {rank}
        assert {plan.coordinates(r)[:2] for r in expert_group(plan, rank)} == {(replicate_index, shard_index)}
        assert {plan.coordinates(r)[2] for r in shard_group(plan, rank)} == {expert_index}
        assert {r % plan.dense_shard for r in replicate_group(plan, rank)} == {rank % plan.dense_shard}
    for first in (0, world_size - 1):
        owned = [e for r in expert_group(plan, first) for e in plan.experts_of(r, expert * 3)]
        assert owned == list(range(expert * 3))


def test_design_example_fills_in_replicate() -> None:
    plan = plan_mesh(MeshConfig(expert=8, shard=8, replicate=AUTO), world_size=512, ranks_per_node=8, num_experts=64)
    assert (plan.replicate, plan.shard, plan.expert, plan.dense_shard, plan.nodes) == (8, 8, 8, 64, 64)


@pytest.mark.parametrize(
    ("expert", "ranks_per_node", "wanted", "chosen", "nodes"),
    [
        (8, 8, AUTO, FLAT, 1),
        (16, 8, AUTO, HIERARCHICAL, 2),
        (64, 8, HIERARCHICAL, HIERARCHICAL, 8),
        (64, 8, FLAT, FLAT, 8),
        (8, 1, AUTO, FLAT, 8),  # a rank per node: nothing to gather within one
        (4, 8, HIERARCHICAL, FLAT, 1),  # within a node: nothing to exchange between them
        (12, 8, AUTO, FLAT, 2),  # straddles
        (6, 4, AUTO, FLAT, 2),
        (6, 8, AUTO, FLAT, 2),  # fits in a node; every second group straddles
    ],
)
def test_exchange_is_hierarchical_where_experts_fill_several_nodes(
    expert: int, ranks_per_node: int, wanted: str, chosen: str, nodes: int
) -> None:
    config = MeshConfig(expert=expert, shard=AUTO, all_to_all=wanted)
    plan = plan_mesh(config, world_size=expert * 16, ranks_per_node=ranks_per_node, num_experts=expert * 2)
    assert (plan.all_to_all, plan.expert_nodes) == (chosen, nodes)


@pytest.mark.parametrize(
    ("config", "world_size", "num_experts", "sentence"),
    [
        ({"expert": 3}, 6, 8, r"mesh.expert \(3\) must divide num_experts \(8\): use 1 or 2"),
        (
            {"expert": 2, "shard": 2, "replicate": 1},
            8,
            8,
            r"= 4 does not fit the number of GPUs \(8\): override mesh.shard=4, or",
        ),
        ({"expert": 16}, 8, 64, r"mesh.expert \(16\) does not fit .* \(8\): override mesh.expert=8, or"),
        ({"expert": AUTO, "shard": 1}, 8, 6, r"\(auto: 2\) x .* = 2, but there are 8 GPUs: set mesh.shard or"),
        ({"expert": AUTO, "shard": 2}, 16, 4, r"\(auto: 4\) x .* = 8, but there are 16 GPUs"),
        (
            {"expert": 2, "shard": 3, "replicate": AUTO},
            8,
            8,
            r"= 6 does not fit .* override mesh.shard=1, or",
        ),
        ({"expert": 12, "all_to_all": HIERARCHICAL}, 24, 24, r"must|needs mesh.expert \(12\) to fill whole nodes"),
    ],
)
def test_impossible_mesh_is_a_sentence_with_the_arithmetic(
    config: dict, world_size: int, num_experts: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan_mesh(MeshConfig(**config), world_size=world_size, ranks_per_node=8, num_experts=num_experts)


@pytest.mark.parametrize("world_size", [1, 2, 6, 8, 12, 48])
@pytest.mark.parametrize("shard", [AUTO, 1, 4])
@pytest.mark.parametrize("expert", [2, 8])
def test_the_override_that_an_error_names_works(expert: int, shard: int | str, world_size: int) -> None:
    keys = {"expert": expert, "shard": shard, "replicate": 2}
    try:
        plan_mesh(MeshConfig(**keys), world_size=world_size, ranks_per_node=world_size, num_experts=8)
    except ValueError as error:
        named = str(error).partition(": override ")[2].partition(", or ")[0]
        keys |= {key.removeprefix("mesh."): int(value) for key, value in (word.split("=") for word in named.split())}
        plan_mesh(MeshConfig(**keys), world_size=world_size, ranks_per_node=world_size, num_experts=8)


def test_a_job_smaller_than_a_node_is_on_one() -> None:
    plan = plan_mesh(MeshConfig(expert=3, shard=AUTO), world_size=6, ranks_per_node=8, num_experts=6)
    assert (plan.nodes, plan.expert_nodes) == (1, 1)


def test_ranks_hold_equal_widths_and_replicas_need_a_torch_that_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    check_expert_widths((8, 16, 12, 12, 16, 8), 3)
    with pytest.raises(ValueError, match="are 8, 16 or 8"):
        check_expert_widths((8, 16, 8), 3)
    monkeypatch.setattr(mesh, "can_replicate", lambda device_type: False)
    check_replicas(1, "cpu")
    with pytest.raises(ValueError, match=r"mesh.replicate \(2\): torch 2.7"):
        check_replicas(2, "cpu")


def test_mesh_on_the_command_line() -> None:
    assert parse_mesh("2,2,2") == (2, 2, 2)
    for bad in ("2,2", "2,2,0", "2,x,2", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_mesh(bad)


@pytest.fixture
def fake_group_of_3072():
    """This process as rank 1234 of 3,072, none of which exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=1234, world_size=3072)
    yield 1234
    dist.destroy_process_group()


class _Layer(torch.nn.Module):
    num_experts = 64
    layer_index = 0

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(
            num_experts=64, d_model=2048, hidden_size=1024, activation="swiglu", num_layers=1, device="meta"
        )


@pytest.mark.parametrize(("expert", "shard"), [(8, 8), (64, 8), (8, 1), (64, 48)])
def test_3072_ranks_place_experts_and_the_rest(
    fake_group_of_3072: int, monkeypatch: pytest.MonkeyPatch, expert: int, shard: int
) -> None:
    rank = fake_group_of_3072
    if 1024 % shard:
        with pytest.raises(ValueError, match=r"mesh.shard \(48\) must divide the rows \(1024\)"):
            plan = plan_mesh(MeshConfig(expert=expert, shard=shard), world_size=3072, ranks_per_node=8, num_experts=64)
            shard_dimension("layer", _Layer().experts, plan)
        return
    plan = plan_mesh(
        MeshConfig(expert=expert, shard=shard, replicate=AUTO),
        world_size=3072,
        ranks_per_node=8,
        num_experts=64,
    )
    meshes = build_meshes(plan, "cpu")
    monkeypatch.setattr("foundry_moe.parallel.placement.draw_experts", lambda layer, plan, dimension: None)
    layer = _Layer()
    place_experts(
        layer,
        meshes,
        dimension=1,
        device=torch.device("meta"),
        mp_policy=MixedPrecisionPolicy(),
        reshard_after_forward=True,
    )
    w1 = layer.experts.w1_EFD
    assert tuple(w1.shape) == (64, 1024, 2048)  # of the whole layer
    assert tuple(w1.to_local().shape) == (64 // expert, 1024 // shard, 2048)
    bytes_here = sum(p.to_local().numel() * 4 for p in layer.experts.parameters())
    assert bytes_here == 3 * 64 * 1024 * 2048 * 4 // (expert * shard)
    assert dist.get_process_group_ranks(meshes.expert.get_group()) == list(expert_group(plan, rank))
    assert dist.get_process_group_ranks(meshes.experts.get_group("shard")) == list(shard_group(plan, rank))
    assert dist.get_process_group_ranks(meshes.dense.get_group("shard_expert")) == list(dense_shard_group(plan, rank))
    assert dist.get_process_group_ranks(meshes.dense.get_group("replicate")) == list(replicate_group(plan, rank))
    if expert > 8:
        node_group, peer_group = meshes.token_groups
        node = set(dist.get_process_group_ranks(node_group))
        assert len(node) == 8 and len({r // 8 for r in node}) == 1
        peers = dist.get_process_group_ranks(peer_group)
        assert {r % 8 for r in peers} == {rank % 8} and len(peers) == expert // 8
    dense = torch.nn.Linear(2048, 50304, bias=False, device="meta")
    fully_shard(dense, mesh=meshes.dense)
    assert dense.weight.to_local().numel() <= -(-50304 // plan.dense_shard) * 2048
