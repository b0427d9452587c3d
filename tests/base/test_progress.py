"""Progress: a line now and then for people who wait, nothing in pipes, one switch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import maestro_lod as lod
from maestro_lod import progress as shown
from maestro_lod.progress import ProgressLine, progress_enabled, show_progress


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LOD_PROGRESS", raising=False)
    show_progress(None)
    yield
    show_progress(None)


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shown, "time", clock)
    return clock


def test_lines_come_after_two_seconds_and_every_five(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_enabled(True):
        tell = ProgressLine("search")
        for second in range(14):
            clock.now = second
            tell(lambda second=second: f"{second} s")  # type: ignore[misc]
        tell.end(lambda: "done")
    assert capsys.readouterr().err.splitlines() == [
        "search: 2 s", "search: 7 s", "search: 12 s", "search: done",
    ]  # fmt: skip


def test_what_is_quick_says_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_enabled(True):
        tell = ProgressLine("search")
        tell(lambda: "begun")
        tell.end(lambda: "done")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("asked", "variable", "terminal", "expected"),
    [
        (None, None, False, False), (None, None, True, True), (None, "1", False, True),
        (None, "0", True, False), (True, "0", False, True), (False, "1", True, False),
    ],
)  # fmt: skip
def test_the_switch_beats_the_variable_beats_the_place(
    asked: bool | None,
    variable: str | None,
    terminal: bool,
    expected: bool,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shown.sys.stderr, "isatty", lambda: terminal)
    if variable is not None:
        monkeypatch.setenv("LOD_PROGRESS", variable)
    show_progress(asked)
    tell = ProgressLine("search")
    clock.now = 3
    tell(lambda: "going on")
    assert bool(capsys.readouterr().err) == expected


def test_a_training_a_decomposition_and_a_search_tell_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown, "_FIRST", 0.0)
    monkeypatch.setattr(shown, "_EVERY", 0.0)
    show_progress()
    model = lod.decompose(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(4, 8), torch.randint(4, (4,)))]
    train = lod.LoD(model, optimizer)
    lod.fit(model, batches, optimizer=optimizer, method=train, epochs=2)
    lod.frontier(model, lambda m: nn.functional.cross_entropy(m(batches[0][0]), batches[0][1]))
    lines = capsys.readouterr().err.splitlines()
    assert "decompose: layer 2 of 2, 2" in lines
    assert any(line.startswith("fit: epoch 1 of 2, batch 1, train loss ") for line in lines)
    assert any(line.startswith("fit: epoch 2 of 2 done, train loss ") for line in lines)
    assert any(line.startswith("frontier: 2 sizes, down to ") for line in lines)
