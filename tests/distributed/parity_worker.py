"""What single ranks do in the tests of meshes: exchanges, a sabotaged run, faults."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from foundry_moe.commands.verify.rows import difference
from foundry_moe.config import MeshConfig, MoEConfig
from foundry_moe.layers import experts as experts_module
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.dispatch import Dispatcher
from foundry_moe.layers.experts import Experts
from foundry_moe.layers.gates.gate import Choices
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.layers.moe import MoELayer
from foundry_moe.ops.dispatch_plan import gather_rows
from foundry_moe.parallel import all_to_all as all_to_all_module
from foundry_moe.parallel import expected_counts
from foundry_moe.parallel.all_to_all import AllToAllDispatcher, Exchange
from foundry_moe.parallel.collectives import all_to_all, group_timeout
from foundry_moe.parallel.expected_counts import expect_counts
from foundry_moe.parallel.gradients import LocalWeight
from foundry_moe.parallel.mesh import HIERARCHICAL, build_meshes, plan_mesh
from foundry_moe.parallel.placement import parallelize
from foundry_moe.parallel.transformer_blocks import compile_blocks
from tests.helpers import small_training
from tests.helpers.small_training import CASES, Case, run_case
from tests.helpers.small_training import whole as full


def without_gradient_scale() -> dict[str, Tensor]:
    """A case on (1, 1, 2) with experts' gradients left undivided."""
    LocalWeight.__call__ = lambda self, weight: weight.to_local()  # type: ignore[method-assign]
    return run_case(CASES[0], MeshConfig(expert=2, shard=1))


def change_models(change: Callable[[Any], None]) -> list[Any]:
    """Has every model that a case builds on this rank changed before it is placed; the list gets each of them."""
    build, models = small_training.build_model, []

    def build_changed(*arguments: Any) -> Any:
        model = build(*arguments)
        change(model)
        models.append(model)
        return model

    small_training.build_model = build_changed
    return models


def compiled(meshes: list[tuple[int, int, int]], cases: tuple[Case, ...]) -> dict[str, Any]:
    """Cases on meshes, each block compiled: {case: {mesh: what it left}}, and how many frames were compiled."""

    def compile_model(model: Any) -> None:
        assert compile_blocks(model, backend="aot_eager") == small_training.LAYERS

    change_models(compile_model)
    results: dict[str, Any] = {
        case.name: {(r, s, e): run_case(case, MeshConfig(replicate=r, shard=s, expert=e)) for r, s, e in meshes}
        for case in cases
    }
    frames = torch._dynamo.utils.counters["frames"]
    return {**results, "frames": frames["ok"]}


def with_a_crowd_in_one_group(case: Case, mesh: MeshConfig) -> tuple[dict[str, Tensor], list[int]]:
    """What a case leaves whose experts and gates alone are trained, and this rank's most rounds by layer.

    The tokens of the first half of the ranks, which are one expert group, all choose the same experts.
    """

    def freeze_and_crowd(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".ffn." in name or name == "head.weight")
        if dist.get_rank() < dist.get_world_size() // 2:
            for layer in moe_layers(model):
                layer.gate.register_forward_hook(_choose_the_first)

    models = change_models(freeze_and_crowd)
    return run_case(case, mesh), [layer.experts.most_rounds for layer in moe_layers(models[0])]


def _choose_the_first(gate: torch.nn.Module, inputs: Any, choices: Choices) -> Choices:
    experts_TK = torch.arange(choices.experts_TK.shape[1]).expand_as(choices.experts_TK)
    return replace(choices, experts_TK=experts_TK.to(choices.experts_TK.dtype).contiguous(), counts_E=None)


def time_limits(meshes: list[tuple[int, int, int]]) -> dict[str, float]:
    """Seconds that the groups of meshes wait: of the job's, of those of each mesh, hierarchical where it can be."""
    limits = {"job": group_timeout().total_seconds()}
    for replicate, shard, expert in meshes:
        plan = plan_mesh(
            MeshConfig(replicate=replicate, shard=shard, expert=expert, all_to_all=HIERARCHICAL),
            world_size=dist.get_world_size(),
            ranks_per_node=2,
            num_experts=8,
        )
        built = build_meshes(plan, "cpu")
        groups = [group for mesh in (built.dense, built.experts, built.expert) for group in mesh.get_all_groups()]
        for number, group in enumerate([*groups, *built.token_groups]):
            limits[f"{(replicate, shard, expert)}, {number}"] = group_timeout(group).total_seconds()
    return limits


