"""The inputs of one forward pass that MoE layers read beside their tokens. Independent of modules and of autograd.

Shapes: B sequences, S positions, H heads, K positions that are attended to.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foundry_moe.layers.schedule import Progress
from foundry_moe.ops import noise

if TYPE_CHECKING:
    from foundry_moe.layers.replay import PassChoices

_MASKED = -1e4  # an additive mask is at most this where nothing is attended to
_IGNORED = -100  # the label of a position without a target


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardPass:
    """Ids, padding and settings of one forward pass. Its recomputation reads the same record.

    mask_BS: True = real, False = padding; None = all are real.
    unknown_mask: the kind of an attention mask whose padding cannot be read; empty where it can.
    sequence_id_BS: index of a token's packed document in its row, -1 = padding.
    labels_BS, num_items: what the module computes its own loss from.
    progress, batch_counts, auxiliary_scale: of the `BatchContext` when the pass began.
    replay: choices in place of the gates' own.
    kept: results of `BatchContext.once`; shared with the pass around.
    around: the pass of an enclosing module.
    """

    token_ids_BS: Tensor | None = None
    mask_BS: Tensor | None = None
    unknown_mask: str = ""
    sequence_id_BS: Tensor | None = None
    labels_BS: Tensor | None = None
    num_items: Tensor | int | None = None
    progress: Progress | None = None
    batch_counts: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    auxiliary_scale: Tensor | None = None
    replay: PassChoices | None = None
    kept: dict[Hashable, Any] = field(default_factory=dict)
    around: ForwardPass | None = None

    @cached_property
    def keys_T(self) -> Tensor:
        """`token_keys` of the ids, once for all layers."""
        assert self.token_ids_BS is not None
        return noise.token_keys(self.token_ids_BS)

    @cached_property
    def targets(self) -> Tensor | None:
        """The number of labels that are not ignored; None for a module without labels."""
        return count_targets(self.labels_BS)

    @property
    def share(self) -> Tensor | None:
        """The loss of a causal language model, a sum over `num_items`, over its mean; None where it is the mean."""
        if self.labels_BS is None or self.num_items is None:
            return None
        targets = count_targets(self.labels_BS[:, 1:])
        return None if targets is None else targets / self.num_items


def by_sequence(tokens: Tensor) -> Tensor:
    """[B, S] of [..., S]: with one dimension it is one sequence."""
    if tokens.dim() == 2:
        return tokens
    return tokens[None] if tokens.dim() == 1 else tokens.flatten(0, -2)


def count_targets(labels_BS: Any) -> Tensor | None:
    """How many labels are trained on, a scalar; None for other labels than [B, S]."""
    if not isinstance(labels_BS, Tensor) or labels_BS.dim() != 2:
        return None
    return (labels_BS != _IGNORED).sum()


def read_call(takes: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ForwardPass`, and `padding_BS`, from the arguments of a module's call, or from its `batch`.

    The mask of a `batch` is left to the inner module, which may be called without one. `padding_BS` is the mask of
    `sequence_id` for a call without `attention_mask`; `attention_mask=None` states that all tokens are real.
    """
    found = dict(takes.bind_partial(*args, **kwargs).arguments)
    for name, parameter in takes.parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            found.update(found.pop(name, {}))
    batch = found.get("batch")
    if isinstance(batch, Mapping):
        found.update({name: batch.get(name) for name in ("input_ids", "sequence_id")})
        found.setdefault("attention_mask", None)
    ids, packed, labels = (_tensor(found.get(name)) for name in ("input_ids", "sequence_id", "labels"))
    packed = packed if packed is not None and packed.dim() == 2 else None
    return {
        "token_ids_BS": None if ids is None else by_sequence(ids),
        **read_mask(found.get("attention_mask"), ids),
        "padding_BS": None if "attention_mask" in found else padding_of(packed),
        "sequence_id_BS": packed,
        "labels_BS": labels if labels is not None and labels.dim() == 2 else None,
        "num_items": found.get("num_items_in_batch"),
    }


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def padding_of(sequence_id_BS: Tensor | None) -> Tensor | None:
    """The mask of packed documents; None where there are none."""
    return None if sequence_id_BS is None else sequence_id_BS >= 0


def inherit(found: dict[str, Any], around: ForwardPass | None) -> dict[str, Any]:
    """`found`, and what it lacks from the pass around it, if that has the same ids or this has none."""
    ids = found["token_ids_BS"]
    if around is None or (ids is not None and ids is not around.token_ids_BS):
        return found
    if found["mask_BS"] is None or found["unknown_mask"]:
        mask = {"mask_BS": around.mask_BS, "unknown_mask": around.unknown_mask}
        if around.mask_BS is not None or not found["unknown_mask"]:
            found = {**found, **mask}
    kept = {name: getattr(around, name) for name in ("token_ids_BS", "sequence_id_BS") if found[name] is None}
    return {**found, **kept}


def read_mask(mask: Any, ids_BS: Tensor | None) -> dict[str, Any]:
    """`mask_BS` and `unknown_mask` of an attention mask.

    Args:
        mask: [B, S] (1 or True = real, not additive); or [B, H, S, S] or [B, S, S], boolean or additive. In the
            latter a token is padding if it does not attend to itself, or to and from itself alone.
    """
    if mask is None:
        return {"mask_BS": None, "unknown_mask": ""}
    if isinstance(mask, Tensor) and (mask.dim() in (1, 2) or (ids_BS is not None and mask.shape == ids_BS.shape)):
        return {"mask_BS": by_sequence(mask).bool(), "unknown_mask": ""}
    if not isinstance(mask, Tensor) or mask.dim() not in (3, 4) or mask.shape[-1] != mask.shape[-2]:
        kind = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        return {"mask_BS": None, "unknown_mask": str(kind)}
    seen = mask if mask.dtype == torch.bool else mask > _MASKED if mask.is_floating_point() else mask != 0
    seen_BSK = seen.any(1) if seen.dim() == 4 else seen
    itself_BS = seen_BSK.diagonal(dim1=-2, dim2=-1)
    others_BS = seen_BSK.sum(-1) + seen_BSK.sum(-2) > 2
    real_BS = itself_BS & (others_BS | (seen_BSK.shape[-1] == 1))
    if ids_BS is not None and ids_BS.dim() == 2 and real_BS.shape[0] == 1:
        real_BS = real_BS.expand(ids_BS.shape[0], -1)  # one mask for all sequences
    return {"mask_BS": real_BS, "unknown_mask": ""}
