"""Custom operators: a Triton kernel and its plain twin under one name, and the choice between them.

They cost nothing where nothing traces: `torch.compile` sees one node, eager mode a plain call. Under a profiler the
dispatch of custom operators was the host's largest expense in a layer's step (H200).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def _traced(args: Sequence[Any]) -> bool:
    """Whether `torch.compile` traces this call, or the first argument is a fake tensor or another subclass."""
    return torch.compiler.is_compiling() or type(args[0]) not in _PLAIN


def operator(
    name: str, fake: Callable[..., Any], mutates: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function of tensors the operator `foundry_moe::name`; called with plain tensors, it is the function.

    Args:
        fake: gives empty results of the right shapes.
        mutates: the name of an argument that is written to.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.library.custom_op(f"foundry_moe::{name}", function, mutates_args=[mutates] if mutates else ())
        compiled.register_fake(fake)
        written = list(inspect.signature(function).parameters).index(mutates) if mutates else -1

        def call(*args: Any) -> Any:
            if _traced(args):
                return compiled(*args)
            if written >= 0:
                torch.autograd.graph.increment_version(args[written])  # as the operator does
            return function(*args)

        call.__doc__ = function.__doc__
        call.operator, call.function = compiled, function  # type: ignore[attr-defined]
        return call

    return wrap


def differentiable(
    call: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The same with a gradient: a function of positional arguments.

    Args:
        call: from `operator`.
        save: of (ctx, inputs, output), as `register_autograd` wants it.
        backward: of (ctx, *gradients of the outputs).
    """
    compiled, function = call.operator, call.function  # type: ignore[attr-defined]
    compiled.register_autograd(backward, setup_context=save)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function(*inputs)
            save(ctx, inputs, output)
            return output

    Eager.backward = staticmethod(backward)  # type: ignore[method-assign]

    def apply(*args: Any) -> Any:
        return compiled(*args) if _traced(args) else Eager.apply(*args)

    apply.__doc__ = call.__doc__
    return apply


def take_saved(ctx: Any) -> tuple[Tensor, ...]:
    """The saved tensors of experts whose backward pass turns some into gradients in place.

    Raises:
        RuntimeError: a backward pass has done so before.
    """
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:  # autograd's check of versions
        if not getattr(ctx, "spent", False):
            raise
        raise RuntimeError(
            "a second backward pass through experts needs `memory: recompute` (or a second forward pass): with "
            "`memory: save` the first one has turned their pre-activations into gradients in place"
        ) from error
    ctx.spent = True
    return saved


def on_gpu(*dtypes: torch.dtype) -> Callable[..., bool]:
    """Whether an operator's first argument is on a GPU and, if dtypes are given, of one of them."""

    def takes(tensor: Tensor, *_: Any) -> bool:
        return tensor.is_cuda and (not dtypes or tensor.dtype in dtypes)

    return takes


def twins(
    name: str,
    *,
    triton: Callable[..., Any],
    plain: Callable[..., Any],
    fake: Callable[..., Any],
    takes: Callable[..., bool] | None = None,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """One function of positional arguments: the operator `foundry_moe::name` where kernels run, else its plain twin.

    Args:
        triton: on kernels.
        plain: the same in plain torch, which differentiates it itself.
        fake: gives empty results of the right shapes.
        takes: of the same arguments, whether the kernels take them; None = where the first one is on a GPU.
        save, backward: the gradient of `triton`, as in `differentiable`; None = it has none.
    """
    call = operator(name, fake)(triton)
    if save is not None and backward is not None:
        call = differentiable(call, save, backward)
    takes = takes or on_gpu()

    def choose(*args: Any) -> Any:
        return call(*args) if takes(*args) else plain(*args)

    choose.__doc__ = triton.__doc__
    choose.triton, choose.plain = call, plain  # type: ignore[attr-defined]
    return choose
