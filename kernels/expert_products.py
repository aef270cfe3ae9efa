"""The six products of a dMoE layer on Hopper, with their epilogues: one launch each. No autograd.

They take operands that `descriptors.supported` accepts. The kernels are those of `hopper_products` and `hopper_inner`,
in Gluon; on a CPU tests replace `launch` by twins of these two (tests/helpers/hopper_twin.py).

Shapes: R rows sorted by expert, E experts, D model width, F expert width, Y planes (gate and up: 2, else 1).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from foundry_moe_kernels import descriptors, tuning
from foundry_moe_kernels.launch import cdiv, launch, next_power_of_2
from foundry_moe_kernels.pointwise import activate, activation_backward_
from foundry_moe_kernels.topology import BLOCK_ROWS, pack_rows, split_rows
from foundry_moe_kernels.tuning import Tile
from torch import Tensor

if descriptors.GLUON:
    from foundry_moe_kernels import hopper_inner, hopper_products

BLOCK, TALL = BLOCK_ROWS
# Rows that are not a multiple of a cache line (of 16-bit floats) take more of L2, so that tall tiles win: a layer of 60
# experts of 1092 rows, 2120 x 1000, takes 0.94 of the time (H200) and 0.88 (H100). Fewer rows were not measured
_LINE, _TALL_FROM = 64, 512
# Experts up to this width gather tokens in their first product: it then takes some 6 % longer for every width,
# while a copy of the rows takes as long for all (H200)
GATHER_UP_TO = 1024
# Up to this one also in those of the backward pass, which need no copy then. It takes 0.15 ms for XS's rows and 0.17
# for OLMoE's and Qwen3's; the products for the second matrix take 0.02, 0.17 to 0.26 and 0.13 ms longer (H200)
GATHER_BACKWARD_UP_TO = 768
_GATHER_WIDTHS = range(256, 4097, 256)


class RaggedRows(NamedTuple):
    """Rows of every expert and the block rows that cover them. Built by `ragged_rows`.

    blocks: for BLOCK and TALL rows, entries_M4 and int32 [3]: the number of block rows and two counters of tiles, so
        that products of the same rows must run one after another on one stream.
    """

    offsets_E: Tensor
    blocks: dict[int, tuple[Tensor, Tensor]]
    order_E: Tensor
    num_rows: int


class Tokens(NamedTuple):
    """Rows [R, D] that are not copied: row r is token source_R[r] // choices.

    source_R: int32; -1 for rows past the experts' end.
    """

    x_TD: Tensor
    source_R: Tensor
    choices: int


class LowRank(NamedTuple):
    """A product of rows [R, L] with an expert's matrix of few inputs, which is added to another product.

    b: [Y, E, N, L] for a transposed product, with one plane for each of a GLU, else [1, E, L, N].
    """

    a_RL: Tensor
    b: Tensor


def gathers(x_TD: Tensor, hidden: int, *, backward: bool = False) -> bool:
    """Whether products of experts of this width can gather these tokens themselves, and gain by it."""
    most = GATHER_BACKWARD_UP_TO if backward else GATHER_UP_TO
    return hidden <= most and x_TD.shape[1] in _GATHER_WIDTHS and descriptors.supported(x_TD)


def copies(tokens: Tokens) -> bool:
    """Whether a product can copy these tokens meanwhile: Triton needs boxes, here a whole row, of powers of two."""
    return next_power_of_2(tokens.x_TD.shape[1]) == tokens.x_TD.shape[1]


def ragged_rows(offsets_E: Tensor, num_rows: int, packed: Tensor | None = None) -> RaggedRows:
    """The block rows of experts whose rows end at `offsets_E` (int32 [E]); packed: from `pack_rows`, if made before."""
    if packed is None:
        packed = pack_rows(offsets_E, num_rows)
    short, tall, order_E = split_rows(packed, num_rows, offsets_E.shape[0])
    return RaggedRows(offsets_E, {BLOCK: short, TALL: tall}, order_E, num_rows)


@functools.cache
def _tall(tile: Tile) -> Tile:
    """The tile with TALL rows, and so with what fits beside them."""
    return tile._replace(bm=TALL, bn=256, bk=64, stages=3, split=max(tile.split, 2))


def _pick(product: str, rows: RaggedRows, n: int, k: int) -> Tile:
    per_expert = tuning.per_expert(rows.num_rows, rows.offsets_E.shape[0])
    tile = tuning.tile_of(product, per_expert, n, k)
    return _tall(tile) if (n % _LINE or k % _LINE) and per_expert >= _TALL_FROM else tile


def _runnable(tile: Tile, *, tokens: bool = False) -> Tile:
    """The tile, or its counterpart where shared memory or the product rules it out: tokens need BLOCK rows."""
    if tokens and not (tile.bm == BLOCK and tile.bk == 64):
        return Tile(group=tile.group)
    return _tall(tile) if tile.bm == TALL else tile


class _RowsLaunch(NamedTuple):
    """What a product of rows is launched with whatever its rows are: boxes of its maps, numbers of tiles, constants."""

    height: int
    a_box: tuple[int, ...]
    b_box: tuple[int, int, int]
    out_box: tuple[int, int]
    low_a_box: tuple[int, ...]
    low_b_box: tuple[int, ...]
    column_tiles: int
    k_tiles: int
    low_tiles: int
    group: int
    most_programs: int
    constants: dict[str, Any]


@functools.lru_cache(maxsize=4096)  # a layer has six products; their rows are no argument
def _rows_launch(
    tile: Tile, device: torch.device, n: int, k: int, planes: int, activation: str | None, transposed: bool,
    gathered: bool, choices: int, copied: int, low_columns: int,
) -> _RowsLaunch:  # fmt: skip
    """Args: those of `_rows_arguments` in numbers. activation: None without a GLU. choices: of tokens, 0 without any.
    copied: the width of rows that are copied meanwhile, or 0. low_columns: L, or 0.
    """
    glu = activation is not None
    tile = _runnable(tile, tokens=choices > 0)
    if copied:
        tile = hopper_products.copying(tile)
    side_by_side = 2 if glu else 1
    columns = tile.bn // side_by_side
    consumers = tile.bm // tuning.HEIGHT
    if consumers == 3:  # each side of a tile has a box of its own
        box = (1, tile.bn // 2, tile.bk) if transposed else (1, tile.bk, tile.bn // 2)
    else:
        box = (side_by_side, columns, tile.bk) if transposed else (1, tile.bk, tile.bn)
    split = max(tile.split, 2) if glu else tile.split  # parts that a tile is stored in
    depth = min(low_columns, tile.bk)
    constants = {
        "CHOICES": choices, "GATHERED": gathered, "SLOTS": hopper_products.copy_slots(copied) if copied else 0,
        "LOW": low_columns > 0, "PLANES": planes, "GATED": glu, "ACT": activation or "identity", "TRANS_B": transposed,
        "CONSUMERS": consumers, "BN": tile.bn, "BK": tile.bk, "STAGES": tile.stages, "SPLIT": split,
        "BUFFERS": 1 if copied else hopper_products.buffers(tile, split),
        "LAST": tile.bn if glu else hopper_products.last_columns(n, tile.bn),
        "num_warps": hopper_products.WARPS, "maxnreg": hopper_products.REGISTERS[tile.bm],
    }  # fmt: skip
    return _RowsLaunch(
        height=tile.bm,
        a_box=(1, tuning.HEIGHT, tile.bk),
        b_box=box,
        out_box=(tuning.HEIGHT, tile.bn // split),
        low_a_box=(1, tuning.HEIGHT, depth),
        low_b_box=(box[0], 1, box[1], depth) if transposed else (1, 1, depth, box[2]),
        column_tiles=cdiv(n, columns),
        k_tiles=cdiv(k, tile.bk),
        low_tiles=cdiv(low_columns, depth) if low_columns else 0,
        group=tile.group,
        most_programs=tuning.num_multiprocessors(device),
        constants=constants,
    )


def _operand(rows: Tensor | Tokens, number: int) -> tuple[Tokens | None, Tensor]:
    """The tokens, if the rows are those, and [Y, R, K], whose map for tokens only defines the layout of a stage."""
    if isinstance(rows, Tokens):
        assert rows.source_R.shape[0] == number
        return rows, rows.x_TD[None]
    assert rows.shape[-2] == number
    return None, rows if rows.ndim == 3 else rows[None]


def _rows_arguments(
    a_YRK: Tensor | Tokens,
    weights: tuple[Tensor, ...],
    rows: RaggedRows,
    n: int,
    *,
    transposed: bool,
    tile: Tile,
    c_YRN: Tensor,
    h_RN: Tensor | None = None,
    activation: str = "identity",
    beside: tuple[Tokens, Tensor] | None = None,
    low: LowRank | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Arguments of the `launch` that writes c = A W, summed over planes; given h, the two planes of a GLU, and h.

    That is h = act(c[0]) c[1].

    `low` is added to c.
    """
    num_rows = rows.num_rows
    gathered, a = _operand(a_YRK, num_rows)  # loads may run on into the next expert's rows
    tokens = gathered or (beside[0] if beside else None)
    planes, _, k = a.shape
    shape = (rows.offsets_E.shape[0], *((n, k) if transposed else (k, n)))
    for weight in weights:
        assert weight.shape == shape and weight.dtype == a.dtype
    found = _rows_launch(
        tile, a.device, n, k, planes, None if h_RN is None else activation, transposed, gathered is not None,
        tokens.choices if tokens else 0, beside[1].shape[1] if beside else 0, low.a_RL.shape[1] if low else 0,
    )  # fmt: skip
    spanned = descriptors.weight_planes(weights, found.b_box)
    if spanned is None:  # too far apart for one tensor map
        spanned = descriptors.weight_planes(tuple(torch.stack(weights)), found.b_box)
        assert spanned is not None
    b_map, swapped = spanned
    low_a_map = low_b_map = None
    if low is not None:  # planes side by side as those of the weights
        b = low.b.flip(0) if h_RN is not None and swapped and found.b_box[0] == 2 else low.b
        low_a_map = descriptors.boxes(low.a_RL[None], found.low_a_box)
        low_b_map = descriptors.boxes(b, found.low_b_box)
    height, part = found.out_box
    c_map = descriptors.ragged_rows(c_YRN if c_YRN.ndim == 3 else c_YRN[None], height, part)
    h_map = None if h_RN is None else descriptors.ragged_rows(h_RN[None], height, part)
    a_map = descriptors.boxes(a, found.a_box)
    entries_M4, count = rows.blocks[found.height]
    tiles = entries_M4.shape[0] * found.column_tiles
    programs = found.most_programs if found.most_programs < tiles else tiles or 1
    return (
        hopper_products.rows_kernel, (programs,),
        a_map, b_map, low_a_map, low_b_map, c_map, h_map,
        descriptors.row_map(beside[0].x_TD) if beside else None, descriptors.row_map(beside[1]) if beside else None,
        entries_M4, count, tokens.x_TD if tokens else None, tokens.source_R if tokens else None,
        rows.offsets_E[-1:] if beside else None, tokens.x_TD.stride(0) if tokens else 0, num_rows,
        found.column_tiles, found.k_tiles, int(swapped), found.group, found.low_tiles,
    ), found.constants  # fmt: skip


