"""Every experts class of transformers 5 on our kernels and in plain torch equals eager: outputs and all gradients."""

from pathlib import Path

import pytest
import torch

from foundry_moe.integrations import transformers as integration
from tests.helpers import transformers_experts as certificate
from tests.helpers.transformers_experts import without_kernels

FAMILIES = certificate.families()
# fp32 sums of 48 products in another order; seen below 1e-6 in plain torch, 5e-7 with the portable kernels on an H200
TOLERANCE = 1e-5
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
    assert len(FAMILIES) >= 65  # transformers 5.23
    assert {"qwen3_moe", "mixtral", "gpt_oss", "nemotron_h", "aria"} <= {family.model for family in FAMILIES}


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


def test_rows_of_the_table_in_the_docs_are_these():
    """To renew it: python -m tests.helpers.transformers_experts. Newer releases of transformers add classes."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "Experts |" in line]
    assert len(rows) >= 65
    assert set(rows) <= set(certificate.table().splitlines())
