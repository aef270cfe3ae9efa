"""HetuMoE's claims: each script lives, at toy size on a CPU, and what it times computes what it says."""

import pytest
import torch

from benchmarks.papers import hetumoe_all_to_all, hetumoe_kernels, hetumoe_layer, hetumoe_shares
from benchmarks.papers.einsum_dispatch import PARTS
from tests.papers.plots import is_plot

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


def test_the_table_of_layers_has_every_way_at_every_batch(tmp_path):
    rows = hetumoe_layer.rows_of([1, 2], SHAPE, sequence=16, rounds=1)
    assert [row[:2] for row in rows] == [["switch", "1"], ["switch", "2"], ["gshard", "1"], ["gshard", "2"]]
    assert {len(row) for row in rows} == {len(hetumoe_layer.COLUMNS)}
    hetumoe_layer.plot(rows, tmp_path / "layer.png")
    assert is_plot(tmp_path / "layer.png")


@pytest.mark.parametrize("gate", hetumoe_layer.GATES)
def test_the_parts_called_one_by_one_give_the_layers_output(gate):
    layer = hetumoe_layer.build(gate, SHAPE)
    x_TD, marks = torch.randn(20, SHAPE[0]), []
    with torch.no_grad():
        torch.testing.assert_close(
            hetumoe_shares.by_kernels(layer, x_TD, marks.append), layer(x_TD), rtol=1e-4, atol=1e-7
        )
    assert tuple(marks) == PARTS


def test_the_shares_of_a_layer_add_up(tmp_path):
    rows = hetumoe_shares.rows_of([1], SHAPE, sequence=16, rounds=1)
    assert [row[2] for row in rows] == ["before", "after"] * 2
    for row in rows:
        assert sum(float(cell.rstrip("%")) for cell in row[4:]) == pytest.approx(100, abs=0.5)
    hetumoe_shares.plot(rows, tmp_path / "shares.png")
    assert is_plot(tmp_path / "shares.png")


def test_copies_beside_each_other_hold_the_same_tokens():
    made = {name: run() for name, run in hetumoe_kernels.layouts(48, 16, 4).items()}
    torch.testing.assert_close(made["ours"], made[hetumoe_kernels.GATHER])
    torch.testing.assert_close(made[hetumoe_kernels.SLOTS], made[hetumoe_kernels.OUR_SLOTS])


def test_our_top_k_chooses_and_weighs_as_torch_does():
    scores_TE = torch.randn(32, 16)
    ours, theirs = hetumoe_kernels.topk(scores_TE, 2, softmax="chosen"), hetumoe_kernels.torch_topk(scores_TE, 2)
    torch.testing.assert_close(ours, theirs)


def test_the_table_of_kernels_has_every_k_and_peer(tmp_path):
    rows = hetumoe_kernels.rows_of((16, 32), (1, 2), (4,), width=16, experts=4)
    assert len(rows) == 2 * 2 + 2 * 3
    assert {len(row) for row in rows} == {len(hetumoe_kernels.COLUMNS)}
    hetumoe_kernels.plot(rows, tmp_path / "kernels.png")
    assert is_plot(tmp_path / "kernels.png")


def test_the_table_of_exchanges_compares_both_ways_on_one_machine(tmp_path):
    rows = hetumoe_all_to_all.rows_of([2], 2, None, 0, rows=(1,), rounds=2)
    assert rows[0][:3] == ["2", "4", "256"] and all(float(cell) > 0 for cell in rows[0][3:6])
    hetumoe_all_to_all.plot(rows, tmp_path / "exchange.png")
    assert is_plot(tmp_path / "exchange.png")
