"""Runs that are stopped and go on, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from maestro_lod.cli.run import Interrupted, Run
from maestro_lod.cli.setup import Setup
from maestro_lod.files.state import load_state
from maestro_lod.train.progress import EpochRecord, Progress


class Until:
    """Stops a run after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0

    def prepare(self, run: Run) -> None: ...
    def begin(self, run: Run, setup: Setup, progress: Progress) -> None: ...
    def step(self, progress: Progress) -> None:
        self.done = progress.step

    def epoch(self, record: EpochRecord) -> None: ...
    def end(self, result: dict[str, Any]) -> None: ...
    def stop(self) -> bool:
        return self.done >= self.steps


def stopped(recipe: Any, directory: Path, steps: int) -> Run:
    run, until = Run.create(recipe, directory), Until(steps)
    with pytest.raises(Interrupted):
        run.train([until], until.stop)
    return run


def assert_same_end(whole: Path, resumed: Path) -> None:
    """The same weights and records, seconds aside."""
    ours, theirs = (load_state(path / "checkpoint.safetensors") for path in (whole, resumed))
    assert ours["model"].keys() == theirs["model"].keys()
    for name, tensor in ours["model"].items():
        assert torch.equal(tensor, theirs["model"][name]), name
    one, other = (
        [
            {**json.loads(line), "seconds": 0}
            for line in (path / "metrics.jsonl").read_text().splitlines()
        ]
        for path in (whole, resumed)
    )
    assert one == other
