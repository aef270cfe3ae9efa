"""`foundry-moe export`: a checkpoint as a folder that plain transformers, vLLM and SGLang load."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.store import Store
from foundry_moe.commands.chosen_checkpoint import open_folder, with_checkpoint
from foundry_moe.commands.export_adapter import convert_adapter, frozen_sources, merge, write_adapter
from foundry_moe.commands.export_certificate import Exported, certify
from foundry_moe.commands.exported_files import Weights, beside, write_targets
from foundry_moe.commands.parsers import DTYPES
from foundry_moe.commands.source_files import copy_licences
from foundry_moe.launch.checkpoint_settings import FROZEN
from foundry_moe.launch.user_errors import is_users
from foundry_moe.models.native.architecture import Architecture
from foundry_moe.models.native.state_dict import native_of
from foundry_moe.models.native.tokenizer import restore_tokenizer
from foundry_moe.schema import UserError

NO_TOKENIZER = "none"


def export_command(arguments: argparse.Namespace) -> int:
    """Exports, certifies, and renames the folder last.

    Raises:
        ValueError: the model cannot be exported, an argument is invalid, or `out` is in use.
        CheckpointError: the checkpoint is not there or damaged, no space is left, or the folder fails its certificate.
            The partial folder is removed.
    """
    out, form, dtype = arguments.out, arguments.format, DTYPES.get(arguments.dtype)
    if arguments.adapter and (Path(arguments.run_folder) / "adapter_config.json").is_file():
        with beside(out) as partial:
            said = convert_adapter(Path(arguments.run_folder), partial, arguments.base, form, dtype)
        print(f"{out}: {said}")
        return 0
    store, ledger = open_folder(arguments.run_folder, arguments)

    def write(found: Found) -> str:
        if arguments.adapter:
            architecture, weights = _read(store, found)
            tokenizer = read_tokenizer(arguments.tokenizer, architecture)
            with beside(out) as partial:
                if tokenizer is not None:
                    tokenizer.save_pretrained(partial)
                return write_adapter(architecture, weights, partial, base=arguments.base, form=form, dtype=dtype)
        exported = plan_export(store, found, dtype, merged=arguments.merge, base=arguments.base)
        tokenizer = read_tokenizer(arguments.tokenizer, exported.architecture)
        exported = replace(exported, tokenizer=tokenizer)
        return _said(export_to(exported, out, arguments.certify, arguments.file_gb * 1e9))

    print(f"{out}: {with_checkpoint(ledger, arguments.step, write)}")
    return 0


def _read(store: Store, found: Found) -> tuple[Architecture, Weights]:
    """The checkpoint's architecture, and its tensors by name without the architecture's prefix."""
    where = f"the checkpoint of step {found.commit.step} in {store.url}"
    architecture = Architecture.from_info(found.manifest.info, where)
    prefix, weights = architecture.prefix, Weights.of(store, found)
    dense = next((name for name in weights.sources if ".lora_A." in name), None)
    if dense is not None:
        raise UserError(
            f"{dense}: adapters of model.peft_config are not exported; train without peft_config, or save the model "
            "from Python with peft's save_pretrained"
        )
    named = {n.removeprefix(prefix): source for n, source in weights.sources.items() if n.startswith(prefix)}
    return architecture, replace(weights, sources=named)


def plan_export(store: Store, found: Found, dtype: str | None, *, merged: bool, base: str | None) -> Exported:
    """Plans an export.

    Args:
        dtype: as torch names it; None = as it was trained.
        merged: LoRA adapters are added to the weights.
        base: where the weights are that a checkpoint leaves out; None = where the checkpoint says.
    """
    architecture, weights = _read(store, found)
    if found.manifest.info.get(FROZEN) is not None:
        frozen = frozen_sources(found.manifest.info[FROZEN], architecture, weights.sources, base)
        weights = replace(weights, sources={**weights.sources, **frozen})
    elif base is not None:
        raise UserError("--base is for checkpoints that leave out the frozen weights, and this one holds all: drop it")
    if merged:
        weights = merge(architecture, weights, dtype)
        architecture = replace(architecture, experts=replace(architecture.experts, lora=None))
    shapes = {name: source.shape for name, source in weights.sources.items()}
    architecture.check_fits(shapes)
    try:
        native = native_of(architecture)
    except Exception as error:  # the configuration may hold anything, and transformers' classes read it
        if is_users(error):
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the checkpoint's configuration is not a valid one: {type(error).__name__}: {reason}"
        ) from error
    kinds = {source.dtype for source in weights.sources.values()}
    native.config.torch_dtype = dtype or (kinds.pop() if len(kinds) == 1 else "float32")
    targets = native.targets(shapes)
    return Exported(weights=weights, architecture=architecture, native=native, targets=targets, dtype=dtype)


def export_to(exported: Exported, out: Path, with_logits: bool | None, file_bytes: float) -> dict[str, Any]:
    """Writes the folder beside `out`, certifies it and renames it to `out`; returns the certificate."""
    config, tokenizer = exported.native.config, exported.tokenizer
    if tokenizer is not None:
        if len(tokenizer) > config.vocab_size:
            raise UserError(
                f"--tokenizer: it has {len(tokenizer)} tokens, and the model {config.vocab_size}: give the tokenizer "
                "of this model"
            )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(config, name, None) is None or exported.architecture.model_type == "mpt":
                setattr(config, name, getattr(tokenizer, name))
    with beside(out) as partial:
        write_targets(exported.weights, exported.targets, partial, dtype=exported.dtype, file_bytes=file_bytes)
        config.save_pretrained(partial)
        # not `save_pretrained`, which refuses some settings that published folders have
        (partial / "generation_config.json").write_text(_generation_of(exported).to_json_string())
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        left = copy_licences(exported.architecture.source, partial)
        certificate = certify(exported, partial, with_logits=with_logits, not_copied=left)
        if not certificate["good"]:
            raise CheckpointError(
                f"{out} is not written: the exported tensors, logits or tokenizer differ from the checkpoint: "
                + "; ".join(certificate["problems"][:3])
            )
    return certificate


def _generation_of(exported: Exported) -> GenerationConfig:
    """The source's generation settings; without a source, those of the model's configuration."""
    recorded = exported.architecture.generation
    if not recorded:
        return GenerationConfig.from_model_config(exported.native.config)
    try:
        return GenerationConfig.from_dict(dict(recorded))
    except Exception as error:  # a checkpoint may hold anything
        raise UserError(f"the checkpoint's generation settings are not valid: {error}") from error


def read_tokenizer(asked: str | None, recorded: Architecture) -> PreTrainedTokenizerBase | None:
    """The run's tokenizer, with the tokens, template and settings that the run gave it, or the one of `--tokenizer`;
    None = without one. Code in its folder is not run.
    """
    name = recorded.tokenizer if asked is None else asked
    if name in ("", NO_TOKENIZER):
        return None
    try:
        return restore_tokenizer(name, recorded.tokenizer_state if asked is None else {})
    except Exception as error:  # OSError, ValueError and others, by what is wrong
        where, reason = "the run's tokenizer" if asked is None else "--tokenizer", str(error).partition("\n")[0]
        raise UserError(
            f"{where} ({name}) cannot be read ({reason}); a checkpoint does not contain its vocabulary: give its "
            f"folder with --tokenizer FOLDER, or export without one with --tokenizer {NO_TOKENIZER}"
        ) from error


def _said(certificate: dict[str, Any]) -> str:
    logits = certificate["logits"]
    compared = f"logits were not compared: {logits.get('why')}"
    if logits["compared"]:
        compared = (
            f"logits differ by {logits['largest_difference']:.1e} of their standard deviation, over "
            f"{logits['generated']} generated tokens too"
        )
    left = f"; of the source folder {', '.join(certificate['not_copied'])} not copied" * bool(certificate["not_copied"])
    return (
        f"step {certificate['checkpoint']['step']} as {certificate['family']}; {len(certificate['tensors'])} tensors "
        f"match the checkpoint; {compared}{left}"
    )
