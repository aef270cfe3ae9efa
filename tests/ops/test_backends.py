"""What a run says of the kernels that compute its experts: for every chip, none of which need be here."""

import pytest
import torch

from foundry_moe.ops.backends import _other_chip, choose_backend, describe_backend, tf32_allowed, why_portable

pytestmark = pytest.mark.quick

CUDA = torch.device("cuda")
SIZES = {"width": 2048, "hidden": 1024}
PORTABLE = "blocksparse, portable kernels (SDD, DSD, DDS): "


def set_triton(monkeypatch, version):
    monkeypatch.setattr("foundry_moe_kernels.descriptors.VERSION", version)
    monkeypatch.setattr("foundry_moe_kernels.descriptors.GLUON", version == (3, 6))


@pytest.fixture(autouse=True)
def on_a_gpu_host(monkeypatch):
    """The interpreter takes no bf16, and tests run in it; Triton as CI's modern stack has it."""
    monkeypatch.setattr("foundry_moe.ops.backends.INTERPRETED", False)
    set_triton(monkeypatch, (3, 6))
    monkeypatch.delenv("FOUNDRY_MOE_KERNELS", raising=False)
    _other_chip.cache_clear()
    yield
    _other_chip.cache_clear()


def describe(capability, dtype=torch.bfloat16, backend="auto", **more):
    return describe_backend(backend, CUDA, dtype, **{**SIZES, **more}, capability=capability)


def test_hopper_takes_its_own_kernels():
    assert describe((9, 0)).startswith("blocksparse, Hopper kernels: sm_90, Triton ")
    assert describe((9, 0), torch.float16).endswith("float16")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_other_chips_take_the_portable_kernels_and_the_line_names_the_chip(capability):
    text = describe(capability)
    assert text.startswith(f"{PORTABLE}the Hopper kernels need sm_90 with Triton 3.6, and this is sm_")
    assert f"sm_{capability[0]}{capability[1]} with Triton " in text


@pytest.mark.parametrize("version", [(3, 3), (3, 5), (3, 7)])
def test_another_triton_takes_the_portable_kernels(version, monkeypatch):
    set_triton(monkeypatch, version)
    assert describe((9, 0)).startswith(PORTABLE)


@pytest.mark.parametrize("settings", [{}, {"backend": "reference"}])
def test_a_triton_that_compiles_nothing_for_the_chip_is_refused_with_the_stack_that_does(settings, monkeypatch):
    set_triton(monkeypatch, (3, 3))
    with pytest.raises(ValueError, match=r"no matrix products for this GPU \(sm_120\): use the modern stack"):
        describe((12, 0), **settings)
    describe((10, 0), **settings)


def test_dtypes_widths_and_the_switch_are_reasons(monkeypatch):
    assert "need bf16 or fp16, and this is float32" in describe((9, 0), torch.float32)
    assert describe((9, 0), hidden=1020).startswith("blocksparse, Hopper kernels")
    assert describe((9, 0), hidden=1020).endswith("; 1020 padded to multiples of 8, by a copy of the weights per pass")
    assert "; 1020, 2047 padded" in describe((8, 0), width=2047, hidden=(512, 1020))
    monkeypatch.setenv("FOUNDRY_MOE_KERNELS", "portable")
    assert describe((9, 0)) == f"{PORTABLE}FOUNDRY_MOE_KERNELS=portable is set"


def test_what_is_said_is_what_is_chosen():
    """`takes_hopper` calls the same function, which reads the real device when none is given."""
    assert why_portable(torch.device("cpu"), torch.bfloat16, 64, 64) == "there is no GPU"
    assert why_portable(CUDA, torch.bfloat16, 64, 64, (9, 0)) is None
    for sizes in ((60, 64), (64, 60)):
        assert "widths that 8 divides" in why_portable(CUDA, torch.bfloat16, *sizes, (9, 0))


def test_auto_never_takes_the_interpreter(monkeypatch):
    monkeypatch.setattr("foundry_moe.ops.backends.INTERPRETED", True)
    assert choose_backend("auto", torch.device("cpu"), torch.float32) == "reference"


def test_reference_is_said_with_its_reason():
    text = describe_backend("auto", torch.device("cpu"), torch.float32, **SIZES)
    assert text == "reference, plain torch, one expert after another: there is no GPU"
    assert describe((9, 0), torch.float64).endswith("kernels compute fp32, fp16 and bf16, and this is float64")


def test_what_a_user_asked_for_is_said_as_that():
    assert describe((8, 0), backend="reference") == "reference, as backend (reference) requires"


def test_a_backend_that_the_chip_does_not_have_is_refused():
    with pytest.raises(ValueError, match="backend grouped needs bf16 on a CUDA device of capability"):
        describe((8, 0), backend="grouped")


MATMUL = torch.backends.cuda.matmul


@pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="torch 2.9 up has two switches")
@pytest.mark.parametrize(
    "settings, allowed",
    [
        ({}, False),
        ({"allow_tf32": True}, True),
        ({"fp32_precision": "tf32"}, True),
        ({"everywhere": "tf32"}, True),
        ({"everywhere": "tf32", "fp32_precision": "ieee"}, False),
        ({"everywhere": "tf32", "fp32_precision": "none"}, True),
        ({"everywhere": "ieee", "fp32_precision": "tf32"}, True),
        ({"allow_tf32": True, "fp32_precision": "ieee"}, False),
        ({"fp32_precision": "tf32", "allow_tf32": False}, False),
    ],
    ids=str,
)
def test_either_of_torchs_switches_allows_tf32(settings, allowed):
    """The later setting of products wins over the earlier one, and both win over that of everything."""
    try:
        for name, value in settings.items():
            if name == "everywhere":
                torch.backends.fp32_precision = value
            else:
                setattr(MATMUL, name, value)
        assert tf32_allowed() is allowed
    finally:
        MATMUL.allow_tf32 = False  # which makes its state consistent again
        MATMUL.fp32_precision = torch.backends.fp32_precision = "none"
