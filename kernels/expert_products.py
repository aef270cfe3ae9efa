"""The six products of a dMoE layer on Hopper, with their epilogues: one launch each. No autograd.

They take operands that `supported` accepts (in Triton's interpreter any dtype).

Shapes: R rows sorted by expert, E experts, D model width, F expert width, P planes (gate and up: 2, else 1).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from foundry_moe_kernels import descriptors, tuning
from foundry_moe_kernels.launch import cdiv, launch, next_power_of_2
from foundry_moe_kernels.pointwise import activate, activation_backward_
from foundry_moe_kernels.ragged_products import ragged_inner_kernel, ragged_rows_kernel
from foundry_moe_kernels.topology import BLOCK_ROWS, pack_rows, split_rows
from foundry_moe_kernels.tuning import Tile
from torch import Tensor

BLOCK, TALL = BLOCK_ROWS
WARPS = 8  # of a tile that is not specialised
# Rows that are not a multiple of a cache line (of 16-bit floats) take more of L2, so that tall tiles win: a layer of 60
# experts of 1092 rows, 2120 x 1000, takes 0.94 of the time (H200) and 0.88 (H100). Fewer rows were not measured
_LINE, _TALL_FROM = 64, 512
# Experts up to this width gather tokens in their first product: it then takes some 6 % longer for every width,
# while a copy of the rows takes as long for all (H200)
GATHER_UP_TO = 1024
_GATHER_WIDTHS = range(256, 4097, 256)


@dataclass(frozen=True, kw_only=True)
class RaggedRows:
    """Rows of every expert and the block rows that cover them. Built by `ragged_rows`.

    blocks: for BLOCK and TALL rows, entries_M4 and int32 [3]: the number of block rows and two counters of tiles, so
        that products of the same rows must run one after another on one stream.
    """

    offsets_E: Tensor
    blocks: dict[int, tuple[Tensor, Tensor]]
    order_E: Tensor
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Rows [R, D] that are not copied: row r is token source_R[r] // choices.

    source_R: int32; -1 for rows past the experts' end.
    """

    x_TD: Tensor
    source_R: Tensor
    choices: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.source_R.shape[0], self.x_TD.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.x_TD.dtype

    @property
    def device(self) -> torch.device:
        return self.x_TD.device


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A product of rows [R, L] with an expert's matrix of few inputs, which is added to another product.

    b: [P, E, N, L] for a transposed product, with one plane for each of a GLU, else [1, E, L, N].
    """

    a_RL: Tensor
    b: Tensor


def gathers(x_TD: Tensor, hidden: int) -> bool:
    """Whether products of experts of this width can gather these tokens themselves, and gain by it."""
    return (
        hidden <= GATHER_UP_TO
        and x_TD.shape[1] in _GATHER_WIDTHS
        and supported(x_TD)
        and descriptors.specialised_supported(x_TD.device)
    )


def copies(tokens: Tokens) -> bool:
    """Whether a product can copy these tokens meanwhile: Triton needs boxes, here a whole row, of powers of two."""
    return next_power_of_2(tokens.shape[1]) == tokens.shape[1]


def ragged_rows(offsets_E: Tensor, num_rows: int, packed: Tensor | None = None) -> RaggedRows:
    """The block rows of experts whose rows end at `offsets_E` (int32 [E]); packed: from `pack_rows`, if made before."""
    if packed is None:
        packed = pack_rows(offsets_E, num_rows)
    short, tall, order_E = split_rows(packed, num_rows, offsets_E.shape[0])
    return RaggedRows(offsets_E=offsets_E, blocks={BLOCK: short, TALL: tall}, order_E=order_E, num_rows=num_rows)


def supported(*tensors: Tensor) -> bool:
    """Whether the Hopper kernels take these operands: 16-bit floats on Hopper, rows of 16 bytes, no empty dimension."""
    return (
        all(t.dtype in (torch.bfloat16, torch.float16) and t.numel() > 0 for t in tensors)
        and all(descriptors.device_supported(t.device) for t in tensors)
        and descriptors.supported(*tensors)
    )


def _programs(device: torch.device, tiles: int) -> int:
    return max(min(tuning.num_multiprocessors(device), tiles), 1)


@functools.cache
def _tall(tile: Tile) -> Tile:
    """The tile with TALL rows, and so with what fits beside them."""
    return dataclasses.replace(tile, bm=TALL, bn=256, bk=64, stages=3, split=max(tile.split, 2))


def _pick(product: str, rows: RaggedRows, n: int, k: int) -> Tile:
    per_expert = tuning.per_expert(rows.num_rows, rows.offsets_E.shape[0])
    tile = tuning.tile_of(product, per_expert, n, k)
    return _tall(tile) if (n % _LINE or k % _LINE) and per_expert >= _TALL_FROM else tile


def _runnable(tile: Tile, device: torch.device, *, tokens: bool = False) -> Tile:
    """The tile, or its counterpart where Triton, the device, its shared memory or the product rules the tile out.

    With tokens, a specialised tile of BLOCK rows, the only kind that supports them.
    """
    special = tile.specialised and descriptors.specialised_supported(device)
    if tokens and not (special and tile.bm == BLOCK and tile.bk == 64):
        return Tile(specialised=True, group=tile.group)
    if special and tile.bm == TALL:
        return _tall(tile)
    if tile.specialised and not special:
        return Tile(bn=tile.bn, group=tile.group, split=4)
    return tile if tile.bm == BLOCK else dataclasses.replace(tile, bm=BLOCK)


def _rows_product(
    a_PRK: Tensor | Tokens,
    weights: tuple[Tensor, ...],
    rows: RaggedRows,
    n: int,
    *,
    transposed: bool,
    tile: Tile,
    c_PRN: Tensor,
    h_RN: Tensor | None = None,
    activation: str = "identity",
    beside: tuple[Tokens, Tensor] | None = None,
    low: LowRank | None = None,
) -> None:
    """c = A W, summed over planes; given h, c are the two planes of a GLU and h = act(c[0]) c[1].

    `low` is added to c.
    """
    shape = (rows.offsets_E.shape[0], *((n, a_PRK.shape[-1]) if transposed else (a_PRK.shape[-1], n)))
    assert a_PRK.shape[-2] == rows.num_rows
    for weight in weights:
        assert weight.shape == shape and weight.stride() == weights[0].stride() and weight.dtype == a_PRK.dtype
    if descriptors.plane_stride(weights) is None:  # too far apart for one tensor map
        weights = tuple(torch.stack(weights))
    glu = h_RN is not None
    gathered = isinstance(a_PRK, Tokens)
    tokens = a_PRK if isinstance(a_PRK, Tokens) else beside[0] if beside else None
    tile = _runnable(tile, a_PRK.device, tokens=tokens is not None)
    special = tile.specialised
    if beside is not None:
        from foundry_moe_kernels import hopper_products

        tile = hopper_products.copying(tile)
    side_by_side = 2 if glu else 1
    columns = tile.bn // side_by_side
    column_tiles = cdiv(n, columns)
    height = tuning.HEIGHT if special else BLOCK
    consumers = tile.bm // tuning.HEIGHT
    if special and consumers == 3:  # each side of a tile has a box of its own
        box = (1, tile.bn // 2, tile.bk) if transposed else (1, tile.bk, tile.bn // 2)
    else:
        box = (side_by_side, columns, tile.bk) if transposed else (1, tile.bk, tile.bn)
    # for tokens, the map only defines the layout of a stage
    a = a_PRK.x_TD[None] if isinstance(a_PRK, Tokens) else a_PRK
    # loads may run on into the next expert's rows
    a_desc = descriptors.boxes(a, [1, height, tile.bk], specialised=special)
    b_desc = descriptors.weight_planes(weights, box, specialised=special)
    split = tile.split  # parts that a tile is stored in
    if glu:
        split = max(split, 2) if special else 2
    part = tile.bn // split

    def out(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        return descriptors.ragged_rows(tensor if tensor.dim() == 3 else tensor[None], height, part, specialised=special)

    k_tiles = cdiv(a_PRK.shape[-1], tile.bk)
    swapped = int(descriptors.planes_swapped(weights))
    low_a_desc = low_b_desc = None
    low_tiles = 0
    if low is not None:
        b = low.b.flip(0) if glu and swapped and box[0] == 2 else low.b  # planes side by side as those of the weights
        columns_L = low.a_RL.shape[1]
        depth = min(columns_L, tile.bk) if special else tile.bk
        low_box = [box[0], 1, box[1], depth] if transposed else [1, 1, depth, box[2]]
        low_a_desc = descriptors.boxes(low.a_RL[None], [1, height, depth], specialised=special)
        low_b_desc = descriptors.boxes(b, low_box, specialised=special)
        low_tiles = cdiv(columns_L, depth)
    entries_M4, count = rows.blocks[tile.bm]
    programs = _programs(a_PRK.device, entries_M4.shape[0] * column_tiles)
    if special:
        from foundry_moe_kernels import hopper_products

        launch(
            hopper_products.rows_kernel, (programs,),
            a_desc, b_desc, low_a_desc, low_b_desc, out(c_PRN), out(h_RN),
            hopper_products.row_descriptor(beside[0].x_TD) if beside else None,
            hopper_products.row_descriptor(beside[1]) if beside else None, entries_M4, count,
            tokens.x_TD if tokens else None, tokens.source_R if tokens else None,
            rows.offsets_E[-1:] if beside else None, tokens.x_TD.stride(0) if tokens else 0, rows.num_rows,
            column_tiles, k_tiles, swapped, tile.group, low_tiles,
            CHOICES=tokens.choices if tokens else 0, GATHERED=gathered,
            SLOTS=hopper_products.copy_slots(beside[1].shape[1]) if beside else 0, LOW=low is not None,
            PLANES=a.shape[0], GATED=glu, ACT=activation, TRANS_B=transposed, CONSUMERS=consumers,
            BN=tile.bn, BK=tile.bk, STAGES=tile.stages, SPLIT=split,
            BUFFERS=1 if beside else hopper_products.buffers(tile, split),
            LAST=tile.bn if glu else hopper_products.last_columns(n, tile.bn), num_warps=hopper_products.WARPS,
            maxnreg=hopper_products.REGISTERS[tile.bm],
        )  # fmt: skip
        return
    launch(
        ragged_rows_kernel, (programs,),
        a_desc, b_desc, low_a_desc, low_b_desc, out(c_PRN), out(h_RN), entries_M4, count, column_tiles,
        k_tiles, swapped, low_tiles,
        LOW=low is not None, PLANES=a.shape[0], GLU=glu, ACT=activation, TRANS_B=transposed, BM=tile.bm, BN=tile.bn,
        BK=tile.bk, SPLIT=tile.split, GROUP=tile.group, PROGRAMS=programs, num_warps=WARPS,
        num_stages=tile.stages,
    )  # fmt: skip


def row_major(weights: tuple[Tensor, ...], transposed: bool) -> tuple[tuple[Tensor, ...], bool]:
    """Weights and the orientation to multiply them in: transposed where their columns are contiguous, not rows."""
    if weights[0].stride(-1) == 1:
        return weights, transposed
    return tuple(weight.mT for weight in weights), not transposed


def rows_product(
    a_PRK: Tensor | Tokens,
    weights: tuple[Tensor, ...],
    rows: RaggedRows,
    *,
    transposed: bool,
    tile: Tile | None = None,
    beside: tuple[Tokens, Tensor] | None = None,
    low: LowRank | None = None,
) -> Tensor:
    """c_RN: each row times its expert's matrix, summed over planes.

    Args:
        a_PRK: [P, R, K], or tokens where `gathers`.
        weights: P tensors, [E, N, K] if `transposed` (x·Wᵀ), else [E, K, N] (x·W), whose rows or columns are
            contiguous. They may be halves of one tensor, or every second row of it.
        beside: tokens to copy meanwhile, where `gathers` and `copies`, and the rows they are copied to.
        low: added to c.
    """
    weights, transposed = row_major(weights, transposed)
    n = weights[0].shape[1 if transposed else 2]
    product = f"{'low_' if low else ''}{'nt' if transposed else 'nn'}{2 if len(weights) == 2 else ''}"
    c_RN = torch.empty(a_PRK.shape[-2], n, dtype=a_PRK.dtype, device=a_PRK.device)
    tile = tile or _pick(product, rows, n, a_PRK.shape[-1])
    _rows_product(a_PRK, weights, rows, n, transposed=transposed, tile=tile, c_PRN=c_RN, beside=beside, low=low)
    return c_RN


def up(
    x_RD: Tensor | Tokens,
    weights: tuple[Tensor, ...],
    rows: RaggedRows,
    activation: str,
    *,
    tile: Tile | None = None,
    low: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """z_PRF = x·W1ᵀ (and x·V1ᵀ), the pre-activations, and h_RF = act(z[0]) (times z[1]).

    One launch for a GLU; for an MLP without gate the activation is a launch of its own.

    Args:
        weights: W1 and perhaps V1, [E, F, D].
        low: added to z.
    """
    _, n, k = weights[0].shape
    tile = tile or _pick(f"up{len(weights)}", rows, n, k)
    a = x_RD if isinstance(x_RD, Tokens) else x_RD[None]
    z_PRF = torch.empty(len(weights), x_RD.shape[0], n, dtype=x_RD.dtype, device=x_RD.device)
    if len(weights) == 1:
        weights, transposed = row_major(weights, True)
        _rows_product(a, weights, rows, n, transposed=transposed, tile=tile, c_PRN=z_PRF, low=low)
        return z_PRF, activate(z_PRF, rows.offsets_E, activation)
    h_RF = torch.empty(x_RD.shape[0], n, dtype=x_RD.dtype, device=x_RD.device)
    _rows_product(
        a, weights, rows, n, transposed=True, tile=tile, c_PRN=z_PRF, h_RN=h_RF, activation=activation, low=low
    )
    return z_PRF, h_RF


def down_backward_(
    dy_RD: Tensor,
    w2_EDF: Tensor,
    z_PRF: Tensor,
    rows: RaggedRows,
    activation: str,
    weights_TK: Tensor | None,
    source_R: Tensor,
    *,
    pairs: str | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The backward pass of the second product and the activation; z_PRF, or `out`, becomes z's gradient.

    Args:
        dy_RD: gradient of each row's output, not yet weighted.
        w2_EDF: its rows or columns are contiguous.
        z_PRF, pairs: as in `pointwise.activate`.
        weights_TK: combine weights, read through `source_R`; None = all one.

    Returns:
        h_RF weighted (for the gradient of W2) and, given weights, the dot products of dy and y, fp32
        [1, R]: the gradient of each row's weight.
    """
    _, k, n = w2_EDF.shape
    h_RF = torch.empty(z_PRF.shape[1], n, dtype=z_PRF.dtype, device=z_PRF.device)  # first dh, then h in its place
    weights, transposed = row_major((w2_EDF,), False)
    tile = tile or _pick("nt" if transposed else f"down_backward{z_PRF.shape[0]}", rows, n, k)
    _rows_product(dy_RD[None], weights, rows, n, transposed=transposed, tile=tile, c_PRN=h_RF)
    dots = activation_backward_(h_RF, z_PRF, rows.offsets_E, activation, weights_TK, source_R, pairs=pairs, out=out)
    return h_RF, dots


