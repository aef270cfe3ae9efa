"""These tests run where transformers 5 is installed (`make test-transformers`), which LLM Foundry does not allow."""

from importlib.metadata import version

import pytest

if int(version("transformers").split(".")[0]) < 5:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def triton_kernels() -> None:
    """Skips a test of the kernels where they do not run."""
    import torch
    from foundry_moe_kernels.launch import INTERPRETED

    if not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")
