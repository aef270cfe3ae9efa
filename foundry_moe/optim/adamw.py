"""The update of AdamW with decoupled weight decay, in one pass over each parameter. Independent of Composer.

It updates each rank's local shards, also of parameters on different meshes, which is exact because AdamW is
element-wise.
"""

from __future__ import annotations

from typing import Any

import torch
from foundry_moe_kernels.adamw import adamw
from torch import Tensor
from torch.optim import Optimizer

from foundry_moe.parallel.gradients import local_part


class FusedAdamW(Optimizer):
    """The step of an optimizer whose groups have `lr`, `betas`, `eps`, `weight_decay` and `amsgrad`.

    `gradient_factor`: a scalar that multiplies all gradients in the next step, which saves a pass over them to clip.
    Gradients themselves stay as they are.
    """

    gradient_factor: Tensor | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # plain numbers: schedules change a tensor in place, which the initial lr would follow
        numbers = {key: group[key].item() for key in self.defaults if hasattr(group.get(key), "item")}
        group |= {**numbers, "lr": float(group["lr"]), "betas": tuple(map(float, group["betas"]))}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """As in torch's optimizers.

        Composer's closure ends by waiting for the loss, and the device is idle until the next launch. So little host
        work is done between the two.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for index, group in enumerate(self.param_groups):
                self._update(index, group)
        finally:
            self.gradient_factor = None
        return loss

    def _update(self, index: int, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None and p.requires_grad]
        if not params:
            return
        lr, initial_lr, (beta1, beta2) = group["lr"], group.setdefault("initial_lr", group["lr"]), group["betas"]
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        states = [self._state_of(p, names) for p in params]
        steps = [local_part(state["step"]) for state in states]
        corrections = self._corrections(index, group, steps)
        decay = group["weight_decay"] * (lr / initial_lr if initial_lr else 1.0)
        factor = None if self.gradient_factor is None else self.gradient_factor.float()
        written, others = [], []
        for p, state, step, correction in zip(params, states, steps, corrections, strict=True):
            param, grad, *moments = tensors = [local_part(t) for t in (p, p.grad, *(state[name] for name in names))]
            if not param.numel():  # a rank may have an empty shard of a small parameter
                continue
            if group["amsgrad"] or not _fits_kernel(*tensors):
                others.append((step, *tensors))
                continue
            adamw(
                param, grad, (moments[0], moments[1]), correction, factor,
                lr=lr, beta1=beta1, beta2=beta2, eps=group["eps"], decay=decay,
            )  # fmt: skip
            written += [param, *moments]
        torch.autograd.graph.increment_version(written)  # as operators of torch do
        torch._foreach_add_(steps, 1)
        if others:
            stepped, *kinds = map(list, zip(*others, strict=True))
            # torch walks through storage, and leaves gaps and differing strides aside
            local, grads, means, squares, *largest = [[t.contiguous() for t in kind] for kind in kinds]
            if self.gradient_factor is not None:
                grads = [(grad * self.gradient_factor).to(grad.dtype) for grad in grads]
            if not lr:  # torch removes lr * weight_decay of a weight
                torch._foreach_mul_(local, 1 - decay)
            torch._fused_adamw_(
                local, grads, means, squares, largest[0] if largest else [], stepped,
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay / lr if lr else 0.0, eps=group["eps"],
                amsgrad=group["amsgrad"], maximize=False,
            )  # fmt: skip
            for kind, updated in zip((kinds[0], *kinds[2:]), (local, means, squares, *largest), strict=True):
                for tensor, copied in zip(kind, updated, strict=True):
                    if tensor is not copied:
                        tensor.copy_(copied)
        self._corrections(index, group, steps)  # of the next step, while the device is busy with this one

    def _state_of(self, p: Tensor, names: list[str]) -> dict[str, Any]:
        state = self.state[p]
        if p.grad is not None and p.grad.is_sparse:
            raise RuntimeError("this optimizer does not support sparse gradients")
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float, device=p.device)
            state.update({name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in names})
        return state

    def _corrections(self, index: int, group: dict[str, Any], steps: list[Tensor]) -> tuple[Tensor, ...]:
        """fp32 [2] for each parameter: 1 - beta ** step for both betas, of the step after `steps`.

        Kept until `steps` or betas change, for example when a checkpoint is loaded.
        """
        found = group["betas"], [step._version for step in steps]
        ahead = self.__dict__.setdefault("_ahead", {})  # not set in __init__: copies of an optimizer skip it
        known, known_steps, corrections = ahead.get(index, (None, [], ()))
        if known != found or any(step is not other for step, other in zip(steps, known_steps, strict=True)):
            steps_N = torch.stack(steps).double() + 1
            corrections = torch.stack([1 - beta**steps_N for beta in group["betas"]], dim=1).float().unbind()
            ahead[index] = found, steps, corrections
        return corrections


def _fits_kernel(*tensors: Tensor) -> bool:
    return all(tensor.is_cuda and tensor.dtype != torch.float64 and tensor.is_contiguous() for tensor in tensors)
