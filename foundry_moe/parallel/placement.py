"""Places a model's experts on a mesh, and gives the mesh on which FSDP2 shards the rest.

Depends on MoE layers: `experts` (a module whose parameters have the experts first), `gate`, `shared_expert`,
`dispatcher`, `num_experts`, `context`, and how they draw weights. Independent of kernels and Composer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from foundry_moe.config import AUTO, MeshConfig
from foundry_moe.layers.experts import MixedExperts
from foundry_moe.layers.lookup import named_moe_layers
from foundry_moe.parallel.all_to_all import AllToAllDispatcher
from foundry_moe.parallel.collectives import GateCollectives
from foundry_moe.parallel.gradients import LocalWeight
from foundry_moe.parallel.mesh import (
    Meshes,
    MeshPlan,
    average_on_gloo,
    build_meshes,
    check_expert_widths,
    check_replicas,
    divisors,
    listed,
    plan_mesh,
)
from foundry_moe.parallel.one_pass_cast import cast_in_one_pass
from foundry_moe.schema import UserError, from_mapping


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The result of `parallelize`.

    plan: widths of the mesh.
    mesh: for `fully_shard` of all modules but the experts: 1-D, or 2-D with replicas.
    """

    plan: MeshPlan
    mesh: DeviceMesh


def parallelize(
    model: nn.Module,
    mesh: MeshConfig | Mapping[str, Any],
    *,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int = True,
    device: torch.device | str = "cpu",
    ranks_per_node: int | None = None,
    blocks: Iterable[nn.Module] = (),
) -> Placement:
    """Divides the experts of every MoE layer over the mesh, and shards them with FSDP2.

    Call it on every rank, after `init_process_group` and before `fully_shard` wraps the other modules on the returned
    `Placement.mesh`. Experts on the meta device are drawn here, by each rank only its own part; real ones are sliced.
    Parameters keep their names.

    Args:
        mesh: widths of the mesh, for example `{"expert": 8, "shard": "auto"}`. `compile`, `sizes` and `spares` have no
            effect.
        optimizers: their parameters are replaced by the placed ones. They must not have stepped.
        mp_policy: mixed precision of the experts.
        reshard_after_forward: of the experts, as in `fully_shard`.
        device: of this rank.
        ranks_per_node: default: LOCAL_WORLD_SIZE, or all.
        blocks: modules that the caller gives to `fully_shard` on `Placement.mesh`. Where `expert` is 1, experts in them
            are left to it, and so are the optimizers' references to these, if `shard` cuts their first dimension, no
            file has their weights, and FSDP2 can have the block's dtypes in one group. One hook then gathers a block,
            and its graph is compiled whole. Call `experts.param_init_fn(experts)` once experts of the meta device have
            memory, as Composer does.

    Raises:
        ValueError: no MoE layer, or a mesh that fits neither the job nor the experts nor the installed torch.
    """
    mesh_config = mesh if isinstance(mesh, MeshConfig) else from_mapping(MeshConfig, mesh, "mesh")
    check_whole(model)
    layers: Mapping[str, Any] = named_moe_layers(model)
    if not layers:
        raise UserError("mesh is for models with MoE layers, and this one has none: check `layers`")
    plan = plan_for_layers(layers.values(), mesh_config, ranks_per_node)
    dimensions = {name: shard_dimension(name, layer.experts, plan) for name, layer in layers.items()}
    device = torch.device(device)
    check_replicas(plan.replicate, device.type)
    average_on_gloo()
    meshes = build_meshes(plan, device.type)
    names = {parameter: name for name, parameter in model.named_parameters()}
    alike = [block for block in blocks if len({p.dtype for p in block.parameters() if p.requires_grad}) <= 1]
    within = {module for block in alike for module in block.modules()} if plan.expert == 1 else set()
    connect(layers.values(), meshes, mesh_config)
    for name, layer in layers.items():
        draw_replicated(layer, device)
        if layer in within and dimensions[name] == 0 and not layer.sources:
            if any(parameter.is_meta for parameter in layer.experts.parameters()):
                layer.experts.param_init_fn = partial(_draw_own, layer, plan)
            continue
        # Not compiled: FSDP2's hooks on experts break the graph, and numbers of rows are read on the host. As one
        # call, a compiled block's graph breaks once.
        layer.compute_experts = torch.compiler.disable(layer.compute_experts)
        place_experts(
            layer,
            meshes,
            dimension=dimensions[name],
            device=device,
            mp_policy=mp_policy or MixedPrecisionPolicy(),
            reshard_after_forward=reshard_after_forward,
        )
    placed = dict(model.named_parameters())
    for optimizer in optimizers:
        replace_parameters(optimizer, {old: placed[name] for old, name in names.items()})
    return Placement(plan=plan, mesh=meshes.dense)


