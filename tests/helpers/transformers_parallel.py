"""Every family of transformers 5 on meshes of CPU processes, compared with one process.

    python -m tests.helpers.transformers_parallel 2 FILE --mesh 1,1,2 [--small all] [--whole all]

Writes the differences as JSON: {mesh: {family: {"loss": ..., "gradients": ..., "weights": ...}}}. A family is its
experts class in a model of one layer (small), or a tiny model of its own for causal language modelling (whole).
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import inspect
import itertools
import json
import math
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.modeling_outputs import CausalLMOutput

from foundry_moe.integrations import transformers as integration
from foundry_moe.integrations import transformers_parallel
from foundry_moe.parallel.mesh import parse_mesh
from tests.helpers import transformers_experts as certificate

EXPERTS, VOCABULARY = 8, 64
# attributes that most configurations know; the others come from the family's own configuration
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 24,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
    "pad_token_id": 0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8, "kv_lora_rank": 16,
    "q_lora_rank": 16, "rotary_dim": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mlp_layer_types": ["sparse"] * 2,
    "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
}  # fmt: skip
OWN_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"mlp_layer_types": ["moe"] * 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0},
    "mimo_v2_flash": {"num_key_value_heads": 2, "v_head_dim": 8, "mlp_layer_types": ["sparse"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
NOT_FP64 = ("inkling2", "inkling2_loop")  # their code has fp32 constants


class Layer(nn.Module):
    def __init__(self, family: certificate.Family) -> None:
        super().__init__()
        self.experts = certificate.build(family, experts_of=EXPERTS)
        width = self.experts.down_proj.shape[2 if self.experts.is_transposed else 1]
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, EXPERTS)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = self.norm(x_BSD).flatten(0, 1)
        weights_TK, index_TK = self.router(x_TD).softmax(-1).topk(2)
        return x_BSD + self.experts(x_TD, index_TK, weights_TK).view_as(x_BSD)


class Small(nn.Module):
    """A language model of a family's experts alone."""

    _no_split_modules = ("Layer",)

    def __init__(self, family: certificate.Family) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(family)])
        width = self.layers[0].norm.weight.shape[0]
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)

    def set_experts_implementation(self, name: str) -> None:
        for layer in self.layers:
            layer.experts.config._experts_implementation = name

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Any:
        x_BSD = self.embedding(input_ids)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        loss = nn.functional.cross_entropy(self.head(x_BSD)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss)  # in which FSDP2 finds tensors


def small(family: certificate.Family) -> nn.Module:
    torch.manual_seed(0)
    return Small(family)


def whole(family: certificate.Family) -> nn.Module:
    """A tiny model of the family. Raises LookupError if it has none for text alone."""
    module = importlib.import_module(f"transformers.models.{family.model}.modeling_{family.model}")
    for kind in vars(module).values():
        if inspect.isclass(kind) and kind.__name__.endswith("ForCausalLM") and kind.__module__ == module.__name__:
            torch.manual_seed(0)
            return kind._from_config(
                kind.config_class(**(SIZES | OWN_SIZES.get(family.model, {}))), dtype=torch.float32
            )
    raise LookupError("no model for text alone")


def difference(found: Tensor, truth: Tensor) -> float:
    """The largest, relative to the truth's largest value."""
    return float((found.double() - truth.double()).abs().max() / truth.double().abs().max().clamp(min=1e-6))


