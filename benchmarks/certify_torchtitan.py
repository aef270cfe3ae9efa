"""Records torchtitan's trainer on a small DeepSeek-V3 with experts, on CPU processes: one, two, and resumptions.

    pip install torchtitan==0.2.2
    python benchmarks/certify_torchtitan.py records
    torchrun --nproc-per-node 2 benchmarks/certify_torchtitan.py records
    torchrun --nproc-per-node 2 benchmarks/certify_torchtitan.py records --resume
    foundry-moe certify records/1 records/2
    foundry-moe certify records/1 records/2-resumed

Writes FOLDER/RANKS of four steps; with --resume FOLDER/RANKS-resumed of the last two, from torchtitan's own checkpoint.
On two ranks FSDP2 shards all parameters and expert parallelism divides the experts. The recorder is attached by the
optimizer's hooks alone. torchtitan has no CPU mode: its device is set here, and its monitor of GPU memory replaced.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]  # torchtitan reads it at import

from torchtitan import train  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.models.moe import MoEArgs, kernels  # noqa: E402
from torchtitan.protocols import train_spec  # noqa: E402

from foundry_moe.certify import Recorder  # noqa: E402

VOCABULARY, LENGTH, SEQUENCES, STEPS, SAVED = 64, 16, 4, 4, 2


class Tokens(BaseDataLoader):
    """Random sequences that depend on the step alone; a rank has a consecutive part."""

    def __init__(self, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.ranks, self.rank, self.step = dp_world_size, dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            self.step += 1
            random = torch.Generator().manual_seed(self.step)
            ids = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=random).chunk(self.ranks)[self.rank]
            yield {"input": ids[:, :-1]}, ids[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


class Recorded(train.Trainer):
    """A trainer that records its steps, from the first after a checkpoint is loaded."""

    folder: Path
    recorder: Recorder | None = None

    def train_step(self, data_iterator: Any) -> None:
        if self.recorder is None:
            self.recorder = Recorder(self.model_parts[0], self.optimizers.optimizers[0], self.folder)
        super().train_step(data_iterator)


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Weights that do not depend on the mesh: torchtitan's are, on a CPU, drawn by each rank for its shard."""
    for index, parameter in enumerate(model.parameters()):
        random = torch.Generator().manual_seed(index)
        scale = 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        whole = torch.randn(parameter.shape, generator=random) * scale
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.copy_(whole)


def run(folder: Path, checkpoints: Path, ranks: int, load: int) -> None:
    job = JobConfig()
    job.job.dump_folder = str(checkpoints)
    job.model.name, job.model.flavor = "deepseek_v3", "tiny"
    job.training.local_batch_size, job.training.seq_len = SEQUENCES // ranks, LENGTH
    job.training.steps, job.training.mixed_precision_param = STEPS, "float32"
    job.parallelism.expert_parallel_degree = ranks
    job.activation_checkpoint.mode = "none"
    job.checkpoint.enable, job.checkpoint.interval, job.checkpoint.last_save_model_only = True, SAVED, False
    job.checkpoint.load_step = load  # -1: none
    job.lr_scheduler.warmup_steps = 0
    trainer = Recorded(job)
    trainer.folder = folder
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    draw_weights(trainer.model_parts[0])
    try:
        trainer.train()
    finally:
        trainer.close()
        if trainer.recorder is not None:
            trainer.recorder.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true", help="the steps after the second again")
    arguments = parser.parse_args()
    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    ranks = int(os.environ["WORLD_SIZE"])
    memory = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
    monitor = SimpleNamespace(device_name="CPU", get_peak_stats=lambda: memory, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor
    train.dist_utils.set_pg_timeouts = lambda **_: None  # waits for a device by its number
    kernels.fill_indices_wrapper = kernels.fill_indices_cpu  # the former is a Triton kernel
    torch.histc = lambda x, bins, min, max: torch.bincount(x.flatten(), minlength=bins)  # has no integers on a CPU
    spec = train_spec.get_train_spec("deepseek_v3")
    experts = MoEArgs(num_experts=4, num_shared_experts=1, top_k=2, use_grouped_mm=False, load_balance_coeff=None)
    tiny = dataclasses.replace(
        spec.model_args["debugmodel"], vocab_size=VOCABULARY, dim=32, inter_dim=48, moe_inter_dim=24, n_layers=2,
        n_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, moe_args=experts,
    )  # fmt: skip
    spec.model_args["tiny"] = tiny
    spec.build_tokenizer_fn, spec.build_dataloader_fn = None, Tokens
    train.train_spec_module.get_train_spec = lambda _: spec
    name = f"{ranks}-resumed" if arguments.resume else str(ranks)
    run(arguments.folder / name, arguments.folder / f"state-{ranks}", ranks, SAVED if arguments.resume else -1)


if __name__ == "__main__":
    main()
