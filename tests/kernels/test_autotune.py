"""Tiles for shape classes that the committed table lacks, with a fake clock: time limit, file, several processes."""

import json
import multiprocessing
import warnings

import pytest
import torch
from foundry_moe_kernels import autotune, tuning
from foundry_moe_kernels.autotune import Tuner
from foundry_moe_kernels.tuning import Tile

TILES = [Tile(group=g) for g in (1, 2, 3, 4)]
MS = {1: 5.0, 2: 3.0, 3: 4.0, 4: 1.0}


class Bench:
    """A clock that only timing moves, and the tiles that were timed."""

    def __init__(self, seconds_each=1.0, broken=()):
        self.now, self.timed, self.each, self.broken = 0.0, [], seconds_each, broken

    def measure(self, run):
        self.now += self.each
        tile = run()
        if tile.group in self.broken:
            raise RuntimeError("out of resource: shared memory")
        self.timed.append(tile.group)
        return MS[tile.group]

    def tuner(self, path, limit_s=1000.0):
        return Tuner(path, limit_s, self.measure, lambda: self.now)


def run(tile):
    return tile


def test_the_fastest_is_taken_timed_once_and_kept_for_the_next_process(tmp_path):
    path, bench = tmp_path / "cache" / "tiles.json", Bench()
    tuner = bench.tuner(path)
    assert tuner.tile("nt 7 9 9", TILES, run).group == 4
    assert tuner.tile("nt 7 9 9", TILES, run).group == 4 and bench.timed == [1, 2, 3, 4]
    other = Bench()
    assert other.tuner(path).tile("nt 7 9 9", TILES, run).group == 4 and not other.timed


def test_the_time_limit_is_for_all_classes_and_what_it_cut_short_is_not_kept(tmp_path):
    path, bench = tmp_path / "tiles.json", Bench(seconds_each=2.0)
    tuner = bench.tuner(path, limit_s=5.0)
    # two fit, then a third that took as long would go past the limit
    assert tuner.tile("a 7 9 9", TILES, run).group == 2 and bench.now <= 5.0
    assert tuner.tile("b 7 9 9", TILES, run).group == 1
    assert bench.now <= 7.0 and not path.exists()
    assert bench.tuner(path, limit_s=0).tile("c 7 9 9", TILES, run).group == 1, "no time: the likeliest, untimed"


def test_a_tile_that_does_not_run_is_passed_over_with_one_warning(tmp_path):
    bench = Bench(broken=(4, 1))
    with pytest.warns(UserWarning, match="shared memory") as caught:
        assert bench.tuner(tmp_path / "t.json").tile("a 7 9 9", TILES, run).group == 2
    assert len(caught) == 1


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[1]", '{"a": {"unknown": 3}}', '{"a": 5}', "[" * 100_000),
        *('{"nt": {}}', '{"nt 7 9": {}}', '{"": {}}', '{"nt 7 x 9": {}}', '{"nt 7 nan 9": {}}'),
        *(f'{{"nt 7 9 9": {tile}}}' for tile in ('{"bm": 0}', '{"bk": 1e9}', '{"stages": -3}', '{"warps": "8"}')),
        *(f'{{"nt 7 9 9": {tile}}}' for tile in ('{"group": null}', '{"bn": 100000}', '{"split": true}')),
    ],
)
def test_a_corrupt_file_is_ignored_with_one_warning_and_replaced(tmp_path, content):
    path = tmp_path / "tiles.json"
    path.write_text(content)
    with pytest.warns(UserWarning, match=r"tiles\.json: ignored, delete it") as caught:
        assert Bench().tuner(path).tile("nt 7 9 9", TILES, run).group == 4
    assert len(caught) == 1
    assert json.loads(path.read_text())["nt 7 9 9"]["group"] == 4


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="not written"):
        assert Bench().tuner(tmp_path / "file" / "tiles.json").tile("a 7 9 9", TILES, run).group == 4


def _tune_some(path, first):
    tuner = Bench().tuner(path)
    for number in range(first, first + 25):
        tuner.tile(f"nt {number} 9 9", TILES, run)


def test_several_processes_add_to_one_file(tmp_path):
    path = tmp_path / "tiles.json"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_tune_some, args=(path, 25 * i)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(json.loads(path.read_text())) == 100 and [p.suffix for p in tmp_path.iterdir()].count(".json") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(Bench().tuner(path).tiles) == 100


def test_committed_classes_and_cpus_are_never_timed(monkeypatch):
    def refuse(tile):
        raise AssertionError("timed")

    for experts in (64, 32, 16, 8):  # OLMoE's first product, its experts on 1 to 8 ranks
        shape = {"rows_per_expert": 131072 // experts, "n": 1024, "k": 2048}
        for device in (torch.device("cpu"), torch.device("cuda", 0)):
            key = tuning.shape_class("up2", rows_per_expert=131072 // experts, n=1024, k=2048)
            assert autotune.pick("up2", **shape, device=device, run=refuse) == tuning.nearest(key)[0]
    assert not tuning.is_committed(tuning.shape_class("up2", rows_per_expert=2048, n=1024, k=3072))
    assert tuning.is_committed(tuning.shape_class("up2", rows_per_expert=1, n=1024, k=2048))  # a collapsed gate
    assert autotune.pick("up2", rows_per_expert=38, n=1, k=1, device=torch.device("cpu"), run=refuse)


def test_the_limit_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("FOUNDRY_MOE_AUTOTUNE_S", "0")
    assert autotune.limit_s() == 0
    for wrong in ("soon", "nan", "inf", "-1"):
        monkeypatch.setenv("FOUNDRY_MOE_AUTOTUNE_S", wrong)
        with pytest.raises(ValueError, match="must be seconds, 0 for none"):
            autotune.limit_s()
    monkeypatch.setenv("FOUNDRY_MOE_TUNING_CACHE", "~/tiles.json")
    assert autotune.cache_path(torch.device("cuda")).name == "tiles.json"


@pytest.mark.gpu
def test_a_missing_class_is_tuned_on_the_device_and_gives_the_same_result(tmp_path, monkeypatch):
    from foundry_moe_kernels import expert_products as ep

    monkeypatch.setenv("FOUNDRY_MOE_TUNING_CACHE", str(tmp_path / "tiles.json"))
    autotune._tuner.cache_clear()
    rows, experts, width, hidden = 4096, 2, 8192, 136  # an odd shape that no table has
    offsets_E = torch.tensor([1000, 4096], dtype=torch.int32, device="cuda")
    x = torch.randn(rows, width, device="cuda").bfloat16()
    w = (torch.randn(experts, hidden, width, device="cuda") * width**-0.5).bfloat16()
    ragged = ep.ragged_rows(offsets_E, rows)
    first = ep.rows_product(x[None], (w,), ragged, transposed=True)
    assert list(json.loads((tmp_path / "tiles.json").read_text())), "the class was timed and kept"
    truth = torch.cat([x[:1000].double() @ w[0].double().T, x[1000:].double() @ w[1].double().T])
    assert (first.double() - truth).norm() < 5e-3 * truth.norm()
    assert torch.equal(first, ep.rows_product(x[None], (w,), ragged, transposed=True))
    autotune._tuner.cache_clear()
