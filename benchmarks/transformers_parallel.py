"""Training steps of a transformers 5 model on several GPUs: `parallelize` beside FSDP2 with grouped_mm, in one run.

    torchrun --nproc-per-node 2 -m benchmarks.transformers_parallel [--shape qwen3_9] [--expert 2] [--steps 10]

Random weights in fp32, computed in bf16; random tokens, a batch for each rank; forward, backward, clipping and fused
AdamW. FSDP2 wraps the same blocks in both, all weights over all ranks in the peer. Medians of the steps' times on the
slowest rank, tokens per second of all ranks, and the highest peak of memory. The two ways take turns, twice each.
`--shape tiny` runs on CPUs, to try the program.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.transformers_step import SHAPES, VOCABULARY
from foundry_moe.integrations.transformers import clip_grad_norm_, parallelize

TINY = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2,
    "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build(way: str, args: argparse.Namespace, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = SHAPES.get(args.shape, ("qwen3_moe", TINY))
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, use_cache=False, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    if way == "ours":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        parallelize(model, {"expert": args.expert, "shard": "auto"}, mp_policy=POLICY)
        return model.train()
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_experts_implementation("grouped_mm")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    return model.train()


def measure(way: str, args: argparse.Namespace, device: torch.device) -> tuple[float, float, float]:
    """(median s of a step, peak GiB, loss of the last step on rank 0)."""
    model = build(way, args, device)
    clip = clip_grad_norm_ if way == "ours" else torch.nn.utils.clip_grad_norm_
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(VOCABULARY, (args.sequences, args.length), generator=generator).to(device)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for step in range(args.steps + args.warm_up):
        dist.barrier()
        start = time.perf_counter()
        loss = model(ids, labels=ids).loss
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if gpu:
            torch.cuda.synchronize()
        if step >= args.warm_up:  # the first ones compile and tune kernels
            times.append(time.perf_counter() - start)
    worst = torch.tensor([statistics.median(times), torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0])
    worst = worst.to(device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst[0]), float(worst[1]), loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3_9", choices=[*SHAPES, "tiny"])
    parser.add_argument("--expert", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=4, help="of a rank's batch")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=5)
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    for way in ("ours", "grouped_mm") * 2:
        seconds, gib, loss = measure(way, args, device)
        tokens = dist.get_world_size() * args.sequences * args.length / seconds
        if dist.get_rank() == 0:
            print(
                f"{args.shape:10}{way:12}{seconds * 1e3:9.1f} ms{tokens:11.0f} tokens/s{gib:7.1f} GiB  loss {loss:.4f}"
            )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    time.sleep(1)  # gloo's threads free their tensors: in torch 2.11 a Python that exits meanwhile aborts the process


if __name__ == "__main__":
    main()
