"""`init_device: meta` with a pretrained Hugging Face model: each rank reads its own slices of the model's files.

LLM Foundry refuses the two together. Here the model is built without weights, placed on the mesh, and filled before any
checkpoint is loaded, so that no process holds the whole model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from composer.core import State
from composer.distributed import prepare_distributed
from torch import nn
from transformers import PreTrainedModel

from foundry_moe.layers.lookup import moe_layers
from foundry_moe.models.pretrained import SafetensorsFolder, check_names, materialize, read_pretrained, safetensors_in


def describe_weights(config: dict[str, Any]) -> dict[str, Any]:
    """Part of a config transform: facts on a Hugging Face model's weights that the built model does not show.

    They may be fresh (`model.pretrained: false`); `algorithms.dmoe` reads them, on several processes; or it checks that
    LLM Foundry had all of them to read, since transformers draws what a folder lacks.

    Returns:
        Keys of `RunFacts`.

    Raises:
        ValueError: a file that LLM Foundry would read is missing, truncated or not safetensors.
    """
    model = config.get("model") or {}
    if not model.get("pretrained", True):
        return {"weights_loaded": False}
    if model.get("name") != "hf_causal_lm":
        return {}
    source = str(model.get("pretrained_model_name_or_path"))
    if model.get("init_device") == "meta" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        config["model"] = {**model, "pretrained": False}
        return {"weights_source": source, "weights_loaded": True}
    if Path(source).is_dir():
        local_files(source)
    return {"weights_source": source}


def tie_weights(state: State) -> None:
    """Ties the embeddings of a model on the meta device as its configuration says, and its optimizers' parameters.

    LLM Foundry builds it in a context that gives each module a parameter of its own, even where two share one.
    """
    model: Any = next((module for module in state.model.modules() if isinstance(module, PreTrainedModel)), None)
    if model is None or not any(parameter.is_meta for parameter in model.parameters()):
        return
    before = list(model.parameters())
    model.tie_weights()
    gone = {id(parameter) for parameter in before} - {id(parameter) for parameter in model.parameters()}
    for group in (group for optimizer in state.optimizers or () for group in optimizer.param_groups):
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in gone]


class WeightsFromFiles:
    """Reads a model's weights between `Event.INIT` and `Event.BEFORE_LOAD`.

    Args:
        source: a folder, or a name on the Hugging Face Hub.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._draw: Any = None

    def prepare(self, device: torch.device | str) -> None:
        """Makes Composer allocate parameters without drawing values, until `read`; see docs/explanation/design.md."""
        self._draw = prepare_distributed.meta_init

        def give_memory(module: nn.Module, *_: Any) -> None:
            materialize(module, device)
            for layer in moe_layers(module):  # experts that no file has
                getattr(layer.experts, "param_init_fn", lambda _: None)(layer.experts)

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


def check_loaded(state: State, source: str) -> None:
    """Raises ValueError for a tensor of the model, as LLM Foundry has loaded it, that the source's files lack."""
    folder = None if getattr(state.model, "using_peft", False) else local_files(source)
    if folder is not None:
        check_names(state.model, folder, root="model")


def local_files(source: str) -> SafetensorsFolder | None:
    """The safetensors files that a model is loaded from; None if it has others, or is not on this machine."""
    try:
        folder = _folder_of(source, local_files_only=True)
    except (FileNotFoundError, ValueError):  # huggingface_hub's: not in the cache; not a name
        return None
    return SafetensorsFolder(folder) if safetensors_in(folder) else None


def _folder_of(source: str, **options: Any) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"], **options))
