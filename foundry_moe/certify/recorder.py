"""Records the steps of any PyTorch trainer as sketches: losses, gradients, weights and optimizer states.

Works by the optimizer's hooks, on plain tensors, DDP, FSDP2 and any DTensor. Must not know trainers or models.

Shapes: U units of a tensor (see `sketch`), P projections.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from foundry_moe.certify.record import NONE, Held, RecordWriter
from foundry_moe.certify.sketch import sketch, units_of
from foundry_moe.schema import UserError

_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_fsdp_wrapped_module\.|^(module\.)+")


class Box(NamedTuple):
    """Where a rank's tensor is in a whole parameter. name: of the whole, if another than this rank's."""

    shape: tuple[int, ...]  # of the whole
    begin: tuple[int, ...]
    name: str = ""


class Recorder:
    """Writes what each step of an optimizer did into a folder, for `foundry-moe certify`.

    Construct it on every rank once model and optimizer are complete, sharding included, before the first step or after
    a resume. Each recorded step reads gradients, weights and states once or twice, and gathers U (1 + P) fp64 numbers a
    tensor on rank 0, which appends a line of JSON of about 20 bytes per number.

    Args:
        folder: gets `record.jsonl`, written by rank 0. It must not have one.
        every: records the first step and each multiple of this number.
        step: optimizer steps that were done before; None: as the optimizer's states say, else 0.
        projections: P of each tensor.
        box_of: for tensors that are shards without being DTensors, such as a rank's experts: from the clean name and
            the tensor of this rank to its box in the whole; None = the tensor is whole on every rank.

    Raises:
        ValueError: a folder that has a record; parameters flattened by FSDP1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        folder: str | Path,
        *,
        every: int = 1,
        step: int | None = None,
        projections: int = 3,
        box_of: Callable[[str, Tensor], Box | None] | None = None,
    ) -> None:
        self.optimizer, self.every, self.projections = optimizer, every, projections
        self.parameters: dict[str, nn.Parameter] = {}
        self.boxes: dict[str, Box] = {}
        for name, parameter in model.named_parameters():
            if "_flat_param" in name:
                raise UserError(
                    f"{name} is a flattened parameter of FSDP1, which has no shape: use FSDP2 (fully_shard)"
                )
            name = clean_name(name)
            box = _box(name, parameter, box_of)
            self.parameters[box.name or name], self.boxes[box.name or name] = parameter, box
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._step, self._begun = step, False
        self._losses: list[float] = []
        self._tokens, self._batch = 0, 0
        self._before: list[Tensor] | None = None
        self._line: dict[str, Any] = {}
        held = {
            name: Held(list(box.shape), list(box.begin), list(_local(p).shape), str(p.dtype).removeprefix("torch."))
            for (name, box), p in zip(self.boxes.items(), self.parameters.values(), strict=True)
        }
        everyone = self._gather_objects(held)
        self._writer = RecordWriter(Path(folder), everyone, projections) if self._is_first else None
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def batch(self, loss: Tensor, ids: Tensor | None = None) -> None:
        """Call it after each backward pass and before clipping: notes a loss, tokens, and gradients as they are now.

        Args:
            loss: of this rank's microbatch.
            ids: [sequences, ...] integers of the microbatch, for the number of tokens and a sum that is the same for
                the same sequences in any order and division.
        """
        if not self._records(self._next_step()):
            return
        self._losses.append(float(loss.detach()))
        if ids is not None:
            self._tokens += ids.numel()
            self._batch = (self._batch + sum(_hash(row) for row in ids.cpu())) % 2**52
        self._before = [self._sketch(name, parameter.grad) for name, parameter in self.parameters.items()]

    def _next_step(self) -> int:
        """The number of the step that comes, from 1."""
        if self._step is None:
            steps = [int(state["step"]) for state in self.optimizer.state.values() if "step" in state]
            self._step = max(steps, default=0)
        return self._step + 1

    def _records(self, step: int) -> bool:
        return not self._begun or step % self.every == 0

    def _before_step(self) -> None:
        step = self._next_step()
        self._line = {}
        if not self._records(step):
            return
        if not self._begun:
            self._write({"begin": step - 1, **self._weights_and_states()})
        unclipped = None if self._before is None else self._whole(self._before)
        gradients = self._whole([self._sketch(name, p.grad) for name, p in self.parameters.items()])
        losses = self._gather_objects([self._losses, self._tokens, self._batch])
        self._line = {
            "step": step,
            "loss": [loss for loss, _, _ in losses],
            "tokens": sum(tokens for _, tokens, _ in losses),
            "batch": sum(batch for _, _, batch in losses) % 2**52,
            "unclipped": unclipped,
            "gradient": gradients,
        }
        self._before, self._losses, self._tokens, self._batch = None, [], 0, 0

    def _after_step(self) -> None:
        if self._line:
            self._begun = True
            self._write({**self._line, **self._weights_and_states()})
        self._step = self._next_step()

    def _weights_and_states(self) -> dict[str, Any]:
        kinds = {"weight": [self._sketch(name, parameter) for name, parameter in self.parameters.items()]}
        keys = {
            key
            for parameter in self.parameters.values()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim()
        }
        for key in sorted(set().union(*self._gather_objects(keys))):
            found = [self.optimizer.state.get(parameter, {}).get(key) for parameter in self.parameters.values()]
            kinds[f"state {key}"] = [self._sketch(n, v) for n, v in zip(self.parameters, found, strict=True)]
        return {kind: self._whole(values) for kind, values in kinds.items()}

    def _sketch(self, name: str, tensor: Tensor | None) -> Tensor:
        """fp64 [U of the shard, 1 + P]; NONE everywhere for a tensor that does not exist."""
        parameter, box = self.parameters[name], self.boxes[name]
        if tensor is None:
            units = units_of(tuple(_local(parameter).shape))
            return torch.full((units, 1 + self.projections), NONE, dtype=torch.float64, device=_local(parameter).device)
        return sketch(_local(tensor), box.begin, box.shape, name, self.projections)

    def _whole(self, values: Sequence[Tensor]) -> dict[str, Any] | None:
        """Sums of the shards' sketches by parameter, and how far apart replicas are; None but on rank 0. Collective."""
        mine = torch.cat(list(values))
        if self._ranks == 1:
            everyone = [mine.cpu()]
        else:
            rows = torch.tensor([len(mine)], device=mine.device)
            lengths = [torch.empty_like(rows) for _ in range(self._ranks)]
            dist.all_gather(lengths, rows)
            padded = mine.new_zeros(max(int(n) for n in lengths), mine.shape[1])
            padded[: len(mine)] = mine
            gathered = [torch.empty_like(padded) for _ in range(self._ranks)] if self._is_first else None
            dist.gather(padded, gathered, dst=0)
            everyone = [part[: int(n)].cpu() for part, n in zip(gathered or [], lengths, strict=False)]
        if self._writer is None:
            return None
        return self._writer.combine([part.tolist() for part in everyone])

    def _gather_objects(self, value: Any) -> list[Any]:
        if self._ranks == 1:
            return [value]
        everyone: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyone, value)
        return everyone

    def _write(self, line: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.append(line)


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _hash(row: Tensor) -> int:
    return int.from_bytes(hashlib.sha256(row.long().numpy().tobytes()).digest()[:6], "little")


def clean_name(name: str) -> str:
    """A parameter's name without the parts that DDP, compilation and recomputation add."""
    return _WRAPPERS.sub("", name)


def _box(name: str, parameter: Tensor, box_of: Callable[[str, Tensor], Box | None] | None) -> Box:
    if isinstance(parameter, DTensor):
        _, begin = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        return Box(tuple(parameter.shape), tuple(begin))
    given = box_of(name, parameter) if box_of is not None else None
    return given or Box(tuple(parameter.shape), (0,) * parameter.dim())
