"""`decoupled_adamw_fused`: Composer's DecoupledAdamW in one kernel for all parameters, also on different meshes.

Composer's DecoupledAdamW launches six kernels and synchronises the host once for each parameter; torch's fused AdamW
refuses lists of DTensors on different meshes. This optimizer updates each rank's local shards, which AdamW, being
element-wise, may.
"""

from __future__ import annotations

from typing import Any

import torch
from composer.optim import DecoupledAdamW
from torch import Tensor
from torch.distributed.tensor import DTensor


def _parts(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


class DecoupledAdamWFused(DecoupledAdamW):
    """DecoupledAdamW, stepped by `torch._fused_adamw_`; the same keys, state and checkpoints.

    YAML: `optimizer: {name: decoupled_adamw_fused, lr: 4.0e-4, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 1.0e-5}`
    """

    @staticmethod
    def adamw(
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        *,
        lr: float,
        initial_lr: float,
        weight_decay: float,
        **keys: Any,
    ) -> None:
        """`DecoupledAdamW.adamw` with one kernel; the same arguments."""
        if not params:
            return
        # the kernel multiplies weights by 1 - lr * weight_decay, Composer by 1 - (lr / initial_lr) * weight_decay
        decay = weight_decay / initial_lr if initial_lr else (weight_decay / lr if lr else 0.0)
        groups = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
        # a rank may have an empty shard of a small parameter
        kept = [i for i, part in enumerate(_parts(params)) if part.numel()]
        if kept:
            parts: Any = [_parts([group[i] for i in kept]) if group else [] for group in groups]
            torch._fused_adamw_(*parts, lr=lr, weight_decay=decay, maximize=False, **keys)
