"""Files of a pretrained model are read where no checkpoint has the weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foundry_moe.algorithms.weights_from_files import WeightsFromFiles

pytestmark = pytest.mark.quick


def test_files_are_read_unless_the_run_resumes_when_they_may_be_gone(tmp_path) -> None:
    run: Any = SimpleNamespace(model=torch.nn.Linear(1, 1), callbacks=[SimpleNamespace(has_commits=lambda: True)])
    WeightsFromFiles(str(tmp_path)).read(run)
    for others in ([], [SimpleNamespace(has_commits=lambda: False)], [SimpleNamespace()]):
        run.callbacks = others
        with pytest.raises(ValueError, match="holds no safetensors files"):
            WeightsFromFiles(str(tmp_path)).read(run)
