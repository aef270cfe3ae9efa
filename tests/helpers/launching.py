"""What tests that start processes share."""

import socket
from collections.abc import Callable, Sequence
from typing import Any

# Modules that the one fork server of a test session imports before it forks. The first launch of the session decides
# which, so every launch names these: with any other list each process would import Composer anew (12 s).
PRELOAD = (
    "foundry_moe.algorithms.dmoe",
    "foundry_moe.models.mpt",
    "llmfoundry.command_utils",
    "foundry_moe.commands.verify.recorder",
    "foundry_moe.commands.verify.rows",
    "foundry_moe.launch.preloaded",
)


def call_each(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Several functions, one after another, in one launch."""
    return [function() for function in functions]


def free_port() -> int:
    """A port of 127.0.0.1 on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
