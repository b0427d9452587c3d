"""The example scripts run and keep their promise, on a reduced setting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("LOD_DATA", ""))

REDUCED = {
    "lstm": ("--lines", "800", "--steps", "800"),
    "transformer": ("--lines", "250", "--steps", "640"),
}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not (DATA / "multi30k" / "train.jsonl").exists(),
    reason=f"{DATA}/multi30k/train.jsonl is missing: set LOD_DATA to a directory that has it",
)
@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_models_of_text_end_smaller_at_nearly_the_same_loss(model: str) -> None:
    result = run("text.py", "--data", str(DATA), "--only", model, *REDUCED[model])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "× the loss: ok" in result.stdout


def test_missing_data_is_one_clear_line() -> None:
    result = run("text.py", "--data", "/nowhere")
    assert result.returncode == 1
    assert "/nowhere/multi30k/train.jsonl does not exist" in result.stderr
    assert "Traceback" not in result.stderr
