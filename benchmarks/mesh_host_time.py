"""Host time of a training step on a mesh whose other ranks are absent, so that one GPU shows what ranks of a mesh do.

    python benchmarks/mesh_host_time.py yamls/bench/olmoe_1b_7b.yaml --ranks 2 model.moe.mesh.expert=2
        model.moe.mesh.compile=blocks model.n_layers=7 max_seq_len=256 global_train_batch_size=8

Rank 0 runs alone. Collectives copy what it sends, as if all ranks had its tokens: kernels have the shapes of the mesh,
and nothing waits for a network. With short sequences the device is idle, and a pass takes as long as its Python calls
and launches. Prints the least and the median time of each pass, of the run as it is and of one in which FSDP2 hides its
hooks from dynamo at each call and graphs do not nest their breaks, and the ratio of both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

PASSES = {"forward": ("before_forward", "after_forward"), "backward": ("before_backward", "after_backward")}
SKIPPED_STEPS = 4  # kernels compile


class Done:
    """The work of a collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True


def leave_alone(ranks: int) -> None:
    """Makes this process rank 0 of so many on one host, of which the others do not exist."""
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "FSDP_VERSION": "2",
    }  # fmt: skip
    import torch
    from composer.utils import dist as composer_dist
    from torch import Tensor
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def all_to_all(
        output: Tensor,
        rows: Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Done | None:
        number = dist.get_world_size(group)
        mine = rows[: sent[0] if sent else len(rows) // number]
        for part in output.split(received or len(output) // number):
            part[: len(mine)].copy_(mine[: len(part)])
        return Done() if async_op else None

    def reduce_scatter(
        output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Done | None:
        output.copy_(input.view(-1)[: output.numel()].view(output.shape))
        return Done() if async_op else None

    new_group = dist.new_group

    def fake_group(members: Any = None, timeout: Any = None, backend: Any = None, *more: Any, **options: Any) -> Any:
        return new_group(members, timeout, None, *more)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    for module in (dist, torch.distributed.distributed_c10d):
        for function in (all_to_all, reduce_scatter, fake_group):
            name = {all_to_all: "all_to_all_single", reduce_scatter: "reduce_scatter_tensor", fake_group: "new_group"}
            setattr(module, name[function], function)
    composer_dist.initialize_dist = lambda *_, **__: None


def measure(ranks: int, yaml: str, overrides: list[str], before: bool) -> dict[str, dict[str, float]]:
    """Milliseconds by pass."""
    leave_alone(ranks)
    import torch
    from composer.core import Callback, Event
    from llmfoundry.command_utils import train
    from llmfoundry.registry import callbacks
    from omegaconf import OmegaConf

    from foundry_moe.algorithms import dmoe_mesh
    from foundry_moe.parallel import transformer_blocks

    seen: dict[str, list[float]] = defaultdict(list)

    class Marks(Callback):
        def run_event(self, event: Event, state: Any, logger: Any) -> None:
            if event == Event.BATCH_START and torch.cuda.is_available():
                torch.cuda.synchronize()
            seen[event.value].append(time.perf_counter())

    callbacks.register("marks", func=Marks)
    config = OmegaConf.merge(OmegaConf.load(yaml), OmegaConf.from_cli(overrides))
    OmegaConf.update(config, "callbacks.marks", {}, force_add=True)
    if before:
        transformer_blocks._compile = torch.compile
        dmoe_mesh.disable_hooks_once = lambda module: None
    train(OmegaConf.create(OmegaConf.to_container(config, resolve=True)))  # type: ignore[arg-type]
    found = {}
    for name, (first, last) in PASSES.items():
        times = [1e3 * (e - b) for b, e in zip(seen[first], seen[last], strict=True)][SKIPPED_STEPS:]
        found[name] = {"least": round(min(times), 1), "median": round(statistics.median(times), 1)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--child", choices=("now", "before"), help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if arguments.child:
        print(json.dumps(measure(arguments.ranks, arguments.yaml, arguments.overrides, arguments.child == "before")))
        return
    results = {}
    for child in ("before", "now"):
        command = [sys.executable, __file__, *sys.argv[1:], "--child", child]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[child] = json.loads(output.splitlines()[-1])
        print(child, results[child], flush=True)
    for name in PASSES:
        least, median = (results["before"][name][kind] / results["now"][name][kind] for kind in ("least", "median"))
        print(f"{name}: {least:.2f} times faster by the least, {median:.2f} by the median")


if __name__ == "__main__":
    main()
