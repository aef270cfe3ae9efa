"""What a layer holds at most does not follow the gate: peak bytes where a rank gets S times an even share of rows."""

import math
import sys
from pathlib import Path

import pytest
import torch

from foundry_moe.layers.experts import Experts
from foundry_moe.layers.gates.gate import Choices
from tests.helpers.live_bytes import LiveBytes

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from skewed_rank import MirroredDispatcher, choices_of

RANKS, TOKENS, LOCAL, WIDTH, HIDDEN = 8, 256, 8, 64, 32
GRADIENTS = 3 * LOCAL * WIDTH * HIDDEN * 4  # bytes of the weights


def peak_bytes(skew, top_k, buffer, *, crowd_first=False):
    """Of a layer's step on the fullest rank, beyond its weights and tokens; and in how many rounds."""
    torch.manual_seed(0)
    experts = Experts(
        num_experts=LOCAL, d_model=WIDTH, hidden_size=HIDDEN, activation="swiglu", num_layers=1, backend="reference"
    )
    experts.reset_parameters(seed=0, layer=0)
    experts_TK = choices_of(TOKENS, RANKS * LOCAL, top_k, RANKS, skew)
    if crowd_first:
        experts_TK = experts_TK[(experts_TK < LOCAL).sum(1).argsort(descending=True)]
    dispatcher = MirroredDispatcher(RANKS, num_experts=RANKS * LOCAL, buffer=buffer)
    x_TD = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weights_TK = torch.rand(TOKENS, top_k, requires_grad=True)
    choices = Choices(experts_TK=experts_TK, weights_TK=weights_TK)
    with LiveBytes() as live:
        dispatcher.combine(experts(dispatcher.dispatch(x_TD, choices))).sum().backward()
    return live.peak, experts.most_rounds


@pytest.mark.parametrize("top_k", [8, 1])
@pytest.mark.parametrize("skew", [1, 4, RANKS])
def test_the_peak_is_the_buffer_times_that_of_an_even_load_and_twice_the_weights_gradients(skew, top_k):
    """Tokens received and sent, and what experts compute; gradients of all rounds, and those of one beside them."""
    buffer = 1.25
    even, one = peak_bytes(1, top_k, math.inf)
    assert one == 1
    for crowd_first in (False, True):  # the skew is in consecutive tokens
        peak, rounds = peak_bytes(skew, top_k, buffer, crowd_first=crowd_first)
        assert skew / buffer - 1 < rounds <= skew / buffer + 2  # `choices_of` draws the skew
        assert peak < buffer * even + 2 * GRADIENTS
    if skew == RANKS:
        unbounded, _ = peak_bytes(skew, top_k, math.inf)
        assert unbounded > 4 * peak


def test_more_rounds_hold_no_more():
    for top_k in (8, 1):
        less, more = (peak_bytes(skew, top_k, 1.25) for skew in (4, RANKS))
        assert more[1] > less[1] and more[0] < 1.02 * less[0]
