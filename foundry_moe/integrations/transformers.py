"""The experts of Hugging Face transformers 5 on our kernels, as an experts implementation.

    from foundry_moe.integrations.transformers import register

    register()
    model.set_experts_implementation("foundry_moe")  # or from_pretrained(..., experts_implementation="foundry_moe")

Three ways, of which `way_of` gives the one for a module. `fused`: on a GPU, where the activation is one of ours (see
`formula_of`); weights are read as they lie in the parameters, biases added in the kernels. `split`: the model's own
activation between two products, for all others; on a CPU for all. `own`: transformers' grouped_mm, for weights that our
kernels do not read.

`parallelize` spreads a model over the ranks of a job (`transformers_parallel.py`); `ParallelTrainer` trains it.

Shapes: T tokens, K choices, R rows sorted by expert, E experts, D model width, F expert width.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from foundry_moe.ops import POINTWISE, packed_mlp, permute, plan_permute, unpermute
from foundry_moe.ops.backends import blocksparse_available
from foundry_moe.ops.expert_linear import expert_linear
from foundry_moe.ops.operators import on_device
from foundry_moe.ops.permute import PermutePlan

NAME = "foundry_moe"
# transformers' names of activations, and ours
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_CONSTANTS = ("alpha", "limit", "swiglu_alpha", "swiglu_limit")  # what gates of transformers 5 read from their module
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ELSEWHERE = {  # what needs torch.distributed or Trainer, which the backend does not
    **dict.fromkeys(("parallelize", "save_pretrained", "clip_grad_norm_"), "transformers_parallel"),
    "ParallelTrainer": "transformers_trainer",
}
_LOG = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(import_module(f"foundry_moe.integrations.{_ELSEWHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(name: str = NAME) -> str:
    """Registers `experts_forward` with transformers, and returns the name to give to a model.

    transformers reads no entry points: a program calls this before it loads a model.

    Raises:
        ImportError: transformers is missing, or older than 5.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            "foundry_moe.integrations.transformers needs transformers 5, which has ALL_EXPERTS_FUNCTIONS: "
            "pip install 'transformers>=5'"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    return name


@functools.cache
def _act_classes() -> tuple[type, ...]:
    """The classes of transformers' activations without settings."""
    from transformers.activations import ACT2FN

    return tuple({type(ACT2FN[name]) for name in _ACTIVATIONS})


@torch.compiler.assume_constant_result
def _formula(kind: type, act: Any, constants: tuple[tuple[str, float], ...], gate_up: str | None) -> str | None:
    return _probed(kind, act, constants, gate_up)


@functools.cache
def _probed(kind: type, act: Any, constants: tuple[tuple[str, float], ...], gate_up: str | None) -> str | None:
    """The formula of ours that gives a class's own values, on values of any size that 16-bit floats hold."""
    numbers = torch.cat([torch.logspace(-3, 4.5, 31, dtype=torch.float64), torch.linspace(0, 12, 97).double()])
    numbers = torch.cat([numbers, -numbers])
    gate, up = numbers.repeat(3), torch.cat([numbers.roll(7), numbers.flip(0), numbers.roll(101)])
    z = torch.stack([gate, up], dim=-1).flatten() if gate_up == "interleaved" else torch.cat([gate, up])
    act_fn = act() if isinstance(act, type) else act
    try:
        h = kind._apply_gate(SimpleNamespace(act_fn=act_fn, **dict(constants)), z) if gate_up else act_fn(gate)  # type: ignore[attr-defined]
    except Exception:  # a gate that needs more of its module: the model computes it itself
        return None
    values = {name.split("_")[-1]: value for name, value in constants}
    formulas = dict.fromkeys(_ACTIVATIONS.values(), (1.0, math.inf, 0.0))
    if gate_up and "limit" in values:
        for shift in (0.0, 1.0):
            alpha, limit = values.get("alpha", 1.0), values["limit"]
            formulas[f"silu {alpha} {limit} {shift}"] = (alpha, limit, shift)
    for name, (alpha, limit, shift) in formulas.items():
        ours = POINTWISE[name.split()[0]](alpha * gate.clamp(max=limit)) / alpha
        ours = ours * (up.clamp(-limit, limit) + shift) if gate_up else ours
        if h.shape == ours.shape and torch.allclose(h.double(), ours, rtol=1e-5, atol=1e-6):
            return name
    return None


def gate_up_of(experts: Any) -> str | None:
    """Where gate and up are in a module's first matrices: concatenated | interleaved; None where there is no gate."""
    return ("concatenated" if experts.is_concatenated else "interleaved") if experts.has_gate else None


def formula_of(experts: Any) -> str | None:
    """The activation as `foundry_moe.ops.packed_mlp` takes it; None for another, which the model computes itself."""
    act = getattr(experts, "act_fn", None)
    if isinstance(act, nn.Module):
        act = type(act)
        if act not in _act_classes():
            return None
    constants = tuple((name, float(getattr(experts, name))) for name in _CONSTANTS if hasattr(experts, name))
    return _formula(type(experts), act, constants, gate_up_of(experts))


def _weight(experts: Any, name: str) -> Tensor:
    """A parameter of experts; on a mesh this rank's part."""
    weight: Tensor = getattr(experts, name)
    placed = getattr(experts, "placed", None)
    return weight if placed is None else placed.local(weight)


