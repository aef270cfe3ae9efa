"""A password that is part of `endpoint_url` is in no error, no log and no `repr`."""

from __future__ import annotations

import logging
import traceback
import uuid

import pytest

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.errors import CheckpointError, StoreError, without_password
from foundry_moe.checkpoint.store import StoreOptions
from foundry_moe.launch.checkpoint_settings import CheckpointConfig, checkpoint_config
from tests.helpers.launching import free_port
from tests.helpers.s3 import Proxy

SECRET = "hunter2"
QUICK = {"timeout_s": 0.5, "attempts": 1}


def everything_said(error: BaseException, caplog) -> str:
    return "".join(traceback.format_exception(error)) + caplog.text


def folder() -> str:
    return f"s3://bucket/{uuid.uuid4()}"


def with_password(host: str, port: int) -> str:
    return f"http://user:{SECRET}@{host}:{port}"


@pytest.mark.parametrize("through", ["endpoint_url", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_store_behind_an_address_with_a_password_works_and_keeps_it(moto, caplog, monkeypatch, through) -> None:
    endpoint_url = with_password(*moto)
    if through != "endpoint_url":
        monkeypatch.setenv(through, endpoint_url)
        endpoint_url = None
    store = open_store(folder(), StoreOptions(endpoint_url=endpoint_url))
    with caplog.at_level(logging.DEBUG):
        store.put("a", b"1")
        assert store.get("a") == b"1"
        with pytest.raises(StoreError) as error:
            store.get("b")
    assert SECRET not in everything_said(error.value, caplog)
    assert SECRET not in repr(store) + repr(store.options)


@pytest.mark.parametrize("kind", ["nobody", "drop", "stall"])
def test_what_cannot_be_reached_is_said_without_the_password(moto, caplog, kind) -> None:
    proxy = Proxy(moto, lambda method, path: kind, stall_s=1.5) if kind != "nobody" else None
    port = free_port() if proxy is None else int(proxy.url.rpartition(":")[2])
    store = open_store(folder(), StoreOptions(endpoint_url=with_password("127.0.0.1", port), **QUICK))
    try:
        with caplog.at_level(logging.DEBUG), pytest.raises(StoreError) as error:
            store.put("a", b"1")
    finally:
        if proxy is not None:
            proxy.close()
    assert SECRET not in everything_said(error.value, caplog)
    assert "127.0.0.1" in str(error.value)


@pytest.mark.parametrize(
    "address",
    [
        f"http://user:{SECRET}/x@host",
        f"user:{SECRET}@host",
        f"http://user:{SECRET}@no such host",
        f"http://user:{SECRET}@host:port",
        f"http://user:{SECRET}@[::",
    ],
)
def test_an_address_that_is_none_is_said_without_the_password(moto, caplog, address) -> None:
    store = open_store(folder(), StoreOptions(endpoint_url=address, **QUICK))
    with caplog.at_level(logging.DEBUG), pytest.raises(StoreError) as error:
        store.put("a", b"1")
    assert SECRET not in everything_said(error.value, caplog)


def test_the_users_keys_are_said_without_the_password() -> None:
    address = with_password("host", 1)
    assert SECRET not in repr(checkpoint_config({"folder": "s3://b/r", "endpoint_url": address}))
    for keys in ({"endpoint_url": [address]}, {"endpoint": address}, {"region": {"x": address}}, {"keep": address}):
        with pytest.raises(ValueError) as error:
            checkpoint_config({"folder": "s3://b/r", **keys})
        assert SECRET not in "".join(traceback.format_exception(error.value)), keys
    assert CheckpointConfig(folder="s3://b/r", endpoint_url=address).store_options.endpoint_url == address


def test_errors_and_texts_leave_passwords_out() -> None:
    said = f'no answer from "https://me:{SECRET}@host:9000/b" and HTTP://{SECRET}@other'
    assert without_password(said) == 'no answer from "https://***@host:9000/b" and HTTP://***@other'
    assert str(CheckpointError(said)) == without_password(said)
    assert without_password("s3://bucket/run@2: http://host/x") == "s3://bucket/run@2: http://host/x"
