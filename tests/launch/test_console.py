"""What a run's console shows: facts as bare sentences, other records with their rank, no configuration."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from composer.loggers import ConsoleLogger, InMemoryLogger, Logger
from omegaconf import OmegaConf

from foundry_moe.launch.console import record_config, set_console

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("rank", ["0", "1"])
def test_facts_are_printed_by_rank_0_alone_and_without_a_time(rank, monkeypatch, capsys) -> None:
    ours = logging.getLogger("foundry_moe")
    monkeypatch.setattr(ours, "propagate", True)
    monkeypatch.setattr(ours, "level", ours.level)
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setenv("RANK", rank)
    set_console(OmegaConf.create())
    child = logging.getLogger("foundry_moe.launch.test_console")
    logging.basicConfig()  # as LLM Foundry's
    child.info("mesh %s", "1x2")
    child.warning("no answer")
    *facts, warning = capsys.readouterr().err.splitlines()
    assert facts == (["mesh 1x2"] if rank == "0" else [])
    assert warning.endswith(f": rank{rank}: WARNING: foundry_moe.launch.test_console: no answer")


def test_the_configuration_goes_to_loggers_but_not_to_the_console(capsys) -> None:
    memory, console = InMemoryLogger(), ConsoleLogger()
    logger = Logger(state=SimpleNamespace(), destinations=[memory, console])
    record_config(logger, {"seed": 17})
    assert logger.destinations == (memory, console)
    assert memory.hyperparameters == {"seed": 17} and console.hparams == {}
    assert capsys.readouterr() == ("", "")
