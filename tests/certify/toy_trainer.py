"""A small trainer with expert parallelism in plain torch, with faults that can be planted, for records.

Shapes: T tokens of a rank, D width, E experts, e experts of a rank.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn

from foundry_moe.certify import Box, Recorder

VOCABULARY, WIDTH, EXPERTS, LENGTH, SEQUENCES = 23, 8, 4, 6, 8
FAULTS = (
    "expert gradients undivided", "dense gradients summed", "microbatches summed", "loss without gradient",
    "experts of other ranks left out", "weight differs on a rank", "frozen", "another batch", "clips by its own norm",
    "another learning rate", "dense gradients of one rank",
)  # fmt: skip
RESUME_FAULTS = (
    "experts of rank 1 lost", "moments lost", "moments of rank 1 lost", "stale weights", "one rank's experts on all"
)  # fmt: skip


class Toy(nn.Module):
    """Embedding, a soft gate, experts of this rank, a head. Equal weights on any number of ranks."""

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype, seed: int = 7) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.seed = seed
        random = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

        self.embedding = nn.Parameter(drawn(VOCABULARY, WIDTH))
        self.gate = nn.Parameter(drawn(EXPERTS, WIDTH) * 0.3)
        self.bias = nn.Parameter(drawn(WIDTH) * 0.1)
        self.head = nn.Parameter(drawn(VOCABULARY, WIDTH) * 0.3)
        local = EXPERTS // ranks
        self.experts = nn.Parameter(drawn(EXPERTS, WIDTH, WIDTH)[rank * local : (rank + 1) * local].contiguous() * 0.3)

    def forward(self, ids: Tensor, fault: str) -> tuple[Tensor, Tensor]:
        """Loss of this rank's tokens, and its balance loss."""
        x_TD = self.embedding[ids[:, :-1].flatten()]
        gates_TE = (x_TD @ self.gate.T).softmax(-1)
        everyone_TD, everyone_TE = x_TD, gates_TE
        if self.ranks > 1:
            everyone_TD = torch.cat(collectives.all_gather(x_TD))
            everyone_TE = torch.cat(collectives.all_gather(gates_TE))
        first = self.rank * len(self.experts)
        weights_Te = everyone_TE[:, first : first + len(self.experts)]
        y_TD = torch.einsum("te,td,edf->tf", weights_Te, everyone_TD, self.experts)
        if self.ranks > 1 and fault != "experts of other ranks left out":
            y_TD = collectives.all_reduce(y_TD)
        own = slice(self.rank * len(x_TD), (self.rank + 1) * len(x_TD)) if self.ranks > 1 else slice(None)
        logits = (x_TD + torch.tanh(y_TD[own] + self.bias)) @ self.head.T
        balance = gates_TE.square().sum(-1).mean() * EXPERTS  # a mean over tokens, so that microbatches add up
        return nn.functional.cross_entropy(logits, ids[:, 1:].flatten()), balance


def box_of(model: Toy):
    """The boxes of experts that are plain tensors."""
    first = model.rank * len(model.experts)
    return lambda name, _: Box((EXPERTS, WIDTH, WIDTH), (first, 0, 0)) if name == "experts" else None


def train(
    model: Toy, optimizer: torch.optim.Optimizer, recorder: Recorder, steps: range, microbatches: int, fault: str = ""
) -> None:
    """Trains on sequences that depend on the step alone."""
    rank, ranks = model.rank, model.ranks
    for step in steps:
        seed = step + 100 * (fault == "another batch") + 1000 * model.seed
        ids = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(seed))
        own = ids.chunk(ranks)[rank].chunk(microbatches)
        for microbatch in own:
            loss, balance = model(microbatch, fault)
            total = loss + 0.5 * (balance.detach() if fault == "loss without gradient" else balance)
            (total if fault == "microbatches summed" else total / microbatches).backward()
        reduce(model, fault)
        for index, microbatch in enumerate(own):
            recorder.batch(model(microbatch, fault)[0].detach(), microbatch) if index < microbatches else None
        clip(model, fault)
        optimizer.step()
        optimizer.zero_grad()
        if fault == "weight differs on a rank" and rank == ranks - 1:
            with torch.no_grad():
                model.head[0, 0] += 1e-3


