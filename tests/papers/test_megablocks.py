"""MegaBlocks' claims: each script lives, at toy size on a CPU, and what it times computes what it says."""

import argparse

import pytest
import torch
from foundry_moe_kernels.sparse_tiles import SparseTile

from benchmarks.papers import megablocks_indices, megablocks_products, megablocks_tiles
from tests.papers.plots import is_plot


@pytest.fixture
def toy(monkeypatch):
    """A case of 2 experts and 32 rows, whose name is given."""
    monkeypatch.setitem(megablocks_products.CASES, "toy", (32, 32, 16, 2))
    return "toy"


def test_every_transpose_of_a_block_sparse_product_is_what_cublas_is_timed_on(toy):
    for kind, runs in megablocks_products.all_products(toy).items():
        sparse, dense = runs["sparse"](), runs["bmm"]()
        if kind in ("DDS nt", "DDS tt"):  # [D, R] beside [E, D, R / E]
            sparse = sparse.view(sparse.shape[0], dense.shape[0], -1).transpose(0, 1)
        # sums of at most 32 products of normal numbers in fp32
        torch.testing.assert_close(sparse.reshape(dense.shape), dense, rtol=1e-5, atol=1e-4, msg=kind)


def test_the_table_of_products_has_a_layers_six_and_all_twelve_transposes(toy, tmp_path):
    rows = megablocks_products.rows_of([toy])
    assert len({row[1] for row in rows}) == 12 and sum(bool(row[2]) for row in rows) == 6
    assert any(line.startswith("of cuBLAS, block-sparse, 6 problems") for line in megablocks_products.summary(rows))
    megablocks_products.plot(rows, tmp_path / "products.png")
    assert is_plot(tmp_path / "products.png")


def test_the_table_of_tiles_shows_each_size_once_and_leaves_out_what_does_not_fit(toy, tmp_path, monkeypatch):
    small = [SparseTile(bn=bn, bk=16, stages=stages) for bn, stages in ((16, 2), (16, 3), (32, 2))]
    monkeypatch.setattr(megablocks_tiles.sparse_tiles, "TILES", small)
    rows = megablocks_tiles.rows_of([toy], ["sdd", "dsd"])
    assert megablocks_tiles.columns()[3:-1] == ["128x16x16", "128x32x16"]
    sdd, dsd = rows
    assert sdd[3] and not sdd[4], "a tile of 32 is wider than an expert of 16"
    assert dsd[3] and dsd[4]
    assert len(megablocks_tiles.summary(rows)) == 3
    megablocks_tiles.plot(rows, tmp_path / "tiles.png")
    assert is_plot(tmp_path / "tiles.png")


def test_a_tile_is_read_from_the_name_that_the_table_shows():
    sparse_tiles = megablocks_tiles.sparse_tiles
    tiles = [SparseTile(group=2), SparseTile(bn=256, stages=4, warps=8)]
    assert sparse_tiles.tiles_of("128x64 s3 w4 g2, 256x64 s4 w8 g8") == tiles
    assert sparse_tiles.tiles_of(",".join(map(sparse_tiles.name_of, tiles))) == tiles
    with pytest.raises(argparse.ArgumentTypeError, match='"9" is no tile'):
        sparse_tiles.tiles_of("9")


def test_the_transpose_index_and_a_transposed_copy_give_the_same_product(toy, tmp_path):
    by_index, copy, of_copy = megablocks_indices.transposed(toy)
    copy()
    torch.testing.assert_close(by_index(), of_copy(), rtol=1e-5, atol=1e-4)
    (row,) = megablocks_indices.rows_of([toy], rounds=1)
    assert len(row) == len(megablocks_indices.COLUMNS)
    megablocks_indices.plot([row], tmp_path / "indices.png")
    assert is_plot(tmp_path / "indices.png")
