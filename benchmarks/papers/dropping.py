"""MegaBlocks, figures 7 and 8: MoE beside a dense Transformer and token dropping, at equal validation loss.

    python -m benchmarks.papers.make_text text
    python -m benchmarks.papers.dropping text --size XS --runs dmoe dense cap1 cap1.5 cap2 dmoe/1 dense/1
    python -m benchmarks.papers.dropping text --runs dense,lr=2e-3 fine fine,gate.normalize=False,loss.z=0.001/1

Gale et al. 2022 (arXiv 2211.15841), section 6: the paper's sizes, sequences of 1024, in bf16 on one GPU.
A run is a way, with changes of its keys behind commas and `/1` of another seed. All train the same model on the same
tokens with one schedule, each at the largest microbatch that fits, found by trying: they differ in their FFNs alone.
`dmoe` is the paper's, 64 experts and top-1; `fine` has 64 experts of an eighth, of which a token chooses eight. Both
use our kernels; `capN`, on the same ones, drops beyond a capacity factor and pads nothing. `dense` has as many active
weights as all of them.

The learning rate is warmed up, constant, and decays at the end. Speed at equal loss is read from the constant part:
there no curve knows how long it will be. Time is that of training steps alone.

Rows are written as they come. A run that ends early, after `--seconds` or at the end of the text, is continued by the
next call, with the parts of text that were added since. `--runs` without a name prints the table and plots alone.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import gc
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.papers.tokens import Tokens, read_tokens
from benchmarks.papers.transformer import Transformer, long_sequences
from foundry_moe.layers.gates.gate import Choices, Gate
from foundry_moe.layers.losses import gate_entropy
from foundry_moe.layers.moe import DROPPED

DEFAULTS: dict[str, Any] = {"gate": {"name": "switch"}, "loss": {"balance": 0.01}, "balance_over": "rank"}
WAYS: dict[str, dict[str, Any]] = {
    "dmoe": {},
    "dense": {"experts": 0},
    "cap1": {"capacity": 1.0},
    "cap1.5": {"capacity": 1.5},
    "cap2": {"capacity": 2.0},
    "fine": {"expert_width": 0.5, "top_k": 8, "gate": {"name": "topk"}},
}
DECAY, LAST = 0.2, 0.1  # share of the tokens at the end; the last learning rate over the highest
# the paper's figures for dropless over a way, at equal loss: XS and Small
PAPER = {
    "dense": "1.8 to 2.4",
    **dict.fromkeys(("cap1", "cap1.5", "cap2"), "1.18 to 1.38 over the best"),
}
COMPILE: dict[str, bool | str] = {"none": False, "parts": True, "blocks": "blocks"}
LABELS = {
    "tokens": "million tokens",
    "seconds": "seconds of training steps",
    "loss": "validation loss, nats",
    "entropy": "gate entropy over log E",
    "top_share": "share of the expert with most choices",
}
LOSSES = (("tokens", "loss"), ("seconds", "loss"))  # panels
GATES = (("tokens", "entropy"), ("tokens", "top_share"))


@dataclass(frozen=True, kw_only=True)
class Size:
    """A shape of the paper's table 1, and how it is trained here.

    batch: sequences per step.
    warmup: share of the tokens.
    """

    width: int
    layers: int
    lr: float
    tokens: int
    batch: int
    warmup: float = 0.05
    experts: int = 64
    sequence: int = 1024
    validation: int = 256


SIZES = {
    "XS": Size(width=512, layers=6, lr=2e-3, tokens=50_000_000, batch=128),
    "Small": Size(width=768, layers=12, lr=1e-3, tokens=25_000_000, batch=64),
    "Medium": Size(width=1024, layers=24, lr=6e-4, tokens=25_000_000, batch=64),
    "toy": Size(width=32, layers=1, lr=1e-2, tokens=16_384, experts=4, sequence=64, batch=16, validation=8),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One evaluation of a run.

    seconds, optimizer_seconds: of all training steps so far, and of clipping and the optimizer in them.
    dropped: share of the choices since the row before.
    entropy: of gates' probabilities on the held-out text, over log E; mean of layers.
    top_share: of the choices since the row before, of the expert with most; mean of layers.
    constant: the learning rate has not begun to decay.
    done: the run's last row.
    """

    size: str
    way: str
    seed: int
    lr: float
    device: str
    microbatch: int
    step: int
    tokens: int
    seconds: float
    optimizer_seconds: float
    loss: float
    dropped: float
    entropy: float
    top_share: float
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


