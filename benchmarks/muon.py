"""A training step with Muon over one with AdamW: seconds, those of the optimizer in it, and the optimizer's memory.

    python benchmarks/muon.py [olmoe_1b_7b qwen3_30b_a3b] [--layers 7] [--microbatches 1 16] [--toy]
    torchrun --nproc-per-node 2 benchmarks/muon.py ...

The models of `yamls/bench` in plain PyTorch, with as many layers as fit one GPU of 141 GB (of qwen3_30b_a3b one fewer
without a second GPU); experts are divided over all ranks. A microbatch has four sequences of 4096 tokens per GPU;
16 of them are the tokens per GPU and step of `yamls/pretrain/1gpu.yaml` and `4gpu.yaml`.
`--toy` is a small model, which a CPU can train.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from scaling import LAYERS, SEQUENCES
from timing import DEVICE, print_table

from foundry_moe import DMoECausalLM, Muon, batch_context, parallelize
from foundry_moe.optim.adamw import FusedAdamW
from foundry_moe.optim.decoupled import DecoupledAdamWFused
from foundry_moe.parallel.gradients import clip_factor, gradient_norm
from foundry_moe.parallel.transformer_blocks import block_lists, prefetch_in_order

ROOT = Path(__file__).resolve().parents[1]
STEPS, SKIPPED = 8, 3
TOY = {"d_model": 64, "n_heads": 2, "n_layers": 2, "vocab_size": 512, "max_seq_len": 32}
KEYS: dict[str, Any] = {"lr": 4e-4, "betas": (0.9, 0.95), "weight_decay": 1e-5}


def layers_of(name: str) -> int:
    """As many as fit beside fp32 logits, 9 GiB for a vocabulary of 152,000."""
    return LAYERS[name] - (name == "qwen3_30b_a3b" and not dist.is_initialized())


def build(name: str, layers: int | None, toy: bool) -> DMoECausalLM:
    """The model of a YAML on this rank's device, divided over all ranks."""
    run: Any = OmegaConf.to_container(OmegaConf.load(ROOT / f"yamls/bench/{name}.yaml"), resolve=True)
    keys = {**run["model"], "n_layers": layers or layers_of(name), "init_device": DEVICE.type, "tokenizer": None}
    del keys["name"]
    keys["moe"].pop("mesh")
    if toy:
        keys |= TOY
        keys["moe"] |= {"num_experts": 8, "top_k": 2, "expert_hidden_size": 32}
    torch.manual_seed(1)
    model = DMoECausalLM(**keys)
    if dist.is_initialized():
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if DEVICE.type == "cuda" else None, reduce_dtype=torch.float32
        )
        device = torch.device("cuda", torch.cuda.current_device()) if DEVICE.type == "cuda" else DEVICE
        placed = parallelize(model, {"expert": dist.get_world_size(), "shard": 1}, mp_policy=policy, device=device)
        for block in block_lists(model)[0]:
            fully_shard(block, mesh=placed.mesh, mp_policy=policy)
        fully_shard(model, mesh=placed.mesh, mp_policy=policy)
        prefetch_in_order(model)
    return model


def train_step(model: DMoECausalLM, optimizer: FusedAdamW, microbatches: int) -> float:
    """One step; returns the seconds of clipping and update."""
    context, shape = batch_context(model), model.config
    assert context is not None
    for _ in range(microbatches):
        ids = torch.randint(shape.vocab_size, (SEQUENCES, shape.max_seq_len), device=DEVICE)
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            loss = context.track_scale(model.loss(model(batch), batch))
        (loss / microbatches).backward()
    began = synchronized()
    optimizer.gradient_factor = clip_factor(gradient_norm(model.parameters()), 1.0).float()
    optimizer.step()
    seconds = synchronized() - began
    optimizer.zero_grad()
    return seconds


def synchronized() -> float:
    """The time when the device is idle."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def free_memory() -> None:
    """Returns what deleted objects held, those in cycles too, such as optimizers."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def measure(model: DMoECausalLM, optimizer: FusedAdamW, microbatches: int) -> tuple[float, float, float]:
    """Milliseconds of a step, and of the update in it; GiB of the optimizer's state on this rank."""
    steps, updates = [], []
    for _ in range(STEPS):
        began = synchronized()
        updates.append(train_step(model, optimizer, microbatches))
        steps.append(synchronized() - began)
    state = [tensor for kept in optimizer.state.values() for tensor in kept.values()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in state]
    gib = sum(tensor.numel() * tensor.element_size() for tensor in local) / 2**30
    return 1e3 * statistics.median(steps[SKIPPED:]), 1e3 * statistics.median(updates[SKIPPED:]), gib


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help=f"of {', '.join(LAYERS)}")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if ranks > 1:
        dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
        print(f"{ranks} x {device}, {SEQUENCES} sequences per microbatch and rank; AdamW, then Muon")
        names = ["step, ms", "", "update, ms", "", "state, GiB", ""]
        print_table(["model", "layers", "microbatches", *names, "step over AdamW's"], [])
    for name in arguments.runs or LAYERS:
        free_memory()
        model = build(name, arguments.layers, arguments.toy)
        parameters = list(model.parameters())
        for microbatches in arguments.microbatches:
            adamw = measure(model, DecoupledAdamWFused(parameters, **KEYS), microbatches)
            free_memory()
            muon = measure(model, Muon(parameters, model=model, **KEYS), microbatches)
            free_memory()
            cells = [f"{value:.4g}" for pair in zip(adamw, muon, strict=True) for value in pair]
            cells = [name, str(model.config.n_layers), str(microbatches), *cells, f"{muon[0] / adamw[0]:.3f}"]
            if first:
                print("| " + " | ".join(cells) + " |", flush=True)
        del model, parameters
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
