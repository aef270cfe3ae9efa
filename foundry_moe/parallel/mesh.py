"""Plans the (replicate, shard, expert) mesh as plain integers and builds the device meshes of a plan.

Planning needs no process group and no torch, and costs the same for 1 rank as for 100,000. `expert` is the
innermost dimension: ranks of an expert group are neighbours, so that their all-to-all stays on a node's NVLink.
Independent of models, parameters and tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foundry_moe.config import AUTO, MeshConfig
from foundry_moe.schema import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("replicate", "shard", "expert")
FLAT, HIERARCHICAL = "flat", "hierarchical"


Mesh = tuple[int, int, int]  # replicate, shard, expert


def parse_mesh(text: str) -> Mesh:
    """`2,2,2` -> (replicate, shard, expert).

    Raises:
        argparse.ArgumentTypeError: not three whole numbers of 1 or more.
    """
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: a mesh is replicate,shard,expert, for example 2,2,2")
    replicate, shard, expert = map(int, parts)
    return replicate, shard, expert


def divisors(number: int) -> list[int]:
    """Every divisor of `number`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def listed(values: Iterable[int]) -> str:
    """`1, 2, 4 or 8`."""
    words = [str(v) for v in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """A mesh in integers: rank = (replicate index * shard + shard index) * expert + expert index.

    replicate, shard, expert: widths; their product is the number of ranks.
    ranks_per_node: neighbouring ranks that share a host.
    all_to_all: flat | hierarchical.
    """

    replicate: int
    shard: int
    expert: int
    ranks_per_node: int
    all_to_all: str = FLAT

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.expert

    @property
    def dense_shard(self) -> int:
        """Over how many ranks a parameter outside the experts is sharded."""
        return self.shard * self.expert

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.ranks_per_node)

    @property
    def expert_nodes(self) -> int:
        """Nodes that an expert group touches, at most. Groups begin at multiples of gcd(expert, ranks_per_node)."""
        latest_start = self.ranks_per_node - math.gcd(self.expert, self.ranks_per_node)
        return -(-(latest_start + self.expert) // self.ranks_per_node)

    @property
    def expert_ranks_per_node(self) -> int:
        """Ranks of one expert group on one of its nodes; for a hierarchical all-to-all."""
        return min(self.expert, self.ranks_per_node)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(replicate, shard, expert) indices of a rank."""
        assert 0 <= rank < self.world_size
        outer, expert = divmod(rank, self.expert)
        return (*divmod(outer, self.shard), expert)

    def experts_of(self, rank: int, num_experts: int) -> range:
        """Experts, of `num_experts` in a layer, whose weights `rank` has a part of."""
        local = num_experts // self.expert
        first = self.coordinates(rank)[2] * local
        return range(first, first + local)

    def __str__(self) -> str:
        return f"(replicate {self.replicate}, shard {self.shard}, expert {self.expert})"


def plan_mesh(config: MeshConfig, *, world_size: int, ranks_per_node: int, num_experts: int | None = None) -> MeshPlan:
    """Fills in `auto` and checks a mesh against the machine and the experts.

    `expert: auto` is the largest width that fits in a node and divides `num_experts`; then `shard: auto` takes all
    remaining ranks. `replicate: auto` is above 1 only if `shard` is a number.

    Args:
        config: the user's `mesh`.
        world_size: ranks in the job.
        ranks_per_node: ranks on one host (LOCAL_WORLD_SIZE).
        num_experts: experts in each layer; None skips its checks and makes `expert: auto` 1.

    Raises:
        ValueError: no such mesh exists; the message has the arithmetic and valid values.
    """
    if world_size < 1 or ranks_per_node < 1:
        raise UserError(f"a mesh needs at least one GPU and one GPU per node, not {world_size} and {ranks_per_node}")
    if world_size > ranks_per_node and world_size % ranks_per_node:
        raise UserError(f"{world_size} GPUs do not fill nodes of {ranks_per_node} GPUs: give every node as many")
    if num_experts is not None and config.expert != AUTO and num_experts % config.expert:
        valid = [d for d in divisors(num_experts) if world_size % d == 0]
        raise UserError(f"mesh.expert ({config.expert}) must divide num_experts ({num_experts}): use {listed(valid)}")
    widths = {name: getattr(config, name) for name in ("expert", "shard", "replicate")}
    left = _left_over(widths, world_size)
    if widths["expert"] == AUTO:
        fits = [d for d in divisors(left) if ranks_per_node % d == 0 and (num_experts or 1) % d == 0]
        widths["expert"] = fits[-1]
        left //= fits[-1]
    for name in ("shard", "replicate"):
        if widths[name] == AUTO:
            widths[name], left = left, 1
    if left > 1 and num_experts is not None:
        raise UserError(
            f"mesh.expert (auto: {widths['expert']}) x mesh.shard ({widths['shard']}) x mesh.replicate "
            f"({widths['replicate']}) = {world_size // left}, but there are {world_size} GPUs: set mesh.shard or "
            "mesh.replicate to auto"
        )
    plan = MeshPlan(**widths, ranks_per_node=min(ranks_per_node, world_size))
    return replace(plan, all_to_all=_choose_all_to_all(config.all_to_all, plan))


def _left_over(widths: dict[str, int | str], world_size: int) -> int:
    """Ranks for the widths that are `auto`."""
    fixed = {name: w for name, w in widths.items() if isinstance(w, int)}
    product = math.prod(fixed.values())
    if world_size % product == 0 and (len(fixed) < len(widths) or product == world_size):
        return world_size // product
    arithmetic = " x ".join(f"mesh.{name} ({w})" for name, w in fixed.items() if w > 1)
    total = f" = {product}" if " x " in arithmetic else ""
    overrides = " ".join(f"mesh.{name}={w}" for name, w in _nearest_widths(widths, world_size).items())
    raise UserError(
        f"{arithmetic or 'mesh (1 GPU)'}{total} does not fit the number of GPUs ({world_size}): override "
        f"{overrides}, or mesh=auto, with which a mesh is chosen for any number"
    )


def _nearest_widths(widths: dict[str, int | str], world_size: int) -> dict[str, int]:
    """The widths to change for a mesh of this many ranks; `expert` stays a divisor of the number of experts."""
    left, fitting = world_size, {}
    for name in ("expert", "replicate", "shard"):
        width = widths[name]
        if isinstance(width, int):
            fitting[name] = math.gcd(width, left)
            left //= fitting[name]
    if len(fitting) == len(widths):
        fitting["shard"] *= left
    return {name: width for name, width in fitting.items() if width != widths[name]}


def _choose_all_to_all(wanted: str, plan: MeshPlan) -> str:
    whole_nodes = plan.expert % plan.ranks_per_node == 0
    if wanted == HIERARCHICAL and plan.expert > plan.ranks_per_node and not whole_nodes:
        raise UserError(
            f"mesh.all_to_all: hierarchical needs mesh.expert ({plan.expert}) to fill whole nodes of "
            f"{plan.ranks_per_node} GPUs: use a multiple of {plan.ranks_per_node}, or all_to_all: flat"
        )
    spans = plan.expert > plan.ranks_per_node and whole_nodes
    # with one rank per node there is nothing to gather within it; with one node nothing to send between
    useful = spans and plan.ranks_per_node > 1
    return HIERARCHICAL if useful and wanted != FLAT else FLAT


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """The device meshes of a plan.

    dense: for parameters outside the experts: 1-D (shard_expert,), or 2-D (replicate, shard_expert).
    experts: for `fully_shard` of experts: 1-D (shard,), or 2-D (replicate, shard).
    expert: 1-D, the dimension on which experts are `Shard(0)`.
    token_groups: of the all-to-all. Flat: (the expert group,); hierarchical: (its ranks on this node, its ranks with
        this rank's index on every node).
    """

    plan: MeshPlan
    dense: DeviceMesh
    experts: DeviceMesh
    expert: DeviceMesh
    token_groups: tuple[ProcessGroup, ...]


def check_expert_widths(widths: Sequence[int], expert: int) -> None:
    """Checks that ranks hold equal bytes of experts of different widths; each holds consecutive experts.

    Raises:
        ValueError: the sums differ.
    """
    local = len(widths) // expert
    sums = [sum(widths[rank * local : (rank + 1) * local]) for rank in range(expert)]
    if len(set(sums)) == 1:
        return
    raise UserError(
        f"mesh.expert ({expert}): every rank must hold as much of expert_hidden_size, but the sums of the widths of "
        f"{local} consecutive experts are {listed(sums)}; use another order of the widths, or mesh.expert: 1"
    )


def can_replicate(device_type: str) -> bool:
    """Whether the installed torch trains replicas on such devices.

    torch 2.7 does not on CPU processes: its FSDP2 raises an AssertionError in the first backward pass
    (`all_reduce_event is not None`), and its gloo has no average.
    """
    import torch

    return device_type != "cpu" or not torch.__version__.startswith("2.7.")


def check_replicas(replicate: int, device_type: str) -> None:
    """Raises ValueError for replicas that the installed torch cannot train (see `can_replicate`)."""
    if replicate > 1 and not can_replicate(device_type):
        raise UserError(
            f"mesh.replicate ({replicate}): torch 2.7 cannot train replicas on CPU processes; use replicate: 1, or the "
            "modern stack (uv pip install --override requirements/modern.txt '.[foundry]')"
        )


def average_on_gloo() -> None:
    """Makes FSDP2 of torch 2.7 divide gradients itself on CPU processes. No effect on other versions.

    FSDP2 requests the average from gloo in fp32 and bf16; gloo of torch 2.7 sums instead, without an error, so that
    gradients are too large by the number of ranks. gloo of torch 2.11 and 2.15 averages. This replaces a private
    function of torch 2.7, `_get_gradient_divide_factors`.
    """
    if can_replicate("cpu"):
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    divide_factors = collectives._get_gradient_divide_factors
    if getattr(divide_factors, "divides_on_cpu", False):
        return

    def divided(scatter_group, all_reduce_group, dtype, device_type=""):  # type: ignore[no-untyped-def]
        # for a device type without an average FSDP2 divides before the reduction
        return divide_factors(scatter_group, all_reduce_group, dtype, "mtia" if device_type == "cpu" else device_type)

    divided.divides_on_cpu = True  # type: ignore[attr-defined]
    collectives._get_gradient_divide_factors = divided  # type: ignore[assignment]


def build_meshes(plan: MeshPlan, device_type: str) -> Meshes:
    """Builds the process groups of a plan; every rank of the job calls this once, with the same plan.

    Their time limit is that of the job: `dist_timeout` of a run.

    Meshes that reduce gradients have no dimension of width one: NCCL's average over one rank is not reliable (see the
    warning in torch's FSDP2), and costs a launch.
    """
    import warnings

    from torch.distributed.device_mesh import init_device_mesh

    from foundry_moe.parallel.collectives import use_job_timeout

    shape = (plan.replicate, plan.shard, plan.expert)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=DIMENSIONS)
    dense = mesh["shard", "expert"]._flatten("shard_expert")
    experts = mesh["shard"]
    if plan.replicate > 1:
        experts = mesh["replicate", "shard"]
        with warnings.catch_warnings():  # deprecated in torch 2.11; 2.7 has no other way
            warnings.simplefilter("ignore")
            dense = mesh["replicate", "shard_expert"]
    meshes = [mesh, dense]
    token_groups: tuple[ProcessGroup, ...] = (mesh["expert"].get_group(),)
    if plan.all_to_all == HIERARCHICAL:
        split = init_device_mesh(
            device_type,
            (plan.replicate * plan.shard, plan.expert_nodes, plan.expert_ranks_per_node),
            mesh_dim_names=("outside", "expert_node", "expert_local"),
        )
        token_groups = (split.get_group("expert_local"), split.get_group("expert_node"))
        meshes.append(split)
    use_job_timeout(*(group for each in meshes for group in each.get_all_groups()))
    return Meshes(plan=plan, dense=dense, experts=experts, expert=mesh["expert"], token_groups=token_groups)
