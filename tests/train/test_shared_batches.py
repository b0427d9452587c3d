"""Batches shared out to two processes: the steps of one process on whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from maestro_lod import LoD, decompose, fit
from maestro_lod.train.evaluate import CrossEntropy
from maestro_lod.train.fit import FitOptions


class Tokens(nn.Module):
    """Scores for every token of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def images() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 7),
        nn.BatchNorm1d(7, affine=False), nn.Linear(7, 3),
    )  # fmt: skip
    sizes = (8, 5, 3)  # odd ones too
    return model, [(torch.randn(n, 2, 4, 4), torch.randint(3, (n,))) for n in sizes]


def text() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    batches = []
    for n in (6, 3, 1):  # with less samples than processes at the end
        target = torch.randint(5, (n, 4))
        target[0, 1:] = -100  # so that parts count differently
        batches.append((torch.randn(n, 4, 6), target))
    return Tokens(), batches


def numbers() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), [
        (torch.randn(n, 4), torch.randn(n, 1)) for n in (6, 5)
    ]


def halves(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return tuple(map(halves, value))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "batch norm": (images, {}),
    "two passes": (images, {"full_pass": True, "distill": True}),
    "ignored targets": (text, {"loss": CrossEntropy()}),
    "sums": (text, {"loss": CrossEntropy(reduction="sum")}),
    "own loss": (numbers, {"loss": F.mse_loss}),
    "accumulated": (numbers, {"loss": F.mse_loss, "accumulate": 2}),
}


def fitted(case: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    build, given = CASES[case]
    options = dict(given)
    torch.manual_seed(4)
    model, batches = build()
    model = decompose(model.double())
    several = dist.is_initialized()
    running = DistributedDataParallel(model) if several else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ways = {key: options.pop(key) for key in ("full_pass", "distill") if key in options}
    method = LoD(running, optimizer, threshold=None, seed=1, **ways)
    progress = fit(
        running, halves(batches), optimizer=optimizer, method=method, epochs=3,
        loss=options.get("loss"),
        options=FitOptions(
            clip_norm=1.0, accumulate=options.get("accumulate", 1), share_batches=several
        ),
    )  # fmt: skip
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return state, dict(progress.history[-1].train)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("case", CASES)
def test_parts_of_batches_give_the_step_of_the_whole_batch(pair, case):
    state, scored = fitted(case)
    for mine, my_score in pair(fitted, case):
        assert my_score == pytest.approx(scored, rel=1e-9)
        for key, value in state.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-10, atol=1e-12)
