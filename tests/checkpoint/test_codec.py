"""Values come back exactly, from JSON alone; what cannot is refused by its path."""

from __future__ import annotations

import datetime
import enum
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundry_moe.checkpoint import codec
from foundry_moe.checkpoint.codec import DTYPES, decode, encode, tensor_bytes, tensor_from_bytes
from foundry_moe.checkpoint.errors import DamagedError

pytestmark = pytest.mark.quick

KEYS = st.one_of(st.text(max_size=5), st.integers(), st.just("$tuple"), st.booleans())
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3), st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_plain_values_come_back(value) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and repr(back) == repr(value)


def test_odd_values_come_back() -> None:
    value = {
        "time": datetime.timedelta(days=3, microseconds=7),
        "before": -datetime.timedelta(hours=1),
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "numbers": (math.inf, -0.0, 1e-310),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(1.5),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "set": {1, 2},
        "long": b"\0" * 10_000,
        1: {"a": None},
    }
    back = decode(json.loads(json.dumps(encode(value))))
    assert repr(back) == repr(value) and isinstance(back["size"], torch.Size)
    back["array"] += 1  # memory of its own
    assert math.isnan(decode(encode(math.nan)))
    members = [enum.Enum("Pair", {"A": (1, "x")}).A, enum.IntEnum("Number", {"A": 7}).A]
    assert repr(decode(json.loads(json.dumps(encode(members))))) == "[(1, 'x'), 7]", "by their values"
    assert len(json.dumps(encode(value["long"]))) < 200


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_dtype_come_back_bit_for_bit(name) -> None:
    raw = bytes(range(240))
    tensor = tensor_from_bytes(raw if name != "bool" else bytes(i % 2 for i in range(240)), DTYPES[name], (-1,))
    back = decode(json.loads(json.dumps(encode(tensor.reshape(3, -1)))))
    assert back.dtype == DTYPES[name] and tensor_bytes(back) == tensor_bytes(tensor) and back.shape[0] == 3
    assert decode(encode(torch.empty(0, 3, dtype=DTYPES[name]))).shape == (0, 3)
    tensor.zero_()
    assert raw == bytes(range(240)), "memory of its own"


def test_equal_sets_are_written_equally_in_all_processes() -> None:
    names = [f"name {number}" for number in range(10, 40)]
    assert encode(set(names)) == {"$set": names}


def test_compressed_bytes_have_one_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    one = encode(bytes(8000))
    monkeypatch.setattr(codec, "INFLATED_BYTES", 10_000)
    assert decode([one]) == [bytes(8000)]
    with pytest.raises(DamagedError, match="become more than 2000"):
        decode([one, one])
    with pytest.raises(ValueError, match="exceed 1 GiB"):
        encode([bytes(8000)] * 2)


def test_what_json_cannot_hold_is_named_by_its_path() -> None:
    with pytest.raises(TypeError, match=r"callbacks\.Mine\.thing is a builtins\.object, which a checkpoint cannot"):
        encode({"callbacks": {"Mine": {"thing": object()}}})


def test_nothing_in_a_file_runs_code() -> None:
    """Tags are a fixed set; none names a type to import."""
    with pytest.raises(DamagedError, match="unknown tag"):
        decode({"$call": ["os.system", "true"]})


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": ["float32", [2], {"$b": ""}]},
        {"$tensor": ["float31", [0], {"$b": ""}]},
        {"$tuple": [], "more": 1},
        {"$tensor": ["float32", [-1], {"$b": ""}]},
        {"$size": [1, "2"]},
        {"$dtype": "object"},
        {"$device": "nonsense"},
        {"$set": [[1]]},
        {"$ref": 3},
    ],
)
def test_what_no_save_writes_is_refused(value) -> None:
    with pytest.raises(DamagedError):
        decode(value, tensor=str)