def parse_way(text: str, size: Size) -> tuple[Size, dict[str, Any]]:
    """`fine,lr=1e-3,gate.scale=2`: the size, with the changes of its fields, and keys of `Transformer`.

    Raises:
        ValueError: no such way, or a change without a value.
    """
    name, *changes = text.split(",")
    if name not in WAYS:
        raise ValueError(f"{name} is none of {', '.join(WAYS)}")
    keys: dict[str, Any] = deepcopy({"experts": size.experts, **DEFAULTS, **WAYS[name]})
    of_size = {}
    for change in changes:
        key, given, value = change.partition("=")
        if not given:
            raise ValueError(f"{text}: {key} has no value; write {key}=VALUE")
        with contextlib.suppress(ValueError):  # a word
            value = ast.literal_eval(value)
        if key in ("lr", "tokens", "batch", "warmup"):
            of_size[key] = value
            continue
        outer, _, inner = key.partition(".")
        if inner:
            keys.setdefault(outer, {})[inner] = value
        else:
            keys[outer] = value
    return replace(size, **of_size), keys


def learning_rate(share: float, warmup: float) -> float:
    """Over the highest, once this share of the tokens was seen: warmup, constant, linear decay."""
    if share < warmup:
        return share / warmup
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


def largest_microbatch(model: Transformer, ids_NS: Tensor) -> int:
    """The largest of N, N/2, N/4 ... whose steps fit, the optimizer's state included; the model stays as it was.

    Raises:
        RuntimeError: one sequence does not fit.
    """
    model.set_lr(0.0)
    microbatch, buffers = len(ids_NS), [buffer.clone() for buffer in model.model.buffers()]
    while microbatch:
        # two microbatches, whose gradients are added; twice, the second time beside the optimizer's state
        if all(take_step(model, ids_NS[: 2 * microbatch], 0, microbatch) for _ in range(2)):
            model.optimizer.state.clear()
            model.reset_statistics()
            for buffer, before in zip(model.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            return microbatch
        microbatch //= 2
    raise RuntimeError("not even one sequence per microbatch fits in this GPU's memory")


@torch.no_grad()
def validation_loss(model: Transformer, ids_NS: Tensor, microbatch: int, step: int) -> float:
    """Nats per token; ways that drop do so here too, as in training."""
    model.model.eval()
    parts = ids_NS.split(min(microbatch, len(ids_NS)))
    losses = torch.stack([model.loss(part_NS, step) * len(part_NS) for part_NS in parts])
    model.model.train()
    return float(losses.sum() / len(ids_NS))


def measure_entropy(model: Transformer) -> list[Tensor]:
    """The list that gate entropies of evaluated batches are added to: training steps do not compute them."""
    found: list[Tensor] = []

    @torch.compiler.disable  # in evaluation alone, where a compiled block may break
    def add(logits_TE: Tensor, score: str) -> None:
        found.append(gate_entropy(logits_TE, score=score))

    def measure(gate: Gate, _: Any, choices: Choices) -> None:
        if not gate.training and choices.logits_TE is not None:
            add(choices.logits_TE, getattr(gate.config, "score", "softmax"))

    for layer in model.moes:
        layer.gate.register_forward_hook(measure)
    return found


def gate_figures(model: Transformer, entropies: list[Tensor]) -> dict[str, float]:
    """`dropped`, `entropy` and `top_share` of a row, since the last call."""
    found: dict[str, list[float]] = {"dropped": [], "entropy": list(map(float, entropies)), "top_share": []}
    entropies.clear()
    for layer in model.moes:
        seen = layer.statistics
        if DROPPED in seen.names:
            found["dropped"].append(float(seen.losses_L[seen.names.index(DROPPED)] / seen.scale_1.clamp(min=1e-9)))
        found["top_share"].append(float(seen.counts_E.max() / seen.counts_E.sum().clamp(min=1)))
    model.reset_statistics()
    return {key: sum(values) / len(values) if values else 0.0 for key, values in found.items()}


def shuffled(parts: list[NDArray[np.uint16]], length: int, seed: int, device: torch.device) -> Tensor:
    """[N, length + 1]: the parts' sequences, shuffled within each part, so that a new part changes no order."""
    drawn = []
    for number, part in enumerate(parts):
        sequences_NS = long_sequences(torch.from_numpy(part.astype("int32")), length, torch.device("cpu"))
        generator = torch.Generator().manual_seed(1000 * seed + number)
        drawn.append(sequences_NS[torch.randperm(len(sequences_NS), generator=generator)])
    return torch.cat(drawn).to(device)


def state_path(folder: Path, run: tuple[str, str, int]) -> Path:
    return folder / "state" / f"{'-'.join(map(str, run))}.pt"


def keep_state(path: Path, model: Transformer, **progress: Any) -> None:
    """Replaces the state at once, so that a process that is killed leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save({"model": model.model.state_dict(), "optimizer": model.optimizer.state_dict(), **progress}, unfinished)
    unfinished.replace(path)


def train(
    name: tuple[str, str, int], size: Size, tokens: Tokens, device: torch.device, *,
    seconds: float, every: int, state: Path, compile: bool | str,
) -> Iterator[Row]:  # fmt: skip
    """Trains one way; yields a row every so many steps.

    Stops early after `seconds` of wall time, or where the text ends; `state` has what the next call continues from.
    """
    began = time.perf_counter()
    size_name, way, seed = name
    size, keys = parse_way(way, size)
    valid_NS = long_sequences(torch.from_numpy(tokens.validation.astype("int32")), size.sequence, device)
    valid_NS = valid_NS[: size.validation]
    train_NS = shuffled(tokens.train, size.sequence, seed, device)
    steps = size.tokens // size.sequence // size.batch
    on_gpu = device.type == "cuda"
    model = Transformer(
        size.width, size.layers, tokens.vocabulary, device, positions=size.sequence, weight_decay=0.1, seed=seed,
        compile=on_gpu and compile, **keys,
    )  # fmt: skip
    microbatch = largest_microbatch(model, train_NS[: size.batch])
    validation_loss(model, valid_NS, microbatch, 0)  # compiles what evaluation has of its own
    clock, done, entropies = StepClock(device), 0, measure_entropy(model)
    if state.exists():
        kept = torch.load(state, map_location=device)
        model.model.load_state_dict(kept["model"])
        model.optimizer.load_state_dict(kept["optimizer"])
        done, clock.seconds, clock.optimizer_seconds = kept["step"], kept["seconds"], kept["optimizer_seconds"]
        del kept
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ready = time.perf_counter() - began
    print(f"{way}/{seed}: microbatch {microbatch}, {steps} steps, {ready:.1f} s to begin", flush=True)
    last = min(steps, len(train_NS) // size.batch)
    for step in range(done + 1, last + 1):
        share = step / steps
        lr = size.lr * learning_rate(share, size.warmup)
        model.set_lr(lr)
        ids_NS = train_NS[(step - 1) * size.batch : step * size.batch]
        while not take_step(model, ids_NS, step, microbatch, clock):
            microbatch = max(microbatch // 2, 1)
            print(f"{way}/{seed}: out of memory at step {step}, microbatch {microbatch} from here on", flush=True)
        if step % every and step < last:
            continue
        clock.read()
        ends = step < steps and (step == last or time.perf_counter() - began > seconds)
        if ends:
            progress = {"seconds": clock.seconds, "optimizer_seconds": clock.optimizer_seconds}
            keep_state(state, model, step=step, **progress)
        yield Row(
            size=size_name, way=way, seed=seed, lr=lr, device=torch.cuda.get_device_name() if on_gpu else "cpu",
            microbatch=microbatch, step=step, tokens=step * size.batch * size.sequence,
            seconds=clock.seconds, optimizer_seconds=clock.optimizer_seconds,
            loss=validation_loss(model, valid_NS, microbatch, step), **gate_figures(model, entropies),
            peak_gib=torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
            constant=size.warmup < share <= 1 - DECAY, done=step == steps,
        )  # fmt: skip
        if ends:
            return
    state.unlink(missing_ok=True)


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


def speedups(curve: list[Row], reference: list[Row]) -> tuple[float, float, float]:
    """(level, in time, in tokens): how many times as fast the reference reaches the lowest loss that both reach.

    Of the constant part of the schedule.
    """
    curve, reference = ([row for row in rows if row.constant] for rows in (curve, reference))
    level = max(min(row.loss for row in rows) for rows in (curve, reference))
    time_ratio, token_ratio = (
        when_reached(curve, level, quantity) / when_reached(reference, level, quantity)
        for quantity in ("seconds", "tokens")
    )
    return level, time_ratio, token_ratio


COLUMNS = (
    "size", "run", "microbatch", "ms per step", "of it clipping and AdamW", "million tokens", "million tokens/s",
    "peak GiB", "dropped", "router entropy", "top expert", "loss before the decay", "last loss", "at equal loss of",
    "reference is faster", "in tokens", "the paper, in time",
)  # fmt: skip


def table(rows: list[Row], reference: str = "dmoe") -> list[list[str]]:
    """A line for each run; speed is that of the reference run of the same size and seed."""
    curves: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        curves.setdefault(row.run, []).append(row)
    lines = []
    for (size, way, seed), curve in curves.items():
        last, constant = curve[-1], [row.loss for row in curve if row.constant]
        line = [
            size, f"{way}/{seed}", str(last.microbatch), f"{1e3 * last.seconds / last.step:.1f}",
            f"{100 * last.optimizer_seconds / last.seconds:.0f}%", f"{last.tokens / 1e6:.1f}",
            f"{last.tokens / last.seconds / 1e6:.3f}", f"{last.peak_gib:.1f}",
            f"{100 * sum(row.dropped for row in curve) / len(curve):.1f}%", f"{last.entropy:.3f}",
            f"{100 * last.top_share:.1f}%", f"{min(constant):.4f}" if constant else "", f"{last.loss:.4f}",
        ]  # fmt: skip
        compared = curves.get((size, reference, seed), [])
        if way != reference and constant and any(row.constant for row in compared):
            level, in_time, in_tokens = speedups(curve, compared)
            line += [f"{level:.4f}", f"{in_time:.2f}", f"{in_tokens:.2f}", PAPER.get(way, "")]
        lines.append(line + [""] * (len(COLUMNS) - len(line)))
    return lines


def plot(rows: list[Row], path: Path, panels: Sequence[tuple[str, str]] = LOSSES) -> None:
    """Panels of (quantity over which, quantity), fields of `Row`; a row of panels for each size."""
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(row.size for row in rows))
    ways = list(dict.fromkeys(row.way for row in rows))
    figure = Figure(figsize=(9, 3.6 * len(sizes)), layout="constrained")
    grid = figure.subplots(len(sizes), len(panels), squeeze=False, sharey="row" if panels == LOSSES else False)
    for size, axes in zip(sizes, grid, strict=True):
        runs = dict.fromkeys(row.run for row in rows if row.size == size)
        for axis, (across, up) in zip(axes, panels, strict=True):
            for run in runs:
                curve = [row for row in rows if row.run == run]
                scale = 1e6 if across == "tokens" else 1
                over = [getattr(row, across) / scale for row in curve]
                style = {"color": f"C{ways.index(run[1])}", "linestyle": ("-", "--", ":")[run[2] % 3], "lw": 1.2}
                axis.plot(over, [getattr(row, up) for row in curve], label=f"{run[1]}, seed {run[2]}", **style)
            axis.set(
                xlabel=LABELS[across], ylabel=f"{size}: {LABELS[up]}" if axis is axes[0] or panels != LOSSES else ""
            )
        axes[-1].legend(fontsize=7, framealpha=0.6)
    figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> None:
    """Runs from the command line, or of these arguments; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a folder, written by benchmarks.papers.make_text")
    parser.add_argument("--size", choices=SIZES, default="XS")
    parser.add_argument("--runs", nargs="*", default=[*WAYS, "dmoe/1", "dense/1"], help="way[,key=value ...][/seed]")
    for key, kind in (("lr", float), ("tokens", int), ("batch", int), ("warmup", float)):
        parser.add_argument(f"--{key}", type=kind, help="instead of what is set for the size")
    parser.add_argument("--seconds", type=float, default=150, help="at most so many for each run")
    parser.add_argument("--every", type=int, default=15, help="steps between evaluations")
    parser.add_argument(
        "--compile", choices=COMPILE, default="parts", help="on a GPU; blocks: MoE layers too, in training"
    )
    parser.add_argument("--reference", default="dmoe", help="the way whose speed over others is in the table")
    parser.add_argument("--out", type=Path, default=Path("runs/dropping"), help="a folder for curves, table and plot")
    arguments = parser.parse_args(argv)
    changed = {
        key: value for key in ("lr", "tokens", "batch", "warmup") if (value := getattr(arguments, key)) is not None
    }
    size = replace(SIZES[arguments.size], **changed)
    runs = [(way, int(seed or 0)) for way, _, seed in (name.partition("/") for name in arguments.runs)]
    try:
        for way, _ in runs:
            parse_way(way, size)
    except ValueError as error:
        parser.error(f"--runs: {error}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "curves.csv"
    rows = read_rows(path)
    done = {row.run for row in rows if row.done}
    # of a run that was cut off by itself something is kept, of one that was killed nothing
    rows = [row for row in rows if row.run in done or state_path(arguments.out, row.run).exists()]
    write_rows(path, rows, "w")
    wanted = [run for way, seed in runs if (run := (arguments.size, way, seed)) not in done]
    tokens = read_tokens(arguments.text) if wanted else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failed = []
    for run in wanted:
        assert tokens is not None
        limits = {"seconds": arguments.seconds, "every": arguments.every, "compile": COMPILE[arguments.compile]}
        try:
            for row in train(run, size, tokens, device, state=state_path(arguments.out, run), **limits):
                write_rows(path, [row], "a")
                rows.append(row)
                said = f"{row.tokens:,} tokens, {row.seconds:.1f} s, loss {row.loss:.4f}"
                print(f"{row.way}/{row.seed}: {said}", flush=True)
        except Exception:  # a key that does not exist, out of memory: the other runs may succeed
            traceback.print_exc()
            failed.append(run)
        gc.collect()
    lines = table(rows, arguments.reference)
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    for line in lines:
        print("| " + " | ".join(line) + " |")
    with (arguments.out / "table.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])
    if rows and find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed; --runs without a name draws it where it is")
    elif rows:
        plot(rows, arguments.out / "curves.svg")
        if routed := [row for row in rows if row.top_share]:
            plot(routed, arguments.out / "gates.svg", GATES)
    if failed:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    main()
