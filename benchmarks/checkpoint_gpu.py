"""Tokens/s of training during a background save and between saves, on the GPUs of one host.

    torchrun --nproc-per-node 4 benchmarks/checkpoint_gpu.py [--folder /tmp/run] [--layers 16] [--saves 2]

An OLMoE-shaped model (16 layers, width 2048, 64 experts of 1024, top-8) with FSDP2 and AdamW in fp32, computing in
bf16; experts by `torch._grouped_mm`. The checkpoint engine alone saves it: no trainer is needed. Prints one line of
JSON a save: tokens/s while it runs (from the call to the commit, the time that it blocks included) over those between,
by the mean and by the median step, and what that share would be if blocking were all that a save costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy


class Layer(nn.Module):
    """Attention and routed experts. T tokens, D width, E experts, F expert width, K choices, R = T K rows."""

    def __init__(self, width: int, experts: int, hidden: int, top_k: int) -> None:
        super().__init__()
        self.top_k, self.heads = top_k, width // 128
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wqkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, experts, bias=False)
        self.w1_EFD = nn.Parameter(torch.empty(experts, hidden, width).normal_(std=0.02))
        self.v1_EFD = nn.Parameter(torch.empty(experts, hidden, width).normal_(std=0.02))
        self.w2_EFD = nn.Parameter(torch.empty(experts, hidden, width).normal_(std=0.02))

    def forward(self, x_BSD: Tensor) -> Tensor:
        batch, length, width = x_BSD.shape
        q, k, v = self.wqkv(self.norm_1(x_BSD)).view(batch, length, 3, self.heads, 128).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x_TD = self.norm_2(x_BSD).reshape(-1, width)
        weights_TK, experts_TK = self.gate(x_TD).softmax(-1, dtype=torch.float32).topk(self.top_k)
        order_R = experts_TK.flatten().argsort()
        counts_E = torch.bincount(experts_TK.flatten(), minlength=self.gate.out_features)
        ends_E = counts_E.cumsum(0).to(torch.int32)
        rows_RD = x_TD[order_R // self.top_k]
        gated = F.silu(torch._grouped_mm(rows_RD, self.w1_EFD.transpose(1, 2), offs=ends_E))
        hidden = gated * torch._grouped_mm(rows_RD, self.v1_EFD.transpose(1, 2), offs=ends_E)
        out_RD = torch._grouped_mm(hidden, self.w2_EFD, offs=ends_E)
        out_RD = out_RD * weights_TK.flatten()[order_R, None].to(out_RD.dtype)
        return x_BSD + torch.zeros_like(x_TD).index_add(0, order_R // self.top_k, out_RD).view_as(x_BSD)


class Model(nn.Module):
    def __init__(self, layers: int, width: int, experts: int, hidden: int, top_k: int, vocab: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Layer(width, experts, hidden, top_k) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.wte(ids_BS)
        for block in self.blocks:
            x_BSD = torch.utils.checkpoint.checkpoint(block, x_BSD, use_reentrant=False)
        return self.head(x_BSD)


def build(arguments: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Made layer by layer on the GPU and sharded at once; experts along dimension 1."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("cuda"):
        model = Model(arguments.layers, arguments.width, 64, 1024, 8, 50_304)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else Shard(0))
    fully_shard(model, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def early(times: list[float], limit_s: float) -> list[float]:
    """The first of some durations, up to `limit_s` in all."""
    return [t for t, end in zip(times, itertools.accumulate(times), strict=True) if end < limit_s] or times[:1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="/tmp/foundry-moe-checkpoint-gpu")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=4, help="of 4,096 tokens, for each GPU and step")
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument(
        "--quiet-steps", type=int, default=100, help="between saves: enough for Python's garbage collector to strike"
    )
    arguments = parser.parse_args()
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    if rank == 0:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    model, optimizer = build(arguments)
    group, talk = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    engine = CheckpointEngine(open_store(arguments.folder), group=group, policy=Policy(keep=1))
    ids_BS = torch.randint(50_304, (arguments.sequences, 4096), device="cuda")
    tokens = ids_BS.numel() * dist.get_world_size()

    def state() -> dict:
        return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}

    def step() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        logits = model(ids_BS)
        F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), ids_BS.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def slowest(seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, group=talk, op=dist.ReduceOp.MAX)
        return value.item()

    def someone_saves() -> bool:
        busy = torch.tensor(int(engine.busy))
        dist.all_reduce(busy, group=talk, op=dist.ReduceOp.MAX)
        return bool(busy)

    for _ in range(5):
        step()
    began = time.perf_counter()
    engine.prepare(state())
    prepared = time.perf_counter() - began
    number = 5
    for _ in range(arguments.saves):
        dist.barrier()
        began = time.perf_counter()
        quiet = [step() for _ in range(arguments.quiet_steps) if not someone_saves()]
        between = tokens * len(quiet) / (time.perf_counter() - began)
        number += len(quiet) + 1
        dist.barrier()
        began = time.perf_counter()
        blocked = slowest(engine.save(state(), number))
        during: list[float] = []
        while True:
            during.append(step())
            if not someone_saves():
                break
        whole = time.perf_counter() - began
        report = engine.wait()
        assert report is not None and report.error is None, report
        saved = slowest(report.seconds_total)
        if rank == 0:
            meanwhile = tokens * len(during) / whole
            usual = statistics.median(quiet)
            worst = sorted(((t, i) for i, t in enumerate(during)), reverse=True)
            line = {
                "GPUs": dist.get_world_size(),
                "GiB per rank": round(report.bytes_staged / 2**30, 2),
                "prepare once, s": round(prepared, 2),
                "blocked, s": round(blocked, 3),
                "save, s": round(saved, 2),
                "step between, s": round(usual, 4),
                "steps in the first 4 s, s": round(statistics.mean(early(during, 4.0)), 4),
                "step during, s": round(statistics.median(during), 4),
                "slowest steps during, s, and their numbers": [(round(t, 4), i) for t, i in worst[:3]],
                "steps during": len(during),
                "tokens/s between": round(between),
                "tokens/s during": round(meanwhile),
                "share": round(meanwhile / between, 4),
                "share of the median step between": round(len(during) * usual / whole, 4),
                "share if blocking were all": round(1 - blocked / whole, 4),
            }
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
