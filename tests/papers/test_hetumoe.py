"""The script for the claims of the HetuMoE paper, at toy size on a CPU: what it times computes the right result."""

import pytest
import torch

from benchmarks.papers import hetumoe_layer

SHAPE = (16, 32, 4)


@pytest.mark.quick
@pytest.mark.parametrize("gate", hetumoe_layer.GATES)
def test_einsums_over_masks_are_the_padded_layer_in_outputs_and_gradients(gate):
    x_TD = torch.randn(40, SHAPE[0], requires_grad=True)
    dy_TD = torch.randn_like(x_TD)
    layer, found = hetumoe_layer.build(gate, SHAPE, capacity=1.0), []
    for groups in (0, 1):
        hetumoe_layer.step(layer, x_TD, dy_TD, groups)
        found.append([leaf.grad.clone() for leaf in (x_TD, *layer.parameters())])
    outputs = layer(x_TD), hetumoe_layer.by_einsum(layer, x_TD, 1)[0]
    dropless = hetumoe_layer.build(gate, SHAPE)(x_TD)
    assert not torch.allclose(outputs[0], dropless, rtol=0.1, atol=0), "nothing was dropped: no capacity is seen"
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-7)  # fp32 sums of some 30, outputs of 1e-3
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.quick
def test_a_group_drops_by_its_own_loads_and_in_its_own_order():
    layer = hetumoe_layer.build("switch", SHAPE)
    x_TD = torch.randn(24, SHAPE[0])
    whole, _ = hetumoe_layer.by_einsum(layer, x_TD, 3)
    alone = torch.cat([hetumoe_layer.by_einsum(layer, part, 1)[0] for part in x_TD.split(8)])
    torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-7)


def test_the_table_of_layers_has_every_way_at_every_batch():
    rows = hetumoe_layer.rows_of([1, 2], SHAPE, sequence=16, rounds=1)
    assert [row[:2] for row in rows] == [["switch", "1"], ["switch", "2"], ["gshard", "1"], ["gshard", "2"]]
    assert {len(row) for row in rows} == {len(hetumoe_layer.COLUMNS)}
