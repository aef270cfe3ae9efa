"""`decoupled_adamw_fused`: Composer's DecoupledAdamW in one pass over each parameter, also on different meshes.

Composer's DecoupledAdamW launches six kernels and synchronises the host once for each parameter; torch's fused AdamW
refuses lists of DTensors on different meshes. This optimizer updates each rank's local shards, which AdamW, being
element-wise, may.
"""

from __future__ import annotations

from typing import Any

import torch
from composer.optim import DecoupledAdamW
from foundry_moe_kernels.adamw import adamw
from torch import Tensor
from torch.distributed.tensor import DTensor


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class DecoupledAdamWFused(DecoupledAdamW):
    """DecoupledAdamW in one kernel a parameter; the same keys, state and checkpoints.

    YAML: `optimizer: {name: decoupled_adamw_fused, lr: 4.0e-4, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 1.0e-5}`

    `gradient_factor`: a scalar that multiplies all gradients in the next step, which saves a pass over them to clip.
    Gradients themselves stay as they are.
    """

    gradient_factor: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As in Composer's optimizer, which launches one more kernel a parameter.

        Composer's closure ends in a wait for the loss: until the first launch after it the device is idle.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for group in self.param_groups:
                self._update(group)
        finally:
            self.gradient_factor = None
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None and p.requires_grad]
        if not params:
            return
        group.setdefault("initial_lr", group["lr"])
        for p in params:
            state = self.state[p]
            if p.grad.is_sparse:
                raise RuntimeError("decoupled_adamw_fused does not support sparse gradients")
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float, device=p.device)
                names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
                state.update({name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in names})
        states = [self.state[p] for p in params]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        self.adamw(
            params, [p.grad for p in params], [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [], steps,
            amsgrad=group["amsgrad"], beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            initial_lr=group["initial_lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip

    def adamw(  # type: ignore[override]  # a static method of Composer, called on the instance
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        *,
        amsgrad: bool,
        beta1: float,
        beta2: float,
        lr: float,
        initial_lr: float,
        weight_decay: float,
        eps: float,
    ) -> None:
        """`DecoupledAdamW.adamw` with one kernel a parameter; the same arguments."""
        lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
        # a rank may have an empty shard of a small parameter
        kept = [i for i, part in enumerate(map(_part, params)) if part.numel()]
        if not kept:
            return
        parts: list[Any] = [[_part(tensors[i]) for i in kept] if tensors else [] for tensors in lists]
        params, grads, means, squares, _, state_steps = parts
        factor = self.gradient_factor
        if amsgrad or not all(_fits_kernel(*tensors) for tensors in zip(*parts[:4], strict=True)):
            # torch removes lr * weight_decay of a weight, Composer (lr / initial_lr) * weight_decay
            decay = weight_decay / initial_lr if initial_lr else (weight_decay / lr if lr else 0.0)
            if factor is not None:
                parts[1] = torch._foreach_mul(grads, factor.to(grads[0].dtype))
            torch._fused_adamw_(
                *parts, lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=amsgrad, maximize=False
            )
            return
        torch.autograd.graph.increment_version([*params, *means, *squares])  # as operators of torch do
        steps_N = torch.stack(state_steps).double()
        corrections_N2 = torch.stack([1 - beta1**steps_N, 1 - beta2**steps_N], dim=1).float()
        factor = None if factor is None else factor.float()
        decay = weight_decay * (lr / initial_lr if initial_lr else 1.0)
        for param, grad, mean, square, corrections in zip(params, grads, means, squares, corrections_N2, strict=True):
            adamw(
                param, grad, (mean, square), corrections, factor,
                lr=lr, beta1=beta1, beta2=beta2, eps=eps, decay=decay,
            )  # fmt: skip


def _fits_kernel(*tensors: Tensor) -> bool:
    return all(tensor.is_cuda and tensor.dtype != torch.float64 and tensor.is_contiguous() for tensor in tensors)
