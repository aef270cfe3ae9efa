"""Checks the files that a run reads on this machine: data, tokenizer, model. Imports no trainer."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foundry_moe.launch.foundry_keys import MPT_VOCABULARY, MPTS
from foundry_moe.schema import section


def missing_files(run: Mapping[str, Any]) -> list[str]:
    """A sentence for each file that a run reads and that does not exist."""
    found = [
        f"{where} ({path}): there is no such file; correct the path"
        for where, path in _files(run)
        if isinstance(path, str) and "://" not in path and not set(path) & set("*?[") and not Path(path).exists()
    ]
    for where, dataset in datasets(run):
        local, split = dataset.get("local"), dataset.get("split")
        if not isinstance(local, str) or dataset.get("remote"):
            continue
        if not Path(local).is_dir():
            found.append(
                f"{where}.local ({local}): there is no such folder, and no `remote` to fetch it from; prepare the data "
                "(the demo's by `python examples/demo_data.py data/demo`) or correct the path"
            )
        elif isinstance(split, str) and not (Path(local) / split).is_dir():
            there = sorted(path.name for path in Path(local).iterdir() if (path / "index.json").is_file())
            found.append(
                f"{where}.split ({split}): {local} has no such folder; "
                + (f"it has {', '.join(there)}" if there else "it has no data in MDS format at all")
            )
    name = section(run, "tokenizer").get("name")
    if isinstance(name, str) and _is_path(name) and not Path(name).exists():
        found.append(f"tokenizer.name ({name}): there is no such folder; correct the path, or name one of a hub")
    facts = section(run, "callbacks", "run_report").get("facts")
    if not found and facts and not Path(facts).is_file():  # the demo's are written with its data
        found.append(f"callbacks.run_report.facts ({facts}): there is no such file; correct the path, or leave it out")
    return found


def _files(run: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each key of the run that names a file to read, and its value."""
    for path in run.get("code_paths") or ():
        yield "code_paths", path
    for where, dataset in datasets(run):
        yield f"{where}.hf_kwargs.data_files", section(dataset, "hf_kwargs").get("data_files")
    tasks: Any = run.get("icl_tasks") or ()
    if isinstance(tasks, str):
        yield "icl_tasks", tasks
        return
    for index, task in enumerate(tasks):
        if isinstance(task, Mapping):
            yield f"icl_tasks.{index}.dataset_uri", task.get("dataset_uri")


