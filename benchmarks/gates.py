"""Trains the demo's model with each gate for the same tokens of real text, and prints a table; draws a plot.

    python benchmarks/gates.py data/demo --batches 60 --out benchmarks/gates.png

Every run has the demo's model, seed, optimizer and order of samples; only gate and capacity differ. On a CPU the
time of a gate is in proportion to a small layer: see benchmarks/capacity.py for times on a GPU.

Shapes: N samples, S positions.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml
from composer import Callback, Trainer
from composer.core import State
from composer.loggers import InMemoryLogger, Logger
from composer.optim import CosineAnnealingWithWarmupScheduler
from llmfoundry.utils.builders import build_composer_model, build_optimizer, build_tokenizer
from streaming import StreamingDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from foundry_moe.callbacks.steps import RouterSteps
from foundry_moe.conversion import moe_layers

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
    "switch, capacity 1.5": {"top_k": 1, "gate": {"name": "switch"}, "capacity": 1.5},
    "switch, capacity 2": {"top_k": 1, "gate": {"name": "switch"}, "capacity": 2.0},
    "switch, capacity dynamic": {"top_k": 1, "gate": {"name": "switch"}, "capacity": "dynamic"},
}
SEED = 17


def read_tokens(folder: Path, split: str, samples: int) -> Tensor:
    """[N, S] int64, shuffled by the seed."""
    dataset = StreamingDataset(local=str(folder), split=split, shuffle=False, batch_size=1)
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(len(dataset), generator=generator)[:samples].tolist()
    return torch.stack([torch.as_tensor(dataset[i]["tokens"]).long() for i in order])


def loader(tokens_NS: Tensor, batch_size: int) -> DataLoader:
    samples = [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens_NS]
    return DataLoader(samples, batch_size=batch_size, drop_last=True)  # type: ignore[arg-type]


class GateClock(Callback):
    """Forward time of gates and of whole layers, and choices by expert over the last third of the training."""

    def __init__(self) -> None:
        self.seconds = {"gate": 0.0, "layer": 0.0}
        self.counts_LE: Tensor | None = None
        self.dropped: list[float] = []
        self.tokens = 0

    def _time(self, module: nn.Module, name: str) -> None:
        started: list[float] = []
        module.register_forward_pre_hook(lambda *_: started.append(time.perf_counter()))

        def stop(*_: Any) -> None:
            self.seconds[name] += time.perf_counter() - started.pop()

        module.register_forward_hook(stop)

    def fit_start(self, state: State, logger: Logger) -> None:
        for layer in moe_layers(state.model):
            self._time(layer, "layer")
            self._time(layer.gate, "gate")

    def batch_end(self, state: State, logger: Logger) -> None:
        layers = moe_layers(state.model)
        counts_LE = torch.stack([layer.statistics.counts_E.clone() for layer in layers])
        late = state.get_elapsed_duration().value > 2 / 3  # type: ignore[union-attr]
        if late:
            self.counts_LE = counts_LE if self.counts_LE is None else self.counts_LE + counts_LE
            self.tokens += state.batch["input_ids"].numel()
        for layer in layers:
            statistics = layer.statistics
            if late and "dropped" in statistics.names:
                share = statistics.losses_L[statistics.names.index("dropped")] / statistics.microbatches_1
                self.dropped.append(float(share))
            statistics.reset()


@torch.no_grad()
def validation_loss(model: Any, data: Path, batch_size: int) -> float:
    """Nats a token, over 64 samples of held-out speeches."""
    model.eval()
    batches = loader(read_tokens(data, "val", 64), batch_size)
    return sum(float(model.loss(model(batch), batch)) for batch in batches) / len(batches)


def train(moe: dict[str, Any], data: Path, batches: int, batch_size: int) -> dict[str, Any]:
    """One run's row of the table, and its losses."""
    run = yaml.safe_load((ROOT / "yamls" / "demo" / "cpu.yaml").read_text())
    model_settings = {**run["model"], "max_seq_len": run["max_seq_len"], "init_device": "cpu"}
    moe = {**{k: v for k, v in model_settings["moe"].items() if k not in ("gate", "loss")}, **moe}
    tokens_NS = read_tokens(data, "train", batches * batch_size)
    if moe.get("gate", {}).get("table") == "balanced":
        counts = torch.bincount(read_tokens(data, "train", 10**9).flatten(), minlength=run["model"]["vocab_size"])
        frequencies = data / "frequencies.json"
        frequencies.write_text(json.dumps(counts.tolist()))
        moe["gate"] = {**moe["gate"], "frequencies": str(frequencies)}
    tokenizer = build_tokenizer(str(data / "tokenizer"), {"model_max_length": run["max_seq_len"]})
    torch.manual_seed(SEED)
    model = build_composer_model(
        name=model_settings.pop("name"), cfg={**model_settings, "moe": moe}, tokenizer=tokenizer
    )
    optimizer_settings = dict(run["optimizer"])
    optimizer = build_optimizer(model, optimizer_settings.pop("name"), optimizer_settings)
    clock, memory = GateClock(), InMemoryLogger()
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup=f"{max(batches // 8, 1)}ba", alpha_f=0.1),
        train_dataloader=loader(tokens_NS, batch_size),
        max_duration=f"{batches}ba",
        callbacks=[clock],
        algorithms=[RouterSteps()],
        loggers=[memory],
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
    trainer.close()
    assert clock.counts_LE is not None
    loads_LE = clock.counts_LE.double()
    return {
        "loss": losses,
        "validation": validation,
        "max_over_mean": float((loads_LE.max(1).values / loads_LE.mean(1)).mean()),
        "dead": int((clock.counts_LE == 0).sum()),
        "experts_per_token": float(loads_LE.sum() / clock.tokens / len(loads_LE)),
        "gate_share": clock.seconds["gate"] / clock.seconds["layer"],
        "dropped": sum(clock.dropped) / len(clock.dropped) if clock.dropped else 0.0,
        "seconds": seconds,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| gate | validation loss | max/mean load | dead experts | experts a token | gate's share of the layer (CPU, "
        "forward) | dropped |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['validation']:.3f} | {row['max_over_mean']:.2f} | {row['dead']} | "
            f"{row['experts_per_token']:.2f} | {row['gate_share']:.0%} | {row['dropped']:.1%} |"
        )
    return "\n".join(lines)


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5))
    for name, row in rows.items():
        window = max(len(row["loss"]) // 12, 1)
        smooth = torch.tensor(row["loss"]).unfold(0, window, 1).mean(1)
        left.plot(range(window, len(row["loss"]) + 1), smooth, label=name, linewidth=1)
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
    parser.add_argument("data", type=Path, help="the demo's data: python -m foundry_moe.demo FOLDER")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of 256 tokens")
    parser.add_argument("--only", nargs="*", default=list(RUNS))
    parser.add_argument("--out", type=Path, default=Path("gates.png"))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = {}
    for name in arguments.only:
        rows[name] = train(RUNS[name], arguments.data, arguments.batches, arguments.batch_size)
        print(name, {k: v for k, v in rows[name].items() if k != "loss"}, flush=True)
        arguments.out.with_suffix(".json").write_text(json.dumps(rows))
    print(table(rows))
    draw(rows, arguments.out)


if __name__ == "__main__":
    main()
