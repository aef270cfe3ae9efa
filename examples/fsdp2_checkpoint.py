"""FSDP2 without Composer: PyTorch's own calls save and load, on any number of processes, in a folder or on S3.

torchrun --nproc-per-node 4 examples/fsdp2_checkpoint.py /tmp/run
torchrun --nproc-per-node 2 examples/fsdp2_checkpoint.py /tmp/run      # continues where the four ended
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from foundry_moe.checkpoint import Reader, Writer

STEPS, BATCH = 3, 16

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


class Training(dcp.stateful.Stateful):
    """The saved state, as in PyTorch's tutorial."""

    step = 0

    def state_dict(self) -> dict:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]


def report(what: str) -> None:
    total = sum(parameter.full_tensor().double().sum() for parameter in model.parameters())
    if rank == 0:
        print(f"{what} step {training.step} on {world} processes, sum of weights {total.item():.17g}", flush=True)


training = Training()
writer, reader = Writer(sys.argv[1], keep=2), Reader(sys.argv[1])
if reader.steps():
    dcp.load({"training": training}, storage_reader=reader)
    report("loaded")
for _ in range(STEPS):
    training.step += 1
    batch = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(training.step)).chunk(world)[rank]
    (model(batch) - batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    dcp.save({"training": training}, storage_writer=writer, checkpoint_id=str(training.step))
report("saved")
dist.destroy_process_group()
time.sleep(1)  # gloo's threads free their tensors: in torch 2.11 a Python that exits meanwhile aborts the process
