"""Manifests of a checkpoint, each forged in one way."""

from __future__ import annotations

import base64
import zlib

DTYPE, SHAPE, OFFSETS, SIZES, OBJECTS, STARTS, HASHES = range(7)


def column(place, index, value, name="model.experts"):
    """Changes one number, or the whole of one column, of a tensor."""

    def change(body):
        if index is None:
            body["tensors"][name][place] = value
        else:
            body["tensors"][name][place][index] = value

    return change


def halves(first: int, second: int, start=2048 * 2):
    """The experts in two blocks of two experts each, which begin at these."""

    def change(body) -> None:
        columns = body["tensors"]["model.experts"]
        columns[OFFSETS], columns[SIZES] = [first, 0, 0, second, 0, 0], [2, 16, 64] * 2
        columns[OBJECTS], columns[STARTS] = columns[OBJECTS] * 2, [columns[STARTS][0], columns[STARTS][0] + start]
        columns[HASHES] *= 2

    return change


def drop_block(body) -> None:
    body["tensors"]["model.experts"][OFFSETS:] = [], [], [], [], ""


def share_bytes(body) -> None:
    body["tensors"]["model.view"][STARTS] = body["tensors"]["model.dense"][STARTS]


def nested(depth):
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def put(*path, value):
    def change(body):
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


BOMB = {"$z": base64.b85encode(zlib.compress(bytes(2**28), 9)).decode()}


MANIFESTS = {
    "an object that is not listed": column(OBJECTS, 0, 7),
    "a negative object": column(OBJECTS, 0, -1),
    "a huge integer": column(STARTS, 0, 10**30),
    "a start behind the end": column(STARTS, 0, 2**40),
    "a start that is not aligned": column(STARTS, 0, 3),
    "a fraction as an offset": column(OFFSETS, 0, 0.5),
    "a text as an offset": column(OFFSETS, 0, "0"),
    "a negative offset": column(OFFSETS, 0, -1),
    "an offset out of bounds": column(OFFSETS, 0, 4),
    "sizes out of bounds": column(SIZES, 0, 9),
    "a size of nothing": column(SIZES, 0, 0),
    "too few offsets": column(OFFSETS, None, [0]),
    "nested offsets": column(OFFSETS, None, [[0, 0, 0]] * 4),
    "an unknown dtype": column(DTYPE, None, "float31"),
    "a dtype that is none": column(DTYPE, None, ["float32"]),
    "another dtype of the same size": column(DTYPE, None, "complex128"),
    "a larger shape": column(SHAPE, 0, 8),
    "a huge shape": column(SHAPE, None, [2**31, 2**31, 2**31]),
    "a negative dimension": column(SHAPE, 0, -4),
    "a shape of texts": column(SHAPE, None, ["4", "16", "64"]),
    "ninety dimensions": column(SHAPE, None, [1] * 90),
    "hashes of another length": column(HASHES, None, "00"),
    "hashes that are none": column(HASHES, None, "zz" * 32),
    "a column too few": lambda body: body["tensors"]["model.experts"].pop(),
    "a block that is missing": drop_block,
    "a block twice and another not": halves(0, 0),
    "blocks that overlap": halves(0, 1),
    "two blocks of overlapping bytes": halves(0, 2, start=64),
    "two blocks of the same bytes": share_bytes,
    "no such tensor": lambda body: body["tensors"].pop("model.dense"),
    "a tensor that nothing refers to": lambda body: body["values"]["model"].pop("dense"),
    "a tensor that is referred to twice": put("values", "more", value={"$ref": "model.dense"}),
    "an inline tensor of the same name": put("values", "model.dense", value={"$tensor": ["int8", [1], {"$b": "00"}]}),
    "an inline tensor whose name writes to the terminal": put(
        "values", "model", "\x1b[2J", value={"$tensor": ["int8", [1], {"$b": "00"}]}
    ),
    "an object's size as text": lambda body: body["objects"][0].__setitem__(1, "7"),
    "an object that is larger than in the store": lambda body: body["objects"][0].__setitem__(1, 10**6),
    "an object elsewhere": lambda body: body["objects"][0].__setitem__(0, "../../other/data/000000.bin"),
    "an object twice": lambda body: body["objects"].append(body["objects"][0]),
    "no objects": put("objects", value=[]),
    "a billion processes": put("info", "world_size", value=10**9),
    "a step as text": put("info", "step", value="2"),
    "another step": put("info", "step", value=1),
    "a mesh of texts": put("info", "mesh", value={"expert": "2"}),
    "a mesh that writes to the terminal": put("info", "mesh", value={"\x1b[2J": 2}),
    "half a character": put("info", "torch", value="\ud800"),
    "info that is no object": put("info", value=[]),
    "another format": put("format", value=[2]),
    "no values": lambda body: body.pop("values"),
    "tensors that are no object": put("tensors", value=[1]),
    "an unknown tag": put("values", "x", value={"$call": ["os.system", "true"]}),
    "a tag that is not alone": put("values", "x", value={"$tuple": [], "y": 1}),
    "a tag of another kind": put("values", "x", value={"$tuple": 5}),
    "an inline tensor of unknown dtype": put("values", "x", value={"$tensor": ["object", [1], {"$b": ""}]}),
    "an inline tensor that is short": put("values", "x", value={"$tensor": ["int64", [2**40], {"$b": "00"}]}),
    "an array of objects": put("values", "x", value={"$numpy": ["|O", [1], {"$b": "0000000000"}]}),
    "an array of a large type": put("values", "x", value={"$numpy": ["(99999999,99)i4", [0], {"$b": ""}]}),
    "a set of lists": put("values", "x", value={"$set": [[1]]}),
    "a time of text": put("values", "x", value={"$timedelta": ["1", 0, 0]}),
    "a time beyond all": put("values", "x", value={"$timedelta": [2**49, 0, 0]}),
    "a device that is none": put("values", "x", value={"$device": "gpu9"}),
    "values that are deep": put("values", "x", value=nested(400)),
    "a byte string that grows": put("values", "x", value=BOMB),
    "a manifest that is a list": lambda body: [body],
    "a manifest that is a number": lambda body: 7,
}
