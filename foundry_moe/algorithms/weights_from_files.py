"""`init_device: meta` with a pretrained Hugging Face model: each rank reads its own slices of the model's files.

LLM Foundry refuses the two together. Here the model is built without weights, placed on the mesh, and filled before any
checkpoint is loaded, so that no process holds the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from composer.core import State
from composer.distributed import prepare_distributed
from torch import nn

from foundry_moe.models.pretrained import SafetensorsFolder, materialize, read_pretrained

LOADED, SOURCE = "weights_loaded", "weights_source"  # internal keys of algorithms.dmoe


def describe_weights(config: dict[str, Any]) -> dict[str, Any]:
    """Part of a config transform: records what the built model does not show of a Hugging Face model's weights.

    They may be fresh (`model.pretrained: false`); or `algorithms.dmoe` reads them, on several processes.
    """
    model, algorithms = config.get("model") or {}, config.get("algorithms") or {}
    if not isinstance(algorithms.get("dmoe"), Mapping):
        return config
    keys: dict[str, Any] = {}
    from_meta = model.get("name") == "hf_causal_lm" and model.get("init_device") == "meta"
    if not model.get("pretrained", True):
        keys = {LOADED: False}
    elif from_meta and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        keys = {LOADED: True, SOURCE: model.get("pretrained_model_name_or_path")}
        config["model"] = {**model, "pretrained": False}
    config["algorithms"] = {**algorithms, "dmoe": {**keys, **algorithms["dmoe"]}}
    return config


class WeightsFromFiles:
    """Reads a model's weights between `Event.INIT` and `Event.BEFORE_LOAD`.

    Args:
        source: a folder, or a name on the Hugging Face Hub.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._draw: Any = None

    def prepare(self, device: torch.device | str) -> None:
        """Makes Composer allocate parameters without drawing values, until `read`; see `foundry_moe.launch`."""
        self._draw = prepare_distributed.meta_init

        def give_memory(module: nn.Module, *_: Any) -> None:
            materialize(module, device)

        prepare_distributed.meta_init = give_memory  # type: ignore[assignment]

    def read(self, state: State) -> None:
        """Fills the model, and restores Composer's function.

        Does nothing if the run resumes from a checkpoint: the files may have been deleted.

        Raises:
            ValueError: see `SafetensorsFolder` and `read_pretrained`.
        """
        if self._draw is not None:
            prepare_distributed.meta_init, self._draw = self._draw, None
        if any(getattr(callback, "has_commits", bool)() for callback in state.callbacks):
            return
        read_pretrained(state.model, SafetensorsFolder(_folder_of(self.source)), root="model")


def _folder_of(source: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
