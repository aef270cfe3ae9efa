"""The algorithm and the model entry under Composer's own Trainer, in one process."""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from composer import Trainer
from composer.core import Event
from composer.utils import FSDP2Config, FSDPConfig

from foundry_moe.algorithms.dmoe import DMoE, apply_dmoe
from foundry_moe.algorithms.dmoe_mesh import MoEMesh
from foundry_moe.algorithms.gate_steps import GateSteps
from foundry_moe.callbacks.expert_load import ExpertLoad
from foundry_moe.config import MeshConfig, MoEConfig
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.models.same_run import check_model, describe_experts
from tests.helpers.training import MOE, batches, fit, llama, mpt


def flat(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.quick
def test_experts_are_trained_by_the_optimizer_that_knew_the_dense_ffn():
    model = llama()
    trainer = fit(model, algorithms=[DMoE(**MOE)])
    layers = moe_layers(model)
    assert len(layers) == 2
    fresh = copy.deepcopy(layers[0])
    fresh.reset_parameters()
    assert not torch.equal(fresh.experts.w1_EFD, layers[0].experts.w1_EFD)
    known = {id(p) for group in trainer.state.optimizers[0].param_groups for p in group["params"]}
    assert known == {id(p) for p in model.parameters()}


def test_weights_do_not_depend_on_composers_seeding():
    """Composer seeds each rank differently before the algorithm runs."""
    layers = []
    for seed in (1, 2):
        model = llama()
        Trainer(model=model, algorithms=[DMoE(**MOE)], device="cpu", seed=seed, progress_bar=False)
        layers.append(moe_layers(model)[1])
    assert all(torch.equal(p, q) for p, q in zip(layers[0].parameters(), layers[1].parameters(), strict=True))


@pytest.mark.parametrize(("kind", "config"), [(DMoE, MoEConfig), (MoEMesh, MeshConfig)])
def test_llm_foundrys_help_lists_every_key(kind, config):
    """`llmfoundry registry find algorithms dmoe` prints what `inspect.getdoc` finds."""
    found = re.findall(r"^    (\w+): ", inspect.getdoc(kind).partition("Keys:")[2].partition("Defaults:")[0], re.M)
    assert found == [field.name for field in fields(config)]


@pytest.mark.parametrize("build", [llama, mpt], ids=["algorithm", "model entry"])
def test_microbatches_do_not_change_training_beyond_the_losses_definition(build):
    """Balance is not linear in the batch, so it is left out here; z and the main loss are means over equal parts."""
    results = []
    for microbatch in (4, 1):
        moe = {**MOE, "loss": {"z": 0.1}}
        if build is llama:
            model = llama()
            fit(model, algorithms=[DMoE(**moe)], microbatch=microbatch)
        else:
            model = mpt(moe=moe)
            fit(model, microbatch=microbatch)
        results.append(flat(model))
    # fp32: sums in another order over 3 steps
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_balance_loss_pulls_the_load_together():
    """A gate that starts far from even; loads of the second of two epochs."""
    skew = {**MOE, "top_k": 1, "init_std": 0.5}
    worst = []
    for weight in (0.0, 1.0):
        recorder = ExpertLoad(interval="8ba")
        model = mpt(moe={**skew, "loss": {"balance": weight}})
        fit(model, callbacks=[recorder], duration="16ba", optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
        worst.append((recorder.latest_LE.amax(1) / recorder.latest_LE.float().mean(1)).max().item())
    assert worst[1] < 0.8 * worst[0]


@pytest.mark.quick
@pytest.mark.parametrize("layers", ["all", {"every": 9}])
def test_a_run_in_which_nothing_matches_is_refused(layers):
    model = llama()
    if layers == "all":
        for block in model.model.model.layers:
            block.mlp = torch.nn.Linear(32, 32)
    with pytest.raises(ValueError, match=r"dMoE: .*(no feed-forward block|selects none of the 2)"):
        Trainer(model=model, algorithms=[DMoE(**MOE, layers=layers)], device="cpu", progress_bar=False)


def test_a_gates_warning_is_passed_on_once():
    algorithm = DMoE(num_experts=4, top_k=2, gate={"name": "expert_choice"})
    with pytest.warns(UserWarning, match="depends on the tokens after it") as caught:
        fit(llama(), algorithms=[algorithm], duration="1ba")
    assert sum("depends on the tokens after it" in str(warning.message) for warning in caught) == 1


def test_algorithm_and_model_entry_together_are_refused():
    with pytest.raises(ValueError, match="has dMoE layers already"):
        Trainer(model=mpt(), algorithms=[DMoE(**MOE)], device="cpu", progress_bar=False)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["dmoe", "dmoe_mesh", "dmoe_steps"])
def test_fsdp1_is_refused_whoever_starts_the_run(name):
    algorithm = {"dmoe": DMoE(**MOE), "dmoe_mesh": MoEMesh(expert=1), "dmoe_steps": GateSteps()}[name]
    state = SimpleNamespace(model=llama() if name == "dmoe" else mpt(), fsdp_config=FSDPConfig(), tp_config=None)
    assert algorithm.match(Event.INIT, state)
    with pytest.raises(ValueError, match=r"FSDP_VERSION \(1\): dMoE layers need FSDP2; set FSDP_VERSION=2"):
        algorithm.apply(Event.INIT, state, None)


def converted_by_hand():
    model = llama()
    apply_dmoe(model, MoEConfig(**MOE))
    return model


@pytest.mark.parametrize("wrapped", ["whole", "a part"])
@pytest.mark.parametrize("build", [converted_by_hand, mpt])
def test_a_model_that_fsdp1_wrapped_without_our_algorithms_is_refused(build, wrapped):
    """FSDP1 does not run on a CPU: its marks on parameters, as `test_gpus` finds them in a forward pass."""
    model = build()
    if wrapped == "a part":
        moe_layers(model)[0].gate.weight_ED._fsdp_flattened = True
    for module in model.modules() if wrapped == "whole" else ():
        module._is_fsdp_managed_module = True
        module._parameters.update({name: p.detach() for name, p in module._parameters.items() if p is not None})
    with pytest.raises(ValueError, match=r"FSDP_VERSION \(1\): dMoE layers need FSDP2"):
        model(next(iter(batches())))


def test_experts_on_meta_without_a_mesh_are_refused():
    with torch.device("meta"):
        model = llama()
    state = SimpleNamespace(model=model, fsdp_config=FSDP2Config(), tp_config=None, optimizers=(), algorithms=[])
    with pytest.raises(ValueError, match=r"init_device \(meta\): initialising experts from meta needs a mesh"):
        DMoE(**MOE).apply(Event.INIT, state, None)


def test_model_entry_without_a_layer_of_experts_is_refused():
    with pytest.raises(ValueError, match=r"layers \({'every': 9}\) selects none of the"):
        mpt(moe={**MOE, "layers": {"every": 9}})


def test_model_entry_has_no_trained_ffn_to_copy():
    with pytest.raises(ValueError, match=r"init \(upcycle\): .* use init: random, or algorithms.dmoe on a pretrained"):
        mpt(moe={**MOE, "init": "upcycle"})


def test_model_entry_counts_active_parameters():
    model = mpt()
    idle = sum(p.numel() for layer in moe_layers(model) for p in layer.experts.parameters()) // 2  # 2 of 4 experts
    assert model.n_total_params - model.n_active_params == idle


def test_sdpa_is_the_default_and_equals_torch_attention():
    model, plain = mpt(), mpt(attn_config={"attn_impl": "torch"})
    plain.load_state_dict(model.state_dict())
    batch = next(iter(batches()))
    names = {block.attn.attn_fn.__name__ for block in model.model.transformer.blocks}
    assert names == {"sdpa_attention"}
    torch.testing.assert_close(model(batch).logits, plain(batch).logits)


def converted(moe: dict, **keys) -> Trainer:
    return fit(llama(), algorithms=[DMoE(**moe)], **keys)


def built(moe: dict, **keys) -> Trainer:
    return fit(mpt(moe=moe), algorithms=[GateSteps()], **keys)


def save_and_load(tmp_path, first: dict, second: dict, train=converted) -> Trainer:
    train(first, duration="2ba", save_folder=str(tmp_path), save_interval="2ba")
    return train(second, duration="4ba", load_path=str(tmp_path / "ep0-ba2-rank0.pt"))


@pytest.mark.quick
def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path):
    resumed = save_and_load(tmp_path, MOE, MOE)
    whole = fit(llama(), algorithms=[DMoE(**MOE)], duration="4ba")
    assert torch.equal(flat(resumed.state.model), flat(whole.state.model))


