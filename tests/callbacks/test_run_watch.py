"""The message of all ranks before a batch: every rank gets the same table, and uneven data raise an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from composer.core import Precision
from composer.utils.dist import get_sampler
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from foundry_moe.algorithms.gate_steps import GateSteps
from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.callbacks.nonfinite import Finding
from foundry_moe.callbacks.run_watch import (
    FINITE,
    NO_NEWS,
    NONFINITE,
    RankStatus,
    RunWatch,
    check_microbatches,
    count_microbatches,
    exchange,
)
from foundry_moe.commands.check import GLOO_GROUPS
from foundry_moe.launch.processes import run_processes
from foundry_moe.parallel.collectives import group_timeout
from foundry_moe.schema import name_ranks
from tests.helpers.launching import PRELOAD
from tests.helpers.training import MOE, batches, fit, mpt


def exchange_twice() -> tuple[list[list[RankStatus]], float]:
    group = dist.new_group(backend="gloo", timeout=group_timeout())
    rank = dist.get_rank()
    tables = [
        exchange(RankStatus(stop=int(rank == 2), health=rank % 3, microbatches=rank + 1), group),
        exchange(RankStatus(microbatches=7), group),
    ]
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, tables)
    assert all(other == tables for other in every), "ranks saw different tables"
    return tables, group_timeout(group).total_seconds()


def test_all_ranks_see_one_table() -> None:
    (first, second), timeout_s = run_processes(exchange_twice, world_size=3, timeout_s=120, preload=PRELOAD)
    assert first == [
        RankStatus(stop=0, health=0, microbatches=1),
        RankStatus(stop=0, health=FINITE, microbatches=2),
        RankStatus(stop=1, health=NONFINITE, microbatches=3),
    ]
    assert second == [RankStatus(microbatches=7)] * 3
    assert timeout_s == 120, "it waits as long as the run's own collectives"
    assert exchange(RankStatus(stop=1), None) == [RankStatus(stop=1)]


def groups_of_a_run(folder: str) -> int:
    groups: set[str] = set()
    new_group = dist.new_group

    def count(*arguments, **keys):
        group = new_group(*arguments, **keys)
        groups.add(group.group_name)
        return group

    dist.new_group = count
    callback = ElasticCheckpoint(folder=folder, interval="1ba")
    data = batches().dataset
    loader = DataLoader(data, batch_size=4, sampler=get_sampler(data), collate_fn=batches().collate_fn)
    options = {"callbacks": [callback], "algorithms": [GateSteps()], "run_name": "groups", "train_dataloader": loader}
    fit(mpt(moe=MOE), duration="2ba", **options)
    return len(groups)


def test_a_run_makes_as_many_cpu_groups_as_check_counts(tmp_path) -> None:
    """Each costs a descriptor for every other rank."""
    made = run_processes(groups_of_a_run, str(tmp_path), world_size=2, timeout_s=240, preload=PRELOAD)
    assert made == GLOO_GROUPS


def watched_after_an_evaluation() -> list[bool]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(1, 4))
    watch = RunWatch(signals=[], grace_s=1.0, checks_values=True)
    watch.start(SimpleNamespace(model=model, precision=Precision.FP32))  # type: ignore[arg-type]
    assert watch.finite is not None
    return [isinstance(parameter, DTensor) for _, parameter in watch.finite._parameters]


def test_sharded_parameters_are_watched_where_an_evaluation_left_weights_gathered() -> None:
    assert run_processes(watched_after_an_evaluation, world_size=2, timeout_s=120, preload=PRELOAD) == [True] * 4


def test_uneven_microbatches_are_one_sentence() -> None:
    check_microbatches([2, 2, 2], 5, 4)
    with pytest.raises(ValueError, match=r"batch 5 .*\(1 on ranks 1, 3; 2 on all others\).*drop_last: true.*\(4\)"):
        check_microbatches([2, 1, 2, 1], 5, 4)
    assert name_ranks(range(11)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("samples", "size", "auto", "count"), [(7, 3, False, 3), (6, 3, False, 2), (0, 3, False, 1), (7, 3, True, 1)]
)
def test_a_partial_microbatch_counts(samples: int, size: int, auto: bool, count: int) -> None:
    batch = {"name": "text", "ids": torch.zeros(samples, 2)}
    assert (
        count_microbatches(SimpleNamespace(batch=batch, device_train_microbatch_size=size, auto_microbatching=auto))
        == count
    )


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([4] * 300 + [3] + [4] * 211, "(3 on rank 300; 4 on all others)"),
        (range(1, 513), "(2 to 512 on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 503 more; 1 on all others)"),
        ([2] * 256 + [1] * 256, "(1 on ranks 256, 257, 258, 259, 260, 261, 262, 263 and 248 more; 2 on all others)"),
    ],
    ids=["one rank", "all differ", "halves"],
)
def test_of_512_ranks_those_that_differ_are_named_in_a_line(counts, words) -> None:
    check_microbatches([4] * 512, 9, 1)
    with pytest.raises(ValueError) as error:
        check_microbatches(counts, 9, 1)
    assert words in str(error.value) and len(str(error.value)) < 500


def test_batches_in_a_row_are_counted_over_all_ranks() -> None:
    watch = RunWatch(signals=[], grace_s=1.0, checks_values=True)
    watch.count_bad_batches([FINITE, NONFINITE], Finding(batch=4))
    assert watch.bad_batches == 1
    watch.count_bad_batches([NO_NEWS, NO_NEWS], None)
    assert watch.bad_batches == 1, "no news change nothing"
    watch.count_bad_batches([NONFINITE, NO_NEWS], Finding(batch=5, loss=True))
    assert watch.bad_batches == 2
    assert watch.describe().startswith("the last 2 batches were not finite, from batch 4 on"), "the first is kept"
    watch.count_bad_batches([FINITE, NO_NEWS], Finding(batch=6))
    assert watch.bad_batches == 0
