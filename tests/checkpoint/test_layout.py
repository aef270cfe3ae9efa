"""Plans are integers: every element is written by exactly one rank, loads are even, and boxes are PyTorch's own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor import _utils as dtensor

from foundry_moe.checkpoint.layout import Grid, Layout, cut, layout_of, plan_writes, replicated

pytestmark = pytest.mark.quick

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any shape, also with empty and indivisible dimensions, on any mesh; two mesh dimensions may shard the same."""
    mesh = tuple(draw(MESHES))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    dims = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
    return Layout(shape, Grid(mesh, tuple(range(math.prod(mesh)))), tuple(dims))


@given(st.lists(layouts(), min_size=1, max_size=4), st.sampled_from([8, 64, 4096]))
@settings(max_examples=150, deadline=None)
def test_every_element_is_written_exactly_once(several, max_bytes) -> None:
    plan = plan_writes([(layout, 4) for layout in several], max_bytes=max_bytes)
    written = [np.zeros(layout.shape, dtype=int) for layout in several]
    for rank, blocks in plan.items():
        assert plan_writes([(layout, 4) for layout in several], rank=rank, max_bytes=max_bytes)[rank] == blocks
        for block in blocks:
            starts, sizes = block.box
            written[block.item][tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))] += 1
            assert block.size_bytes == 4 * math.prod(sizes) and (block.size_bytes <= max_bytes or max_bytes < 4)
            box, ranks = next((b, r) for b, r in several[block.item].chunks if rank in r)
            assert all(a >= b and a + n <= b + m for a, n, b, m in zip(*block.box, *box, strict=True)), ranks
    assert all((array == 1).all() for array in written)


def pytorchs_box(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: list[int], placements: list[Placement]
) -> tuple[Sequence[int], Sequence[int]]:
    """Sizes and offsets of a rank's part, as DTensor has them."""
    if hasattr(dtensor, "_compute_local_shape_and_global_offset"):
        return dtensor._compute_local_shape_and_global_offset(shape, mesh, coordinate.__getitem__, placements)
    ranks = SimpleNamespace(  # torch 2.7 wants a mesh, of which it asks this
        ndim=len(mesh), size=mesh.__getitem__, get_coordinate=lambda: coordinate
    )
    return dtensor.compute_local_shape_and_global_offset(shape, ranks, placements)


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_boxes_are_those_of_pytorch(layout) -> None:
    placements = [Replicate() if dim is None else Shard(dim) for dim in layout.sharded]
    for rank in range(math.prod(layout.grid.shape)):
        coordinate = [int(i) for i in np.unravel_index(rank, layout.grid.shape)]
        sizes, offsets = pytorchs_box(layout.shape, layout.grid.shape, coordinate, placements)
        if math.prod(sizes) == 0:
            assert rank not in layout.chunks_of_rank
        else:
            (box,) = layout.boxes_of(rank)
            assert box == (tuple(offsets), tuple(sizes))


def test_replicas_share_the_work_by_bytes() -> None:
    """Nine equal matrices and a large one over three replicas: nobody writes more than a third and one matrix."""
    several = [(replicated((64, 64), 3), 4)] * 9 + [(replicated((640, 64), 3), 4)]
    plans = plan_writes(several, max_bytes=16384)
    loads = {rank: sum(block.size_bytes for block in blocks) for rank, blocks in plans.items()}
    assert sum(loads.values()) == 19 * 16384
    assert max(loads.values()) - min(loads.values()) <= 16384


def test_each_expert_has_blocks_of_its_own() -> None:
    blocks = cut(((8, 0, 16), (4, 64, 16)), 4, 2**20)
    assert blocks == tuple(((8 + i, 0, 16), (1, 64, 16)) for i in range(4))
    assert cut(((0, 0, 0), (512, 1, 4)), 4, 2**20) == (((0, 0, 0), (512, 1, 4)),), "a convolution is not experts"
    assert Counter(math.prod(sizes) for _, sizes in cut(((0, 0), (1000, 3)), 4, 1200)) == {300: 10}


def test_other_placements_are_refused_by_name(monkeypatch) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", torch.arange(2))
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match=r"optim.x has the placement .*: only Shard and Replicate"):
            layout_of(partial, 2, "optim.x")
    finally:
        dist.destroy_process_group()