def check_whole(model: nn.Module) -> None:
    """Raises ValueError before there is a process group, and for a model that is sharded already."""
    if not dist.is_initialized():
        raise UserError("parallelize needs a process group: call torch.distributed.init_process_group() first")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserError(f"{name} is sharded already: call parallelize once, and before fully_shard")


def plan_for_layers(layers: Iterable[Any], mesh_config: MeshConfig, ranks_per_node: int | None) -> MeshPlan:
    """The one mesh of all layers; arguments as in `parallelize`.

    Raises:
        ValueError: it fits neither the job nor the experts.
    """
    plan = plan_for_counts({layer.num_experts for layer in layers}, mesh_config, ranks_per_node)
    for layer in layers:
        layer.config.check_mesh(replace(mesh_config, expert=plan.expert))
        if isinstance(layer.experts, MixedExperts):
            check_expert_widths(layer.experts.widths, plan.expert)
    return plan


def plan_for_counts(counts: set[int], mesh_config: MeshConfig, ranks_per_node: int | None) -> MeshPlan:
    """The one mesh of layers with these numbers of experts; arguments as in `parallelize`.

    Raises:
        ValueError: it fits neither the job nor the experts.
    """
    world_size = dist.get_world_size()
    ranks_per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if mesh_config.expert == AUTO:
        counts = {math.gcd(*counts)}  # a divisor of it divides all
    (plan,) = {
        plan_mesh(mesh_config, world_size=world_size, ranks_per_node=ranks_per_node, num_experts=count)
        for count in counts
    }
    return plan


def connect(layers: Iterable[Any], meshes: Meshes, mesh_config: MeshConfig) -> None:
    """Gives layers their collectives: sums for losses and gates, and the dispatcher."""
    everyone = GateCollectives()
    for layer in layers:
        everyone.connect(layer.context)
        if meshes.plan.expert > 1:
            group = meshes.expert.get_group()
            layer.context.sum_over_group = GateCollectives(group).sum
            layer.dispatcher = AllToAllDispatcher(
                meshes.token_groups,
                num_experts=layer.num_experts,
                buffer=mesh_config.buffer,
                once=layer.context.once,
            )


