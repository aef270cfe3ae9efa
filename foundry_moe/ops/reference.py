"""The expert MLP in plain torch: one expert after another, the truth for all backends; and on torch's grouped product.

The reference reads the loads on the host: not for the hot path of a GPU.

Shapes: R rows, D model width, F expert width, E experts, H widths of all experts added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from foundry_moe.ops.permute import PermutePlan


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU (So et al. 2021, Primer)."""
    return torch.square(F.relu(x))


# pointwise activations by name, as `foundry_moe.config.ACTIVATIONS` spells them
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu2,
}


@torch.compiler.disable  # sizes come from the data: not for a compiled graph
def reference_mlp(
    x_RD: Tensor,
    plan: PermutePlan,
    weights: tuple[Tensor, Tensor | None, Tensor],
    activation: str,
    widths: Sequence[int] | None = None,
) -> Tensor:
    """y_RD [R, D]: each expert's MLP on its own rows; rows past the end are zeros.

    Args:
        weights: w1, v1 and w2, as `foundry_moe.ops.expert_mlp` takes them.
    """
    act = POINTWISE[activation]
    loads = plan.tokens_per_expert_E.tolist()
    rows = x_RD.split([*loads, x_RD.shape[0] - sum(loads)])
    # unbind and split have backwards that stack and concatenate once, where indexing would add E full-size gradients
    if widths is None:
        w1, v1, w2 = (() if weight is None else weight.unbind(0) for weight in weights)
    else:
        w1, v1, w2 = (() if weight is None else weight.split(list(widths)) for weight in weights)
        w2 = tuple(w2_FD.T for w2_FD in w2)
    outputs = []
    for e, x_rD in enumerate(rows[:-1]):
        h_rF = act(F.linear(x_rD, w1[e]))
        if v1:
            h_rF = h_rF * F.linear(x_rD, v1[e])
        outputs.append(F.linear(h_rF, w2[e]))
    outputs.append(torch.zeros_like(rows[-1]))
    return torch.cat(outputs)


def grouped_mlp(
    x_RD: Tensor, plan: PermutePlan, weights: tuple[Tensor, Tensor | None, Tensor], activation: str
) -> Tensor:
    """The same on `torch._grouped_mm`, the cross-check of the block-sparse kernels; rows past the end are undefined."""
    w1_EFD, v1_EFD, w2_EDF = weights
    offsets_E = plan.offsets_E
    h_RF = POINTWISE[activation](torch._grouped_mm(x_RD, w1_EFD.mT, offs=offsets_E))
    if v1_EFD is not None:
        h_RF = h_RF * torch._grouped_mm(x_RD, v1_EFD.mT, offs=offsets_E)
    return torch._grouped_mm(h_RF, w2_EDF.mT, offs=offsets_E)


def batched_mlp(x_RD: Tensor, weights: tuple[Tensor, Tensor | None, Tensor], activation: str) -> Tensor:
    """The same on rows in E blocks of as many slots (see `plan_padded`); an empty slot gives zeros."""
    w1_EFD, v1_EFD, w2_EDF = weights
    x_ECD = x_RD.view(w1_EFD.shape[0], -1, x_RD.shape[1])
    h_ECF = POINTWISE[activation](torch.bmm(x_ECD, w1_EFD.mT))
    if v1_EFD is not None:
        h_ECF = h_ECF * torch.bmm(x_ECD, v1_EFD.mT)
    return torch.bmm(h_ECF, w2_EDF.mT).view(x_RD.shape[0], -1)
