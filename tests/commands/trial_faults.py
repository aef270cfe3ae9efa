"""Faults that the certificate of a run must detect, each injected into the processes that train; and their runs.

`python -m tests.commands.trial_faults OUT` certifies the clean run and each fault, and writes the certificates to OUT:
a process of its own, whose fork server has LLM Foundry imported.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from foundry_moe.commands.verify.certify import certify, small_cases
from foundry_moe.commands.verify.trial import Trial, train_trials

YAML = Path(__file__).parents[1] / "distributed" / "tiny.yaml"
Found = dict[str, dict[str, Any]]


def run_with(**moe: Any) -> dict[str, Any]:
    """The smallest run: two processes that divide the experts, two microbatches, recomputation."""
    run: Any = OmegaConf.to_container(OmegaConf.load(YAML), resolve=True)
    run["fsdp_config"] = {"activation_checkpointing": True}
    run["algorithms"]["dmoe"] |= {"mesh": {"expert": 2, "shard": 1}, **moe}
    return run


BIASED = {
    "gate": {"name": "topk", "score": "sigmoid", "bias_balance": True, "bias_step": 0.01},
    "loss": {"balance": 0.1, "importance": 0.1},
    "balance_over": "batch",
}


def multiplied(trials: Sequence[Trial]) -> Found:
    """Experts' gradients are not divided by the number of expert ranks."""
    from foundry_moe.parallel.placement import LocalWeight

    LocalWeight.__call__ = lambda self, weight: weight.to_local()  # type: ignore[method-assign]
    return train_trials(trials)


def dropped(trials: Sequence[Trial]) -> Found:
    """The z-loss never reaches the graph; everywhere, so that the mesh and one process agree."""
    from foundry_moe.layers.moe import MoELayer

    original = MoELayer._attach

    def attach(self: MoELayer, y_TD: Any, measured: dict[str, Any], *rest: Any) -> Any:
        return original(self, y_TD, {**measured, "z": measured["z"].detach()}, *rest)

    MoELayer._attach = attach  # type: ignore[method-assign]
    return train_trials(trials)


def counted_twice(trials: Sequence[Trial]) -> Found:
    """The auxiliary losses of what is recomputed in the backward pass count once more."""
    from foundry_moe.layers import aux_loss

    forward, backward = aux_loss._AttachLoss.forward, aux_loss._AttachLoss.backward
    recomputed: list[int] = []

    def noting_forward(ctx: Any, *arguments: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            recomputed.append(1)
        return forward(ctx, *arguments)

    def doubling_backward(ctx: Any, *grads: Any) -> Any:
        before = len(recomputed)
        first, scale, *rest = backward(ctx, *grads)
        return first, scale * (2 if len(recomputed) > before else 1), *rest

    aux_loss._AttachLoss.forward = staticmethod(noting_forward)  # type: ignore[method-assign]
    aux_loss._AttachLoss.backward = staticmethod(doubling_backward)  # type: ignore[method-assign]
    return train_trials(trials)


def weighed_as_the_loss(trials: Sequence[Trial]) -> Found:
    """Microbatches' auxiliary losses are weighed by trained tokens, as the trainer weighs the loss; everywhere."""
    from foundry_moe.algorithms import gate_steps

    gate_steps.real_tokens = lambda batch: None
    return train_trials(trials)


def softmax_twice(trials: Sequence[Trial]) -> Found:
    """The gate's probabilities are taken for its logits; everywhere."""
    from foundry_moe.layers.gates import gate

    original = gate.softmax_topk
    gate.softmax_topk = lambda logits_TE, *more, **keys: original(logits_TE.softmax(-1), *more, **keys)
    return train_trials(trials)


def one_bias_stays(trials: Sequence[Trial]) -> Found:
    """Rank 1 does not step its bias."""
    from foundry_moe.layers.gates.topk import TopKGate

    if dist.get_rank() == 1:
        TopKGate.after_step = lambda *_: None  # type: ignore[method-assign]
    return train_trials(trials)


def swapped(trials: Sequence[Trial]) -> Found:
    """Two experts change places when a checkpoint is loaded."""
    from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
    from foundry_moe.layers.lookup import moe_layers

    original = ElasticCheckpoint.after_load

    def after_load(self: Any, state: Any, logger: Any) -> None:
        original(self, state, logger)
        if self.resumed_from is not None:
            for parameter in moe_layers(state.model)[0].experts.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                with torch.no_grad():
                    local[:2] = local[:2].flip(0).clone()

    ElasticCheckpoint.after_load = after_load  # type: ignore[method-assign]
    return train_trials(trials)


def checked(trials: Sequence[Trial]) -> Found:
    """No fault. In the crowded case the other experts of each layer have no tokens, and so no gradient."""
    found = train_trials(trials)
    for name, seen in found.items():
        if name.startswith("every token to one expert") and "resumed" not in name:
            gradients = [g for key, g in seen.items() if key.startswith("gradient/") and key.endswith("experts.w1_EFD")]
            assert len(gradients) == 2 and all(g.flatten(1).any(1).sum() == 1 for g in gradients), name
    return found


def failing(trials: Sequence[Trial]) -> Found:
    """A process ends with an error."""
    raise RuntimeError("this rank had enough")


# what is certified: the run, and what its processes do
CASES: dict[str, tuple[dict[str, Any], Callable[..., Found]]] = {
    "clean": ({}, train_trials),
    "clean, biased": (BIASED, train_trials),
    "multiplied": ({}, multiplied),
    "dropped": ({}, dropped),
    "counted twice": ({}, counted_twice),
    "weighed as the loss": ({}, weighed_as_the_loss),
    "softmax twice": ({}, softmax_twice),
    "one bias stays": (BIASED, one_bias_stays),
    "swapped": ({}, swapped),
}


def converted_run(folder: Path) -> dict[str, Any]:
    """A Llama, of which there is a configuration alone, whose blocks become copies: experts."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = {"model_type": "llama", **sizes, "num_key_value_heads": 2, "vocab_size": 4096}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(folder), "use_train_metrics": False}
    return {**run_with(top_k=2, loss={"balance": 0.01}), "model": {**model, "init_device": "meta"}}


def certify_all(out: Path) -> None:
    """Each case's certificate, or the error's sentence, as JSON."""

    def certified(run: dict[str, Any], **options: Any) -> Any:
        (certificate,) = certify({"run": run}, **options)
        return json.loads(certificate.as_json())

    found: dict[str, Any] = {}
    cases = certify(small_cases(), [(1, 1, 2)], precision="fp64", train=checked)
    found["cases"] = [json.loads(certificate.as_json()) for certificate in cases]
    found["clean, fp64"] = certified(run_with(), precision="fp64")
    by_rank = run_with(balance_over="rank", loss={"balance": 0.1})
    on_two = certify({"run": by_rank}, [(1, 1, 2), (1, 1, 4)], precision="fp64")
    found["on two meshes"] = [certificate.verdict for certificate in on_two]
    found["converted"] = certified(converted_run(out.parent / "llama"))
    for name, (moe, train) in CASES.items():
        found[name] = certified(copy.deepcopy(run_with(**moe)), train=train)
    try:
        certify({"run": run_with()}, train=failing)
    except ValueError as error:
        found["failing"] = str(error)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    # by its name, under which the children import it
    from tests.commands import trial_faults

    trial_faults.certify_all(Path(sys.argv[1]))
