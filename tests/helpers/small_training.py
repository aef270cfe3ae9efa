"""A small training run without a trainer, the same on one process and on any mesh, and the comparison of its results.

One case is a model, its data for a few steps and an optimizer, all drawn from seeds, so that every process can make the
whole of it. `foundry-moe verify` does the same with LLM Foundry's trainer, which gives no rank an empty batch; these
cases have uneven and empty ranks.

Shapes: N sequences, S positions, D model width, V vocabulary.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from foundry_moe.commands.verify.rows import difference
from foundry_moe.config import MeshConfig, MoEConfig
from foundry_moe.launch.processes import run_processes
from foundry_moe.layers.lookup import batch_context, loads_so_far, moe_layers, step_gates
from foundry_moe.layers.schedule import Progress
from foundry_moe.models.conversion import apply_dmoe
from foundry_moe.optim.muon import Muon
from foundry_moe.parallel.gradients import clip_grad_norm_
from foundry_moe.parallel.mesh import Mesh
from foundry_moe.parallel.placement import parallelize, replace_parameters
from foundry_moe.parallel.transformer_blocks import prefetch_in_order
from tests.helpers.launching import PRELOAD

VOCABULARY, WIDTH, HIDDEN, LAYERS, POSITIONS, SEQUENCES, STEPS = 40, 16, 24, 2, 6, 12, 3
LEARNING_RATE = 0.01
LORA = {"r": 3, "alpha": 5, "rslora": True}
EPSILON = 1e-3  # AdamW's usual 1e-8 would turn a gradient that is rounding alone into a step of +-LEARNING_RATE
TOLERANCE = 1e-10  # fp64: rounding over three steps of AdamW measures 3e-15
KINDS = (
    *("embed", "head", "norm", "mix", "gate.", "shared", "w1_EFD", "v1_EFD", "w2_EDF", "w1_HD", "v1_HD", "w2_HD"),
    *("w1_A_EDL", "w1_B_EFL", "v1_A_EDL", "v1_B_EFL", "w2_A_EFL", "w2_B_EDL"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. `moe` holds keys of `MoEConfig`.

    tied: the head is the embedding.
    microbatches: gradient accumulation.
    share: how much of a microbatch each rank takes, repeated over the ranks; unequal numbers make uneven
        batches, a zero leaves a rank without any.
    crowd: all tokens choose the first `top_k` experts: the other experts, and their ranks, get none.
    max_norm: gradients are clipped to it.
    muon: Muon in place of AdamW.
    buffer: of `MeshConfig`; with a buffer of one, tokens go in rounds where a rank would get more rows
        than others.
    """

    name: str
    moe: dict[str, Any]
    tied: bool = False
    microbatches: int = 1
    share: tuple[int, ...] = (1,)
    crowd: bool = False
    max_norm: float = 1e9
    muon: bool = False
    buffer: float = 2.0


CASES = (
    Case(
        name="random, uneven and empty ranks",
        moe={"num_experts": 8, "top_k": 3, "loss": {"balance": 0.1, "z": 0.01, "importance": 0.05}},
        microbatches=2,
        share=(3, 0, 1, 2),
    ),
    Case(
        name="upcycled, shared expert, tied, clipped",
        # weights that are not normalised: else equal experts would give the gate no gradient but rounding
        moe={
            "num_experts": 8,
            "top_k": 2,
            "init": "upcycle",
            "shared_expert_hidden_size": 8,
            "shared_expert_gate": True,
            "gate": {"name": "topk", "normalize": False},
        },
        tied=True,
        max_norm=0.1,
    ),
    Case(
        name="every token to one expert, biases",
        moe={"num_experts": 8, "top_k": 1, "activation": "gelu", "bias": True, "loss": {"z": 0.01}},
        crowd=True,
        buffer=1.0,
        share=(1, 2),
        microbatches=2,
        max_norm=0.5,
    ),
    Case(
        name="balance over sequences, sigmoid scores",
        moe={
            "num_experts": 8,
            "top_k": 2,
            "gate": {"name": "topk", "score": "sigmoid"},
            "loss": {"balance": 0.1},
            "balance_over": "sequence",
        },
        microbatches=2,
        share=(1, 2),
    ),
    Case(
        name="experts of different widths",
        moe={"num_experts": 16, "top_k": 3, "expert_hidden_size": (5, 11, 8, 8, 12, 4, 15, 1) * 2},
        share=(2, 1),
    ),
)