def row_major(weights: tuple[Tensor, ...], transposed: bool) -> tuple[tuple[Tensor, ...], bool]:
    """Weights and the orientation to multiply them in: transposed where their columns are contiguous, not rows."""
    if weights[0].stride(-1) == 1:
        return weights, transposed
    return tuple(weight.mT for weight in weights), not transposed


def rows_product(
    a_YRK: Tensor | Tokens,
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
        a_YRK: [Y, R, K] or [R, K], or tokens where `gathers`.
        weights: Y tensors, [E, N, K] if `transposed` (x·Wᵀ), else [E, K, N] (x·W), whose rows or columns are
            contiguous. They may be halves of one tensor, or every second row of it.
        beside: tokens to copy meanwhile, where `gathers` and `copies`, and the rows they are copied to.
        low: added to c.
    """
    weights, transposed = row_major(weights, transposed)
    _, n, k = weights[0].shape
    if not transposed:
        n, k = k, n
    c_RN = weights[0].new_empty(rows.num_rows, n)
    if tile is None:
        product = f"{'low_' if low else ''}{'nt' if transposed else 'nn'}{'2' if weights[1:] else ''}"
        tile = _pick(product, rows, n, k)
    arguments, constants = _rows_arguments(
        a_YRK, weights, rows, n, transposed=transposed, tile=tile, c_YRN=c_RN, beside=beside, low=low
    )
    launch(*arguments, **constants)
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
    """z_YRF = x·W1ᵀ (and x·V1ᵀ), the pre-activations, and h_RF = act(z[0]) (times z[1]).

    One launch for a GLU; for an MLP without gate the activation is a launch of its own, which takes as long as an
    epilogue with it takes longer (H200: 0.12 and 0.12 ms at XS's shape, 0.07 and 0.08 at Medium's).

    Args:
        weights: W1 and perhaps V1, [E, F, D].
        low: added to z.
    """
    _, n, k = weights[0].shape
    planes = 2 if weights[1:] else 1
    tile = tile or _pick("up2" if planes == 2 else "up1", rows, n, k)
    z_YRF = weights[0].new_empty(planes, rows.num_rows, n)
    h_RF = weights[0].new_empty(rows.num_rows, n) if planes == 2 else None
    weights, transposed = (weights, True) if planes == 2 else row_major(weights, True)
    arguments, constants = _rows_arguments(
        x_RD, weights, rows, n, transposed=transposed, tile=tile, c_YRN=z_YRF, h_RN=h_RF, activation=activation, low=low
    )
    launch(*arguments, **constants)
    return z_YRF, activate(z_YRF, rows.offsets_E, activation) if h_RF is None else h_RF


def down_backward_(
    dy_RD: Tensor | Tokens,
    w2_EDF: Tensor,
    z_YRF: Tensor,
    rows: RaggedRows,
    activation: str,
    weights_TK: Tensor | None,
    source_R: Tensor,
    *,
    pairs: str | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The backward pass of the second product and the activation; z_YRF, or `out`, becomes z's gradient.

    Args:
        dy_RD: gradient of each row's output, not yet weighted.
        w2_EDF: its rows or columns are contiguous.
        z_YRF, pairs: as in `pointwise.activate`.
        weights_TK: combine weights, read through `source_R`; None = all one.

    Returns:
        h_RF weighted (for the gradient of W2) and, given weights, the dot products of dy and y, fp32
        [1, R]: the gradient of each row's weight.
    """
    _, k, n = w2_EDF.shape
    if tile is None and w2_EDF.stride(-1) == 1:
        tile = _pick(f"down_backward{z_YRF.shape[0]}", rows, n, k)
    h_RF = rows_product(dy_RD, (w2_EDF,), rows, transposed=False, tile=tile)  # first dh, then h in its place
    dots = activation_backward_(h_RF, z_YRF, rows.offsets_E, activation, weights_TK, source_R, pairs=pairs, out=out)
    return h_RF, dots


def weight_gradient(
    a_YRM: Tensor | Tokens,
    b_RN: Tensor | Tokens,
    rows: RaggedRows,
    *,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """[Y, E, M, N]: a_e^T b_e over the rows of every expert, zeros for an expert without rows.

    Args:
        a_YRM: [Y, R, M] or [R, M]. Either operand may be tokens, where `gathers`.
        out: may be a slice of columns of a larger tensor, and in fp32, which then gets the sums unrounded.
    """
    (a_tokens, a), (b_tokens, b) = _operand(a_YRM, rows.num_rows), _operand(b_RN, rows.num_rows)
    tokens, gathered = a_tokens or b_tokens, "a" if a_tokens else "b" if b_tokens else ""
    planes, _, m = a.shape
    n = b.shape[2]
    assert a.dtype == b.dtype
    experts = rows.offsets_E.shape[0]
    if out is None:
        out = a.new_empty(planes, experts, m, n)
    tile = tile or _pick("inner_tokens" if tokens else "inner", rows, n, m)
    found = _inner_launch(
        tile, a.device, m, n, planes * experts, out.dtype.itemsize, gathered, tokens.choices if tokens else 0
    )
    launch(
        hopper_inner.inner_kernel, (found.programs,),
        descriptors.ragged_rows(a, *found.a_box), descriptors.ragged_rows(b, *found.b_box),
        descriptors.boxes(out[None], found.out_box),
        rows.offsets_E, rows.order_E, tokens.x_TD if tokens else None, tokens.source_R if tokens else None,
        tokens.x_TD.stride(0) if tokens else 0,
        experts, planes, found.m_tiles, found.n_tiles, found.group, m,
        **found.constants,
    )  # fmt: skip
    return out


class _InnerLaunch(NamedTuple):
    """`_RowsLaunch` of a weight gradient."""

    a_box: tuple[int, int]
    b_box: tuple[int, int]
    out_box: tuple[int, ...]
    m_tiles: int
    n_tiles: int
    group: int
    programs: int
    constants: dict[str, Any]


@functools.lru_cache(maxsize=4096)
def _inner_launch(
    tile: Tile, device: torch.device, m: int, n: int, matrices: int, itemsize: int, gathered: str, choices: int
) -> _InnerLaunch:
    """Args: matrices: Y E. itemsize: of the result. gathered: "a" or "b", the operand that is tokens."""
    tile = _runnable(tile, tokens=gathered != "")
    if itemsize == 4:  # parts of as many bytes
        tile = tile._replace(split=min(2 * tile.split, 4))
    m_tiles, n_tiles = cdiv(m, tile.bm), cdiv(n, tile.bn)
    consumers = tile.bm // tuning.HEIGHT
    constants = {
        "CHOICES": choices, "GATHERED": gathered,
        "CONSUMERS": consumers, "BN": tile.bn, "BK": tile.bk, "STAGES": tile.stages, "SPLIT": tile.split,
        "BUFFERS": hopper_products.buffers(tile, tile.split, itemsize),
        "LAST": hopper_products.last_columns(n, tile.bn),
        "num_warps": hopper_products.WARPS, "maxnreg": hopper_products.REGISTERS[tile.bm],
    }  # fmt: skip
    return _InnerLaunch(
        a_box=(tile.bk, tuning.HEIGHT),
        b_box=(tile.bk, tile.bn // (consumers - 1)),
        out_box=(1, 1, 1, tuning.HEIGHT, tile.bn // tile.split),
        m_tiles=m_tiles,
        n_tiles=n_tiles,
        group=tile.group,
        programs=max(min(tuning.num_multiprocessors(device), matrices * m_tiles * n_tiles), 1),
        constants=constants,
    )
