"""A recipe's own models and data, and a process that is killed where a test asks for it."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.train import shrink

RECIPE = """
model: tests.support.own_run:model
data: tests.support.own_run:data
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


def _stopped_by_a_signal() -> None:
    """Let whoever started the processes be sent Ctrl-C, if a test asks for it; go on with ours."""
    if "TEST_STOP" not in os.environ or os.environ.get("RANK") != "0":
        return
    arrived: list[int] = []
    stop: Any = signal.getsignal(signal.SIGINT)
    signal.signal(
        signal.SIGINT, lambda number, frame: arrived.append(number) or stop(number, frame)
    )
    os.kill(os.getppid(), signal.SIGINT)
    while not arrived:
        time.sleep(0.01)


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
                _stopped_by_a_signal()
        return self.head(self.body(x))


def model() -> nn.Module:
    cut = shrink._cut_layer

    def killed_while_cutting(*arguments: Any) -> None:
        _killed_once("shrink")
        cut(*arguments)

    shrink._cut_layer = killed_while_cutting
    return Model()


DIGESTS: list[str] = []
"""What the parameters of a `Precise` model were at each of its training steps, in this process."""


class Precise(nn.Module):
    """The same in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model().double()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            held = b"".join(p.detach().numpy().tobytes() for p in self.parameters())
            DIGESTS.append(hashlib.sha256(held).hexdigest())
        return self.inner(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(8, 10, batch_first=True), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


def data(batch: int, *shape: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(47, *(shape or (12,)), generator=drawn)  # the last batch has an odd number
    y = torch.randint(3, (47,), generator=drawn)
    batches = [*zip(x.split(batch), y.split(batch), strict=True)]
    return {"train": batches, "validation": batches[:1], "test": batches[1:2]}


def sequences(batch: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    return data(batch, 5, 8)


def doubles(batch: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    return {split: [(x.double(), y) for x, y in part] for split, part in data(batch).items()}
