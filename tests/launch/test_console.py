"""What a run's console shows: facts as bare sentences, other records with their rank, no configuration."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from types import SimpleNamespace

import pytest
from composer.core import Time
from composer.loggers import ConsoleLogger, InMemoryLogger, Logger, ProgressBarLogger
from omegaconf import OmegaConf

from foundry_moe.launch.console import record_config, set_console

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _same_logger(monkeypatch) -> None:
    """Restores the package's logger, which `set_console` changes."""
    ours = logging.getLogger("foundry_moe")
    monkeypatch.setattr(ours, "propagate", True)
    monkeypatch.setattr(ours, "level", ours.level)
    monkeypatch.setattr(ours, "handlers", [])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_facts_are_printed_by_rank_0_alone_and_without_a_time(rank, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", rank)
    set_console(OmegaConf.create())
    child = logging.getLogger("foundry_moe.launch.test_console")
    logging.basicConfig()  # as LLM Foundry's
    child.info("mesh %s", "1x2")
    child.warning("no answer")
    *facts, warning = capsys.readouterr().err.splitlines()
    assert facts == (["mesh 1x2"] if rank == "0" else [])
    assert warning.endswith(f": rank{rank}: WARNING: foundry_moe.launch.test_console: no answer")


def test_a_fact_is_printed_once_however_often_the_console_is_set(capsys) -> None:
    for _ in range(2):  # a script may train twice
        set_console(OmegaConf.create())
    logging.getLogger("foundry_moe.launch.test_console").info("mesh 1x2")
    assert capsys.readouterr().err == "mesh 1x2\n"


def test_a_terminal_without_a_size_shows_a_progress_bar(monkeypatch) -> None:
    screen, terminal = os.openpty()  # of 0 columns and rows
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        run = OmegaConf.create()
        set_console(run)
        assert run.progress_bar and not run.log_to_console
        logger = ProgressBarLogger(stream=stderr)
        state = SimpleNamespace(dataloader_label="train", max_duration=Time.from_input("3ba"), dataloader_len=None)
        logger.init(state, None)
        logger.epoch_start(state, None)
        os.set_blocking(screen, False)
        shown = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                shown += os.read(screen, 4096)
        assert re.search(rb"train .*0/3", shown)
        logger.close(state, None)
    os.close(screen)


def test_without_a_terminal_there_is_no_progress_bar(monkeypatch, tmp_path) -> None:
    with (tmp_path / "stderr").open("w") as file:
        monkeypatch.setattr("sys.stderr", file)
        run, reported = OmegaConf.create(), OmegaConf.create({"callbacks": {"run_report": {"interval": "7ba"}}})
        logged = OmegaConf.create({"log_to_console": True})
        for one in (run, reported, logged):
            set_console(one)
    assert (run.progress_bar, run.log_to_console, run.callbacks) == (False, False, {"run_report": {}})
    assert (reported.log_to_console, reported.callbacks.run_report.interval) == (False, "7ba")
    assert logged == {"progress_bar": False, "log_to_console": True, "python_log_level": "WARNING"}


def test_the_configuration_goes_to_loggers_but_not_to_the_console(capsys) -> None:
    memory, console = InMemoryLogger(), ConsoleLogger()
    logger = Logger(state=SimpleNamespace(), destinations=[memory, console])
    record_config(logger, {"seed": 17})
    assert logger.destinations == (memory, console)
    assert memory.hyperparameters == {"seed": 17} and console.hparams == {}
    assert capsys.readouterr() == ("", "")
