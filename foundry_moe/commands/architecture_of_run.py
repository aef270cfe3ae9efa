"""A run's model from its YAML, for checkpoints that do not record theirs. Nothing is trained, drawn or downloaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmfoundry.models.utils import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from foundry_moe.launch.run_config import load_run, plain, read_moe
from foundry_moe.models.conversion import apply_dmoe
from foundry_moe.models.mpt import DMoECausalLM
from foundry_moe.models.native.architecture import Architecture, architecture_of
from foundry_moe.schema import section

PREFIX = "model."  # the trainer's wrapper has the model under this name


def architecture_of_run(path: str, overrides: list[str]) -> Architecture:
    """The architecture of a run's model.

    Raises:
        ValueError: no run with experts, or a model that neither of the two ways builds.
    """
    run = plain(load_run(path, overrides, usage="foundry-moe export RUN OUT --config RUN.yaml [key=value ...]"))
    model, experts = dict(section(run, "model")), read_moe(run)
    name = model.pop("name", None)
    if experts is None:
        raise ValueError(f"{path}: the run has no experts: neither model.moe nor algorithms.dmoe is there")
    found: Architecture | None
    if name == "dmoe_causal_lm":
        found = architecture_of(DMoECausalLM(**{**model, "init_device": "meta"}))
    elif name == "hf_causal_lm":
        found = _of_hugging_face(model, experts)
    else:
        raise ValueError(f"model.name ({name}): dmoe_causal_lm and hf_causal_lm can be exported")
    assert found is not None
    return replace(found, prefix=PREFIX, tokenizer=str(section(run, "tokenizer").get("name", "")))


def _of_hugging_face(model: dict[str, Any], experts: Any) -> Architecture | None:
    source, changed = model.get("pretrained_model_name_or_path"), model.get("config_overrides") or {}
    try:
        config = AutoConfig.from_pretrained(source, **changed)
    except OSError as error:
        raise ValueError(f"model.pretrained_model_name_or_path ({source}): {str(error).splitlines()[0]}") from error
    with init_empty_weights():
        built = AutoModelForCausalLM.from_config(config)
    apply_dmoe(built, replace(experts, init="random", mesh=None))
    return architecture_of(built)
