"""Scripts for the claims of the MegaBlocks paper, at toy size on a CPU: what they time computes the right result."""

import argparse

import pytest
import torch
from foundry_moe_kernels.sparse_tiles import SparseTile

import benchmarks.papers  # noqa: F401 - makes the scripts importable by their file names
from benchmarks.papers import megablocks_indices
from benchmarks.papers.megablocks_indices import CASES


@pytest.fixture
def toy(monkeypatch):
    """The name of a case of 2 experts and 32 rows."""
    monkeypatch.setitem(CASES, "toy", (32, 32, 16, 2))
    return "toy"


def test_every_transpose_of_a_block_sparse_product_is_what_cublas_is_timed_on(toy):
    from matmul import measure_transposes, other_transposes

    for kind, runs in other_transposes(toy).items():
        sparse, dense = runs["sparse"](), runs["bmm"]()
        if kind in ("DDS nt", "DDS tt"):  # [D, R] beside [E, D, R / E]
            sparse = sparse.view(sparse.shape[0], dense.shape[0], -1).transpose(0, 1)
        # sums of at most 32 products of normal numbers in fp32
        torch.testing.assert_close(sparse.reshape(dense.shape), dense, rtol=1e-5, atol=1e-4, msg=kind)
    assert len(measure_transposes([toy])) == 6


def test_rates_are_grouped_by_tile_size():
    from sparse_tiles import best_of_sizes

    rates = {None: 9.0, SparseTile(bn=64, bk=64, stages=3): 1.0, SparseTile(bn=64, bk=64, stages=4): 2.0}
    assert best_of_sizes({**rates, SparseTile(bn=128, bk=64): 3.0}) == {"64x64": 2.0, "128x64": 3.0}


def test_a_tile_is_read_from_the_name_that_the_table_shows():
    from sparse_tiles import name_of, tiles_of

    tiles = [SparseTile(group=2), SparseTile(bn=256, stages=4, warps=8)]
    assert tiles_of("128x64 s3 w4 g2, 256x64 s4 w8 g8") == tiles
    assert tiles_of(",".join(map(name_of, tiles))) == tiles
    with pytest.raises(argparse.ArgumentTypeError, match='"9" is no tile'):
        tiles_of("9")


def test_the_transpose_index_and_a_transposed_copy_give_the_same_product(toy):
    by_index, copy, of_copy = megablocks_indices.transposed(toy)
    copy()
    torch.testing.assert_close(by_index(), of_copy(), rtol=1e-5, atol=1e-4)
    (row,) = megablocks_indices.rows_of([toy], rounds=1)
    assert len(row) == len(megablocks_indices.COLUMNS)
