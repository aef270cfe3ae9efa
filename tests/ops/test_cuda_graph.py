"""One layer's forward and backward pass in a CUDA graph, replayed with other loads: as eager, and without a wait."""

import pytest
import torch

from foundry_moe.ops import expert_mlp, plan_permute
from foundry_moe.ops.softmax_topk import softmax_topk

TOKENS, EXPERTS, K, D, F = 700, 8, 2, 256, 264


def logits_of(load):
    logits = torch.randn(TOKENS, EXPERTS, device="cuda")
    if load == "one":
        logits[:, 3] += 100
    if load == "two, five without tokens":
        logits[:, :5] -= 100
    return logits


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["hopper", "portable"])
@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_a_captured_layer_follows_the_load_and_never_waits(kernels, memory, monkeypatch):
    if kernels == "portable":
        monkeypatch.setenv("FOUNDRY_MOE_KERNELS", "portable")
    torch.manual_seed(0)
    shapes = ((TOKENS, D), (EXPERTS, F, D), (EXPERTS, F, D), (EXPERTS, D, F))
    x, w1, v1, w2 = (torch.randn(s, device="cuda").mul(0.1).bfloat16().requires_grad_() for s in shapes)
    logits = logits_of("even").requires_grad_()
    dy = torch.randn(TOKENS, D, device="cuda").bfloat16()
    leaves = [x, logits, w1, v1, w2]

    def step():
        chosen = softmax_topk(logits, K, normalize=True, statistics=False)
        plan = plan_permute(chosen.experts_TK, EXPERTS)
        y = expert_mlp(x, chosen.weights_TK, plan, w1, v1, w2, activation="silu", backend="blocksparse", memory=memory)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for load in ("even", "one", "two, five without tokens", "even"):
        fresh = logits_of(load)
        with torch.no_grad():
            logits.copy_(fresh)
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
            eager = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for ours, expected in zip(captured, eager, strict=True):
            assert torch.equal(ours, expected)
