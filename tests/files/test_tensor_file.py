"""Parts of tensors in files: any rows are read alone, and proven."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from maestro_lod.errors import CheckpointError
from maestro_lod.files.tensor_file import opened_file, save_file

ROWS, ROW = 300, 1000  # bytes: several blocks that are proven at once


@pytest.fixture
def path(tmp_path: Path) -> Path:
    whole = torch.arange(ROWS * ROW // 4, dtype=torch.float32).view(ROWS, -1)
    save_file({"a": torch.ones(3), "whole": whole}, tmp_path / "file.safetensors", {})
    return tmp_path / "file.safetensors"


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "rows",
    [range(0), range(1), range(3, 4), range(7, 250), range(299, 300), range(300), range(9, 9)],
)
def test_any_rows_are_read_alone(path: Path, rows: range, verify: bool) -> None:
    with opened_file(path, verify=verify) as file:
        whole = file.read("whole")
        assert torch.equal(file.read("whole", rows), whole[rows.start : rows.stop])
        assert torch.equal(file.read("whole", rows.stop), whole[: rows.stop])


def test_damage_is_found_by_whoever_reads_there(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-ROW * 20] ^= 1  # 20 rows before the end
    path.write_bytes(content)
    with opened_file(path) as file:
        assert len(file.read("whole", range(100, 150))) == 50
    with pytest.raises(CheckpointError, match="whole differ from"), opened_file(path) as file:
        file.read("whole", range(275, 285))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a pipe")
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "file.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"), opened_file(path):
        raise AssertionError
