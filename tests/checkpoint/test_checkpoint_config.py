"""What a user may write under `elastic_checkpoint`, and the sentence for what they may not."""

from __future__ import annotations

import pytest

from foundry_moe.checkpoint.store import StoreOptions
from foundry_moe.launch.checkpoint_settings import checkpoint_config

pytestmark = pytest.mark.quick


def test_defaults_and_units() -> None:
    config = checkpoint_config({"folder": "s3://bucket/run", "keep_every": "10ba", "async": False, "resume": 500})
    assert (config.every.amount, config.every.unit) == (1800.0, "sec")
    assert config.keep_every_batches == 10 and config.asynchronous is False and config.resume == 500
    assert config.store_options.timeout_s == 60.0
    config = checkpoint_config({"folder": "/a", "timeout": "2.5s", "grace": "0.5h"})
    assert (config.store_options.timeout_s, config.grace_s) == (2.5, 1800.0)
    config = checkpoint_config({"folder": "/a", "endpoint_url": "http://h:1", "region": "r", "profile": "p"})
    assert config.store_options == StoreOptions(endpoint_url="http://h:1", region="r", profile="p", timeout_s=60.0)
    assert checkpoint_config({"folder": "/a", "interval": "1ep"}).every.unit == "ep"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, r"callbacks.elastic_checkpoint.folder is missing"),
        ({"folder": "/a", "intervall": "1ba"}, "intervall is not a key.*did you mean 'interval'"),
        ({"folder": "hdfs://b/run"}, "hdfs: is not supported; use s3://bucket/run, gs://bucket/run, az://"),
        ({"folder": " "}, "folder is empty"),
        ({"folder": "/a", "interval": "often"}, r"interval \(often\) must be a time \(90s, 30m, 2h\)"),
        ({"folder": "/a", "interval": 500}, r"interval must be a time \(90s, 30m, 2h\) or a whole count .*, not 500"),
        ({"folder": "/a", "interval": "0ba"}, r"interval \(0ba\)"),
        ({"folder": "/a", "interval": "1.5ep"}, r"interval \(1.5ep\)"),
        ({"folder": "/a", "keep": 0}, r"keep \(0\) must be at least 1"),
        ({"folder": "/a", "keep_every": "1h"}, r"keep_every \(1h\) must be in batches"),
        ({"folder": "/a", "resume": "yes"}, r"resume \(yes\) must be auto, never, or a step"),
        ({"folder": "/a", "resume": -1}, r"resume \(-1\) must be auto"),
        ({"folder": "/a", "max_failures": 0}, "max_failures"),
        ({"folder": "/a", "timeout": "3ba"}, r"timeout \(3ba\) must be a time"),
        ({"folder": "/a", "grace": "1ba"}, r"grace \(1ba\) must be a time"),
        ({"folder": "/a", "signals": ["SIGKILL"]}, r"signals \(SIGKILL\) must be among SIGTERM"),
        ({"folder": "/a", "signals": "SIGTERM"}, "signals must be a list of signals' names"),
        ({"folder": "/a", "max_nonfinite": 0}, r"max_nonfinite \(0\) must be at least 1, or null"),
        ({"folder": "/a", "on_nonfinite": "skip"}, r"on_nonfinite \(skip\) must be stop or rewind"),
        ({"folder": "/a", "async": "maybe"}, "asynchronous must be true or false"),
    ],
)
def test_what_cannot_be_is_one_sentence(keys, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        checkpoint_config(keys)
