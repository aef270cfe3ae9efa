"""The callback `expert_load`: how evenly tokens spread over experts, to any Composer logger.

Shapes: L MoE layers, E experts, P ranks that share the experts of a layer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch
from composer.core import Callback, Event, State, Time
from composer.loggers import Logger
from composer.utils import create_interval_scheduler, dist
from torch import Tensor

from foundry_moe.callbacks.load_health import CollapseWatch, LoadFile
from foundry_moe.launch.run_values import load_file_mistakes
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.layers.moe import DROPPED, GATE_ENTROPY, MoELayer
from foundry_moe.loads.history import entropy_of
from foundry_moe.schema import UserError, checks_keys, raise_mistakes
from foundry_moe.times import parse_time

log = logging.getLogger(__name__)

RANK_MAX_OVER_MEAN = "rank_max_over_mean"
ROUNDS = "rounds"
ROUTER_BIAS = "router_bias"
_NO_LOSS = (DROPPED, GATE_ENTROPY)
_LOWEST_IS_WORST = ("load_entropy", GATE_ENTROPY)
_LOSS = "loss/train/total"


def at_interval(interval: str, where: str) -> Callable[[State, Event], bool]:
    """Whether the interval ends with this event (ask at BATCH_END and EPOCH_END); true at the end of training too.

    Raises:
        ValueError: `interval` is no time, or not above 0; `where` names the key.
    """
    every = parse_time(interval)
    if every is None or not every.of_composer or (every.unit != "dur" and every.amount % 1):
        raise UserError(f"{where} ({interval!r}) must be a time such as 10ba, 1ep or 100000tok")
    if every.amount <= 0:
        raise UserError(f"{where} ({interval!r}) must be above 0")
    amount = every.amount if every.unit == "dur" else int(every.amount)
    return create_interval_scheduler(Time(amount, every.unit), checkpoint_events=False, final_events={Event.BATCH_END})


def load_metrics(counts_E: Tensor) -> dict[str, float]:
    """Figures of one layer's load, which do not depend on the number of tokens.

    Args:
        counts_E: choices per expert, on the CPU.

    Returns:
        max_violation: the fullest expert's load over the mean, less 1: "MaxVio" (Wang et al. 2024, 2408.15664), 0 when
        even; load_entropy: of the shares, over log E, 1 when even; fullest_share: the fullest expert's share of the
        choices; dead: the share of experts without a token.
    """
    total = int(counts_E.sum())
    fullest_share = counts_E.max().item() / total if total else 0.0
    return {
        "max_violation": fullest_share * len(counts_E) - 1 if total else 0.0,
        "load_entropy": entropy_of(counts_E.double().numpy()),
        "fullest_share": fullest_share,
        "dead": (counts_E == 0).double().mean().item(),
    }


def over_layers(per_layer: list[dict[str, float]]) -> dict[str, float]:
    """`<figure>/worst` and `<figure>/mean` over layers: the lowest entropy, and the highest of other figures."""
    found = {}
    for name in per_layer[0]:
        values = [figures[name] for figures in per_layer]
        found[f"{name}/worst"] = min(values) if name in _LOWEST_IS_WORST else max(values)
        found[f"{name}/mean"] = sum(values) / len(values)
    return found


class ExpertLoad(Callback):
    """Logs how tokens spread over experts, over all microbatches and ranks of the batches since it last logged.

    `dmoe/<figure>/worst` and `dmoe/<figure>/mean` over the MoE layers, with the figures of `load_metrics`, and:

    - `gate_entropy`: mean entropy of a token's probabilities, over log E; 1 = the gate has no preference.
    - `dropped`: with `capacity`, the share of choices dropped.
    - `loss/<name>`: each auxiliary loss, unweighted.
    - `router_bias`: the largest magnitude of a gate's balancing bias, if it has one.
    - `rank_max_over_mean`: the rows (choices) that come to the fullest rank over the mean of the ranks that share the
      layer's experts, in the worst of these groups; 1 if no experts are divided over ranks.
    - `rounds`: the largest number of rounds in a dispatch; 1 unless `mesh.buffer` was exceeded.

    With `per_layer`, `dmoe/layer<i>/<figure>` too.
    A warning names a layer whose loads stay on few experts (see `load_health`).
    Each log reads the device once.

    Args:
        interval: how often to log, a Composer time string such as `10ba`.
        per_layer: log each layer's figures; `file` has them anyway.
        shares: log `dmoe/share/expert<i>`, each expert's share of tokens, mean over layers; for few experts.
        file: where all loads and figures go, a JSON object each time (rank 0 writes them); a resumed run appends.
        html: where a page of `file` goes when training ends; `foundry-moe loads FILE.jsonl --html OUT` makes one at any
            time.

    Raises:
        ValueError: an unknown key, an invalid interval, `file` that is a URI, or `html` without another `file`.
    """

    @checks_keys("callbacks.expert_load")
    def __init__(
        self,
        interval: str = "1ba",
        per_layer: bool = False,
        shares: bool = False,
        file: str | None = None,
        html: str | None = None,
    ) -> None:
        raise_mistakes(load_file_mistakes(file, html))
        self.due = at_interval(interval, "callbacks.expert_load.interval")
        self.per_layer = per_layer
        self.shares = shares
        self.file = LoadFile(file) if file else None
        self.html = html
        self.watch = CollapseWatch()
        self.latest_LE: Tensor | None = None
        self.latest_batch = 0  # whose loads these are
        self.latest: dict[str, float] = {}  # metrics
        self._begun = False

    def fit_start(self, state: State, logger: Logger) -> None:
        for layer in moe_layers(state.model):
            layer.measure_gate()

    def batch_start(self, state: State, logger: Logger) -> None:
        if not self._begun:  # Composer's SeqLengthWarmup has run the longest batch, which trains nothing
            self._begun = True
            if self.file is not None:
                self.file.start = state.timestamp.batch.value
            for layer in moe_layers(state.model):
                layer.statistics.reset()

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
        counts_LE, per_layer = _gather(layers)
        for layer in layers:
            layer.statistics.reset()
        batch = state.timestamp.batch.value
        self.latest_LE, self.latest_batch = counts_LE, batch
        names, top_k = [layer.layer_index for layer in layers], layers[0].config.top_k
        entropy_L = [figures["load_entropy"] for figures in per_layer]
        for sentence in self.watch.look(names, counts_LE, entropy_L, top_k=top_k):
            if dist.get_global_rank() == 0:
                log.warning("%s", sentence)
        metrics = self.latest = {f"dmoe/{name}": value for name, value in over_layers(per_layer).items()}
        of_layers = {
            f"dmoe/layer{layer}/{name}": value
            for layer, figures in zip(names, per_layer, strict=True)
            for name, value in figures.items()
        }
        if self.shares:
            share_E = (counts_LE / counts_LE.sum(1, keepdim=True).clamp(min=1)).mean(0)
            metrics |= {f"dmoe/share/expert{e}": share for e, share in enumerate(share_E.tolist())}
        logger.log_metrics({**metrics, **(of_layers if self.per_layer else {})})
        if self.file is not None and dist.get_global_rank() == 0:
            losses = state.total_loss_dict or {}
            loss = {_LOSS: losses[_LOSS]} if _LOSS in losses else {}
            self.file.add(batch, names, counts_LE, {**metrics, **of_layers, **loss}, top_k=top_k)

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.html and self.file is not None and self.file.path.exists() and dist.get_global_rank() == 0:
            from foundry_moe.loads.page import write_page  # Bokeh takes a second

            try:
                write_page(self.file.path, Path(self.html).expanduser())
            except UserError as error:  # for example of an older run in the same file, which must not end this one
                log.warning("callbacks.expert_load.html: %s", error)


def _gather(layers: list[MoELayer]) -> tuple[Tensor, list[dict[str, float]]]:
    """Counts [L, E] over microbatches and ranks, and the figures of each layer; reads the device once."""
    statistics = [layer.statistics for layer in layers]
    experts = max(s.counts_E.shape[0] for s in statistics)
    rows = [torch.nn.functional.pad(s.counts_E, (0, experts - s.counts_E.shape[0])) for s in statistics]
    # fp64 holds counts exactly up to 2^53
    sums = [tensor.double() for s in statistics for tensor in (s.losses_L, s.scale_1)]
    packed = torch.cat([torch.stack(rows).double().flatten(), *sums])
    dist.all_reduce(packed)
    others = {**dict(zip((RANK_MAX_OVER_MEAN, ROUNDS), _worst_ranks(layers), strict=True)), **_biases(layers)}
    packed = torch.cat([packed, *(values_L.to(packed) for values_L in others.values())]).cpu()
    counts_LE = packed[: len(rows) * experts].view(len(rows), experts).long()
    names = statistics[0].names
    sums_LN = packed[counts_LE.numel() :][: len(rows) * (len(names) + 1)].view(len(rows), -1)
    means_LN = sums_LN[:, :-1] / sums_LN[:, -1:].clamp(min=torch.finfo(torch.float32).tiny)
    figures = [name if name in _NO_LOSS else f"loss/{name}" for name in names]
    measured = dict(zip(figures, means_LN.T.tolist(), strict=True))
    if not all(map(math.isfinite, measured.get(GATE_ENTROPY, ()))):  # a gate without logits
        del measured[GATE_ENTROPY]
    rest = packed[counts_LE.numel() + sums_LN.numel() :].view(len(others), len(rows)).tolist()
    measured |= zip(others, rest, strict=True)
    per_layer = [load_metrics(counts_E) for counts_E in counts_LE]
    for index, of_layer in enumerate(per_layer):
        of_layer |= {name: values[index] for name, values in measured.items()}
    return counts_LE, per_layer


def _biases(layers: list[MoELayer]) -> dict[str, Tensor]:
    """By layer, the largest magnitude of the gate's balancing bias; empty if a gate has none."""
    biases = [getattr(layer.gate, "bias_E", None) for layer in layers]
    found = [bias_E.abs().amax() for bias_E in biases if bias_E is not None]
    return {ROUTER_BIAS: torch.stack(found)} if len(found) == len(layers) else {}


def _worst_ranks(layers: list[MoELayer]) -> Tensor:
    """By layer, the rows of the fullest rank over the mean, and the most rounds: [2, L].

    Each group of ranks that shares experts has its own tokens: the worst group counts, which sums over all ranks hide.
    """
    counts = [layer.statistics.counts_E for layer in layers]
    if all(layer.dispatcher.local_experts == len(counts_E) for layer, counts_E in zip(layers, counts, strict=True)):
        return torch.ones(2, len(layers))
    summed = layers[0].context.sum_over_group(torch.cat(counts))
    fullest = []
    for layer, counts_E in zip(layers, summed.split([len(counts_E) for counts_E in counts]), strict=True):
        rows_P = counts_E.view(-1, layer.dispatcher.local_experts).sum(1).double()
        fullest.append(rows_P.amax() / rows_P.mean().clamp(min=1))
    rounds = [layer.experts.most_rounds for layer in layers]
    for layer in layers:
        layer.experts.most_rounds = 1
    worst_2L = torch.stack([torch.stack(fullest), torch.tensor(rounds).to(fullest[0])])
    dist.all_reduce(worst_2L, reduce_operation="MAX")
    return worst_2L
