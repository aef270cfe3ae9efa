"""How long the collectives of a process group wait for its ranks."""

from __future__ import annotations

import datetime
import warnings

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


def use_timeout_of_job(*groups: dist.ProcessGroup) -> None:
    """Gives groups the time limit of the group of all ranks. Torch makes them with 10 (NCCL) or 30 minutes (gloo)."""
    timeout = group_timeout()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backends without a time limit
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
