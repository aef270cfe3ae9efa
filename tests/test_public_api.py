"""The public names, as type checkers, completion and Python see them."""

from __future__ import annotations

import ast
import inspect
import os
import rlcompleter
import subprocess
import sys
from pathlib import Path

import pytest
from llmfoundry.models.mpt import ComposerMPTCausalLM, MPTConfig
from torch import nn

import foundry_moe
from foundry_moe import DMoE, DMoECausalLM, ElasticCheckpoint, ExpertLoad, MoEConfig, flops_per_token, num_params
from foundry_moe.algorithms.dmoe_mesh import MoEMesh
from foundry_moe.callbacks.run_report import RunReport
from foundry_moe.models.mpt import MPTKeys
from tests.helpers.demo import ROOT

PROGRAM = """
from foundry_moe import DMoE, DMoECausalLM, ElasticCheckpoint, ExpertLoad, MoEConfig, MoELayer, moe_layers
from foundry_moe.algorithms.dmoe_mesh import MoEMesh

config = MoEConfig(num_experts=8, top_k=2, gate={"name": "topk"})
DMoE(config)
DMoE(config=config)
DMoE(num_experts=8, top_k=2, mesh={"expert": 2})
DMoECausalLM(config, d_model=16, n_heads=2)
ElasticCheckpoint(folder="runs/x", interval="100ba", asynchronous=False)
ElasticCheckpoint("runs/x", keep=2)
ExpertLoad("10ba", per_layer=True)
MoEMesh(expert=2)
layer: MoELayer = MoELayer(16, config)
reveal_type(moe_layers(layer))
"""
MISTAKES = """
MoEConfig(num_experts=8, topk=2)
DMoE(num_experts=8, topk=2)
DMoE(8)
DMoECausalLM(config, d_modle=16)
ElasticCheckpoint(foldr="runs/x")
ElasticCheckpoint("runs/x", "100ba")
ExpertLoad(5)
MoEMesh(experts=2)
layer.statistics.counts
foundry_moe.MoELayers
"""


def mypy(program: Path) -> list[str]:
    """The messages of mypy about a user's program."""
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    # the project's options, whose cache has torch: without it, mypy takes a minute
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(program)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_mypy_knows_every_class_of_a_users_program_and_its_keywords(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text("import foundry_moe\n" + PROGRAM + MISTAKES)
    found = [line for line in mypy(program) if "note: Possible overload" not in line and "note:     def" not in line]
    first = 2 + PROGRAM.count("\n") + 1
    lines = {int(line.split(":")[1]) for line in found if ": error: " in line}
    assert lines == set(range(first, first + MISTAKES.count("\n") - 1)), "\n".join(found)
    assert any('Revealed type is "list[foundry_moe.layers.moe.MoELayer]"' in line for line in found)


@pytest.mark.quick
def test_the_names_of_type_checkers_are_those_of_completion():
    tree = ast.parse(Path(foundry_moe.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    typed = {name.asname: node.module for node in imports for name in node.names if name.asname}
    assert typed == foundry_moe._PUBLIC and set(typed) < set(dir(foundry_moe))
    complete = rlcompleter.Completer({"foundry_moe": foundry_moe}).complete
    assert complete("foundry_moe.MoEL", 0) == "foundry_moe.MoELayer("


@pytest.mark.quick
def test_the_typed_keys_of_a_model_are_those_of_mpt():
    taken = {name for cls in (MPTConfig, ComposerMPTCausalLM) for name in inspect.signature(cls).parameters}
    assert set(MPTKeys.__annotations__) == taken - {"kwargs", "loss_fn"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("cls", "keys"),
    [
        (DMoE, {"num_experts", "top_k", "mesh"}),
        (MoEMesh, {"expert", "shard"}),
        (ElasticCheckpoint, {"folder", "asynchronous"}),
        (ExpertLoad, {"interval", "html"}),
        (RunReport, {"interval", "facts"}),
    ],
)
def test_signatures_have_the_keys(cls, keys):
    assert keys <= set(inspect.signature(cls).parameters)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ExpertLoad(5), "expert_load.interval must be text such as '1ba', not 5"),
        (lambda: ExpertLoad("1ba", 3), "expert_load.per_layer must be true or false, not 3"),
        (lambda: RunReport(sample_tokens="many"), "run_report.sample_tokens must be a whole number, not 'many'"),
        (lambda: RunReport(sample_tokens=-5), r"run_report.sample_tokens \(-5\) must be at least 1"),
        (lambda: DMoE(8), r"DMoE takes a MoEConfig, or its keys as in DMoE\(num_experts=8\), not 8"),
        (lambda: DMoE(MoEConfig(num_experts=8), top_k=1), "DMoE takes a MoEConfig, or its keys"),
        (lambda: DMoE(config=8), r"DMoE takes a MoEConfig, or its keys as in DMoE\(num_experts=8\), not 8"),
        (lambda: ElasticCheckpoint(8), "callbacks.elastic_checkpoint.folder must be s3://.* or a path, not 8"),
        (lambda: ElasticCheckpoint(), "callbacks.elastic_checkpoint.folder is missing"),
        (lambda: num_params(MoEConfig(num_experts=8)), "MoEConfig is neither a model nor the keys of a run, such as"),
        (lambda: flops_per_token(nn.Linear(2, 2), 8), "an MPT or a Hugging Face causal LM, not Linear: use"),
        (lambda: DMoE(MoEConfig(num_experts=8, mesh="auto")), "mesh .auto. is chosen by `foundry-moe train`"),
    ],
)
def test_python_refuses_what_yaml_refuses(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.quick
def test_a_configuration_object_means_the_same_as_its_keys():
    keys = {"num_experts": 4, "top_k": 1, "layers": [1], "expert_hidden_size": 8}
    config = MoEConfig(**keys)
    assert DMoE(config).config == DMoE(config=config).config == DMoE(**keys).config == config and config.layers == (1,)
    assert ElasticCheckpoint("runs/x", keep=2).config == ElasticCheckpoint(folder="runs/x", keep=2).config
    shape = {"d_model": 16, "n_heads": 2, "n_layers": 2, "expansion_ratio": 1, "max_seq_len": 8, "vocab_size": 32}
    model = DMoECausalLM(config, **shape, tokenizer=None)
    assert [layer.layer_index for layer in foundry_moe.moe_layers(model)] == [1]
