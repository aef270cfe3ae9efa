"""The base install, as these tests have it (`make test-transformers`): no Composer, and what works without it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOSTS = ("composer", "llmfoundry", "streaming")
pytestmark = pytest.mark.skipif(any(map(find_spec, HOSTS)), reason="this environment has Composer or LLM Foundry")

IMPORT_ALL = """
import pkgutil, sys
from importlib import import_module

import foundry_moe, foundry_moe_kernels

names = []
for part in ("config", "schema", "ops", "layers", "parallel", "checkpoint", "integrations"):
    module = import_module(f"foundry_moe.{part}")
    names.append(module.__name__)
    names += [found.name for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + ".")]
names += [found.name for found in pkgutil.walk_packages(foundry_moe_kernels.__path__, "foundry_moe_kernels.")]
for name in names:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "obstore":  # of the extras gcs and azure
            raise
hosts = sorted({name.split(".")[0] for name in sys.modules} & {"composer", "llmfoundry", "streaming"})
print(len(names), "modules", hosts)
"""

SAVE = """
import sys
import torch
from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.engine import CheckpointEngine

store, saved = open_store(sys.argv[1]), torch.arange(9000.0)
engine = CheckpointEngine(store)
engine.save({"model": {"w": saved}}, 1)
report = engine.wait()
assert report is not None and report.error is None, report
state = {"model": {"w": torch.zeros(9000)}}
CheckpointEngine(store).load(state)
print(torch.equal(state["model"]["w"], saved))
"""


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a folder that has no sources, so that the installed packages are imported."""
    dropped = ("PYTHONPATH", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=550
    )


def test_every_module_of_the_core_imports_without_composer(tmp_path):
    done = run("-c", IMPORT_ALL, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    number, _, hosts = done.stdout.strip().split(" ", 2)
    assert int(number) > 100 and hosts == "[]"


def test_a_checkpoint_is_saved_and_loaded_with_the_newest_dependencies(tmp_path):
    done = run("-c", SAVE, str(tmp_path / "run"), folder=tmp_path)
    assert done.stdout.strip() == "True", done.stderr[-4000:]


def test_training_command_names_the_extra_that_is_missing(tmp_path):
    done = run("-m", "foundry_moe.train", str(ROOT / "yamls/demo/cpu.yaml"), folder=tmp_path)
    assert done.returncode == 2
    assert "the training command needs composer and llmfoundry" in done.stderr
    assert "pip install '.[foundry]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("program", "arguments", "last_line"),
    [("fsdp2_checkpoint", (), "step 6"), ("plain_pytorch", ("4",), "step 4")],
    ids=["writer_and_reader", "layers_and_mesh"],
)
def test_programs_of_the_core_run(program, arguments, last_line, tmp_path):
    launcher = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(ROOT / f"examples/{program}.py"),
    )
    for _ in range(2 if program == "fsdp2_checkpoint" else 1):  # the second time resumes
        done = run(*launcher, str(tmp_path / "run"), *arguments, folder=tmp_path)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert last_line in done.stdout
