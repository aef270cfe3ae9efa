"""In which order weights are gathered ahead of their use, and what is compiled with a block."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from foundry_moe.config import MeshConfig, MoEConfig
from foundry_moe.layers.lookup import batch_context, moe_layers
from foundry_moe.layers.moe import MoELayer
from foundry_moe.parallel.placement import parallelize
from foundry_moe.parallel.transformer_blocks import (
    block_lists,
    compile_blocks,
    disable_hooks_once,
    prefetch_in_order,
    wrapped_modules,
)
from tests.helpers.fake_ranks import fake_ranks
from tests.helpers.small_training import CASES, build_model, shard_rest


class Block(torch.nn.Module):
    """A block with experts, which `compile_blocks` looks for, and a number, which is a constant of its graph."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.ffn = MoELayer(4, MoEConfig(num_experts=2, expert_hidden_size=4, activation="swiglu"))
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD * self.weight * self.number


@pytest.mark.parametrize("balance_over", ["rank", "microbatch", "batch"])
def test_a_gate_is_compiled_with_its_block_where_it_sums_loads_of_one_microbatch(balance_over: str) -> None:
    case = replace(CASES[0], moe={**CASES[0].moe, "balance_over": balance_over})
    assert case.moe["loss"]["balance"]
    models = [build_model(case, torch.float64, torch.device("cpu")) for _ in range(2)]
    for model in models:
        batch_context(model).sum_over_ranks = lambda counts_E: 2 * counts_E
    chosen: list[str] = []

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        chosen.extend(node.name for node in graph.graph.nodes if "softmax" in str(node.target))
        return graph

    torch._dynamo.reset()
    assert compile_blocks(models[0], backend=note) == 2
    ids_BS = torch.arange(8).view(2, 4)
    for model in models:
        model(ids_BS).sum().backward()
    assert bool(chosen) == (balance_over != "batch")
    compiled, eager = (model.blocks[0].ffn.gate.weight_ED.grad for model in models)
    torch.testing.assert_close(compiled, eager)


def test_the_second_shape_of_a_batch_compiles_for_all_others() -> None:
    """So that the limit of compilations, beyond which blocks run eagerly, is not a matter of shapes."""
    graphs: list[tuple[int, int]] = []
    torch._dynamo.reset()
    model = build_model(CASES[0], torch.float64, torch.device("cpu"))
    shape = (0, 0)

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(shape)
        return graph

    compile_blocks(model, backend=note)
    shapes = [(2, 4), (3, 5), (2, 6), (5, 7), (4, 9), (6, 3), (7, 2)]
    for shape in shapes:
        model(torch.arange(shape[0] * shape[1]).view(shape) % 40).sum().backward()
    assert set(graphs) == set(shapes[:2])


@pytest.mark.parametrize("limit", [1, 1000])
def test_each_block_of_a_deep_model_is_compiled(limit: int) -> None:
    """All blocks have one code object, and beyond a limit of its compilations dynamo runs them eagerly."""
    config: Any = torch._dynamo.config
    called: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()
    blocks = torch.nn.ModuleList(map(Block, range(2, 7)))

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return lambda *arguments: (called.append(graph), graph(*arguments))[1]

    with config.patch(recompile_limit=limit, accumulated_recompile_limit=limit):
        assert compile_blocks(torch.nn.Sequential(blocks), backend=note) == 5
        for number, block in enumerate(blocks):
            before = len(called)
            block(torch.ones(3, 4))
            assert len(called) > before, f"block {number} runs eagerly"
        assert min(config.recompile_limit, config.accumulated_recompile_limit) >= limit, "a larger limit stays"


