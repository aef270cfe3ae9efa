"""Launches Triton kernels; repeated launches take less host time than with Triton's own launch.

Triton inspects every argument to find the kernel compiled for its kind, and calls launch hooks; small
layers become host-bound. Here a kernel that has run once with arguments of a kind is called directly: the key
distinguishes arguments at least as finely as Triton 3.6 does. Other versions, the interpreter and launch hooks
(profilers) use Triton's launch; FOUNDRY_MOE_DIRECT_LAUNCH=0 does so always.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU
_DIRECT = (
    triton.__version__.startswith("3.6.") and not INTERPRETED and os.environ.get("FOUNDRY_MOE_DIRECT_LAUNCH") != "0"
)
if _DIRECT:
    from triton import knobs
_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


# Triton's own functions look for constants to unwrap first: 0.4 ms of a layer's step under cProfile, 41 calls
def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, for n from 1 up."""
    return 1 << (n - 1).bit_length()


def divisor(*numbers: int) -> int:
    """The largest power of two, at most 8, that divides all: the number of 16-bit elements that are moved at a time.

    Triton itself specialises only for multiples of 16, and otherwise moves single elements. Kernels take this as
    ALIGN, for `multiple` and `load_multiple`. A number that may be 1, which Triton makes a constant, must be among
    these.
    """
    return min([8, *(number & -number for number in numbers if number)])


@triton.jit
def multiple(number, ALIGN: tl.constexpr):
    """The number, which ALIGN divides; stated by arithmetic, since the compiler ignores hints about arguments."""
    return number // ALIGN * ALIGN if ALIGN > 1 else number


@triton.jit
def load_multiple(pointer, ALIGN: tl.constexpr):
    """A number in memory that ALIGN divides."""
    number = tl.load(pointer)
    return tl.multiple_of(number, ALIGN)


def _key(kernel: Any, device: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """The key of a compiled kernel: dtypes, alignment, whether a number is 1 or divisible by 16, a descriptor's box.

    One flat tuple, which takes half the time of one with a tuple for each argument. The first entry of an argument
    gives its length, so that different arguments have different keys.
    """
    entries = [id(kernel), device, len(constants), *constants, *constants.values()]
    for argument in arguments:
        if isinstance(argument, Tensor):
            entries += argument.dtype, argument.data_ptr() % 16 == 0
        elif type(argument) is int:
            entries += argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
        elif argument is None or type(argument) is float:
            entries.append(type(argument))
        else:
            entries += type(argument), argument.base.dtype, tuple(argument.block_shape), argument.padding
    return tuple(entries)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """`kernel[grid](*arguments, **constants)`.

    Args:
        arguments: all except constants, in the kernel's order: tensors, numbers, None, tensor descriptors. A
            descriptor's layout must follow from its dtype and box.
        constants: the kernel's constants and options of the launch.
    """
    if not _DIRECT or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
        kernel[grid](*arguments, **constants)
        return
    device = torch.cuda.current_device()
    key = _key(kernel, device, arguments, constants)
    found = _known.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **constants)
        names = kernel.arg_names[len(arguments) :]
        if hasattr(compiled, "function") and all(name in constants for name in names):
            _known[key] = compiled, tuple(constants[name] for name in names)
        return
    compiled, values = found
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(
        x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *values
    )  # fmt: skip
