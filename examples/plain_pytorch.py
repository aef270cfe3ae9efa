"""dMoE layers in plain PyTorch: expert parallelism, FSDP2 and elastic checkpoints without a trainer.

torchrun --nproc-per-node 4 examples/plain_pytorch.py runs/plain 6
torchrun --nproc-per-node 2 examples/plain_pytorch.py runs/plain 10   # continues with half of the processes
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from foundry_moe import (
    BatchContext,
    MoEConfig,
    MoELayer,
    Progress,
    Reader,
    Writer,
    clip_grad_norm_,
    parallelize,
    step_gates_after,
)

WIDTH, HEADS, LAYERS, LENGTH = 64, 4, 2, 64
BATCH, MICROBATCHES = 16, 2
MOE = MoEConfig(
    num_experts=8,
    top_k=2,
    expert_hidden_size=64,
    activation="swiglu",
    gate={"name": "topk", "bias_balance": True},
    loss={"balance": 0.01, "z": 0.001},
)


class Block(nn.Module):
    def __init__(self, index: int, context: BatchContext) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ffn = MoELayer(WIDTH, MOE, layer_index=index, num_layers=LAYERS, context=context)

    def forward(self, x_BSD: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x_BSD)).chunk(3, -1)
        )
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BSD = x_BSD + self.out(heads.transpose(1, 2).flatten(2))
        return x_BSD + self.ffn(self.norms[1](x_BSD))


class Model(nn.Module):
    def __init__(self, context: BatchContext) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(index, context) for index in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.tokens(ids_BS) + self.positions.weight[: ids_BS.shape[1]]
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(x_BSD)


class Training(dcp.stateful.Stateful):
    """The saved state: weights, moments, the gates' biases (buffers of the model) and the step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def main(folder: str, steps: int) -> None:
    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)

    # The model: all MoE layers share one context. Initial weights must be equal on all ranks.
    torch.manual_seed(0)
    context = BatchContext()
    model = Model(context).to(device)
    context.observe(model)  # each call is one forward pass, which recomputation remembers

    # The mesh: experts over 2 ranks, ZeRO-3 over the others; FSDP2 for the rest; then the optimizer.
    placed = parallelize(model, {"expert": 2, "shard": "auto"}, device=device)
    for block in model.blocks:
        fully_shard(block, mesh=placed.mesh)
    fully_shard(model, mesh=placed.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    training, writer, reader = Training(model, optimizer), Writer(folder, keep=2), Reader(folder)
    if reader.steps():
        dcp.load({"training": training}, storage_reader=reader)
        if rank == 0:
            print(f"loaded step {training.step} on {world} processes", flush=True)
    context.progress = Progress(ba=training.step)
    step_gates_after(optimizer, model)

    text = torch.tensor(list((Path(__file__).parents[1] / "LICENSE").read_bytes()))
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    while training.step < steps:
        chosen = torch.randint(len(rows), (BATCH,), generator=torch.Generator().manual_seed(training.step))
        total = torch.zeros((), device=device)
        for microbatch in rows[chosen].chunk(MICROBATCHES):
            ids = microbatch.chunk(world)[rank].to(device)
            context.set_tokens(ids)  # token ids, and padding where there is any
            loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            (context.track_scale(loss) / MICROBATCHES).backward()  # auxiliary losses are scaled as this loss is
            total += loss.detach() / MICROBATCHES
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        training.step += 1
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {training.step} loss {total.item() / world:.5f}", flush=True)
    dcp.save({"training": training}, storage_writer=writer, checkpoint_id=str(training.step))
    dist.destroy_process_group()
    time.sleep(1)  # gloo's threads free their tensors: in torch 2.11 a Python that exits meanwhile aborts the process


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
