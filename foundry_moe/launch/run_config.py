"""Reads a run's YAML and checks it before slow imports. Imports neither Composer nor LLM Foundry."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry_moe.config import (
    AUTO,
    META_NEEDS_MESH,
    UPCYCLE_NEEDS_WEIGHTS,
    MeshConfig,
    MoEConfig,
    check_compilation,
    refuse_other_parallelism,
)
from foundry_moe.launch.checkpoint_settings import WHERE, checkpoint_config
from foundry_moe.launch.foundry_keys import key_mistakes
from foundry_moe.launch.run_values import VALUE_CHECKS, check_fit
from foundry_moe.launch.spares import launched_ranks, ranks_in_use
from foundry_moe.layers.gates.registry import check_freeze, check_gate
from foundry_moe.parallel.mesh import divisors, listed
from foundry_moe.schema import UserError, caught, from_mapping, raise_mistakes, section

MODEL = "dmoe_causal_lm"
MOST_BYTES = 2**22
_WITHOUT_EXPERTS = ("mpt_causal_lm", "hf_causal_lm")


def load_run(path: str, overrides: list[str], usage: str = "") -> DictConfig:
    """The YAML with command-line overrides merged in.

    Args:
        usage: appended to the error if there is no such file.

    Raises:
        ValueError: the file is missing, a folder or invalid YAML, or an override is not `key=value`.
    """
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
            config.merge_with(given)
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
    """The run as dictionaries and lists, `${...}` resolved.

    Raises:
        ValueError: a `${...}` has no value.
    """
    try:
        resolved = OmegaConf.to_container(run, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise UserError(f"a ${{...}} in the run has no value: {_one_line(error)}") from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def check_whole_run(run: Mapping[str, Any]) -> MoEConfig | None:
    """Checks all keys and values of a run, also those of LLM Foundry and Composer; returns as `read_moe` does.

    Raises:
        ValueError: a sentence for each mistake, with key, value and fix. Values are checked once the experts' keys, and
            all keys and the types of their values, are right.
    """
    experts = caught(read_moe, run)
    # mistakes in the experts' keys are named in `read_moe`'s words alone
    named = ("model.moe", "model.ffn_config.ffn_type", "algorithms.dmoe") if experts else ()
    raise_mistakes([*experts, *(sentence for sentence in key_mistakes(run) if not sentence.startswith(named))])
    config = read_moe(run)
    mistakes = [*own_mistakes(run, config), *key_mistakes(run, rules=True)]
    for check in VALUE_CHECKS:
        mistakes += check(run, config)
    raise_mistakes(mistakes)
    return config


def own_mistakes(run: Mapping[str, Any], config: MoEConfig | None) -> Iterator[str]:
    """A sentence for each mistake in the keys of this package, whose names are known. `config`: of `read_moe`."""
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
    yield from caught(lambda: check_gate(config.gate, config.loss, num_experts=config.num_experts, top_k=config.top_k))
    yield from caught(check_freeze, config.gate, config.freeze)
    yield from caught(check_compilation, run)
    if "dmoe" not in algorithms and config.init == "upcycle":
        yield UPCYCLE_NEEDS_WEIGHTS
    from_meta = section(run, "model").get("init_device") == "meta"
    if from_meta and config.mesh_config is None and "dmoe_mesh" not in algorithms:
        yield f"model.{META_NEEDS_MESH}"
    if config.mesh_config is not None:
        yield from caught(_check_mesh, run, config, config.mesh_config)


def _load_mistakes(run: Mapping[str, Any], *, elastic: bool) -> Iterator[str]:
    """A sentence for each key of a start from another checkpoint that would have no effect."""
    start = run.get("load_path")
    ours = isinstance(start, str) and (Path(start.removeprefix("file://")) / "commits").is_dir()
    if ours and not elastic:
        yield f"load_path ({start}) is a folder of elastic_checkpoint, which reads it: add {WHERE} with another folder"
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
    """`algorithms.dmoe` or `model.moe`; None where the run has neither.

    Raises:
        ValueError: both of them, invalid keys or values, or a model that does not read `moe`.
    """
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
        raise UserError("model.ffn_config.ffn_type (dmoe) was removed: move the keys of the experts to model.moe")
    if model.get("moe") is not None or name == MODEL:
        return from_mapping(MoEConfig, model.get("moe"), "model.moe")
    return None


def mesh_of(run: Mapping[str, Any]) -> MeshConfig | None:
    """The mesh of a run: `mesh` of its experts, or `algorithms.dmoe_mesh`; None where it has neither."""
    config = read_moe(run)
    keys = section(run, "algorithms").get("dmoe_mesh") if config is None or config.mesh is None else config.mesh
    return None if keys is None else from_mapping(MeshConfig, keys, "mesh")


def _check_mesh(run: Mapping[str, Any], config: MoEConfig, mesh: MeshConfig) -> None:
    if "WORLD_SIZE" in os.environ:
        check_fit(run, used=ranks_that_train(run, config), config=config)
        return
    # without a launcher, only what is invalid for any number of GPUs
    if mesh.expert != AUTO and config.num_experts % mesh.expert:
        raise UserError(
            f"mesh.expert ({mesh.expert}) must divide num_experts ({config.num_experts}): use "
            f"{listed(divisors(config.num_experts))}"
        )


def ranks_that_train(run: Mapping[str, Any], config: MoEConfig | None) -> int:
    """The number of the launcher's ranks that fit the mesh; all of them without a mesh.

    Raises:
        ValueError: see `ranks_in_use`.
    """
    world_size = launched_ranks()
    if config is None or config.mesh_config is None:
        return world_size
    return ranks_in_use(
        config.mesh_config,
        world_size=world_size,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        num_experts=config.num_experts,
        batch_size=run.get("global_train_batch_size"),
    )


_NEEDS_GPU = "precision ({}) needs a GPU, and this machine has none: use precision: fp32, or start the run on a GPU"
_AUTO_NEEDS_GPU = (
    "device_train_microbatch_size (auto) needs a GPU, and this machine has none: give a number, or start the "
    "run on a GPU"
)
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, WSL


def check_device(run: Mapping[str, Any]) -> None:
    """Raises ValueError for a precision or a microbatch that needs a GPU, if torch sees none."""
    import torch

    if run.get("device_train_microbatch_size", AUTO) == AUTO and not torch.cuda.is_available():
        raise UserError(_AUTO_NEEDS_GPU)
    precision = run.get("precision", "amp_bf16")
    if precision != "fp32" and not torch.cuda.is_available() and not torch.backends.mps.is_available():
        raise UserError(_NEEDS_GPU.format(precision))


def device_notes(run: Mapping[str, Any]) -> list[str]:
    """The sentences of `check_device`, without importing torch."""
    if any(Path(file).exists() for file in _GPU_FILES):
        return []
    precision = run.get("precision", "amp_bf16")
    notes = [_AUTO_NEEDS_GPU] if run.get("device_train_microbatch_size", AUTO) == AUTO else []
    return [*notes, *([] if precision == "fp32" else [_NEEDS_GPU.format(precision)])]


def missing_files(run: Mapping[str, Any]) -> list[str]:
    """A sentence for each file that a run reads and that does not exist."""
    found = [
        f"code_paths ({path}): there is no such file; correct the path"
        for path in run.get("code_paths") or ()
        if not Path(str(path)).exists()
    ]
    for loader in ("train_loader", "eval_loader"):
        if not isinstance(run.get(loader), Mapping):  # several evaluation sets are a list
            continue
        dataset = section(run, loader, "dataset")
        files = section(run, loader, "dataset", "hf_kwargs").get("data_files")
        if isinstance(files, str) and "://" not in files and not set(files) & set("*?[") and not Path(files).exists():
            found.append(f"{loader}.dataset.hf_kwargs.data_files ({files}): there is no such file; correct the path")
        local, split = dataset.get("local"), dataset.get("split")
        if not isinstance(local, str) or dataset.get("remote"):
            continue
        if not Path(local).is_dir():
            found.append(
                f"{loader}.dataset.local ({local}): there is no such folder, and no `remote` to fetch it from; prepare "
                "the data (the demo's by `python examples/demo_data.py data/demo`) or correct the path"
            )
        elif isinstance(split, str) and not (Path(local) / split).is_dir():
            there = sorted(path.name for path in Path(local).iterdir() if (path / "index.json").is_file())
            found.append(
                f"{loader}.dataset.split ({split}): {local} has no such folder; "
                + (f"it has {', '.join(there)}" if there else "it has no data in MDS format at all")
            )
    name = section(run, "tokenizer").get("name")
    # a hub's names are `model` or `owner/model`
    is_path = isinstance(name, str) and (Path(name).is_absolute() or len(Path(name).parts) > 2)
    if is_path and not Path(str(name)).exists():
        found.append(f"tokenizer.name ({name}): there is no such folder; correct the path, or name one of a hub")
    return [*found, *_vocabulary_mistakes(run), *_small_data(run)]


def _small_data(run: Mapping[str, Any]) -> Iterator[str]:
    """A sentence if the training data in MDS format on this machine has less than a batch."""
    dataset, batch = section(run, "train_loader", "dataset"), run.get("global_train_batch_size")
    local, split = dataset.get("local"), dataset.get("split")
    if not isinstance(local, str) or dataset.get("remote") or not isinstance(batch, int):
        return
    path = Path(local) / split if isinstance(split, str) else Path(local)
    shards = _local_json(str(path), "index.json").get("shards")
    if not isinstance(shards, list) or section(run, "train_loader").get("drop_last", True) is False:
        return
    samples = sum(int(shard.get("samples", 0)) for shard in shards if isinstance(shard, dict))
    if samples < batch:
        yield (
            f"train_loader.dataset ({path}) has {samples} samples, fewer than global_train_batch_size ({batch}): lower "
            "it, or add data"
        )


def _vocabulary_mistakes(run: Mapping[str, Any]) -> Iterator[str]:
    """A sentence if the tokenizer has more tokens than a Hugging Face model, where both are on this machine."""
    model = section(run, "model")
    source = model.get("pretrained_model_name_or_path")
    if source is None or model.get("allow_embedding_resizing"):  # LLM Foundry enlarges an MPT's embeddings
        return
    size = section(model, "config_overrides").get("vocab_size", _local_json(source, "config.json").get("vocab_size"))
    tokenizer = _local_json(section(run, "tokenizer").get("name"), "tokenizer.json")
    words, added = section(tokenizer, "model").get("vocab"), tokenizer.get("added_tokens")
    if not isinstance(words, dict | list) or not isinstance(size, int):
        return
    tokens = {word if isinstance(word, str) else str(word[0]) for word in words}
    tokens |= {str(token.get("content")) for token in added or () if isinstance(token, dict)}
    if len(tokens) > size:
        yield (
            f"tokenizer.name ({run['tokenizer']['name']}) has {len(tokens)} tokens, and the model has embeddings for "
            f"{size}: use the model's own tokenizer, or model.allow_embedding_resizing: true"
        )


def _local_json(name: object, file: str) -> dict[str, Any]:
    """A JSON file of a model's folder, or of the hub's cache; empty where there is none that can be read."""
    if not isinstance(name, str):
        return {}
    path: Any = Path(name) / file
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = try_to_load_from_cache(name, file)
        except HFValidationError:
            return {}
    try:
        found = json.loads(Path(path).read_bytes()) if isinstance(path, str | Path) else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
