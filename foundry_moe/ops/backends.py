"""Which backend computes a layer's experts, which family of kernels it uses, and why, in one line of text."""

from __future__ import annotations

import functools
import os

import torch
import triton
from foundry_moe_kernels.descriptors import capability_supported, products_compile
from foundry_moe_kernels.launch import INTERPRETED

from foundry_moe.schema import UserError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALIGN = 8  # kernel widths must be multiples of this: 16 bytes of a 16-bit type, moved at a time
_HOPPER = "blocksparse, Hopper kernels"
_PORTABLE = "blocksparse, portable kernels (SDD, DSD, DDS)"


def blocksparse_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run here: fp32, fp16 or bf16 on CUDA, or anywhere in Triton's interpreter (no bf16 there)."""
    if INTERPRETED:
        return dtype in (torch.float32, torch.float16)
    return device.type == "cuda" and dtype in FLOATS


def _grouped_available(device: torch.device, dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    """Whether `torch._grouped_mm` computes this dtype on this device (bf16 on CUDA of capability 9.0, torch 2.8 up)."""
    return (
        hasattr(torch, "_grouped_mm")
        and dtype is torch.bfloat16
        and device.type == "cuda"
        and (capability or torch.cuda.get_device_capability(device)) >= (9, 0)
    )


def choose_backend(
    backend: str, device: torch.device, dtype: torch.dtype, capability: tuple[int, int] | None = None
) -> str:
    """The backend that `auto` selects here, or `backend` itself if it can run here.

    Args:
        capability: of a CUDA device that need not be present; default: the device's own.

    Raises:
        ValueError: the requested backend cannot run on this device with this dtype.
    """
    if backend == "auto":
        return "blocksparse" if device.type == "cuda" and blocksparse_available(device, dtype) else "reference"
    if backend == "grouped" and not _grouped_available(device, dtype, capability):
        raise UserError(
            f"backend grouped needs bf16 on a CUDA device of capability 9.0 and torch 2.8 or later, not {dtype} on "
            f"{device} with torch {torch.__version__}: use backend: auto or reference"
        )
    if backend == "blocksparse" and not blocksparse_available(device, dtype):
        raise UserError(
            f"backend blocksparse needs fp32, fp16 or bf16 on a CUDA device (on a CPU, TRITON_INTERPRET=1 for tests), "
            f"not {dtype} on {device}: use backend: auto or reference"
        )
    return backend


@torch.compiler.assume_constant_result  # dynamo cannot trace the getter
def tf32_allowed() -> bool:
    """Whether fp32 products may round their operands, as torch's own would."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # from torch 2.9, where allow_tf32 raises once this was set
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


def takes_hopper(device: torch.device, dtype: torch.dtype, width: int, hidden: int) -> bool:
    """Whether the Hopper kernels compute experts of these sizes: see `why_portable`."""
    return why_portable(device, dtype, width, hidden) is None


def why_portable(
    device: torch.device, dtype: torch.dtype, width: int, hidden: int, capability: tuple[int, int] | None = None
) -> str | None:
    """The reason why the portable kernels compute experts of these sizes; None where the Hopper kernels do.

    FOUNDRY_MOE_KERNELS=portable in the environment selects the portable kernels.

    Args:
        width, hidden: D and F.
        capability: of a CUDA device that need not be present; default: the device's own.
    """
    if os.environ.get("FOUNDRY_MOE_KERNELS") == "portable":
        return "FOUNDRY_MOE_KERNELS=portable is set"
    if device.type != "cuda":
        return "there is no GPU"
    if other := _other_chip(device, capability):
        return f"the Hopper kernels need sm_90 with Triton 3.6, and this is {other}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the Hopper kernels need bf16 or fp16, and this is {str(dtype).removeprefix('torch.')}"
    if width * dtype.itemsize % 16 or hidden * dtype.itemsize % 16:
        return f"the Hopper kernels need widths that 8 divides, and these are d_model {width}, experts of {hidden}"
    return None


@functools.cache  # called in every call of a layer
def _other_chip(device: torch.device, capability: tuple[int, int] | None) -> str:
    """The chip and Triton, if the Hopper kernels do not run there."""
    major, minor = capability or torch.cuda.get_device_capability(device)
    return "" if capability_supported((major, minor)) else f"sm_{major}{minor} with Triton {triton.__version__}"


def describe_backend(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    width: int,
    hidden: int | tuple[int, ...],
    capability: tuple[int, int] | None = None,
) -> str:
    """The backend that computes experts with these settings, and the reason.

    Args:
        backend: as in `MoEConfig`.
        dtype: of matrix products.
        width, hidden: D and F; several F for experts of different widths.
        capability: of a CUDA device that need not be present; default: the device's own.

    Raises:
        ValueError: the requested backend cannot run there, or Triton compiles no matrix product for the device, which
            gates need too.
    """
    if device.type == "cuda":
        major, minor = capability or torch.cuda.get_device_capability(device)
        if not products_compile((major, minor)):
            raise UserError(
                f"Triton {triton.__version__} compiles no matrix products for this GPU (sm_{major}{minor}): use the "
                "modern stack (uv pip install --override requirements/modern.txt '.[foundry]')"
            )
    chosen = choose_backend(backend, device, dtype, capability)
    name = str(dtype).removeprefix("torch.")
    if chosen == "blocksparse":
        widths = (width, *(hidden if isinstance(hidden, tuple) else (hidden,)))
        odd = sorted({w for w in widths if w % ALIGN})
        padded = f"; {', '.join(map(str, odd))} padded to multiples of {ALIGN}, by a copy of the weights per pass"
        padded = padded if odd else ""
        if isinstance(hidden, tuple):
            return f"{_PORTABLE}: the Hopper kernels need experts of one width{padded}"
        reason = why_portable(device, dtype, width + -width % ALIGN, hidden + -hidden % ALIGN, capability)
        if reason is None:
            return f"{_HOPPER}: sm_90, Triton {triton.__version__}, {name}{padded}"
        return f"{_PORTABLE}: {reason}{padded}"
    if backend != "auto":
        return f"{chosen}, as backend ({backend}) requires"
    if device.type != "cuda":
        return "reference, plain torch, one expert after another: there is no GPU"
    return f"reference, plain torch, one expert after another: kernels compute fp32, fp16 and bf16, and this is {name}"
