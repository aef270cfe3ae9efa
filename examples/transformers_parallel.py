"""Expert parallelism for a model of transformers 5: load, shard, train, save, resume on another number of processes.

pip install '.[transformers]'
torchrun --nproc-per-node 2 examples/transformers_parallel.py FOLDER --steps 10
torchrun --nproc-per-node 1 examples/transformers_parallel.py FOLDER --steps 20    # continues where the two ended
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from foundry_moe.checkpoint import Reader, Writer
from foundry_moe.integrations.transformers import clip_grad_norm_, parallelize, save_pretrained

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "folder", type=Path, help="a model from save_pretrained is in FOLDER/model; else a tiny one is made"
)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--sequences", type=int, default=4, help="of a batch, over all processes")
parser.add_argument("--length", type=int, default=32)
parser.add_argument("--bf16", action="store_true", help="compute in bf16; weights and gradients stay in fp32")
args = parser.parse_args()
if args.sequences % (ranks := int(os.environ.get("WORLD_SIZE", 1))):
    parser.error(f"--sequences ({args.sequences}) must be a multiple of the number of processes ({ranks})")

gpus = torch.cuda.is_available()
if gpus:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpus else "gloo")
rank = dist.get_rank()
device = torch.device("cuda" if gpus else "cpu")

weights = args.folder / "model"
if rank == 0 and not weights.exists():
    torch.manual_seed(0)
    tiny = AutoConfig.for_model(
        "qwen3_moe", vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(tiny).save_pretrained(weights)
dist.barrier()

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights), dtype=torch.float32)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.bf16 else None
plan = parallelize(model, {"expert": "auto", "shard": "auto"}, weights=weights, mp_policy=policy)
model.gradient_checkpointing_enable()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


class Training(dcp.stateful.Stateful):
    """The saved state, as in PyTorch's tutorial."""

    step = 0

    def state_dict(self) -> dict:
        parameters, moments = get_state_dict(model, optimizer)
        return {"model": parameters, "optim": moments, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]


training = Training()
writer, reader = Writer(args.folder / "run", keep=2), Reader(args.folder / "run")
if reader.steps():
    dcp.load({"training": training}, storage_reader=reader)
text = torch.tensor(list(Path(__file__).read_bytes()))  # of this program, byte by byte
batches = text[: len(text) // (args.sequences * args.length) * args.sequences * args.length]
batches = batches.view(-1, args.sequences, args.length)
while training.step < args.steps:
    training.step += 1
    ids = batches[training.step % len(batches)].chunk(ranks)[rank].to(device)  # a part of the batch for each rank
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {training.step} loss {mean.item():.6f} on {plan}", flush=True)
dcp.save({"training": training}, storage_writer=writer, checkpoint_id=str(training.step))
save_pretrained(model, args.folder / "trained")
dist.destroy_process_group()
time.sleep(1)  # gloo's threads free their tensors: in torch 2.11 a Python that exits meanwhile aborts the process
