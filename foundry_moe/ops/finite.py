"""Which of many tensors hold values that are not finite, without a wait for the device and without reading all.

Shapes: N tensors; R rows and C columns of a tensor, M rows of each matrix in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from foundry_moe_kernels import finite as kernels
from torch import Tensor

_Entry = tuple[int, int, int, int]


class NonfiniteSearch:
    """A search among tensors whose number, shapes and dtypes stay the same; their addresses may change.

    Args:
        lines: of each matrix only the first column and the first row are read. In a product's result that is enough:
            a row of an operand that holds NaN or infinity makes its whole row of the result so, and a column its
            whole column. False reads all.
    """

    def __init__(self, *, lines: bool) -> None:
        self._lines = lines
        self._tables: dict[torch.dtype, tuple[list[_Entry], list[int], Tensor, Tensor]] = {}

    def __call__(self, tensors: Sequence[Tensor], bad_N: Tensor, only_if: Tensor | None = None) -> None:
        """Sets bad_N[n] (uint8, zero before) where tensor n holds NaN or infinity.

        Args:
            tensors: of a floating dtype, on bad_N's device; empty ones are finite.
            only_if: uint8 of one element on that device; where it is 0 no tensor is looked at.
        """
        by_dtype: dict[torch.dtype, tuple[list[_Entry], list[int]]] = {}
        for n, tensor in enumerate(tensors):
            if not tensor.numel():
                continue
            if not (tensor.is_cuda and tensor.dtype in kernels.DTYPES and tensor.is_contiguous()):
                _search_plainly(tensor, bad_N[n], only_if, self._lines)
                continue
            entries, where = by_dtype.setdefault(tensor.dtype, ([], []))
            entries.append((tensor.data_ptr(), *_sizes(tensor, self._lines)))
            where.append(n)
        for dtype, (entries, where) in by_dtype.items():
            table_N4, where_N = self._table(dtype, entries, where, bad_N.device)
            most = max(rows + rows // in_matrix * columns for _, rows, in_matrix, columns in entries)
            kernels.nonfinite(table_N4, where_N, bad_N, only_if, dtype, most)

    def _table(
        self, dtype: torch.dtype, entries: list[_Entry], where: list[int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Both on the device: those of the last call where nothing has moved since."""
        found = self._tables.get(dtype)
        if found is None or found[0] != entries or found[1] != where:
            table_N4, where_N = (
                torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
                for numbers in (entries, where)
            )
            found = self._tables[dtype] = (entries, where, table_N4, where_N)
        return found[2], found[3]


def _sizes(tensor: Tensor, lines: bool) -> tuple[int, int, int]:
    """R, M and C."""
    if not lines or tensor.ndim < 2:
        return 1, 1, tensor.numel()
    return tensor.numel() // tensor.shape[-1], tensor.shape[-2], tensor.shape[-1]


def _search_plainly(tensor: Tensor, bad: Tensor, only_if: Tensor | None, lines: bool) -> None:
    """One tensor in plain torch. On a CPU `only_if` is read; on a GPU the result is masked by it."""
    if only_if is not None and not only_if.is_cuda and not only_if.item():
        return
    in_lines = lines and tensor.ndim > 1
    for part in (tensor[..., 0], tensor[..., 0, :]) if in_lines else (tensor,):
        found = torch.isfinite(part).all().logical_not().to(bad.device, torch.uint8, non_blocking=True)
        bad.bitwise_or_(found if only_if is None else found & only_if.squeeze())