def reduce(model: Toy, fault: str) -> None:
    """Averages gradients over ranks."""
    for name, parameter in model.named_parameters():
        if fault == "frozen" and name == "bias":
            parameter.grad = None
            continue
        assert parameter.grad is not None
        if name == "experts":  # its gradient is the sum over all ranks' losses
            parameter.grad /= 1 if fault == "expert gradients undivided" else model.ranks
        elif model.ranks > 1 and not (fault == "dense gradients of one rank" and name == "head"):
            dist.all_reduce(parameter.grad)
            parameter.grad /= 1 if fault == "dense gradients summed" else model.ranks


def clip(model: Toy, fault: str) -> None:
    """Clips by the norm over all ranks."""
    squares = {name: p.grad.square().sum() for name, p in model.named_parameters() if p.grad is not None}
    if model.ranks > 1 and fault != "clips by its own norm":
        dist.all_reduce(squares["experts"])
    elif fault == "clips by its own norm":
        del squares["experts"]
    factor = (0.05 / sum(squares.values()).sqrt()).clamp(max=1)  # type: ignore[union-attr]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= factor


def run(
    folder: Path, *, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float64, microbatches: int = 1,
    steps: int = 2, fault: str = "", fault_since: int = 0, seed: int = 7,
) -> None:  # fmt: skip
    """Records `folder/run` of some steps, and `folder/resumed`, a resumption after the last but one.

    fault_since: steps that are done without the fault.
    """
    model, optimizer = build(rank, ranks, dtype, fault, seed)
    recorder = Recorder(model, optimizer, folder / "run", box_of=box_of(model))
    states = []
    for step in range(steps):
        states.append((copy_of(model.state_dict()), copy_of(optimizer.state_dict())))
        train(model, optimizer, recorder, range(step, step + 1), microbatches, fault if step >= fault_since else "")
    if steps < 2 or (fault and fault not in RESUME_FAULTS):
        return
    again, resumed = build(rank, ranks, dtype, "", seed)
    weights, moments = states[-1]
    weights = states[-2][0] if fault == "stale weights" else weights
    if fault == "one rank's experts on all":
        dist.broadcast(weights["experts"], src=0)
    again.load_state_dict(
        {n: w for n, w in weights.items() if (fault, n, rank) != ("experts of rank 1 lost", "experts", 1)}, strict=False
    )
    if fault != "moments lost" and steps > 1:
        resumed.load_state_dict(moments)
    if fault == "moments of rank 1 lost" and rank == 1:
        for key in ("exp_avg", "exp_avg_sq"):
            resumed.state[again.experts][key].zero_()
    recorder = Recorder(again, resumed, folder / "resumed", box_of=box_of(again), step=steps - 1)
    train(again, resumed, recorder, range(steps - 1, steps), microbatches)


def build(rank: int, ranks: int, dtype: torch.dtype, fault: str, seed: int = 7) -> tuple[Toy, torch.optim.AdamW]:
    model = Toy(rank, ranks, dtype, seed)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-2 if fault == "another learning rate" else 1e-2)


def copy_of(state: dict) -> dict:
    if isinstance(state, dict):
        return {key: copy_of(value) for key, value in state.items()}
    return state.clone() if isinstance(state, Tensor) else state


def record_wrongly(folder: Path, rank: int, ranks: int) -> None:
    """Writes what each rank is told about a folder with a record, and about boxes that are not the whole."""
    model, optimizer = build(rank, ranks, torch.float64, "")
    wrong = Box((EXPERTS + 1, WIDTH, WIDTH), (model.rank * len(model.experts), 0, 0))
    for name, box in (("two/run", box_of(model)), ("wrong", lambda name, _: wrong if name == "experts" else None)):
        try:
            Recorder(model, optimizer, folder / name, box_of=box)
        except ValueError as error:
            (folder / f"refused {Path(name).name} {rank}").write_text(str(error))


def worker(rank: int, ranks: int, port: int, folder: str, runs: list[dict]) -> None:
    """Does runs one after another in a group of processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for keys in runs:
        run(Path(folder, keys.pop("name")), rank=rank, ranks=ranks, **keys)
    record_wrongly(Path(folder), rank, ranks)
    dist.destroy_process_group()
