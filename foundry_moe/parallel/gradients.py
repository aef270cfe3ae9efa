"""Gradients on a mesh: the scale of experts' gradients, one norm over all meshes, clipping.

Parameters may be plain tensors, DTensors or both, or a single one. Independent of layers, optimizers and Composer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        # torch.compile rebuilds an output that aliases an input outside the graph, which would drop this backward pass
        return tensor.clone() if torch.compiler.is_compiling() else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        return grads[0] * ctx.scale, None


class _TakeGradient(torch.autograd.Function):
    """This rank's part of a weight, whose gradient is passed to `take` only: neither autograd nor FSDP2 copies it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        local = local_part(weight)
        return local.view_as(local)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.take(grads[0])
        return None, None


@torch.no_grad()
def _add_gradient(stored: nn.Parameter, scale: float, grad: Tensor) -> None:
    """Adds this rank's gradient times `scale` to the gradient of the optimizer's parameter, in its dtype."""
    if stored.grad is not None:
        assert isinstance(stored.grad, DTensor)
        stored.grad.to_local().add_(grad, alpha=scale)
        return
    local = torch.empty(grad.shape, dtype=stored.dtype, device=grad.device)
    torch.mul(grad, scale, out=local)
    assert isinstance(stored, DTensor)
    stored.grad = DTensor.from_local(
        local, stored.device_mesh, stored.placements, run_check=False, shape=stored.shape, stride=stored.stride()
    )


class LocalWeight:
    """Turns an expert weight, a DTensor over the expert group, into this rank's part, and scales its gradient.

    An expert computes the tokens of all `expert` ranks of its group, while FSDP averages its gradient over the other
    ranks only: the sum over those tokens has to be divided by `expert` once more to be the mean over ranks that
    data parallelism takes (databricks/megablocks issue 86 is what happens without). FSDP2's own divide factor
    does this on CUDA, but divides twice on a shard group of one rank with fp64 or fp16 gradients (torch 2.11).

    Args:
        expert: ranks of the expert group.
        unsharded: a module wrapped by FSDP2 whose weights no other rank shares. There is nothing to reduce: its
            gradients are scaled, cast and added to those of the stored weights in one pass, and bypass FSDP2, which
            would copy them two or three times.
    """

    def __init__(self, expert: int, unsharded: nn.Module | None = None) -> None:
        self.scale = 1.0 / expert
        self.unsharded = unsharded
        self.stored: dict[str, nn.Parameter] = {}
        if unsharded is not None:
            self.stored = dict(unsharded.named_parameters(recurse=False))
            unsharded.register_forward_pre_hook(self._find_stored, prepend=True)  # else after FSDP2's hook

    def _find_stored(self, module: nn.Module, *_: Any) -> None:
        """Notes parameters that load_state_dict replaced; those that FSDP2 installs for a pass have a smaller mesh."""
        for name, old in self.stored.items():
            new: nn.Parameter = getattr(module, name)
            if isinstance(new, DTensor) and isinstance(old, DTensor) and new.device_mesh == old.device_mesh:
                self.stored[name] = new

    def __call__(self, weight: Tensor) -> Tensor:
        if self.unsharded is not None:
            # during a pass FSDP2 replaces the parameters
            name = next(name for name in self.stored if getattr(self.unsharded, name) is weight)
            return _TakeGradient.apply(weight, partial(_add_gradient, self.stored[name], self.scale))
        return _ScaleGradient.apply(local_part(weight), self.scale)


def _local_gradients(parameters: Iterable[Tensor] | Tensor) -> list[tuple[Tensor, int]]:
    """This rank's part of each gradient, and how many ranks of the job hold the same part."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    parts = []
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if not isinstance(grad, DTensor):
            parts.append((grad, world))
            continue
        assert all(isinstance(p, Replicate | Shard | _StridedShard) for p in grad.placements), grad.placements
        sharded = math.prod(
            size
            for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True)
            if not isinstance(placement, Replicate)
        )
        parts.append((grad.to_local(), world // sharded))
    return parts


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor] | Tensor) -> Tensor:
    """The 2-norm of all gradients as one vector, each element counted once however many ranks hold it: fp64 scalar.

    Every rank of the job must call this; all get the same value. One message, no host synchronisation.
    """
    parts = [(grad, held) for grad, held in _local_gradients(parameters) if grad.numel()]
    total = torch.zeros((), dtype=torch.float64, device=parts[0][0].device if parts else _default_device())
    alike: dict[tuple[int, torch.dtype], list[Tensor]] = {}  # by copies, not a tensor: its copy would block the host
    for grad, held in parts:
        alike.setdefault((held, grad.dtype), []).append(grad)
    for (held, dtype), grads in alike.items():
        # at least fp32: a norm in bf16 has 8 bits, one in fp16 overflows above 65,504
        norms = torch._foreach_norm(grads, dtype=torch.promote_types(dtype, torch.float32))
        total += torch.stack(norms).double().square().sum() / held
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


def _default_device() -> torch.device:
    """The device of the job's process group, for a rank without gradients."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float) -> Tensor:
    """Scales all gradients so that their 2-norm is `max_norm` at most, as `torch.nn.utils.clip_grad_norm_` does.

    Returns:
        The norm before clipping, fp64 scalar.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = gradient_norm(parameters)
    scale_gradients(parameters, clip_factor(norm, max_norm))
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor, 1 at most, that makes gradients of norm `norm` no longer than `max_norm`; a scalar of its dtype."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor] | Tensor, factor: Tensor) -> None:
    """Multiplies all gradients by a scalar."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad, _ in _local_gradients(parameters):
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for dtype, grads in by_dtype.items():
        torch._foreach_mul_(grads, factor.to(dtype))


@torch.no_grad()
def clip_value(parameters: Iterable[Tensor] | Tensor, max_value: float) -> None:
    """Clamps every gradient element to [-max_value, max_value], as `torch.nn.utils.clip_grad_value_` does."""
    for grad, _ in _local_gradients(parameters):
        grad.clamp_(-max_value, max_value)
