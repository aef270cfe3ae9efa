"""What will compute the experts of a planned run: on a GPU that is named, with the torch and Triton of this host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from foundry_moe.commands.plan.chips import CHIPS
from foundry_moe.commands.plan.shape import ModelShape, planned_moe
from foundry_moe.ops.backends import describe_backend


def planned_backend(run: Mapping[str, Any], shape: ModelShape, chip: str) -> str:
    """The plan's line on experts.

    Args:
        chip: a name in `CHIPS`.

    Raises:
        ValueError: the run asks for a backend that the chip does not have.
    """
    moe, _ = planned_moe(run)
    precision = str(run.get("precision", "amp_bf16"))
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else torch.float32
    text = describe_backend(
        moe.backend,
        torch.device("cuda"),
        dtype,
        width=shape.d_model,
        hidden=moe.expert_hidden_size if isinstance(moe.expert_hidden_size, tuple) else shape.widest_expert,
        capacity=moe.capacity,
        capability=CHIPS[chip],
    )
    return f"experts on {chip}, with this host's torch {torch.__version__}: {text}"
