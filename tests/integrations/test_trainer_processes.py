"""Two processes in each trainer, started by torchrun, train what one does on whole batches."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer_processes import CASES, COUNT, SHARE
from tests.support.trainers import EPOCHS, by_hand, elastic_by_hand

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
NEEDED = {
    "accelerate": "accelerate",
    "huggingface": "transformers",
    "lightning": "lightning",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes, started once, have written what became of all cases."""
    directory = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.support.trainer_processes", str(directory)]
    command += [trainer for trainer, package in NEEDED.items() if find_spec(package)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("trainer", NEEDED)
def test_two_processes_train_what_one_does_by_hand(trainer: str, case: str, written: Path) -> None:
    pytest.importorskip(NEEDED[trainer])
    first, second = (torch.load(written / f"{trainer} {case} {rank}.pt") for rank in range(2))
    # the Trainer divides by the batches that there are: the last one stands alone
    weight = (lambda i: 1.0 if i == 4 else 0.5) if trainer == "huggingface" else (lambda i: 0.5)
    if CASES[case].elastic:
        hand: Any = elastic_by_hand(CASES[case], weight, count=COUNT, batch=SHARE)
    else:
        hand = by_hand(CASES[case], weight, count=COUNT)
        total = [sum(layers.values()) for layers in hand.history]
        total.append(sum(layer.rank for layer in hand.model.modules() if hasattr(layer, "u")))
        assert len({*total}) > 4  # at least four shrinks
    assert first["equal"] == second["equal"] == [True] * EPOCHS
    within = 1e-9 if CASES[case].elastic else 1e-12 if CASES[case].dtype == torch.float64 else 1e-6
    for one, other, expected in zip(
        first["weights"], second["weights"], hand.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected.detach(), rtol=0, atol=within)