def loaders(run: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each data loader of the run, and its key: several evaluation sets are a list."""
    for name in ("train_loader", "eval_loader"):
        given: Any = run.get(name)
        several = isinstance(given, Sequence) and not isinstance(given, str)
        for where, loader in [(f"{name}.{i}", one) for i, one in enumerate(given)] if several else [(name, given)]:
            if isinstance(loader, Mapping):
                yield where, loader


def datasets(run: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each data set of the run, the streams of one by themselves, and the key where it is."""
    for where, loader in loaders(run):
        dataset = section(loader, "dataset")
        yield f"{where}.dataset", dataset
        streams = section(dataset, "streams")
        for stream in streams:
            yield f"{where}.dataset.streams.{stream}", section(streams, stream)


def file_mistakes(run: Mapping[str, Any]) -> list[str]:
    """A sentence for each value that contradicts data, a tokenizer or a model on this machine."""
    return [*_vocabulary_mistakes(run), *_small_data(run), *_short_samples(run)]


def _is_path(name: str) -> bool:
    """Whether a name is not that of a hub's model, `model` or `owner/model`."""
    parts = Path(name).parts
    return name[:1] in (".", "~", "/") or len(parts) > 2 or (len(parts) == 2 and Path(parts[0]).is_dir())


def _small_data(run: Mapping[str, Any]) -> Iterator[str]:
    """A sentence if the training data in MDS format on this machine has less than a batch."""
    batch, several = run.get("global_train_batch_size"), {"proportion", "repeat", "choose"}
    trained = [data for where, data in datasets(run) if where.startswith("train_loader.") and not data.get("streams")]
    found = [_shards(data) for data in trained]
    if not found or not all(shards for _, shards in found) or any(several & set(data) for data in trained):
        return
    if not isinstance(batch, int) or section(run, "train_loader").get("drop_last", True) is False:
        return
    samples = sum(int(shard.get("samples", 0)) for _, shards in found for shard in shards)
    if samples < batch:
        paths = ", ".join(str(path) for path, _ in found)
        yield (
            f"train_loader.dataset ({paths}) has {samples} samples, fewer than global_train_batch_size ({batch}): "
            "lower it, or add data"
        )


def _shards(dataset: Mapping[str, Any]) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a data set in MDS format on this machine, and its shards; none for other data."""
    local, split = dataset.get("local"), dataset.get("split")
    if not isinstance(local, str) or dataset.get("remote"):
        return Path(), []
    path = Path(local) / split if isinstance(split, str) else Path(local)
    shards = local_json(str(path), "index.json").get("shards")
    return path, [shard for shard in shards if isinstance(shard, dict)] if isinstance(shards, list) else []


def _short_samples(run: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each data set whose first sample has fewer tokens than its max_seq_len, which trains on fewer."""
    for where, dataset in datasets(run):
        (path, shards), length = _shards(dataset), dataset.get("max_seq_len", run.get("max_seq_len"))
        try:
            tokens = _tokens_of_first(path, shards[0], str(dataset.get("token_encoding_type", "int64")))
        except (OSError, LookupError, TypeError, ValueError, struct.error):  # no such data: text, or compressed
            continue
        if isinstance(length, int) and tokens < length:
            yield (
                f"{where}.max_seq_len ({length}): the samples in {path} have {tokens} tokens; set max_seq_len "
                f"to {tokens}, or convert the data with --concat_tokens {length}"
            )


def _tokens_of_first(path: Path, shard: Mapping[str, Any], kind: str) -> int:
    """The length of the column `tokens` in a shard's first sample, by streaming's format MDS.

    A shard is the number of samples, their offsets, and samples; a sample is the sizes of its columns without a fixed
    size, and the columns. All of these numbers are uint32.

    Args:
        kind: of tokens that are plain bytes.
    """
    index = shard["column_names"].index("tokens")
    encoding, size, sizes = shard["column_encodings"][index], shard["column_sizes"][index], shard["column_sizes"]
    if size is None:
        with (path / shard["raw_data"]["basename"]).open("rb") as file:
            file.seek(4)
            (first,) = struct.unpack("<I", file.read(4))
            file.seek(first + 4 * sizes[:index].count(None))
            (size,) = struct.unpack("<I", file.read(4))
    name, _, shape = encoding.partition(":")[2].partition(":")
    width = int((name or kind).strip("uint")) // 8
    # an array without a fixed shape begins with its form: 2 bytes, or some more if it is longer than 255
    return (size - 2) // width if name and not shape else size // width


def _vocabulary_mistakes(run: Mapping[str, Any]) -> Iterator[str]:
    """A sentence if the tokenizer has more tokens than the model, where both are on this machine.

    With `allow_embedding_resizing`, for each key that excludes it; then files that are not here are downloaded.
    """
    model = section(run, "model")
    source = model.get("pretrained_model_name_or_path")
    resizes = source is not None and model.get("allow_embedding_resizing")
    excluded = [*_resizing_mistakes(run)] if resizes else []
    if model.get("name") in MPTS:
        size = model.get("vocab_size", MPT_VOCABULARY)
    elif source is None:
        return
    else:
        config = local_json(source, "config.json", download=bool(excluded))
        size = section(model, "config_overrides").get("vocab_size", config.get("vocab_size"))
    tokenizer = local_json(section(run, "tokenizer").get("name"), "tokenizer.json", download=bool(excluded))
    words, added = section(tokenizer, "model").get("vocab"), tokenizer.get("added_tokens")
    if not isinstance(words, dict | list) or not isinstance(size, int):
        return
    ids = [*(words.values() if isinstance(words, dict) else range(len(words)))]
    ids += [token.get("id") for token in added or () if isinstance(token, dict)]
    tokens = 1 + max((number for number in ids if isinstance(number, int)), default=-1)
    if tokens <= size:
        return
    if resizes:
        yield from excluded
    else:
        fix = f"set model.vocab_size to {tokens} or more"
        if source is not None:
            fix = "use the model's own tokenizer, or model.allow_embedding_resizing: true"
        yield (
            f"tokenizer.name ({run['tokenizer']['name']}) has token ids up to {tokens - 1}, and the model has "
            f"embeddings for {size} tokens: {fix}"
        )


def _resizing_mistakes(run: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each key with which rows of an embedding cannot be added to those of the model's files."""
    if section(run, "model").get("init_device") == "meta":
        yield "model.init_device (meta) has no rows that allow_embedding_resizing could add to: use init_device: cpu"
    if section(run, "callbacks", "elastic_checkpoint").get("save_frozen") is False:
        yield (
            "callbacks.elastic_checkpoint.save_frozen (false) needs the weights of the model's files, and "
            "model.allow_embedding_resizing draws rows: use save_frozen: true"
        )


def local_json(name: object, file: str, *, download: bool = False) -> dict[str, Any]:
    """A JSON file of a model's folder, the hub's cache or, with `download`, the hub; empty if it cannot be read."""
    if not isinstance(name, str):
        return {}
    path: Any = Path(name) / file
    if not path.is_file():
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        try:
            path = (hf_hub_download if download else try_to_load_from_cache)(name, file)
        except (OSError, ValueError):  # the hub's: not a name; no such file; no network
            return {}
    try:
        found = json.loads(Path(path).read_bytes()) if isinstance(path, str | Path) else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