def weight_gradient(
    a_PRM: Tensor, b_RN: Tensor, rows: RaggedRows, *, out: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """[P, E, M, N]: a_e^T b_e over the rows of every expert, zeros for an expert without rows.

    `out` may be a slice of columns of a larger tensor, and in fp32, which then gets the sums unrounded.
    """
    planes, _, m = a_PRM.shape
    n = b_RN.shape[1]
    assert a_PRM.shape[1] == b_RN.shape[0] == rows.num_rows and a_PRM.dtype == b_RN.dtype
    experts = rows.offsets_E.shape[0]
    if out is None:
        out = torch.empty(planes, experts, m, n, dtype=a_PRM.dtype, device=a_PRM.device)
    tile = _runnable(tile or _pick("inner", rows, n, m), a_PRM.device)
    special = tile.specialised
    if out.element_size() == 4:  # parts of as many bytes
        tile = dataclasses.replace(tile, split=min(2 * tile.split, 4))
    m_tiles, n_tiles = cdiv(m, tile.bm), cdiv(n, tile.bn)
    programs = _programs(a_PRM.device, experts * planes * m_tiles * n_tiles)
    consumers = tile.bm // tuning.HEIGHT
    height, side = (tuning.HEIGHT, tile.bn // (consumers - 1)) if special else (tile.bm, tile.bn)
    a_desc = descriptors.ragged_rows(a_PRM, tile.bk, height, specialised=special)
    b_desc = descriptors.ragged_rows(b_RN[None], tile.bk, side, specialised=special)
    part = tile.bn // tile.split
    if special:
        from foundry_moe_kernels import hopper_inner, hopper_products

        launch(
            hopper_inner.inner_kernel, (programs,),
            a_desc, b_desc, descriptors.boxes(out[None], [1, 1, 1, height, part], specialised=True),
            rows.offsets_E, rows.order_E, experts, planes, m_tiles, n_tiles, tile.group, m,
            CONSUMERS=consumers, BN=tile.bn, BK=tile.bk, STAGES=tile.stages, SPLIT=tile.split,
            BUFFERS=hopper_products.buffers(tile, tile.split, out.element_size()),
            LAST=hopper_products.last_columns(n, tile.bn),
            num_warps=hopper_products.WARPS, maxnreg=hopper_products.REGISTERS[tile.bm],
        )  # fmt: skip
        return out
    launch(
        ragged_inner_kernel, (programs,),
        a_desc, b_desc, descriptors.boxes(out, [1, 1, tile.bm, part]), rows.offsets_E, rows.order_E, experts, planes,
        m_tiles, n_tiles,
        BM=tile.bm, BN=tile.bn, BK=tile.bk, SPLIT=tile.split, GROUP=tile.group, PROGRAMS=programs,
        num_warps=WARPS, num_stages=tile.stages,
    )  # fmt: skip
    return out
