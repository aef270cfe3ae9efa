"""`foundry-moe export`: a checkpoint as a folder that plain transformers, vLLM and SGLang load."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.ledger import Found, Ledger
from foundry_moe.checkpoint.store import Store
from foundry_moe.commands.argument_types import dtype_named
from foundry_moe.commands.chosen_checkpoint import with_checkpoint
from foundry_moe.commands.export_adapter import convert_adapter, frozen_sources, merge, write_adapter
from foundry_moe.commands.export_certificate import AS_TRAINED, ExportCertificate, Exported, certify
from foundry_moe.commands.export_certificate import FILE as CERTIFICATE
from foundry_moe.commands.exported_files import INDEX, Weights, write_targets
from foundry_moe.launch.checkpoint_settings import FROZEN
from foundry_moe.launch.user_errors import is_users
from foundry_moe.models.native.architecture import Architecture
from foundry_moe.models.native.state_dict import native_of

NO_TOKENIZER = "none"


def export_command(arguments: argparse.Namespace, store: Store, ledger: Ledger) -> int:
    """Exports, certifies, and renames the folder last.

    Raises:
        ValueError: the model cannot be exported, or an argument is invalid.
        CheckpointError: the checkpoint is not there or damaged, `out` is in use, no space is left, or the folder fails
            its certificate. The partial folder is removed.
    """
    dtype = dtype_named(arguments.dtype)
    step, out = arguments.step, arguments.out

    def write_adapters(found: Found) -> str:
        architecture, weights = _read(store, found)
        with _beside(out.resolve()) as partial:
            return write_adapter(architecture, weights, partial, form=arguments.format, dtype=dtype)

    if arguments.adapter:
        print(f"{out}: {with_checkpoint(ledger, step, write_adapters)}")
        return 0
    if arguments.check:
        step, dtype = _exported_as(out, step, dtype)

    def write(found: Found) -> ExportCertificate:
        exported = plan_export(store, found, dtype, merged=arguments.merge, base=arguments.base)
        if arguments.check:
            return certify(exported, out, with_logits=arguments.certify)
        tokenizer = read_tokenizer(arguments.tokenizer, exported.architecture.tokenizer)
        return export_to(exported, out, tokenizer, arguments.certify, int(arguments.file_gb * 10**9))

    return _print_result(with_checkpoint(ledger, step, write), out)


def convert_command(arguments: argparse.Namespace) -> int:
    """`--adapter` of a PEFT folder: the same adapters in another format.

    Raises:
        ValueError: see `convert_adapter`.
    """
    folder, dtype = Path(arguments.run_folder), dtype_named(arguments.dtype)
    with _beside(arguments.out.resolve()) as partial:
        said = convert_adapter(folder, partial, arguments.base, arguments.format, dtype)
    print(f"{arguments.out}: {said}")
    return 0


def _read(store: Store, found: Found) -> tuple[Architecture, Weights]:
    """The checkpoint's architecture, and its tensors by name without the architecture's prefix.

    Raises:
        ValueError: no valid architecture, or adapters of `model.peft_config`, whose scale a checkpoint does not have.
    """
    where = f"the checkpoint of step {found.commit.step} in {store.url}"
    architecture = Architecture.from_info(found.manifest.info, where)
    prefix, weights = architecture.prefix, Weights.of(store, found, "model")
    dense = next((name for name in weights.sources if ".lora_A." in name), None)
    if dense is not None:
        raise ValueError(
            f"{dense}: adapters of model.peft_config are not exported; train without peft_config, or save the model "
            "from Python with peft's save_pretrained"
        )
    named = {n.removeprefix(prefix): source for n, source in weights.sources.items() if n.startswith(prefix)}
    return architecture, replace(weights, sources=named)


def _exported_as(out: Path, step: int | None, dtype: str | None) -> tuple[int | None, str | None]:
    """The step and dtype of an exported folder, by its certificate; without one, the arguments.

    Raises:
        ValueError: no such folder, or one of another step or dtype than the arguments.
    """
    if not (out / INDEX).is_file():
        raise ValueError(f"--check: {out} is no exported folder: it has no {INDEX}")
    try:
        certificate = json.loads((out / CERTIFICATE).read_text())
        recorded = int(certificate["checkpoint"]["step"]), str(certificate["dtype"])
    except (OSError, ValueError, KeyError, TypeError):
        return step, dtype
    was = None if recorded[1] == AS_TRAINED else dtype_named(recorded[1])
    if step not in (None, recorded[0]) or dtype not in (None, was):
        raise ValueError(f"--check: {out} is of step {recorded[0]}, {recorded[1]}: leave out --step and --dtype")
    return recorded[0], was


def plan_export(store: Store, found: Found, dtype: str | None, *, merged: bool, base: str | None) -> Exported:
    """Plans an export.

    Args:
        dtype: as torch names it; None = as it was trained.
        merged: LoRA adapters are added to the weights.
        base: where the weights are that a checkpoint leaves out; None = where the checkpoint says.

    Raises:
        ValueError: no family computes the same, or there are no adapters to merge.
    """
    architecture, weights = _read(store, found)
    if found.manifest.info.get(FROZEN) is not None:
        frozen = frozen_sources(found.manifest.info[FROZEN], architecture, weights.sources, base)
        weights = replace(weights, sources={**weights.sources, **frozen})
    elif base is not None:
        raise ValueError("--base is for checkpoints that leave out the frozen weights, and this one holds all: drop it")
    if merged:
        weights = merge(architecture, weights)
        architecture = replace(architecture, experts=replace(architecture.experts, lora=None))
    shapes = {name: source.shape for name, source in weights.sources.items()}
    architecture.check_fits(shapes)
    try:
        native = native_of(architecture)
    except Exception as error:  # the configuration may hold anything, and transformers' classes read it
        if is_users(error):
            raise
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the checkpoint's configuration is not a valid one: {type(error).__name__}: {reason}"
        ) from error
    kinds = {source.dtype for source in weights.sources.values()}
    native.config.torch_dtype = dtype or (kinds.pop() if len(kinds) == 1 else "float32")
    targets = native.targets(shapes)
    return Exported(weights=weights, architecture=architecture, native=native, targets=targets, dtype=dtype)


def export_to(
    exported: Exported,
    out: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    with_logits: bool | None,
    file_bytes: int,
) -> ExportCertificate:
    """Writes the folder beside `out`, certifies it and renames it to `out`.

    Raises:
        CheckpointError: see `export_command`.
    """
    config = exported.native.config
    if tokenizer is not None:
        if len(tokenizer) > config.vocab_size:
            raise ValueError(
                f"--tokenizer: it has {len(tokenizer)} tokens, and the model {config.vocab_size}: give the tokenizer "
                "of this model"
            )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(config, name, None) is None or exported.architecture.model_type == "mpt":
                setattr(config, name, getattr(tokenizer, name))
    with _beside(out.resolve()) as partial:
        write_targets(exported.weights, exported.targets, partial, dtype=exported.dtype, file_bytes=file_bytes)
        config.save_pretrained(partial)
        GenerationConfig.from_model_config(config).save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        certificate = certify(exported, partial, with_logits=with_logits)
        if not certificate.good:
            raise CheckpointError(
                f"{out} is not written: the exported tensors or logits differ from the checkpoint: "
                + "; ".join(certificate.problems[:3])
            )
    return certificate


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A new folder next to `out`, renamed to `out` at the end, or removed after an error."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty: name a new folder")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_tokenizer(asked: str | None, recorded: str) -> PreTrainedTokenizerBase | None:
    """The run's tokenizer, or the one of `--tokenizer`; None = without one. Code in its folder is not run.

    Raises:
        ValueError: it cannot be read.
    """
    name = recorded if asked is None else asked
    if name in ("", NO_TOKENIZER):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError and others, by what is wrong
        where, reason = "the run's tokenizer" if asked is None else "--tokenizer", str(error).partition("\n")[0]
        raise ValueError(
            f"{where} ({name}) cannot be read ({reason}); a checkpoint records its name only: give its "
            f"folder with --tokenizer FOLDER, or export without one with --tokenizer {NO_TOKENIZER}"
        ) from error


def _print_result(certificate: ExportCertificate, out: Path) -> int:
    logits: dict[str, Any] = certificate.logits
    for problem in certificate.problems:
        print(f"  {problem}", file=sys.stderr)
    if not certificate.good:
        print(f"error: {out} is not the checkpoint's model", file=sys.stderr)
        return 1
    compared = f"logits were not compared: {logits.get('why')}"
    if logits.get("compared"):
        compared = f"logits differ by {logits['largest_difference']:.1e} of their standard deviation"
    print(
        f"{out}: step {certificate.checkpoint['step']} as {certificate.family}; {len(certificate.tensors)} tensors are "
        f"the checkpoint's; {compared}"
    )
    return 0
