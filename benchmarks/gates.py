"""Trains the demo's model with each gate for the same tokens of real text, and prints a table; draws a plot.

    python benchmarks/gates.py data/demo --batches 400 --out benchmarks/gates.png

Every run has the demo's model, seed, optimizer and order of samples; only gate and capacity differ. Gates and layers
are timed after all runs, with the weights and tokens that training left; at the demo's small sizes, so
benchmarks/gate_time.py measures gates at OLMoE's. On a CPU `--processes` takes several runs at a time; on
one GPU that is slower by far, since processes take turns there for every small kernel.

Shapes: N samples, S positions.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from capacity import save_tokens
from composer import Callback, Trainer
from composer.core import State
from composer.loggers import InMemoryLogger, Logger
from composer.optim import CosineAnnealingWithWarmupScheduler
from gate_time import gate_and_routing, step
from llmfoundry.utils.builders import build_composer_model, build_optimizer, build_tokenizer
from timing import queued_ms
from torch import Tensor
from torch.utils.data import DataLoader

from foundry_moe.algorithms.gate_steps import GateSteps
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.layers.moe import DROPPED, MoELayer

ROOT = Path(__file__).parents[1]
# name of the run -> what differs in `model.moe`
RUNS: dict[str, dict[str, Any]] = {
    "topk": {"top_k": 2},
    "topk, sigmoid + bias": {
        "top_k": 2,
        "gate": {"name": "topk", "score": "sigmoid", "bias_balance": True, "bias_step": 0.01},
        "loss": {},
    },
    "topk, noise + load": {
        "top_k": 2,
        "gate": {"name": "topk", "noise": True},
        "loss": {"importance": 0.01, "load": 0.01},
    },
    "gshard": {"top_k": 2, "gate": {"name": "gshard"}},
    "ktop1": {"top_k": 2, "gate": {"name": "ktop1"}},
    "hierarchical": {
        "top_k": 2,
        "gate": {"name": "hierarchical", "groups": 2},
        "loss": {"balance": 0.01, "alignment": 0.01},
    },
    "expert_choice (sees the future)": {"top_k": 2, "gate": {"name": "expert_choice"}},
    "switch": {"top_k": 1, "gate": {"name": "switch"}},
    "base": {"top_k": 1, "gate": {"name": "base"}},
    "hash, random": {"top_k": 1, "gate": {"name": "hash"}},
    "hash, balanced": {"top_k": 1, "gate": {"name": "hash", "table": "balanced"}},
    "hash, bigram": {"top_k": 1, "gate": {"name": "hash", "table": "bigram"}},
    "dense_to_sparse": {
        "top_k": 1,
        "gate": {
            "name": "dense_to_sparse",
            "temperature": {"start": 1.0, "end": 0.5, "until": "0.5dur", "shape": "exponential"},
            "hard_after": "0.7dur",
        },
    },
    "switch, capacity 1": {"top_k": 1, "gate": {"name": "switch"}, "capacity": 1.0},
    "switch, capacity 1, drop: weight": {
        "top_k": 1,
        "gate": {"name": "switch"},
        "capacity": 1.0,
        "drop": "weight",
    },
    "switch, capacity 1.5": {"top_k": 1, "gate": {"name": "switch"}, "capacity": 1.5},
    "switch, capacity 2": {"top_k": 1, "gate": {"name": "switch"}, "capacity": 2.0},
    "switch, capacity dynamic": {"top_k": 1, "gate": {"name": "switch"}, "capacity": "dynamic"},
}
SEED = 17


def read_tokens(folder: Path, split: str) -> Tensor:
    """[N, S] int64, shuffled by the seed; a file beside the folder is made on the first call."""
    file = folder.with_name(f"{folder.name}.pt")
    if not file.exists():
        save_tokens(folder, file)
    tokens_NS = torch.load(file)[split].long()
    return tokens_NS[torch.randperm(len(tokens_NS), generator=torch.Generator().manual_seed(SEED))]


def loader(tokens_NS: Tensor, batch_size: int) -> DataLoader:
    samples = [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens_NS]
    return DataLoader(samples, batch_size=batch_size, drop_last=True)  # type: ignore[arg-type]


class LateLoads(Callback):
    """Choices by expert and dropped shares over the last third of the training."""

    def __init__(self) -> None:
        self.counts_LE: Tensor | None = None
        self.dropped: Tensor | float = 0.0
        self.batches = 0
        self.tokens = 0

    def batch_end(self, state: State, logger: Logger) -> None:
        layers = moe_layers(state.model)
        if state.get_elapsed_duration().value > 2 / 3:  # type: ignore[union-attr]
            counts_LE = torch.stack([layer.statistics.counts_E for layer in layers])
            self.counts_LE = counts_LE if self.counts_LE is None else self.counts_LE + counts_LE
            self.tokens += state.batch["input_ids"].numel()
            self.batches += 1
            for layer in layers:
                names, scale = layer.statistics.names, layer.statistics.scale_1
                if DROPPED in names:
                    share = layer.statistics.losses_L[names.index(DROPPED)] / scale
                    self.dropped = self.dropped + share / len(layers)
        for layer in layers:
            layer.statistics.reset()


def device_now() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast() -> torch.autocast:
    return torch.autocast(device_now().type, torch.bfloat16, enabled=device_now().type == "cuda")


def on_device(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device_now()) for name, tensor in batch.items()}


@torch.no_grad()
def validation_loss(model: Any, data: Path, batch_size: int) -> float:
    """Nats per token, over 64 samples of held-out speeches."""
    model.eval()
    batches = [on_device(batch) for batch in loader(read_tokens(data, "val")[:64], batch_size)]
    with autocast():
        return sum(float(model.loss(model(batch), batch)) for batch in batches) / len(batches)


@torch.no_grad()
def note_layer(model: Any, tokens_NS: Tensor, file: Path) -> None:
    """Writes the second layer as it was trained, and what it is given: for `time_gate`."""
    layer = moe_layers(model)[1]
    given: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    model.train()
    with autocast():
        model(on_device(next(iter(loader(tokens_NS, len(tokens_NS))))))
    hook.remove()
    progress = layer.context.progress
    saved = {"config": layer.config, "state": layer.state_dict(), "x": given[0], "ids": tokens_NS, "progress": progress}
    torch.save(saved, file)


def time_gate(file: Path, rounds: int = 15) -> tuple[float, float]:
    """Milliseconds of gate and routing, and of the whole layer, forward and backward."""
    device = device_now()
    saved = torch.load(file, map_location=device, weights_only=False)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = saved["x"].to(dtype).flatten(0, 1)
    context = BatchContext()
    layer = MoELayer(
        x.shape[1], saved["config"], layer_index=1, num_layers=4, context=context, device=device, dtype=dtype
    )  # fmt: skip
    layer.load_state_dict(saved["state"])
    context.set_tokens(saved["ids"].to(device))
    context.progress = saved["progress"]
    x_TD = x.requires_grad_()
    for_gate = context.for_tokens(len(x_TD), layer=1, losses=layer.wanted_losses, training=True)

    gate_ms = queued_ms(partial(gate_and_routing, layer, x_TD, for_gate), device, rounds)
    return gate_ms, queued_ms(partial(step, layer, x_TD, torch.randn_like(x_TD)), device, rounds)


def train(moe: dict[str, Any], data: Path, batches: int, batch_size: int, layer_file: Path) -> dict[str, Any]:
    """One run's row of the table, and its losses."""
    run = yaml.safe_load((ROOT / "yamls" / "demo" / "cpu.yaml").read_text())
    model_settings = {**run["model"], "max_seq_len": run["max_seq_len"], "init_device": "cpu"}
    moe = {**{k: v for k, v in model_settings["moe"].items() if k not in ("gate", "loss")}, **moe}
    tokens_NS = read_tokens(data, "train")
    if moe.get("gate", {}).get("table") == "balanced":
        counts = torch.bincount(tokens_NS.flatten(), minlength=run["model"]["vocab_size"])
        frequencies = layer_file.with_suffix(".json")
        frequencies.write_text(json.dumps(counts.tolist()))
        moe["gate"] = {**moe["gate"], "frequencies": str(frequencies)}
    tokens_NS = tokens_NS[: batches * batch_size]
    tokenizer = build_tokenizer(str(data / "tokenizer"), {"model_max_length": run["max_seq_len"]})
    torch.manual_seed(SEED)
    model = build_composer_model(
        name=model_settings.pop("name"), cfg={**model_settings, "moe": moe}, tokenizer=tokenizer
    )
    optimizer_settings = dict(run["optimizer"])
    cuda = device_now().type == "cuda"
    # the same steps; Composer's own synchronises with a GPU once for each parameter
    name = optimizer_settings.pop("name") + ("_fused" if cuda else "")
    optimizer = build_optimizer(model, name, optimizer_settings)
    late, memory = LateLoads(), InMemoryLogger()
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup=f"{max(batches // 8, 1)}ba", alpha_f=0.1),
        train_dataloader=loader(tokens_NS, batch_size),
        max_duration=f"{batches}ba",
        callbacks=[late],
        algorithms=[GateSteps()],
        loggers=[memory],
        device="gpu" if cuda else "cpu",
        precision="amp_bf16" if cuda else "fp32",
        progress_bar=False,
        log_to_console=False,
        save_folder=None,
        seed=SEED,
    )
    start = time.perf_counter()
    trainer.fit()
    seconds = time.perf_counter() - start
    losses = [float(value) for value in memory.get_timeseries("loss/train/total")["loss/train/total"]]
    validation = validation_loss(model, data, batch_size)
    note_layer(model, tokens_NS[:batch_size], layer_file)
    trainer.close()
    assert late.counts_LE is not None
    loads_LE = late.counts_LE.double().cpu()
    return {
        "loss": losses,
        "validation": validation,
        "max_over_mean": float((loads_LE.max(1).values / loads_LE.mean(1)).mean()),
        "dead": int((loads_LE == 0).sum()),
        "experts_per_token": float(loads_LE.sum() / late.tokens / len(loads_LE)),
        "dropped": float(late.dropped) / late.batches,
        "seconds": seconds,
    }


