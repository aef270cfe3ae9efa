"""Runs stk's own tests on the block-sparse products of this package.

    python scripts/stk_tests.py FOLDER [PYTEST ARGUMENTS]

FOLDER holds a copy of stk (github.com/stanford-futuredata/stk). Its matrix, conversions and tests are used as they are;
only `stk.backend.sputnik`, where its operations call their kernels, is replaced. The fields of its `Matrix` are those
of ours, one for one. Without a GPU the tests run on the CPU, in Triton's interpreter with TRITON_INTERPRET=1 (bf16 in
plain torch). Needs absl-py.
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
        return sdd(a, b, _matrix(data.to(a.dtype), tables)).values

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


def main(folder: str, *arguments: str) -> int:
    """Runs the tests; the exit code is pytest's."""
    root = Path(folder).resolve()
    sys.path.insert(0, str(root))
    sys.modules["stk.backend.sputnik"] = Backend("stk.backend.sputnik")
    import stk.backend

    stk.backend.sputnik = sys.modules["stk.backend.sputnik"]
    words = [str(root / "stk"), "-o", "python_files=*_test.py", "-p", "no:cacheprovider", "--rootdir", str(root)]
    return pytest.main([*words, *arguments], plugins=[Plugin()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", help="a folder with stk's source")
    known, rest = parser.parse_known_args()
    sys.exit(main(known.folder, *rest))
