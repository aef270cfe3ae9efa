"""Messages under way while something else is computed: the order of what happens, forward and backward."""

from __future__ import annotations

from foundry_moe.launch.processes import run_processes
from tests.distributed import parity_worker
from tests.helpers.launching import PRELOAD


def under_way(events: list[str], what: str) -> list[int]:
    """How many messages are under way each time that something is computed."""
    found, flying = [], 0
    for event in events:
        flying += {"start": 1, "wait": -1}.get(event, 0)
        if event == what:
            found.append(flying)
    assert flying == 0, "each message is waited for"
    return found


def test_the_shared_expert_is_computed_while_tokens_travel_forward_and_backward() -> None:
    """That it changes no result is held by the certificate's case with a shared expert."""
    order = run_processes(parity_worker.note_order, world_size=2, preload=PRELOAD)
    for events in order.values():
        assert events.count("start") == 3, "tokens, choices and results"
        assert under_way(events, "experts") == [0], events
        assert under_way(events, "shared")[0] > 0, events
