"""The callback `expert_load`: how evenly tokens spread over experts, to any Composer logger.

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from foundry_moe.callbacks.heatmap import BalanceHistory, draw_heatmap
from foundry_moe.callbacks.interval import at_interval
from foundry_moe.callbacks.load_health import CollapseWatch, LoadFile, entropy
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.layers.moe import DROPPED, MoELayer
from foundry_moe.schema import refuse_unknown

log = logging.getLogger(__name__)


def load_metrics(counts_E: Tensor) -> dict[str, float]:
    """Figures of one layer's load.

    Args:
        counts_E: choices per expert, on the CPU.

    Returns:
        min, max, mean, std, p10, p90 (percentiles): choices per expert; max_over_mean: 1 when even; max_violation:
        that less 1, "MaxVio" (Wang et al. 2024, 2408.15664); entropy: of the shares, over log E, so 1 when even; dead:
        experts without a token.
    """
    loads = counts_E.double()
    mean = loads.mean().item()
    max_over_mean = loads.max().item() / mean if mean else 0.0
    return {
        "min": loads.min().item(),
        "max": loads.max().item(),
        "mean": mean,
        "std": loads.std(correction=0).item(),
        "p10": loads.quantile(0.1).item(),
        "p90": loads.quantile(0.9).item(),
        "max_over_mean": max_over_mean,
        "max_violation": max_over_mean - 1 if mean else 0.0,
        "entropy": entropy(counts_E),
        "dead": float((counts_E == 0).sum().item()),
    }


class ExpertLoad(Callback):
    """Logs how tokens spread over experts, over all microbatches and ranks of the batches since it last logged.

    For each MoE layer `dmoe/layer<i>/<figure>` with the figures of `load_metrics`, and `dead_for`: batches that the
    expert which has waited longest has had no token, since this process began; over the layers the worst
    `dmoe/max_over_mean`, the sum `dmoe/dead` and the mean of each auxiliary loss `dmoe/loss/<name>`, unweighted;
    with `capacity`, the share of choices dropped, `dmoe/dropped`.
    A layer whose loads stay on few experts is told in a warning (see `load_health`).
    It reads the device once each time it logs.

    YAML::

        callbacks:
          expert_load:
            interval: 10ba       # how often to log
            shares: true         # also `dmoe/share/expert<i>`, each expert's share of tokens, mean over layers
            heatmap: runs/x/expert_load.png   # loads, and balance by batch; drawn when training ends; null for none
            file: runs/x/expert_load.jsonl    # all loads and figures, a JSON object each time; null for none

    Args:
        interval: a Composer time string.
        shares: log each expert's share; for few experts.
        heatmap: where the picture of layers x experts goes (rank 0 writes it).
        file: where the JSON lines go (rank 0 writes them); a resumed run goes on with them.

    Raises:
        ValueError: an unknown key, or an interval that is none.
    """

    def __init__(
        self,
        interval: str = "1ba",
        shares: bool = False,
        heatmap: str | None = None,
        file: str | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(unknown, ("interval", "shares", "heatmap", "file"), "callbacks.expert_load")
        self.due = at_interval(interval, "callbacks.expert_load.interval")
        self.shares = shares
        self.heatmap = heatmap
        self.file = LoadFile(file) if file else None
        self.watch: CollapseWatch | None = None
        self.total_LE: Tensor | None = None
        self.latest_LE: Tensor | None = None
        self.history: BalanceHistory | None = None

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.due(state, Event.BATCH_END):
            self._log_loads(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self.due(state, Event.EPOCH_END):
            self._log_loads(state, logger)

    def _log_loads(self, state: State, logger: Logger) -> None:
        layers = moe_layers(state.model)
        if not layers:
            return
        counts_LE, losses = _gather(layers)
        for layer in layers:
            layer.statistics.reset()
        self.latest_LE = counts_LE
        self.total_LE = counts_LE if self.total_LE is None else self.total_LE + counts_LE
        batch = state.timestamp.batch.value
        if self.heatmap:
            self.history = self.history or BalanceHistory(len(layers))
            self.history.add(batch, counts_LE)
        names = [layer.layer_index for layer in layers]
        metrics = self._metrics(layers, counts_LE, losses)
        self.watch = self.watch or CollapseWatch(counts_LE.shape[0], counts_LE.shape[1], batch)
        for sentence in self.watch.look(batch, names, counts_LE):
            if dist.get_global_rank() == 0:
                log.warning("%s", sentence)
        waited = zip(names, self.watch.dead_for(batch), strict=True)
        metrics |= {f"dmoe/layer{name}/dead_for": float(batches) for name, batches in waited}
        logger.log_metrics(metrics)
        if self.file is not None and dist.get_global_rank() == 0:
            self.file.add(batch, names, counts_LE, metrics)

    def _metrics(self, layers: list[MoELayer], counts_LE: Tensor, losses: dict[str, float]) -> dict[str, float]:
        per_layer = [load_metrics(counts_E) for counts_E in counts_LE]
        metrics = {
            f"dmoe/layer{layer.layer_index}/{name}": value
            for layer, figures in zip(layers, per_layer, strict=True)
            for name, value in figures.items()
        }
        metrics["dmoe/max_over_mean"] = max(figures["max_over_mean"] for figures in per_layer)
        metrics["dmoe/dead"] = sum(figures["dead"] for figures in per_layer)
        metrics |= {f"dmoe/{name}" if name == DROPPED else f"dmoe/loss/{name}": v for name, v in losses.items()}
        if self.shares:
            share_E = (counts_LE / counts_LE.sum(1, keepdim=True).clamp(min=1)).mean(0)
            metrics |= {f"dmoe/share/expert{e}": share for e, share in enumerate(share_E.tolist())}
        return metrics

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.heatmap and self.total_LE is not None and dist.get_global_rank() == 0:
            names = [f"layer {layer.layer_index}" for layer in moe_layers(state.model)]
            draw_heatmap(self.total_LE, names, Path(self.heatmap), self.history)

    def state_dict(self) -> dict[str, Any]:
        if self.history is None:
            return {"total_LE": self.total_LE}
        return {
            "total_LE": self.total_LE,
            "history_batches_N": self.history.batches_N,
            "history_worst_NL": self.history.worst_NL,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total_LE = state["total_LE"]
        if "history_worst_NL" in state:  # written by runs that draw a picture
            self.history = BalanceHistory(state["history_worst_NL"].shape[1])
            self.history.batches_N = state["history_batches_N"]
            self.history.worst_NL = state["history_worst_NL"]


def _gather(layers: list[MoELayer]) -> tuple[Tensor, dict[str, float]]:
    """Counts [L, E] and mean losses over layers, microbatches and ranks; one reduction, one read of the device."""
    statistics = [layer.statistics for layer in layers]
    experts = max(s.counts_E.shape[0] for s in statistics)
    rows = [torch.nn.functional.pad(s.counts_E, (0, experts - s.counts_E.shape[0])) for s in statistics]
    means = [s.losses_L / s.microbatches_1.clamp(min=1) for s in statistics]
    # fp64 holds counts exactly up to 2^53
    packed = torch.cat([torch.stack(rows).double().flatten(), torch.cat(means).double()])
    dist.all_reduce(packed)
    packed = packed.cpu()
    counts_LE = packed[: len(rows) * experts].view(len(rows), experts).long()
    names = statistics[0].names
    losses_LN = packed[len(rows) * experts :].view(len(rows), len(names)) / dist.get_world_size()
    return counts_LE, dict(zip(names, losses_LN.mean(0).tolist(), strict=True))
