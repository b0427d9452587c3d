"""TensorBoard reads what a run writes for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.run import Interrupted, Run

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from maestro_lod.cli.tensorboard import TensorBoard

SHRINKING = ["data.limit=60", "batch=8", "epochs=3", "penalty=0.05", "threshold=0.1", "threads=1"]


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Every series of a run, as TensorBoard itself reads it."""
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def expected(directory: Path, key: str) -> list[tuple[int, float]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [(record["epoch"], record[key]) for record in map(json.loads, lines)]


def test_events_are_the_metrics(tmp_path: Path) -> None:
    run = Run.create(load_recipe("digits", SHRINKING), tmp_path / "run")
    run.train([TensorBoard()])
    series = scalars(run.directory)
    for name, key in (
        ("train/loss", "train_loss"),
        ("train/accuracy", "train_accuracy"),
        ("validation/loss", "validation_loss"),
        ("validation/accuracy", "validation_accuracy"),
        ("total_rank", "total_rank"),
        ("relative_params", "relative_params"),
        ("relative_macs", "relative_macs"),
        ("lr", "lr"),
    ):
        assert series[name] == [
            (step, pytest.approx(value)) for step, value in expected(run.directory, key)
        ], name
    for layer in ("conv1", "conv2", "fc1", "fc2", "fc3"):
        assert series[f"rank/{layer}"] == [
            (step, ranks[layer]) for step, ranks in expected(run.directory, "ranks")
        ]
    assert "epoch" not in series
    assert series["total_rank"][0][1] > series["total_rank"][-1][1]


def test_resumed_run_goes_on_in_the_same_curves(tmp_path: Path) -> None:
    run = Run.create(load_recipe("digits", SHRINKING), tmp_path / "run")
    written = run.directory / "metrics.jsonl"
    with pytest.raises(Interrupted):
        run.train([TensorBoard()], stop=lambda: written.read_text() != "")
    run.train([TensorBoard()])
    assert [step for step, _ in scalars(run.directory)["train/loss"]] == [1, 2, 3]


def test_an_epoch_written_but_not_saved_is_written_again(tmp_path: Path) -> None:
    run = Run.create(load_recipe("digits", SHRINKING), tmp_path / "run")
    written = run.directory / "metrics.jsonl"
    with pytest.raises(Interrupted):
        run.train([TensorBoard()], stop=lambda: written.read_text() != "")
    before = run.checkpoint.read_bytes()
    with pytest.raises(Interrupted):
        run.train([TensorBoard()], stop=lambda: written.read_text().count("\n") == 2)
    run.checkpoint.write_bytes(before)  # as if killed between the second epoch and its checkpoint
    run.train([TensorBoard()])
    assert [step for step, _ in scalars(run.directory)["total_rank"]] == [1, 2, 3]
