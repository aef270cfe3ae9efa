"""Fixtures and rules for all tests."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch, Composer and tokenizers are imported: one thread, no hub.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    # else `torch.cuda.is_available` starts CUDA, also in the fork server, whose processes could not use it then
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}.items():
    os.environ.setdefault(name, value)

import pytest
import torch

from tests.helpers import interpreter
from tests.helpers.clouds import NO_ACCOUNT, Azurite, GoogleServer
from tests.helpers.s3 import Moto

if not torch.cuda.is_available():  # before any kernel is defined: Triton then runs them on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")
interpreter.hurry()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and there is none")
    too_slow = pytest.mark.skip(reason="takes minutes: run with --slow")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(too_slow)


def pytest_collection_finish() -> None:
    """Collections of garbage skip what is imported by now: else each takes half a second, in some tests hundreds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test draws the same numbers on every run; those on the CPU draw there, as the processes they start do."""
    torch.manual_seed(0)
    if torch.cuda.is_available() and "gpu" not in request.keywords:
        monkeypatch.setattr("foundry_moe.layers.init.drawing_device", lambda device: device)


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text as the demo has it (tokenizer, `train`, `val`, `facts.json`), of 25 speeches."""
    from examples.demo_data import prepare

    folder = tmp_path_factory.mktemp("text")
    prepare(folder, speeches=25)
    return folder


@pytest.fixture(scope="session")
def tiny_arguments(tiny_text: Path) -> Callable[[Path], list[str]]:
    """A function of a run's folder: arguments after the demo's YAML that make its run tiny, on `tiny_text`."""

    def arguments(folder: Path) -> list[str]:
        return [
            f"variables.data={tiny_text}",
            f"variables.run={folder}",
            "model.d_model=32",
            "model.n_layers=2",
            "model.moe.expert_hidden_size=32",
            "max_duration=6ba",
            "eval_interval=6ba",
            "eval_subset_num_batches=1",
            "callbacks.elastic_checkpoint.interval=3ba",
            "global_train_batch_size=4",
            "device_train_microbatch_size=2",
            "callbacks.run_report.interval=2ba",
            "callbacks.run_report.sample_tokens=4",
            "scheduler.t_warmup=2ba",
        ]

    return arguments


@pytest.fixture(scope="session")
def moto() -> Iterator[tuple[str, int]]:
    """Host and port of an S3 server that has the bucket `bucket`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with Moto() as server:
            yield "127.0.0.1", server.port


@pytest.fixture(scope="session")
def azurite() -> Iterator[str]:
    """The endpoint of Azurite, which has the container `bucket`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
            patch.delenv(name, raising=False)  # which are set, and restored
        try:
            server = Azurite()
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(str(error))
        with server:
            yield server.url


@pytest.fixture(scope="session")
def google() -> Iterator[GoogleServer]:
    """A server of Google's XML API that has the bucket `bucket` and asks for no credentials."""
    with pytest.MonkeyPatch.context() as patch, GoogleServer() as server:
        patch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", NO_ACCOUNT)
        yield server
