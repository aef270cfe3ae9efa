"""Times training steps of a YAML run through Composer: tokens/s per GPU, MFU, memory, and where a step's time goes.

    composer -n 4 benchmarks/train_step.py yamls/bench/olmoe_1b_7b.yaml [key=value ...] [--profile] [--trace FILE]
        [--balanced] [--first-microbatch]

Prints one line of JSON. `--profile` adds a table of kernels by time of the last step, `--trace` writes rank 0's trace
of it in Chrome's format: the device's alone, since the host would be slower while it traces its own operations.
`--balanced` replaces the experts of every token by random ones, as if the model had been trained: at the start experts'
loads differ, and a rank waits for the one with more. `--first-microbatch` adds as many steps again, of the first
microbatch of a batch alone. One run per launch: a second one in the same processes finds
memory that Composer and FSDP2 still hold of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("FSDP_VERSION", "2")

import torch
from compilations import on_compilation, on_graph_compilation
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from omegaconf import DictConfig, OmegaConf

from foundry_moe.commands.plan.shape import read_shape
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.layers.replay import replay_choices

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16, from NVIDIA's data sheets
SKIPPED_STEPS = 4  # kernels compile and the allocator settles
SLOWEST_AFTER = 5  # steps, from which on the slowest one is looked for


class BalancedChoices(Callback):
    """Replays random choices of experts."""

    def batch_start(self, state: State, logger: Logger) -> None:
        layers = moe_layers(state.model)
        experts, top_k = layers[0].num_experts, layers[0].config.top_k
        tokens = state.batch["input_ids"].numel()
        choices_TLK = torch.stack([torch.rand(tokens, experts, device="cuda").topk(top_k)[1] for _ in layers], 1)
        self.replay = replay_choices(state.model, choices_TLK)
        self.replay.__enter__()

    def batch_end(self, state: State, logger: Logger) -> None:
        self.replay.__exit__(None, None, None)


class StepTimer(Callback):
    """Wall time of each step, the device idle at both ends; optionally a profile of the last of whole batches.

    Steps after this one are of the first microbatch alone.
    """

    def __init__(self, profile: bool, trace: bool, last: int) -> None:
        self.seconds: list[float] = []
        self.compiled: list[list[str]] = []  # Triton kernels and graphs, by step
        self.last = last
        for watch in (on_compilation, on_graph_compilation):
            watch(lambda name: self.compiled[-1].append(name) if self.compiled else None)
        self.profiler = None
        if (profile or trace) and dist.get_global_rank() == 0:
            activities = [torch.profiler.ProfilerActivity.CUDA]
            if profile:
                activities.append(torch.profiler.ProfilerActivity.CPU)
            self.profiler = torch.profiler.profile(activities=activities)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if len(self.seconds) >= self.last:
            state.batch = {name: value[: state.device_train_microbatch_size] for name, value in state.batch.items()}

    def batch_start(self, state: State, logger: Logger) -> None:
        if len(self.seconds) == SKIPPED_STEPS:
            torch.cuda.reset_peak_memory_stats()
        if self.profiler is not None and len(self.seconds) == self.last - 1:
            self.profiler.start()
        torch.cuda.synchronize()
        self.compiled.append([])
        self.began = time.perf_counter()

    def batch_end(self, state: State, logger: Logger) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        if self.profiler is not None and len(self.seconds) == self.last:
            self.profiler.stop()


def measure(
    config: DictConfig,
    table: bool = False,
    trace: str | None = None,
    balanced: bool = False,
    first_microbatch: bool = False,
) -> dict[str, Any]:
    """One run; the same numbers on every rank but for memory, which is the largest."""
    from llmfoundry.command_utils import train
    from llmfoundry.registry import callbacks

    profile = table or trace is not None
    steps = int(str(config.max_duration).removesuffix("ba"))
    callbacks.register("step_timer", func=StepTimer)
    callbacks.register("balanced_choices", func=BalancedChoices)
    if balanced:  # first, so that drawing is not timed
        OmegaConf.update(config, "callbacks.balanced_choices", {}, force_add=True)
    if first_microbatch:
        config.max_duration = f"{2 * steps}ba"
    timed = {"profile": table, "trace": trace is not None, "last": steps}
    OmegaConf.update(config, "callbacks.step_timer", timed, force_add=True)
    plain = OmegaConf.to_container(config, resolve=True)
    flops = read_shape(plain).flops_per_token  # as torchtitan counts, so that MFUs compare
    trainer = train(OmegaConf.create(plain))
    timer = next(callback for callback in trainer.state.callbacks if isinstance(callback, StepTimer))
    whole = timer.seconds[: steps - 1 if profile else steps]
    seconds, later = statistics.median(whole[SKIPPED_STEPS:]), whole[SLOWEST_AFTER:]
    samples = config.global_train_batch_size // dist.get_world_size()
    peak = torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()], device="cuda")
    dist.all_reduce(peak, reduce_operation="MAX")
    device = torch.cuda.get_device_name()
    roof = next((f for name, f in PEAK_FLOPS.items() if name in device), None)

    def speed(samples: int, seconds: float) -> dict[str, Any]:
        tokens_per_s = samples * config.max_seq_len / seconds
        return {
            "step_ms": round(1e3 * seconds, 1),
            "tokens_per_s_per_gpu": round(tokens_per_s),
            "mfu": round(flops * tokens_per_s / roof, 4) if roof else None,
        }

    result = {
        "gpus": dist.get_world_size(),
        "device": device,
        **speed(samples, seconds),
        "spread_ms": [round(1e3 * s, 1) for s in timer.seconds],
        "slowest_over_median": round(max(later) / seconds, 3) if later else None,
        "compiled_later": sorted({name for names in timer.compiled[SLOWEST_AFTER:] for name in names}),
        "allocated_gib": round(peak[0].item() / 2**30, 2),
        "reserved_gib": round(peak[1].item() / 2**30, 2),
    }
    if first_microbatch:
        one = statistics.median(timer.seconds[steps + SKIPPED_STEPS :])
        result["first_microbatch"] = speed(config.device_train_microbatch_size, one)
    if timer.profiler is not None:
        if table:
            print(timer.profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45), file=sys.stderr)
        if trace:
            timer.profiler.export_chrome_trace(trace)
    trainer.close()
    return result


def read_arguments(description: str | None) -> tuple[DictConfig, bool, str | None, bool, bool]:
    """The arguments of `measure` from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--trace", metavar="FILE")
    parser.add_argument("--balanced", action="store_true")
    parser.add_argument("--first-microbatch", action="store_true")
    arguments = parser.parse_args()
    config = OmegaConf.merge(OmegaConf.load(arguments.yaml), OmegaConf.from_cli(arguments.overrides))
    assert isinstance(config, DictConfig)
    return config, arguments.profile, arguments.trace, arguments.balanced, arguments.first_microbatch


def main() -> None:
    """Runs from the command line; see the text at the top."""
    result = measure(*read_arguments(__doc__))
    if dist.get_global_rank() == 0:
        overrides = [argument for argument in sys.argv[2:] if "=" in argument]
        print(json.dumps({"overrides": overrides, **result}), flush=True)


if __name__ == "__main__":
    main()
