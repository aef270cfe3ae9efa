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


def test_every_block_sparse_product_is_what_cublas_is_timed_on():
    """Ways lay their results out differently: their values are compared in order of size."""
    import block_sparse

    every = (
        block_sparse.problems("toy", None),
        block_sparse.transposes("toy"),
        block_sparse.random_ways(0.5, None),
    )
    for product, ways in ((product, ways) for named in every for product, ways in named.items()):
        found = {way: run() for way, run in ways.items()}
        s = found["index"]
        if isinstance(s, block_sparse.Matrix):
            found["index"] = s.values
            if found["cuBLAS"].shape == s.shape:  # it computes the blocks that are not there as well
                found["cuBLAS"] = block_sparse.Matrix.from_dense(
                    found["cuBLAS"], block=s.block, mask_MN=pattern(s)
                ).values  # fmt: skip
        truth = found.pop("cuBLAS").flatten().sort()[0]
        for way, values in found.items():
            # sums of at most 64 products of normal numbers in fp32
            torch.testing.assert_close(values.flatten().sort()[0], truth, rtol=1e-5, atol=1e-4, msg=f"{product}, {way}")


def test_transposed_access_gives_the_product_of_the_stored_transpose():
    import block_sparse

    s = block_sparse.random_matrix(0.5)
    by_index, stored = (run() for run in block_sparse.transposed_ways(s, 5).values())
    torch.testing.assert_close(by_index, stored, rtol=1e-5, atol=1e-4)  # sums of at most 64 products


def pattern(s):
    mask = torch.zeros(s.shape[0] // s.block, s.shape[1] // s.block)
    mask[s.index.rows_Z, s.index.columns_Z] = 1
    return mask


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


def test_the_share_of_the_topology_is_of_a_step(toy):
    (row,) = megablocks_indices.rows_of([toy], rounds=1)
    assert len(row) == len(megablocks_indices.COLUMNS)
