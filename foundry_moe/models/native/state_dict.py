"""Which tensors of which Hugging Face family a model with dMoE layers becomes. Plain data: nothing is read or written.

Families whose models came in leave as they came. A dense model that was upcycled, and an MPT, leave as the family
that computes the same; where none does, the sentence names the key in the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from foundry_moe.checkpoint.targets import Part, Target, check_targets, copied
from foundry_moe.models.families import Blocks, Family, blocks_of, family_of
from foundry_moe.models.native.architecture import Architecture
from foundry_moe.models.native.from_dense import config_of_dense, is_dense
from foundry_moe.models.native.from_mpt import config_of_mpt, rename_mpt

Shapes = Mapping[str, tuple[int, ...]]
_BLOCK = re.compile(r"(.*?\.(\d+)\..*)\.experts\.w1_EFD")
_TRAINING_ONLY = "gate.weight_noise_ED"


@dataclass(frozen=True, kw_only=True)
class Native:
    """A model in a family's terms.

    config: of the family, for its `config.json`.
    blocks: what its MoE layers compute.
    rename: from one of our tensors outside MoE layers, and its shape, to the family's.
    """

    family: Family
    config: PretrainedConfig
    blocks: Blocks
    rename: Callable[[str, tuple[int, ...]], list[Target]]

    def targets(self, shapes: Shapes) -> list[Target]:
        """All tensors of the family's state dict, from ours by name.

        Raises:
            ValueError: our tensors are not those of the architecture: some would be lost, or lack.
        """
        prefixes = {match[1]: int(match[2]) for name in shapes if (match := _BLOCK.fullmatch(name))}
        if sorted(prefixes.values()) != sorted(self.blocks.layers):
            raise ValueError(
                f"experts of layers {sorted(prefixes.values())} are there, and the model has them in "
                f"{sorted(self.blocks.layers)}"
            )
        targets: list[Target] = []
        used: dict[str, tuple[int, ...]] = {}
        done: set[str] = set()
        for name, shape in shapes.items():
            prefix = next((p for p in prefixes if name.startswith(p + ".")), None)
            if prefix is None:
                new = self._outside(name, shape)
                targets += new
                if new:
                    used[name] = shape
                continue
            if not name.endswith(_TRAINING_ONLY):
                used[name] = shape
            if prefix not in done:
                done.add(prefix)
                targets += self._of_block(prefix, prefixes[prefix])
        check_targets(targets, used)
        return targets

    def _outside(self, name: str, shape: tuple[int, ...]) -> list[Target]:
        tied = bool(getattr(self.config, "tie_word_embeddings", False))
        if tied and name == "lm_head.weight":
            return []  # the embedding's: files hold it once
        return self.rename(name, shape)

    def _of_block(self, prefix: str, layer: int) -> list[Target]:
        theirs: dict[str, list[Any]] = {}
        for part in self.family.parts(self.blocks):
            theirs.setdefault(part.theirs, []).append(part)
        block = self.family.block_name(layer)
        return [
            Target(
                name=f"{block}.{name}",
                shape=parts[0].their_shape,
                parts=tuple(_part(f"{prefix}.{part.ours}", part) for part in parts),
                keeps_dtype=any(part.fp32 for part in parts),
            )
            for name, parts in theirs.items()
        ]


def _part(source: str, part: Any) -> Part:
    """A family's part as the writer wants it."""
    zeros = (0,) * len(part.shape)
    box = (zeros, part.shape) if part.expert is None else ((part.expert, *zeros), (1, *part.shape))
    return Part(
        source=source,
        box=box,
        at=part.begin,
        expert=part.expert is not None and len(part.their_shape) == len(part.shape),
        transposed=part.transposed,
    )


def native_of(architecture: Architecture) -> Native:
    """The family that computes what this model does.

    Raises:
        ValueError: none does; names the key in the way and the value that would do.
    """
    model_type, config = architecture.model_type, dict(architecture.config)
    blocks = blocks_of(
        architecture.experts,
        d_model=int(config.get("d_model") or config.get("hidden_size") or 0),
        layers=architecture.layers,
        num_layers=architecture.num_layers,
    )
    if model_type == "mpt":
        family, keys = config_of_mpt(config, blocks)
        rename = rename_mpt(config)
    elif is_dense(model_type):
        family, keys = config_of_dense(config, blocks)
        rename = _same
    else:
        family, rename = family_of(_Typed(model_type)), _same
        came = {key: value for key, value in config.items() if key not in _OF_THE_FILE}
        keys = {**family.write(blocks), **came}  # the configuration that came in, and what servers want beside it
    made = AutoConfig.for_model(family.model_type, **keys)
    made.architectures = [family.architecture]
    return Native(family=family, config=made, blocks=blocks, rename=rename)


_OF_THE_FILE = ("model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path")


@dataclass(frozen=True)
class _Typed:
    model_type: str


def _same(name: str, shape: tuple[int, ...]) -> list[Target]:
    return [copied(name, name, shape)]