def shard_dimension(name: str, experts: nn.Module, plan: MeshPlan) -> int:
    """The dimension of an expert weight that `shard` cuts.

    With expert parallelism: 1, the rows of each matrix, which `shard` must divide. Without: 0, the experts, which saves
    FSDP2 two copies in each gather and reduction; or 1, if rows divide and experts do not, since FSDP2 would pad these.

    Raises:
        ValueError: `shard` does not divide the rows.
    """
    if plan.expert == 1 and next(experts.parameters()).shape[0] % plan.shard == 0:
        return 0
    for parameter_name, parameter in experts.named_parameters():
        rows = parameter.shape[1]
        if rows % plan.shard == 0:
            continue
        if plan.expert == 1:
            return 0
        valid = [d for d in divisors(plan.world_size // plan.expert) if rows % d == 0]
        raise UserError(
            f"mesh.shard ({plan.shard}) must divide the rows ({rows}) of an expert's matrices "
            f"({name}.experts.{parameter_name}): use {listed(valid)}"
        )
    return 1


def draw_replicated(layer: Any, device: torch.device) -> None:
    """Draws the gate and shared expert of a layer on the meta device; FSDP2 shards them later."""
    for part, reset in ((layer.gate, layer.reset_gate), (layer.shared_expert, layer.reset_shared_expert)):
        if part is not None and any(parameter.is_meta for parameter in part.parameters()):
            part.to_empty(device=device)
            reset()


def place_experts(
    layer: Any,
    meshes: Meshes,
    *,
    dimension: int,
    device: torch.device,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int,
) -> None:
    """Shards a layer's experts. Those on the meta device are drawn, except those that `layer.sources` will fill."""
    experts: Any = layer.experts
    on_meta = any(parameter.is_meta for parameter in experts.parameters())
    owned = meshes.plan.experts_of(dist.get_rank(), layer.num_experts)
    shard_experts(
        experts,
        experts.rows_of(owned),
        meshes,
        dimension_of=lambda parameter: dimension,
        device=device,
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
    )
    if on_meta:
        experts.to_empty(device=device)
        draw_experts(layer, meshes.plan, dimension)
    local = local_weights(experts, meshes.plan)
    if local is not None:
        experts.local, experts.held = local, owned


def shard_experts(
    experts: nn.Module,
    rows: range,
    meshes: Meshes,
    *,
    dimension_of: Callable[[nn.Parameter], int],
    device: torch.device,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int,
) -> None:
    """Makes a module's own parameters DTensors: dimension 0 over `expert`, `dimension_of` it over `shard`.

    Two shardings of one dimension would interleave rows; on different dimensions a checkpoint can be resharded to any
    mesh. FSDP2 wraps the module even if `shard` is 1: call `local_weights` once its weights are real.

    Args:
        rows: of this rank, in dimension 0.
    """
    for name, parameter in list(experts.named_parameters(recurse=False)):
        local = parameter.detach()[rows.start : rows.stop]
        local = local.contiguous() if parameter.is_meta else local.to(device, copy=True)
        if meshes.plan.expert > 1:
            shape, stride = parameter.shape, parameter.stride()
            local = DTensor.from_local(local, meshes.expert, [Shard(0)], run_check=False, shape=shape, stride=stride)
        setattr(experts, name, nn.Parameter(local, requires_grad=parameter.requires_grad))
    fully_shard(
        experts,
        mesh=meshes.experts,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=lambda parameter: Shard(dimension_of(parameter)),
        # experts cast their rows themselves; combine weights stay as they are
        mp_policy=replace(mp_policy, cast_forward_inputs=False),
    )


def local_weights(experts: nn.Module, plan: MeshPlan) -> LocalWeight | None:
    """Turns weights of sharded experts into this rank's; None: they are as they come. Removes copies of FSDP2."""
    if plan.shard == 1:
        cast_in_one_pass(experts)
    if plan.expert == 1:
        return None
    return LocalWeight(plan.expert, experts if plan.shard == plan.replicate == 1 else None)


def _draw_own(layer: Any, plan: MeshPlan, _: nn.Module) -> None:
    draw_experts(layer, plan, 0)


@torch.no_grad()
def draw_experts(layer: Any, plan: MeshPlan, dimension: int) -> None:
    """Fills a layer's placed experts with their initial weights, which do not depend on the mesh."""
    _, shard, _ = plan.coordinates(dist.get_rank())
    experts: Any = layer.experts
    whole = experts.rows_of(plan.experts_of(dist.get_rank(), layer.num_experts))
    filled = {part.ours.removeprefix("experts.") for part in layer.sources}
    for name, parameter in experts.named_parameters():
        if name in filled:
            continue
        local: Tensor = parameter.to_local()
        height, wide = local.shape[:2]
        rows, columns = whole, range(wide)
        if dimension == 0:
            start = min(shard * -(-len(whole) // plan.shard), len(whole))  # as FSDP2 divides: the last may be short
            rows = whole[start : start + height]
        else:
            columns = range(shard * wide, (shard + 1) * wide)
        experts.draw_(name, local, rows, columns, seed=layer.config.seed, layer=layer.layer_index)


def replace_parameters(optimizer: torch.optim.Optimizer, new: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replaces the old parameters by the placed ones, group by group.

    Raises:
        ValueError: the optimizer has stepped, so its state has other shapes.
    """
    if optimizer.state:
        raise UserError("experts must be placed on a mesh before the optimizer's first step, but it has state")
    for group in optimizer.param_groups:
        group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]
