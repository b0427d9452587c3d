"""Two processes in each trainer, started by torchrun, train what one does on whole batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer_processes import COUNT
from tests.trainers import by_hand

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["accelerate", "huggingface", "lightning"])
def test_two_processes_train_what_one_does_by_hand(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers" if name == "huggingface" else name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.trainer_processes", name, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{name} {rank}.pt") for rank in range(2))
    weight = (lambda i: 1.0 if i == 4 else 0.5) if name == "huggingface" else (lambda i: 0.5)
    hand = by_hand(weight, count=COUNT)
    assert len(hand.history) == 4
    assert sum(hand.history[0].values()) > sum(hand.history[-1].values())
    for one, other, expected in zip(first, second, hand.model.parameters(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected.detach(), rtol=0, atol=1e-6)
