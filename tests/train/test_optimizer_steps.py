"""Methods that are called around an optimizer's steps: only for steps done, only while needed."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from maestro_lod.train.steps import call_after_steps, call_before_steps


class Listener:
    def __init__(self) -> None:
        self.seen: list[float] = []
        self.weight = nn.Parameter(torch.ones(1))

    def note(self) -> None:
        self.seen.append(float(self.weight.detach()))


def stepping(listener: Listener) -> torch.optim.SGD:
    listener.weight.grad = torch.ones(1)
    return torch.optim.SGD([listener.weight], lr=0.25, fused=True)


def test_before_is_before_and_after_is_after() -> None:
    listener = Listener()
    optimizer = stepping(listener)
    call_before_steps(optimizer, listener.note)
    call_after_steps(optimizer, listener.note)
    optimizer.step()
    optimizer.step()
    assert listener.seen == [1.0, 0.75, 0.75, 0.5]


@pytest.mark.parametrize(("found", "calls"), [(0.0, 1), (1.0, 0)])
def test_a_step_that_a_scaler_skips_inside_the_optimizer_does_not_count(
    found: float, calls: int
) -> None:
    listener = Listener()
    optimizer = stepping(listener)
    call_after_steps(optimizer, listener.note)
    optimizer.found_inf = torch.tensor(found)  # as GradScaler leaves it on fused optimizers
    optimizer.step()
    assert len(listener.seen) == calls


def test_who_is_gone_is_not_kept_alive() -> None:
    listener = Listener()
    optimizer, seen = stepping(listener), listener.seen
    call_before_steps(optimizer, listener.note)
    call_after_steps(optimizer, listener.note)
    del listener
    gc.collect()
    optimizer.step()
    assert seen == []
