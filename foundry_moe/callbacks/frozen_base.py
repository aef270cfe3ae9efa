"""What checkpoints record of the frozen weights they leave out, and the check that a resumed run has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from composer.core import State
from torch import Tensor, nn

from foundry_moe.checkpoint.errors import MismatchError
from foundry_moe.launch.checkpoint_settings import WHERE
from foundry_moe.models.frozen_weights import digest

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def frozen_names(model: nn.Module) -> set[str]:
    """Names in the model's state dict of parameters that are not trained."""
    names = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for wrapper in _WRAPPERS:
        names = {name.replace(wrapper, "") for name in names}
    return names


def describe_base(state: State, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The digest of these tensors and where they were loaded from, for a checkpoint's info. Collective."""
    named = (getattr(getattr(module, "config", None), "_name_or_path", "") for module in state.model.modules())
    place = str(state.load_path or "") or next((str(name) for name in named if name), "")
    return {"digest": digest(tensors, group), "tensors": len(tensors), "from": place}


def check_base(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raises MismatchError if a checkpoint was written with other frozen weights than this run has."""
    if here["digest"] == there.get("digest"):
        return
    raise MismatchError(
        f"the checkpoint leaves out {there.get('tensors')} frozen tensors, loaded from {there.get('from')!r} "
        f"(digest {there.get('digest')}), and this run has {here['tensors']}, from {here['from']!r} (digest "
        f"{here['digest']}): start it from the same weights, with {WHERE}.save_frozen: false, or give it another folder"
    )
