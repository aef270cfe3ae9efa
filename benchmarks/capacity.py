"""On a GPU: dropless against token dropping, and the time of each gate.

    python benchmarks/capacity.py data/demo/tokens.pt

Dropless against `capacity`: one MoE layer, forward and backward, at the shapes of the MegaBlocks paper (Gale et al.
2022, table 1: 64 experts, top-1, sequences of 1024), in bf16, with the loads that training gives: first a small
transformer with 64 experts a layer, `switch` and a balance loss of 0.01 is trained on real text, and the loads of
its layers on the batches after that are used. Both sides share the router. On CUDA the
dropless side permutes and applies activations in its own kernels, the padded one in torch's operations.

The argument holds int16 token ids [samples, positions]; `--save-tokens FOLDER` makes it from the demo's data.

Shapes: T tokens, D model width, E experts, N samples, S positions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext, GateContext
from foundry_moe.layers.gates.base import Choices, LinearGate
from foundry_moe.layers.moe import MoELayer
from foundry_moe.layers.progress import Progress
from foundry_moe.ops import plan_routes

# name -> width, microbatch of the paper's MegaBlocks runs; experts are MLPs of 4 D with GELU
SHAPES = {"MoE-XS": (512, 64), "MoE-Small": (768, 32), "MoE-Medium": (1024, 8)}
PAPER = {"MoE-XS": 1.38, "MoE-Small": 2.0, "MoE-Medium": 4.35}
SEQUENCE = 1024
EXPERTS = 64
STEPS, COUNTED = 1500, 64
CAPACITIES: tuple[Any, ...] = (None, 1.0, 1.5, 2.0, "dynamic")
# OLMoE-1B-7B (Muennighoff et al. 2024): width, expert width, and four sequences of 4096
OLMOE = {"width": 2048, "hidden": 1024, "tokens": 16_384}
GATES: list[tuple[dict[str, Any], int]] = [
    ({"name": "topk", "normalize": False}, 8),
    ({"name": "topk", "score": "sigmoid", "bias_balance": True, "groups": 8, "group_limit": 4}, 8),
    ({"name": "topk", "noise": True}, 8),
    ({"name": "ktop1"}, 8),
    ({"name": "hierarchical", "groups": 4}, 8),
    ({"name": "expert_choice"}, 8),
    ({"name": "gshard"}, 2),
    ({"name": "switch"}, 1),
    ({"name": "switch", "jitter": 0.0}, 1),
    ({"name": "hash"}, 1),
    ({"name": "base"}, 1),
]


class RecordedGate(LinearGate):
    """A switch router whose choices are given, so that loads are those of a training and not of random weights."""

    experts_T: Tensor

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        probs_TE = self.logits(x_TD).softmax(-1)
        experts_TK = self.experts_T[:, None]
        return Choices(experts_TK=experts_TK, weights_TK=probs_TE.gather(1, experts_TK))


def milliseconds(run: Callable[[], None], device: torch.device, rounds: int) -> float:
    """The median of a call's time on the device.

    On a GPU the call is queued behind a wait of some 8 ms, so that launches are hidden as they are in a training step
    whose device is busy; what waits for the device in the call itself shows.
    """
    times = []
    for _ in range(rounds + 3):
        synchronize(device)
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(15_000_000)
            start.record()
            run()
            end.record()
            synchronize(device)
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[3:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def build(config: MoEConfig, width: int, device: torch.device, tokens: int) -> MoELayer:
    context = BatchContext()
    context.progress = Progress(ba=1, dur=0.1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = MoELayer(width, config, layer_index=0, num_layers=12, context=context, device=device, dtype=dtype)
    layer.reset_parameters()
    context.note(torch.randint(50_000, (max(tokens // SEQUENCE, 1), min(SEQUENCE, tokens)), device=device))
    return layer


def step(layer: MoELayer, x_TD: Tensor, direction_TD: Tensor) -> Callable[[], None]:
    def run() -> None:
        layer(x_TD).backward(direction_TD)
        for parameter in [*layer.parameters(), x_TD]:
            parameter.grad = None

    return run


class Block(nn.Module):
    """Pre-norm attention and an MoE layer."""

    def __init__(self, width: int, layer: MoELayer) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.moe = layer

    def forward(self, x_NSD: Tensor) -> Tensor:
        n, s, d = x_NSD.shape
        q, k, v = self.qkv(self.norm_1(x_NSD)).view(n, s, 3, d // 64, 64).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_NSD = x_NSD + self.out(mixed.transpose(1, 2).reshape(n, s, d))
        return x_NSD + self.moe(self.norm_2(x_NSD))


def train_routing(tokens_NS: Tensor, device: torch.device, scale: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Choices per expert of each layer of a small trained model, over COUNTED batches after its training, and facts."""
    torch.manual_seed(1)
    width, layers, batch, steps = 256, 4, 32 // min(scale, 8), STEPS // scale
    context = BatchContext()
    config = MoEConfig(
        num_experts=EXPERTS, top_k=1, expert_hidden_size=4 * width // scale, activation="gelu",
        gate={"name": "switch"}, loss={"balance": 0.01},
    )  # fmt: skip
    blocks = []
    for index in range(layers):
        layer = MoELayer(width, config, layer_index=index, num_layers=layers, context=context)
        layer.reset_parameters()
        blocks.append(Block(width, layer))
    vocabulary = int(tokens_NS.max()) + 1
    model = nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.RMSNorm(width), nn.Linear(width, vocabulary))
    nn.init.normal_(model[0].weight, std=0.02)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    tokens_NS = tokens_NS.to(device)
    for index in range(steps + COUNTED):
        if index == steps:
            for block in blocks:
                block.moe.statistics.reset()
        rows = torch.randint(len(tokens_NS), (batch,), device=device)
        ids_NS = tokens_NS[rows].long()
        context.note(ids_NS[:, :-1])
        context.progress = Progress(ba=index)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(ids_NS[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids_NS[:, 1:].flatten())
        context.anchor(loss).backward()
        if index < steps:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        optimizer.zero_grad()
    counts = [block.moe.statistics.counts_E.tolist() for block in blocks]
    ratios = [max(c) * EXPERTS / sum(c) for c in counts]
    facts = {"steps": steps, "loss": loss.item(), "max_over_mean": ratios, "dead": sum(c.count(0) for c in counts)}
    print(json.dumps(facts), flush=True)
    return counts, facts


def compare_capacity(recorded: list[list[int]], device: torch.device, rounds: int, scale: int) -> list[dict[str, Any]]:
    rows = []
    for name, (width, microbatch) in SHAPES.items():
        tokens, width = microbatch * SEQUENCE // scale, width // min(scale, 8)
        row: dict[str, Any] = {"shape": name, "tokens": tokens}
        for capacity in CAPACITIES:
            config = MoEConfig(
                num_experts=EXPERTS, top_k=1, expert_hidden_size=4 * width, activation="gelu",
                gate={"name": "switch"}, loss={}, capacity=capacity,
            )  # fmt: skip
            layer = build(config, width, device, tokens)
            gate = RecordedGate(
                None, d_model=width, num_experts=EXPERTS, top_k=1, device=device, dtype=layer.gate.weight_ED.dtype
            )
            gate.reset_parameters(seed=1, layer=0, std=0.02)
            layer.gate = gate
            x_TD = torch.randn(tokens, width, device=device, dtype=gate.weight_ED.dtype, requires_grad=True)
            direction_TD = torch.randn_like(x_TD)
            times, dropped = [], []
            for index, counts in enumerate(recorded):
                generator = torch.Generator().manual_seed(index)
                share_E = torch.tensor(counts, dtype=torch.float64)
                experts_T = torch.multinomial(share_E, tokens, replacement=True, generator=generator)
                gate.experts_T = experts_T.to(device)
                layer.statistics.reset()
                run = step(layer, x_TD, direction_TD)
                run()
                dropped.append(float(layer.statistics.losses_L.sum()) if capacity is not None else 0.0)
                times.append(milliseconds(run, device, rounds))
            row[str(capacity)] = {"ms": statistics.mean(times), "by_layer": times, "dropped": statistics.mean(dropped)}
        row["speedup over dynamic"] = row["dynamic"]["ms"] / row["None"]["ms"]
        row["paper"] = PAPER[name]
        rows.append(row)
        short = {k: round(v["ms"], 3) if isinstance(v, dict) else v for k, v in row.items()}
        print(json.dumps(short), flush=True)
    return rows


def time_gates(device: torch.device, rounds: int, scale: int) -> list[dict[str, Any]]:
    tokens, width = OLMOE["tokens"] // scale, OLMOE["width"] // scale
    rows = []
    for settings, top_k in GATES:
        config = MoEConfig(
            num_experts=EXPERTS, top_k=top_k, expert_hidden_size=OLMOE["hidden"] // scale, activation="swiglu",
            gate=settings,
        )  # fmt: skip
        layer = build(config, width, device, tokens)
        dtype = next(layer.experts.parameters()).dtype
        x_TD = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
        context = layer.context.for_tokens(tokens, losses=layer.wanted_losses, training=True)

        def gate_and_routing(layer: MoELayer = layer, x_TD: Tensor = x_TD, context: GateContext = context) -> None:
            choices = layer.gate(x_TD, context)
            plan_routes(choices.experts_TK, EXPERTS, choices.rows)
            total = choices.weights_TK.sum() + sum(choices.losses.values())  # type: ignore[operator]
            if total.requires_grad:
                total.backward()
                x_TD.grad = None
                layer.gate.zero_grad()

        gate_ms = milliseconds(gate_and_routing, device, rounds)
        layer_ms = milliseconds(step(layer, x_TD, torch.randn_like(x_TD)), device, rounds)
        rows.append({"gate": settings, "top_k": top_k, "gate_ms": gate_ms, "layer_ms": layer_ms})
        print(json.dumps({**rows[-1], "share": gate_ms / layer_ms}), flush=True)
    return rows


def save_tokens(folder: Path, out: Path) -> None:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), split="train", shuffle=False, batch_size=1)
    torch.save(torch.stack([torch.as_tensor(dataset[i]["tokens"]).short() for i in range(len(dataset))]), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path, help="int16 token ids [samples, positions], written by torch.save")
    parser.add_argument("--save-tokens", type=Path, help="the demo's data, to make that file from; does nothing else")
    parser.add_argument("--out", type=Path, default=Path("capacity.json"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scale", type=int, default=1, help="divide sizes, to try this on a CPU")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.save_tokens:
        save_tokens(arguments.save_tokens, arguments.tokens)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = (device, arguments.rounds, arguments.scale)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    results["gates"] = time_gates(*sizes)
    counts, results["routing"] = train_routing(torch.load(arguments.tokens), device, arguments.scale)
    results["capacity"] = compare_capacity(counts, *sizes)
    arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
