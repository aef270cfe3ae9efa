"""What the installed torch cannot do, and what tests leave out for it."""

from __future__ import annotations

import pytest

from foundry_moe.parallel.mesh import Mesh, can_replicate

needs_replicas = pytest.mark.skipif(
    not can_replicate("cpu"), reason="torch 2.7 cannot train replicas on CPU processes; on the modern stack it runs"
)


def trainable(meshes: list[Mesh]) -> list[Mesh]:
    """The meshes (replicate, shard, expert) that the installed torch trains on CPU processes."""
    return [mesh for mesh in meshes if mesh[0] == 1 or can_replicate("cpu")]
