"""Plans of thousands of ranks, without any of them: `benchmarks/checkpoint_scale.py` on fewer layers."""

from __future__ import annotations

from benchmarks.checkpoint_scale import simulate


def test_three_thousand_ranks_write_each_byte_once_and_evenly() -> None:
    result = simulate((48, 8, 8), layers=4, width=5120, experts=64, hidden=2560, vocab=100_352)
    assert result["ranks"] == 3072 and result["parameters"] > 10**10
    assert result["largest part"] < 1.1 * result["bytes"] / 3072, "blocks of 16 MiB are dealt evenly"
    assert result["rank plans in s"] < 1 and result["coordinator plans in s"] < 10
    assert result["manifest bytes"] < 2 * 10**6
    assert result["objects"] == 3074
    # one rank needs all that its 48 replicas hold as well, and fetches its 48th of it
    assert 40 < result["rank 0 needs"] / result["rank 0 fetches"] < 56
