"""The keys of `gate` for each built-in gate, and their checks against the numbers of experts and choices.

Imports no torch: `foundry-moe check` answers at once. A gate's file has the computation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from foundry_moe.layers.schedule import A_TIME, parse_duration, parse_schedule
from foundry_moe.schema import UserError, form, one_of


@dataclass(frozen=True, kw_only=True)
class GateKeys:
    """Keys of `gate` beside `name`; the losses of the gate, and those in use if the user names none."""

    LOSSES: ClassVar[frozenset[str]] = frozenset()
    DEFAULT_LOSSES: ClassVar[Mapping[str, float]] = {}

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError if these keys do not fit the numbers of experts and choices."""

    def check_losses(self, names: Iterable[str], num_experts: int, top_k: int) -> None:
        """Raises ValueError for a loss of `LOSSES` that these keys do not support."""


@dataclass(frozen=True, kw_only=True)
class LinearKeys(GateKeys):
    """Keys of a gate that scores experts by a linear map."""

    LOSSES: ClassVar[frozenset[str]] = frozenset({"balance", "z"})
    DEFAULT_LOSSES: ClassVar[Mapping[str, float]] = {"balance": 0.01}


def need_top_k(top_k: int, wanted: int, why: str) -> None:
    """Raises ValueError unless the user's `top_k` is this."""
    if top_k != wanted:
        raise UserError(f"top_k ({top_k}) must be {wanted}: {why}")


