"""LLM Foundry's registries find entry points by their group, the same ones as before."""

from __future__ import annotations

from importlib.metadata import entry_points

import catalogue
import pytest
from llmfoundry import registry

from foundry_moe.registry import DMoECausalLM, init_moe_module

pytestmark = pytest.mark.quick


def test_entry_points_are_looked_up_in_a_dictionary_of_groups() -> None:
    assert isinstance(catalogue.AVAILABLE_ENTRY_POINTS, dict)
    groups = [group for group in entry_points().groups if group.startswith("llmfoundry_")]
    assert groups
    for group in groups:
        assert set(catalogue.AVAILABLE_ENTRY_POINTS[group]) == set(entry_points(group=group))


def test_registries_have_entry_points_and_what_is_registered_at_run_time() -> None:
    assert registry.models.get("dmoe_causal_lm") is DMoECausalLM
    assert init_moe_module in registry.module_init_fns.get_all().values()
    registry.models.register("of_this_test", func=DMoECausalLM)
    assert "of_this_test" in registry.models and "of_another_test" not in registry.models
    del catalogue.REGISTRY["llmfoundry", "models", "of_this_test"]
