"""How long the collectives of a process group wait for its ranks."""

from __future__ import annotations

import datetime

import torch.distributed as dist


def group_timeout(
    group: dist.ProcessGroup | None = None, *, fallback: datetime.timedelta = dist.default_pg_timeout
) -> datetime.timedelta:
    """The time limit that the group was made with: `dist_timeout` of a run.

    Args:
        group: None for that of all ranks.
        fallback: of a backend that has no time limit.
    """
    try:
        group = group or dist.distributed_c10d._get_default_group()
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return fallback
