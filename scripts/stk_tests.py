"""Runs stk's own tests, or MegaBlocks' tests of layers that use it, on the block-sparse products of this package.

    python scripts/stk_tests.py FOLDER [--megablocks FOLDER] [PYTEST ARGUMENTS]

FOLDER holds a copy of stk (github.com/stanford-futuredata/stk). Its matrix, conversions and tests are used as they are;
only `stk.backend.sputnik`, where its operations call their kernels, is replaced. The fields of its `Matrix` are those
of ours, one for one. Without a GPU the tests run on the CPU, in Triton's interpreter with TRITON_INTERPRET=1 (bf16 in
plain torch). Needs absl-py.

`--megablocks` names a copy of MegaBlocks (github.com/databricks/megablocks) and runs its tests of layers with sparse
products, dMoE and GLU, in place of stk's. MegaBlocks skips them with Triton 3.2 and newer: the tests read version 3.1.
Its own kernels, which need a GPU, move rows; its CUDA extension (sort, histogram, cumulative sum, topology) is replaced
by torch. Needs Composer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from foundry_moe_kernels.block_products import BlockIndex
from torch import Tensor

from foundry_moe.sparse import Matrix, dds, dsd, sdd


def _matrix(data: Tensor, tables: tuple[Tensor, ...], transposed: bool = False) -> Matrix:
    """Of stk's tables: offsets, row and column indices; offsets, row indices and blocks of the transpose."""
    offsets, rows, columns, offsets_t, rows_t, blocks_t = tables
    return Matrix(data, BlockIndex(data.shape[-1], rows, columns, offsets, blocks_t, rows_t, offsets_t), transposed)


class Backend(ModuleType):
    """`stk.backend.sputnik`: operations of a matrix's fields."""

    @staticmethod
    def sdd(a: Tensor, b: Tensor, shape: Any, data: Tensor, *tables: Tensor) -> Tensor:
        values = torch.empty_like(data, dtype=a.dtype, device=a.device)  # MegaBlocks' are on the meta device
        return sdd(a, b, _matrix(values, tables)).values

    @staticmethod
    def dsd(shape: Any, data: Tensor, *rest: Any) -> Tensor:
        *tables, transposed, b = rest
        return dsd(_matrix(data, tuple(tables), transposed), b)

    @staticmethod
    def dds(a: Tensor, shape: Any, data: Tensor, *rest: Any) -> Tensor:
        *tables, transposed = rest
        return dds(a, _matrix(data, tuple(tables), transposed))

    @staticmethod
    def row_indices(shape: Any, data: Tensor, offsets: Tensor, columns: Tensor) -> Tensor:
        rows = torch.arange(offsets.shape[0] - 1, dtype=columns.dtype, device=columns.device)
        return rows.repeat_interleave(offsets.diff().long())


class InPlace:
    """`stk.backend.triton_kernels`, which MegaBlocks' MLP calls with its own output in the backward pass."""

    @staticmethod
    def sdd(a: Tensor, b: Tensor, shape: Any, out: Tensor, offsets: Tensor, rows: Tensor, columns: Tensor) -> None:
        unread = offsets.new_zeros(shape[1] // out.shape[-1] + 1)
        out.copy_(Backend.sdd(a, b, shape, out, offsets, rows, columns, unread, rows, rows.int()))

    @staticmethod
    def dsd(*rest: Any) -> None:
        *operands, out = rest
        out.copy_(Backend.dsd(*operands))


class Extension(ModuleType):
    """`megablocks_ops` in torch."""

    @staticmethod
    def sort(x: Tensor, end_bit: int, out: Tensor, order: Tensor) -> None:
        values, indices = x.sort(stable=True)
        out.copy_(values)
        order.copy_(indices)

    @staticmethod
    def histogram(x: Tensor, bins: int) -> Tensor:
        return torch.bincount(x.flatten(), minlength=bins).int()

    @staticmethod
    def inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
        out.copy_(x.cumsum(dim))

    @staticmethod
    def indices(bins: Tensor, block: int, rows: int, columns: int, out: Tensor) -> None:
        first = torch.arange(rows, device=bins.device) * block
        experts = torch.searchsorted(bins.long(), first, right=True)
        out.copy_((experts[:, None] * columns + torch.arange(columns, device=bins.device)).flatten())


class OnCPU(ModuleType):
    """torch, whose device `cuda` is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(name: str) -> torch.device:
        return torch.device("cpu" if name == "cuda" else name)


class Plugin:
    @staticmethod
    def pytest_collection_modifyitems(items: list[Any]) -> None:
        if not torch.cuda.is_available():
            for item in items:
                item.module.torch = OnCPU("torch")


def _stk_tests(root: Path) -> list[str]:
    return [str(root / "stk"), "-o", "python_files=*_test.py", "--rootdir", str(root)]


def _megablocks_tests(root: Path) -> list[str]:
    import stk.backend.triton_kernels
    import triton

    stk.backend.triton_kernels.sdd, stk.backend.triton_kernels.dsd = InPlace.sdd, InPlace.dsd
    sys.modules["megablocks_ops"] = Extension("megablocks_ops")
    sys.path.insert(0, str(root))
    sys.modules["tests"] = ModuleType("tests")  # not the one of this project
    sys.modules["tests"].__path__ = [str(root / "tests")]
    triton.__version__ = "3.1.0"
    tests = [str(root / "tests" / "layers" / name) for name in ("dmoe_test.py", "glu_test.py")]
    return [*tests, "-k", "not grouped", "-o", "addopts=", "--rootdir", str(root)]


def main(folder: str, megablocks: str | None, arguments: list[str]) -> int:
    """Runs the tests; the exit code is pytest's."""
    root = Path(folder).resolve()
    sys.path.insert(0, str(root))
    sys.modules["stk.backend.sputnik"] = Backend("stk.backend.sputnik")
    import stk.backend

    stk.backend.sputnik = sys.modules["stk.backend.sputnik"]
    words = _megablocks_tests(Path(megablocks).resolve()) if megablocks else _stk_tests(root)
    return pytest.main([*words, "-p", "no:cacheprovider", *arguments], plugins=[Plugin()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", help="a folder with stk's source")
    parser.add_argument("--megablocks", metavar="FOLDER", help="a folder with MegaBlocks' source: its tests run")
    known, rest = parser.parse_known_args()
    if known.megablocks and not torch.cuda.is_available():
        parser.error("MegaBlocks' tests need a GPU: its kernels are tuned by timing them")
    sys.exit(main(known.folder, known.megablocks, rest))
