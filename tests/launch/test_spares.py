"""Ranks that a mesh has no place for: how many, and how they hear that the run is over."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from foundry_moe.config import AUTO, MeshConfig
from foundry_moe.launch import spares
from foundry_moe.launch.spares import ranks_in_use, take_place
from tests.helpers.launching import free_port


def used(gpus: int, batch: object = None, gpus_per_node: int = 8, **keys: Any) -> int:
    defaults: dict[str, Any] = {"expert": 8, "shard": 8, "replicate": AUTO, "spares": True}
    config = MeshConfig(**(defaults | keys))
    return ranks_in_use(config, world_size=gpus, ranks_per_node=gpus_per_node, num_experts=16, batch_size=batch)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("gpus", "batch", "expected"),
    [
        (512, 3584, 512),
        (504, 3584, 448),  # a node of 64 is gone: seven copies of the model are left
        (448, 3584, 448),
        (504, 4096, 256),  # 448 and 384 and 320 do not divide the batch
        (504, None, 448),
        (504, "auto", 448),
    ],
)
def test_the_most_ranks_that_make_a_mesh_and_divide_the_batch(gpus, batch, expected):
    assert used(gpus, batch) == expected


@pytest.mark.quick
def test_ranks_of_one_host_and_of_whole_nodes():
    assert used(7, gpus_per_node=8, expert=2, shard=1) == 6
    assert used(24, gpus_per_node=8, expert=1, shard=16, replicate=1) == 16
    assert used(18, gpus_per_node=6, expert=1, shard=4) == 12  # 16 would cut a node
    assert used(6, gpus_per_node=6, expert=1, shard=4, replicate=1) == 4
    with pytest.raises(ValueError, match="no smaller number"):
        used(12, gpus_per_node=6, expert=1, shard=4, replicate=1)  # 4 would cut one too


def test_what_cannot_be_is_said_with_the_arithmetic_of_all_ranks():
    with pytest.raises(ValueError, match=r"64 does not fit the number of GPUs \(56\).*smaller number of GPUs"):
        used(56)
    with pytest.raises(ValueError, match=r"global_train_batch_size \(63\) must be a multiple.*smaller number"):
        used(64, 63)
    with pytest.raises(ValueError, match="do not fill nodes of 8"):
        used(70)
    with pytest.raises(ValueError, match=r"does not fit the number of GPUs \(504\)"):
        used(504, spares=False)
    with pytest.raises(ValueError, match=r"mesh.spares needs a number in mesh.shard"):
        MeshConfig(spares=True)


@pytest.mark.quick
def test_those_that_train_see_a_smaller_job(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    monkeypatch.setenv("RANK", "5")
    assert take_place(7) and os.environ["WORLD_SIZE"] == "7"
    assert take_place(6)
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("6", "6")
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert not take_place(4)
    assert os.environ["WORLD_SIZE"] == "7"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of four nodes
    assert take_place(6)
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("6", "2")


@pytest.mark.quick
def test_a_process_without_a_launcher_has_its_place(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert take_place(1) and "WORLD_SIZE" not in os.environ


@pytest.mark.quick
@pytest.mark.parametrize("answers", [0, 1, 3])
def test_a_run_that_has_answered_is_given_up_sooner_than_one_that_starts(answers, monkeypatch):
    now_s, left = [0.0], [False] * answers

    def check(keys: list[str]) -> bool:
        if not left:
            raise RuntimeError("no answer")
        return left.pop()

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda s: now_s.__setitem__(0, now_s[0] + s))
    monkeypatch.setattr(spares, "time", clock)
    monkeypatch.setattr(spares, "_store", lambda: SimpleNamespace(check=check))
    with pytest.raises(RuntimeError, match="taken for dead"):
        spares.wait_as_spare()
    patience_s = spares.SILENCE_S if answers else spares.START_S
    heard_s = max(answers - 1, 0) * spares.POLL_S
    assert patience_s < now_s[0] - heard_s <= patience_s + spares.POLL_S


@pytest.mark.quick
def test_only_the_first_rank_says_that_the_run_is_over_and_without_spares_nobody(monkeypatch):
    said = []
    store = SimpleNamespace(set=lambda key, value: said.append(key), add=lambda key, number: 2)
    monkeypatch.setattr(spares, "_store", lambda: store)
    for rank, waiting in (("1", 2), ("0", 0)):
        monkeypatch.setenv("RANK", rank)
        spares.dismiss(waiting)
    assert said == []
    spares.dismiss(2)
    assert said == ["over"]


RUN = """
    import os, sys, time
    import torch.distributed as dist
    from foundry_moe.launch.spares import dismiss, take_place, wait_as_spare
    launched = int(os.environ["WORLD_SIZE"])
    if not take_place(2):
        wait_as_spare()
        print("heard", flush=True)
        sys.exit(0)
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    dist.barrier()
    time.sleep(1.0)
    if "fail" in sys.argv:
        os._exit(1)
    dismiss(launched - 2)
"""


def start(world: int, *arguments: str, patience: str = "") -> list[subprocess.Popen[str]]:
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    script = textwrap.dedent(patience) + textwrap.dedent(RUN)
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in reversed(range(world))  # spares first: the store is not there yet
    ]


def test_spares_end_with_the_run():
    ended = [(process.communicate(timeout=120), process.returncode) for process in start(4)]
    assert [code for _, code in ended] == [0] * 4, ended
    assert [out for (out, _), _ in ended] == ["heard\n", "heard\n", "", ""]


def test_a_spare_outlives_a_failed_run_until_its_launcher_or_its_patience_ends_it():
    patience = "import foundry_moe.launch.spares as s; s.POLL_S, s.SILENCE_S = 0.2, 8.0"
    spare, *train = start(3, "fail", patience=patience)
    for process in train:
        process.communicate(timeout=120)
    assert spare.poll() is None, "its exit with 0 would look to torchrun like the end of the run"
    _, errors = spare.communicate(timeout=120)
    assert spare.returncode == 1 and "taken for dead" in errors
    assert spares.SILENCE_S > 60, "a launcher needs time to notice"
