"""Describes a run's changes to its tokenizer as data in a checkpoint, and restores the tokenizer from its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from foundry_moe.schema import UserError

# arguments of `from_pretrained` that change token ids; a checkpoint is not trusted to set others
_FLAGS = (
    *("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "do_lower_case", "strip_accents"),
    *("split_special_tokens", "clean_up_tokenization_spaces", "spaces_between_special_tokens"),
)
_SIDES = ("padding_side", "truncation_side")


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """JSON data from which `restore_tokenizer` makes this tokenizer again; empty for something else."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return {}
    return {
        "flags": {key: value for key in _FLAGS if type(value := tokenizer.init_kwargs.get(key)) is bool},
        "added": [[index, token.__getstate__()] for index, token in sorted(tokenizer.added_tokens_decoder.items())],
        "special": dict(tokenizer.special_tokens_map),
        "chat_template": tokenizer.chat_template,
        # LLM Foundry sets the largest where the run sets none
        "model_max_length": tokenizer.model_max_length if tokenizer.model_max_length < VERY_LARGE_INTEGER else None,
        **{side: getattr(tokenizer, side) for side in _SIDES},
        "ids": digest_of(tokenizer),
    }


def restore_tokenizer(name: str, described: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a name or folder, changed as the run's was. Code in its folder is not run.

    Raises:
        ValueError: it is another tokenizer now. Others: it cannot be read, or the description is damaged.
    """
    flags = {key: bool(value) for key, value in described.get("flags", {}).items() if key in _FLAGS}
    sides = {side: described[side] for side in _SIDES if side in described}  # `save_pretrained` writes arguments alone
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **flags, **sides)
    if not described:
        return tokenizer
    for index, fields in described["added"]:
        token = AddedToken(**fields)
        if str(tokenizer.added_tokens_decoder.get(index, "")) != token.content:
            tokenizer.add_tokens([token], special_tokens=token.special)
    tokenizer.add_special_tokens(described["special"])
    tokenizer.chat_template = described["chat_template"]
    if described["model_max_length"] is not None:
        tokenizer.model_max_length = int(described["model_max_length"])
    if digest_of(tokenizer) != described["ids"]:
        raise UserError("its token ids differ from those of the run")
    return tokenizer


def sentence_for(tokenizer: PreTrainedTokenizerBase) -> str:
    """A sentence with every added token of a tokenizer, between words and without spaces."""
    tokens = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items())]
    return "The sum, 12 + 7, is 19.\n" + "".join(f" then {token}next{token}" for token in tokens)


def digest_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the ids of `sentence_for`."""
    ids = tokenizer(sentence_for(tokenizer), verbose=False)["input_ids"]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def differences(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> list[str]:
    """The parts in which two tokenizers differ: ids, added and special tokens, chat template, sides and length."""
    first, second = describe_tokenizer(one), describe_tokenizer(other)
    return [key for key in first if key != "flags" and first[key] != second[key]]
