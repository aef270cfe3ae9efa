"""Settings of a run's console: third-party warnings that every run repeats, log records, Composer's console loggers.

Importing it imports neither torch nor Composer.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import struct
import sys
import termios
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

# warnings of third parties about their own code, by how they begin
_WARNINGS = (
    "pkg_resources is deprecated",
    "alibi or rope is turned on",
    "The `use_auth_token` argument is deprecated",  # LLM Foundry passes it
    "Using a non-tuple sequence for multidimensional indexing",
    "FSDP2 Config/APIs are experimental",
    "The _fsdp_wrap attribute will be removed",
    "To copy construct from a tensor",
    "'pin_memory' argument is set as true but no accelerator is found",
    r"FSDP is not applicable for single-GPU training",
    r"barrier\(\): using the device under current context",
    "Dynamo detected a call to a `functools.lru_cache`",
)
_OF_TRACKER = "ignore:resource_tracker:UserWarning"
# by logger, a pattern of the records to drop
_RECORDS = {
    "transformers.modeling_utils": "has generative capabilities",
    "transformers.modeling_rope_utils": "Unrecognized keys in `rope_scaling`",
    # LLM Foundry reads this key for Hugging Face datasets, and does not list it
    "llmfoundry.data.finetuning.dataloader": "extraneous keys: shuffle_seed$",
}


def quiet_third_parties() -> None:
    """Drops the warnings above. Call it before the packages are imported, and after Composer, which adds filters."""
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # multiprocessing's resource tracker prints it after the last line of a run that was stopped
    given = os.environ.get("PYTHONWARNINGS", "")
    if _OF_TRACKER not in given:
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (given, _OF_TRACKER)))
    for name, pattern in _RECORDS.items():
        logging.getLogger(name).addFilter(partial(_lacks, pattern))


def _lacks(pattern: str, record: logging.LogRecord) -> bool:
    return re.search(pattern, record.getMessage()) is None


class _Console(logging.Handler):
    """Writes records to stderr, above a progress bar; those of level INFO without time, rank and module."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # not in the base install

        text = record.getMessage() if record.levelno == logging.INFO else self.format(record)
        with contextlib.suppress(OSError):  # a terminal that is closed does not end a run
            tqdm.write(text, file=sys.stderr)


def set_console(run: DictConfig) -> None:
    """Fills in keys of the console that the run leaves out, and shows this package's log records of level INFO.

    `progress_bar`: on a terminal. `callbacks.run_report`, a line per interval: where there is no bar. `log_to_console`:
    false, where LLM Foundry prints a line per metric and batch. `python_log_level`: WARNING, where it has DEBUG.
    """
    run.setdefault("progress_bar", sys.stderr.isatty() and not run.get("log_to_console"))
    run.setdefault("log_to_console", False)
    if not run["progress_bar"] and not run["log_to_console"]:
        run.callbacks = {"run_report": {}, **(run.get("callbacks") or {})}
    if run["progress_bar"] and sys.stderr.isatty():
        _set_size(sys.stderr.fileno())
    run.setdefault("python_log_level", "WARNING")
    rank = os.environ.get("RANK", "0")
    console = _Console()
    console.setFormatter(logging.Formatter(f"%(asctime)s: rank{rank}: %(levelname)s: %(name)s: %(message)s"))
    ours = logging.getLogger("foundry_moe")
    ours.handlers[:] = [console]
    ours.setLevel(logging.INFO if rank == "0" else logging.WARNING)
    ours.propagate = False  # LLM Foundry's own handler would print each record once more


def _set_size(terminal: int) -> None:
    """Sets 80 columns and 24 rows where a terminal reports 0, as without a window: tqdm prints no bar there."""
    if 0 in os.get_terminal_size(terminal):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))


def record_config(logger: Any, config: dict[str, Any]) -> None:
    """In place of LLM Foundry's `log_config`, which prints the configuration: gives it to loggers of metrics only."""
    from composer.loggers import ConsoleLogger, ProgressBarLogger

    everyone = logger.destinations
    logger.destinations = tuple(one for one in everyone if not isinstance(one, ConsoleLogger | ProgressBarLogger))
    try:
        logger.log_hyperparameters(config)
    finally:
        logger.destinations = everyone
