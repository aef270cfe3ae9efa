"""Every gate over processes: the same choices, losses, state and weights as in one process."""

from __future__ import annotations

import pytest
import torch

from foundry_moe.launch.processes import run_processes
from tests.distributed import gates_worker
from tests.helpers.launching import PRELOAD
from tests.helpers.small_training import TOLERANCE, compare, run_case
from tests.helpers.stacks import needs_replicas

pytestmark = pytest.mark.filterwarnings("ignore:gate expert_choice")


def test_gates_over_expert_ranks_train_as_one_process_does():
    """Noise, schedules, bias and ragged choices included; two microbatches per step; the checkpoint too."""
    (results,) = run_processes(
        gates_worker.on_meshes, list(gates_worker.ALONE), [(1, 1, 2)], world_size=2, preload=PRELOAD
    )
    for name, ours in results.items():
        expected = run_case(gates_worker.case_of(name), None)
        rows = compare(ours, expected)
        assert max(rows.values()) < TOLERANCE, (name, rows)
    bias = [key for key in results["noisy, in groups, with bias"] if key.endswith("bias_E")]
    assert bias and all(results["noisy, in groups, with bias"][key].any() for key in bias)


def test_a_rank_without_tokens_trains_as_one_process_does():
    (results,) = run_processes(
        gates_worker.on_meshes, list(gates_worker.EMPTY), [(1, 1, 2)], world_size=2, preload=PRELOAD
    )
    for name, ours in results.items():
        rows = compare(ours, run_case(gates_worker.case_of(name), None))
        assert max(rows.values()) < TOLERANCE, (name, rows)


@needs_replicas
def test_gates_in_which_tokens_compete_do_not_depend_on_the_mesh():
    """They see the tokens of a rank, so one process differs; but the ranks' roles make no difference."""
    first, second = run_processes(
        gates_worker.on_meshes, list(gates_worker.TOGETHER), [(1, 1, 2), (2, 1, 1)], world_size=2, preload=PRELOAD
    )
    for name in gates_worker.TOGETHER:
        rows = compare(first[name], second[name])
        assert max(rows.values()) < TOLERANCE, (name, rows)


def test_a_shuffle_is_undone_and_balances_over_uneven_ranks():
    ranks = run_processes(gates_worker.shuffled_assignment, world_size=3, preload=PRELOAD)
    for number, rank in enumerate(ranks):
        torch.testing.assert_close(rank["returned"], rank["scores"], rtol=0, atol=0)
        assert rank["same"] and rank["differs"]
        assert rank["largest"] == 2 and rank["sum"].tolist() == [3, 3]
        assert rank["kept"].tolist() == [number, number, 1], "a reduction leaves its input as it is"
        assert len(rank["places"].unique(dim=0)) == 3, "each sender draws a share of its own"
    everyone = torch.cat([rank["scores"] for rank in ranks])
    moved = torch.cat([rank["shuffled"] for rank in ranks])
    assert torch.equal(everyone.sort(0).values, moved.sort(0).values)
    sizes = [len(rank["shuffled"]) for rank in ranks]
    assert sum(sizes) == 69 and max(sizes) - min(sizes) <= 2
    for rank in ranks:  # rows of all ranks in each share
        origins = [sum(bool((row == other["scores"]).all(1).any()) for row in rank["shuffled"]) for other in ranks]
        assert min(origins) >= 6
    loads = torch.bincount(torch.cat([rank["experts"] for rank in ranks]), minlength=8)
    assert loads.max() - loads.min() <= 3  # one per rank at most


DRAWING = ["switch", "gshard", "noisy, in groups, with bias", "dense_to_sparse"]


@pytest.mark.parametrize(
    "mesh",
    [pytest.param((1, 1, 2), id="2 processes"), pytest.param((2, 1, 2), id="4 processes", marks=needs_replicas)],
)
def test_draws_and_states_do_not_depend_on_the_mesh(mesh):
    """Token by token: what noise, chance and jitter choose on each of the steps; and the bias on every rank."""
    ours = run_processes(
        gates_worker.choices_and_states, DRAWING, mesh, world_size=mesh[0] * mesh[1] * mesh[2], preload=PRELOAD
    )
    alone = gates_worker.choices_and_states(DRAWING, None)
    for name in DRAWING:
        assert ours[name]["chosen"].keys() == alone[name]["chosen"].keys() and len(alone[name]["chosen"]) > 100
        for key, truth in alone[name]["chosen"].items():
            for mine, wanted in zip(ours[name]["chosen"][key], truth, strict=True):
                # fp64, but sums in another order, three steps of training apart
                assert mine == pytest.approx(wanted, rel=1e-6), (name, key)
        (wanted,) = alone[name]["states"]
        assert len(ours[name]["states"]) == mesh[0] * mesh[1] * mesh[2]
        for state in ours[name]["states"]:
            assert state.keys() == wanted.keys()
            for key, buffer in state.items():
                assert torch.equal(buffer, wanted[key]), (name, key)
    bias = alone["noisy, in groups, with bias"]["states"][0]
    assert bias and all(b.any() for b in bias.values())


@needs_replicas
def test_the_balance_loss_counts_the_ranks_that_it_says():
    """E * sum_e f_e P_e in fp64, gradient included: f over a rank, over the ranks that share experts, over all."""
    groups = {
        "rank": [[0], [1], [2], [3]],
        "group": [[0, 1], [0, 1], [2, 3], [2, 3]],
        "microbatch": [[0, 1, 2, 3]] * 4,
    }
    results = run_processes(
        gates_worker.balance_of_ranks, list(groups), (2, 1, 2), world_size=4, preload=PRELOAD
    )  # fmt: skip
    for scope, members in groups.items():
        ranks = results[scope]
        counts = [torch.bincount(rank["experts"].flatten(), minlength=8) for rank in ranks]
        for rank, group in zip(ranks, members, strict=True):
            counts_E = torch.stack([counts[other] for other in group]).sum(0).double()
            weight_ED = rank["weight"].clone().requires_grad_()
            mean_E = (rank["x"] @ weight_ED.T).softmax(-1).mean(0)
            loss = 8 * (counts_E / counts_E.sum() * mean_E).sum()
            assert rank["loss"].item() == pytest.approx(loss.item(), rel=1e-6)  # statistics are fp32
            torch.testing.assert_close(rank["gradient"], torch.autograd.grad(loss, weight_ED)[0])
    losses = [[rank["loss"].item() for rank in results[scope]] for scope in groups]
    assert len({tuple(row) for row in losses}) == 3
