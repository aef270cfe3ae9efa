"""The host's work for a layer's step: calls of Python's functions, and frames down to a launch. No kernel runs."""

import sys
import types
from collections import Counter

import pytest
import torch
import triton
from foundry_moe_kernels import descriptors, expert_products, launch

from foundry_moe.config import MoEConfig
from foundry_moe.layers.moe import MoELayer
from foundry_moe.ops import backends, expert_plan

pytestmark = pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="launches are direct on Triton 3.6")


class Everything(dict):
    """Compiled kernels, of which each is there: their launch does nothing."""

    def __missing__(self, key):
        tensor_map = (3, 2, 6, (1,))
        return types.SimpleNamespace(
            maps=[tensor_map] * 8, encode=lambda *_: None, launch=lambda *_: None, head=(), constants=()
        )


@pytest.fixture
def layer(monkeypatch):
    """A layer on the CPU that computes as on Hopper, with a training step: a function of nothing."""
    config = MoEConfig(
        num_experts=8, top_k=2, expert_hidden_size=128, activation="swiglu", loss={"balance": 0.01, "z": 0.001},
        gate={"name": "topk"}, backend="blocksparse",
    )  # fmt: skip
    layer = MoELayer(256, config, dtype=torch.bfloat16)
    x = torch.zeros(4, 16, 256, dtype=torch.bfloat16, requires_grad=True)
    dy, leaves = torch.zeros_like(x), [x, *layer.parameters()]

    def step():
        for leaf in leaves:
            leaf.grad = None
        layer(x).backward(dy)

    none = types.SimpleNamespace(calls=[])
    hooks = types.SimpleNamespace(runtime=types.SimpleNamespace(launch_enter_hook=none, launch_exit_hook=none))
    monkeypatch.setenv("FOUNDRY_MOE_COMPILE_AHEAD", "0")
    monkeypatch.setattr(launch, "_DIRECT", True)
    monkeypatch.setattr(launch, "knobs", hooks, raising=False)
    monkeypatch.setattr(launch, "_known", Everything())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(descriptors, "device_supported", lambda device: True)
    monkeypatch.setattr(backends, "blocksparse_available", lambda device, dtype: True)
    monkeypatch.setattr(expert_plan, "takes_hopper", lambda *_: True)
    caches = expert_products._rows_launch, expert_products._inner_launch
    for cache in caches:
        cache.cache_clear()
    step()
    yield step
    for cache in caches:
        cache.cache_clear()


def test_a_step_takes_few_calls(layer):
    """As cProfile counts them: Python's functions and those of C; 2,545 once."""
    calls = Counter()

    def count(frame, event, argument):
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[argument.__qualname__] += 1

    sys.setprofile(count)
    try:
        layer()
    finally:
        sys.setprofile(None)
    assert calls["launch"] >= 21 and calls.total() <= 1000, calls.most_common(40)


def test_a_product_is_launched_seven_frames_below_the_layer(layer, monkeypatch):
    """Of this package; torch's frames of modules and autograd functions are not counted."""
    depths = {}

    def note(device):
        frame, names = sys._getframe(1), []
        while frame is not None and frame.f_code is not MoELayer.forward.__code__:
            if "foundry_moe" in frame.f_globals["__name__"]:
                names.append(frame.f_code.co_name)
            frame = frame.f_back
        if frame is not None:  # in the forward pass
            depths[names[1]] = 1 + len(names), names
        return 0

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", note)
    layer()
    assert {"gate_logits", "softmax_topk", "up", "rows_product", "unpermute"} <= depths.keys()
    for name in ("up", "rows_product", "unpermute"):
        assert depths[name][0] <= 7, depths[name]
    assert all(depth <= 8 for depth, _ in depths.values()), depths