class _Dense(nn.Module):
    """A Llama-like FFN, there to be replaced or upcycled."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class _Block(nn.Module):
    """Norm, a causal running mean in place of attention, norm, FFN."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn: nn.Module = _Dense()

    def forward(self, x_NSD: Tensor) -> Tensor:
        count_S1 = torch.arange(1, x_NSD.shape[1] + 1, device=x_NSD.device, dtype=x_NSD.dtype)[:, None]
        x_NSD = x_NSD + self.mix(self.norm_1(x_NSD).cumsum(1) / count_S1)
        return x_NSD + self.ffn(self.norm_2(x_NSD))


class TinyLM(nn.Module):
    """A language model small enough for fp64 on a CPU."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x_NSD = self.embed(input_ids)
        for block in self.blocks:
            x_NSD = block(x_NSD)
        return self.head(self.norm(x_NSD))


def build_model(case: Case, dtype: torch.dtype, device: torch.device) -> TinyLM:
    """The case's model, whole, the same on every process."""
    torch.manual_seed(7)
    model = TinyLM(case.tied).to(dtype)
    apply_dmoe(model, MoEConfig(**{"init_std": 0.3, **case.moe}))
    if case.crowd:
        block: Any
        for block in model.blocks:
            # a constant share of every token (its norm's bias) decides: expert 0, by a margin
            with torch.no_grad():
                block.norm_2.bias.fill_(1.0)
                block.ffn.gate.weight_ED.mul_(0.01)
                block.ffn.gate.weight_ED[0] += 1.0
    return model.to(device)


def draw_batch(step: int, microbatch: int) -> Tensor:
    """Token ids [N, S + 1] of one microbatch of the whole job.

    Sequences begin with different tokens: of equal ones, a gate that ranks tokens would choose one by rounding.
    """
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    first_N1 = torch.randperm(VOCABULARY, generator=generator)[:SEQUENCES, None]
    others_NS = torch.randint(VOCABULARY, (SEQUENCES, POSITIONS), generator=generator)
    return torch.cat([first_N1, others_NS], dim=1)


def real_and_trained(ids_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Masks [N, S] of the positions that are no padding, and of those that the loss is over: uneven, at least one."""
    position_S = torch.arange(POSITIONS, device=ids_NS.device)
    length_N1 = 2 + ids_NS[:, :1] % (POSITIONS - 1)
    real_NS = position_S < length_N1
    return real_NS, real_NS & (position_S >= ids_NS[:, 1:2] % length_N1)


def take_share(ids_NS: Tensor, share: tuple[int, ...], rank: int, world_size: int) -> Tensor:
    """The sequences of one rank; together the ranks have each once."""
    weights = [share[r % len(share)] for r in range(world_size)]
    if not any(weights):
        weights[0] = 1
    edges = [round(ids_NS.shape[0] * sum(weights[:r]) / sum(weights)) for r in range(world_size + 1)]
    return ids_NS[edges[rank] : edges[rank + 1]]


def kind_of(name: str) -> str:
    """The row of the certificate that a parameter belongs to."""
    return next((kind for kind in reversed(KINDS) if kind in name), "other").strip(".")


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU; every rank calls it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def shard_rest(model: nn.Module, mesh: Any, mp_policy: MixedPrecisionPolicy) -> None:
    """FSDP2 of what is not an expert, block by block, as Composer does it."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=mp_policy)
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)