def compare(
    build: Callable[[], nn.Module],
    mesh: tuple[int, int, int],
    dtype: torch.dtype = torch.float64,
    *,
    prepare: Callable[[nn.Module], Any] = nn.Module.eval,
    one_batch: bool = False,
    inputs: Mapping[str, Tensor] | None = None,
    compile: str = "none",
    **options: Any,
) -> dict[str, float]:
    """Two clipped AdamW steps on the mesh and, on rank 0, on one process: the largest differences.

    Args:
        prepare: changes the model on the mesh.
        one_batch: the process computes all ranks' tokens as one batch; else the mean of each batch's loss.
        inputs: others of the model, [ranks, ...].
        options: of `parallelize`.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build().to(dtype)
    truth = build().to(dtype).eval() if rank == 0 else nn.Linear(1, 1)
    if rank == 0:
        truth.set_experts_implementation("eager")
    widths = dict(zip(("replicate", "shard", "expert"), mesh, strict=True))
    transformers_parallel.parallelize(model, {**widths, "compile": compile}, **options)
    prepare(model)
    # a large epsilon: rounding must not decide the sign of an update
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (model, truth)]
    batches = torch.randint(1, VOCABULARY, (2, ranks, 2, 9), generator=torch.Generator().manual_seed(1))
    worst = dict.fromkeys(("loss", "gradients", "norm", "weights"), 0.0)
    for step in batches:
        given = {"input_ids": step, "labels": step, **(inputs or {})}
        loss = model(**{name: value[rank] for name, value in given.items()}, use_cache=False).loss
        loss.backward()
        mean = loss.detach().double() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            parts = (
                [{name: value.flatten(0, 1) for name, value in given.items()}]
                if one_batch
                else [{name: value[each] for name, value in given.items()} for each in range(ranks)]
            )
            expected = sum(truth(**part, use_cache=False).loss / len(parts) for part in parts)
            expected.backward()
            worst["loss"] = max(worst["loss"], difference(mean, expected.detach()))
        record(worst, "gradients", model, truth, lambda parameter: parameter.grad)
        norm = integration.clip_grad_norm_(model.parameters(), 0.5)
        if rank == 0:
            expected = nn.utils.clip_grad_norm_(truth.parameters(), 0.5)
            worst["norm"] = max(worst["norm"], difference(norm, expected))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        record(worst, "weights", model, truth, lambda parameter: parameter.detach())
    return worst


def features(family: certificate.Family) -> dict[str, Any]:
    """Of one family on two processes: options of `parallelize`, by name."""
    build, mesh, ranks = functools.partial(whole, family), (1, 1, 2), dist.get_world_size()

    def with_aux_loss() -> nn.Module:
        model = build()
        model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
        return model

    def recompute(model: Any, **options: Any) -> None:
        model.train()  # without dropout
        model.gradient_checkpointing_enable(options)

    mask = torch.ones(ranks, 2, 9, dtype=torch.int64)
    mask[0, 0, 5:] = 0
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # no code generator: graphs are the point
    found: dict[str, Any] = {
        "aux loss of each rank": compare(with_aux_loss, mesh),
        "aux loss of all ranks": compare(with_aux_loss, mesh, one_batch=True, aux_loss="all"),
        "and a mask": compare(
            with_aux_loss, mesh, one_batch=True, aux_loss="all", inputs={"attention_mask": mask}
        ),
        "checkpointing": compare(build, mesh, prepare=functools.partial(recompute, use_reentrant=False)),
        "reentrant checkpointing": compare(build, mesh, prepare=functools.partial(recompute, use_reentrant=True)),
        "compiled": compare(build, mesh, prepare=nn.Module.train, compile="blocks"),
        "compiled, experts undivided": compare(build, (1, 2, 1), prepare=nn.Module.train, compile="blocks"),
        "compiled and checkpointed": compare(
            build, mesh, prepare=functools.partial(recompute, use_reentrant=False), compile="blocks"
        ),
        "compiled, with aux loss and mask": compare(
            with_aux_loss, mesh, prepare=nn.Module.train, one_batch=True, aux_loss="all",
            inputs={"attention_mask": mask}, compile="blocks",
        ),
        "bf16": compare(
            build, mesh, torch.float32,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        ),
        "drawn": drawn(build),
    }  # fmt: skip
    return found


def drawn(build: Callable[[], nn.Module]) -> dict[str, float]:
    """Weights of a model on the meta device, and of one that is drawn whole with the same seed."""
    worst = {"weights": 0.0}
    with torch.device("meta"):
        model, truth = build(), build()
    torch.manual_seed(3)
    transformers_parallel.parallelize(model, {"expert": 2})
    torch.manual_seed(3)
    owners = dict.fromkeys(truth.modules(), truth)
    for block in transformers_parallel._blocks(truth):
        transformers_parallel._draw(block, owners, torch.device("cpu"))
    record(worst, "weights", model, truth, lambda parameter: parameter.detach())
    ids = torch.arange(8)[None]
    truth.set_experts_implementation("eager")
    logits, expected = (each.eval()(ids, use_cache=False).logits.detach() for each in (model, truth))
    return worst | {"logits": difference(logits, expected)}


def saved(build: Callable[[], Any], mesh: tuple[int, int, int], folder: Path) -> dict[str, Any]:
    """Files of transformers read by slices, written again in parts and compared with transformers' own."""
    theirs, ours = folder / "theirs", folder / "ours"
    truth = build()
    if dist.get_rank() == 0:
        for tensor in truth.buffers():  # as after training: not what a new model has
            if tensor.is_floating_point():
                tensor.mul_(1.5)
        truth.save_pretrained(theirs, max_shard_size="150KB")
    dist.barrier()
    with torch.device("meta"):
        model = build()
    mesh_keys = dict(zip(("replicate", "shard", "expert"), mesh, strict=True))
    transformers_parallel.parallelize(model, mesh_keys, weights=theirs)
    worst = {"weights": 0.0}
    record(worst, "weights", model, truth, lambda parameter: parameter.detach())
    integration.save_pretrained(model, ours, max_shard_size="150KB")
    if dist.get_rank() == 0:
        type(truth).from_pretrained(theirs).save_pretrained(folder / "again", max_shard_size="150KB")
        worst["files"] = compare_folders(folder / "again", ours)
    return worst


