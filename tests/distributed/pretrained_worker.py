"""Reads a Hugging Face model's files on a mesh, as a run with `init_device: meta` does; for tests and a benchmark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

IDS = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(1))


def build(folder: str, moe: dict[str, Any], mesh: dict[str, int], **more: Any) -> Any:
    """Composer's trainer with the model on its mesh, its weights read."""
    os.environ["FSDP_VERSION"] = "2"
    from composer import Trainer
    from llmfoundry.models.hf import ComposerHFCausalLM

    from foundry_moe.algorithms.dmoe import DMoE
    from foundry_moe.algorithms.gate_steps import GateSteps, add_steps_algorithm

    run = {
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": folder, "init_device": "meta"},
        "algorithms": {"dmoe": {**moe, "mesh": mesh}},
    }
    run = add_steps_algorithm(run)
    keys = {key: value for key, value in run["model"].items() if key != "name"}
    model = ComposerHFCausalLM(tokenizer=None, use_train_metrics=False, **keys)  # type: ignore[arg-type]
    return Trainer(
        model=model,
        algorithms=[DMoE(**run["algorithms"]["dmoe"]), GateSteps(**run["algorithms"]["dmoe_steps"])],
        parallelism_config={"fsdp": {}},
        device="cpu",
        progress_bar=False,
        auto_log_hparams=False,
        **more,
    )


def read_models(jobs: list[tuple[str, dict[str, Any], dict[str, int]]]) -> list[dict[str, Any]]:
    """For each job whole weights by name, logits, and the largest share of the files' elements that a rank has read."""
    import torch.distributed as dist

    from foundry_moe.models import pretrained

    counted = [0]
    original = pretrained.SafetensorsFolder.part

    class Counting:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __getitem__(self, box: Any) -> Tensor:
            found = self.inner[box]
            counted[0] += found.numel()
            return found

    pretrained.SafetensorsFolder.part = lambda self, name: Counting(original(self, name))  # type: ignore[method-assign]
    results = []
    for folder, moe, mesh in jobs:
        counted[0] = 0
        trainer = build(folder, moe, mesh)
        shares = torch.tensor([counted[0]])
        dist.all_reduce(shares, op=dist.ReduceOp.MAX)
        model = trainer.state.model.eval()
        with torch.no_grad():
            logits = model.model(input_ids=IDS).logits
        weights = {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.model.state_dict().items()
        }
        results.append({"weights": weights, "logits": logits, "read": int(shares)})
        trainer.close()
    return results


def error_of(folder: str, moe: dict[str, Any], mesh: dict[str, int]) -> str:
    """The sentence that a run ends with."""
    try:
        build(folder, moe, mesh)
    except ValueError as error:
        return str(error)
    return ""


def files_of(folder: str) -> int:
    """Elements of all tensors in the folder."""
    from safetensors.torch import load_file

    return sum(tensor.numel() for path in Path(folder).glob("*.safetensors") for tensor in load_file(path).values())
