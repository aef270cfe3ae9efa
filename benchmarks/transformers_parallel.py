"""Training steps of a transformers 5 model on several GPUs: `parallelize` beside FSDP2 with grouped_mm, in one run.

    torchrun --nproc-per-node 2 -m benchmarks.transformers_parallel [--ways ours ours+compile accelerate] [--profile]

Ways: `ours`; `accelerate` (FSDP2 through Accelerate, its settings for bf16, so that gradients are reduced in bf16);
`fsdp2` (`fully_shard` with our policy, gradients reduced in fp32). `+blocks` compiles the decoder layers, `+compile`
the loss function too; peers compile with Accelerate's regional compilation or `Module.compile`.

Random weights in fp32, computed in bf16; random tokens, a batch for each rank; forward, backward, clipping and fused
AdamW. FSDP2 wraps the same blocks in all, all weights over all ranks in the peers. Medians of the steps' times on the
slowest rank, tokens per second of all ranks, and the highest peak of memory. The ways take turns, `--rounds` times
each; the last lines are their speeds over each peer's. `--profile` prints the kernels of a step on rank 0 that take the
most time. `--shape tiny --ways ours ours+compile fsdp2` runs on CPUs, to try the program.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

from benchmarks.transformers_step import SHAPES, VOCABULARY
from foundry_moe.integrations.transformers import clip_grad_norm_, parallelize

TINY = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2,
    "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PEERS = ("accelerate", "fsdp2")
WAYS = [f"{way}{suffix}" for way in ("ours", *PEERS) for suffix in ("", "+blocks", "+compile")]
Training = tuple[Any, torch.optim.Optimizer, Callable[..., Any]]  # model, optimizer, clipping


def build(way: str, args: argparse.Namespace, device: torch.device) -> Training:
    from transformers import AutoConfig, AutoModelForCausalLM

    way, _, compiled = way.partition("+")
    kind, sizes = SHAPES.get(args.shape, ("qwen3_moe", TINY))
    config = AutoConfig.for_model(kind, vocab_size=args.vocabulary, use_cache=False, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    with torch.device("meta") if way == "ours" else device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if way == "ours":
        mesh = {"expert": args.expert, "shard": "auto", "compile": "blocks" if compiled else "none"}
        parallelize(model, mesh, mp_policy=POLICY)
        if compiled == "blocks":
            del model._loss_function
        return model.train(), adamw(model), clip_grad_norm_
    model.set_experts_implementation("grouped_mm")
    if compiled == "compile":
        model.loss_function = torch.compile(model.loss_function)
    if way == "accelerate":
        return through_accelerate(model.train(), bool(compiled))
    for block in (*model.model.layers, model):
        if compiled and block is not model:
            block.compile()
        fully_shard(block, mesh=init_device_mesh(device.type, (dist.get_world_size(),)), mp_policy=POLICY)
    return model.train(), adamw(model), torch.nn.utils.clip_grad_norm_


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def through_accelerate(model: Any, compiled: bool) -> Training:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin

    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier way
    accelerator = Accelerator(
        mixed_precision="bf16",
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[type(model.model.layers[0]).__name__],
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
        ),
        dynamo_plugin=TorchDynamoPlugin(backend="inductor" if compiled else "no", use_regional_compilation=True),
    )
    model, optimizer = accelerator.prepare(model, adamw(model))
    return model, optimizer, accelerator.clip_grad_norm_


def measure(way: str, args: argparse.Namespace, device: torch.device) -> tuple[float, float, float]:
    """(median s of a step, peak GiB, loss of the last step on rank 0)."""
    model, optimizer, clip = build(way, args, device)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(args.vocabulary, (args.sequences, args.length), generator=generator).to(device)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        loss = model(ids, labels=ids).loss
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if gpu:
            torch.cuda.synchronize()
        losses.append(loss.item())
        return time.perf_counter() - start

    losses: list[float] = []
    times = [step() for _ in range(args.warm_up + args.steps)][args.warm_up :]  # the first ones compile and tune
    worst = torch.tensor([statistics.median(times), torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0])
    worst = worst.to(device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if args.profile:
        print_kernels(step, gpu)
    return float(worst[0]), float(worst[1]), losses[args.warm_up + args.steps - 1]


def print_kernels(step: Callable[[], float], gpu: bool, rows: int = 25) -> None:
    """The kernels, on a CPU the operators, of one step that take the most time."""
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler:
        seconds = step()
    name = "self_device_time_total" if gpu else "self_cpu_time_total"
    found = sorted(((getattr(each, name), each) for each in profiler.key_averages()), key=lambda pair: -pair[0])
    if dist.get_rank() == 0:
        calls = sum(each.count for _, each in found)
        print(f"  {seconds * 1e3:.1f} ms profiled, kernels {sum(us for us, _ in found) / 1e3:.1f} ms in {calls} calls")
        for us, each in found[:rows]:
            print(f"  {us / 1e3:8.2f} ms {each.count:5}  {each.key[:100]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["ours", "ours+compile", *PEERS], choices=WAYS, metavar="WAY")
    parser.add_argument("--shape", default="qwen3_9", choices=[*SHAPES, "tiny"])
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--expert", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=4, help="of a rank's batch")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    first = dist.get_rank() == 0
    found: dict[str, list[float]] = {way: [] for way in args.ways}
    for way in args.ways * args.rounds:
        seconds, gib, loss = measure(way, args, device)
        found[way].append(seconds)
        tokens = dist.get_world_size() * args.sequences * args.length / seconds
        if first:
            speed = f"{seconds * 1e3:9.1f} ms{tokens:11.0f} tokens/s"
            print(f"{args.shape:10}{way:20}{speed}{gib:7.1f} GiB  loss {loss:.4f}", flush=True)
        torch._dynamo.reset()  # its caches hold models
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for peer in [way for way in args.ways if way.startswith(PEERS)] if first else []:
        speeds = {way: statistics.mean(found[peer]) / statistics.mean(times) for way, times in found.items()}
        print(f"speed over {peer}:", ", ".join(f"{way} {speed:.2f}" for way, speed in speeds.items()))
    dist.destroy_process_group()
    time.sleep(1)  # gloo's threads free their tensors: in torch 2.11 a Python that exits meanwhile aborts the process


if __name__ == "__main__":
    main()
