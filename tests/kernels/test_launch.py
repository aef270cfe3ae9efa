"""Direct launches: how kinds of arguments are distinguished, and that nothing else changes."""

import threading
import types

import pytest
import torch
import triton
from foundry_moe_kernels import descriptors, expert_products, permute, permute_plan
from foundry_moe_kernels import launch as module

from tests.helpers import kernel_twins as reference

CUDA = torch.cuda.is_available()


class Kernel:
    """Stands for a jitted kernel: notes how it was launched."""

    arg_names = ("x", "n", "A", "B")

    def __init__(self):
        self.fn, self.slow, self.fast = self, [], []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.slow.append((grid, args, constants))
            launcher = types.SimpleNamespace(
                launch=lambda *a: self.fast.append(a), global_scratch_size=0, profile_scratch_size=0,
                launch_cooperative_grid="c", launch_pdl="p",
            )  # fmt: skip
            return types.SimpleNamespace(function="f", packed_metadata="m", run=launcher)

        return run


@pytest.fixture
def direct(monkeypatch):
    monkeypatch.setattr(module, "_DIRECT", True)
    none = types.SimpleNamespace(calls=[])
    hooks = types.SimpleNamespace(runtime=types.SimpleNamespace(launch_enter_hook=none, launch_exit_hook=none))
    monkeypatch.setattr(module, "knobs", hooks, raising=False)
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.delenv("FOUNDRY_MOE_COMPILE_AHEAD", raising=False)  # certificates of a process set it
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    hooks.contexts = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: hooks.contexts.append(threading.get_ident()))
    return hooks


