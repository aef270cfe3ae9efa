"""Parameters and floating-point operations of a model, or of the one that a run's keys describe, as `plan` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from foundry_moe.commands.plan.shape import ModelShape, read_shape
from foundry_moe.flops import causal_lm, looked_up_params, num_layers, query_width, training_flops
from foundry_moe.layers.lookup import idle_parameters
from foundry_moe.schema import UserError


def num_params(of: nn.Module | Mapping[str, Any]) -> int:
    """All parameters; of sharded ones, the whole.

    Args:
        of: a model, or the keys of a run as its YAML has them, with `model` and, for a Hugging Face model,
            `algorithms.dmoe`.

    Raises:
        ValueError: keys of a model that cannot be counted before it is built.
    """
    return sum(p.numel() for p in of.parameters()) if isinstance(of, nn.Module) else _shape(of).num_params


def num_active_params(of: nn.Module | Mapping[str, Any]) -> int:
    """Parameters that a token passes through: of a layer's experts, `top_k`. Arguments and errors: see `num_params`."""
    if isinstance(of, nn.Module):
        return num_params(of) - idle_parameters(of)
    return round(_shape(of).num_active_params)


def flops_per_token(of: nn.Module | Mapping[str, Any], sequence: int) -> float:
    """Operations for a token in training, forward and backward.

    6 for each parameter that the token is multiplied by, and attention, not halved for causality, as torchtitan counts.

    Args:
        of: an MPT or a Hugging Face causal LM, also in Composer's class, or a run's keys, as in `num_params`.
        sequence: tokens in a sequence.

    Raises:
        ValueError: another kind of model, or see `num_params`.
    """
    if not isinstance(of, nn.Module):
        return replace(_shape(of), sequence=sequence).flops_per_token
    model = causal_lm(of)
    if model is None:
        raise UserError(
            f"flops_per_token takes an MPT or a Hugging Face causal LM, not {type(of).__name__}: use "
            "foundry_moe.flops.training_flops(num_active_params(model), layers=..., width=..., sequence=...)"
        )
    sizes = {"layers": num_layers(model.config), "width": query_width(model.config), "sequence": sequence}
    return training_flops(num_active_params(of) - looked_up_params(model), **sizes)


def _shape(run: object) -> ModelShape:
    if not isinstance(run, Mapping):
        raise UserError(
            f"{type(run).__name__} is neither a model nor the keys of a run, such as {{'model': {{'name': ...}}}}"
        )
    return read_shape(run)
