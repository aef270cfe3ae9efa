"""Whether boxes tile tensors: each element in exactly one box, for all tensors of a manifest at once, in numpy.

The indicator function of a box is the running sum, over all dimensions, of +1 and -1 at its corners, and it gives the
corners back. So boxes tile a tensor if and only if their corners, signs and all, cancel down to those of the tensor:
no search for overlaps, and nothing that depends on an order. Legend: T tensors, B blocks of all of them, N dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from foundry_moe.checkpoint.errors import DamagedError
from foundry_moe.checkpoint.strict import shown

MOST_CUT = 8  # dimensions along which blocks are cut: 2^8 corners each
_KEYS = 2**62


def check_tiling(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    offsets: Sequence[np.ndarray],
    sizes: Sequence[np.ndarray],
) -> None:
    """Raises DamagedError unless the boxes of each tensor cover it exactly once.

    Args:
        names, shapes: of the tensors. A tensor without elements has no boxes.
        offsets, sizes: the tensors' boxes, each int64 [boxes, dimensions] without negative numbers.
    """
    groups: dict[int, list[int]] = {}
    for item, shape in enumerate(shapes):
        if 0 in shape:
            if len(offsets[item]):
                raise DamagedError(f"tensor {shown(names[item])} has no elements and {len(offsets[item])} blocks")
        else:
            groups.setdefault(len(shape), []).append(item)
    for ndim, items in groups.items():
        if ndim == 0:
            for item in items:
                if len(offsets[item]) != 1:
                    raise DamagedError(f"tensor {shown(names[item])} is one element in {len(offsets[item])} blocks")
            continue
        _check_group(
            [names[item] for item in items],
            np.array([shapes[item] for item in items], dtype=np.int64),
            np.array([len(offsets[item]) for item in items]),
            np.concatenate([offsets[item] for item in items]),
            np.concatenate([sizes[item] for item in items]),
        )


def _check_group(
    names: Sequence[str], shape_TN: np.ndarray, count_T: np.ndarray, lower_BN: np.ndarray, size_BN: np.ndarray
) -> None:
    of_B = np.repeat(np.arange(len(names)), count_T)
    shape_BN, upper_BN = shape_TN[of_B], lower_BN + size_BN
    wrong_B = np.any((size_BN < 1) | (upper_BN > shape_BN), axis=1)
    if wrong_B.any():
        block = int(wrong_B.argmax())
        tensor = int(of_B[block])
        raise DamagedError(
            f"a block of {shown(names[tensor])} {shape_TN[tensor].tolist()} reaches from {lower_BN[block].tolist()} "
            f"to {upper_BN[block].tolist()}"
        )
    # along a dimension that no block cuts the corners of all are alike
    cut = np.flatnonzero(np.any(size_BN != shape_BN, axis=0))
    if not len(cut):
        cut = np.array([0])
    if len(cut) > MOST_CUT:
        raise DamagedError(f"the blocks of {shown(names[0])} are cut along {len(cut)} dimensions")
    whole_TN = shape_TN
    shape_TN, lower_BN, upper_BN = shape_TN[:, cut], lower_BN[:, cut], upper_BN[:, cut]
    # a corner as one integer: its tensor's first key and its place in a grid one larger than the tensor
    grids = [int(np.prod([n + 1 for n in shape], dtype=object)) for shape in shape_TN.tolist()]
    first_T = [0, *itertools.accumulate(grids)]
    if first_T[-1] >= _KEYS:
        raise DamagedError(f"the tensors from {shown(names[0])} on have too many elements")
    step_TN = np.ones_like(shape_TN)
    for dim in range(len(cut) - 2, -1, -1):
        step_TN[:, dim] = step_TN[:, dim + 1] * (shape_TN[:, dim + 1] + 1)
    first = np.array(first_T[:-1], dtype=np.int64)
    boxes = _signed_corners(first[of_B], lower_BN * step_TN[of_B], upper_BN * step_TN[of_B])
    whole = _signed_corners(first, np.zeros_like(shape_TN), shape_TN * step_TN)
    left = np.sort(np.concatenate([boxes[0], whole[1]]))
    right = np.sort(np.concatenate([boxes[1], whole[0]]))
    if len(left) == len(right) and np.array_equal(left, right):
        return
    both = min(len(left), len(right))
    differ = np.flatnonzero(left[:both] != right[:both])
    key = min(int(left[differ[0]]), int(right[differ[0]])) if len(differ) else int(max(left, right, key=len)[both])
    tensor = int(np.searchsorted(first, key, side="right")) - 1
    raise DamagedError(
        f"the blocks of {shown(names[tensor])} {whole_TN[tensor].tolist()} leave elements out or hold some twice"
    )


def _signed_corners(first: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The corners, as keys, whose sign is that of the lowest, and the others."""
    signs: tuple[list[np.ndarray], list[np.ndarray]] = ([first], [])
    for dim in range(lower.shape[1]):
        plus, minus = signs
        signs = (
            [key + lower[:, dim] for key in plus] + [key + upper[:, dim] for key in minus],
            [key + upper[:, dim] for key in plus] + [key + lower[:, dim] for key in minus],
        )
    return np.concatenate(signs[0]), np.concatenate(signs[1])


def check_places(
    sizes: Sequence[int], object_B: np.ndarray, start_B: np.ndarray, bytes_B: np.ndarray, align: int
) -> None:
    """Raises DamagedError unless the blocks lie within their objects, aligned, no two on the same bytes.

    So tensors together are no larger than the objects, whose sizes the store is asked for.
    """
    if not len(object_B):
        return
    if object_B.min() < 0 or object_B.max() >= len(sizes):
        raise DamagedError(f"a block lies in object {int(object_B.max())} of {len(sizes)}")
    size_O = np.array(sizes, dtype=np.int64)
    end_B = start_B + bytes_B
    wrong_B = (end_B > size_O[object_B]) | (start_B % align != 0)
    if wrong_B.any():
        block = int(wrong_B.argmax())
        raise DamagedError(
            f"a block lies at bytes {int(start_B[block])} to {int(end_B[block])} of an object of "
            f"{int(size_O[object_B[block]])} bytes: it must begin at a multiple of {align} and end within"
        )
    order = np.lexsort((start_B, object_B))
    object_B, start_B, end_B = object_B[order], start_B[order], end_B[order]
    overlap = (object_B[1:] == object_B[:-1]) & (start_B[1:] < end_B[:-1])
    if overlap.any():
        raise DamagedError(
            f"two blocks share byte {int(start_B[1:][overlap][0])} of object {int(object_B[1:][overlap][0])}"
        )
