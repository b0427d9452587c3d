"""What each of several processes does when torchrun starts this file: train in one trainer.

    torchrun --nproc-per-node 2 -m tests.trainer_processes lightning directory

Every process writes its weights; all must be the same, and those of one process on whole batches.
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
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.trainers import ACCUMULATED, CLIP, EPOCHS, OPTIONS, decay, low_rank_network, samples, sgd

COUNT, SHARE = 40, 4
"""Samples, and how many of each batch of eight one of two processes has."""


def accelerate() -> nn.Module:
    from accelerate import Accelerator

    from maestro_lod.integrations.accelerate import AcceleratedLoD

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=ACCUMULATED, step_scheduler_with_optimizer=False
    )
    assert accelerator.num_processes == 2
    inner = low_rank_network()
    made = sgd(inner.parameters())
    loader = DataLoader(TensorDataset(*samples(COUNT)), batch_size=SHARE)
    model, optimizer, loader, scheduler = accelerator.prepare(inner, made, loader, decay(made))
    train = AcceleratedLoD(accelerator, model, optimizer, **OPTIONS)
    for epoch in range(EPOCHS):
        for x, y in loader:
            with train.accumulate():
                train.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        train.end_epoch(last=epoch + 1 == EPOCHS)
    return inner


def huggingface(directory: Path) -> nn.Module:
    from tests.test_huggingface_trainer import trained

    run = trained(directory, per_device_train_batch_size=SHARE, count=COUNT)
    assert run.args.world_size == 2
    return run.model


def lightning() -> nn.Module:
    from maestro_lod import decompose
    from maestro_lod.integrations.lightning import LoDCallback
    from tests.test_lightning import Module, trainer

    model = decompose(Module())
    data = TensorDataset(*samples(COUNT))
    # Lightning's own would shuffle
    sampler = DistributedSampler(data, 2, int(os.environ["RANK"]), shuffle=False)
    loader = DataLoader(data, batch_size=SHARE, sampler=sampler)
    run = trainer(LoDCallback(**OPTIONS), strategy="ddp", devices=2, use_distributed_sampler=False)
    run.fit(model, loader)
    assert run.world_size == 2
    return model


def main(name: str, directory: Path) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    model: Any = huggingface(directory / "run") if name == "huggingface" else globals()[name]()
    rank = torch.distributed.get_rank()
    torch.save([p.detach() for p in model.parameters()], directory / f"{name} {rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
