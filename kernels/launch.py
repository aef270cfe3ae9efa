"""Launches Triton kernels; repeated launches take less host time than with Triton's own launch.

Triton inspects every argument to find the kernel compiled for its kind, and calls launch hooks; small
layers become host-bound. Here a kernel that has run once with arguments of a kind is called directly: the key
distinguishes arguments at least as finely as Triton 3.6 does. Other versions, the interpreter and launch hooks
(profilers) use Triton's launch; FOUNDRY_MOE_DIRECT_LAUNCH=0 does so always.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
_known: dict[tuple[Any, ...], _Compiled] = {}
_compiling = 0  # the thread in `compile_only`
_compiled_first: set[str] = set()


def compiles_ahead() -> bool:
    """Whether kernels may be compiled before they are needed: FOUNDRY_MOE_COMPILE_AHEAD=0 turns this off."""
    return os.environ.get("FOUNDRY_MOE_COMPILE_AHEAD") != "0" and not torch.cuda.is_current_stream_capturing()


def processes() -> int:
    """Of this node."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def compile_first(name: str, run: Callable[[], Any]) -> None:
    """Compiles the kernels that `run` launches in `compile_only`, the first time of this name in this process.

    Args:
        run: of functions that only launch kernels: their results are undefined.
    """
    if name in _compiled_first:
        return
    _compiled_first.add(name)
    if _DIRECT and not _compiling and compiles_ahead():
        with compile_only():
            run()


@contextmanager
def compile_only() -> Iterator[bool]:
    """Launches of this thread compile their kernels, several at a time, and run none; all are loaded at the end.

    Yields False, and changes nothing, where Triton is not the version that launches are made for.
    """
    global _compiling
    if not _DIRECT:
        yield False
        return

    def compile_and_load(compile_one: Callable[[], Any], device: int) -> Any:
        torch.cuda.set_device(device)
        compiled = compile_one()
        compiled._init_handles()  # has a C compiler build what passes its arguments, which takes 0.3 s
        return compiled

    # this process's share of the cores, 8 at most: one H200 was no faster with 12
    threads = max(1, min(8, len(os.sched_getaffinity(0)) // processes()))
    # a kernel that fails is compiled again by its launch, which raises the error, if it is launched at all
    with ThreadPoolExecutor(threads) as executor, triton.AsyncCompileMode(executor, ignore_errors=True) as mode:
        submit = mode.submit
        mode.submit = lambda key, compile_one, *finalize: submit(
            key, functools.partial(compile_and_load, compile_one, torch.cuda.current_device()), *finalize
        )
        _compiling = threading.get_ident()
        try:
            yield True
        finally:
            _compiling = 0


# Triton's own functions look for constants to unwrap first: 0.4 ms of a layer's step under cProfile, 41 calls
def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@functools.lru_cache(maxsize=4096)  # a hit is no call of Python's
def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, for n from 1 up."""
    return 1 << (n - 1).bit_length()


@functools.lru_cache(maxsize=4096)
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


# A tensor map that is not built yet: what builds Triton's descriptor from the rest; base, shape, strides and box
TensorMap = tuple[Callable[..., Any], Tensor, Sequence[int], Sequence[int], tuple[int, ...]]


class _Compiled:
    """A compiled kernel, and what its C function needs beside stream, grid and arguments.

    Triton's own way there takes a call for each argument where one of them is a descriptor.
    """

    def __init__(self, kernel: Any, compiled: Any, arguments: int, constants: dict[str, Any]) -> None:
        names = kernel.arg_names[arguments:]
        run = compiled.run
        inner, kept = run.launch, {}
        if cells := getattr(inner, "__closure__", None):  # it builds tensor maps; else this is the C function itself
            kept = dict(zip(inner.__code__.co_freevars, [cell.cell_contents for cell in cells], strict=True))
        maps = kept.get("tensordesc_meta") or ()
        self.usable = (
            all(name in constants for name in names)
            and not run.global_scratch_size
            and not run.profile_scratch_size
            and all(meta and not meta["fp4_padded"] for meta in maps)
        )
        self.launch = kept.get("launcher", inner)
        scratch = hooks = (None, None)
        self.head = (
            compiled.function, run.launch_cooperative_grid, run.launch_pdl, *scratch, compiled.packed_metadata, None,
            *hooks,
        )  # fmt: skip
        self.constants = tuple(constants[name] for name in names) if self.usable else ()
        self.maps = [
            (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"])
            for meta in (maps if self.usable else ())
        ]
        self.encode = triton.runtime.driver.active.utils.fill_tma_descriptor if self.maps else lambda *_: None


class _Thread(threading.local):
    """has_context: whether a CUDA context is sure to be current, which tensor maps need. A thread that has only taken
    cached memory, as autograd's may have, has none.
    """

    has_context = False


_thread = _Thread()


def _built(arguments: Sequence[Any]) -> list[Any]:
    """The arguments, with Triton's descriptors in the place of tensor maps."""
    return [a[0](*a[1:]) if type(a) is tuple else a for a in arguments]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """`kernel[grid](*arguments, **constants)`.

    Args:
        arguments: all except constants, in the kernel's order: tensors, numbers, None, tensor maps. A map's layout
            must follow from its dtype and box.
        constants: the kernel's constants and options of the launch.
    """
    if _compiling and _compiling == threading.get_ident():
        kernel.run(*_built(arguments), grid=grid, warmup=True, **constants)
        return
    if not _thread.has_context and torch.cuda.is_initialized():
        torch.cuda.mem_get_info()
        _thread.has_context = True
    if not _DIRECT or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
        kernel[grid](*_built(arguments), **constants)
        return
    device = torch._C._cuda_getDevice()  # of a process that has tensors on it, so that CUDA is initialised
    # The key of a compiled kernel: dtypes, alignment, whether a number is 1 or divisible by 16, a map's box. One flat
    # list without calls, which takes half the time of one with a tuple for each argument. The first entry of an
    # argument gives its length, and None ends the constants' names, so that different arguments have different keys.
    entries = [kernel.fn, device, *constants, None, *constants.values()]
    for argument in arguments:
        kind = type(argument)
        if kind is int:
            entries += argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
        elif argument is None or kind is float:
            entries += (kind,)
        elif kind is tuple:
            entries += kind, argument[1].dtype, argument[4]
        else:
            entries += argument.dtype, argument.data_ptr() % 16 == 0
    key = tuple(entries)
    try:
        found = _known[key]
    except KeyError:
        found = None
    if found is None:
        compiled = kernel[grid](*_built(arguments), **constants)
        if hasattr(compiled, "function"):
            made = _Compiled(kernel, compiled, len(arguments), constants)
            if made.usable:
                _known[key] = made
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    given = list(arguments)
    if found.maps:
        given, number = [], 0
        for argument in arguments:
            if type(argument) is tuple:
                _, base, shape, strides, _ = argument
                given += found.encode(base.data_ptr(), *found.maps[number], shape, strides, 0), *shape, *strides
                number += 1
            else:
                given += (argument,)
    found.launch(x, y, z, stream, *found.head, *given, *found.constants)
