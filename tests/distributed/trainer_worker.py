"""Runs LLM Foundry's trainer on each rank of a launch and returns what a run leaves: losses, norms and weights."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.tensor import DTensor

from foundry_moe.layers.lookup import moe_layers
from foundry_moe.parallel.gradient_messages import GradientMessages

_called: Counter[str] = Counter()


def _counted(name: str) -> None:
    function = getattr(param_group, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        _called[name] += 1
        return function(*args, **kwargs)

    setattr(param_group, name, call)


for name in ("foreach_all_gather", "foreach_reduce"):
    _counted(name)


_allocate = GradientMessages.allocate


def _allocate_and_count(self: GradientMessages, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Counts the reductions whose messages are in bf16."""
    found = _allocate(self, *args, **kwargs)
    _called["sent in bf16"] += self._laid_out is not None and found.dtype == torch.bfloat16
    return found


GradientMessages.allocate = _allocate_and_count  # type: ignore[method-assign]


def train_run(path: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Trains from a YAML with overrides; None takes a key out.

    Returns:
        losses, norms, names of algorithms, how often FSDP2 gathered weights and reduced gradients, these in messages of
        bf16, dispatches with expected sizes and forward passes that were repeated, and by parameter name placements and
        whole weights.
    """
    os.environ["FSDP_VERSION"] = "2"
    from llmfoundry.command_utils import train

    _called.clear()

    config = OmegaConf.load(path)
    for key, value in overrides.items():
        parent, _, last = key.rpartition(".")
        if value is None:
            del OmegaConf.select(config, parent)[last]
        else:
            OmegaConf.update(config, key, value, force_add=True)
    trainer = train(config)
    model = trainer.state.model
    model = getattr(model, "module", model)
    named = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    history = trainer.logger.destinations[0].data
    return {
        "losses": [float(value) for _, value in history["loss/train/total"]],
        "norms": [float(value) for _, value in history.get("mesh/gradient_norm", [])],
        "gathers": _called["foreach_all_gather"],
        "reductions": _called["foreach_reduce"],
        "sent in bf16": _called["sent in bf16"],
        "sizes": _sizes(moe_layers(model)),
        "algorithms": [type(algorithm).__name__ for algorithm in trainer.state.algorithms],
        "placements": {name: str(getattr(parameter, "placements", None)) for name, parameter in named.items()},
        "weights": {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu().clone() for name, p in named.items()
        },
    }


def _sizes(layers: list[Any]) -> tuple[int, int] | None:
    """Dispatches with expected sizes that had room, and passes that were repeated; None = all sizes were exact."""
    expected = layers[0].dispatcher.expected
    if expected is None:
        return None
    return sum(sizes.passes for sizes in expected._sizes.values()), expected.repeated


def train_runs(path: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several runs, one after another, in one launch."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    return [train_run(path, overrides) for overrides in runs]


def train_runs_short_of_room(path: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`train_runs` with room for a quarter of the counts each second time, first in the group of ranks 0 and 1."""
    from foundry_moe.parallel import expected_counts
    from foundry_moe.parallel.expected_counts import ExpectedCounts

    expected_counts._EXTRA, expected_counts._WINDOW = 0, 1  # room is made after each pass
    expected_counts._PAUSE = 0
    make_room, passes = ExpectedCounts._make_room, Counter[int]()
    first = dist.get_rank() < 2

    def make_too_little(self: ExpectedCounts, dispatcher: Any, counts_PP2: torch.Tensor, *_: Any) -> None:
        passes[id(dispatcher)] += 1
        short = first == bool(passes[id(dispatcher)] % 2)
        make_room(self, dispatcher, *[counts_PP2 // 4 if short else counts_PP2 + 64] * 2, 10_000)

    ExpectedCounts._make_room = make_too_little  # type: ignore[method-assign]
    return train_runs(path, runs)


def train_runs_by_fsdp2(path: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`train_runs` with gradients reduced by FSDP2 itself."""
    from foundry_moe.algorithms import dmoe_mesh

    dmoe_mesh.send_own_dtype = lambda *_: None
    return train_runs(path, runs)


def train_runs_without_logits(path: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`train_runs` with the loss computed in the output projection, on a CPU too."""
    from foundry_moe.models import loss_head

    loss_head.runs_on = lambda device: True
    return train_runs(path, runs)


def train_through_the_door(runs: list[list[str]]) -> list[dict[str, Any]]:
    """Each run's arguments through `foundry_moe/train.py`: losses, and placements of experts by layer."""
    import llmfoundry.command_utils as foundry

    from foundry_moe.layers.lookup import named_moe_layers
    from foundry_moe.train import train

    os.environ["NODE_RANK"] = "0"  # Composer reads it where a tokenizer is built
    trainers: list[Any] = []
    original = foundry.train
    foundry.train = lambda config: trainers.append(original(config)) or trainers[-1]
    results = []
    for arguments in runs:
        assert train(arguments) == 0
        trainer = trainers.pop()
        fsdp = trainer.state.fsdp_config
        layers = named_moe_layers(trainer.state.model)
        results.append(
            {
                "losses": [float(value) for _, value in trainer.logger.destinations[0].data["loss/train/total"]],
                "resharded": None if fsdp is None else fsdp.reshard_after_forward,
                "placements": [str(getattr(layer.experts.w1_EFD, "placements", None)) for layer in layers.values()],
            }
        )
        trainer.close()
    foundry.train = original
    return results
