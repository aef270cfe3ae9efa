"""FOUNDRY_MOE_STRICT=1 makes a graph that is compiled late an error, in training alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.callback import callback_handler

from foundry_moe.algorithms.gate_steps import FREE_BATCHES, StrictCompilation
from foundry_moe.ops.compile_ahead import on_compilation

pytestmark = pytest.mark.quick


@pytest.fixture
def no_callbacks() -> Iterator[None]:
    yield
    callback_handler.clear()
    on_compilation(lambda _: None)


def test_a_graph_that_is_compiled_late_ends_the_run(monkeypatch: pytest.MonkeyPatch, no_callbacks: None) -> None:
    monkeypatch.setenv("FOUNDRY_MOE_STRICT", "1")

    def double() -> torch.Tensor:
        torch._dynamo.reset_code_caches()
        return torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(3))

    strict = StrictCompilation()
    for _ in range(FREE_BATCHES):
        strict.batch_began()
        double()
        strict.batch_ended()
    double()  # between batches, as an evaluation does
    strict.batch_began()
    with pytest.raises(RuntimeError, match=r"FOUNDRY_MOE_STRICT=1: graph .* was compiled after batch 5"):
        double()