def compare_folders(theirs: Path, ours: Path) -> float:
    """The largest difference of tensors; infinite if other files, names or texts differ."""
    names = [sorted(path.name for path in each.iterdir()) for each in (theirs, ours)]
    worst = 0.0 if names[0] == names[1] else math.inf
    for name in names[0]:
        if worst == math.inf:
            break
        if name.endswith(".safetensors"):
            tensors, expected = load_file(ours / name), load_file(theirs / name)
            same = tensors.keys() == expected.keys()
            worst = max(worst, *(difference(tensors[k], v) for k, v in expected.items())) if same else math.inf
        elif json.loads((theirs / name).read_text()) != json.loads((ours / name).read_text()):
            worst = math.inf
    return worst


def record(worst: dict[str, float], key: str, model: nn.Module, truth: nn.Module, of: Callable[[Any], Any]) -> None:
    expected = dict(truth.named_parameters())
    for name, parameter in model.named_parameters():
        value = of(parameter)
        if value is not None:
            value = value.full_tensor()
        if dist.get_rank() == 0:
            other = of(expected[name])
            assert (value is None) == (other is None), f"{name}: a gradient on one side only"
            if value is not None:
                worst[key] = max(worst[key], difference(value, other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processes", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--mesh", type=parse_mesh, action="append", default=[])
    parser.add_argument("--small", nargs="*", default=[], help="models of transformers; all = every one")
    parser.add_argument("--whole", nargs="*", default=[])
    parser.add_argument("--saved", nargs="*", default=[])
    parser.add_argument("--features", help="a model of transformers, on two processes")
    args = parser.parse_args()
    for file in (args.file, Path(f"{args.file}.store")):
        file.unlink(missing_ok=True)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    integration.register()
    families = certificate.families()  # their modules are imported once, before the fork
    torch.multiprocessing.start_processes(work, (args, families), args.processes, start_method="fork")


def work(rank: int, args: argparse.Namespace, families: list[certificate.Family]) -> None:
    store = dist.FileStore(f"{args.file}.store", args.processes)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.processes, timeout=timeout)
    transformers_parallel.build_meshes = functools.cache(transformers_parallel.build_meshes)  # groups are dear
    found: dict[str, dict[str, Any]] = {}
    for mesh in args.mesh:
        of_mesh = found.setdefault(",".join(map(str, mesh)), {})
        for (build, names), family in itertools.product(((small, args.small), (whole, args.whole)), families):
            if not {family.model, "all"} & set(names):
                continue
            key = family.experts.__name__ if build is small else family.model
            dtype = torch.float32 if build is whole and family.model in NOT_FP64 else torch.float64
            try:
                of_mesh[key] = compare(functools.partial(build, family), mesh, dtype)
            except Exception as error:  # on all ranks: building and checking are the same there
                of_mesh[key] = repr(error)[:300]
        for family in families:
            if {family.model, "all"} & set(args.saved):
                folder = args.file.parent / f"{family.model}-{mesh[1]}{mesh[2]}"
                try:
                    of_mesh[f"{family.model} saved"] = saved(functools.partial(whole, family), mesh, folder)
                except Exception as error:
                    of_mesh[f"{family.model} saved"] = repr(error)[:300]
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(folder, ignore_errors=True)
                    args.file.write_text(json.dumps(found, indent=1))  # a later family may end the job
    if args.features:
        found["features"] = features(next(family for family in families if family.model == args.features))
    if dist.get_rank() == 0:
        args.file.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
