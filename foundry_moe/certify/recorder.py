"""Records the steps of any PyTorch trainer: losses, settings, and sketches of gradients, weights and optimizer states.

Works by the optimizer's hooks, on plain tensors, DDP, FSDP2 and any DTensor. Must not know trainers or models.

Shapes: U units of a tensor (see `sketch`), J projections.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from foundry_moe.certify.record import NONE, NUMBERS, Held, RecordWriter
from foundry_moe.certify.sketch import Part, sketch, units_of
from foundry_moe.schema import UserError, plain_name

# Keys of a parameter group that do not change the update: `initial_lr` is a scheduler's, the last four choose its
# implementation.
_NO_SETTINGS = {"params", "initial_lr", "foreach", "fused", "capturable", "differentiable"}


class Box(NamedTuple):
    """Where a rank's tensor is in a whole parameter. name: of the whole, if another than this rank's."""

    shape: tuple[int, ...]  # of the whole
    begin: tuple[int, ...]
    name: str = ""


class Recorder:
    """Writes what each step of an optimizer did into a folder, for `foundry-moe certify`.

    Construct it on every rank once model and optimizer are complete, sharding included, before the first step or after
    a resume. Each recorded step reads gradients, weights and states once (gradients again in each `batch`), and gathers
    U (1 + J) fp64 numbers a tensor on rank 0, which appends a line of JSON of about 20 bytes per number. On a GPU
    nothing waits for the device: the line is written at the next step, at `close`, or when the program ends.

    Settings are the numbers of the optimizer's parameter groups at each step, of those keys that the first recorded
    step has. One that is a tensor on the device is waited for.

    Args:
        optimizer: one of torch's, or a wrapper with the optimizer in its attribute `optimizer`, as Accelerate's.
        folder: gets `record.jsonl`, written by rank 0. It must not have one.
        every: records the first step and each multiple of this number.
        step: optimizer steps that were done before; None: as the optimizer's states say, else 0.
        projections: J of each tensor.
        box_of: for tensors that are shards without being DTensors, such as a rank's experts: from the clean name and
            the tensor of this rank to its box in the whole; None = the tensor is whole on every rank.

    Raises:
        ValueError: on every rank: a folder that has a record or is not writable; boxes that are not the whole;
            parameters flattened by FSDP1; two parameters of one clean name; an optimizer of other parameters than the
            model's, or without torch's hooks.
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
        self.optimizer, self.every, self.projections = _with_hooks(optimizer), every, projections
        self.parameters: dict[str, nn.Parameter] = {}
        self.boxes: dict[str, Box] = {}
        originals: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            if "_flat_param" in name:
                raise UserError(
                    f"{name} is a flattened parameter of FSDP1, which has no shape: use FSDP2 (fully_shard)"
                )
            clean = plain_name(name)
            box = _box(clean, parameter, box_of)
            clean = box.name or clean
            if clean in originals:
                raise UserError(f"{originals[clean]} and {name} would both be recorded as {clean}: rename one of them")
            originals[clean], self.parameters[clean], self.boxes[clean] = name, parameter, box
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._step, self._begun = step, False
        self._states: list[str] = []
        self._keys: list[str] = []  # of settings
        self._settings: list[float] = []  # of the step that is being recorded, by parameter and key
        self._loss: Tensor | float = 0.0
        self._microbatches, self._tokens, self._batch = 0, 0, 0
        self._kinds: dict[str, Tensor] = {}  # of the step that is being recorded
        held = {
            name: Held(list(box.shape), list(box.begin), list(_local(p).shape), str(p.dtype).removeprefix("torch."))
            for (name, box), p in zip(self.boxes.items(), self.parameters.values(), strict=True)
        }
        gathered = self._gather_objects((held, self._trains()))
        if not any(trains for _, trains in gathered):
            raise UserError(
                "the optimizer trains no parameter of this model: construct it after the model is wrapped or sharded, "
                "and give both to Recorder"
            )
        everyone = [of_rank for of_rank, _ in gathered]
        self._sizes = [(sum(units_of(tuple(h.size)) for h in of_rank.values()), len(of_rank)) for of_rank in everyone]
        self._writer, refused = None, ""
        if self._is_first:
            try:
                self._writer = RecordWriter(Path(folder), everyone, projections)
            except (OSError, UserError) as error:
                refused = str(error)
        if refused := self._gather_objects(refused)[0]:  # on all ranks, else the others wait for rank 0
            raise UserError(refused)
        if self._writer is not None:
            weakref.finalize(self, self._writer.flush)
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._enter_step),
            self.optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    def close(self) -> None:
        """Removes the hooks and completes the file."""
        for hook in self._hooks:
            hook.remove()
        if self._writer is not None:
            self._writer.flush()

    def batch(self, loss: Tensor | float, ids: Tensor | None = None) -> None:
        """Call it after each backward pass and before clipping: notes a loss, tokens, and gradients as they are now.

        Args:
            loss: of this rank's microbatch, one number.
            ids: [sequences, ...] integers of the microbatch, for the number of tokens and a sum that is the same for
                the same sequences in any order and division. They are copied to the CPU.

        Raises:
            ValueError: the loss is not one number.
        """
        loss = torch.as_tensor(loss, dtype=torch.float64).detach()
        if loss.numel() != 1:
            raise UserError(f"the loss has shape {list(loss.shape)}: give `batch` one number, such as its mean")
        if not self._records(self._next_step()):
            return
        self._loss = self._loss + loss
        self._microbatches += 1
        if ids is not None:
            self._tokens += ids.numel()
            self._batch = (self._batch + sum(_hash(row) for row in ids.cpu())) % 2**52
        self._kinds = {"unclipped": self._sketch([p.grad for p in self.parameters.values()])}

    def _trains(self) -> bool:
        """Whether a parameter that this rank's optimizer trains is the model's, or it has none yet."""
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        return not trained or not set(trained).isdisjoint(self.parameters.values())

    def _next_step(self) -> int:
        """The number of the step that comes, from 1."""
        if self._step is None:
            steps = [int(state["step"]) for state in self.optimizer.state.values() if "step" in state]
            self._step = max(steps, default=0)
        return self._step + 1

    def _records(self, step: int) -> bool:
        return not self._begun or step % self.every == 0

    def _enter_step(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Records gradients: now, or after the closure that computes them."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._before_step()
            return None
        calls: list[None] = []

        def recorded() -> Any:
            loss = closure()
            if not calls:
                self._before_step()
            calls.append(None)
            return loss

        return (optimizer, recorded, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}

    def _before_step(self) -> None:
        if self._writer is not None:
            self._writer.flush()
        if not self._records(self._next_step()):
            return
        self._settings = self._read_settings()
        if not self._begun:
            self._write({"begin": self._next_step() - 1}, self._weights_and_states())
        self._kinds["gradient"] = self._sketch([p.grad for p in self.parameters.values()])

    def _after_step(self) -> None:
        self._step = self._next_step()
        if "gradient" not in self._kinds:
            return
        self._write({"step": self._step}, {**self._kinds, **self._weights_and_states()})
        self._begun, self._kinds = True, {}
        self._loss, self._microbatches, self._tokens, self._batch = 0.0, 0, 0, 0

    def _read_settings(self) -> list[float]:
        """The numbers of each parameter's group by key; NaN where there is none. All ranks have the same keys."""
        of_groups = [(_numbers(group), group["params"]) for group in self.optimizer.param_groups]
        if not self._begun:
            mine = {key for numbers, _ in of_groups for key in numbers}
            self._keys = sorted(set().union(*self._gather_objects(mine)))
        of_parameter = {parameter: numbers for numbers, group in of_groups for parameter in group}
        return [
            of_parameter.get(parameter, {}).get(key, math.nan)
            for parameter in self.parameters.values()
            for key in self._keys
        ]

    def _weights_and_states(self) -> dict[str, Tensor]:
        parameters = self.parameters.values()
        if not self._begun:  # before the first step, and after it, when most optimizers have made their states
            mine = {
                key
                for parameter in parameters
                for key, value in self.optimizer.state.get(parameter, {}).items()
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim()
            }
            self._states = sorted(set().union(*self._gather_objects(mine)))
        kinds = {"weight": self._sketch(list(parameters))}
        for key in self._states:
            kinds[f"state {key}"] = self._sketch([self.optimizer.state.get(p, {}).get(key) for p in parameters])
        return kinds

    def _sketch(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """fp64 [rows, 1 + J], a tensor per parameter; NONE everywhere for a tensor that does not exist."""
        parts = [
            Part(_local(parameter if tensor is None else tensor), box.begin, box.shape)
            for tensor, parameter, box in zip(tensors, self.parameters.values(), self.boxes.values(), strict=True)
        ]
        present = [at for at, tensor in enumerate(tensors) if tensor is not None]
        if len(present) == len(parts):
            return sketch(parts, self.projections)
        none = torch.full((1, 1 + self.projections), NONE, dtype=torch.float64, device=parts[0].local.device)
        rows = [none.expand(units_of(tuple(part.local.shape)), -1) for part in parts]
        if present:
            found = sketch([parts[at] for at in present], self.projections)
            for at, of_tensor in zip(present, found.split([len(rows[at]) for at in present]), strict=True):
                rows[at] = of_tensor
        return torch.cat(rows)

    def _write(self, line: dict[str, Any], kinds: dict[str, Tensor]) -> None:
        """Gathers the numbers of all ranks on rank 0, which writes them. Collective; one copy to the host."""
        first = next(iter(kinds.values()))
        loss = torch.as_tensor(self._loss, dtype=torch.float64).to(first.device, non_blocking=True).reshape(1)
        others = torch.tensor([self._microbatches, self._tokens, self._batch, *self._settings], dtype=torch.float64)
        mine = torch.cat(
            [*(rows.flatten() for rows in kinds.values()), loss, others.to(first.device, non_blocking=True)]
        )
        lengths = [
            rows * first.shape[1] * len(kinds) + NUMBERS + parameters * len(self._keys)
            for rows, parameters in self._sizes
        ]
        everyone = [mine]
        if self._ranks > 1:
            padded = mine.new_zeros(max(lengths))
            padded[: len(mine)] = mine
            everyone = [torch.empty_like(padded) for _ in range(self._ranks)] if self._is_first else []
            dist.gather(padded, everyone or None, dst=0)
        if self._writer is not None:
            parts = [part[:n] for part, n in zip(everyone, lengths, strict=True)]
            self._writer.append_step(line, list(kinds), parts, self._keys)

    def _gather_objects(self, value: Any) -> list[Any]:
        if self._ranks == 1:
            return [value]
        everyone: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyone, value)
        return everyone


def _with_hooks(optimizer: Optimizer) -> Optimizer:
    """The optimizer, or the one in a wrapper that has not called torch's constructor, as Accelerate's."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            raise UserError(f"{type(optimizer).__name__} is no torch.optim.Optimizer with hooks: give the one it wraps")
        optimizer = inner
    return optimizer


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """The settings of a parameter group; of a tuple such as betas, each number by its index."""
    found = {}
    for key, value in group.items():
        if key in _NO_SETTINGS:
            continue
        several = isinstance(value, list | tuple)
        for name, part in [(f"{key}[{i}]", part) for i, part in enumerate(value)] if several else [(key, value)]:
            if isinstance(part, Real) or (isinstance(part, Tensor) and part.numel() == 1):
                found[name] = float(part)
    return found


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _hash(row: Tensor) -> int:
    return int.from_bytes(hashlib.sha256(row.long().numpy().tobytes()).digest()[:6], "little")


def _box(name: str, parameter: Tensor, box_of: Callable[[str, Tensor], Box | None] | None) -> Box:
    if isinstance(parameter, DTensor):
        _, begin = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        return Box(tuple(parameter.shape), tuple(begin))
    given = box_of(name, parameter) if box_of is not None else None
    return given or Box(tuple(parameter.shape), (0,) * parameter.dim())
