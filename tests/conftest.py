"""Fixtures and rules for all tests."""

from __future__ import annotations

import os

# Before torch, Composer and tokenizers are imported: one thread, no hub.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and there is none")
    too_slow = pytest.mark.skip(reason="takes minutes: run with --slow")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(too_slow)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test draws the same numbers on every run."""
    torch.manual_seed(0)
