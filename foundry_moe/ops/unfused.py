"""The expert MLP as separate products of rows with their expert's matrix, and the activation between them.

The product is one of three: `reference` multiplies one expert after another; all backends are compared with it (it
reads the loads on the host: not for a GPU's steps); `grouped` is torch's grouped product, a check of the kernels;
`blocksparse` is `expert_linear` on kernels.

With LoRA adapters (Hu et al. 2021) a product is x W^T + scale * (x A^T) B^T, row by row, without forming W + B A.

Shapes: R rows, E experts, D model width, F expert width, L rank of adapters, K inputs and N outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from foundry_moe.ops.expert_linear import expert_linear
from foundry_moe.ops.lora import Adapter, Adapters
from foundry_moe.ops.permute import PermutePlan, permute, unpermute

_RANK_COLUMNS = 8  # 16 bytes of a 16-bit type, which the kernels need of a row


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


def unfused_mlp(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: PermutePlan,
    weights: tuple[Tensor, Tensor | None, Tensor],
    *,
    activation: str,
    backend: str,
    widths: Sequence[int] | None = None,
    adapters: Adapters | None = None,
    memory: str = "save",
) -> Tensor:
    """y_TD: for each token the weighted sum of its experts' outputs.

    Args:
        weights: w1, v1 and w2, as `foundry_moe.ops.expert_mlp` takes them.
        backend: reference | grouped | blocksparse.
        widths: of experts of different widths (reference only).
        adapters: of any float dtype; computed in that of the rows.
        memory: with adapters, save | recompute everything in the backward pass.
    """
    if widths is not None:
        weights = _of_one_width(weights, widths)
    x_RD = permute(x_TD, plan)
    arguments = (plan, weights, activation, backend, adapters)
    if adapters is not None and memory == "recompute" and torch.is_grad_enabled():
        y_RD = checkpoint(_mlp, x_RD, *arguments, use_reentrant=False)
    else:
        y_RD = _mlp(x_RD, *arguments)
    return unpermute(y_RD, weights_TK, plan)


def _of_one_width(
    weights: tuple[Tensor, Tensor | None, Tensor], widths: Sequence[int]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weights [H, D] as stacks [E, F, D] and [E, D, F], with zeros up to the widest expert."""

    def stacked(weight: Tensor) -> Tensor:
        parts = weight.split(list(widths))
        return torch.stack([F.pad(part, (0, 0, 0, max(widths) - part.shape[0])) for part in parts])

    w1, v1, w2 = weights
    return stacked(w1), None if v1 is None else stacked(v1), stacked(w2).mT


def _mlp(
    x_RD: Tensor,
    plan: PermutePlan,
    weights: tuple[Tensor, Tensor | None, Tensor],
    activation: str,
    backend: str,
    adapters: Adapters | None,
) -> Tensor:
    """y_RD: each expert's MLP on its own rows."""
    w1, v1, w2 = weights
    low_w1, low_v1, low_w2 = (None, None, None) if adapters is None else adapters[:3]
    dropout = 0.0 if adapters is None else adapters.dropout

    def product(x_RK: Tensor, weight: Tensor, inputs_first: bool = False) -> Tensor:
        if backend == "grouped":  # rows past the end are undefined
            return torch._grouped_mm(x_RK, weight if inputs_first else weight.mT, offs=plan.offsets_E)
        plain = backend == "reference"
        return expert_linear(x_RK, weight, plan.offsets_E, inputs_first=inputs_first, plain=plain)

    def linear(x_RK: Tensor, weight: Tensor, adapter: Adapter | None, dropped_RK: Tensor) -> Tensor:
        y_RN = product(x_RK, weight)
        if adapters is None or adapter is None:
            return y_RN
        padding = (0, -adapter.a_EKL.shape[2] % _RANK_COLUMNS)
        a_EKL = F.pad(adapter.a_EKL, padding).to(x_RK.dtype)
        b_ENL = F.pad(adapter.b_ENL * adapters.scale, padding).to(x_RK.dtype)
        return y_RN.add_(product(product(dropped_RK, a_EKL, inputs_first=True), b_ENL))

    dropped_RD = F.dropout(x_RD, dropout) if dropout else x_RD
    h_RF = POINTWISE[activation](linear(x_RD, w1, low_w1, dropped_RD))
    if v1 is not None:
        h_RF = h_RF * linear(x_RD, v1, low_v1, dropped_RD)
    return linear(h_RF, w2, low_w2, F.dropout(h_RF, dropout) if dropout else h_RF)
