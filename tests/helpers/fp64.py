"""Hugging Face's models in fp64 throughout: their norms and gates round to fp32, which hides errors below 1e-7."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def fp64_throughout() -> Iterator[None]:
    """Casts to fp32 inside give fp64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        yield
