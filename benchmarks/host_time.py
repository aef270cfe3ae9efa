"""Where the host spends a layer's step, the device never waited for: `python benchmarks/host_time.py`."""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import layer


def main() -> None:
    tokens, d, f, experts, k, _ = layer.CASES["Medium"]
    tokens, f = tokens // 16, f // 8  # small enough for the device never to be the one waited for
    leaves = [torch.randn(s, device="cuda") for s in ((tokens, d), (experts, f, d), (experts, d, f))]
    x, w1, w2 = (t.bfloat16().requires_grad_() for t in leaves)
    logits = torch.randn(tokens, experts, device="cuda", requires_grad=True)
    dy = torch.randn_like(x)

    def step() -> None:
        layer.step(lambda: layer.ours(x, logits, w1, None, w2, k), [x, logits, w1, w2], dy)

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    print(f"{(time.perf_counter() - began) * 50:.2f} ms a step on the host")
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(20):
        step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
