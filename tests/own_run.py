"""A recipe's own model and data, and a process that is killed where a test asks for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.train import shrink

RECIPE = """
model: tests.own_run:model
data: tests.own_run:data
epochs: 6
batch: 10
optimizer: {name: sgd, lr: 0.05, momentum: 0.9}
proximal: true
penalty: 0.3
threshold: 1.0e-4
checkpoint_every: 0
"""


def _killed_once(where: str) -> None:
    """Kill this process if a test asks for it here; only the second one, and only once."""
    asked = os.environ.get("TEST_KILL_IN")
    if (
        not asked
        or os.environ.get("RANK") != "1"
        or dist_starts() != ("step", "shrink").index(where)
    ):
        return
    Path(asked, where).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def dist_starts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 10), nn.Tanh())
        self.head = nn.Linear(10, 3)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
            if self.forwards == 11:  # in the middle of an epoch
                _killed_once("step")
        return self.head(self.body(x))


def model() -> nn.Module:
    cut = shrink._cut_layer

    def killed_while_cutting(*arguments: Any) -> None:
        _killed_once("shrink")
        cut(*arguments)

    shrink._cut_layer = killed_while_cutting
    return Model()


def data(batch: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(47, 12, generator=drawn)  # the last batch has an odd number
    y = torch.randint(3, (47,), generator=drawn)
    batches = [*zip(x.split(batch), y.split(batch), strict=True)]
    return {"train": batches, "validation": batches[:1], "test": batches[1:2]}
