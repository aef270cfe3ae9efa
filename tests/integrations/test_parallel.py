"""`parallelize` on CPU processes: loss, gradients, clipped norm and two AdamW steps are those of one process."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from foundry_moe.integrations import transformers as integration
from foundry_moe.integrations.transformers_parallel import INDEX, _balance, _balance_over_all_ranks
from foundry_moe.optim.muon import Muon
from foundry_moe.schema import UserError
from tests.helpers import transformers_experts as certificate
from tests.helpers.fake_ranks import fake_ranks
from tests.helpers.transformers_models import tiny_model
from tests.helpers.transformers_parallel import whole

ROOT = Path(__file__).parents[2]
# in fp64; transformers computes softmax, norms and losses, and some gates, in fp32 inside. Seen: 8e-7 and 6e-6
TOLERANCE = {"loss": 1e-6, "gradients": 1e-5, "norm": 1e-5, "weights": 1e-4, "logits": 1e-5, "files": 1e-12}
WHOLE = ("mixtral", "gpt_oss", "deepseek_v3")
OF_EACH_KIND = (
    "aria", "beam", "deepseek_v4", "glm5_next", "gpt_oss", "hy_v4", "inkling2", "minimax_m3_vl", "muse_spark",
    "nemotron_h", "openai_privacy_filter", "qwen3_moe",
)  # fmt: skip


def launch(processes: int, file: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.transformers_parallel", str(processes), str(file), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads(file.read_text())


def assert_equal_to_one_process(found: dict[str, Any]) -> None:
    for name, differences in found.items():
        assert isinstance(differences, dict), f"{name}: {differences}"
        assert all(value < TOLERANCE[key] for key, value in differences.items()), f"{name}: {differences}"


def test_every_family_on_two_processes(tmp_path):
    """All in one launch, since processes import for seconds."""
    arguments = ["--mesh", "1,1,2", "--small", "all", "--whole", *WHOLE, "--features", "qwen3_moe"]
    arguments += ["--saved", "mixtral", "gpt_oss"]
    found = launch(2, tmp_path / "found.json", *arguments)
    features = found.pop("features")
    rounded = features.pop("bf16")
    assert rounded["loss"] < 1e-3 and rounded["norm"] < 1e-2, rounded
    assert_equal_to_one_process(features)
    (families,) = found.values()
    assert {family.experts.__name__ for family in certificate.families()} < set(families)
    assert_equal_to_one_process(families)


def test_every_kind_of_experts_on_four_processes(tmp_path):
    found = launch(
        4, tmp_path / "found.json", "--mesh", "1,2,2", "--mesh", "2,1,2", "--small", *OF_EACH_KIND, "--saved", "mixtral"
    )
    assert set(found) == {"1,2,2", "2,1,2"}
    for families in found.values():
        assert len(families) >= 10
        assert_equal_to_one_process(families)


@pytest.fixture
def four_ranks():
    with fake_ranks(4):
        yield


@pytest.mark.parametrize(
    ("kind", "mesh", "options", "message"),
    [
        ("llama", {"expert": 2}, {}, "LlamaForCausalLM has no experts of transformers' interface"),
        ("qwen3_moe", {"expert": 4}, {}, r"mesh.expert \(4\) must divide num_experts \(6\): use 1 or 2"),
        ("qwen3_moe", {"expert": 2, "shard": 4}, {}, r"mesh.expert \(2\) x mesh.shard \(4\) = 8 does not fit"),
        ("qwen3_moe", {"expert": 2}, {"aux_loss": "global"}, r"aux_loss \('global'\) must be 'rank' or 'all'"),
    ],
)
def test_mistakes_are_one_sentence(kind, mesh, options, message, four_ranks):
    with pytest.raises(ValueError, match=message):
        integration.parallelize(tiny_model(kind), mesh, **options)


def test_a_width_that_shard_does_not_divide_is_named(four_ranks):
    model = tiny_model("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(torch.zeros(6, 32, 23))
    message = r"mesh.shard \(2\) must divide the width \(23\) of model.layers.1.mlp.experts.down_proj: use 1"
    with pytest.raises(ValueError, match=message):
        integration.parallelize(model, {"expert": 2, "shard": 2})


def test_muon_names_meshes_on_which_rows_that_alternate_are_whole(four_ranks):
    def step(**mesh):
        model = tiny_model("gpt_oss")
        integration.parallelize(model, mesh, device="cpu")
        parameters = [model.model.layers[0].mlp.experts.gate_up_proj]
        parameters[0].grad = torch.ones_like(parameters[0])
        Muon(parameters, model=model).step()

    with pytest.raises(UserError, match=r"with parallelize: mesh.shard 1, or mesh.expert 1 and a mesh.shard that div"):
        step(expert=2, shard=2)
    step(expert=2, shard=1, replicate=2)
    step(expert=1, shard=2, replicate=2)


@pytest.fixture
def with_aux_loss():
    """A model with its outputs, of which a hook changes the load-balancing loss."""
    text = SimpleNamespace(num_experts_per_tok=2, router_aux_loss_coef=0.5)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), router_aux_loss_coef=0.0)
    output = SimpleNamespace(
        loss=torch.tensor(1.0), aux_loss=torch.tensor(7.0), router_logits=(torch.randn(6, 4), torch.randn(6, 4))
    )
    return model, output


def test_a_coefficient_of_zero_is_the_models(with_aux_loss, four_ranks):
    model, output = with_aux_loss
    _balance_over_all_ranks(model, (torch.ones(2, 3),), {"attention_mask": torch.ones(2, 3)}, output)
    assert output.loss == 1 and output.aux_loss != 7


def test_calls_that_hide_the_mask_or_the_loss_are_refused(with_aux_loss, four_ranks):
    model, output = with_aux_loss
    ids = torch.ones(2, 3)
    with pytest.raises(UserError, match="needs the mask by name"):
        _balance_over_all_ranks(model, (ids, torch.ones(2, 3)), {}, output)
    with pytest.raises(UserError, match="call the model without return_dict=False"):
        _balance_over_all_ranks(model, (ids,), {"return_dict": False}, (output.loss, output.aux_loss))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_mesh_that_is_no_mapping_and_a_model_that_is_sharded_are_refused(one_rank):
    model = tiny_model("qwen3_moe")
    with pytest.raises(UserError, match="mesh must be a mapping of keys to values, not 'auto'"):
        integration.parallelize(model, "auto", device="cpu")
    integration.parallelize(model, {"expert": 1}, device="cpu")
    with pytest.raises(UserError, match="is sharded already: call parallelize once"):
        integration.parallelize(model, {"expert": 1}, device="cpu")


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_blocks_share_graphs_and_later_shapes_add_none(checkpointed, one_rank, monkeypatch):
    graphs = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=note))
    torch._dynamo.reset()
    model = tiny_model("qwen3_moe")
    integration.parallelize(model, {"expert": 1, "compile": "blocks"}, device="cpu")
    names = dict(tiny_model("qwen3_moe").named_parameters())
    assert dict(model.named_parameters()).keys() == names.keys()
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    numbers = []
    for length in (9, 17, 12, 30):
        ids = torch.randint(1, 64, (2, length))
        model(ids, labels=ids, use_cache=False).loss.backward()
        numbers.append(len(graphs))
    # for both blocks: attention to the MoE layer, its gate, its result, the sum; and the loss
    assert numbers == [5, 10, 10, 10]
    model.eval().generate(ids[:, :5], max_new_tokens=4)
    assert len(graphs) == 10


def test_files_of_another_model_beside_the_weights_are_not_read(tmp_path, one_rank):
    source = tiny_model("qwen3_moe")
    source.save_pretrained(tmp_path)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(zeros, tmp_path / "old.safetensors", {"format": "pt"})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(zeros, "old.safetensors")}))
    with torch.device("meta"):
        model = tiny_model("qwen3_moe")
    integration.parallelize(model, {"expert": 1}, weights=tmp_path, device="cpu")
    assert torch.equal(model.get_input_embeddings().weight.to_local(), source.get_input_embeddings().weight)


def test_files_without_slices_are_refused(tmp_path, four_ranks):
    """A convolution that the files hold in three parts: transformers would cut the parts and then join them."""
    family = next(family for family in certificate.families() if family.model == "kimi_linear")
    with torch.device("meta"):
        model = whole(family)
    with pytest.raises(ValueError, match=r"no model\.safetensors: give a folder that save_pretrained wrote"):
        integration.parallelize(model, {"expert": 2, "shard": 2}, weights=tmp_path, device="cpu")
    whole(family).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = whole(family)
    with pytest.raises(
        ValueError, match=r"conv1d.weight is converted \(Concatenate\), so it has no slices: omit weights"
    ):
        integration.parallelize(model, {"expert": 2, "shard": 2}, weights=tmp_path, device="cpu")


@pytest.mark.parametrize("masked", [True, False])
def test_the_balance_loss_of_ranks_with_the_same_tokens_is_transformers(masked, four_ranks, monkeypatch):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(4))
    generator = torch.Generator().manual_seed(1)
    logits = tuple(torch.randn(12, 5, generator=generator, requires_grad=True) for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]) if masked else None
    ours, theirs = _balance(logits, 2, mask), load_balancing_loss_func(logits, 5, 2, mask)
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits), strict=True):
        torch.testing.assert_close(one, other)
