"""Rotary tables as one operator: the values of transformers' own module, and opaque to the compiler."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from foundry_moe.parallel.transformer_blocks import hide_rotary_tables

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# multiplies its tables by 0.1 ln(factor) + 1
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def _rotary(scaling: dict | None) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=4, rope_scaling=scaling, max_position_embeddings=512)
    )


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3, YARN])
def test_tables_are_those_of_transformers(scaling: dict | None, dtype: torch.dtype) -> None:
    rotary, x, positions_BS = _rotary(scaling), torch.zeros(2, 1, dtype=dtype), torch.randint(0, 512, (2, 32))
    expected = rotary(x, positions_BS)
    assert hide_rotary_tables(rotary) == 1
    with torch.autocast("cpu", torch.bfloat16):
        tables = rotary(x, position_ids=positions_BS)
    for table, other in zip(tables, expected, strict=True):
        assert torch.equal(table, other) and table.dtype == dtype


@pytest.mark.quick
def test_frequencies_that_follow_the_length_are_left_to_their_module() -> None:
    assert hide_rotary_tables(_rotary({"rope_type": "dynamic", "factor": 2.0})) == 0


def test_the_compiler_calls_the_operator_and_does_not_fuse_it() -> None:
    rotary = _rotary(None)
    hide_rotary_tables(rotary)
    graphs: list[torch.fx.GraphModule] = []

    def attend(q: torch.Tensor, k: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
        cos, sin = rotary(q, position_ids=positions_BS)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q @ k.mT

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    q, k = torch.randn(2, 1, 4, 8, 16)
    positions_BS = torch.arange(8)[None]
    compiled = torch.compile(attend, backend=note, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, positions_BS), attend(q, k, positions_BS))
    called = {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"}
    assert any("rotary_tables" in name for name in called) and not any("cos" in name for name in called), called
