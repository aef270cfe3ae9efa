"""The block-sparse matrix: values, index tables, conversions.

Shapes: a matrix [R, C] with Z blocks of B x B, M = R / B block rows, N = C / B block columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from foundry_moe_kernels.block_products import BlockIndex
from torch import Tensor

BLOCKS = (16, 32, 64, 128)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int16, torch.int32, torch.int64)


def _check_tensor(name: str, tensor: Tensor, *dims: str, dtypes: tuple[torch.dtype, ...] | None = None) -> None:
    form = f"[{', '.join(dims)}]"
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor {form}, not {type(tensor).__name__}")
    if tensor.dim() != len(dims):
        raise ValueError(f"{name} is {list(tensor.shape)}: it must be {form}")
    if dtypes is not None and tensor.dtype not in dtypes:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}: it must be one of {kinds}")


def _check_block(block: int, *sizes: int) -> None:
    if block not in BLOCKS or not isinstance(block, int):
        raise ValueError(f"block ({block}) must be one of {', '.join(map(str, BLOCKS))}")
    for size in sizes:
        if size % block or size < 1:
            raise ValueError(f"block ({block}) must divide the matrix's size ({' x '.join(map(str, sizes))}): pad it")


def _offsets(sorted_Z: Tensor, count: int) -> Tensor:
    """int32 [count + 1]: where each number's run begins."""
    return torch.searchsorted(sorted_Z, torch.arange(count + 1, device=sorted_Z.device), out_int32=True)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A block-sparse matrix in the hybrid blocked CSR-COO format of MegaBlocks.

    Values that are not in a block are zeros. Block rows and columns may be empty. `values` may require a gradient.

    Attributes:
        values: [Z, B, B], fp32, fp16 or bf16 for kernels; block row by block row, in each by column.
        index: where they are, which matrices of one topology share.
        transposed: whether this is the transpose of the stored matrix, as `mT` gives it.
    """

    values: Tensor
    index: BlockIndex
    transposed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.index, BlockIndex):
            raise ValueError(f"index must be a BlockIndex, not {type(self.index).__name__}: see Matrix.from_mask")
        index, block = self.index, self.index.block
        _check_tensor("values", self.values, "blocks", "block", "block", dtypes=FLOATS)
        _check_block(block, *index.shape)
        shape = (index.blocks, block, block)
        if tuple(self.values.shape) != shape:
            raise ValueError(f"values are {list(self.values.shape)}, not {list(shape)}: [blocks, block, block]")
        for name, dim, dtypes in (
            ("rows_Z", "blocks", INTEGERS[:2]),
            ("columns_Z", "blocks", INTEGERS[:2]),
            ("transposed_Z", "blocks", INTEGERS[1:]),
            ("transposed_rows_Z", "blocks", INTEGERS[:2]),
            ("row_offsets_M1", "block rows + 1", INTEGERS[1:]),
            ("column_offsets_N1", "block columns + 1", INTEGERS[1:]),
        ):
            table = getattr(index, name)
            _check_tensor(name, table, dim, dtypes=dtypes)
            if not table.is_contiguous():
                raise ValueError(f"{name} is not contiguous: kernels read it as it lies; call contiguous() on it")
            if table.device != self.values.device:
                raise ValueError(f"{name} is on {table.device}, the values are on {self.values.device}")
            if name.endswith("_Z") and table.shape[0] != index.blocks:
                raise ValueError(f"{name} has {table.shape[0]} entries for {index.blocks} blocks")

    @classmethod
    def from_csr(cls, values: Tensor, row_offsets: Tensor, column_indices: Tensor, columns: int) -> Matrix:
        """The matrix of blocked CSR tables; the other tables are made on their device, without a wait.

        Args:
            values: [Z, B, B].
            row_offsets: [M + 1], the first block of each block row, and Z.
            column_indices: [Z], the block column of each block, ascending in each row.
            columns: C, dense columns.
        """
        _check_tensor("values", values, "blocks", "block", "block", dtypes=FLOATS)
        _check_tensor("row_offsets", row_offsets, "block rows + 1", dtypes=INTEGERS)
        _check_tensor("column_indices", column_indices, "blocks", dtypes=INTEGERS)
        block = values.shape[-1]
        _check_block(block, columns)
        if len(column_indices) != len(values):
            raise ValueError(f"column_indices has {len(column_indices)} entries for {len(values)} blocks of values")
        row_offsets, column_indices = row_offsets.int().contiguous(), column_indices.int().contiguous()
        z = torch.arange(column_indices.shape[0], device=column_indices.device)
        rows = torch.searchsorted(row_offsets[1:].long(), z, right=True, out_int32=True)
        ordered, order = torch.sort(column_indices, stable=True)
        offsets = _offsets(ordered, columns // block)
        return cls(values, BlockIndex(block, rows, column_indices, row_offsets, order.int(), rows[order], offsets))

    @classmethod
    def from_mask(cls, mask_MN: Tensor, values: Tensor | None = None, *, block: int, dtype=torch.float32) -> Matrix:
        """The matrix whose blocks are where the mask is not zero. Waits for the device, which counts them.

        Args:
            mask_MN: [M, N], one entry for each block.
            values: [Z, B, B] (default: zeros of `dtype`).
        """
        _check_block(block)
        _check_tensor("the mask", mask_MN, "block rows", "block columns")
        rows, columns = (mask_MN != 0).nonzero(as_tuple=True)
        if values is None:
            values = torch.zeros(len(rows), block, block, dtype=dtype, device=mask_MN.device)
        _check_tensor("values", values, "blocks", "block", "block", dtypes=FLOATS)
        if values.shape[1:] != (block, block):
            raise ValueError(f"values are {list(values.shape)}, and block is {block}: [blocks, block, block]")
        if len(values) != len(rows):
            raise ValueError(f"values are {list(values.shape)}, and the mask has {len(rows)} blocks")
        return cls.from_csr(values, _offsets(rows, mask_MN.shape[0]), columns, mask_MN.shape[1] * block)

    @classmethod
    def from_dense(cls, dense_RC: Tensor, *, block: int, mask_MN: Tensor | None = None) -> Matrix:
        """The blocks of a dense matrix where a mask [M, N] is not zero (default: those that have a value).

        Its values are a copy, through which gradients reach the dense matrix.
        """
        _check_tensor("the dense matrix", dense_RC, "rows", "columns", dtypes=FLOATS)
        _check_block(block, *dense_RC.shape)
        if mask_MN is not None:
            _check_tensor("the mask", mask_MN, "block rows", "block columns")
        blocks = dense_RC.unflatten(0, (-1, block)).unflatten(2, (-1, block)).transpose(1, 2)  # [M, N, B, B]
        mask_MN = blocks.ne(0).any(-1).any(-1) if mask_MN is None else mask_MN != 0
        if mask_MN.shape != blocks.shape[:2]:
            raise ValueError(f"the mask is {list(mask_MN.shape)} for {list(blocks.shape[:2])} blocks of {block}")
        return cls.from_mask(mask_MN, blocks[mask_MN], block=block)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.index.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def block(self) -> int:
        return self.index.block

    @property
    def mT(self) -> Matrix:  # as of torch.Tensor
        """The transpose, of the same values and tables."""
        return replace(self, transposed=not self.transposed)

    def with_values(self, values: Tensor) -> Matrix:
        """Other values at the same blocks."""
        return replace(self, values=values)

    def to_dense(self) -> Tensor:
        """[R, C], with zeros where there is no block."""
        (rows, columns), block = self.index.shape, self.block
        blocks = self.values.new_zeros(rows // block, columns // block, block, block)
        blocks = blocks.index_put((self.index.rows_Z.long(), self.index.columns_Z.long()), self.values)
        dense = blocks.transpose(1, 2).reshape(rows, columns)
        return dense.mT if self.transposed else dense

    def check(self) -> Matrix:
        """The matrix itself, after a look at every index, for which the host waits.

        Raises:
            ValueError: an index is out of range, or tables contradict each other.
        """
        index, block = self.index, self.block
        rows, columns = (size // block for size in index.shape)
        place, order = index.rows_Z.long() * columns + index.columns_Z.long(), index.transposed_Z.long()
        z = torch.arange(index.blocks, device=place.device)
        for name, table, count in (("rows_Z", index.rows_Z, rows), ("columns_Z", index.columns_Z, columns)):
            if ((table < 0) | (table >= count)).any():
                raise ValueError(f"{name} has an index outside of 0 to {count - 1}")
        if (place[1:] <= place[:-1]).any():
            raise ValueError("blocks must be in ascending order of row and column, each once")
        if not torch.equal(order.sort()[0], z):
            raise ValueError(f"transposed_Z must have each of the {index.blocks} blocks once")
        if not torch.equal(index.transposed_rows_Z.int(), index.rows_Z.int()[order]):
            raise ValueError("transposed_rows_Z and the index tables contradict each other")
        for name, found, sorted_Z, count in (
            ("row_offsets_M1", index.row_offsets_M1, index.rows_Z, rows),
            ("column_offsets_N1", index.column_offsets_N1, index.columns_Z[order], columns),
        ):
            if (sorted_Z[1:] < sorted_Z[:-1]).any() or not torch.equal(found.int(), _offsets(sorted_Z.int(), count)):
                raise ValueError(f"{name} and the index tables contradict each other")
        return self
