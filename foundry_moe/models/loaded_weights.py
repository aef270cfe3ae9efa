"""Keeps trained weights from being replaced by random ones without a word. Pure torch."""

from __future__ import annotations

import warnings

from torch import nn

from foundry_moe.config import AUTO, MoEConfig


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


class Origin:
    """Where a dense model's weights come from, and so how its experts begin.

    Args:
        loaded: whether they were loaded; None: where the model names a source.

    init: random | upcycle.
    from_files: weights on the meta device are read from files later.
    """

    def __init__(self, model: nn.Module, config: MoEConfig, loaded: bool | None) -> None:
        self.source = source_of(model) or ("the model" if loaded else "")
        self.from_files = bool(loaded)
        self.asked = config.init
        was_loaded = bool(self.source) and loaded is not False
        self.init = config.init
        if config.init == AUTO:
            self.init = "upcycle" if was_loaded else "random"
        self._warn = was_loaded and config.init == "random"

    def warn(self) -> None:
        """Says that loaded weights are not used, where a user asked for that."""
        if self._warn:
            warnings.warn(
                f"init (random): experts are drawn anew, and the feed-forward weights of {self.source} are not used",
                stacklevel=3,
            )

    def explain(self, reason: str) -> str:
        """Why a dense block cannot be upcycled, as a sentence for the user."""
        if self.asked != AUTO:
            return reason
        return (
            f"init (auto): the feed-forward weights of {self.source} would be thrown away, as they cannot be copied: "
            f"{reason}; or write init: random to draw experts anew (model.pretrained: false, if nothing is loaded)"
        )
