"""How many experts, which gate, how large: the runs of docs/explanation/recipe.md, in one command.

    python -m benchmarks.papers.make_text text
    python -m benchmarks.papers.recipe text [--plans changes long larger dropping] [--out runs/recipe]

`changes` are single changes at XS's size over 20 million tokens, `long` is the recipe beside dense XS over 400
million tokens, two seeds, and `larger` has dense models and experts of larger sizes. `dropping` has capacities beside
dropless runs; the table printed after each group has the speed at equal loss. `muon` (by `--plans muon` alone) has Muon
beside AdamW over 160 million tokens: the recipe, two seeds, and dense XS. Runs are those of
`benchmarks.papers.dropping`: the same command continues what was cut off. At the end of a plan the table of ratios is
printed: how many times fewer tokens the recipe needs to each loss of a dense model, and how many times faster it is.
"""

from __future__ import annotations

import argparse
import csv
import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.papers import dropping
from benchmarks.papers.dropping import Row, when_reached

RECIPE = "fine,experts=128,shared_width=0.5,top_k=7"
MUON = f"{RECIPE},optimizer=muon,lr=2e-3,adamw_lr=0.5"
DENSE_MUON = "dense,optimizer=muon,lr=2e-3,adamw_lr=0.5"
MORE = "fine,experts=256,shared_width=0.5,top_k=7"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Runs with the same flags of `benchmarks.papers.dropping`; `size` is in them too."""

    size: str
    flags: str
    runs: tuple[str, ...]


_COMBINE_WEIGHTS = (
    "gate.normalize=True",
    "gate.normalize=False,gate.scale=64.0",
    "gate.normalize=False,gate.score=sigmoid,gate.scale=2.0",
)
_CHANGES = (
    "dense", "dense/1", "dense,lr=5e-4", "dense,lr=2e-3", "dense,batch=128,lr=2e-3",
    "dmoe", "dmoe,lr=5e-4", "dmoe,gate_lr=10.0", 
    *(f"dmoe,gate.name=topk,{keys}" for keys in _COMBINE_WEIGHTS),
    "fine", "fine/1", "fine,lr=5e-4", "fine,lr=2e-3", "fine,batch=128,lr=2e-3", "fine,warmup=0.02",
    "fine,experts=128", "fine,experts=256", "fine,expert_width=2.0,top_k=2", "fine,dense_layers=1",
    "fine,shared_width=0.5,top_k=7", RECIPE, "fine,experts=32,expert_width=1.0,top_k=4",
    "fine,experts=128,shared_width=2.0,top_k=4", "fine,experts=256,shared_width=2.0,top_k=4",
    "fine,experts=256,shared_width=3.0,top_k=2",
    "fine,experts=128,expert_width=1.0,shared_width=2.0,top_k=2",
    "fine,loss.balance=0.001", "fine,loss.z=0.001", "fine,loss.balance=0.0,gate.bias_balance=True",
    "fine,gate.score=sigmoid", "fine,gate.normalize=False",
    "fine,gate_lr=0.1", "fine,gate_lr=5.0", "fine,gate_init=5.0",
    "fine,expert_lr=2.0", "fine,expert_lr=0.5", "fine,expert_init=2.0",
    "fine,capacity=1.0",
)  # fmt: skip
_LONG = "--tokens 400000000 --batch 64 --warmup 0.0125 --lr 1e-3 --every 60 --seconds 3000"
_MUON = "--tokens 160000000 --batch 32 --warmup 0.03 --lr 1e-3 --every 122 --seconds 999"
_SHORT = "--tokens 20000000 --batch 32 --warmup 0.1 --lr 1e-3 --every 61"
PLANS = {
    "changes": (Plan(size="XS", flags=_SHORT, runs=_CHANGES),),
    "long": (Plan(size="XS", flags=_LONG, runs=("dense", RECIPE, MORE, "dense/1", f"{RECIPE}/1", f"{MORE}/1")),),
    "larger": tuple(Plan(size=size, flags=_LONG, runs=("dense", RECIPE)) for size in ("Small", "Medium")),
    "dropping": (
        Plan(size="XS", flags=_LONG + " --reference dmoe", runs=("dmoe", "cap1", "cap2")),
        Plan(size="XS", flags=f"{_LONG} --reference {RECIPE}", runs=(RECIPE, f"{RECIPE},capacity=1.0")),
    ),
    "muon": (
        Plan(
            size="XS",
            flags=f"{_MUON} --reference {MUON}",
            runs=(RECIPE, MUON, f"{RECIPE},optimizer=muon,lr=1e-3", f"{RECIPE}/1", f"{MUON}/1"),
        ),
        Plan(
            size="XS",
            flags=f"{_MUON} --reference {DENSE_MUON}",
            runs=("dense", DENSE_MUON, "dense,optimizer=muon,lr=1e-3"),
        ),
    ),
    "toy": (
        Plan(size="toy", flags="--every 4", runs=("dense", "fine,experts=8,shared_width=2.0,top_k=2", "cap1")),
    ),
}  # fmt: skip
COLUMNS = ("experts", "dense model", "at a loss of", "times fewer tokens", "times faster")


def ratios(rows: list[Row], step: float = 0.25) -> list[tuple[str, str, float, float, float]]:
    """Each run with experts beside each dense run of its seed, at losses that both reach.

    Of the constant part of the schedule: at multiples of `step` nats, and at the lowest loss of both.
    """
    curves: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row.constant:
            curves.setdefault(row.run, []).append(row)
    lines = []
    for (run, curve), (dense, reference) in product(curves.items(), repeat=2):
        if run[1].startswith("dense") or dense[1] != "dense" or run[2] != dense[2]:
            continue
        first, last = (max(pick(row.loss for row in both) for both in (curve, reference)) for pick in (max, min))
        steps = range(math.floor(last / step) + 1, math.ceil(first / step))
        for level in (*(step * number for number in reversed(steps)), last):
            tokens, seconds = (
                when_reached(reference, level, name) / when_reached(curve, level, name)
                for name in ("tokens", "seconds")
            )
            lines.append(("-".join(map(str, run)), "-".join(map(str, dense)), level, tokens, seconds))
    return lines


def main(argv: list[str] | None = None) -> None:
    """Runs from the command line, or of these arguments; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a folder, written by benchmarks.papers.make_text")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=["changes", "long", "larger", "dropping"])
    parser.add_argument("--out", type=Path, default=Path("runs/recipe"), help="a folder for curves, tables and plots")
    arguments = parser.parse_args(argv)
    for name in arguments.plans:
        out = arguments.out / name
        for plan in PLANS[name]:
            flags = ["--size", plan.size, "--out", str(out), "--reference", "dense", *plan.flags.split()]
            dropping.main([arguments.text, *flags, "--runs", *plan.runs])
        rows = dropping.read_rows(out / "curves.csv")
        lines = [(*line[:2], *(f"{value:.3f}" for value in line[2:])) for line in ratios(rows)]
        for line in (COLUMNS, *lines):
            print("| " + " | ".join(line) + " |")
        with (out / "ratios.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])


if __name__ == "__main__":
    main()
