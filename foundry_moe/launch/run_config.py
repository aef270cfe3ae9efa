"""Reads a run's YAML and checks it before slow imports. Imports neither Composer nor LLM Foundry."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry_moe.config import (
    AUTO,
    META_NEEDS_MESH,
    RESHARD,
    UPCYCLE_NEEDS_WEIGHTS,
    MeshConfig,
    MoEConfig,
    check_compilation,
    check_rows,
    refuse_other_parallelism,
)
from foundry_moe.launch.checkpoint_settings import WHERE, checkpoint_config
from foundry_moe.launch.foundry_keys import key_mistakes
from foundry_moe.launch.run_values import VALUE_CHECKS, check_fit, whole_paths
from foundry_moe.launch.spares import ranks_in_use
from foundry_moe.layers.gates.registry import check_freeze, check_gate
from foundry_moe.parallel.mesh import MeshPlan, check_expert_widths, divisors, listed, plan_mesh
from foundry_moe.schema import UserError, caught, from_mapping, raise_mistakes, section, sentences_of

MODEL = "dmoe_causal_lm"
MOST_BYTES = 2**22
Machine = tuple[int, int]  # GPUs of the job, and of a node
_WITHOUT_EXPERTS = ("mpt_causal_lm", "hf_causal_lm")


def load_run(path: str, overrides: list[str], usage: str = "") -> DictConfig:
    """The YAML with command-line overrides merged in. `usage`: appended to the error if there is no such file."""
    if Path(path).is_dir():
        raise UserError(f"{path} is a folder: name a run's YAML in it")
    if not Path(path).is_file():
        raise UserError(f"{path}: there is no such file" + (f"; {usage}" if usage else ""))
    for override in overrides:
        if "=" not in override:
            raise UserError(f"{override}: an override is key=value, for example max_duration=100ba")
    config = _read_yaml(path)
    for override in overrides:
        _override(config, override)
    return config


def _read_yaml(path: str) -> DictConfig:
    if (size := Path(path).stat().st_size) > MOST_BYTES:
        raise UserError(f"{path} has {size:,} bytes: a run's YAML has at most {MOST_BYTES:,}")
    try:
        config = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {_one_line(error)}") from None
    except OSError as error:  # a file that holds one number
        raise UserError(f"{path} must be a mapping of keys to values at its top level: {_one_line(error)}") from None
    keys = OmegaConf.to_container(config, resolve=False)  # OmegaConf reads one word as a key without a value
    if not isinstance(config, DictConfig) or not isinstance(keys, dict) or list(keys.values()) == [None]:
        raise UserError(f"{path} must be a mapping of keys to values at its top level")
    if "models" in config and "model" not in config:
        raise UserError(f"{path} is a run of LLM Foundry's evaluation (models): use `llmfoundry eval`")
    return config


def _override(config: DictConfig, override: str) -> None:
    """Merges `key=value` into the run. A mapping that is empty or has another `name` replaces the old one.

    So `gate={name: switch}` does not keep keys of the old gate, nor `loss={}` its losses.
    """
    key = override.partition("=")[0]
    try:
        given = OmegaConf.from_cli([override])
        value = OmegaConf.select(given, key, throw_on_resolution_failure=False)  # `${...}` may name keys of the file
        old = OmegaConf.select(config, key) if isinstance(value, DictConfig | ListConfig) else None
        if old is not None and _names_another(value, old):
            OmegaConf.update(config, key, value, merge=False)
        else:
            config.merge_with_dotlist([override])  # unlike merge_with, it reads indices of lists
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{override[:100]}: this override cannot be read: {_one_line(error)}") from None


def _names_another(value: Any, old: Any) -> bool:
    if not isinstance(value, DictConfig) or not isinstance(old, DictConfig):
        return True
    return not value or ("name" in value and value["name"] != old.get("name"))


def _one_line(error: Exception) -> str:
    text = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."


def plain(run: DictConfig) -> dict[str, Any]:
    """The run as dictionaries and lists, `${...}` resolved."""
    try:
        resolved = OmegaConf.to_container(run, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise UserError(f"a ${{...}} in the run has no value: {_one_line(error)}") from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def check_whole_run(run: Mapping[str, Any], machine: Machine | None = None) -> MoEConfig | None:
    """Checks all keys and values of a run, also those of LLM Foundry and Composer; returns as `read_moe` does.

    Args:
        machine: of `launched_machine` by default.

    Raises:
        ValueError: a sentence for each mistake, with key, value and fix. Values are checked once the experts' keys, and
            all keys and the types of their values, are right.
    """
    config, experts = None, ()  # type: tuple[MoEConfig | None, tuple[str, ...]]
    try:
        config = read_moe(run)
    except UserError as error:  # which alone reports mistakes in the experts' keys
        experts = sentences_of(error)
    skipped = ("model.moe", "model.ffn_config.ffn_type", "algorithms.dmoe") if experts else ()
    raise_mistakes([*experts, *key_mistakes(run, skipped=skipped)])
    mistakes = [*own_mistakes(run, config, machine or launched_machine()), *key_mistakes(run, rules=True)]
    for check in VALUE_CHECKS:
        mistakes += check(run, config)
    raise_mistakes(mistakes)
    return config


def own_mistakes(run: Mapping[str, Any], config: MoEConfig | None, machine: Machine | None) -> Iterator[str]:
    """A sentence for each mistake in the keys of this package, whose names are known. `config`: of `read_moe`."""
    yield from whole_paths(run, caught(_check_mesh, run, config, machine))
    algorithms, callbacks = section(run, "algorithms"), section(run, "callbacks")
    yield from _load_mistakes(run, elastic="elastic_checkpoint" in callbacks)
    if "elastic_checkpoint" in callbacks:
        yield from caught(lambda: checkpoint_config(section(callbacks, "elastic_checkpoint")))
        folder = section(callbacks, "elastic_checkpoint").get("folder")
        if run.get("save_folder") and _resolved(run["save_folder"]) == _resolved(folder):
            yield f"save_folder and {WHERE}.folder are both {folder}: give each a folder of its own"
    if config is None:
        return
    version = os.environ.get("FSDP_VERSION", "2") if run.get("fsdp_config") is not None else "2"
    parallel: dict[str, Any] = {"tensor_parallel": bool(run.get("tp_config")), "fsdp_version": version}
    yield from caught(lambda: refuse_other_parallelism(**parallel))
    facts: dict[str, Any] = {"num_experts": config.num_experts, "top_k": config.top_k}
    facts["from_family"] = section(run, "model").get("name") == "hf_causal_lm"
    yield from whole_paths(run, caught(lambda: check_gate(config.gate, config.loss, **facts)))
    yield from whole_paths(run, caught(check_freeze, config.gate, config.freeze))
    yield from caught(check_compilation, run)
    if "dmoe" not in algorithms and config.init == "upcycle":
        yield UPCYCLE_NEEDS_WEIGHTS
    from_meta = section(run, "model").get("init_device") == "meta"
    if from_meta and config.mesh_config is None and "dmoe_mesh" not in algorithms:
        yield f"model.{META_NEEDS_MESH}"


def _load_mistakes(run: Mapping[str, Any], *, elastic: bool) -> Iterator[str]:
    """A sentence for each key about a start from another checkpoint that would have no effect."""
    start = run.get("load_path")
    ours = isinstance(start, str) and os.path.isdir(f"{_resolved(start)}/commits")
    if ours and not elastic:
        yield f"load_path ({start}) is a folder of elastic_checkpoint, which reads it: add {WHERE} with another folder"
    if run.get("autoresume") and not run.get("save_folder"):
        yield "autoresume resumes from save_folder, which is missing: add it; elastic_checkpoint resumes without either"
    for key in ("load_weights_only", "load_ignore_keys"):
        if elastic and run.get(key) and not start and not run.get("autoresume"):
            yield (
                f"{key} ({run[key]}) has no effect without load_path: name the checkpoint to start from, for example "
                "the folder of another run with elastic_checkpoint, or delete the key"
            )
    if ours and run.get("load_ignore_keys"):
        yield f"load_ignore_keys ({run['load_ignore_keys']}) does not apply to load_path ({start}): delete the key"


def _resolved(folder: object) -> str:
    path = str(folder).removeprefix("file://").rstrip("/")
    return path if "://" in path else os.path.realpath(os.path.expanduser(path))


def read_moe(run: Mapping[str, Any]) -> MoEConfig | None:
    """`algorithms.dmoe` or `model.moe`; None where the run has neither."""
    algorithms, model = section(run, "algorithms"), section(run, "model")
    name, has_algorithm = model.get("name"), "dmoe" in algorithms
    if has_algorithm and (name == MODEL or model.get("moe") is not None):
        raise UserError(f"algorithms.dmoe and model.moe (of {MODEL}) both put experts into the model: keep one of them")
    if has_algorithm:
        return from_mapping(MoEConfig, algorithms["dmoe"], "algorithms.dmoe")
    if model.get("moe") is not None and name in _WITHOUT_EXPERTS:
        raise UserError(
            f"model.moe: model.name: {name} does not read it; move its keys to algorithms.dmoe"
            + (f", or use model.name: {MODEL}" if name == "mpt_causal_lm" else "")
        )
    if section(run, "model", "ffn_config").get("ffn_type") == "dmoe":
        raise UserError("model.ffn_config.ffn_type (dmoe) is not an FFN: move the keys of the experts to model.moe")
    if model.get("moe") is not None or name == MODEL:
        return from_mapping(MoEConfig, model.get("moe"), "model.moe")
    return None


def mesh_of(run: Mapping[str, Any], config: MoEConfig | None) -> MeshConfig | None:
    """The mesh of a run: `mesh` of its experts, or `algorithms.dmoe_mesh`; None where it has neither.

    `mesh: auto` is a mesh of any number of GPUs until it is chosen. `config`: of `read_moe`.
    """
    if config is not None and config.mesh is not None:
        return config.mesh_config
    keys = section(run, "algorithms").get("dmoe_mesh")
    return None if keys is None else from_mapping(MeshConfig, keys, "algorithms.dmoe_mesh")


def _check_mesh(run: Mapping[str, Any], config: MoEConfig | None, machine: Machine | None) -> None:
    """Raises ValueError if a mesh, the batch or the experts do not fit; without a machine, any number of GPUs."""
    mesh = mesh_of(run, config)
    if mesh is None and section(run, "fsdp_config").get(RESHARD) == AUTO:
        raise UserError(f"fsdp_config.{RESHARD} (auto) is for a run with a mesh: use true or false")
    if machine is not None:
        used = ranks_that_train(run, config, machine)
        check_fit(run, used=used, config=config)
        if config is not None and mesh is not None and config.mesh != AUTO:
            plan_experts(mesh, config, section(run, "model").get("d_model"), gpus=used, ranks_per_node=machine[1])
    elif config is not None and mesh is not None and mesh.expert != AUTO and config.num_experts % mesh.expert:
        raise UserError(
            f"mesh.expert ({mesh.expert}) must divide num_experts ({config.num_experts}): use "
            f"{listed(divisors(config.num_experts))}"
        )


def plan_experts(
    mesh: MeshConfig, config: MoEConfig, d_model: int | None, *, gpus: int, ranks_per_node: int
) -> MeshPlan:
    """The mesh, if it cuts the experts evenly. `d_model`: None if the model's files have it."""
    plan = plan_mesh(mesh, world_size=gpus, ranks_per_node=ranks_per_node, num_experts=config.num_experts)
    widths = config.expert_hidden_size
    if isinstance(widths, tuple):
        check_expert_widths(widths, plan.expert)
    check_rows({"d_model": d_model, "expert_hidden_size": widths}, shard=plan.shard, expert=plan.expert)
    return plan


