"""The blog's table: every sentence has a row, from figures that stand in the CSV files, and plans say what they are."""

import pytest

from benchmarks.papers import blog
from tests.papers.plots import is_plot


@pytest.fixture(scope="module")
def plans():
    """Two projections, the larger one of as many GPUs as the blog's."""
    return {gpus: blog.project(gpus, 4) for gpus in (512, blog.LARGE)}


def test_every_sentence_has_a_row_that_says_whether_it_was_measured(plans):
    rows = [*blog.speed_rows(plans, blog.project(blog.LARGE, 1)), *blog.checkpoint_rows()]
    assert len({row[0] for row in rows}) == 6 and {len(row) for row in rows} == {len(blog.COLUMNS)}
    for row in rows:
        assert row[2].startswith("planned") == row[3].startswith("foundry-moe plan"), row
        assert row[3].startswith("foundry-moe plan") or all(
            (blog.FIGURES / name).exists() for name in row[3].split(", ")
        )


def test_the_wide_models_mfu_is_made_from_its_measured_tokens():
    wide = {gpus: value for model, gpus, value in blog.measured_mfu() if "DBRX" in model}
    # 10.4 B parameters, of which a token takes part in some 2.9 B: 25,000 tokens/s are about 47% of 989 TFLOP/s
    assert set(wide) == {1, 4} and 0.3 < max(wide.values()) < 0.6


def test_a_projection_fits_its_gpus_and_keeps_to_its_batch(plans, tmp_path):
    large = plans[blog.LARGE]
    assert large.plan.memory_bytes <= blog.GPU_BYTES and large.plan.mesh.world_size == blog.LARGE
    assert large.plan.step_tokens == 4 * 4096 * blog.LARGE
    assert any(line.startswith("3,072 GPUs, ") for line in blog.assumptions(plans.values()))
    blog.plot(plans, tmp_path / "blog.png")
    assert is_plot(tmp_path / "blog.png")


def test_a_row_that_is_gone_from_the_figures_is_an_error():
    with pytest.raises(KeyError, match="has no row 'nothing'"):
        blog.cell("checkpoint", "nothing", "Ceph RGW")