@pytest.mark.parametrize("train", [converted, built])
@pytest.mark.parametrize(
    "change", [{"activation": "geglu"}, {"top_k": 1}, {"gate": {"name": "topk", "score": "sigmoid"}}]
)
def test_a_checkpoint_of_other_experts_is_refused_by_name(tmp_path, train, change):
    with pytest.raises(ValueError, match=rf"experts\.{next(iter(change))}\S* \(.*: the checkpoint was trained with"):
        save_and_load(tmp_path, {**MOE, "activation": "swiglu"}, {**MOE, "activation": "swiglu", **change}, train)


@pytest.mark.parametrize("change", [{"n_heads": 4}, {"attn_config": {"softmax_scale": 2.0}}])
def test_a_checkpoint_of_another_formula_is_refused_by_name(tmp_path, change):
    """Tensors of the same shapes: nothing else would notice."""

    def train(keys, **more):
        return fit(mpt(**keys), algorithms=[GateSteps()], **more)

    with pytest.raises(ValueError, match=rf"model\.{next(iter(change))}\S* \(.*: the checkpoint was trained with"):
        save_and_load(tmp_path, {}, change, train)


def test_saying_what_was_the_default_is_no_change(tmp_path):
    save_and_load(tmp_path, MOE, {**MOE, "gate": {"name": "topk", "score": "softmax"}}, built)


