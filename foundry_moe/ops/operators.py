"""Custom operators: Triton kernels that are one node for `torch.compile`, and the choice of a plain version.

They cost nothing in eager mode, where a call is a plain function call. Under a profiler the dispatch of custom
operators was the host's largest expense in a layer's step (H200).

An operator may take records (classes made with `NamedTuple`) of tensors and plain values, so that what belongs together
is one argument. Schemas of torch.library have no such type: there each field is an argument of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, get_type_hints

import torch
from torch import Tensor

from foundry_moe.schema import UserError

_PLAIN = (Tensor, torch.nn.Parameter)
NAMESPACE = __name__.partition(".")[0]  # foundry_moe; a copy beside it (scripts/hub_kernel.py) has another name
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def is_traced(first: Any) -> bool:
    """Whether `torch.compile` traces a call with this first argument, or it is a fake tensor or another subclass."""
    return torch.compiler.is_compiling() or type(first) not in _PLAIN


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Makes a tensor's GPU the current device, on which Triton launches; in backward passes autograd does."""
    if torch.compiler.is_compiling() or not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def refuse_second_derivatives(_: Tensor) -> None:
    """A hook on a tensor, or the first step of a backward pass that runs kernels. These have no gradients of their own,
    which would be left out.

    Raises:
        ValueError: the backward pass builds a graph.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UserError(
            "create_graph (True): MoE layers have no second derivatives: call backward or autograd.grad without it"
        )


class _Schema:
    """Which parameters of a function are records, and the conversion between records and their fields."""

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = get_type_hints(function)
        self.types = [hints.get(name) for name in inspect.signature(function).parameters]
        self.records = [kind if hasattr(kind, "_fields") else None for kind in self.types]

    def flatten(self, args: Iterable[Any]) -> list[Any]:
        flat: list[Any] = []
        for arg, record in zip(args, self.records, strict=True):
            flat.extend(arg if record else (arg,))
        return flat

    def group(self, flat: Iterable[Any]) -> list[Any]:
        left = iter(tuple(arg) if type(arg) is list else arg for arg in flat)  # torch.library gives lists; these hash
        return [record(*islice(left, len(record._fields))) if record else next(left) for record in self.records]

    def flatten_gradients(self, grads: Iterable[Any]) -> tuple[Any, ...]:
        """A gradient for each field: None for a record is None for all of its fields."""
        flat: list[Any] = []
        for grad, record in zip(grads, self.records, strict=True):
            flat.extend((grad or (None,) * len(record._fields)) if record else (grad,))
        return tuple(flat)

    def flat_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of all fields, with the signature that torch.library infers a schema from."""
        parameters = []
        signature = inspect.signature(function)
        for parameter, kind, record in zip(signature.parameters.values(), self.types, self.records, strict=True):
            for name, hint in get_type_hints(record).items() if record else [(parameter.name, kind)]:
                parameters.append(inspect.Parameter(name, parameter.kind, annotation=hint))
        result = get_type_hints(function)["return"]

        def flat(*args: Any) -> Any:
            return function(*self.group(args))

        flat.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
        return flat


def _mark_writes(function: Callable[..., Any], mutates: Sequence[str]) -> Callable[..., Any]:
    """The function, which also increments the versions of arguments it writes to, as PyTorch's own operators do."""
    written = [place for place, name in enumerate(inspect.signature(function).parameters) if name in mutates]

    def write(*args: Any) -> Any:
        for place in written:
            torch.autograd.graph.increment_version(args[place])
        return function(*args)

    return write if written else function


def define(
    name: str, function: Callable[..., Any], fake: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[..., Any]:
    """Makes a function the operator `foundry_moe::name`.

    `torch.library.custom_op` does the same, and wraps and checks each call: with nine arguments it takes 46 us on a
    CPU, this 21.

    Args:
        fake: of the same arguments, gives empty results of the right shapes.
        mutates: names of arguments that are written to.
    """
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, _mark_writes(function, mutates), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def operator(name: str, fake: Callable[..., Any], mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function of tensors the operator `foundry_moe::name`; called with plain tensors, it is the function.

    Args:
        fake: of the same arguments, gives empty results of the right shapes.
        mutates: names of arguments that are written to, no records.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = _Schema(function)
        compiled = define(name, schema.flat_function(function), lambda *flat: fake(*schema.group(flat)), mutates)
        eager = _mark_writes(function, mutates)

        def call(*args: Any) -> Any:
            return compiled(*schema.flatten(args)) if is_traced(args[0]) else eager(*args)

        call.__doc__ = function.__doc__
        call.operator, call.function, call.schema = compiled, function, schema  # type: ignore[attr-defined]
        call.eager = eager  # type: ignore[attr-defined]
        return call

    return wrap


def differentiable(
    call: Any, save: Callable[..., None], backward: Callable[..., Any], *, of_fields: bool = False
) -> Any:
    """The same with a gradient: a function of positional arguments, with `eager` for callers that are not traced.

    Args:
        call: from `operator`.
        save: of (ctx, inputs, output), in the form of `register_autograd`.
        backward: of (ctx, *gradients of the outputs); one result for each argument, for a record one of its fields'
            gradients or None. `ctx.needs_input_grad` has each field by itself where compiled or `of_fields`.
        of_fields: fields of a record may need gradients.
    """
    compiled, function, schema = call.operator, call.function, call.schema

    def of_flat(*flat: Any) -> Any:
        return function(*schema.group(flat))

    def save_flat(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, schema.group(inputs), output)

    def gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return schema.flatten_gradients(backward(ctx, *grads))

    torch.library.register_autograd(compiled, gradients, setup_context=save_flat, lib=_LIBRARY)

    eager_gradients = gradients if of_fields else backward

    def first_gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # a call less in most steps
            refuse_second_derivatives(grads[0])
        result: tuple[Any, ...] = eager_gradients(ctx, *grads)
        return result

    class Eager(torch.autograd.Function):
        pass

    for name, static in {
        "forward": of_flat if of_fields else function,
        "setup_context": save_flat if of_fields else save,
        "backward": first_gradients,
    }.items():
        setattr(Eager, name, staticmethod(static))
    # Of the base class: Function's own looks through all arguments for wrappers of functorch, which is not supported
    eager = super(torch.autograd.Function, Eager).apply

    def apply(*args: Any) -> Any:
        if is_traced(args[0]):
            return compiled(*schema.flatten(args))
        return eager(*(schema.flatten(args) if of_fields else args))

    apply.__doc__ = call.__doc__
    apply.eager = eager  # type: ignore[attr-defined]
    return apply


def take_saved(ctx: Any) -> tuple[Tensor, ...]:
    """The saved tensors of a backward pass that overwrites some of them with gradients.

    Raises:
        RuntimeError: an earlier backward pass has overwritten them.
    """
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:  # autograd compares the tensors' versions
        if not getattr(ctx, "spent", False):
            raise
        raise RuntimeError(
            "a second backward pass through experts needs `memory: recompute` (or a second forward pass): with "
            "`memory: save` the first one has overwritten their pre-activations with gradients"
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
    """One function of positional arguments: the operator `foundry_moe::name` where kernels run, else plain torch.

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
    eager, takes = call.eager, takes or on_gpu()

    def choose(*args: Any) -> Any:
        if not takes(*args):
            return plain(*args)
        return call(*args) if is_traced(args[0]) else eager(*args)

    choose.__doc__ = triton.__doc__
    choose.triton, choose.plain = call, plain  # type: ignore[attr-defined]
    return choose
