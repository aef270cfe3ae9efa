"""Experts with LoRA adapters (Hu et al. 2021): x W^T + scale * (x A^T) B^T, row by row, without forming W + B A.

Base weights are frozen, so autograd computes no gradient of theirs. One function for all backends, which differ in how
they multiply rows with their expert's matrix.

Shapes: R rows, E experts, D model width, F expert width, L rank of the adapters, K inputs and N outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from foundry_moe.ops.backends import takes_hopper
from foundry_moe.ops.expert_linear import expert_linear
from foundry_moe.ops.low_rank import MOST_RANK, Factors, Frozen, kernels_mlp
from foundry_moe.ops.permute import PermutePlan, permute, unpermute
from foundry_moe.ops.reference import POINTWISE

_RANK_COLUMNS = 8  # 16 bytes of a 16-bit type, which the kernels need of a row


class Adapter(NamedTuple):
    """The factors of one matrix of all experts; `a` is transposed, so that the rows of both are those of weights."""

    a_EKL: Tensor
    b_ENL: Tensor


class Adapters(NamedTuple):
    """Of w1, v1 and w2; None for a matrix without one.

    scale: of the products B A.
    dropout: probability that an element of an adapter's input is zero.
    """

    w1: Adapter | None
    v1: Adapter | None
    w2: Adapter | None
    scale: float
    dropout: float = 0.0

    def padded(self, columns: int) -> Adapters:
        """For weights with so many more columns (w1, v1) and rows (w2) of zeros."""

        def wider(tensor: Tensor) -> Tensor:
            return F.pad(tensor, (0, 0, 0, columns))

        w1, v1 = (None if one is None else one._replace(a_EKL=wider(one.a_EKL)) for one in (self.w1, self.v1))
        w2 = None if self.w2 is None else self.w2._replace(b_ENL=wider(self.w2.b_ENL))
        return self._replace(w1=w1, v1=v1, w2=w2)


# (x_RK, weight [E, N, K] or, inputs first, [E, K, N], plan, inputs first) -> y_RN
Product = Callable[[Tensor, Tensor, PermutePlan, bool], Tensor]


@torch.compiler.disable  # sizes come from the data: not for a compiled graph
def _one_by_one(x_RK: Tensor, weight: Tensor, plan: PermutePlan, inputs_first: bool) -> Tensor:
    loads = plan.tokens_per_expert_E.tolist()
    rows = x_RK.split([*loads, x_RK.shape[0] - sum(loads)])
    weights = (weight if inputs_first else weight.mT).unbind(0)
    tail = x_RK.new_zeros(rows[-1].shape[0], weights[0].shape[1])
    return torch.cat([*(x_rK @ one for x_rK, one in zip(rows, weights, strict=False)), tail])


def _grouped(x_RK: Tensor, weight: Tensor, plan: PermutePlan, inputs_first: bool) -> Tensor:
    return torch._grouped_mm(x_RK, weight if inputs_first else weight.mT, offs=plan.offsets_E)


def _batched(x_RK: Tensor, weight: Tensor, plan: PermutePlan, inputs_first: bool) -> Tensor:
    x_ECK = x_RK.view(weight.shape[0], -1, x_RK.shape[1])
    return torch.bmm(x_ECK, weight if inputs_first else weight.mT).flatten(0, 1)


def _ragged(x_RK: Tensor, weight: Tensor, plan: PermutePlan, inputs_first: bool) -> Tensor:
    return expert_linear(x_RK, weight, plan.offsets_E, inputs_first=inputs_first)


_PRODUCTS: dict[str, Product] = {
    "reference": _one_by_one,
    "grouped": _grouped,
    "batched": _batched,
    "blocksparse": _ragged,
}


def lora_mlp(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: PermutePlan,
    weights: tuple[Tensor, Tensor | None, Tensor],
    adapters: Adapters,
    *,
    activation: str,
    backend: str,
    memory: str = "save",
) -> Tensor:
    """y_TD: for each token the weighted sum of its experts' outputs.

    Args:
        weights: frozen w1, v1 and w2 of experts of one width, as `foundry_moe.ops.expert_mlp` takes them.
        adapters: of any float dtype; computed in that of the rows.
        backend: reference | grouped | batched | blocksparse.
        memory: save | recompute everything in the backward pass.
    """
    if backend == "blocksparse" and _on_kernels(x_TD, weights, adapters):
        factors = Factors(*(factor for adapter in adapters[:3] for factor in adapter or (None, None)))
        frozen = Frozen(*weights, adapters.scale)
        return kernels_mlp(x_TD, weights_TK, plan, frozen, factors, activation=activation, memory=memory)
    product, act = _PRODUCTS[backend], POINTWISE[activation]
    w1, v1, w2 = weights
    x_RD = permute(x_TD, plan)

    def linear(x_RK: Tensor, weight: Tensor, adapter: Adapter | None, dropped_RK: Tensor) -> Tensor:
        y_RN = product(x_RK, weight, plan, False)
        if adapter is None:
            return y_RN
        padding = (0, -adapter.a_EKL.shape[2] % _RANK_COLUMNS)
        a_EKL = F.pad(adapter.a_EKL, padding).to(x_RK.dtype)
        b_ENL = F.pad(adapter.b_ENL * adapters.scale, padding).to(x_RK.dtype)
        return y_RN.add_(product(product(dropped_RK, a_EKL, plan, True), b_ENL, plan, False))

    def compute(x_RD: Tensor) -> Tensor:
        dropped_RD = F.dropout(x_RD, adapters.dropout) if adapters.dropout else x_RD
        h_RF = act(linear(x_RD, w1, adapters.w1, dropped_RD))
        if v1 is not None:
            h_RF = h_RF * linear(x_RD, v1, adapters.v1, dropped_RD)
        return linear(h_RF, w2, adapters.w2, F.dropout(h_RF, adapters.dropout) if adapters.dropout else h_RF)

    if memory == "recompute" and torch.is_grad_enabled():
        y_RD = checkpoint(compute, x_RD, use_reentrant=False)
    else:
        y_RD = compute(x_RD)
    return unpermute(y_RD, weights_TK, plan)


def _on_kernels(x_TD: Tensor, weights: tuple[Tensor, Tensor | None, Tensor], adapters: Adapters) -> bool:
    """Whether `low_rank` computes these experts: it draws no random numbers and has no gradient of weights."""
    ranks = [adapter.a_EKL.shape[2] for adapter in (adapters.w1, adapters.v1, adapters.w2) if adapter is not None]
    frozen = not any(weight is not None and weight.requires_grad for weight in weights)
    kernels = takes_hopper(x_TD.device, x_TD.dtype, *weights[2].shape[1:])
    return kernels and frozen and not adapters.dropout and max(ranks) <= MOST_RANK
