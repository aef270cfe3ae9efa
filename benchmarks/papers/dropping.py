"""MegaBlocks, figures 7 and 8: dropless MoE beside a dense Transformer and token dropping, at equal validation loss.

    python -m benchmarks.papers.make_text text.bin.xz
    python -m benchmarks.papers.dropping text.bin.xz --size XS --runs dmoe dense cap1 cap1.5 cap2 dynamic dmoe/1 dense/1

Gale et al. 2022 (arXiv 2211.15841), section 6: MoE-XS and MoE-Small, 64 experts, top-1, sequences of 1024, in bf16 on
one GPU. A run is a way, with `/1` of another seed. All train the same model on the same tokens with one schedule, each
at the largest microbatch that fits, found by trying: they differ in their FFNs alone. `dmoe` uses our kernels, `capN`
drops beyond a capacity factor, `dynamic` pads to the fullest expert as Tutel does; these two multiply in batched
products of cuBLAS, with our kernels around them. `dense` is as wide as one expert, for as many active weights.

The learning rate is warmed up, constant, and decays at the end. Speed at equal loss is read from the constant part:
there no curve knows how long it will be. Time is that of training steps alone.

Rows are written as they come. What `--out` has of a run that is done is kept; `--runs` without a name prints the table
and plots alone. Expected on one H100: one to one and a half minutes a run of XS, and of Small one (dense) to two.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor

from benchmarks.papers.tokens import Tokens, read_tokens
from benchmarks.papers.transformer import Transformer, long_sequences
from foundry_moe.layers.moe import DROPPED

WAYS: dict[str, dict[str, Any]] = {
    "dmoe": {},
    "dense": {"experts": 0},
    "cap1": {"capacity": 1.0},
    "cap1.5": {"capacity": 1.5},
    "cap2": {"capacity": 2.0},
    "dynamic": {"capacity": "dynamic"},
}
WARMUP, DECAY, LAST = 0.05, 0.2, 0.1  # shares of the tokens; the last learning rate over the highest
# the paper's figures for dropless over a way, at equal loss: XS and Small
PAPER = {
    "dense": "1.8 to 2.4",
    "dynamic": "1.38 (XS), 2.0 (Small)",
    **dict.fromkeys(("cap1", "cap1.5", "cap2"), "1.18 to 1.38 over the best"),
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A shape of the paper's table 1, and how it is trained here.

    batch: sequences a step.
    """

    width: int
    layers: int
    lr: float
    tokens: int
    batch: int
    experts: int = 64
    sequence: int = 1024
    validation: int = 256


