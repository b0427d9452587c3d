"""Fine-tuning: a plain model trained a little further, resumed after any epoch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.errors import OptionError
from maestro_lod.files import stage_cache
from maestro_lod.train.evaluate import evaluate
from maestro_lod.train.finetune import finetune
from maestro_lod.train.fit import FitOptions


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 16, 10, generator=draw)
    return [*zip(x, (x[..., :4] * 3).argmax(-1), strict=True)]


def cut_model() -> nn.Module:
    """A model that was trained, and cut without any training after."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    lod.fit(dense, batches(), optimizer=optimizer, epochs=5)
    return lod.extract(lod.decompose(dense), 2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_a_cut_model_gets_better_at_a_learning_rate_that_ends_at_zero() -> None:
    plain = cut_model()
    before = evaluate(plain, batches())["loss"]
    optimizer = sgd(plain)
    progress = finetune(plain, batches(), optimizer=optimizer, epochs=2)
    assert evaluate(plain, batches())["loss"] < 0.9 * before
    assert progress.step == 16 and optimizer.param_groups[0]["lr"] == pytest.approx(0.3 * 0.1 / 16)


def test_a_killed_fine_tuning_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, file = cut_model(), tmp_path / "unfinished"
    whole = copy.deepcopy(start)
    finetune(whole, batches(), optimizer=sgd(whole), epochs=3)
    save = stage_cache.save_state

    def save_and_stop(state: Any, path: Path) -> None:
        save(state, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(stage_cache, "save_state", save_and_stop)
    model = copy.deepcopy(start)
    with pytest.raises(KeyboardInterrupt):
        finetune(model, batches(), optimizer=sgd(model), epochs=3, resume=file)
    monkeypatch.undo()
    for _ in range(2):  # to the end, and once more from there
        model = copy.deepcopy(start)
        finetune(model, batches(), optimizer=sgd(model), epochs=3, resume=file)
        for one, other in zip(
            whole.state_dict().values(), model.state_dict().values(), strict=True
        ):
            assert torch.equal(one, other)
    other_model = nn.Linear(10, 4)
    with pytest.raises(OptionError, match="another call: model is"):
        finetune(other_model, batches(), optimizer=sgd(other_model), epochs=3, resume=file)
    for what, options in {
        "epochs": {"epochs": 4},
        "seed": {"seed": 1},
        "options": {"options": FitOptions(clip_norm=1.0)},
        "loss": {"loss": nn.functional.cross_entropy},
        "optimizer": {"optimizer": torch.optim.SGD(start.parameters(), lr=0.2)},
    }.items():
        given: dict[str, Any] = {"epochs": 3, "optimizer": sgd(start), **options}
        with pytest.raises(OptionError, match=f"another call: {what} is"):
            finetune(start, batches(), resume=file, **given)
    with pytest.raises(OptionError, match="another call: batches is 8, not 7"):
        finetune(start, batches()[:7], optimizer=sgd(start), epochs=3, resume=file)


def test_what_cannot_be_meant_is_refused() -> None:
    model = nn.Linear(10, 4)
    with pytest.raises(OptionError, match="epochs=0"):
        finetune(model, batches(), optimizer=sgd(model), epochs=0)
    with pytest.raises(OptionError, match="length"):
        finetune(model, iter(batches()), optimizer=sgd(model))