def launched_machine() -> Machine | None:
    """The GPUs of the job and of a node, by the launcher's environment; None without a launcher."""
    if "WORLD_SIZE" not in os.environ:
        return None
    given = {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") if name in os.environ}
    raise_mistakes(
        f"{name} ({text}) in the environment must be a positive whole number: unset it, or let a launcher set it"
        for name, text in given.items()
        if not re.fullmatch("0*[1-9][0-9]*", text)
    )
    world_size = int(given["WORLD_SIZE"])
    return world_size, int(given.get("LOCAL_WORLD_SIZE", world_size))


def ranks_that_train(run: Mapping[str, Any], config: MoEConfig | None, machine: Machine | None = None) -> int:
    """The number of the launcher's ranks that fit the mesh; all of them without a mesh."""
    world_size, ranks_per_node = machine or launched_machine() or (1, 1)
    mesh = mesh_of(run, config)
    if mesh is None:
        return world_size
    return ranks_in_use(
        mesh,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        num_experts=None if config is None else config.num_experts,
        batch_size=run.get("global_train_batch_size"),
    )


_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, WSL


def check_device(run: Mapping[str, Any]) -> None:
    """Raises ValueError for a precision or a microbatch that needs a GPU, if torch sees none."""
    import torch

    if not torch.cuda.is_available():
        raise_mistakes(_needs_gpu(run, mps=torch.backends.mps.is_available()))


def device_notes(run: Mapping[str, Any]) -> list[str]:
    """The sentences of `check_device`, without importing torch."""
    return [] if any(Path(file).exists() for file in _GPU_FILES) else list(_needs_gpu(run))


def _needs_gpu(run: Mapping[str, Any], *, mps: bool = False) -> Iterator[str]:
    if run.get("device_train_microbatch_size", AUTO) == AUTO:
        yield (
            "device_train_microbatch_size (auto) needs a GPU, and this machine has none: give a number, or start the "
            "run on a GPU"
        )
    precision = run.get("precision", "amp_bf16")
    if precision != "fp32" and not mps:
        yield (
            f"precision ({precision}) needs a GPU, and this machine has none: use precision: fp32, or start the run "
            "on a GPU"
        )
