"""Stores for the checkpoint tests: files, and clouds as moto, Azurite and a server of ours stand for them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.store import Store, StoreOptions
from tests.helpers.s3 import Choose, Proxy

QUICK = {"timeout_s": 1.0, "part_bytes": 5 * 2**20}


@pytest.fixture
def s3(moto) -> Store:
    """An empty folder on S3."""
    return open_store(f"s3://bucket/{uuid.uuid4()}", StoreOptions(endpoint_url=f"http://{moto[0]}:{moto[1]}", **QUICK))


@pytest.fixture
def gs(google) -> Store:
    """An empty folder on Google's API."""
    return open_store(f"gs://bucket/{uuid.uuid4()}", StoreOptions(endpoint_url=google.url, **QUICK))


@pytest.fixture
def az(azurite) -> Store:
    """An empty folder on Azure's API."""
    options = StoreOptions(endpoint_url=azurite, **{**QUICK, "timeout_s": 10.0})
    return open_store(f"az://bucket/{uuid.uuid4()}", options)


@pytest.fixture(params=["files", "s3", "gs", pytest.param("az", marks=pytest.mark.npm)])
def every_store(request, tmp_path) -> Store:
    """An empty folder, of each kind."""
    if request.param == "files":
        return open_store(str(tmp_path / "store"), StoreOptions(part_bytes=5 * 2**20))
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["files", "s3"])
def store(request, tmp_path) -> Store:
    """An empty folder, of the two kinds that are tested most."""
    if request.param == "files":
        return open_store(str(tmp_path / "store"), StoreOptions(part_bytes=5 * 2**20))
    return request.getfixturevalue("s3")


@pytest.fixture
def behind_proxy(moto) -> Iterator[Callable[[Store, Choose], tuple[Store, Proxy]]]:
    """Makes the same S3 folder reachable through a proxy with faults."""
    proxies = []

    def make(store: Store, choose: Choose) -> tuple[Store, Proxy]:
        proxy = Proxy(moto, choose, stall_s=1.5)
        proxies.append(proxy)
        return open_store(store.url, StoreOptions(endpoint_url=proxy.url, **QUICK)), proxy

    yield make
    for proxy in proxies:
        proxy.close()