def place(
    model: nn.Module,
    mesh: MeshConfig,
    optimizer: torch.optim.Optimizer,
    policy: MixedPrecisionPolicy,
    device: torch.device,
    ranks_per_node: int | None,
) -> None:
    """Puts the whole model on the mesh, and its new parameters into the optimizer."""
    placed = parallelize(
        model, mesh, optimizers=[optimizer], mp_policy=policy, device=device, ranks_per_node=ranks_per_node
    )
    old = dict(model.named_parameters())
    shard_rest(model, placed.mesh, policy)
    new = dict(model.named_parameters())
    replace_parameters(optimizer, {parameter: new[name] for name, parameter in old.items()})
    prefetch_in_order(model)


def run_case(
    case: Case,
    mesh: MeshConfig | None,
    *,
    dtype: torch.dtype = torch.float64,
    ranks_per_node: int | None = None,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Trains a case for a few steps.

    Args:
        mesh: None = this process alone.
        dtype: of parameters.
        device: cpu | cuda.

    Returns:
        What to compare, by name: `loss/step`, `norm/step`, `grad/step/kind/parameter` of the first and last step,
        `weight/kind/parameter`, `checkpoint/key`; the same on every rank, but checkpoints, which rank 0 reads.
    """
    model = build_model(case, dtype, torch.device(device))
    context = batch_context(model)
    assert context is not None
    optimizer: torch.optim.Optimizer
    if case.muon:
        name = str(dtype).removeprefix("torch.")
        optimizer = Muon(model.parameters(), model=model, lr=LEARNING_RATE, eps=EPSILON, dtype=name)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, foreach=False)
    if mesh is not None:
        mesh = replace(mesh, buffer=case.buffer)
        place(model, mesh, optimizer, MixedPrecisionPolicy(reduce_dtype=dtype), torch.device(device), ranks_per_node)

    seen: dict[str, Tensor] = {}
    for step in range(STEPS):
        context.progress = Progress(ba=step, dur=step / STEPS)
        before = loads_so_far(moe_layers(model))
        optimizer.zero_grad()
        loss = accumulate_gradients(case, model, step, dtype, distributed=mesh is not None)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and step in (0, STEPS - 1):
                seen[f"grad/{step}/{kind_of(name)}/{name}"] = whole(parameter.grad)
        seen[f"norm/{step}"] = clip_grad_norm_(model.parameters(), case.max_norm).cpu()
        seen[f"loss/{step}"] = loss.cpu()
        optimizer.step()
        step_gates(moe_layers(model), before, Progress(ba=step + 1))
    for name, parameter in model.named_parameters():
        seen[f"weight/{kind_of(name)}/{name}"] = whole(parameter)
    seen.update(_checkpoint_contents(model, optimizer, dist.get_rank() if mesh else 0))
    return seen


def accumulate_gradients(case: Case, model: TinyLM, step: int, dtype: torch.dtype, *, distributed: bool) -> Tensor:
    """The backward passes of a step's microbatches; returns the mean loss of the whole job."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    context, device = batch_context(model), model.norm.weight.device
    assert context is not None
    total = torch.zeros((), dtype=dtype, device=device)
    masks = [real_and_trained(draw_batch(step, microbatch)) for microbatch in range(case.microbatches)]
    all_real, all_trained = (sum(int(mask.sum()) for mask in kind) for kind in zip(*masks, strict=True))
    for microbatch in range(case.microbatches):
        last = microbatch + 1 == case.microbatches
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_all_reduce(last, recurse=False)
        ids = draw_batch(step, microbatch)
        mine = take_share(ids, case.share, rank, world_size).to(device)
        real_NS, trained_NS = real_and_trained(mine)
        # gradients are averaged over ranks, so a rank's means weigh as its share of the tokens
        context.auxiliary_scale = real_NS.sum().double() * world_size / all_real
        logits = model(mine[:, :-1], attention_mask=real_NS)
        losses_T = F.cross_entropy(logits[trained_NS].to(dtype), mine[:, 1:][trained_NS], reduction="none")
        mean = context.track_scale(losses_T.sum() / max(losses_T.numel(), 1))
        (mean * losses_T.numel() * world_size / all_trained).backward()
        total += losses_T.detach().sum() / all_trained
    if distributed:
        dist.all_reduce(total)
    return total


def _checkpoint_contents(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Tensor]:
    """Saves a sharded checkpoint and reads back the whole of it, as a run on another mesh would find it."""
    folder: list[Any] = [tempfile.mkdtemp(prefix="parity-") if rank == 0 else None]
    distributed = dist.is_initialized()
    if distributed:
        dist.broadcast_object_list(folder)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state["state"]}
    dcp.save(state, checkpoint_id=folder[0], no_dist=not distributed)
    if rank != 0:
        return {}
    merged = Path(folder[0]) / "merged.pt"
    dcp_to_torch_save(folder[0], merged)
    contents = dict(_flatten(torch.load(merged, weights_only=False), "checkpoint"))
    shutil.rmtree(folder[0])
    return contents


