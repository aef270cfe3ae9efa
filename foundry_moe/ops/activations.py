"""Pointwise activations by name, as `foundry_moe.config.ACTIVATIONS` spells them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU (So et al. 2021, Primer)."""
    return torch.square(F.relu(x))


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu2,
}
