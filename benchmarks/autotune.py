"""What tuning gains where the committed table has no class: `python benchmarks/autotune.py [--cases NAME,...]`.

Whole expert layers of models that the table was not made for, forward and backward: with the nearest classes' tiles,
then with tiles tuned here within the usual limit, one step of each in turn. The file of tuned tiles is a new one.

Shapes as in `layer.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import layer
from foundry_moe_kernels import autotune
from timing import header, in_turn_ms

# tokens, model width, expert width, experts, top-k, gated
CASES = {
    "DeepSeek-V2-Lite": (16384, 2048, 1408, 64, 6, True),
    "Phi-3.5-MoE": (8192, 4096, 6400, 16, 2, True),
    "Granite-3.0-3B-A800M": (16384, 1536, 512, 40, 8, True),
    "Switch-Base-16": (16384, 768, 3072, 16, 1, False),
}


def run(case: str) -> None:
    tuner = autotune._tuner(torch.device("cuda", torch.cuda.current_device()))
    step = layer.expert_ways(CASES[case], "uniform")[0].step
    tuned: dict[str, autotune.Tile] = {}

    def with_tiles(tiles: dict[str, autotune.Tile], left_s: float) -> Callable[[], None]:
        def stepped() -> None:
            tuner.tiles, tuner.left_s = tiles, left_s
            step()

        return stepped

    with_tiles({}, 0.0)()
    torch.cuda.synchronize()
    began = time.perf_counter()
    with_tiles(tuned, autotune.LIMIT_S)()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    nearest_ms, tuned_ms = in_turn_ms([with_tiles({}, 0.0), with_tiles(tuned, 0.0)])
    ratio = f"{nearest_ms:.2f} | {tuned_ms:.2f} | {nearest_ms / tuned_ms:.3f}"
    print(f"| {case} | {len(tuned)} | {first_s:.1f} | {ratio} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FOUNDRY_MOE_TUNING_CACHE"] = str(Path(folder) / "tiles.json")
        print(header())
        print("| model's layer | classes tuned | first step, s | nearest, ms | tuned, ms | nearest over tuned |")
        print("|---" * 6 + "|")
        for case in arguments.cases.split(","):
            run(case)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
