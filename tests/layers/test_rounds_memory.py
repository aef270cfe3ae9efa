"""What experts hold at most does not follow the router: peak bytes where a rank gets S times an even share of rows."""

import math
import sys
from pathlib import Path

import pytest
import torch

from foundry_moe.layers.experts import Experts
from tests.live_bytes import LiveBytes

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from skewed_rank import FirstRank, choices_of

RANKS, TOKENS, LOCAL, WIDTH, HIDDEN = 8, 64, 8, 64, 32
GRADIENTS = 3 * LOCAL * WIDTH * HIDDEN * 4  # bytes of the weights


def peak_bytes(skew, top_k, buffer):
    """Of a step of the experts, beyond their weights; how many tokens came; in how many rounds."""
    torch.manual_seed(0)
    experts = Experts(
        num_experts=LOCAL, d_model=WIDTH, hidden_size=HIDDEN, activation="swiglu", num_layers=1, backend="reference"
    )
    experts.reset_parameters(seed=0, layer=0)
    choices_TK = choices_of(RANKS * TOKENS, RANKS * LOCAL, top_k, RANKS, skew)
    rank = FirstRank(
        choices_TK, experts=RANKS * LOCAL, ranks=RANKS, width=WIDTH, buffer=buffer, dtype=torch.float32
    )  # fmt: skip
    with LiveBytes() as live:
        rank.step(experts)
    return live.peak, len(rank.rows_QD), experts.most_rounds


@pytest.mark.parametrize("top_k", [8, 1])
@pytest.mark.parametrize("skew", [4, RANKS])
def test_the_peak_is_that_of_an_even_load_and_twice_the_weights_gradients(skew, top_k):
    even, few, _ = peak_bytes(1, top_k, math.inf)
    peak, many, rounds = peak_bytes(skew, top_k, 1.0)
    unbounded, _, _ = peak_bytes(skew, top_k, math.inf)
    assert skew <= rounds <= skew + 1
    # gradients are held while later rounds compute, and those of one round beside them; of more tokens their rows, and
    # the gradients of their results, which those of the rows overwrite
    assert peak < even + 2 * GRADIENTS + 2 * (many - few) * WIDTH * 4
    assert peak < unbounded or top_k == 1


def test_more_rounds_hold_no_more():
    """From skew 4 to 8 a token more is its row and the gradient of its result."""
    less, few, _ = peak_bytes(4, 8, 1.0)
    more, many, _ = peak_bytes(8, 8, 1.0)
    assert more < 1.01 * less + 2 * (many - few) * WIDTH * 4