def _check_jitter(jitter: float | dict[str, Any]) -> None:
    low, high = parse_schedule(jitter, "jitter").bounds
    if low < 0 or high >= 1:
        raise UserError(f"jitter ({jitter}) must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class TopKKeys(LinearKeys):
    """
    score: softmax | sigmoid of the logits.
    normalize: divide a token's weights by their sum (Mixtral: true, OLMoE: false).
    scale: factor on the weights (DeepSeek-V3: 2.5).
    jitter: in training, the gate's input is multiplied by U[1 - jitter, 1 + jitter] (Fedus et al. 2021);
        a number or a schedule.
    noise: in training, N(0, 1) * softplus(x W_noise) is added to the logits (Shazeer et al. 2017, equation 4).
    bias_balance: a bias per expert, added for the choice and not for the weight, moves by `bias_step` towards
        an even load after each step (Wang et al. 2024; DeepSeek-V3, section 2.1.2).
    bias_step: a number or a schedule.
    groups, group_limit: experts are divided into `groups` equal groups, and a token chooses inside its `group_limit`
        best ones, by the sum of a group's two best scores (DeepSeek-V3, section 2.1.2).
    """

    LOSSES: ClassVar[frozenset[str]] = frozenset({"balance", "z", "importance", "load"})

    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    jitter: float | dict[str, Any] = 0.0
    noise: bool = False
    bias_balance: bool = False
    bias_step: float | dict[str, Any] = 1e-3
    groups: int = 1
    group_limit: int = 0

    def __post_init__(self) -> None:
        one_of("score", self.score, ("softmax", "sigmoid"))
        _check_jitter(self.jitter)
        if parse_schedule(self.bias_step, "bias_step").bounds[0] < 0:
            raise UserError(f"bias_step ({self.bias_step}) must be 0 or more")
        if self.scale <= 0:
            raise UserError(f"scale ({self.scale}) must be above 0")
        if self.groups < 1 or not 0 <= self.group_limit <= self.groups:
            raise UserError(
                f"group_limit ({self.group_limit}) must be between 1 and groups ({self.groups}), or 0 for all"
            )

    def check_bias(self) -> None:
        """Not in `check`: a family of models may set `bias_balance` after the user's keys are read."""
        if not self.bias_balance and self.bias_step != TopKKeys.bias_step:
            raise UserError(
                f"gate.bias_step ({self.bias_step}) has no effect without gate.bias_balance: set it to true, or remove "
                "bias_step"
            )

    def check(self, num_experts: int, top_k: int) -> None:
        groups, limit = self.groups, self.group_limit or self.groups
        if num_experts % groups:
            divisors = [str(g) for g in range(1, num_experts + 1) if num_experts % g == 0]
            raise UserError(
                f"gate.groups ({groups}) must divide num_experts ({num_experts}): use {', '.join(divisors)}"
            )
        eligible = limit * (num_experts // groups)
        if top_k > eligible:
            raise UserError(
                f"top_k ({top_k}): {limit} of {groups} groups have {eligible} experts; raise gate.group_limit"
            )

    def check_losses(self, names: Iterable[str], num_experts: int, top_k: int) -> None:
        if "load" in names and (not self.noise or top_k == num_experts):
            raise UserError(
                f"loss.load needs gate.noise: true and top_k ({top_k}) below num_experts ({num_experts}): "
                "it is the load expected over the noise"
            )
        limited = 0 < self.group_limit < self.groups
        if "load" in names and (self.bias_balance or limited):
            key = "bias_balance: true" if self.bias_balance else f"group_limit ({self.group_limit})"
            raise UserError(
                f"loss.load does not support gate.{key}: it expects the top_k of the noisy logits alone; remove load "
                "from loss, or the key from gate"
            )


@dataclass(frozen=True, kw_only=True)
class SwitchKeys(LinearKeys):
    """
    jitter: in training, the gate's input is multiplied by U[1 - jitter, 1 + jitter] (section 2.4); a number or
        a schedule.
    """

    jitter: float | dict[str, Any] = 0.01

    def __post_init__(self) -> None:
        _check_jitter(self.jitter)

    def check(self, num_experts: int, top_k: int) -> None:
        need_top_k(top_k, 1, "gate switch sends a token to one expert")


@dataclass(frozen=True, kw_only=True)
class GShardKeys(LinearKeys):
    """
    random_second: false keeps every second expert in training too.
    """

    random_second: bool = True

    def check(self, num_experts: int, top_k: int) -> None:
        need_top_k(top_k, 2, "gate gshard chooses two experts")


@dataclass(frozen=True, kw_only=True)
class HierarchicalKeys(LinearKeys):
    """
    groups: the number of groups (not their size).
    """

    LOSSES: ClassVar[frozenset[str]] = frozenset({"balance", "z", "alignment"})

    groups: int

    def check(self, num_experts: int, top_k: int) -> None:
        groups = self.groups
        if groups < 1 or num_experts % groups or top_k > num_experts // groups:
            possible = [str(g) for g in range(1, num_experts + 1) if num_experts % g == 0 and num_experts // g >= top_k]
            raise UserError(
                f"gate.groups ({groups}) must divide num_experts ({num_experts}) into groups of top_k "
                f"({top_k}) experts at least: use {', '.join(possible)}"
            )


@dataclass(frozen=True, kw_only=True)
class KTop1Keys(LinearKeys):
    """No further keys."""

    def check(self, num_experts: int, top_k: int) -> None:
        if num_experts % top_k:
            divisors = [str(k) for k in range(1, num_experts + 1) if num_experts % k == 0]
            raise UserError(
                f"top_k ({top_k}) must divide num_experts ({num_experts}) for gate ktop1, which makes "
                f"top_k equal prototypes: use {', '.join(divisors)}"
            )


@dataclass(frozen=True, kw_only=True)
class BaseKeys(LinearKeys):
    """
    epsilon: tolerance of the auction, in standard deviations of a token's scores.
    rounds: the most rounds of the auction.
    """

    LOSSES: ClassVar[frozenset[str]] = frozenset()
    DEFAULT_LOSSES: ClassVar[Mapping[str, float]] = {}

    epsilon: float = 0.01
    rounds: int = 16

    def __post_init__(self) -> None:
        if self.epsilon <= 0:
            raise UserError(f"epsilon ({self.epsilon}) must be above 0: it is the bid increment")
        if self.rounds < 0:
            raise UserError(f"rounds ({self.rounds}) must be 0 or more")

    def check(self, num_experts: int, top_k: int) -> None:
        need_top_k(top_k, 1, "gate base assigns a token to one expert")


@dataclass(frozen=True, kw_only=True)
class HashKeys(GateKeys):
    """
    table: random | balanced | bigram.
    frequencies: for `balanced`, a JSON file: a list with the number of occurrences of each token id.
    """

    table: str = "random"
    frequencies: str = ""

    def __post_init__(self) -> None:
        one_of("table", self.table, ("random", "balanced", "bigram"))
        if (self.table == "balanced") != bool(self.frequencies):
            raise UserError(
                f"frequencies ({self.frequencies!r}) goes with table: balanced, and table is {self.table}: "
                "give both or neither"
            )

    def check(self, num_experts: int, top_k: int) -> None:
        need_top_k(top_k, 1, "gate hash sends a token to one expert")
        if self.frequencies:
            read_counts(self.frequencies)


@dataclass(frozen=True, kw_only=True)
class DenseToSparseKeys(LinearKeys):
    """
    temperature: a number or a schedule, above 0.
    threshold: of g, in [0, 1). A token's best expert is chosen in any case.
    hard_after: a time such as 2000ba; empty = never.
    max_experts: of a token, its best ones above the threshold; 0 = all of them, as in the paper.
    """

    temperature: float | dict[str, Any] = field(
        default_factory=lambda: {"start": 1.0, "end": 0.5, "until": "0.5dur", "shape": "exponential"}
    )
    threshold: float = 1e-3
    hard_after: str = field(default="", metadata=form(A_TIME))
    max_experts: int = 0

    def __post_init__(self) -> None:
        if parse_schedule(self.temperature, "temperature").bounds[0] <= 0:
            raise UserError(f"temperature ({self.temperature}) must be above 0")
        if not 0 <= self.threshold < 1:
            raise UserError(f"threshold ({self.threshold}) must be at least 0 and below 1")
        if self.hard_after:
            parse_duration(self.hard_after, "hard_after")
        if self.max_experts < 0:
            raise UserError(f"max_experts ({self.max_experts}) must be 0 (no limit) or more")

    def check(self, num_experts: int, top_k: int) -> None:
        need_top_k(top_k, 1, "gate dense_to_sparse ends with one expert per token, and sets the number itself before")


@dataclass(frozen=True, kw_only=True)
class ExpertChoiceKeys(LinearKeys):
    """No further keys."""

    LOSSES: ClassVar[frozenset[str]] = frozenset({"z"})
    DEFAULT_LOSSES: ClassVar[Mapping[str, float]] = {}


def read_counts(path: str) -> list[int]:
    """Occurrences of each token id.

    Raises:
        ValueError: no such file, or not a JSON list of whole numbers of 0 or more.
    """
    try:
        counts = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"gate.frequencies ({path}): {error}") from None
    if not isinstance(counts, list) or not counts or not all(isinstance(c, int) and c >= 0 for c in counts):
        raise UserError(f"gate.frequencies ({path}) must be a JSON list: how often each token id occurs")
    return counts


# a gate's name, which is its file's -> the name of its class, and its keys
BUILT_IN: Mapping[str, tuple[str, type[GateKeys]]] = {
    "base": ("BaseGate", BaseKeys),
    "dense_to_sparse": ("DenseToSparseGate", DenseToSparseKeys),
    "expert_choice": ("ExpertChoiceGate", ExpertChoiceKeys),
    "gshard": ("GShardGate", GShardKeys),
    "hash": ("HashGate", HashKeys),
    "hierarchical": ("HierarchicalGate", HierarchicalKeys),
    "ktop1": ("KTop1Gate", KTop1Keys),
    "switch": ("SwitchGate", SwitchKeys),
    "topk": ("TopKGate", TopKKeys),
}