def wrapped_by_fsdp1() -> list[str]:
    """On a GPU: the error of a model that FSDP1 wraps, as a whole or by blocks too, with its parameters kept or not."""
    sentences = []
    for policy, keep in product((None, ModuleWrapPolicy({MoELayer})), (True, False)):
        model = small_training.build_model(CASES[0], torch.float32, torch.device("cuda"))
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=keep)
        try:
            wrapped(torch.zeros(1, 4, dtype=torch.long, device="cuda"))
        except ValueError as error:
            sentences.append(str(error))
    return sentences


def wait_for_ever() -> None:
    time.sleep(3600)


def _experts(dtype: torch.dtype, num_experts: int) -> Experts:
    experts = Experts(
        num_experts=num_experts, d_model=8, hidden_size=12, activation="swiglu", bias=True, num_layers=1, init_std=0.5
    ).to(dtype)
    experts.reset_parameters(seed=3, layer=0)
    return experts


def _tokens(rank: int, case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x_TD, weights_TK, experts_TK of one rank: uneven, some without choices, some ranks empty, or crowded."""
    generator = torch.Generator().manual_seed(rank)
    tokens = {"uneven": 3 * rank % 7, "crowded": 5, "one rank": 9 if rank == 1 else 0, "none": 0}[case]
    x_TD = torch.randn(tokens, 8, generator=generator, dtype=torch.float64).to(dtype)
    weights_TK = torch.rand(tokens, 3, generator=generator, dtype=torch.float64)
    weights_TK = weights_TK.to(torch.promote_types(dtype, torch.float32))
    experts_TK = torch.argsort(torch.rand(tokens, 16, generator=generator), dim=1)[:, :3]
    if case == "crowded":
        experts_TK = torch.tensor([0, 1, 2]).expand(tokens, 3).contiguous()
    if tokens > 2:
        experts_TK[0, 1] = -1
        experts_TK[1] = -1
    return x_TD, weights_TK, experts_TK


def _run(dispatcher: Dispatcher, experts: Experts, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    rows = dispatcher.dispatch(x_TD, Choices(experts_TK=experts_TK, weights_TK=weights_TK))
    return dispatcher.combine(experts(rows))


def _through(
    groups: Sequence[dist.ProcessGroup],
    case: str,
    dtype: torch.dtype,
    device: str = "cpu",
    buffer: float = math.inf,
    sizes: str = "exact",
) -> dict[str, Tensor]:
    """One layer forward and backward; outputs and every gradient of this rank.

    sizes: of messages: exact; expected, from a pass before; or short, expected for a batch without any choice.
    """
    whole = _experts(dtype, 16).to(device)
    dispatcher = AllToAllDispatcher(groups, num_experts=16, buffer=buffer)
    local, rank = dispatcher.local_experts, dispatcher.rank
    mine = _experts(dtype, local).to(device)
    with torch.no_grad():
        for name, parameter in mine.named_parameters():
            parameter.copy_(whole.get_parameter(name)[rank * local : (rank + 1) * local])
    x_TD, weights_TK, experts_TK = (tensor.to(device) for tensor in _tokens(rank, case, dtype))
    x_TD.requires_grad_()
    weights_TK.requires_grad_()
    model = torch.nn.Module()
    model.forward = partial(_run, dispatcher, mine)
    if sizes == "exact":
        y_TD = model.forward(x_TD, weights_TK, experts_TK)
    else:
        y_TD = _with_expected_sizes(model, dispatcher, x_TD, weights_TK, experts_TK, short=sizes == "short")
    torch.sin(y_TD.double()).sum().backward()
    assert mine.most_rounds == 1 or buffer < dispatcher.ranks
    assert mine.most_rounds > 1 or buffer > 1 or case != "crowded", "all tokens to one or two ranks"
    gradients = {name: p.grad for name, p in mine.named_parameters()}
    assert all(g is not None for g in gradients.values()), "a rank without rows must still have a gradient"
    return {"y": y_TD.detach(), "dx": x_TD.grad, "dweights": weights_TK.grad, **gradients}


def _with_expected_sizes(
    model: torch.nn.Module, dispatcher: AllToAllDispatcher, *tensors: Tensor, short: bool
) -> Tensor:
    """y_TD of the second pass, or of its repetition."""
    layer: Any = SimpleNamespace(dispatcher=dispatcher, record=None, context=BatchContext())
    expected = expect_counts(model, [layer], tensors[0].device, None)
    seen = []
    gather_counts, extra = dispatcher.gather_counts, expected_counts._EXTRA

    def note(counts_P2: Tensor) -> Callable[[], Tensor]:
        wait = gather_counts(counts_P2)
        seen.append(wait())
        return wait

    dispatcher.gather_counts = note  # type: ignore[method-assign]
    first = model(*tensors)
    if short:
        expected_counts._EXTRA = 0
        expected._make_room(dispatcher, *[torch.zeros_like(seen[0])] * 2, 0)
        expected_counts._EXTRA = extra
    y_TD = model(*tensors)
    assert torch.equal(first, y_TD), "the same rows in the same order"
    repeated = int(short and bool(seen[0].sum()))
    assert (expected.repeated, len(seen)) == (repeated, 2 + repeated)
    return y_TD


def _gather_with_nan(x_TD: Tensor, row_TC: Tensor, rows: int | None = None, *, zeros: bool = False) -> Tensor:
    """`gather_rows`, whose undefined rows are NaN."""
    x_SD = gather_rows(x_TD, row_TC, rows, zeros=zeros)
    if not zeros:
        undefined_S = torch.ones(len(x_SD), dtype=torch.bool, device=x_SD.device)
        undefined_S[row_TC[row_TC >= 0].long()] = False
        x_SD[undefined_S] = math.nan
    return x_SD


def _alone(rank: int, case: str, dtype: torch.dtype, ranks: int, device: str) -> dict[str, Tensor]:
    """The same rank's values with all experts here: gradients of experts are summed over all ranks' tokens."""
    whole = _experts(dtype, 16).to(device)
    result = {}
    for r in range(ranks):
        x_TD, weights_TK, experts_TK = (tensor.to(device) for tensor in _tokens(r, case, dtype))
        x_TD.requires_grad_()
        weights_TK.requires_grad_()
        y_TD = _run(Dispatcher(16), whole, x_TD, weights_TK, experts_TK)
        torch.sin(y_TD.double()).sum().backward()
        if r == rank:
            result = {"y": y_TD.detach(), "dx": x_TD.grad, "dweights": weights_TK.grad}
    local = 16 // ranks
    mine = slice(rank * local, (rank + 1) * local)
    return {**result, **{name: p.grad[mine] for name, p in whole.named_parameters()}}


def compare_exchanges(ranks_per_node: int, cases: list[str], device: str = "cpu") -> dict[str, float]:
    """By case: the largest relative difference of dispatched from local values, of hierarchical from flat (bf16 bits).

    Each way also in rounds, and with expected sizes of messages; hierarchical if there is more than one node. fp64 on
    a CPU, fp32 on GPUs.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    dtype = torch.float64 if device == "cpu" else torch.float32
    plan = plan_mesh(
        MeshConfig(expert=world_size, shard=1, all_to_all=HIERARCHICAL),
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        num_experts=16,
    )
    assert (plan.all_to_all == HIERARCHICAL) == (plan.nodes > 1)
    all_to_all_module.gather_rows = _gather_with_nan
    ways: dict[str, Any] = {"flat": (dist.group.WORLD,)}
    if plan.nodes > 1:
        ways["hierarchical"] = build_meshes(plan, device).token_groups
        assert AllToAllDispatcher(ways["hierarchical"], num_experts=16).rank == rank
    largest = {}
    for case in cases:
        expected = _alone(rank, case, dtype, world_size, device)
        others: list[dict[str, Any]] = [{"buffer": 1.0}, {"sizes": "expected"}, {"sizes": "short"}]
        for (name, groups), more in product(ways.items(), ({}, *others) if world_size > 1 else ({},)):
            measured = _through(groups, case, dtype, device, **more)
            largest[f"{name}, {more}, {case}"] = max(difference(measured[k], expected[k]) for k in expected)
        if plan.nodes > 1:
            one, two = (_through(groups, case, torch.bfloat16, device) for groups in ways.values())
            same = all(torch.equal(one[k], two[k]) for k in one)
            largest[f"bits, hierarchical, {case}"] = 0.0 if same else float("inf")
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, largest)
    return {key: max(gaps[key] for gaps in everyone) for key in largest}


