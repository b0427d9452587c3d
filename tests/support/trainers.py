"""What the tests of all trainers compare with: one small task, and the loop written by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from maestro_lod import Elastic, LoD, decompose, ranks
from maestro_lod.integrations.trainer_steps import FixedBatches
from maestro_lod.model.inputs import ModelInputs
from maestro_lod.train.method import RunPlan

BATCH, ACCUMULATED, CLIP, EPOCHS = 8, 2, 0.5, 4
OPTIONS: dict[str, Any] = {"penalty": 0.02, "threshold": 0.4, "seed": 3}
"""With these the network loses ranks at several epochs' ends."""


@dataclass(frozen=True)
class Case:
    """One way to train the task."""

    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float32
    bf16: bool = False
    """Whether forwards compute in bfloat16."""
    proximal: bool = False
    elastic: bool = False
    """Whether every size is trained."""

    @property
    def options(self) -> dict[str, Any]:
        """What a callback is given."""
        if self.elastic:
            return {"method": Elastic, **ELASTIC}
        return OPTIONS | {"proximal": self.proximal}

    def network(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 10), nn.Tanh(), nn.Linear(10, 3)
        ).to(self.dtype)

    def samples(self, count: int = 36) -> tuple[Tensor, Tensor]:
        """Return inputs and labels; with 36 the last batch of five is a smaller one."""
        x = torch.randn(count, 12, generator=torch.Generator().manual_seed(1))
        return x.to(self.dtype), (x[:, 0] * 2).round().clamp(-1, 1).long() + 1

    def precision(self) -> Any:
        """Return the context of forwards."""
        return torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext()

    def optimizer_of(self, model: nn.Module) -> optim.Optimizer:
        if self.optimizer == "adamw":
            return optim.AdamW(model.parameters(), lr=0.03)
        return optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


SGD = Case()
CASES = {
    "sgd": SGD,
    "adamw": Case("adamw"),
    "float64": Case("adamw", torch.float64),
    "bf16": Case(bf16=True),
    "proximal": Case(proximal=True),
}
IN_TRAINERS = [
    pytest.param(case, id=name, marks=[pytest.mark.slow] if name in ("float64", "bf16") else [])
    for name, case in CASES.items()
]
"""All cases, for trainers that take seconds for each."""


def decay(optimizer: optim.Optimizer) -> optim.lr_scheduler.LambdaLR:
    """One factor per optimizer step, of which there are three in an epoch."""
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.02 * step))


def by_hand(
    case: Case = SGD,
    weight: Callable[[int], float] = lambda i: 1 / ACCUMULATED,
    *,
    epochs: int = EPOCHS,
    count: int = 36,
) -> LoD:
    """Train by a loop of one's own: accumulation, clipping, a scheduler; `weight` is of batch i."""
    model = decompose(case.network())
    optimizer = case.optimizer_of(model)
    scheduler = decay(optimizer)
    train = LoD(model, optimizer, **case.options)
    x, y = case.samples(count)
    data = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    for epoch in range(epochs):
        for i, (inputs, labels) in enumerate(data):
            with train.step():
                with case.precision():
                    loss = F.cross_entropy(model(inputs), labels)
                (loss * weight(i)).backward()
            if (i + 1) % ACCUMULATED == 0 or i + 1 == len(data):
                train.add_penalty_gradients()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        train.end_epoch(last=epoch + 1 == epochs)
    return train


ELASTIC: dict[str, Any] = {"smallest": 0.3, "seed": 3}
"""Options of `Elastic`, which trains the network as a whole for the first three of four epochs."""


@dataclass(frozen=True)
class _Lower(ModelInputs):
    """Inputs on which models run in the precision of a case."""

    case: Case
    single: bool

    def call(self, model: nn.Module) -> Tensor:
        with self.case.precision():
            output = model(*self.args)
            return output.float() if self.single and self.case.bf16 else output

    def to(self, device: torch.device) -> _Lower:
        return self


def elastic_by_hand(
    case: Case = SGD,
    weight: Callable[[int], float] = lambda i: 1 / ACCUMULATED,
    *,
    epochs: int = EPOCHS,
    count: int = 36,
    batch: int = BATCH,
    single: bool = False,
    **options: Any,
) -> Elastic:
    """Train by `Elastic` in a loop of one's own.

    `batch` is the size of the batches of its plan; `single` makes outputs float32, as Accelerate.
    """
    model = decompose(case.network())
    optimizer = case.optimizer_of(model)
    train = Elastic(model, optimizer, **(options or ELASTIC))
    x, y = case.samples(count)
    data = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    fixed = FixedBatches(DataLoader(TensorDataset(x, y), batch_size=batch))

    def loss_of(output: Tensor, labels: Tensor) -> Tensor:
        with case.precision():
            return F.cross_entropy(output, labels)

    def soft_loss(output: Tensor, teacher: Tensor) -> Tensor:
        with case.precision():
            return F.cross_entropy(output, teacher.softmax(1))

    loss_of.soft = lambda output, teacher, _: soft_loss(output, teacher)  # type: ignore[attr-defined]
    planned = [(_Lower((x,), {}, case, single), y) for x, y in fixed]
    schedule = decay(case.optimizer_of(nn.Linear(1, 1))).lr_lambdas[0]
    train.start(model, optimizer, RunPlan(epochs, 3, batches=planned, loss=loss_of))
    initial, done = optimizer.param_groups[0]["lr"], 0
    for epoch in range(epochs):
        for i, (inputs, labels) in enumerate(data):

            def forward(m: nn.Module = model, inputs: Tensor = inputs) -> Tensor:
                return _Lower((inputs,), {}, case, single).call(m)

            def loss(output: Tensor, labels: Tensor = labels) -> Tensor:
                return loss_of(output, labels)

            train.backward(forward, loss, weight=weight(i), soft_loss=soft_loss)
            if (i + 1) % ACCUMULATED == 0 or i + 1 == len(data):
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                if train.phase == "whole":  # the schedule runs through in the whole phase
                    share = schedule(done * epochs // train.whole_epochs)
                    optimizer.param_groups[0]["lr"] = initial * share
                optimizer.step()
                done += 1
                optimizer.zero_grad()
        train.end_epoch(last=epoch + 1 == epochs)
    return train


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    """Compare bit for bit; names may differ by a prefix, the order may not."""
    assert list(ranks(one).values()) == list(ranks(other).values())
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
