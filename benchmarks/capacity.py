"""On a GPU: dropless against token dropping.

    python benchmarks/capacity.py data/demo.pt

Dropless against `capacity`, at the shapes of the MegaBlocks paper (Gale et al. 2022, table 1: 64 experts, top-1,
sequences of 1024), in bf16. First MoE-XS is trained on real text with each layout on the same tokens: loss, dropped
share, time of a step. Then one layer of each shape and whole microbatches of each shape are timed, with the choices
that the trained dropless model makes. Both sides share the gate, and place, copy, weigh and sum tokens in kernels;
the dropless side multiplies in its ragged kernels, the padded one in cuBLAS's batched products.

The argument holds int16 token ids [samples, positions] of `train` and `val`; `--save-tokens FOLDER` makes it from the
demo's data.

Shapes: T tokens, D model width, E experts, N samples, S positions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gate_time import step
from papers.transformer import Transformer, long_sequences
from timing import queued_ms
from torch import Tensor

from foundry_moe.config import MoEConfig
from foundry_moe.layers.aux_loss import LoadStatistics
from foundry_moe.layers.context import BatchContext, GateContext
from foundry_moe.layers.gates.gate import Choices, LinearGate
from foundry_moe.layers.moe import DROPPED, MoELayer
from foundry_moe.layers.schedule import Progress

# name -> width, microbatch of the paper's MegaBlocks runs; experts are MLPs of 4 D with GELU
SHAPES = {"MoE-XS": (512, 64), "MoE-Small": (768, 32), "MoE-Medium": (1024, 8)}
PAPER = {"MoE-XS": 1.38, "MoE-Small": 2.0, "MoE-Medium": 4.35}
SEQUENCE = 1024
EXPERTS = 64
DEPTHS = {"MoE-XS": 6, "MoE-Small": 12, "MoE-Medium": 24}
CAPACITIES: tuple[Any, ...] = (None, 1.0, 1.5, 2.0, "dynamic")
TRAININGS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "capacity 1": {"capacity": 1.0},
    "capacity 1, drop: weight": {"capacity": 1.0, "drop": "weight"},
    "capacity 1.5": {"capacity": 1.5},
    "capacity 2": {"capacity": 2.0},
    "dynamic": {"capacity": "dynamic"},
}
PARTS = ("training", "layers", "microbatches")


class RecordedGate(LinearGate):
    """A switch gate whose choices are given, so that loads are those of a training and not of random weights."""

    experts_T: Tensor

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        probs_TE = self.logits(x_TD).softmax(-1)
        experts_TK = self.experts_T[:, None]
        return Choices(experts_TK=experts_TK, weights_TK=probs_TE.gather(1, experts_TK))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def build(config: MoEConfig, width: int, device: torch.device, tokens: int) -> MoELayer:
    context = BatchContext()
    context.progress = Progress(ba=1, dur=0.1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = MoELayer(width, config, layer_index=0, num_layers=12, context=context, device=device, dtype=dtype)
    layer.reset_parameters()
    context.set_tokens(torch.randint(50_000, (max(tokens // SEQUENCE, 1), min(SEQUENCE, tokens)), device=device))
    return layer


def train_equal(
    tokens: dict[str, Tensor], layouts: list[str], steps: int, device: torch.device, scale: int
) -> tuple[list[dict[str, Any]], Tensor]:
    """MoE-XS itself, trained on the same tokens with each way to lay out its experts.

    Returns:
        A row for each; and the choices of the dropless model's layers after its training, [layers, T].
    """
    width, layers = SHAPES["MoE-XS"][0] // min(scale, 8), DEPTHS["MoE-XS"] // min(scale, 3)
    batch, length = 8, SEQUENCE // scale
    train_NS = long_sequences(tokens["train"], length, device)
    valid_NS = long_sequences(tokens["val"], length, device)[:64]
    vocabulary = int(tokens["train"].max()) + 1
    rows, choices_LT = [], torch.empty(0)
    for name in layouts:
        run = Transformer(width, layers, vocabulary, device, **TRAININGS[name])
        schedule = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 1e-3, total_steps=steps, pct_start=0.1)
        generator = torch.Generator().manual_seed(0)
        epochs = steps * batch // len(train_NS) + 1
        order = torch.cat([torch.randperm(len(train_NS), generator=generator) for _ in range(epochs)]).to(device)
        began = 0.0
        for index in range(steps):
            if index == steps // 2:
                synchronize(device)
                began = time.perf_counter()
            if index == 2 * steps // 3:
                for layer in run.moes:
                    layer.statistics.reset()
            run.step(train_NS[order[index * batch : (index + 1) * batch]], index)
            schedule.step()
        synchronize(device)
        ms = 1e3 * (time.perf_counter() - began) / (steps - steps // 2)
        counts_LE = torch.stack([layer.statistics.counts_E for layer in run.moes]).double()
        dropped = [
            float(layer.statistics.losses_L[layer.statistics.names.index(DROPPED)] / layer.statistics.scale_1)
            for layer in run.moes
            if DROPPED in layer.statistics.names
        ]
        run.model.eval()
        with torch.no_grad():
            losses = [run.loss(part, steps).item() for part in valid_NS.split(batch)]
        run.model.train()
        row = {
            "layout": name,
            "validation": statistics.mean(losses),
            "ms": ms,
            "dropped": statistics.mean(dropped) if dropped else 0.0,
            "max_over_mean": (counts_LE.max(1).values / counts_LE.mean(1)).tolist(),
            "tokens": steps * batch * length,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        if name == "dropless":
            wanted = max(microbatch for _, microbatch in SHAPES.values()) // min(scale, 8)
            choices_LT = choices_of(run, train_NS[order[:wanted]], steps)
    return rows, choices_LT


@torch.no_grad()
def choices_of(run: Transformer, ids_NS: Tensor, batch: int) -> Tensor:
    """[layers, T]: the experts that a trained model's tokens go to, in training mode."""
    noted: list[list[Tensor]] = [[] for _ in run.moes]

    def note(here: list[Tensor]) -> Callable[..., None]:
        return lambda gate, inputs, choices: here.append(choices.experts_TK[:, 0])

    hooks = [layer.gate.register_forward_hook(note(here)) for layer, here in zip(run.moes, noted, strict=True)]
    for part in ids_NS.split(8):
        run.loss(part, batch)
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.cat(parts) for parts in noted])


