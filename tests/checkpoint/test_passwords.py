"""A password that is part of `endpoint_url` is in no error, no log and no `repr`."""

from __future__ import annotations

import logging
import traceback
import uuid

import pytest

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.errors import CheckpointError, DeniedError, StoreError, without_secrets
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
        f"http://host/?token={SECRET}",
        f"http://host#{SECRET}",
        f"ftp://host/{SECRET}",
        f"http:/host/{SECRET}",
        f"http://?token={SECRET}",
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
    assert without_secrets(said) == 'no answer from "https://***@host:9000/b" and HTTP://***@other'
    assert str(CheckpointError(said)) == without_secrets(said)
    assert without_secrets(f"s3://me:{SECRET}@bucket/run, 2 GB") == "s3://***@bucket/run, 2 GB"
    with pytest.raises(ValueError, match="its bucket has a user or password: give credentials") as error:
        checkpoint_config({"folder": f"s3://me:{SECRET}@bucket/run"})
    assert SECRET not in "".join(traceback.format_exception(error.value))
    for kept in ("s3://bucket/run@2: http://host/x", "s3://bucket/a?b#c is empty", "file:///a?b", "see http://h:1; or"):
        assert without_secrets(kept) == kept
    said = f"error sending request for url (https://h:1/b?sig={SECRET}&x=1) at ftp://h/a#{SECRET}, http:/h/?k={SECRET}"
    assert without_secrets(said) == "error sending request for url (https://h:1/b?***) at ftp://h/a?***, http:/h/?***"


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        (f"http://host/?token={SECRET}", r"endpoint_url \(http://host/\?\*\*\*\) must be http://host:port without"),
        (
            f"https://host#{SECRET}",
            "must be http://host:port without an @ outside of its host part, a query or a fragment",
        ),
        ("ftp://host", "must begin with http:// or https:// and name a host"),
        ("http:/host", "must begin with http://"),
        ("host:9000", "must begin with http://"),
        ("http://", "must begin with http://"),
        ("http://no such host", "must begin with http://"),
        ("http://host:port", "must begin with http://"),
    ],
)
def test_a_check_refuses_what_is_no_address_of_a_server(address, sentence) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        checkpoint_config({"folder": "s3://b/r", "endpoint_url": address})
    assert SECRET not in str(error.value)


def test_an_address_of_the_environment_with_a_query_is_said_without_it(monkeypatch, caplog) -> None:
    for address in (f"http://127.0.0.1:1/?token={SECRET}", f"ftp://h/{SECRET}", f"http:/h/{SECRET}"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        with caplog.at_level(logging.DEBUG), pytest.raises(DeniedError, match="the endpoint_url of AWS_") as error:
            open_store(folder(), StoreOptions(**QUICK)).put("a", b"1")
        assert SECRET not in everything_said(error.value, caplog).replace("File", "")


@pytest.mark.parametrize("variable", ["GOOGLE_BASE_URL", "AZURE_ENDPOINT"])
def test_obstores_errors_are_said_without_a_query(monkeypatch, caplog, variable) -> None:
    monkeypatch.setenv(variable, f"http://127.0.0.1:1/x?token={SECRET}")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "a")
    with pytest.raises(StoreError) as error:
        open_store(f"{'gs' if 'GOOGLE' in variable else 'az'}://bucket/run", StoreOptions(**QUICK)).put("a", b"1")
    assert SECRET not in everything_said(error.value, caplog)
