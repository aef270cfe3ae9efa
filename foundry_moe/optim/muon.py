"""Muon for experts on any mesh: hidden matrices are updated by their orthogonalised momentum, the rest by AdamW.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The scale of updates: Liu et al. 2025, Muon is
Scalable for LLM Training (Moonlight, arXiv 2502.16982), section 2.2.

Shapes: N matrices, R rows and C columns of one, r rows of it on this rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from foundry_moe_kernels import muon as kernels
from torch import Tensor, nn

from foundry_moe.optim.adamw import FusedAdamW
from foundry_moe.optim.matrices import Part, find_matrices, parts_of
from foundry_moe.optim.newton_schulz import orthogonalize
from foundry_moe.optim.values import value_mistakes
from foundry_moe.parallel.collectives import all_to_all
from foundry_moe.parallel.gradients import local_part
from foundry_moe.schema import UserError, raise_mistakes

RMS = 0.2  # of AdamW's updates; Moonlight, equation 4
TOGETHER = 2**28  # numbers orthogonalised at once: 512 MiB in bf16; 2**27 takes 2% to 6% longer, 2**25 17% to 29%


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """A part of a parameter with its gradient and momentum, as views [N, r, C]."""

    part: Part
    weight: Tensor
    grad: Tensor
    momentum: Tensor


class Muon(FusedAdamW):
    """Muon for hidden matrices, AdamW for embeddings, head, norms, biases, gates (routers) and LoRA adapters.

    Each matrix of an expert is orthogonalised by itself, also gate and up projections that share a tensor. Its update
    has the RMS of AdamW's, so AdamW's learning rates and weight decay hold. The state of a hidden matrix is one
    `momentum_buffer`. Low-rank factors of adapters get AdamW: no source has shown more for them.

    On a mesh, each of the ranks that share matrices receives some whole ones, orthogonalises them and sends the results
    back, while the next are under way. Replicas repeat the computation.

    YAML: `optimizer: {name: muon, lr: 4.0e-4, adamw_lr: 4.0e-4, betas: [0.9, 0.95], weight_decay: 1.0e-5}`

    Args:
        params: parameters of `model`, or groups of them.
        model: which parameter is what; needed before the first step. LLM Foundry's runs with experts set it.
        lr: of hidden matrices.
        adamw_lr: of all other parameters, at the start; schedules change it as they change `lr`. None: `lr`. A group
            with an `lr` and no `adamw_lr` of its own uses that `lr` for all its parameters.
        betas, eps: of AdamW.
        weight_decay: of all, decoupled as in Composer's DecoupledAdamW: it is multiplied by lr / initial lr, not by lr.
            For the `weight_decay` of torch's optimizers give lr times it.
        momentum, nesterov, ns_steps: as in torch.optim.Muon.
        dtype: of Newton-Schulz iterations, by name.

    Raises:
        ValueError: an invalid value, also of a group; at a step, without the model, or with parameters that are not
            the model's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        dtype: str = "bfloat16",
        *,
        model: nn.Module | None = None,
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "adamw_lr": adamw_lr, "betas": tuple(betas), "eps": eps}
        settings |= {
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "dtype": dtype,
        }
        super().__init__(params, settings)
        self.model = model

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "lr" in param_group:  # before defaults are filled in
            param_group = {"adamw_lr": None, **param_group}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("initial_lr", group["lr"])
        raise_mistakes(value_mistakes(group, "muon"))

    def _update(self, index: int, group: dict[str, Any]) -> None:
        matrices, others = [], []
        for parameter in group["params"]:
            known = self._matrices(parameter)
            if known is None:
                others.append(parameter)
            elif parameter.grad is not None and parameter.requires_grad:
                matrices += self._views(parameter, known)
        lr, initial_lr = group["lr"], group.setdefault("initial_lr", group["lr"])
        first = initial_lr if group["adamw_lr"] is None else group["adamw_lr"]
        factor = lr / initial_lr if initial_lr else 0.0
        rate, decay = first * factor, group["weight_decay"] * factor
        adamw = {"params": others, "lr": rate, "initial_lr": rate, "weight_decay": decay, "amsgrad": False}
        super()._update(index, {**group, **adamw})
        running: list[Iterator[None]] = []
        for turn, batch in [*_batches(matrices), (0, []), (0, [])]:
            running.append(_update_batch(batch, group, factor, self.gradient_factor, turn))
            for update in reversed(running):  # one starts its messages, the one before computes, the third ends
                next(update, None)
            running = running[-2:]

    def _matrices(self, parameter: nn.Parameter) -> Any:
        """See `find_matrices`. Parameters are looked up again when wrapping or loading has replaced them."""
        known = self.__dict__.setdefault("_known", {})  # not set in __init__: copies of an optimizer skip it
        if parameter not in known:
            model = self.__dict__.get("model")
            if model is None:
                raise UserError(
                    "muon needs the model, to tell hidden matrices from embeddings, head and gates: "
                    "Muon(params, model=model), or optimizer.model = model before the first step"
                )
            known = self._known = find_matrices(model)
        if parameter not in known:
            raise UserError(f"muon: a parameter {list(parameter.shape)} of the optimizer is not one of its model")
        return known[parameter]

    def _views(self, parameter: nn.Parameter, known: Any) -> list[_Matrix]:
        state = self.state[parameter]
        assert parameter.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        weight, grad, momentum = (local_part(t) for t in (parameter, parameter.grad, state["momentum_buffer"]))
        return [
            _Matrix(part=part, weight=part.of(weight), grad=part.of(grad), momentum=part.of(momentum))
            for part in parts_of(parameter, known, TOGETHER)
        ]