def set_capacity(layer: MoELayer, capacity: Any) -> None:
    layer.config = replace(layer.config, capacity=capacity)
    layer.statistics = LoadStatistics(EXPERTS, [] if capacity is None else [DROPPED])
    layer.loss_weights, layer.wanted_losses = {}, frozenset()


def recorded_gate(width: int, device: torch.device, dtype: torch.dtype) -> RecordedGate:
    gate = RecordedGate(None, d_model=width, num_experts=EXPERTS, top_k=1, device=device, dtype=dtype)
    gate.reset_parameters(seed=1, layer=0, std=0.02)
    return gate


def compare_layers(choices_LT: Tensor, device: torch.device, rounds: int, scale: int) -> list[dict[str, Any]]:
    """One layer, forward and backward, with the choices of each trained layer in turn."""
    rows = []
    for name, (width, microbatch) in SHAPES.items():
        tokens, width = min(microbatch * SEQUENCE // scale, choices_LT.shape[1]), width // min(scale, 8)
        loads_LE = torch.stack([torch.bincount(e[:tokens], minlength=EXPERTS) for e in choices_LT]).double()
        fullest = (loads_LE.max(1).values / loads_LE.mean(1)).tolist()
        row: dict[str, Any] = {"shape": name, "tokens": tokens, "max_over_mean": fullest}
        config = MoEConfig(
            num_experts=EXPERTS, top_k=1, expert_hidden_size=4 * width, activation="gelu", gate={"name": "switch"},
            loss={},
        )  # fmt: skip
        layer = build(config, width, device, tokens)
        layer.gate = gate = recorded_gate(width, device, layer.experts.w1_EFD.dtype)
        x_TD = torch.randn(tokens, width, device=device, dtype=gate.weight_ED.dtype, requires_grad=True)
        direction_TD = torch.randn_like(x_TD)
        for capacity in CAPACITIES:
            set_capacity(layer, capacity)
            times, dropped = [], []
            for experts_T in choices_LT:
                gate.experts_T = experts_T[:tokens]
                layer.statistics.reset()
                run = partial(step, layer, x_TD, direction_TD)
                run()
                dropped.append(float(layer.statistics.losses_L.sum()) if capacity is not None else 0.0)
                times.append(queued_ms(run, device, rounds))
            row[str(capacity)] = {"ms": statistics.mean(times), "by_layer": times, "dropped": statistics.mean(dropped)}
        row["speedup over dynamic"] = row["dynamic"]["ms"] / row["None"]["ms"]
        rows.append(row)
        short = {k: round(v["ms"], 3) if isinstance(v, dict) else v for k, v in row.items()}
        print(json.dumps(short), flush=True)
    return rows


def compare_microbatches(choices_LT: Tensor, device: torch.device, rounds: int, scale: int) -> list[dict[str, Any]]:
    """Forward and backward of whole models at the paper's microbatch, bf16 weights; layers choose as trained ones do.

    Without the optimizer: one GPU has all 64 experts' weights here, of which each of the paper's eight holds an eighth.
    """
    rows = []
    for name, (width, microbatch) in SHAPES.items():
        microbatch, width, layers = max(microbatch // min(scale, 8), 1), width // min(scale, 8), DEPTHS[name]
        layers = layers if scale == 1 else 2
        run = Transformer(width, layers, 4096, device, dtype=torch.bfloat16)
        ids_NS = torch.randint(4096, (microbatch, SEQUENCE // scale + 1), device=device)
        tokens = microbatch * (SEQUENCE // scale)
        for index, layer in enumerate(run.moes):
            layer.gate = gate = recorded_gate(width, device, torch.bfloat16)
            gate.experts_T = choices_LT[index % len(choices_LT)][:tokens]
        times: dict[str, list[float]] = {str(capacity): [] for capacity in CAPACITIES}
        peaks = dict.fromkeys(times, 0.0)
        for index in range(rounds // 2 + 2):
            for capacity in CAPACITIES:  # in turn, so that a drift of the clock is everybody's
                for layer in run.moes:
                    set_capacity(layer, capacity)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                synchronize(device)
                began = time.perf_counter()
                run.context.track_scale(run.loss(ids_NS, index)).backward()
                synchronize(device)
                times[str(capacity)].append(1e3 * (time.perf_counter() - began))
                peaks[str(capacity)] = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
                run.model.zero_grad()
        row: dict[str, Any] = {"shape": name, "tokens": tokens, "layers": layers}
        for key, values in times.items():
            row[key] = {"ms": statistics.median(values[2:]), "peak_GB": peaks[key]}
        row["speedup over dynamic"] = row["dynamic"]["ms"] / row["None"]["ms"]
        row["paper"] = PAPER[name]
        rows.append(row)
        print(json.dumps(row), flush=True)
        del run, layer, gate
    return rows


def save_tokens(folder: Path, out: Path) -> None:
    from streaming import StreamingDataset

    saved = {}
    for split in ("train", "val"):
        dataset = StreamingDataset(local=str(folder), split=split, shuffle=False, batch_size=1)
        saved[split] = torch.stack([torch.as_tensor(dataset[i]["tokens"]).short() for i in range(len(dataset))])
    torch.save(saved, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path, help="written by --save-tokens")
    parser.add_argument("--save-tokens", type=Path, help="the demo's data, to make that file from; does nothing else")
    parser.add_argument("--out", type=Path, default=Path("capacity.json"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=500, help="of each training")
    layouts = list(TRAININGS)
    parser.add_argument("--layouts", nargs="*", default=layouts, choices=layouts, help="to train; dropless is needed")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS, help="the last two need training")
    parser.add_argument("--scale", type=int, default=1, help="divide sizes, to try this on a CPU")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.save_tokens:
        save_tokens(arguments.save_tokens, arguments.tokens)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = (device, arguments.rounds, arguments.scale)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    only = set(arguments.only)
    if "training" in only:
        results["training"], choices_LT = train_equal(
            torch.load(arguments.tokens), arguments.layouts, max(arguments.steps // arguments.scale, 6), device,
            arguments.scale,
        )  # fmt: skip
        if "layers" in only:
            results["layers"] = compare_layers(choices_LT, *sizes)
        if "microbatches" in only:
            results["microbatches"] = compare_microbatches(choices_LT, *sizes)
    arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