def test_what_steers_the_gate_in_training_alone_may_change_from_run_to_run(tmp_path):
    gate = {"name": "topk", "bias_balance": True}
    falling = {"start": 0.5, "end": 0.1, "until": "4ba"}
    changed = {**gate, "jitter": {"start": 0.1, "end": 0.0, "until": "4ba"}, "bias_step": falling}
    resumed = save_and_load(tmp_path, {**MOE, "gate": gate}, {**MOE, "gate": changed}, built)
    assert moe_layers(resumed.state.model)[0].gate.bias_E.abs().max() > 0.05, "the new step has not been taken"


@pytest.mark.parametrize(
    ("gate", "change"),
    [
        ({"name": "switch"}, {"jitter": 0.2}),
        ({"name": "dense_to_sparse"}, {"temperature": 2.0, "threshold": 0.1, "hard_after": "9ba"}),
        ({"name": "base"}, {"epsilon": 0.02, "rounds": 3}),
        ({"name": "gshard"}, {"random_second": False}),
    ],
)
def test_every_gates_training_keys_are_no_part_of_what_weights_mean(gate, change):
    moe = {**MOE, "top_k": 2 if gate["name"] == "gshard" else 1, "loss": {}}
    gates = (gate, {**gate, **change})
    before, after = (describe_experts(moe_layers(mpt(moe={**moe, "gate": keys}))) for keys in gates)
    assert before == after and before["gate.name"] == gate["name"]


def test_noise_which_adds_a_parameter_must_agree():
    noisy, plain = (
        describe_experts(moe_layers(mpt(moe={**MOE, "gate": {"name": "topk", "noise": noise}})))
        for noise in (True, False)
    )
    with pytest.raises(ValueError, match=r"experts.gate.noise \(true\): the checkpoint was trained with false"):
        check_model(noisy, plain, "experts")


def test_losses_may_change_from_run_to_run(tmp_path):
    save_and_load(tmp_path, MOE, {**MOE, "loss": {"balance": 0.1}})
