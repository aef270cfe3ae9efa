"""One function for the experts of a layer, whichever backend computes them.

Shapes: T tokens, K choices, D model width, F expert width, E experts.
"""

import torch
from torch import Tensor

from foundry_moe.ops import blocksparse, grouped, padded, reference
from foundry_moe.ops.activations import POINTWISE
from foundry_moe.ops.biases import Biases, of_choices, with_bias, with_ones, with_rows
from foundry_moe.ops.permute import PermutePlan, permute, unpermute

_EXPERT_MLPS = {"grouped": grouped.grouped_mlp, "reference": reference.reference_mlp}


def choose_backend(
    backend: str, device: torch.device, dtype: torch.dtype, capability: tuple[int, int] | None = None
) -> str:
    """The backend that `auto` stands for here, or `backend` itself once it is known to work.

    Args:
        capability: of a CUDA device that need not be here; default: the device's own.

    Raises:
        ValueError: the backend asked for cannot run on this device with this dtype.
    """
    if backend == "auto":
        return "blocksparse" if device.type == "cuda" and blocksparse.is_available(device, dtype) else "reference"
    if backend == "grouped" and not grouped.is_available(device, dtype, capability):
        raise ValueError(
            f"backend grouped needs bf16 on a CUDA device of capability 9.0 and torch 2.8 or later, not {dtype} on "
            f"{device} with torch {torch.__version__}: use backend: auto or reference"
        )
    if backend == "blocksparse" and not blocksparse.is_available(device, dtype):
        raise ValueError(
            f"backend blocksparse needs fp32, fp16 or bf16 on a CUDA device (on a CPU, TRITON_INTERPRET=1 for tests), "
            f"not {dtype} on {device}: use backend: auto or reference"
        )
    return backend


def _check(
    x_TD: Tensor, w1_EFD: Tensor, v1_EFD: Tensor | None, w2_EDF: Tensor, plan: PermutePlan, activation: str
) -> None:
    experts, hidden, width = w1_EFD.shape
    if x_TD.dim() != 2 or x_TD.shape[1] != width:
        raise ValueError(f"x_TD {tuple(x_TD.shape)} must be [tokens, {width}] to fit w1_EFD {tuple(w1_EFD.shape)}")
    if w2_EDF.shape != (experts, width, hidden):
        raise ValueError(f"w2_EDF {tuple(w2_EDF.shape)} must be {(experts, width, hidden)} to fit w1_EFD")
    if v1_EFD is not None and v1_EFD.shape != w1_EFD.shape:
        raise ValueError(f"v1_EFD {tuple(v1_EFD.shape)} must have w1_EFD's shape {tuple(w1_EFD.shape)}")
    if plan.num_experts != experts:
        raise ValueError(f"the plan is for {plan.num_experts} experts, the weights for {experts}")
    if activation not in POINTWISE:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(POINTWISE)}")


def expert_mlp(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: PermutePlan,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    w2_EDF: Tensor,
    *,
    activation: str,
    backend: str = "auto",
    memory: str = "save",
    biases: Biases | None = None,
) -> Tensor:
    """y_TD: for each token the weighted sum of its experts' outputs.

    Expert e computes act(x w1_e^T) w2_e^T or, given `v1_EFD`, (act(x w1_e^T) * x v1_e^T) w2_e^T; `biases` are added
    to each product.
    Under autocast, `x_TD` and the weights are cast as they are for a linear layer.

    Args:
        x_TD: [T, D].
        weights_TK: combine weights [T, K], any float dtype; None = all one.
        plan: from `plan_permute`, or from `plan_padded`: then batched products, whatever the backend.
        w1_EFD, v1_EFD: [E, F, D]; v1_EFD None = an MLP without gate.
        w2_EDF: [E, D, F].
        activation: a name in `foundry_moe.ops.activations.POINTWISE`.
        backend: auto | blocksparse | grouped | reference.
        memory: save | recompute the activation in the backward pass (blocksparse only).

    Raises:
        ValueError: shapes that do not fit, an unknown activation, a backend that cannot run here.
    """
    _check(x_TD, w1_EFD, v1_EFD, w2_EDF, plan, activation)
    if biases is not None:
        y_TP = expert_mlp(
            with_ones(x_TD),
            weights_TK,
            plan,
            with_bias(w1_EFD, biases.w1_EF),
            None if v1_EFD is None or biases.v1_EF is None else with_bias(v1_EFD, biases.v1_EF),
            with_rows(w2_EDF),
            activation=activation,
            backend=backend,
            memory=memory,
        )
        return y_TP[:, : x_TD.shape[1]] + of_choices(biases.w2_ED, weights_TK, plan).to(y_TP.dtype)
    device_type = x_TD.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x_TD, w1_EFD, w2_EDF = x_TD.to(dtype), w1_EFD.to(dtype), w2_EDF.to(dtype)
        v1_EFD = v1_EFD.to(dtype) if v1_EFD is not None else None
        with torch.autocast(device_type, enabled=False):
            return _compute(x_TD, weights_TK, plan, w1_EFD, v1_EFD, w2_EDF, activation, backend, memory)
    return _compute(x_TD, weights_TK, plan, w1_EFD, v1_EFD, w2_EDF, activation, backend, memory)


def _compute(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: PermutePlan,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    w2_EDF: Tensor,
    activation: str,
    backend: str,
    memory: str,
) -> Tensor:
    if plan.capacity is not None:
        return padded.padded_mlp(x_TD, weights_TK, plan, w1_EFD, v1_EFD, w2_EDF, activation)
    chosen = choose_backend(backend, x_TD.device, x_TD.dtype)
    if chosen == "blocksparse":  # permutes inside, so that the backward pass keeps x alone
        return blocksparse.blocksparse_mlp(x_TD, weights_TK, plan, w1_EFD, v1_EFD, w2_EDF, activation, memory)
    y_RD = _EXPERT_MLPS[chosen](permute(x_TD, plan), plan, w1_EFD, v1_EFD, w2_EDF, activation)
    return unpermute(y_RD, weights_TK, plan)