def _batches(matrices: list[_Matrix]) -> list[tuple[int, list[_Matrix]]]:
    """Equal matrices of the same ranks together, up to `TOGETHER` numbers; the same batches on all of these ranks.

    Each has its index among the batches of these ranks: a rank's batches of other groups do not count.
    """
    batches: list[tuple[int, list[_Matrix]]] = []
    turns: Counter[Any] = Counter()
    open_batches: dict[Any, list[_Matrix]] = {}
    for matrix in matrices:
        part = matrix.part
        key = part.heights, part.columns, part.group
        batch = open_batches.get(key)
        if batch is None or sum(other.part.numel for other in batch) + part.numel > TOGETHER:
            batch = open_batches[key] = []
            batches.append((turns[part.group], batch))
            turns[part.group] += 1
        batch.append(matrix)
    return batches


@torch.no_grad()
def _update_batch(
    batch: list[_Matrix], group: dict[str, Any], schedule: float, gradient_factor: Tensor | None, turn: int
) -> Iterator[None]:
    """The step of equal matrices in three stages: momentum and messages, orthogonalisation and messages, weights.

    Args:
        schedule: lr / initial lr; 0 where both are 0.
        turn: which ranks get a matrix more than others; equal on all ranks of the batch.
    """
    if not batch:
        return
    momentum, part = group["momentum"], batch[0].part
    numbers = [len(matrix.weight) for matrix in batch]
    x_NrC = torch.empty(
        (sum(numbers), *batch[0].weight.shape[1:]), dtype=getattr(torch, group["dtype"]), device=batch[0].weight.device
    )
    for matrix, into in zip(batch, x_NrC.split(numbers), strict=True):
        if _fits_kernel(matrix.grad, matrix.momentum):
            kernels.momentum_(matrix.grad, matrix.momentum, into, gradient_factor, momentum, group["nesterov"])
            torch.autograd.graph.increment_version(matrix.momentum)  # as operators of torch do
            continue
        grad = matrix.grad if gradient_factor is None else matrix.grad * gradient_factor.to(matrix.grad.dtype)
        matrix.momentum.lerp_(grad, 1 - momentum)
        into.copy_(grad.lerp(matrix.momentum, momentum) if group["nesterov"] else matrix.momentum)
    exchange = None if part.group is None else _Exchange(part, len(x_NrC), turn)
    whole = (lambda: x_NrC) if exchange is None else exchange.gather(x_NrC)
    yield
    update_NRC = orthogonalize(whole(), group["ns_steps"])
    ours = (lambda: update_NRC) if exchange is None else exchange.scatter(update_NRC)
    yield
    rate = group["lr"] * RMS * math.sqrt(max(sum(part.heights), part.columns))
    kept = 1 - group["weight_decay"] * schedule
    for matrix, update in zip(batch, ours().split(numbers), strict=True):
        if _fits_kernel(matrix.weight, update):
            kernels.subtract_(matrix.weight, update, kept, rate)
            torch.autograd.graph.increment_version(matrix.weight)
        else:
            matrix.weight.mul_(kept).add_(update, alpha=-rate)


def _fits_kernel(*tensors_NrC: Tensor) -> bool:
    return all(tensor.is_cuda and tensor.dtype != torch.float64 and tensor.stride(2) == 1 for tensor in tensors_NrC)


class _Exchange:
    """Rows of N matrices from all ranks of a group to the rank that computes each, and back."""

    def __init__(self, part: Part, number: int, turn: int) -> None:
        self.group, self.heights, self.columns = part.group, part.heights, part.columns
        ranks, self.rank = len(part.heights), dist.get_rank(part.group)
        self.counts = [number // ranks + ((rank - turn) % ranks < number % ranks) for rank in range(ranks)]
        self.here = [count * part.heights[self.rank] * part.columns for count in self.counts]  # numbers, by rank
        self.whole = [self.counts[self.rank] * height * part.columns for height in part.heights]

    def gather(self, x_NrC: Tensor) -> Any:
        """Returns a function that waits for the whole matrices [n, R, C] that this rank computes."""
        wait = all_to_all(x_NrC.view(-1), self.here, self.whole, self.group)

        def join() -> Tensor:
            count = self.counts[self.rank]
            parts = wait().split(self.whole)
            sizes = zip(parts, self.heights, strict=True)
            return torch.cat([part.view(count, height, self.columns) for part, height in sizes], dim=1)

        return join

    def scatter(self, x_nRC: Tensor) -> Any:
        """Returns a function that waits for this rank's rows [N, r, C] of all matrices."""
        sent = torch.cat([rows.reshape(-1) for rows in x_nRC.split(self.heights, dim=1)])
        wait = all_to_all(sent, self.whole, self.here, self.group)
        return lambda: wait().view(sum(self.counts), self.heights[self.rank], self.columns)
