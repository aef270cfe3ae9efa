"""Host time and calls of a layer's step without waiting for the device, beside a dense FFN's, and where it is spent.

python benchmarks/host_time.py [OLMoE ...]
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import layer
from timing import header

TOKENS = 256  # few enough for the device to be done before the host
REPEATS = 15
PROFILED = 20  # steps


def ways_of(case: str) -> list[layer.Way]:
    _, d, f, experts, k, _ = layer.CASES[case]
    x, logits, dy = layer.routed(TOKENS, d, experts, "uniform")
    w1, v1, w2 = (layer.new(experts, *shape, scale=d**-0.5) for shape in ((f, d), (f, d), (d, f)))
    dense = [layer.new(k * f, d), layer.new(k * f, d), layer.new(d, k * f)]
    return [
        layer.Way(
            name="ours", function=lambda: layer.ours(x, logits, w1, v1, w2, k), leaves=[x, logits, w1, v1, w2], dy=dy
        ),
        layer.Way(name="dense FFN", function=lambda: layer.dense(x, *dense), leaves=[x, *dense], dy=dy),
    ]


def host_ms(way: layer.Way) -> list[float]:
    times = []
    for _ in range(5 + REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        way.step()
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times[5:])


def main() -> None:
    print(header())
    for case in sys.argv[1:] or ["OLMoE", "Qwen3"]:
        ways = ways_of(case)
        medians = []
        for way in ways:
            times = host_ms(way)
            medians.append(statistics.median(times))
            print(f"{case} {way.name}: {medians[-1]:.2f} ms ({times[0]:.2f} to {times[-1]:.2f})", flush=True)
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(PROFILED):
            ways[0].step()
        profiler.disable()
        stats = pstats.Stats(profiler)
        calls = stats.total_calls / PROFILED  # type: ignore[attr-defined]
        print(
            f"{case}: {calls:.0f} calls per step, {medians[0] / medians[1]:.2f} of the dense FFN's host time",
            flush=True,
        )
        stats.sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
