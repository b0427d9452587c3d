"""A λ that does nothing says so: after a third of a training, and at its end."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from maestro_lod.model.surgery import decompose
from maestro_lod.train.diagnostics import unshrunk
from maestro_lod.train.fit import fit
from maestro_lod.train.lod import LoD
from maestro_lod.train.progress import EpochRecord

SAID = "the model has not shrunk"


def trained(
    penalty: float, epochs: int, threshold: float | None = 1e-7
) -> tuple[list[str], list[EpochRecord]]:
    """Train a small model and return what was said, and the records."""
    torch.manual_seed(0)
    model = decompose(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [(torch.randn(8, 12), torch.randint(4, (8,))) for _ in range(3)]
    method = LoD(model, optimizer, penalty=penalty, threshold=threshold)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        done = fit(model, batches, optimizer=optimizer, method=method, epochs=epochs)
    return [str(w.message) for w in said if SAID in str(w.message)], done.history


@pytest.mark.parametrize(("epochs", "at"), [(1, [1]), (3, [1, 3]), (7, [3, 7]), (9, [3, 9])])
def test_a_penalty_that_removes_nothing_is_said_after_a_third_and_at_the_end(
    epochs: int, at: list[int]
) -> None:
    said, history = trained(1e-8, epochs)
    assert [record.epoch for record in history if record.note] == at
    assert said == [record.note for record in history if record.note]
    for epoch, text in zip(at, said, strict=True):
        assert f"after {epoch} of {epochs} epochs 16 of 16 ranks are left" in text
        assert "Elastic(model, optimizer, sizes=[0.25])" in text
        assert "budget.params=0.25" in text
        assert "penalty=1e-08" in text


@pytest.mark.parametrize(
    ("penalty", "threshold"),
    [(0.0, 1e-7), (1e-8, None), (0.5, 1e-1)],
    ids=["no penalty", "no shrinking", "a model that shrinks"],
)
def test_whoever_did_not_ask_or_got_what_they_asked_for_hears_nothing(
    penalty: float, threshold: float | None
) -> None:
    said, history = trained(penalty, 6, threshold)
    assert said == []
    assert all(record.note is None for record in history)


def test_ranks_that_are_on_their_way_are_no_reason_yet_but_are_one_at_the_end() -> None:
    layers = dict(decompose(nn.Sequential(nn.Linear(20, 20))).named_modules())
    layer = {"0": layers["0"]}
    assert unshrunk(layer, 1.0, 1e-3, 3, 9) is not None  # type: ignore[arg-type]
    layer["0"].resize(15)  # type: ignore[union-attr,operator]
    assert unshrunk(layer, 1.0, 1e-3, 3, 9) is None  # type: ignore[arg-type]
    assert unshrunk(layer, 1.0, 1e-3, 9, 9) is not None  # type: ignore[arg-type]


def test_a_note_survives_its_file() -> None:
    record = EpochRecord(epoch=1, note="the model …")
    assert EpochRecord.from_dict(record.to_dict()) == record
