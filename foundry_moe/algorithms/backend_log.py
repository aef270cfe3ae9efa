"""Says once, when training begins, what computes the experts of a run and what decided it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from composer.core import State
from composer.core.precision import get_precision_context
from composer.utils import dist

from foundry_moe.layers.lookup import moe_layers
from foundry_moe.layers.moe import MoELayer
from foundry_moe.ops.backends import describe_backend

log = logging.getLogger(__name__)


def log_backends(state: State) -> None:
    """One log line on rank 0; more where layers differ.

    Raises:
        ValueError: the backend asked for cannot run on this device with this precision.
    """
    with get_precision_context(state.precision, state.precision_config):
        lines = backends_of(moe_layers(state.model))
    if dist.get_global_rank() == 0:
        for line in lines:
            log.warning("dMoE experts: %s", line)


def backends_of(layers: Iterable[MoELayer]) -> list[str]:
    """What `describe_backend` says of each layer under the autocast that is on, each sentence once."""
    found = []
    for layer in layers:
        weight = next(layer.experts.parameters())
        kind = weight.device.type
        config = layer.config
        assert config.expert_hidden_size != "auto"
        found.append(
            describe_backend(
                config.backend,
                weight.device,
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype,
                width=layer.d_model,
                hidden=config.expert_hidden_size,
                capacity=config.capacity,
            )
        )
    return list(dict.fromkeys(found))