def _up_name(experts: Any) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _unread(experts: Any) -> str | None:
    """Why our kernels do not read these weights; None where they do."""
    if getattr(experts, "placed", None) is not None:
        return None  # `parallelize` has checked them
    for weight in (getattr(experts, _up_name(experts)), experts.down_proj):
        if type(weight) not in (Tensor, nn.Parameter):
            return f"its weights are of type {type(weight).__name__}"
        if weight.dtype not in _DTYPES:
            return f"its weights are {weight.dtype}"
    return None


def is_fusable(experts: Any) -> bool:
    """Whether our kernels compute these experts' gate, up and activation on a GPU, with their biases."""
    return not getattr(experts, "has_post_expert_norm", False) and formula_of(experts) is not None


def way_of(experts: Any, dtype: torch.dtype) -> str:
    """How a module's experts are computed in this dtype: fused, split or own (see the module's docstring)."""
    if _unread(experts) is not None:
        return "own"
    on_kernels = blocksparse_available(experts.down_proj.device, dtype)
    return "fused" if on_kernels and is_fusable(experts) else "split"


def experts_forward(experts: Any, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The function that transformers calls in place of an experts module's forward: y_TD in `x_TD`'s dtype.

    Args:
        experts: a module of a class decorated with `use_experts_implementation`.
        index_TK: experts; any index outside [0, E), as expert parallelism uses, means no expert.
        weights_TK: combine weights, of any float dtype.
    """
    if (reason := _unread(experts)) is not None:
        return _own(experts, x_TD, index_TK, weights_TK, reason)
    device_type = x_TD.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else experts.down_proj.dtype
    way = way_of(experts, dtype)
    experts_TK = torch.where((index_TK >= 0) & (index_TK < experts.num_experts), index_TK, -1)
    compute = functools.partial(_fused if way == "fused" else _split, experts)
    placed = getattr(experts, "placed", None)
    with on_device(x_TD), torch.autocast(device_type, enabled=False) if autocast else contextlib.nullcontext():
        if placed is not None:
            return placed.dispatch(compute, x_TD.to(dtype), experts_TK, weights_TK).to(x_TD.dtype)
        return compute(x_TD.to(dtype), weights_TK, plan_permute(experts_TK, experts.num_experts)).to(x_TD.dtype)


def _own(experts: Any, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, reason: str) -> Tensor:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    _log_once(f"{type(experts).__name__} is computed by transformers' grouped_mm: {reason}")
    result: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, x_TD, index_TK, weights_TK)
    return result


@functools.cache
def _log_once(line: str) -> None:
    _LOG.warning(line)


def _biases(experts: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    if not experts.has_bias:
        return None
    up_bias, down_bias = (_weight(experts, f"{name}_bias") for name in (_up_name(experts), "down_proj"))
    return up_bias.to(dtype), down_bias.to(dtype)


def _fused(experts: Any, x_TD: Tensor, weights_TK: Tensor, plan: PermutePlan) -> Tensor:
    w1, w2 = (_weight(experts, name).to(x_TD.dtype) for name in (_up_name(experts), "down_proj"))
    if experts.is_transposed:
        w1, w2 = w1.mT, w2.mT
    activation = formula_of(experts)
    assert activation is not None, "see way_of"
    return packed_mlp(
        x_TD, weights_TK, plan, w1, w2,
        activation=activation, gate_up=gate_up_of(experts), biases=_biases(experts, x_TD.dtype),
    )  # fmt: skip


def _split(experts: Any, x_TD: Tensor, weights_TK: Tensor, plan: PermutePlan) -> Tensor:
    dtype, inputs_first = x_TD.dtype, bool(experts.is_transposed)
    up_bias, down_bias = _biases(experts, dtype) or (None, None)
    expert_RE = _expert_of_rows(plan, dtype) if experts.has_bias else None

    def linear(rows: Tensor, name: str, bias_EN: Tensor | None) -> Tensor:
        out = expert_linear(rows, _weight(experts, name).to(dtype), plan.offsets_E, inputs_first=inputs_first)
        return out if bias_EN is None or expert_RE is None else torch.addmm(out, expert_RE, bias_EN)

    z = linear(permute(x_TD, plan), _up_name(experts), up_bias)
    # a gate may compute in fp32 inside, as some models' do
    h_RF = (experts._apply_gate(z) if experts.has_gate else experts.act_fn(z)).to(dtype)
    y_RD = linear(h_RF, "down_proj", down_bias)
    if getattr(experts, "has_post_expert_norm", False):  # newer than 5.17
        y_RD = experts.post_expert_norm(y_RD)
    return unpermute(y_RD, weights_TK, plan)


def _expert_of_rows(plan: PermutePlan, dtype: torch.dtype) -> Tensor:
    """[R, E] of ones and zeros, so that a bias and its gradient are products: without atomics, in the same order."""
    row_R1 = torch.arange(plan.num_rows, device=plan.offsets_E.device)[:, None]
    begin_E = plan.offsets_E - plan.tokens_per_expert_E
    return ((row_R1 >= begin_E) & (row_R1 < plan.offsets_E)).to(dtype)
