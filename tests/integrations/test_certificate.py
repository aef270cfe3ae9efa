"""Every experts class of transformers 5 on our kernels and in plain torch equals eager: outputs and all gradients."""

from pathlib import Path

import pytest
import torch
import transformers

from foundry_moe.integrations import transformers as integration
from tests.helpers import transformers_experts as certificate
from tests.helpers.transformers_experts import without_kernels

FAMILIES = certificate.families()
# fp32 sums of 48 products in another order; seen below 1e-6 in plain torch, 5e-7 with the portable kernels on an H200
TOLERANCE = 1e-5
NEWEST = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)  # that the docs' table was made with
PAGE = Path(__file__).parents[2] / "docs/how-to/transformers.md"


def by_model(family: certificate.Family) -> str:
    return f"{family.model}-{family.experts.__name__}"


def one_of_each_kind() -> list[certificate.Family]:
    kinds: dict[object, certificate.Family] = {}
    for family in FAMILIES:
        own = family.model if "own gate" in family.flags else None
        kinds.setdefault((family.flags, own), family)
    return list(kinds.values())


def test_classes_are_found():
    assert {"qwen3_moe", "mixtral", "gpt_oss", "nemotron_h", "aria"} <= {family.model for family in FAMILIES}
    assert len(FAMILIES) >= 65 or not NEWEST


@pytest.mark.parametrize("family", FAMILIES, ids=by_model)
def test_plain_torch_equals_eager(family, monkeypatch):
    without_kernels(monkeypatch)
    found = certificate.differences(certificate.build(family))
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("family", one_of_each_kind(), ids=by_model)
def test_kernels_equal_eager(family, triton_kernels):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    experts = certificate.build(family, device)
    assert integration.way_of(experts, torch.float32) == ("fused" if integration.is_fusable(experts) else "split")
    found = certificate.differences(experts)
    assert max(found.values()) < TOLERANCE, found


# Families whose eager forward keeps sums and activations in fp32 between 16-bit weights, which grouped_mm does not
EXACTER_THAN_16_BITS = {"openai_privacy_filter"}


def assert_as_exact_as_eager(family: certificate.Family, device: str, dtype: torch.dtype) -> None:
    errors = certificate.rounding_errors(family, device, dtype)
    other = "grouped_mm" if family.model in EXACTER_THAN_16_BITS else "eager"
    ratios = {name: error / errors[other][name] for name, error in errors[certificate.NAME].items()}
    # the norms of errors of hundreds of values: seen up to 1.03 in plain torch
    assert max(ratios.values()) < 1.1, (other, ratios, errors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES, ids=by_model)
def test_16_bits_in_plain_torch_are_as_exact_as_in_eager(family, dtype, monkeypatch):
    without_kernels(monkeypatch)
    assert_as_exact_as_eager(family, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES, ids=by_model)
def test_16_bits_on_a_gpu_are_as_exact_as_in_eager(family, dtype):
    assert_as_exact_as_eager(family, "cuda", dtype)


@pytest.mark.skipif(not NEWEST, reason="the table is of transformers 5.23")
def test_rows_of_the_table_in_the_docs_are_these():
    """To renew it: python -m tests.helpers.transformers_experts. Newer releases of transformers add classes.

    An eighth of the rows: other tests here compute all classes.
    """
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "Experts |" in line]
    families = {f"| {family.model} | {family.experts.__name__} ": family for family in FAMILIES}
    of_row = [next(family for start, family in families.items() if row.startswith(start)) for row in rows]
    assert len(rows) >= 65
    assert certificate.table(of_row[::8]).splitlines()[2:] == rows[::8]