def train_quietly(name: str, data: Path, batches: int, batch_size: int, layer_file: Path) -> dict[str, Any]:
    """`train`, and its row printed."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    row = train(dict(RUNS[name]), data, batches, batch_size, layer_file)
    print(name, {k: v for k, v in row.items() if k != "loss"}, flush=True)
    return row


def trained(files: dict[str, Path], arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each run's row as it comes: one after another, or several at a time in processes of their own."""
    settings = (arguments.data, arguments.batches, arguments.batch_size)
    if arguments.processes == 1:
        for name, file in files.items():
            yield name, train_quietly(name, *settings, file)
        return
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        runs = {pool.submit(train_quietly, name, *settings, file): name for name, file in files.items()}
        for run in as_completed(runs):
            yield runs[run], run.result()


def batches_within(seconds: float, arguments: argparse.Namespace, folder: Path) -> int:
    """How many batches per run may have, from the time of a typical gate once its kernels are compiled."""
    probe = "topk, noise + load"
    for batches in (6, 40):
        row = train_quietly(probe, arguments.data, batches, arguments.batch_size, folder / "probe.pt")
    return int(seconds / (row["seconds"] / batches)) // 20 * 20


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| gate | validation loss | max/mean load | dead experts | experts per token | dropped | gate + routing, ms | "
        "of the layer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['validation']:.3f} | {row['max_over_mean']:.2f} | {row['dead']} | "
            f"{row['experts_per_token']:.2f} | {row['dropped']:.1%} | {row['gate_ms']:.2f} | "
            f"{row['gate_ms'] / row['layer_ms']:.0%} |"
        )
    return "\n".join(lines)


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5))
    for index, (name, row) in enumerate(rows.items()):
        window = max(len(row["loss"]) // 12, 1)
        smooth = torch.tensor(row["loss"]).unfold(0, window, 1).mean(1)
        left.plot(range(window, len(row["loss"]) + 1), smooth, label=name, linewidth=1, color=plt.cm.tab20(index))
    left.set_xlabel("batch")
    left.set_ylabel("training loss (moving mean)")
    left.legend(fontsize=7)
    names = list(rows)
    right.barh(names, [rows[name]["max_over_mean"] for name in names], color="#7a9cc6")
    right.invert_yaxis()
    right.set_xlabel("largest over mean load, mean of layers, last third")
    right.tick_params(axis="y", labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the demo's data: python examples/demo_data.py FOLDER")
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--seconds", type=float, help="as many batches as all runs together have in this time")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of 256 tokens")
    parser.add_argument("--processes", type=int, default=1, help="runs side by side")
    parser.add_argument("--only", nargs="*", default=list(RUNS))
    parser.add_argument("--out", type=Path, default=Path("gates.png"))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    read_tokens(arguments.data, "val")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.seconds:
            arguments.batches = batches_within(arguments.seconds / len(arguments.only), arguments, Path(folder))
        files = {name: Path(folder) / f"{index}.pt" for index, name in enumerate(arguments.only)}
        for name, row in trained(files, arguments):
            rows[name] = row
            arguments.out.with_suffix(".json").write_text(json.dumps(rows))
        rows = {name: rows[name] for name in arguments.only}
        for name, row in rows.items():
            row["gate_ms"], row["layer_ms"] = time_gate(files[name])
    arguments.out.with_suffix(".json").write_text(json.dumps(rows))
    print(table(rows))
    draw(rows, arguments.out)


if __name__ == "__main__":
    main()
