"""The configuration classes: valid keys, and the sentence for each mistake."""

import pickle

import pytest
from foundry_moe_kernels.permute_plan import MAX_EXPERTS

from foundry_moe.config import MOST_EXPERTS, LoRAConfig, MeshConfig, MoEConfig
from foundry_moe.schema import MistakesError, from_mapping

pytestmark = pytest.mark.quick


def parse(**keys):
    return from_mapping(MoEConfig, keys, "algorithms.dmoe")


def test_defaults_are_a_dropless_top2_layer():
    config = parse(num_experts=8)
    assert (config.top_k, config.capacity, config.gate) == (2, None, {"name": "topk"})


def test_mistakes_stay_apart_when_another_process_gets_them():
    error = pickle.loads(pickle.dumps(MistakesError(["a is wrong", "b is wrong"])))
    assert error.sentences == ("a is wrong", "b is wrong") and str(error) == "a is wrong; b is wrong"


def test_widths_may_be_a_list_in_python_too():
    config = MoEConfig(num_experts=2, expert_hidden_size=[64, 128])
    assert config.expert_hidden_size == (64, 128)
    with pytest.raises(ValueError, match="has 3 widths, but num_experts is 2"):
        MoEConfig(num_experts=2, expert_hidden_size=[64, 128, 7])


def test_a_layer_has_no_more_experts_than_kernels_can_sort():
    assert MOST_EXPERTS == MAX_EXPERTS
    assert parse(num_experts=MOST_EXPERTS).num_experts == MOST_EXPERTS


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"num_exprts": 8}, "num_exprts is not a key of algorithms.dmoe; did you mean 'num_experts'?"),
        ({}, "algorithms.dmoe.num_experts is missing"),
        ({"num_experts": "8"}, "num_experts must be a whole number, not '8'"),
        ({"num_experts": True}, "num_experts must be a whole number, not True"),
        ({"num_experts": 8, "top_k": 9}, r"top_k \(9\) must be between 1 and num_experts \(8\)"),
        ({"num_experts": 0}, r"num_experts \(0\) must be from 1 to 4096"),
        ({"num_experts": 8, "expert_hidden_size": 0}, r"expert_hidden_size \(0\) must be 1 or more"),
        ({"num_experts": 8, "activation": "swigl"}, "did you mean 'swiglu'?"),
        ({"num_experts": 8, "backend": "cutlass"}, "'cutlass' is not one of auto, blocksparse, grouped, reference"),
        ({"num_experts": 8, "layers": "every 2"}, "must be all,"),
        ({"num_experts": 8, "layers": {"every": 0}}, "must be {every: n}"),
        ({"num_experts": 8, "layers": []}, "must be distinct indices"),
        ({"num_experts": 8, "gate": {"k": 2}}, "must name a gate"),
        ({"num_experts": 8, "loss": {"balance": -1}}, r"loss.balance \(-1\) must be a number of 0 or more"),
        ({"num_experts": 8, "capacity": 0}, r"capacity \(0\) must be above 0"),
        ({"num_experts": 8, "layers": 3}, r"layers must be all, {every: n} or a list of indices such as .*, not 3"),
        ({"num_experts": 8, "gate": "switch"}, r"gate must be a mapping such as {name: topk}, not 'switch'"),
        ({"num_experts": 8, "init_std": float("nan")}, "init_std must be a number, not nan"),
        ({"num_experts": 8, "capacity": float("inf")}, "capacity must be null for dropless, or a capacity factor"),
        (
            {"num_experts": 8, "capacity": "dynamic"},
            r"\(`dynamic` dropped nothing\), not 'dynamic'",
        ),
        ({"num_experts": 8, "loss": {"z": float("nan")}}, r"loss.z \(nan\) must be a number of 0 or more"),
        ({"num_experts": 8, "mesh": {"all_to_all": "flatt"}}, r"dmoe.mesh.all_to_all: 'flatt' is not one of"),
        ({"num_experts": 8, "mesh": {"experts": 2}}, "did you mean 'expert'?"),
        ({"num_experts": 8, "mesh": {"expert": 0}}, r"mesh.expert \(0\) must be 1 or more, or auto"),
        ({"num_experts": 8, "mesh": {"all_to_all": "direct"}}, r"mesh.all_to_all: 'direct' is not one of"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_key_value_and_fix(keys, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        parse(**keys)
    assert "\n" not in str(caught.value)


def test_all_mistakes_of_a_mapping_are_named_at_once():
    with pytest.raises(MistakesError) as caught:
        parse(num_exprts=8, top_k="2", mesh={"expert": 1})
    assert caught.value.sentences == (
        "algorithms.dmoe.num_exprts is not a key of algorithms.dmoe; did you mean 'num_experts'?",
        "algorithms.dmoe.top_k must be a whole number, not '2'",
        "algorithms.dmoe.num_experts is missing: give it a whole number",
    )
    with pytest.raises(MistakesError) as caught:
        parse(num_experts=8, top_k=9, backend="cutlass", mesh={"expert": 0, "buffer": 0.5})
    starts = [sentence.removeprefix("algorithms.dmoe.")[:11] for sentence in caught.value.sentences]
    assert starts == ["top_k (9) m", "backend: 'c", "mesh.expert", "mesh.buffer"]


def test_an_unknown_keyword_in_python_suggests_the_known_one():
    with pytest.raises(TypeError, match="num_expert is not a key of MoEConfig; did you mean 'num_experts'"):
        MoEConfig(num_expert=8)
    with pytest.raises(TypeError, match="experts is not a key of MeshConfig; did you mean 'expert'"):
        MeshConfig(experts=2)
    with pytest.raises(TypeError, match=r"gate must be a mapping such as \{name: topk\}, not 'topk'"):
        MoEConfig(num_experts=8, gate="topk")


def test_a_mapping_that_is_none_of_that_is_refused():
    with pytest.raises(ValueError, match="must be a mapping"):
        from_mapping(MoEConfig, [1, 2], "model.moe")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "chosen"), [("all", [0, 1, 2, 3]), ({"every": 2}, [1, 3]), ([0, 3], [0, 3]), ({"every": 5}, [])]
)
def test_layers_selects(layers, chosen):
    config = parse(num_experts=2, layers=layers)
    assert [index for index in range(4) if config.selects(index)] == chosen


def test_sub_configurations_are_dataclasses_whatever_the_user_gave() -> None:
    mesh, lora = MeshConfig(expert=2), LoRAConfig(r=4)
    typed = MoEConfig(num_experts=8, mesh=mesh, lora=lora)
    written = from_mapping(MoEConfig, {"num_experts": 8, "mesh": {"expert": 2}, "lora": {"r": 4}}, "algorithms.dmoe")
    assert (
        typed == written and written.mesh is written.mesh_config == mesh and written.lora is written.lora_config == lora
    )
    assert MoEConfig(num_experts=8, mesh="auto").mesh_config == MeshConfig()
