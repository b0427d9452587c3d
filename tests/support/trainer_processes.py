"""What each of several processes does when torchrun starts this file: train in trainers.

    torchrun --nproc-per-node 2 -m tests.support.trainer_processes directory lightning accelerate

Every process writes its weights, and after which epochs they were those of all the others.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from maestro_lod import Elastic, LoD
from tests.distributed.test_ddp import same_everywhere
from tests.support.trainers import EPOCHS, Case

COUNT, SHARE = 40, 4
"""Samples, and how many of each batch of eight one of two processes has."""
CASES = {
    f"{optimizer} {str(dtype).removeprefix('torch.')}": Case(optimizer, dtype)
    for optimizer in ("sgd", "adamw")
    for dtype in (torch.float32, torch.float64)
} | {"elastic": Case("sgd", torch.float64, elastic=True)}


def accelerate(case: Case, directory: Path) -> nn.Module:
    from tests.integrations.test_accelerate import Run

    run = Run(case, count=COUNT, batch=SHARE, elastic=case.elastic)
    assert run.accelerator.num_processes == 2
    run.epochs(0, EPOCHS)
    return run.inner


def huggingface(case: Case, directory: Path) -> nn.Module:
    from tests.integrations.test_hf_trainer import trained

    run = trained(directory / "run", case=case, per_device_train_batch_size=SHARE, count=COUNT)
    assert run.args.world_size == 2
    return run.model


def lightning(case: Case, directory: Path) -> nn.Module:
    from maestro_lod.integrations.lightning import LoDCallback
    from tests.integrations.test_lightning import module, precision_of, trainer

    model, data = module(case), TensorDataset(*case.samples(COUNT))
    # Lightning's own would shuffle
    sampler = DistributedSampler(data, 2, int(os.environ["RANK"]), shuffle=False)
    loader = DataLoader(data, batch_size=SHARE, sampler=sampler)
    run = trainer(
        LoDCallback(**case.options), strategy="ddp", devices=2, use_distributed_sampler=False,
        precision=precision_of(case),
    )  # fmt: skip
    run.fit(model, loader)
    assert run.world_size == 2
    return model


def main(directory: Path, *trainers: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    equal = list[bool]()
    for method in (LoD, Elastic):

        def then_compared(self: Any, end_epoch: Any = method.end_epoch, **options: Any) -> Any:
            lost = end_epoch(self, **options)
            equal.append(same_everywhere(self.model))
            return lost

        method.end_epoch = then_compared  # type: ignore[method-assign]
    for trainer in trainers:
        for name, case in CASES.items():
            equal.clear()
            model = globals()[trainer](case, directory)
            reached = {"weights": [p.detach() for p in model.parameters()], "equal": equal}
            rank = torch.distributed.get_rank()
            torch.save(reached, directory / f"{trainer} {name} {rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
