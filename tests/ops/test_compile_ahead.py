"""Every load has its tile compiled when experts first run, and no other is needed later."""

import subprocess
import sys

import pytest
import torch
from foundry_moe_kernels import products, tuning

from benchmarks.compilations import on_compilation
from foundry_moe.ops import compile_ahead as ahead
from foundry_moe.ops import expert_mlp, plan_permute

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.quick
def test_loads_stand_for_every_class_of_rows():
    def of(rows):
        return tuning.shape_class("up2", rows_per_expert=rows, n=1024, k=2048)

    known = {of(rows) for rows in tuning.all_loads()}
    assert {of(rows) for rows in range(1, 3000)} | {of(int(1.09**i)) for i in range(1, 130)} <= known


@pytest.mark.quick
def test_each_process_of_a_node_runs_every_load_and_begins_with_another(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    begun = set()
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        seen = []
        ahead.run_all_loads(8, lambda seen=seen: seen.append(tuning.per_expert(48, 8)))
        assert sorted(seen) == sorted(tuning.all_loads())
        begun.add(seen[0])
    assert len(begun) == 4


@pytest.mark.quick
def test_a_pretended_load_decides_the_tile():
    with tuning.pretend(4096, 8):
        assert tuning.is_pretended() and tuning.all_rows(48) == 8 * 4096
        assert tuning.per_expert(48, 4) == 4096
    assert not tuning.is_pretended() and tuning.all_rows(48) == 48 and tuning.per_expert(48, 4) == 12


@pytest.mark.quick
def test_a_shape_takes_the_tile_of_the_nearest_class_of_its_product(monkeypatch):
    table = {"up2 9 10 11": {"group": 1}, "up2 12 10 11": {"group": 2}, "nt 5 5 5": {"group": 3}}
    monkeypatch.setattr(tuning, "_table", lambda: table)
    caches = tuning.tile_of, tuning._nearest
    for cache in caches:
        cache.cache_clear()
    try:
        assert tuning.tile_of("up2", 512, 1024, 2048).group == 1
        assert tuning.tile_of("up2", 1, 1024, 2048).group == 1
        assert tuning.tile_of("up2", 4000, 1000, 2120).group == 2
        assert tuning.tile_of("nt", 512, 1024, 2048).group == 3
        assert tuning.tile_of("nn", 512, 1024, 2048) == tuning.Tile()
    finally:
        for cache in caches:
            cache.cache_clear()


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels would be compiled")
@pytest.mark.parametrize(
    ("widths", "computed"),
    [(None, (24, 24, 24)), ([8, 24, 16], (8, 24, 16)), ([8, 25, 16], (8, 32, 16))],
    ids=["one width", "aligned", "odd"],
)
def test_all_loads_run_on_operands_like_the_layers(widths, computed, monkeypatch):
    """Forward and backward with the tiles of each class of load."""
    monkeypatch.setattr(tuning, "all_loads", lambda: [1, 4096])
    kinds = []
    monkeypatch.setattr(ahead, "run_once", lambda kind, plan, run: kinds.append((kind, run)))
    if widths is None:
        w1, v1, w2 = torch.randn(3, 24, 16), torch.randn(3, 24, 16), torch.randn(3, 16, 24)
    else:
        w1, v1, w2 = torch.randn(3, sum(widths), 16)
    plan = plan_permute(torch.tensor([[0, 2], [1, -1]], dtype=torch.int32), 3)
    x_TD, weights_TK = torch.randn(2, 16), torch.rand(2, 2)
    call = dict(widths=widths, activation="silu", backend="blocksparse")
    y_TD = expert_mlp(x_TD, weights_TK, plan, w1, v1, w2, **call)
    ((kind, run),) = kinds
    assert computed in kind
    first_products = count_calls(monkeypatch, products, "sdd_act")
    ahead.run_all_loads(3, run)
    assert len(first_products) == 2
    torch.testing.assert_close(expert_mlp(x_TD, weights_TK, plan, w1, v1, w2, **call), y_TD)


def count_calls(monkeypatch, module, name):
    """The arguments of each call of a function, as they come."""
    seen, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: seen.append(args) or function(*args, **kwargs))
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False], ids=["glu", "mlp"])
def test_other_loads_of_different_widths_compile_nothing(gated, monkeypatch):
    monkeypatch.setattr(ahead, "_done", set())
    widths, width, choices = [384, 100, 7, 256, 129], 512, 2
    w1, v1, w2 = (torch.randn(sum(widths), width, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    for weight in (w1, v1, w2):
        weight.requires_grad_()

    def step(tokens, favourite=None):
        x = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        experts_TK = torch.randint(0, len(widths), (tokens, choices), device=DEVICE)
        if favourite is not None:
            experts_TK.fill_(favourite)
        weights = torch.rand(tokens, choices, device=DEVICE, requires_grad=True)
        y = expert_mlp(
            x, weights, plan_permute(experts_TK, len(widths)), w1, v1 if gated else None, w2, widths=widths,
            activation="silu", backend="blocksparse",
        )  # fmt: skip
        y.sum().backward()

    assert_compiles_nothing_new(step)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["hopper", "portable"])
@pytest.mark.parametrize("gated", [True, False], ids=["glu", "mlp"])
def test_other_loads_compile_nothing(kernels, gated, monkeypatch):
    if kernels == "portable":
        monkeypatch.setenv("FOUNDRY_MOE_KERNELS", "portable")
    monkeypatch.setattr(ahead, "_done", set())
    experts, width, hidden, choices = 12, 512, 384, 2

    def step(tokens, favourite=None):
        x = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        shapes = [(experts, hidden, width)] * 2 + [(experts, width, hidden)]
        w1, v1, w2 = (torch.randn(s, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
        experts_TK = torch.randint(0, experts, (tokens, choices), device=DEVICE)
        if favourite is not None:
            experts_TK.fill_(favourite)
        weights = torch.rand(tokens, choices, device=DEVICE, requires_grad=True)
        y = expert_mlp(
            x, weights, plan_permute(experts_TK, experts), w1, v1 if gated else None, w2, activation="silu",
            backend="blocksparse",
        )  # fmt: skip
        y.sum().backward()

    assert_compiles_nothing_new(step)


@pytest.mark.gpu
def test_a_gates_first_forward_pass_compiles_its_backward_pass():
    """And loads it: in a process of its own, where no gate has run."""
    script = """
import torch
from triton import knobs
from benchmarks.compilations import on_compilation
from foundry_moe.config import MoEConfig
from foundry_moe.layers.moe import MoELayer

compiled = []
on_compilation(compiled.append)
config = MoEConfig(num_experts=8, top_k=2, expert_hidden_size=64, activation="swiglu", loss={"balance": 0.1, "z": 0.1})
layer = MoELayer(128, config, device="cuda", dtype=torch.bfloat16)
y = layer(torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True))
assert compiled, "a name that would be found in the backward pass"
compiled.clear()
knobs.runtime.kernel_load_start_hook.add(lambda *_: compiled.append("a load"))
y.sum().backward()
print(compiled)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def assert_compiles_nothing_new(step):
    step(4096)
    compiled = []
    on_compilation(compiled.append)
    try:
        for tokens in (1, 2, 3, 7, 16, 33, 129, 512, 1000, 4099, 20000, 150_000):
            step(tokens)
            step(tokens, favourite=3)
    finally:
        on_compilation(lambda name: None)
    assert compiled == []
