"""A search for values that are not finite: found in every line that is read, on kernels and in plain torch."""

import pytest
import torch
from foundry_moe_kernels import finite as kernels

from foundry_moe.ops import finite
from foundry_moe.ops.finite import NonfiniteSearch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(), (1,), (2500,), (1, 7), (7, 1), (3, 40), (40, 3), (3, 5, 9), (2, 3, 1030), (0, 4)]
ALWAYS = torch.ones(1, dtype=torch.uint8, device=DEVICE)


def by_kernel(tensors, lines, only_if=None):
    """What the kernel says, interpreted where there is no GPU."""
    bad_N = torch.zeros(len(tensors), dtype=torch.uint8, device=DEVICE)
    table = [(t.data_ptr(), *finite._sizes(t, lines)) for t in tensors]
    where_N = torch.arange(len(tensors), device=DEVICE)
    most = max(rows + rows // in_matrix * columns for _, rows, in_matrix, columns in table)
    kernels.nonfinite(torch.tensor(table, device=DEVICE), where_N, bad_N, only_if, tensors[0].dtype, most)
    return bad_N.tolist()


def by_search(tensors, lines, only_if=None):
    bad_N = torch.zeros(len(tensors), dtype=torch.uint8, device=DEVICE)
    NonfiniteSearch(lines=lines)(tensors, bad_N, only_if)
    return bad_N.tolist()


def plainly(tensors, lines, only_if=None):
    bad_N = torch.zeros(len(tensors), dtype=torch.uint8, device=DEVICE)
    for tensor, bad in zip(tensors, bad_N.unbind(), strict=True):
        finite._search_plainly(tensor, bad, only_if, lines)
    return bad_N.tolist()


WAYS = [by_kernel, by_search, plainly]


@pytest.mark.parametrize("way", WAYS)
def test_each_place_that_is_read_is_found_and_no_other_tensor_blamed(way):
    tensors, in_lines = [], []
    for shape in SHAPES:
        good = torch.randn(shape, device=DEVICE)
        for place in {0, good.numel() // 2, good.numel() - 1} if good.numel() else ():
            bad = good.clone()
            bad.view(-1)[place] = float("nan")
            row, column = divmod(place, bad.shape[-1] if bad.ndim else 1)
            tensors += [good, bad]
            in_lines += [0, int(bad.ndim < 2 or row % bad.shape[-2] == 0 or column == 0)]
    assert way(tensors, False) == [0, 1] * (len(tensors) // 2)
    assert way(tensors, True) == in_lines and 10 < sum(in_lines) < len(tensors) // 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_infinities_are_found_and_the_largest_numbers_are_none(way, dtype):
    most = torch.finfo(dtype).max
    values = [float("nan"), float("inf"), -float("inf"), most, -most, 0.0]
    assert way([torch.full((2, 3), v, dtype=dtype, device=DEVICE) for v in values], True) == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("way", WAYS)
def test_only_if_asked_on_the_device(way):
    tensors = [torch.full((3, 4), float("nan"), device=DEVICE)]
    assert way(tensors, False, ALWAYS) == [1] and way(tensors, False, ALWAYS - 1) == [0]


@pytest.mark.parametrize("operand", ["dy", "x"])
def test_a_bad_operand_shows_in_the_lines_of_every_matrix_of_a_gradient(operand):
    """What reading lines relies on: 0 times NaN or infinity is NaN, so no sparse operand hides one."""
    x_TD, dy_TF = torch.relu(torch.randn(6, 5)), torch.relu(torch.randn(6, 7))
    for value in (float("nan"), float("inf")):
        for place in [(0, 0), (3, 2), (5, 4)]:
            bad_x, bad_dy = x_TD.clone(), dy_TF.clone()
            (bad_x if operand == "x" else bad_dy)[place] = value
            assert by_search([bad_dy.T @ bad_x], True) == [1]


def test_empty_tensors_and_those_that_have_gaps_are_looked_at():
    x = torch.zeros(6, 8, device=DEVICE)
    x[1, 3] = float("nan")
    assert by_search([x[:, ::2], x.t()[3:], torch.zeros(0, 4, device=DEVICE)], False) == [0, 1, 0]


@pytest.mark.gpu
def test_no_wait_for_the_device_and_addresses_may_change():
    search, bad_N = NonfiniteSearch(lines=True), torch.zeros(3, dtype=torch.uint8, device="cuda")
    gradients = [torch.randn(64, 32, device="cuda").to(dtype) for dtype in (torch.float32, torch.bfloat16)] * 2
    search(gradients[:3], bad_N)
    gradients[2] = torch.full((64, 32), float("inf"), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        search(gradients[:3], bad_N, ALWAYS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bad_N.tolist() == [0, 0, 1]
