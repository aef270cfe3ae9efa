"""Messages under way while something else is computed: the order of what happens, forward and backward."""

from __future__ import annotations

from foundry_moe.parallel.launch import run_processes
from tests.distributed import parity_worker
from tests.distributed.launching import PRELOAD


def test_the_shared_expert_is_computed_while_tokens_travel_forward_and_backward() -> None:
    """That it changes no result is held by the certificate's case with a shared expert."""
    order = run_processes(parity_worker.note_order, world_size=2, preload=PRELOAD)
    for way in ("forward", "backward"):
        events = order[way]
        shared = events.index("shared")
        started = [i for i, event in enumerate(events) if event == "start"]
        landed = [i for i, event in enumerate(events) if event == "land"]
        assert len(started) == len(landed) == 3, "tokens, choices and results: each a message, each waited for"
        under_way = [sum(s < shared for s in started), sum(e < shared for e in landed)]
        assert under_way[0] > under_way[1], (way, events)