def _flatten(tree: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flatten(value, f"{path}/{key}")


def run_meshes(
    meshes: Sequence[Mesh | None], cases: Sequence[Case], keys: Mapping[str, Any], **options: Any
) -> dict[tuple[Mesh | None, str], dict[str, Tensor]]:
    """On each rank of a launch: every case on every mesh of its size, None = one process.

    Args:
        keys: others of `MeshConfig`.
        options: of `run_case`.
    """
    results = {}
    for mesh in meshes:
        config = None
        if mesh is not None:
            config = MeshConfig(**dict(zip(("replicate", "shard", "expert"), mesh, strict=True)), **keys)
        for case in cases:
            results[mesh, case.name] = run_case(case, config, **options)
    return results


def _row_of(key: str) -> str:
    quantity, *rest = key.split("/")
    if quantity == "grad":
        return f"gradient {rest[1]}"
    if quantity == "weight":
        return f"weights {rest[0]}"
    return "clipped norm" if quantity == "norm" else quantity


def compare(measured: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """For each kind of quantity, the largest difference of its tensors.

    A quantity that only one side has is an infinite difference: a gradient that is missing is not a zero.
    """
    rows: dict[str, float] = defaultdict(float)
    for key in measured.keys() | expected.keys():
        row = _row_of(key)
        rows[row] = max(rows[row], difference(measured.get(key), expected.get(key)))
    return dict(sorted(rows.items()))


def certify(
    meshes: Iterable[Mesh], *, cases: Sequence[Case] = CASES, ranks_per_node: int | None = None, **keys: Any
) -> dict[Mesh, dict[str, dict[str, float]]]:
    """{mesh: {case: {row: largest relative difference from one process}}}; one launch for each number of processes.

    Args:
        ranks_per_node: as if this were the number of GPUs of a node; None = all on one.
        keys: others of `MeshConfig`.
    """
    expected = {case.name: run_case(case, None) for case in cases}
    by_size: dict[int, list[Mesh]] = defaultdict(list)
    for mesh in meshes:
        by_size[mesh[0] * mesh[1] * mesh[2]].append(mesh)
    table: dict[Mesh, dict[str, dict[str, float]]] = {}
    for size, group in sorted(by_size.items()):
        run = partial(run_meshes, group, cases, keys, ranks_per_node=ranks_per_node)
        results = run_processes(run, world_size=size, preload=PRELOAD)
        for mesh in group:
            table[mesh] = {case.name: compare(results[mesh, case.name], expected[case.name]) for case in cases}
    return table


def largest(table: dict[Mesh, dict[str, dict[str, float]]]) -> tuple[float, Mesh, str, str]:
    """The largest difference in a table, and where it is."""
    return max(
        (value, mesh, case, row)
        for mesh, cases in table.items()
        for case, rows in cases.items()
        for row, value in rows.items()
    )
