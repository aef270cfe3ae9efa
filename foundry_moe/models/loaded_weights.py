"""Keeps trained weights from being replaced by random ones without a word. Pure torch."""

from __future__ import annotations

import warnings

from torch import nn

from foundry_moe.config import MoEConfig


def source_of(model: nn.Module) -> str:
    """The name or path that a Hugging Face model was read from; empty for one that was built afresh.

    `from_pretrained` notes it in the configuration; a model of a configuration alone has none, unless the
    configuration itself was read from somewhere.
    """
    for module in model.modules():
        if not callable(getattr(module, "save_pretrained", None)):
            continue  # a part of one: MPT's rotary embedding has a configuration that raises for what it lacks
        name = getattr(getattr(module, "config", None), "_name_or_path", "")
        if isinstance(name, str) and name:
            return name
    return ""


def check_init(model: nn.Module, config: MoEConfig, loaded: bool | None) -> None:
    """Looks at whether dense blocks that were loaded are about to be replaced by random experts.

    Args:
        loaded: None: where the model names a source.

    Raises:
        ValueError: they are, and nobody asked for it.
    """
    source = source_of(model) or ("the model" if loaded else "")
    if not source or loaded is False or config.init == "upcycle":
        return
    if config.init == "random":
        warnings.warn(
            f"init (random): experts are drawn anew, and the feed-forward weights of {source} are not used",
            stacklevel=3,
        )
        return
    raise ValueError(
        f"init (auto): the feed-forward weights of {source} would be thrown away; write init: upcycle to make every "
        "expert a copy of them, or init: random to draw experts anew (model.pretrained: false, if nothing is loaded)"
    )
