"""`torchrun`, but what a user did wrong ends the job at once.

Usage: `python -m foundry_moe.launch.torchrun --nnodes ... SCRIPT ...`

A wrong checkpoint folder, or a checkpoint of another model, would stay wrong as often as torchrun starts the processes
anew. They exit with 2 then (`errors.run_cleanly`), and so does this. Only in the first life, with all nodes there: what
has run before was right, and a mesh that does not fit fewer nodes waits for the others.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from foundry_moe.launch.errors import USER_ERROR


def launch(arguments: list[str]) -> int:
    """Runs torchrun with these arguments; 0, or 2 for a user's mistake.

    Raises:
        ChildFailedError: as torchrun does, where processes failed as often as they may.
    """
    _, nodes = run.parse_min_max_nnodes(run.parse_args(arguments).nnodes)
    kind: Any = LocalElasticAgent  # torchrun takes no other class, so this one looks twice
    look = kind._monitor_workers
    mistakes: list[int] = []

    def look_for_mistakes(agent: Any, role: str) -> Any:
        result, group = look(agent, role), agent.get_worker_group(role)
        first_life = agent._remaining_restarts == group.spec.max_restarts
        if first_life and group.group_world_size == nodes:
            mistakes.extend(rank for rank, failure in result.failures.items() if failure.exitcode == USER_ERROR)
        if mistakes:
            agent._remaining_restarts = 0
        return result

    kind._monitor_workers = look_for_mistakes
    try:
        run.main(arguments)
    except ChildFailedError:
        if not mistakes:
            raise
        return USER_ERROR
    finally:
        kind._monitor_workers = look
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
