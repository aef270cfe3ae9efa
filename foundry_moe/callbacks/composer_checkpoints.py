"""How Composer's `load_path` is read in a run with `elastic_checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer.trainer import trainer


def load_elsewhere(is_ours: Callable[[str], bool], load: Callable[[str, bool, list[str]], None]) -> Callable[[], None]:
    """Keeps Composer from reading some `load_path` until the function that is returned is called: see
    docs/explanation/design.md.

    `load_path` names the starting point of a run, or the checkpoint that `autoresume` has found.

    Args:
        is_ours: called with `load_path`; whether Composer must not read it.
        load: called instead, with `load_path`, `load_weights_only` and the names of other keys that are set.
    """
    create, original = trainer.maybe_create_object_store_from_uri, trainer.checkpoint.load_checkpoint
    ours = ""

    def create_object_store(uri: str) -> Any:
        nonlocal ours
        ours = uri if is_ours(uri) else ""
        return None if ours else create(uri)

    def load_checkpoint(path: str, *args: Any, **keys: Any) -> Any:
        if not ours:
            return original(path, *args, **keys)
        others = [f"load_{key}" for key in ("ignore_keys", "exclude_algorithms") if keys.get(key)]
        load(ours, keys.get("load_weights_only", False), others)
        return None

    def restore() -> None:
        trainer.maybe_create_object_store_from_uri, trainer.checkpoint.load_checkpoint = create, original

    trainer.maybe_create_object_store_from_uri = create_object_store
    trainer.checkpoint.load_checkpoint = load_checkpoint
    return restore
