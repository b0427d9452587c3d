"""JSON that others may have written: within limits and of the shape asked for, or one error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from maestro_lod.errors import CheckpointError
from maestro_lod.files.json_files import (
    DEEPEST,
    LARGEST,
    parse_json,
    read_json_file,
    require_depth,
    require_shape,
)

POINT = {"ranks": {str: int}, "loss": float, "latency?": float | None}


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ({"any": "thing"}, dict),
        (3, int), (3, float), (2.5, float), (None, float | None), ("a", str), (True, bool),
        ([1, 2], [int]), ([], [int]), ({"a": 1}, {str: int}),
        ({"ranks": {"a": 1}, "loss": 2, "more": []}, POINT),
        ({"ranks": {}, "loss": 2.5, "latency": None}, POINT),
        (None, ([int], None)), ([3], ([int], None)),
    ],
)  # fmt: skip
def test_what_has_the_shape_is_accepted(value: Any, shape: Any) -> None:
    require_shape(value, shape)
    assert parse_json(json.dumps(value), shape) == value


@pytest.mark.parametrize(
    ("value", "shape", "message"),
    [
        ([], dict, "the content is a list instead of an object"),
        (True, int, "the content is true or false instead of a whole number"),
        (2.0, int, "the content is a number instead of a whole number"),
        ("1", float | None, "the content is text instead of a number or null"),
        (None, dict, "the content is null instead of an object"),
        ([1, "2"], [int], r"\[1\] is text instead of a whole number"),
        ({"a": {"b": []}}, {"a": {str: int}}, "a.b is a list instead of a whole number"),
        ({"loss": 1.0}, POINT, "the content has no 'ranks'"),
        ({"ranks": {}, "loss": 1.0, "latency": "0"}, POINT, "latency is text instead"),
        ({"points": [{"loss": 1}]}, {"points": [POINT]}, r"points\[0\] has no 'ranks'"),
        ("x", ([int], None), "the content is text instead of a list"),
    ],
)  # fmt: skip
def test_another_shape_is_refused_with_its_key(value: Any, shape: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        parse_json(json.dumps(value), shape)


@pytest.mark.parametrize("text", ["", "{", "\x00", "[1,]", "9" * 5000, b"\xff", "[" * 100_000])
def test_what_is_not_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_depth_is_limited_and_circles_are_found() -> None:
    deepest = "[" * DEEPEST + "]" * DEEPEST
    parse_json(deepest)
    with pytest.raises(ValueError, match="too deeply"):
        parse_json(f"[{deepest}]")
    circle: dict[str, Any] = {}
    circle["circle"] = [circle]
    with pytest.raises(ValueError, match="too deeply"):
        require_depth(circle)
    shared: list[Any] = []
    for _ in range(50):  # as YAML anchors can write: 2**50 lists, one after the other
        shared = [shared, shared]
    require_depth(shared)


def test_only_regular_files_of_some_size_are_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.json does not exist"):
        read_json_file(tmp_path / "no.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json_file(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    for endless in (tmp_path / "pipe.json", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_json_file(endless)
    huge = tmp_path / "huge.json"
    huge.touch()
    os.truncate(huge, LARGEST + 1)
    with pytest.raises(CheckpointError, match="bytes are too many"):
        read_json_file(huge)


def test_the_error_names_the_file_and_the_key(tmp_path: Path) -> None:
    file = tmp_path / "index.json"
    file.write_text('{"weight_map": {"a": 3}}')
    with pytest.raises(CheckpointError, match=r"index\.json is damaged \(weight_map\.a is a whole"):
        read_json_file(file, {"weight_map": {str: str}})