class _Noted(torch.autograd.Function):
    """Identity that notes when it runs, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str], what: str) -> Tensor:
        ctx.events, ctx.what = events, what
        events.append(what)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(ctx.what)
        return grads[0], None, None


def note_order() -> dict[str, list[str]]:
    """What happens in one layer: messages that start and are waited for, experts, and the shared expert."""
    events: list[str] = []

    class Noting(AllToAllDispatcher):
        def start(self, rows: Tensor, exchange: Exchange, *, back: bool) -> Callable[[], Tensor]:
            events.append("start")
            wait = super().start(rows, exchange, back=back)

            def note_and_wait() -> Tensor:
                events.append("wait")
                return wait()

            return note_and_wait

    config = MoEConfig(
        num_experts=4, top_k=2, expert_hidden_size=8, activation="gelu", shared_expert_hidden_size=8, loss={}
    )
    layer = MoELayer(8, config, layer_index=0, num_layers=1, context=BatchContext())
    layer.reset_parameters()
    layer.experts = _experts(torch.float32, 2)
    layer.dispatcher = Noting((dist.group.WORLD,), num_experts=4)
    compute = experts_module.expert_mlp
    experts_module.expert_mlp = lambda *operands, **more: _Noted.apply(compute(*operands, **more), events, "experts")
    shared = layer.shared_expert
    assert shared is not None
    shared.w2.register_forward_hook(lambda module, inputs, output: _Noted.apply(output, events, "shared"))
    y = layer(torch.randn(6, 8, requires_grad=True))
    forward = list(events)
    events.clear()
    y.sum().backward()
    return {"forward": forward, "backward": events}


def find_host_synchronisations(layers: int) -> dict[str, list[str]]:
    """On one GPU in a group of its own: waits for the device in a forward and a backward pass of `layers` calls."""
    import traceback
    import warnings

    torch.cuda.set_device(0)
    dispatcher = AllToAllDispatcher((dist.group.WORLD,), num_experts=16)
    experts = Experts(num_experts=16, d_model=64, hidden_size=64, activation="swiglu", num_layers=1)
    experts.reset_parameters(seed=3, layer=0)
    experts = experts.to("cuda", torch.bfloat16)
    x_TD = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights_TK = torch.rand(64, 3, device="cuda", requires_grad=True)
    experts_TK = torch.randint(0, 16, (64, 3), device="cuda")

    def forward() -> Tensor:
        y_TD = x_TD
        for _ in range(layers):
            y_TD = _run(dispatcher, experts, y_TD, weights_TK, experts_TK)
        return y_TD

    forward().sum().backward()  # compiles, allocates
    found: dict[str, list[str]] = {}
    events: list[str] = []
    wait = torch.cuda.Event.synchronize  # which the debug mode does not see

    def note_and_wait(event: torch.cuda.Event) -> None:
        events.append(f"event: {traceback.format_stack(limit=3)[0].strip()}")
        wait(event)

    torch.cuda.Event.synchronize = note_and_wait  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("warn")
    for name in ("forward", "backward"):
        events.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if name == "forward":
                y_TD = forward()
            else:
                y_TD.sum().backward()
        warned = [f"{w.filename}:{w.lineno}: {w.message}" for w in caught if "called a synchroniz" in str(w.message)]
        found[name] = [*events, *warned]
    torch.cuda.set_sync_debug_mode("default")
    return found


def fail(kind: str, rank: int, fault: Path) -> Any:
    """Ranks exchange tokens for ever; one raises, dies, or stops answering, and makes the file `fault` then."""
    ranks = dist.get_world_size()
    for step in range(1_000_000):
        if step == 3 and dist.get_rank() == rank:
            fault.touch()
            if kind == "raises":
                raise ValueError("the data of step 3 is torn")
            if kind == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        all_to_all(torch.ones(ranks, 2), [1] * ranks, [1] * ranks, dist.group.WORLD)()


def draw_on_meta(
    mesh: tuple[int, int, int],
    num_experts: int,
    hidden_size: int | tuple[int, ...],
    device: str = "cpu",
    in_blocks: bool = False,
) -> float:
    """Experts drawn shard by shard from the meta device, against the same drawn whole: the largest difference.

    in_blocks: FSDP2 gathers experts with their block, which gets its memory afterwards, as Composer does it.
    """
    replicate, shard, expert = mesh
    config = MoEConfig(
        num_experts=num_experts, expert_hidden_size=hidden_size, activation="swiglu", shared_expert_hidden_size=8
    )
    keys: dict[str, Any] = {"layer_index": 1, "num_layers": 2, "context": BatchContext()}
    whole = MoELayer(8, config, **keys)
    whole.reset_parameters()
    placed = MoELayer(8, config, device="meta", **keys)
    model = torch.nn.ModuleList([placed])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dense = parallelize(
        model,
        MeshConfig(replicate=replicate, shard=shard, expert=expert),
        optimizers=[optimizer],
        device=device,
        blocks=[placed] if in_blocks else [],
    ).mesh
    if in_blocks:
        fully_shard(placed, mesh=dense)
        placed.experts.to_empty(device=device)
        placed.experts.param_init_fn(placed.experts)
    ours = dict(placed.named_parameters())
    given = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    assert in_blocks or given == {id(parameter) for parameter in ours.values()}
    gaps = [(full(ours[name]) - parameter).abs().max().item() for name, parameter in whole.named_parameters()]
    return max(gaps)
