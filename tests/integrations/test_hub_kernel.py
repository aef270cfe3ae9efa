"""The experts as a kernel of the Hugging Face `kernels` hub, loaded from a folder beside the installed package."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from foundry_moe.integrations import transformers as integration
from tests.helpers import transformers_experts as certificate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_a_kernel_of_the_hub_has_the_results_of_the_installed_package(model, tmp_path, triton_kernels, monkeypatch):
    # the library, not this tree's folder of that name
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != ROOT])
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    kernels = pytest.importorskip("kernels")
    spec = importlib.util.spec_from_file_location("hub_kernel", ROOT / "scripts/hub_kernel.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write(tmp_path)
    hub = kernels.get_local_kernel(tmp_path, backend="cuda")
    assert hub.__name__ not in ("foundry_moe", "foundry_moe_kernels")
    assert hub.experts_forward is not integration.experts_forward

    device = "cuda" if torch.cuda.is_available() else "cpu"
    experts = certificate.build(next(f for f in certificate.families() if f.model == model), device)
    integration.register()
    assert hub.register("foundry_moe_hub") == "foundry_moe_hub"
    given = certificate.inputs(experts)
    ours = certificate.outputs(experts, integration.NAME, given)
    for name, value in certificate.outputs(experts, "foundry_moe_hub", given).items():
        assert torch.equal(value, ours[name]), name
