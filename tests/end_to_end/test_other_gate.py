"""A gate of another package, found by its entry point, in LLM Foundry's whole trainer: YAML, launcher, checkpoint."""

from __future__ import annotations

import sys
import textwrap

import pytest
import yaml

from tests.helpers.demo import BIN, DEMO, run

GATE = '''
from dataclasses import dataclass

import torch
from foundry_moe.layers.gates.gate import Choices, Gate


class RoundRobin(Gate):
    """Token t to expert (t + offset + steps) mod E; counts its steps, and stops if the count is not the batch's."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Gate.Config):
        offset: int = 0

    def __init__(self, config, **shape):
        super().__init__(config, **shape)
        self.scale_E = torch.nn.Parameter(torch.empty(self.num_experts, dtype=shape["dtype"], device=shape["device"]))
        self.register_buffer("steps_1", torch.zeros(1, dtype=torch.int64, device=shape["device"]))

    @torch.no_grad()
    def reset_parameters(self, *, seed, layer, std):
        self.scale_E.fill_(1.0)
        self.steps_1.zero_()

    uses_loads = True

    def after_step(self, counts_E, progress):
        assert len(set(counts_E.tolist())) == 1, "round robin is even over all ranks and microbatches"
        self.steps_1 += 1

    def forward(self, x_TD, context):
        steps = int(self.steps_1)
        if self.training and steps != self.progress(context).ba:
            raise RuntimeError(f"{steps} steps counted at batch {self.progress(context).ba}")
        experts_T = (torch.arange(len(x_TD), device=x_TD.device) + self.config.offset + steps) % self.num_experts
        return Choices(experts_TK=experts_T[:, None], weights_TK=self.scale_E[experts_T][:, None].float())
'''


@pytest.fixture
def installed(tmp_path):
    """A folder as `pip install` leaves it: a module and its metadata."""
    (tmp_path / "othergates.py").write_text(GATE)
    info = tmp_path / "othergates-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: othergates\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        textwrap.dedent(
            """
            [foundry_moe_gates]
            round_robin = othergates:RoundRobin
            """
        )
    )
    return tmp_path


def written(folder, gate):
    """The demo's YAML with this gate."""
    settings = yaml.safe_load(DEMO.read_text())
    settings["model"]["moe"].update(top_k=1, gate=gate, loss={})
    mine = folder / "mine.yaml"
    mine.write_text(yaml.safe_dump(settings))
    return mine


@pytest.mark.slow
def test_it_trains_on_two_processes_and_its_state_is_resumed(installed, tiny_arguments):
    mine = written(installed, {"name": "round_robin", "offset": 3})
    composer = (BIN / "composer", "-n", "2", "foundry_moe/train.py", mine, *tiny_arguments(installed / "run"))
    for batches in (3, 6):
        done = run(*composer, f"max_duration={batches}ba", PYTHONPATH=str(installed))
        assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming at batch 3" in done.stdout and "batch 6/6ba" in done.stdout
    assert "fullest expert 12.5% (even 12.5%)" in done.stdout


def test_a_mistake_in_its_keys_is_named_as_ours_are(installed, capsys, monkeypatch):
    from foundry_moe import train

    mine = written(installed, {"name": "round_robin", "ofset": 3})
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setattr(sys, "argv", ["train.py", str(mine)])
    with pytest.raises(SystemExit) as stopped:
        train.main()
    assert stopped.value.code == 2
    assert "gate.ofset is not a key of gate; did you mean 'offset'" in capsys.readouterr().err
    sys.modules.pop("othergates", None)
