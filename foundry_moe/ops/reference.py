"""The expert MLP in plain torch, one expert after another: the truth that the fast backends are held to.

Shapes: R rows, D model width, F expert width, E experts. Reads the loads on the host: not for the hot path of a GPU.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from foundry_moe.ops.activations import POINTWISE
from foundry_moe.ops.permute import PermutePlan


@torch.compiler.disable  # sizes come from the data: not for a compiled graph
def reference_mlp(
    x_RD: Tensor, plan: PermutePlan, w1_EFD: Tensor, v1_EFD: Tensor | None, w2_EDF: Tensor, activation: str
) -> Tensor:
    """y_RD [R, D]: each expert's MLP on its own rows; rows past the end are zeros."""
    act = POINTWISE[activation]
    loads = plan.tokens_per_expert_E.tolist()
    rows = x_RD.split([*loads, x_RD.shape[0] - sum(loads)])
    # unbind and split have backwards that stack and concatenate once, where indexing would add E full-size gradients
    w1, w2 = w1_EFD.unbind(0), w2_EDF.unbind(0)
    v1 = v1_EFD.unbind(0) if v1_EFD is not None else None
    outputs = []
    for e, x_rD in enumerate(rows[:-1]):
        h_rF = act(F.linear(x_rD, w1[e]))
        if v1 is not None:
            h_rF = h_rF * F.linear(x_rD, v1[e])
        outputs.append(F.linear(h_rF, w2[e]))
    outputs.append(torch.zeros_like(rows[-1]))
    return torch.cat(outputs)
