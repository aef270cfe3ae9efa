"""Saves with `async_save` in a process of PyTorch's own, on each rank of a launch, and says what then is there."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from foundry_moe.checkpoint import Reader, Writer


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    writer = Writer(folder, keep=2)
    for step in (1, 2, 3):
        state = {"model": {"w": torch.full((3000,), float(step))}, "step": step}
        future = dcp.async_save(
            state,
            storage_writer=writer,
            checkpoint_id=str(step),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        state["model"]["w"].fill_(-1)  # what was staged is what was there at the call
        future.result()
    state, reader = {"model": {"w": torch.zeros(3000)}, "step": 0}, Reader(folder)
    dcp.load(state, storage_reader=reader)
    if dist.get_rank() == 0:
        print(f"steps {reader.steps()}, loaded {state['step']}: {state['model']['w'].unique().tolist()}")
    try:
        dcp.async_save(
            {"model": {"w": torch.zeros(3000)}, "strange": slice(2)},
            storage_writer=writer,
            checkpoint_id="4",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        ).result()
    except (Exception, CheckpointException) as error:
        if dist.get_rank() == 0:
            print(f"refused: {error}; steps {reader.steps()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
