"""The experts of Hugging Face transformers 5 on our kernels, as an experts implementation.

    from foundry_moe.integrations.transformers import register

    register()
    model.set_experts_implementation("foundry_moe")  # or from_pretrained(..., experts_implementation="foundry_moe")

Two ways, of which `way_of` gives the one for a module. `fused`: a plain GLU or MLP on a GPU, with gate, up and
activation in one kernel. `split`: the model's own activation between two products, for all others; on a CPU for all.
`own`: transformers' grouped_mm, for weights that our kernels do not read.

Shapes: T tokens, K choices, R rows sorted by expert, E experts, D model width, F expert width.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn

from foundry_moe.ops import expert_mlp, permute, plan_permute, unpermute
from foundry_moe.ops.backends import blocksparse_available
from foundry_moe.ops.expert_linear import expert_linear
from foundry_moe.ops.permute import PermutePlan

NAME = "foundry_moe"
# transformers' names of activations, and ours; any other activation is computed by the model itself
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_LOG = logging.getLogger(__name__)


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
def _pointwise_classes() -> dict[type, str]:
    from transformers.activations import ACT2FN

    return {type(ACT2FN[theirs]): ours for theirs, ours in _ACTIVATIONS.items()}


@functools.cache
def _default_gate() -> Any:
    from transformers.integrations import moe

    # absent in another version: all gates then count as the model's own, which is slower and right
    return getattr(moe, "_default_apply_gate", None)


def pointwise_of(experts: Any) -> str | None:
    """Our name of the activation, if gate and up are a plain GLU (or MLP) of it; None for a formula of the model's."""
    if experts.has_gate and type(experts)._apply_gate is not _default_gate():
        return None
    return _pointwise_classes().get(type(getattr(experts, "act_fn", None)))


def _up_weight(experts: Any) -> Tensor:
    weight: Tensor = experts.gate_up_proj if experts.has_gate else experts.up_proj
    return weight


def _unread(experts: Any) -> str | None:
    """Why our kernels do not read these weights; None where they do."""
    for weight in (_up_weight(experts), experts.down_proj):
        if type(weight) not in (Tensor, nn.Parameter):
            return f"its weights are of type {type(weight).__name__}"
        if weight.dtype not in _DTYPES:
            return f"its weights are {weight.dtype}"
    return None


def is_fusable(experts: Any) -> bool:
    """Whether one kernel computes these experts' gate, up and activation, on a GPU."""
    plain = experts.is_concatenated and not (experts.is_transposed or experts.has_bias or experts.has_post_expert_norm)
    return plain and pointwise_of(experts) is not None


def way_of(experts: Any, dtype: torch.dtype) -> str:
    """How a module's experts are computed in this dtype: fused, split or own (see the module's docstring)."""
    if _unread(experts) is not None:
        return "own"
    on_kernels = blocksparse_available(experts.down_proj.device, dtype)
    return "fused" if on_kernels and is_fusable(experts) else "split"


def experts_forward(experts: Any, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """What transformers calls in place of an experts module's forward: y_TD in `x_TD`'s dtype.

    Args:
        experts: a module of a class decorated with `use_experts_implementation`.
        index_TK: experts; any index outside [0, E), as expert parallelism uses, stands for no expert.
        weights_TK: combine weights, of any float dtype.
    """
    if (reason := _unread(experts)) is not None:
        return _own(experts, x_TD, index_TK, weights_TK, reason)
    device_type = x_TD.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else experts.down_proj.dtype
    way = way_of(experts, dtype)
    experts_TK = torch.where((index_TK >= 0) & (index_TK < experts.num_experts), index_TK, -1)
    plan = plan_permute(experts_TK, experts.num_experts)
    compute = _fused if way == "fused" else _split
    with _on_device(x_TD), torch.autocast(device_type, enabled=False) if autocast else contextlib.nullcontext():
        return compute(experts, x_TD.to(dtype), weights_TK, plan).to(x_TD.dtype)


def _on_device(x_TD: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which under `device_map` is not always the tokens'."""
    if torch.compiler.is_compiling() or not x_TD.is_cuda or x_TD.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x_TD.device)


def _own(experts: Any, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, reason: str) -> Tensor:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    _log_once(f"{type(experts).__name__} is computed by transformers' grouped_mm: {reason}")
    result: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, x_TD, index_TK, weights_TK)
    return result


@functools.cache
def _log_once(line: str) -> None:
    _LOG.warning(line)


def _fused(experts: Any, x_TD: Tensor, weights_TK: Tensor, plan: PermutePlan) -> Tensor:
    w1, v1 = _up_weight(experts).to(x_TD.dtype), None
    if experts.has_gate:
        # unbind's gradient is one stack; two slices would add two zero-filled tensors of the parameter's size
        w1, v1 = w1.unflatten(1, (2, -1)).unbind(1)
    activation = pointwise_of(experts)
    assert activation is not None, "way_of asked"
    w2 = experts.down_proj.to(x_TD.dtype)
    return expert_mlp(x_TD, weights_TK, plan, w1, v1, w2, activation=activation, backend="blocksparse")


def _split(experts: Any, x_TD: Tensor, weights_TK: Tensor, plan: PermutePlan) -> Tensor:
    dtype, inputs_first = x_TD.dtype, bool(experts.is_transposed)
    up_bias = down_bias = expert_RE = None
    if experts.has_bias:
        up_bias = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
        down_bias = experts.down_proj_bias
        expert_RE = _expert_of_rows(plan, dtype)

    def linear(rows: Tensor, weight: Tensor, bias_EN: Tensor | None) -> Tensor:
        out = expert_linear(rows, weight.to(dtype), plan.offsets_E, inputs_first=inputs_first)
        return out if bias_EN is None or expert_RE is None else torch.addmm(out, expert_RE, bias_EN.to(dtype))

    z = linear(permute(x_TD, plan), _up_weight(experts), up_bias)
    # a gate may compute in fp32 inside, as some models' do
    h_RF = (experts._apply_gate(z) if experts.has_gate else experts.act_fn(z)).to(dtype)
    y_RD = linear(h_RF, experts.down_proj, down_bias)
    if experts.has_post_expert_norm:
        y_RD = experts.post_expert_norm(y_RD)
    return unpermute(y_RD, weights_TK, plan)


def _expert_of_rows(plan: PermutePlan, dtype: torch.dtype) -> Tensor:
    """[R, E] of ones and zeros, so that a bias and its gradient are products: without atomics, in the same order."""
    row_R1 = torch.arange(plan.num_rows, device=plan.offsets_E.device)[:, None]
    begin_E = plan.offsets_E - plan.tokens_per_expert_E
    return ((row_R1 >= begin_E) & (row_R1 < plan.offsets_E)).to(dtype)
