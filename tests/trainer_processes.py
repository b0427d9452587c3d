"""What each of several processes does when torchrun starts this file: train in trainers.

    torchrun --nproc-per-node 2 -m tests.trainer_processes directory lightning accelerate

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
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from maestro_lod import LoD, decompose
from maestro_lod.distributed.fsdp import shard_group
from maestro_lod.distributed.shards import gathered
from maestro_lod.layers.ranks import low_rank_layers
from tests.test_ddp import same_everywhere
from tests.trainers import EPOCHS, Case

COUNT, SHARE = 40, 4
"""Samples, and how many of each batch of eight one of two processes has."""
CASES = {
    f"{optimizer} {str(dtype).removeprefix('torch.')}": Case(optimizer, dtype)
    for optimizer in ("sgd", "adamw")
    for dtype in (torch.float32, torch.float64)
}


def accelerate(case: Case, directory: Path) -> nn.Module:
    from tests.test_accelerate import Run

    run = Run(case, count=COUNT, batch=SHARE)
    assert run.accelerator.num_processes == 2
    run.epochs(0, EPOCHS)
    return run.inner


def huggingface(case: Case, directory: Path) -> nn.Module:
    from tests.test_huggingface_trainer import trained

    run = trained(directory / "run", case=case, per_device_train_batch_size=SHARE, count=COUNT)
    assert run.args.world_size == 2
    return run.model


def lightning(case: Case, directory: Path, strategy: Any = "ddp") -> nn.Module:
    from maestro_lod.integrations.lightning import LoDCallback
    from tests.test_lightning import Module, precision_of, trainer

    class Sharded(Module):
        def configure_model(self) -> None:
            if strategy != "ddp":
                for layer in low_rank_layers(self).values():
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    model, data = decompose(Sharded(case)), TensorDataset(*case.samples(COUNT))
    # Lightning's own would shuffle
    sampler = DistributedSampler(data, 2, int(os.environ["RANK"]), shuffle=False)
    loader = DataLoader(data, batch_size=SHARE, sampler=sampler)
    run = trainer(
        LoDCallback(**case.options), strategy=strategy, devices=2, use_distributed_sampler=False,
        precision=precision_of(case) if strategy == "ddp" else "32-true",  # which converts nothing
    )  # fmt: skip
    run.fit(model, loader)
    assert run.world_size == 2
    return model


def lightning_sharded(case: Case, directory: Path) -> nn.Module:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return lightning(case, directory, ModelParallelStrategy(2, 1))


def main(directory: Path, *trainers: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    end_epoch, equal = LoD.end_epoch, list[bool]()

    def then_compared(self: LoD, **options: Any) -> Any:
        lost = end_epoch(self, **options)
        # of shards, nobody holds what others do
        equal.append(shard_group(self.model) is not None or same_everywhere(self.model))
        return lost

    LoD.end_epoch = then_compared  # type: ignore[method-assign]
    for trainer in trainers:
        for name, case in CASES.items():
            equal.clear()
            model = globals()[trainer](case, directory)
            weights = [gathered(p.detach()) for p in model.parameters()]
            reached = {"weights": weights, "equal": equal}
            rank = torch.distributed.get_rank()
            torch.save(reached, directory / f"{trainer} {name} {rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