@pytest.mark.quick
def test_the_second_launch_of_a_kind_is_direct_and_has_every_argument(direct):
    kernel, x = Kernel(), torch.zeros(64)
    for n in (32, 48):  # one kind: divisible by 16
        module.launch(kernel, (7, 2), x, n, B=5, A=4, num_warps=8)
    assert kernel.slow == [((7, 2), (x, 32), {"B": 5, "A": 4, "num_warps": 8})]
    assert kernel.fast == [(7, 2, 1, "stream", "f", "c", "p", None, None, "m", None, None, None, x, 48, 4, 5)]


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="other versions launch by Triton's own way")
def test_a_direct_launch_gives_tensor_maps_as_triton_gives_them(direct, monkeypatch):
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    got = []
    utils = types.SimpleNamespace(
        fill_tma_descriptor=lambda *a: ("map", *(list(i) if type(i) is tuple else i for i in a))
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", types.SimpleNamespace(utils=utils))
    monkeypatch.setattr(module, "TMA_DTYPE_DEVICE_TO_HOST", driver.TMA_DTYPE_DEVICE_TO_HOST, raising=False)
    metas = [
        {"swizzle": 3, "elem_size": 2, "elem_type": kind, "block_size": [rows, 64], "fp4_padded": False}
        for kind, rows in ((8, 64), (10, 128))
    ]
    launcher = object.__new__(driver.CudaLauncher)
    signature = {0: "tensordesc<bf16[64,64]>", 1: "i32", 2: "tensordesc<bf16[128,64]>", 3: "constexpr"}
    launcher.launch = driver.wrap_handle_tensordesc(lambda *a: got.append(a), signature, metas)
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, True

    class Kernel:
        arg_names, fn = ("a", "n", "b", "C"), "function"

        def __getitem__(self, grid):
            def run(*args, **constants):
                launcher(*grid, 1, "stream", "f", "m", None, None, None, *args, constants["C"])
                return types.SimpleNamespace(function="f", packed_metadata="m", run=launcher)

            return run

    x, kernel = torch.zeros(256, 512, dtype=torch.bfloat16), Kernel()
    for _ in range(2):
        module.launch(
            kernel,
            (7, 2),
            descriptors.boxes(x, (64, 64)),
            48,
            descriptors.boxes(x[:, ::1], (128, 64)),
            C=5,
            num_warps=4,
        )
    triton_way, direct_way = got
    assert triton_way == direct_way and len(direct_way) == 13 + 2 * 5 + 2 and module._known


def test_arguments_that_triton_compiles_for_are_kinds_of_their_own(direct):
    kernel, x = Kernel(), torch.zeros(64)
    kinds = [
        (x, 32, 4, 8),
        (x, 1, 4, 8),
        (x, 33, 4, 8),
        (x, 2**31, 4, 8),
        (x.half(), 32, 4, 8),
        (x[1:], 32, 4, 8),
        (None, 32, 4, 8),
        (x, 0.5, 4, 8),
        (x, 32, 5, 8),
        (x, 32, 4, 4),
    ]
    for x_, n, a, warps in kinds:
        module.launch(kernel, (1,), x_, n, A=a, B=0, num_warps=warps)
    assert len(kernel.slow) == len(kinds) and not kernel.fast


def test_launches_of_one_thread_only_compile_within_compile_only(direct):
    kernel, compiled = Kernel(), []
    kernel.run = lambda *args, grid, warmup, **constants: compiled.append((args, grid, warmup, constants))
    with module.compile_only() as compiles:
        module.launch(kernel, (3,), 1.5, 7, A=1, B=2)
        other = threading.Thread(target=module.launch, args=(kernel, (4,), 2.5, 8), kwargs={"A": 1, "B": 2})
        other.start()
        other.join()
    assert compiles and compiled == [((1.5, 7), (3,), True, {"A": 1, "B": 2})]
    assert [grid for grid, *_ in kernel.slow] == [(4,)]
    module.launch(kernel, (5,), 1.5, 7, A=1, B=2)
    assert len(compiled) == 1 and len(kernel.fast) == 1


def test_what_is_compiled_first_is_compiled_once_and_never_run(direct, monkeypatch):
    kernel, compiled = Kernel(), []
    kernel.run = lambda *args, grid, warmup, **constants: compiled.append(args)
    monkeypatch.setattr(module, "_compiled_first", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def run(n):
        module.launch(kernel, (3,), n, A=1, B=2)
        module.compile_first("inner", lambda: run(0))  # its launches are among those of the outer one

    for n in (1, 2):
        module.compile_first("kernel", lambda n=n: run(n))
    assert compiled == [(1,)] and not kernel.slow
    monkeypatch.setenv("FOUNDRY_MOE_COMPILE_AHEAD", "0")
    module.compile_first("another", lambda: run(3))
    assert compiled == [(1,)]


def test_other_versions_of_triton_compile_while_they_launch(monkeypatch):
    monkeypatch.setattr(module, "_DIRECT", False)
    kernel = Kernel()
    with module.compile_only() as compiles:
        module.launch(kernel, (3,), 1.5, 7, A=1, B=2)
    assert not compiles and len(kernel.slow) == 1
    monkeypatch.setattr(module, "_compiled_first", set())
    module.compile_first("kernel", lambda: module.launch(kernel, (3,), 1.5, 7, A=1, B=2))
    assert len(kernel.slow) == 1, "or it would run"


def test_hooks_and_other_versions_take_tritons_way(direct, monkeypatch):
    kernel, x = Kernel(), torch.zeros(64)
    for _ in range(2):
        module.launch(kernel, (1,), x, 32, A=1, B=0)
    direct.runtime.launch_enter_hook.calls.append(print)
    module.launch(kernel, (1,), x, 32, A=1, B=0)
    direct.runtime.launch_enter_hook.calls.clear()
    monkeypatch.setattr(module, "_DIRECT", False)
    module.launch(kernel, (1,), x, 32, A=1, B=0)
    assert len(kernel.slow) == 3 and len(kernel.fast) == 1


@pytest.mark.quick
def test_a_thread_gets_a_context_before_its_first_launch(direct, monkeypatch):
    def launches():
        for _ in range(2):
            module.launch(Kernel(), (1,), torch.zeros(64), 32, A=1, B=1)

    for number in (1, 2):  # tensor maps need one, which a new thread of autograd does not have
        monkeypatch.setattr(module, "_DIRECT", number == 1)
        thread = threading.Thread(target=launches)
        thread.start()
        thread.join()
        assert len(direct.contexts) == number


@pytest.mark.gpu
@pytest.mark.skipif(not descriptors.GLUON, reason="the Hopper kernels run with Triton 3.6 alone")
def test_a_thread_may_begin_with_a_kernel_that_takes_tensor_maps():
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    if not descriptors.supported(x):
        pytest.skip("needs a Hopper GPU")
    w = torch.randn(2, 256, 512, device="cuda", dtype=torch.bfloat16)
    rows = expert_products.ragged_rows(torch.tensor([100, 256], device="cuda", dtype=torch.int32), 256)
    wanted = expert_products.rows_product(x, (w,), rows, transposed=True)
    found = []
    thread = threading.Thread(target=lambda: found.append(expert_products.rows_product(x, (w,), rows, transposed=True)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], wanted)


@pytest.mark.gpu
def test_on_a_gpu_direct_launches_change_no_bit(monkeypatch):
    monkeypatch.setattr(module, "_known", {})
    for width, offset in [(64, 0), (64, 1), (1, 0), (64, 0), (80, 0), (1, 0), (64, 1), (48, 0)]:
        experts_TK = torch.randint(4, (33, 2), device="cuda")
        row_TK, offsets_E = permute_plan.plan_permute(experts_TK, 4)[4], permute_plan.plan_permute(experts_TK, 4)[2]
        x = torch.randn(33, width + offset, device="cuda")[:, offset:]
        assert torch.equal(permute.permute(x, row_TK, offsets_E), reference.permute(x, row_TK))
    assert module._DIRECT and module._known
    entered = len(module._known)
    permute.permute(x, row_TK, offsets_E)
    assert len(module._known) == entered
