"""Trials: calls that can be repeated, fair turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from maestro_lod.deploy.export import export
from maestro_lod.model.inputs import ModelInputs, model_device
from maestro_lod.sizes.timing import interleaved

CPU = torch.device("cpu")


def test_floats_are_drawn_and_whole_numbers_are_kept() -> None:
    nan = torch.full((2, 3), float("nan"))
    ids, mask = torch.tensor([[1, 2], [3, 4]]), torch.tensor([True, False])
    call = ModelInputs((nan, 7), {"ids": ids, "mask": mask}).drawn(CPU)
    assert torch.isfinite(call.args[0]).all()
    assert call.args[0].unique().numel() == 6
    assert call.args[1] == 7
    assert torch.equal(call.kwargs["ids"], ids)
    assert torch.equal(call.kwargs["mask"], mask)
    again = ModelInputs((nan, 7), {"ids": ids, "mask": mask}).drawn(CPU)
    assert torch.equal(again.args[0], call.args[0])


def test_only_what_has_the_batch_changes_with_it() -> None:
    given = ModelInputs(
        (torch.empty(2, 3), torch.empty(3), torch.tensor([[5], [6]]), torch.tensor(1)), {}
    )
    larger = given.drawn(CPU, batch=5)
    assert [tuple(t.shape) for t in larger.args] == [(5, 3), (3,), (5, 1), ()]
    assert larger.args[2].flatten().tolist() == [5, 6, 5, 6, 5]
    smaller = given.drawn(CPU, batch=1)
    assert smaller.args[2].tolist() == [[5]]
    assert given.batch_size == 2


def test_the_layout_in_memory_is_kept() -> None:
    x = torch.empty(2, 3, 4, 4, device="meta").to(memory_format=torch.channels_last)
    assert ModelInputs.wrap(x).drawn(CPU).args[0].stride() == x.stride()


def test_a_model_without_parameters_is_tried_too(tmp_path: Path) -> None:
    assert model_device(nn.ReLU()) == CPU
    done = export(nn.ReLU(), tmp_path / "model.pt2", example=torch.empty(2, 3))
    assert (done.params, done.difference) == (0, 0.0)


def test_variants_are_timed_in_every_round() -> None:
    calls = {"a": 0, "b": 0}

    def count(key: str) -> Callable[[], None]:
        def run() -> None:
            calls[key] += 1
            torch.randn(20_000).sort()

        return run

    times = interleaved({key: count(key) for key in calls}, rounds=3)
    assert [len(values) for values in times.values()] == [3, 3]
    assert all(value > 0 for values in times.values() for value in values)
    assert min(calls.values()) >= 3 + 2  # the first two are for warming up
