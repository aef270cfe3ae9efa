"""Spare ranks: those that do not fit the mesh wait until the run ends or its launcher restarts all ranks.

A mesh seldom fits the GPUs that the loss of a node leaves: of 504 GPUs a model copy over 64 can use 448. With
`mesh.spares` the others wait, without a GPU context and outside the process group, and may train after the next
restart. This module handles launcher environments and torch's store, and must not know models or Composer.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import time
from typing import TYPE_CHECKING

from foundry_moe.config import MeshConfig, check_batch_size
from foundry_moe.launch.lost_nodes import beat
from foundry_moe.parallel.mesh import plan_mesh
from foundry_moe.schema import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

POLL_S = 2.0
CONNECT_S = 10.0
SILENCE_S = 600.0  # without the run's store for this long, a spare assumes that the run has failed
START_S = 3600.0  # the same before the store has answered once: images are pulled, data is downloaded
FAREWELL_S = 30.0  # a run that has ended keeps its store until all spares have read that, but no longer than this


def ranks_in_use(
    config: MeshConfig, *, world_size: int, ranks_per_node: int, num_experts: int | None, batch_size: object = None
) -> int:
    """All ranks; with `mesh.spares` the most that form a mesh and divide the global batch size, in whole nodes.

    Args:
        config, world_size, ranks_per_node, num_experts: see `plan_mesh`.
        batch_size: `global_train_batch_size`; checked elsewhere if it is not a whole number.

    Raises:
        ValueError: see `plan_mesh`; with spares, why all ranks together do not fit, if no number of ranks does.
    """
    if not config.spares:
        plan_mesh(config, world_size=world_size, ranks_per_node=ranks_per_node, num_experts=num_experts)
        return world_size
    plan_mesh(MeshConfig(), world_size=world_size, ranks_per_node=ranks_per_node)  # whole nodes
    unit = ranks_per_node if world_size > ranks_per_node else 1
    reason: UserError | None = None
    for ranks in range(world_size, 0, -unit):
        try:
            plan_mesh(config, world_size=ranks, ranks_per_node=ranks_per_node, num_experts=num_experts)
            if isinstance(batch_size, int):
                check_batch_size(batch_size, ranks)
        except UserError as error:
            reason = reason or error
        else:
            return ranks
    raise UserError(f"{reason}; and no smaller number of GPUs fits either (mesh.spares)")


def launched_ranks() -> int:
    """How many ranks a launcher has started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def take_place(ranks: int) -> bool:
    """Changes the launcher's environment to that of a job of `ranks`; False if this process is a spare."""
    world_size = launched_ranks()
    if ranks == world_size:
        return True
    rank = int(os.environ["RANK"])
    if rank == 0:
        log.warning("mesh.spares: %d of %d GPUs train, %d wait", ranks, world_size, world_size - ranks)
    if rank >= ranks:
        return False
    os.environ["WORLD_SIZE"] = str(ranks)
    os.environ["LOCAL_WORLD_SIZE"] = str(min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), ranks))
    return True


def _store() -> Store:
    """The store of the run's process group, with a prefix for this start of the run; raises if it does not answer."""
    from torch.distributed import PrefixStore, TCPStore  # slow, and few runs have spares

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    socket.create_connection(address, timeout=CONNECT_S).close()  # torch would retry for long, and print each try
    timeout = datetime.timedelta(seconds=CONNECT_S)
    store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
    # only the launcher's own store outlives a restart; nodes that joined later have counted fewer restarts
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_launchers else ""
    return PrefixStore(f"spares-{start}", store)


def wait_as_spare() -> None:
    """Returns when the run has ended. A launcher that restarts the ranks ends this process first."""
    store: Store | None = None
    heard, seen = time.monotonic(), False
    while True:
        try:
            store = store or _store()
            over = store.check(["over"])
            seen, heard = True, time.monotonic()
            beat()
            if over:
                store.add("left", 1)
                return
        except (OSError, RuntimeError):  # not started yet, or ended
            store = None
        if time.monotonic() - heard > (SILENCE_S if seen else START_S):
            raise RuntimeError(
                "mesh.spares: this rank waits for a run whose first rank has been silent for "
                f"{time.monotonic() - heard:.0f} s; the run is taken for dead"
            )
        time.sleep(POLL_S)


def dismiss(spares: int) -> None:
    """Rank 0 notifies the spares that the run has ended, and waits until all have read it, 30 s at most."""
    if not spares or int(os.environ["RANK"]) != 0:
        return
    try:
        store = _store()
        store.set("over", "yes")
        deadline = time.monotonic() + FAREWELL_S
        while store.add("left", 0) < spares and time.monotonic() < deadline:
            time.sleep(0.1)
    except (OSError, RuntimeError) as error:  # the run itself is complete
        log.warning("The spares could not be notified that the run has ended: %s", error)
