"""A process of `test_recorder`: Accelerate with FSDP2 on a small mixture-of-experts model of transformers, recorded."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from foundry_moe.certify import Recorder

STEPS, SAVED, SEQUENCES = 3, 2, 4
FAULTS = ("", "moments lost")


def worker(process: int, folder: Path, ports: tuple[int, int]) -> None:
    """Processes 0 and 1 are two ranks, and 2 is alone: `folder/RANKS` and `folder/RANKS resumed`."""
    rank, ranks = (process, 2) if process < 2 else (0, 1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[ranks - 1]), "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP  # ignored on a CPU
    accelerator.state.fsdp_plugin = plugin
    ids = torch.randint(64, (STEPS, SEQUENCES, 8), generator=torch.Generator().manual_seed(3)).chunk(ranks, 1)[rank]
    model, optimizer = prepared(accelerator)
    record(accelerator, model, optimizer, folder / str(ranks), folder / f"state {ranks}", ids)
    for fault in FAULTS:
        model, optimizer = prepared(accelerator)
        accelerator.load_state(str(folder / f"state {ranks}"))
        if fault:
            optimizer.optimizer.state.clear()
        record(accelerator, model, optimizer, folder / f"{ranks} resumed {fault}", None, ids[SAVED:], SAVED)
    accelerator.end_training()


def prepared(accelerator: Accelerator) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    accelerator._models.clear()
    accelerator._optimizers.clear()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", dtype=torch.float32)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def record(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    saved: Path | None,
    ids: Tensor,
    step: int = 0,
) -> None:
    """Trains, recorded by the optimizer's hooks alone, and saves a state after `SAVED` steps."""
    recorder = Recorder(model, optimizer, folder, step=step)
    for number, ids_BS in enumerate(ids, 1):
        accelerator.backward(model(ids_BS, labels=ids_BS, use_cache=False).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if saved is not None and number == SAVED:
            accelerator.save_state(str(saved))
    recorder.close()