SIZES = {
    "XS": Size(width=512, layers=6, lr=2e-3, tokens=50_000_000, batch=128),
    "Small": Size(width=768, layers=12, lr=1e-3, tokens=25_000_000, batch=64),
    "toy": Size(width=32, layers=1, lr=1e-2, tokens=16_384, experts=4, sequence=64, batch=16, validation=8),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One evaluation of a run.

    seconds, optimizer_seconds: of all training steps so far, and of clipping and the optimizer in them.
    dropped: share of the choices since the row before.
    constant: the learning rate has not begun to decay.
    done: the run's last row.
    """

    size: str
    way: str
    seed: int
    device: str
    microbatch: int
    step: int
    tokens: int
    seconds: float
    optimizer_seconds: float
    loss: float
    dropped: float
    peak_gib: float
    constant: bool
    done: bool

    @property
    def run(self) -> tuple[str, str, int]:
        return self.size, self.way, self.seed


class StepClock:
    """Time of steps, and of the optimizer in them; on a GPU from events, so that no step waits for the host."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[list[Any]] = []
        self.seconds = self.optimizer_seconds = 0.0

    def mark(self, first: bool = False) -> None:
        """To be called before a step, before its optimizer, and after it."""
        mark: Any = time.perf_counter()
        if self.on_gpu:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        if first:
            self.marks.append([])
        self.marks[-1].append(mark)

    def read(self) -> None:
        """Adds what was marked since."""
        if self.on_gpu:
            torch.cuda.synchronize()
        for began, between, ended in self.marks:
            self.seconds += began.elapsed_time(ended) / 1e3 if self.on_gpu else ended - began
            self.optimizer_seconds += between.elapsed_time(ended) / 1e3 if self.on_gpu else ended - between
        self.marks = []


def learning_rate(share: float) -> float:
    """Over the highest, once this share of the tokens was seen: warmup, constant, linear decay."""
    if share < WARMUP:
        return share / WARMUP
    return 1.0 if share <= 1 - DECAY else LAST + (1 - LAST) * (1 - share) / DECAY


def take_step(model: Transformer, ids_NS: Tensor, step: int, microbatch: int, clock: StepClock | None = None) -> bool:
    """One optimizer step; False, and no step at all, where memory does not suffice."""
    try:
        if clock is not None:
            clock.mark(first=True)
        model.backward(ids_NS, step, microbatch)
        if clock is not None:
            clock.mark()
        model.update()
        if clock is not None:
            clock.mark()
        return True
    except torch.OutOfMemoryError:
        if clock is not None:
            clock.marks.pop()
    model.optimizer.zero_grad()  # after the exception, which holds what the step had
    gc.collect()
    torch.cuda.empty_cache()
    return False


def set_lr(model: Transformer, lr: float) -> None:
    for group in model.optimizer.param_groups:
        group["lr"] = lr


def largest_microbatch(model: Transformer, ids_NS: Tensor) -> int:
    """The largest of N, N/2, N/4 ... whose steps fit, the optimizer's state included; the model stays as it was.

    Raises:
        RuntimeError: one sequence does not fit.
    """
    set_lr(model, 0.0)
    microbatch = len(ids_NS)
    while microbatch:
        # two microbatches, whose gradients are added; twice, the second time beside the optimizer's state
        if all(take_step(model, ids_NS[: 2 * microbatch], 0, microbatch) for _ in range(2)):
            model.optimizer.state.clear()
            for layer in model.moes:
                layer.statistics.reset()
            return microbatch
        microbatch //= 2
    raise RuntimeError("not even one sequence a microbatch fits in this GPU's memory")


@torch.no_grad()
def validation_loss(model: Transformer, ids_NS: Tensor, microbatch: int, step: int) -> float:
    """Nats a token; ways that drop do so here too, as in training."""
    model.model.eval()
    parts = ids_NS.split(min(microbatch, len(ids_NS)))
    losses = torch.stack([model.loss(part_NS, step) * len(part_NS) for part_NS in parts])
    model.model.train()
    return float(losses.sum() / len(ids_NS))


def dropped_share(model: Transformer) -> float:
    """Of the choices since the last call, mean over layers."""
    shares = []
    for layer in model.moes:
        seen = layer.statistics
        if DROPPED in seen.names:
            shares.append(float(seen.losses_L[seen.names.index(DROPPED)] / seen.microbatches_1.clamp(min=1)))
        seen.reset()
    return sum(shares) / len(shares) if shares else 0.0


def train(
    size_name: str, size: Size, way: str, seed: int, tokens: Tokens, device: torch.device, seconds: float, every: int
) -> Iterator[Row]:
    """Trains one way; yields a row every so many steps. Stops early, with a last row, after `seconds` of wall time."""
    began = time.perf_counter()
    train_NS = long_sequences(torch.from_numpy(tokens.train.astype("int32")), size.sequence, torch.device("cpu"))
    valid_NS = long_sequences(torch.from_numpy(tokens.validation.astype("int32")), size.sequence, device)
    valid_NS = valid_NS[: size.validation]
    order = torch.randperm(len(train_NS), generator=torch.Generator().manual_seed(seed))
    train_NS = train_NS[order].to(device)
    steps = min(size.tokens // size.sequence, len(train_NS)) // size.batch
    model = Transformer(
        size.width, size.layers, tokens.vocabulary, device, positions=size.sequence, weight_decay=0.1, seed=seed,
        **{"experts": size.experts, **WAYS[way]},
    )  # fmt: skip
    microbatch = largest_microbatch(model, train_NS[: size.batch])
    validation_loss(model, valid_NS, microbatch, 0)  # compiles what evaluation has of its own
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock, first_step = StepClock(device), time.perf_counter()
    for step in range(1, steps + 1):
        share = step / steps
        set_lr(model, size.lr * learning_rate(share))
        ids_NS = train_NS[(step - 1) * size.batch : step * size.batch]
        while not take_step(model, ids_NS, step, microbatch, clock):
            microbatch = max(microbatch // 2, 1)
            print(f"{way}/{seed}: out of memory at step {step}, microbatch {microbatch} from here on", flush=True)
        if step == min(10, steps):
            clock.read()
            wanted = (time.perf_counter() - first_step) / step * steps
            print(f"{way}/{seed}: microbatch {microbatch}, {steps} steps, about {wanted:.0f} s", flush=True)
        out_of_time = step % every == 0 and time.perf_counter() - began > seconds
        if step % every and step < steps:
            continue
        clock.read()
        yield Row(
            size=size_name, way=way, seed=seed,
            device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            microbatch=microbatch, step=step, tokens=step * size.batch * size.sequence,
            seconds=clock.seconds, optimizer_seconds=clock.optimizer_seconds,
            loss=validation_loss(model, valid_NS, microbatch, step), dropped=dropped_share(model),
            peak_gib=torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
            constant=WARMUP < share <= 1 - DECAY, done=out_of_time or step == steps,
        )  # fmt: skip
        if out_of_time:
            return


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, or none where there is no such file."""
    if not path.exists():
        return []
    kinds = {"str": str, "int": int, "float": float, "bool": lambda text: text == "True"}
    with path.open(newline="") as file:
        return [
            Row(**{field.name: kinds[str(field.type)](row[field.name]) for field in fields(Row)})
            for row in csv.DictReader(file)
        ]


def write_rows(path: Path, rows: Iterable[Row], mode: str) -> None:
    """Writes the file anew (`w`) or adds to it (`a`)."""
    with path.open(mode, newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        if mode == "w":
            writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in asdict(row).items()})


def when_reached(curve: list[Row], level: float, quantity: str) -> float:
    """Seconds or tokens at which the loss first is at `level`, between evaluations on a line."""
    if curve[0].loss <= level:
        return float(getattr(curve[0], quantity))
    for before, after in pairwise(curve):
        if after.loss <= level:
            part = (before.loss - level) / (before.loss - after.loss)
            return float(getattr(before, quantity) + part * (getattr(after, quantity) - getattr(before, quantity)))
    raise ValueError(f"a loss of {level} was not reached")


def speedups(curve: list[Row], dropless: list[Row]) -> tuple[float, float, float]:
    """(level, in time, in tokens): how many times as fast dropless reaches the lowest loss that both reach.

    Of the constant part of the schedule.
    """
    constant, reference = ([row for row in rows if row.constant] for rows in (curve, dropless))
    level = max(min(row.loss for row in rows) for rows in (constant, reference))
    time_ratio, token_ratio = (
        when_reached(constant, level, quantity) / when_reached(reference, level, quantity)
        for quantity in ("seconds", "tokens")
    )
    return level, time_ratio, token_ratio


COLUMNS = (
    "size", "run", "microbatch", "ms a step", "of it clipping and AdamW", "million tokens/s", "peak GiB", "dropped",
    "loss before the decay", "last loss", "at equal loss of", "dropless is faster", "in tokens", "the paper, in time",
)  # fmt: skip


def table(rows: list[Row]) -> list[list[str]]:
    """A line for each run; speed is over that of the dropless run of the same seed."""
    curves: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        curves.setdefault(row.run, []).append(row)
    lines = []
    for (size, way, seed), curve in curves.items():
        last, constant = curve[-1], [row.loss for row in curve if row.constant]
        line = [
            size, f"{way}/{seed}", str(last.microbatch), f"{1e3 * last.seconds / last.step:.1f}",
            f"{100 * last.optimizer_seconds / last.seconds:.0f}%", f"{last.tokens / last.seconds / 1e6:.3f}",
            f"{last.peak_gib:.1f}", f"{100 * sum(row.dropped for row in curve) / len(curve):.1f}%",
            f"{min(constant):.4f}" if constant else "", f"{last.loss:.4f}",
        ]  # fmt: skip
        dropless = curves.get((size, "dmoe", seed), [])
        if way != "dmoe" and constant and any(row.constant for row in dropless):
            level, in_time, in_tokens = speedups(curve, dropless)
            line += [f"{level:.4f}", f"{in_time:.2f}", f"{in_tokens:.2f}", PAPER[way]]
        lines.append(line + [""] * (len(COLUMNS) - len(line)))
    return lines


def plot(rows: list[Row], path: Path) -> None:
    """Validation loss over tokens and over time, a row of panels for each size."""
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(row.size for row in rows))
    figure = Figure(figsize=(9, 3.6 * len(sizes)), layout="constrained")
    panels = figure.subplots(len(sizes), 2, squeeze=False, sharey="row")
    for size, (over_tokens, over_time) in zip(sizes, panels, strict=True):
        runs = dict.fromkeys(row.run for row in rows if row.size == size)
        for run in runs:
            curve = [row for row in rows if row.run == run]
            losses = [row.loss for row in curve]
            style = {"color": f"C{list(WAYS).index(run[1])}", "linestyle": ("-", "--", ":")[run[2] % 3], "lw": 1.2}
            label = f"{run[1]}/{run[2]}"
            over_tokens.plot([row.tokens / 1e6 for row in curve], losses, label=label, **style)
            over_time.plot([row.seconds for row in curve], losses, label=label, **style)
        over_tokens.set(xlabel="million tokens", ylabel=f"{size}: validation loss, nats")
        over_time.set(xlabel="seconds of training steps")
        over_time.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="written by benchmarks.papers.make_text")
    parser.add_argument("--size", choices=SIZES, default="XS")
    parser.add_argument("--runs", nargs="*", default=[*WAYS, "dmoe/1", "dense/1"], help="way or way/seed")
    for key, kind in (("lr", float), ("tokens", int), ("batch", int)):
        parser.add_argument(f"--{key}", type=kind, help="instead of what is set for the size")
    parser.add_argument("--seconds", type=float, default=150, help="at most so many for each run")
    parser.add_argument("--every", type=int, default=15, help="steps between evaluations")
    parser.add_argument("--out", type=Path, default=Path("runs/dropping"), help="a folder for curves, table and plot")
    arguments = parser.parse_args()
    runs = [(way, int(seed or 0)) for way, _, seed in (name.partition("/") for name in arguments.runs)]
    if unknown := [way for way, _ in runs if way not in WAYS]:
        parser.error(f"--runs: {', '.join(unknown)} is none of {', '.join(WAYS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "curves.csv"
    rows = read_rows(path)
    done = {row.run for row in rows if row.done}
    rows = [row for row in rows if row.run in done]  # of a run that was cut off nothing is kept
    write_rows(path, rows, "w")
    wanted = [run for run in runs if (arguments.size, *run) not in done]
    changed = {key: value for key in ("lr", "tokens", "batch") if (value := getattr(arguments, key)) is not None}
    size = replace(SIZES[arguments.size], **changed)
    tokens = read_tokens(arguments.text) if wanted else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for way, seed in wanted:
        assert tokens is not None
        limits = (device, arguments.seconds, arguments.every)
        for row in train(arguments.size, size, way, seed, tokens, *limits):
            write_rows(path, [row], "a")
            rows.append(row)
            print(f"{way}/{seed}: {row.tokens:,} tokens, {row.seconds:.1f} s, loss {row.loss:.4f}", flush=True)
        gc.collect()
    lines = table(rows)
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    for line in lines:
        print("| " + " | ".join(line) + " |")
    with (arguments.out / "table.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])
    if rows and find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed; --runs without a name draws it where it is")
    elif rows:
        plot(rows, arguments.out / "curves.png")


if __name__ == "__main__":
    main()
