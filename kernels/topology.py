"""Block-sparse topology of a dMoE layer, built on the device from tokens per expert without a host synchronisation.

Hybrid blocked CSR-COO (Gale et al. 2022, MegaBlocks, section 5.1): row offsets and column indices, the row index of
every block beside them, and a secondary index that lists the blocks column by column, so that a transposed product
walks the same values. Values are never transposed or copied.

Rows are not padded. Block row m covers the dense rows [row_starts[m], row_starts[m] + row_sizes[m]), at most B of
them and fewer at an expert's end; block column n covers the columns [column_starts[n], + column_sizes[n]). The values
of a block row lie row by row, its blocks side by side: element (i, j) of block z is at
`value_offsets[z] + i * strides[row] + j`. For experts of one width F that is the plain row-major matrix [R, F].

Shapes: R rows, E experts, B block, M block rows at most, N block columns, Z blocks at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import launch
from foundry_moe_kernels.sizes import cdiv, next_power_of_2
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Topology:
    """int32 index tensors unless said otherwise. Past the blocks in use, sizes are 0 and the rest is undefined."""

    block: int
    num_rows: int
    num_columns: int  # dense columns of all experts
    max_columns: int  # of the widest expert
    row_starts_M: Tensor
    row_sizes_M: Tensor
    strides_M: Tensor
    row_offsets_M1: Tensor
    column_starts_N: Tensor
    column_sizes_N: Tensor
    column_experts_N: Tensor
    column_locals_N: Tensor  # first column within its expert
    column_offsets_N1: Tensor  # CSR offsets of the secondary index
    columns_Z: Tensor
    rows_Z: Tensor
    transposed_Z: Tensor  # blocks in column order
    value_offsets_Z: Tensor  # int64
    row_experts_M: Tensor
    num_values: int  # elements that hold any load
    uniform: bool  # experts of one width: values are a matrix [R, F]

    @property
    def block_rows(self) -> int:
        return self.row_starts_M.shape[0]

    @property
    def block_columns(self) -> int:
        return self.column_starts_N.shape[0]


def max_block_rows(num_rows: int, num_experts: int, block: int) -> int:
    """Most block rows that any load needs: every expert may end in a partial block."""
    return num_rows // block + min(num_experts, num_rows)


def _check(tokens_per_expert_E: Tensor, num_rows: int, widths: list[int], block: int, debug: bool) -> None:
    experts = tokens_per_expert_E.shape[0] if tokens_per_expert_E.dim() == 1 else -1
    if experts != len(widths) or tokens_per_expert_E.is_floating_point():
        raise ValueError(
            f"tokens_per_expert must be integers of shape [{len(widths)}] (one width each), not "
            f"{tokens_per_expert_E.dtype} {tuple(tokens_per_expert_E.shape)}"
        )
    if block < 16 or block & (block - 1):
        raise ValueError(f"block ({block}) must be a power of two, 16 or more")
    if any(width < 1 for width in widths):
        raise ValueError(f"every expert's width must be positive: {widths}")
    if debug:
        loads = tokens_per_expert_E.tolist()
        if min(loads, default=0) < 0 or sum(loads) > num_rows:
            raise ValueError(f"tokens_per_expert {loads} must be >= 0 and add up to at most num_rows ({num_rows})")


def build_topology(
    tokens_per_expert_E: Tensor, num_rows: int, widths: list[int] | tuple[int, ...], block: int, *, debug: bool = False
) -> Topology:
    """The topology of x·W1ᵀ: expert e's rows meet expert e's columns.

    Args:
        tokens_per_expert_E: integers [E] on any device.
        num_rows: R, rows allocated; the loads may add up to less.
        widths: columns of each expert (equal or not, multiples of the block or not).
        block: B, a power of two.
        debug: also check the loads' contents (reads the device).

    Raises:
        ValueError: shapes or dtypes that do not fit, a block that is no power of two, with `debug` the loads.
    """
    _check(tokens_per_expert_E, num_rows, list(widths), block, debug)
    device = tokens_per_expert_E.device
    experts = len(widths)
    most_rows = max_block_rows(num_rows, experts, block)
    blocks_wide = [-(-width // block) for width in widths]

    def table(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    # Block columns: known on the host.
    width_E, wide_E = table(list(widths)), table(blocks_wide)
    first_column = [sum(blocks_wide[:e]) for e in range(experts)]
    starts, sizes = [], []
    for e, width in enumerate(widths):
        for j in range(blocks_wide[e]):
            starts.append(sum(widths[:e]) + j * block)
            sizes.append(min(block, width - j * block))
    column_expert_N = table([e for e in range(experts) for _ in range(blocks_wide[e])])
    column_local_N = table([j for e in range(experts) for j in range(blocks_wide[e])])

    # Block rows: as many for each expert as its load needs.
    load_E = tokens_per_expert_E.long()
    end_E = load_E.cumsum(0)
    tall_E = (load_E + block - 1) // block
    tall_end_E = tall_E.cumsum(0)
    index_M = torch.arange(most_rows, device=device)
    used_M = index_M < tall_end_E[-1]
    expert_M = torch.searchsorted(tall_end_E, index_M, right=True).clamp(max=experts - 1)
    local_M = index_M - (tall_end_E - tall_E)[expert_M]
    start_M = (end_E - load_E)[expert_M] + local_M * block
    size_M = torch.where(used_M, (end_E[expert_M] - start_M).clamp(min=0, max=block), 0)
    per_row_M = torch.where(used_M, wide_E[expert_M], 0)
    row_offsets_M1 = torch.cat([per_row_M.new_zeros(1), per_row_M.cumsum(0)])

    # Blocks in row order, then the secondary index.
    most_blocks = most_rows * max(blocks_wide)
    index_Z = torch.arange(most_blocks, device=device)
    row_Z = torch.searchsorted(row_offsets_M1[1:], index_Z, right=True).clamp(max=most_rows - 1)
    expert_Z = expert_M[row_Z]
    local_Z = index_Z - row_offsets_M1[row_Z]
    value_end_E = (load_E * width_E).cumsum(0)
    value_start_E = value_end_E - load_E * width_E
    value_Z = value_start_E[expert_Z] + local_M[row_Z] * block * width_E[expert_Z] + local_Z * block
    per_column_N = tall_E[column_expert_N]
    column_offsets_N1 = torch.cat([per_column_N.new_zeros(1), per_column_N.cumsum(0)])
    column_of_Z = torch.searchsorted(column_offsets_N1[1:], index_Z, right=True).clamp(max=len(starts) - 1)
    expert_t_Z = column_expert_N[column_of_Z]
    row_t_Z = (tall_end_E - tall_E)[expert_t_Z] + index_Z - column_offsets_N1[column_of_Z]
    transposed_Z = row_offsets_M1[row_t_Z.clamp(max=most_rows - 1)] + column_local_N[column_of_Z]
    return Topology(
        block=block,
        num_rows=num_rows,
        num_columns=sum(widths),
        max_columns=max(widths),
        row_starts_M=start_M.int(),
        row_sizes_M=size_M.int(),
        strides_M=width_E[expert_M].int(),
        row_offsets_M1=row_offsets_M1.int(),
        column_starts_N=table(starts, torch.int32),
        column_sizes_N=table(sizes, torch.int32),
        column_experts_N=column_expert_N.int(),
        column_locals_N=(column_local_N * block).int(),
        column_offsets_N1=column_offsets_N1.int(),
        columns_Z=(table(first_column)[expert_Z] + local_Z).int(),
        rows_Z=row_Z.int(),
        transposed_Z=transposed_Z.int(),
        value_offsets_Z=value_Z,
        row_experts_M=expert_M.int(),
        num_values=num_rows * max(widths),
        uniform=len(set(widths)) == 1,
    )


@triton.jit
def _block_rows_kernel(
    offsets_ptr, entries_ptr, count_ptr, order_ptr, num_experts, most,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, EXPERTS)
    end = tl.load(offsets_ptr + e, mask=e < num_experts, other=0)
    start = tl.load(offsets_ptr + e - 1, mask=(e > 0) & (e < num_experts), other=0)
    size = tl.where(e < num_experts, end - start, -1)
    tall = (tl.maximum(size, 0) + BLOCK - 1) // BLOCK
    tall_end = tl.cumsum(tall, axis=0)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, tl.sum(tall))
    m = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    first = tall_end - tall
    mine = (m[:, None] >= first[None, :]) & (m[:, None] < tall_end[None, :])
    entry = entries_ptr + m * 4
    keep = m < most
    tl.store(entry, tl.sum(tl.where(mine, e[None, :], 0), axis=1), mask=keep)
    tl.store(entry + 1, tl.sum(tl.where(mine, start[None, :], 0), axis=1), mask=keep)
    tl.store(entry + 2, tl.sum(tl.where(mine, size[None, :], 0), axis=1), mask=keep)
    tl.store(entry + 3, tl.sum(tl.where(mine, (m[:, None] - first[None, :]) * BLOCK, 0), axis=1), mask=keep)
    # m as experts now: how many have more rows, or as many and a lower number
    my_end = tl.load(offsets_ptr + m, mask=m < num_experts, other=0)
    my_size = my_end - tl.load(offsets_ptr + m - 1, mask=(m > 0) & (m < num_experts), other=0)
    ahead = (size[None, :] > my_size[:, None]) | ((size[None, :] == my_size[:, None]) & (e[None, :] < m[:, None]))
    tl.store(order_ptr + tl.sum(ahead.to(tl.int32), axis=1), m, mask=m < num_experts)


def split_block_rows(packed: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of what `block_row_table` gives.

    Returns:
        int32 [M, 4]: expert, first row of the expert, rows of the expert, row within the expert; int32 [1], the
        number of block rows in use; int32 [E], the experts from the most rows to the fewest.
    """
    end = packed.shape[0] - experts - 1
    return packed[:end].view(-1, 4), packed[end + experts :], packed[end : end + experts]


def packed_block_rows(num_rows: int, experts: int, block: int) -> int:
    """Integers of what `block_row_table` gives."""
    return 4 * max(max_block_rows(num_rows, experts, block), 1) + experts + 1


def block_row_table(offsets_E: Tensor, num_rows: int, block: int) -> Tensor:
    """The block rows alone, in one launch: what the fused kernels of a layer with experts of one width need.

    Returns:
        int32, one tensor for one table: see `split_block_rows`.
    """
    experts = offsets_E.shape[0]
    most = max_block_rows(num_rows, experts, block)
    size = packed_block_rows(num_rows, experts, block)
    packed = torch.empty(size, dtype=torch.int32, device=offsets_E.device)
    entries_M4, count, order_E = split_block_rows(packed, experts)
    chunk = 32
    launch(
        _block_rows_kernel, (cdiv(max(most, experts, 1), chunk),),
        offsets_E, entries_M4, count, order_E, experts, most,
        EXPERTS=next_power_of_2(experts), BLOCK=block, CHUNK=chunk,
    )  # fmt: skip
    return packed
