"""Which backend computes a layer's experts, and why, in one line for people. The choice itself is made elsewhere."""

from __future__ import annotations

import torch
import triton
from foundry_moe_kernels.descriptors import products_compile

from foundry_moe.ops.expert_steps import why_portable
from foundry_moe.ops.mlp import choose_backend

_HOPPER = "blocksparse, Hopper kernels"
_PORTABLE = "blocksparse, portable kernels (SDD, DSD, DDS)"


def describe_backend(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    width: int,
    hidden: int | tuple[int, ...],
    capacity: float | str | None = None,
    capability: tuple[int, int] | None = None,
) -> str:
    """What computes experts with these settings, and what decides it.

    Args:
        backend, capacity: as in `MoEConfig`.
        dtype: of matrix products.
        width, hidden: D and F; several F for experts of different widths.
        capability: of a CUDA device that need not be here; default: the device's own.

    Raises:
        ValueError: the backend that is asked for cannot run there, or no product, a router's either.
    """
    if device.type == "cuda":
        major, minor = capability or torch.cuda.get_device_capability(device)
        if not products_compile((major, minor)):
            raise ValueError(
                f"Triton {triton.__version__} compiles no matrix products for this GPU (sm_{major}{minor}): use the "
                "modern stack (uv pip install --override requirements/modern.txt .)"
            )
    if capacity is not None:
        return f"batched products over slots, as capacity ({capacity}) asks; backend is for dropless layers"
    chosen = choose_backend(backend, device, dtype, capability)
    name = str(dtype).removeprefix("torch.")
    if chosen == "blocksparse":
        if isinstance(hidden, tuple):
            return f"{_PORTABLE}: the Hopper kernels want experts of one width"
        reason = why_portable(device, dtype, width, hidden, capability)
        if reason is None:
            return f"{_HOPPER}: sm_90, Triton {triton.__version__}, {name}"
        return f"{_PORTABLE}: {reason}"
    if backend != "auto":
        return f"{chosen}, as backend ({backend}) asks"
    if device.type != "cuda":
        return "reference, plain torch, one expert after another: there is no GPU"
    return f"reference, plain torch, one expert after another: kernels compute fp32, fp16 and bf16, and this is {name}"