class Mapping(torch.nn.Module):
    """A block with a break of its graph in a function that `map` calls, which nested breaks miscompile."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn = MoELayer(4, MoEConfig(num_experts=2, expert_hidden_size=4, activation="swiglu"))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return list(map(self.triple, [x_TD, x_TD + 1]))[1]

    def triple(self, x_TD: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return 3 * x_TD


@pytest.mark.skipif(torch.__version__ < "2.11", reason="blocks are four graphs before torch 2.11")
def test_a_block_of_llm_foundry_that_sends_tokens_is_two_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[torch.fx.GraphModule] = []
    models = [build_model(CASES[0], torch.float64, torch.device("cpu")) for _ in range(2)]

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return lambda *arguments: (called.append(graph), graph(*arguments))[1]

    torch._dynamo.reset()
    monkeypatch.setattr(type(models[0].blocks[0]).forward, "__module__", "llmfoundry.models.layers.blocks")
    compile_blocks(models[0], backend=note)
    for layer in moe_layers(models[0]):
        layer.compute_experts = torch.compiler.disable(layer.compute_experts)  # type: ignore[method-assign]
    outputs = [model(torch.arange(8).view(2, 4)) for model in models]
    assert len(called) == 2 * len(models[0].blocks)
    torch.testing.assert_close(*outputs)
    assert not torch._dynamo.config.nested_graph_breaks


def test_a_block_whose_code_is_not_known_computes_what_it_did() -> None:
    torch._dynamo.reset()
    blocks = torch.nn.ModuleList([Mapping()])
    compile_blocks(torch.nn.Sequential(blocks), backend="eager")
    assert torch.equal(blocks[0](torch.zeros(3, 4)), torch.full((3, 4), 3.0))


@pytest.mark.parametrize("after_a_pass", [False, True])
def test_a_deep_copy_of_compiled_blocks_has_its_own_weights(after_a_pass: bool) -> None:
    """As Composer's SWA makes one; with a gate that is not compiled, and a shared expert that is by itself."""
    torch._dynamo.reset()
    case = replace(CASES[0], moe={**CASES[0].moe, "balance_over": "batch", "shared_expert_hidden_size": 8})
    model, other = (build_model(case, torch.float64, torch.device("cpu")) for _ in range(2))
    ids_BS = torch.arange(8).view(2, 4)
    compile_blocks(model, backend="eager")
    if after_a_pass:
        model(ids_BS)
    averaged = copy.deepcopy(model)
    with torch.no_grad():
        for weights in (averaged, other):
            for parameter in weights.parameters():
                parameter.mul_(2)
    outputs = [m(ids_BS) for m in (averaged, other, model)]
    torch.testing.assert_close(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


@pytest.mark.quick
def test_hooks_of_fsdp2_are_hidden_from_dynamo_once(monkeypatch: pytest.MonkeyPatch) -> None:
    disabled: list[Any] = []
    disable = torch._dynamo.disable
    ids_BS, outputs = torch.zeros(2, 3, dtype=torch.long), []
    with fake_ranks(2):
        for once in (False, True):
            model = build_model(CASES[0], torch.float32, torch.device("cpu"))
            shard_rest(model, parallelize(model, MeshConfig(expert=1, shard=2)).mesh, MixedPrecisionPolicy())
            for module in wrapped_modules(model) if once else []:
                disable_hooks_once(module)
            with monkeypatch.context() as patch:
                patch.setattr(torch._dynamo, "disable", lambda *a, **k: (disabled.append(a), disable(*a, **k))[1])
                outputs.append(model(ids_BS))
            outputs[-1].sum().backward()
            assert bool(disabled) != once, "torch has another way now"
            disabled.clear()
    assert torch.equal(*outputs)


@pytest.mark.quick
def test_a_block_is_asked_for_whole_while_its_neighbour_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake process group, whose messages carry nothing."""
    asked: list[tuple[str, str]] = []
    prefetch = FSDPParamGroup._prefetch_unshard

    def note(group: FSDPParamGroup, way: str) -> None:
        asked.append((way, str(group._module_fqn)))
        prefetch(group, way)

    monkeypatch.setattr(FSDPParamGroup, "_prefetch_unshard", staticmethod(note))
    with fake_ranks(2):
        model = build_model(CASES[0], torch.float32, torch.device("cpu"))
        assert [len(blocks) for blocks in block_lists(model)] == [2]
        placed = parallelize(model, MeshConfig(expert=1, shard=2))
        shard_rest(model, placed.mesh, MixedPrecisionPolicy())
        prefetch_in_order(model)
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    experts = [f"blocks.{i}.ffn.experts" for i in range(2)]
    assert asked == [
        ("forward", experts[0]),
        ("forward", "blocks.1"),
        ("forward", experts[1]),
        ("backward", "blocks.1"),  # by the head
        ("backward", experts[1]),
        ("backward", experts[1]),  # by the block, as FSDP2 does: there already
        ("backward", "blocks.0"),  # by the experts of the block behind
        ("backward", experts[0]),
        ("backward", experts[0]),
    ]


def test_sums_of_loads_follow_the_weights_before_a_block_is_compiled() -> None:
    """As after `to_empty(recurse=False)` of each module with weights, which does not see the layer that counts."""
    graphs: list[list[str]] = []
    for device in ("cpu", "meta"):
        torch._dynamo.reset()
        model = build_model(CASES[0], torch.float64, torch.device("cpu"))
        for layer in moe_layers(model):
            layer.statistics.move_to(torch.device(device))
        graphs.append([])

        def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
            graphs[-1].append(graph.code)
            return graph

        compile_blocks(model, backend=note)
        for _ in range(2):
            model(torch.arange(8).view(2, 4)).sum().backward()
        assert all(layer.statistics.counts_E.sum() == 2 * 8 * layer.config.top_k for layer in moe_layers(model))
    assert graphs[0] == graphs[1]


@pytest.mark.quick
def test_blocks_in_groups_are_their_group() -> None:
    layer = MoELayer(4, MoEConfig(num_experts=2, expert_hidden_size=4, activation="swiglu"))
    groups = torch.nn.ModuleList([torch.nn.ModuleList([layer]), torch.nn.ModuleList([torch.nn.Linear(1, 1)])])
    assert block_lists(torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(1, 1)]), groups)) == [groups]
