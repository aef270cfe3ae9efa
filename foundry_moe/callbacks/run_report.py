"""The callback `run_report`: progress lines during the run and a summary at the end."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.core import Callback, Event, State
from composer.loggers import Logger, ProgressBarLogger
from composer.utils import dist
from torch import nn
from tqdm.auto import tqdm

from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.callbacks.expert_load import ExpertLoad, at_interval
from foundry_moe.flops import causal_lm
from foundry_moe.layers.moe import DROPPED
from foundry_moe.schema import UserError, checks_keys

_LOSS = "loss/train/total"
_EVAL_LOSS = "LanguageCrossEntropy"
_VALIDATION = "validation loss"
_SAME_AS_LOSS = ("LanguagePerplexity", "TokenAccuracy")


class RunReport(Callback):
    """Prints a line after the first batch and every `interval`, and at the end losses, checkpoint and a text sample.

    The line shows batch, loss, tokens per second of all ranks, MFU (on a GPU), the time left (ETA),
    and, with the callback `expert_load`, the largest share of a layer's tokens that one expert has and the share of
    choices that were dropped. Rate and ETA do not include evaluation. Each evaluation has lines of its own.

    YAML:

        callbacks:
          run_report: {interval: 10ba, prompt: "The state of the union is", facts: data/demo/facts.json}

    Args:
        interval: a Composer time string.
        prompt: beginning of the sample; empty = no sample.
        sample_tokens: length of the sample.
        facts: a JSON file with `unigram_loss`, the loss of a unigram model to compare with.

    Raises:
        ValueError: an unknown key, an invalid interval or length, or no such file.
    """

    @checks_keys("callbacks.run_report")
    def __init__(
        self,
        interval: str = "10ba",
        prompt: str = "",
        sample_tokens: int = 48,
        facts: str | None = None,
    ) -> None:
        self.due = at_interval(interval, "callbacks.run_report.interval")
        self.prompt = prompt
        if sample_tokens < 1:
            raise UserError(f"callbacks.run_report.sample_tokens ({sample_tokens}) must be at least 1")
        self.sample_tokens = sample_tokens
        self.facts = read_facts(facts) if facts else {}
        self.losses: dict[str, float] = {}
        self._clock = (0, 0.0, 0.0)  # see `_clock`
        self._mfu_of_rate: float | None = None
        self._first = True  # until the first batch of this process
        self._evaluations_to_come = 0

    def init(self, state: State, logger: Logger) -> None:
        for destination in logger.destinations:
            if isinstance(destination, ProgressBarLogger):  # it would print the whole configuration
                destination.hparams_already_logged_to_console = True

    def after_load(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value:
            _print(f"resuming at batch {state.timestamp.batch.value}")

    def fit_start(self, state: State, logger: Logger) -> None:
        # last of all callbacks: the line has the loads of its own batch, and the summary waits for the last checkpoint
        state.callbacks = [*(callback for callback in state.callbacks if callback is not self), self]
        self._clock = _clock(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        losses = state.total_loss_dict or {}
        if _LOSS in losses:
            self.losses.setdefault("first", losses[_LOSS])
            self.losses["last"] = losses[_LOSS]
        first, self._first = self._first, False
        if first:
            self._mfu_of_rate = _mfu_of_rate(state)
        if self.due(state, Event.BATCH_END) or first:
            _print(self._line(state))

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self.due(state, Event.EPOCH_END):
            _print(self._line(state))

    def eval_end(self, state: State, logger: Logger) -> None:
        """Called after each evaluator; `state.dataloader_label` is that of the one that has ended."""
        batch, label = state.timestamp.batch.value, str(state.dataloader_label)
        loss_name = _VALIDATION if len(state.evaluators) == 1 else f"{_VALIDATION} ({label})"
        for name, metric in state.eval_metrics[label].items():
            value = float(metric.compute())
            if name == _EVAL_LOSS:
                self.losses[loss_name] = value
                _print(f"batch {batch}: {loss_name} {value:.4f}")
            elif math.isfinite(value) and name not in _SAME_AS_LOSS:
                _print(f"batch {batch}: {label} {name} {value:.4f}")
        if self._evaluations_to_come:
            self._evaluations_to_come -= 1
            if not self._evaluations_to_come:
                _print(self._page(state))

    def fit_end(self, state: State, logger: Logger) -> None:
        # Composer evaluates once more after this event where the last interval was not full: the page waits for it
        self._evaluations_to_come = sum(evaluator.eval_interval(state, Event.FIT_END) for evaluator in state.evaluators)
        if not self._evaluations_to_come:
            _print(self._page(state))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = {_VALIDATION if name == "validation" else name: loss for name, loss in state["losses"].items()}

    def _line(self, state: State) -> str:
        tokens_before, before_s, done_before = self._clock
        tokens, now_s, done = self._clock = _clock(state)
        seconds = max(now_s - before_s, 1e-9)
        rate = (tokens - tokens_before) / seconds
        parts = [
            f"batch {state.timestamp.batch.value}/{state.max_duration}",
            f"loss {self.losses.get('last', float('nan')):.3f}",
            f"{rate:,.0f} tokens/s",
        ]
        if self._mfu_of_rate:
            parts.append(f"MFU {rate * self._mfu_of_rate:.1%}")
        if done_before < done < 1:
            parts.append(f"ETA {tqdm.format_interval((1 - done) * seconds / (done - done_before))}")
        loads = next((c for c in state.callbacks if isinstance(c, ExpertLoad)), None)
        if loads is not None and loads.latest_LE is not None:
            share_LE = loads.latest_LE / loads.latest_LE.sum(1, keepdim=True).clamp(min=1)
            older = "" if loads.latest_batch == state.timestamp.batch.value else f" in batch {loads.latest_batch}"
            parts.append(f"fullest expert{older} {share_LE.max().item():.1%} (even {1 / share_LE.shape[1]:.1%})")
            if (dropped := loads.latest.get(f"dmoe/{DROPPED}/mean")) is not None:
                parts.append(f"dropped {dropped:.1%}")
        return " | ".join(parts)

    def _page(self, state: State) -> str:
        rows = [
            ("first loss", self.losses.get("first")),
            ("last loss", self.losses.get("last")),
            *((name, loss) for name, loss in self.losses.items() if name.startswith(_VALIDATION)),
            ("unigram loss", self.facts.get("unigram_loss")),
        ]
        lines = [f"{name} {value:.4f}" for name, value in rows if value is not None]
        saves = next((c for c in state.callbacks if isinstance(c, ElasticCheckpoint)), None)
        if saves is not None and saves.latest_checkpoint:
            lines.append(f"checkpoint {saves.latest_checkpoint}")
        if self.prompt:
            lines.append(f"sample {sample_text(state.model, self.prompt, self.sample_tokens)!r}")
        return "\n".join(lines)


def read_facts(path: str) -> dict[str, float]:
    """Numbers by name, from a JSON file.

    Raises:
        ValueError: no such file, no JSON, or other values.
    """
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(facts, dict) or not all(type(fact) in (int, float) for fact in facts.values()):
            raise UserError("it must be a mapping of names to numbers")
        return facts
    except (OSError, ValueError) as error:
        raise UserError(
            f"callbacks.run_report.facts ({path}): {error}; leave it out, or write it with the demo's data "
            "(python examples/demo_data.py FOLDER)"
        ) from None


def _print(text: str) -> None:
    if dist.get_global_rank() == 0:
        with contextlib.suppress(OSError):  # a terminal that is closed does not end a run
            tqdm.write(text)  # above a progress bar, where there is one
            sys.stdout.flush()


def _clock(state: State) -> tuple[int, float, float]:
    """Tokens, seconds without evaluation, and the part of `max_duration` that is done, from 0 to 1."""
    now, elapsed = state.timestamp, state.get_elapsed_duration()
    seconds = now.total_wct.total_seconds() if now.total_wct else 0.0
    return now.token.value, seconds, 0.0 if elapsed is None else float(elapsed.value)


def _mfu_of_rate(state: State) -> float | None:
    """MFU of one token per second of all ranks; None without a GPU or a model that counts its active parameters."""
    model: Any = getattr(state.model, "module", state.model)
    if not hasattr(model, "flops_per_batch") or not torch.cuda.is_available():
        return None
    peak = get_gpu_flops_available(state)
    flops_per_token = model.flops_per_batch(state.batch) / state.batch["input_ids"].numel()
    return flops_per_token / (peak * dist.get_world_size()) if peak else None


@torch.no_grad()
def sample_text(model: nn.Module, prompt: str, tokens: int, temperature: float = 0.8, seed: int = 17) -> str:
    """The prompt and its continuation, each token from as many before it as an MPT takes.

    Collective: the model may be sharded.
    """
    inner: Any = getattr(model, "module", model)
    tokenizer = inner.tokenizer
    most = getattr(getattr(causal_lm(inner), "config", None), "max_seq_len", None) or sys.maxsize
    device = next(inner.parameters()).device
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    was_training = inner.training
    inner.eval()
    for _ in range(tokens):
        seen = ids[:, -most:]
        logits = inner({"input_ids": seen, "attention_mask": torch.ones_like(seen, dtype=torch.bool)}).logits[0, -1]
        chances = (logits.float() / temperature).softmax(-1).cpu()
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator).to(device)[None]], dim=1)
    inner.train(was_training)
    return tokenizer.decode(ids[0])
