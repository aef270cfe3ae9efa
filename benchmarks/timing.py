"""Times and loads that the kernel benchmarks share: medians of CUDA events, Zipf-like loads, a header with versions."""

from __future__ import annotations

import datetime
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # a CPU only tries scripts at toy size
ZIPF_RATIO = 20  # the heaviest expert has this many times the load of the lightest


def median_ms(run: Callable[[], object], repeats: int = 11, warmup: int = 2) -> float:
    """Milliseconds between events around each call; every case here runs over more data than the L2 holds."""
    for _ in range(warmup):
        run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in pairs)[repeats // 2]


def in_turn_ms(runs: Sequence[Callable[[], object]], repeats: int = 11, warmup: int = 2) -> list[float]:
    """As `median_ms` for each, but one call of each in turn, in a new order every time.

    All then have the same power limit, and none always follows one that draws little power.
    """
    if DEVICE.type == "cpu":
        return [_wall_ms(run) for run in runs]
    for run in runs:
        for _ in range(warmup):
            run()
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
    order, shuffle = list(range(len(runs))), random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)
        for i in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            runs[i]()
            end.record()
            events[i].append((start, end))
    torch.cuda.synchronize()
    return [sorted(start.elapsed_time(end) for start, end in pairs)[repeats // 2] for pairs in events]


def captured(run: Callable[[], None], pool: object | None = None) -> torch.cuda.CUDAGraph:
    """For the device's time alone: the host launches a step of the smallest case slower than the device computes it.

    Graphs of one `pool` share memory: what one leaves is gone once another is replayed.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph


def queued_ms(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median of a call's milliseconds on the device.

    On a GPU the call is queued behind a wait of some 8 ms, so that launches are hidden as they are in a training step
    whose device is busy; what waits for the device in the call itself shows.
    """
    times = []
    for _ in range(rounds + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(15_000_000)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            times.append(_wall_ms(run))
    return statistics.median(times[3:])


def _wall_ms(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - began)


def probabilities(experts: int, load: str) -> torch.Tensor:
    """fp64 [E]: equal, or falling as a power of the rank from the heaviest to a `ZIPF_RATIO`th of it."""
    if load == "uniform":
        return torch.full((experts,), 1.0 / experts, dtype=torch.float64)
    weights = torch.arange(1, experts + 1, dtype=torch.float64) ** (-math.log(ZIPF_RATIO) / math.log(experts))
    generator = torch.Generator().manual_seed(7)
    return (weights / weights.sum())[torch.randperm(experts, generator=generator)]


def loads(rows: int, experts: int, load: str) -> list[int]:
    """Rows of each expert, adding up to `rows`."""
    counts = (probabilities(experts, load) * rows).floor().long()
    counts[: rows - int(counts.sum())] += 1
    return counts.tolist()


def geometric_mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def in_processes(work: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
    """Calls `work` with each, in a process of its own, and waits: kernels compile there and are kept on disk.

    Raises:
        RuntimeError: one of them failed.
    """
    context = torch.multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=one) for one in arguments]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError(f"{work.__name__} ended with {[worker.exitcode for worker in workers]}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """In Markdown."""
    for line in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(line) + " |", flush=True)


def header() -> str:
    if DEVICE.type == "cpu":
        return f"CPU, torch {torch.__version__}, triton {triton.__version__}: times mean nothing"
    return (
        f"{datetime.date.today()} {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}; 8192^3 bf16 product {_peak():.0f} TFLOP/s, copy {copy_tb_per_s():.2f} TB/s"
    )


def _peak() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_ms(lambda: a @ b) / 1e9


def copy_tb_per_s(gigabytes: int = 2) -> float:
    """A large copy, bytes read plus bytes written."""
    a = torch.empty(gigabytes * 2**30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / median_ms(lambda: b.copy_(a)) / 1e9
