"""Checkpoints of earlier formats, and the state that they hold."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

FIXTURES = Path(__file__).parents[1] / "checkpoint" / "fixtures"


STEP = 7


def make_state() -> dict[str, Any]:
    """Tensors that are cut and whole, stored in blocks and in the manifest, and a value of each kind."""
    ramp = torch.arange(2048, dtype=torch.float32)
    return {
        "model": {
            "experts": (ramp.reshape(2, 16, 64) / 8).to(torch.bfloat16),
            "dense": ramp[:48].reshape(6, 8) - 5,
            "plain": ramp[:100] * 3,
            "small": torch.tensor([1.5, -2.0]),
            "empty": torch.empty(0, 7),
        },
        "optim": {
            "state": {"dense": {"step": torch.tensor(7.0), "exp_avg": ramp[:48].reshape(6, 8) / 64}},
            "param_groups": [{"lr": 0.125, "betas": (0.9, 0.95), "params": ["dense"]}],
        },
        "values": {
            "step": STEP,
            "numbers": [math.inf, None, True, 2**40],
            "bytes": b"\0\1\2",
            "array": np.arange(6, dtype=np.int16).reshape(2, 3),
            "time": datetime.timedelta(seconds=5),
            "dtype": torch.float16,
            "keys": {1: "one", "$two": 2},
        },
    }
