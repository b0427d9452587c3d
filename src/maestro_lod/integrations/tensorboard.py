"""A run's metrics for TensorBoard: `--set tensorboard=true`, then `tensorboard --logdir DIR`."""

from __future__ import annotations

from typing import Any

from torch.utils.tensorboard import SummaryWriter

from maestro_lod.tasks.run import Run
from maestro_lod.tasks.setup import Setup
from maestro_lod.train.fit import Progress


class TensorBoard:
    """A watcher that writes every number of an epoch's record as a scalar, ranks layer by layer."""

    def begin(self, run: Run, setup: Setup, progress: Progress) -> None:
        # after a resume, epochs that were written but not saved are written again
        self._writer: Any = SummaryWriter(
            run.directory / "tensorboard", purge_step=progress.epoch + 1
        )

    def step(self, progress: Progress) -> None:
        pass

    def epoch(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            if isinstance(value, int | float) and key != "epoch":
                group, _, name = key.partition("_")
                split = group in ("train", "validation")
                self._writer.add_scalar(f"{group}/{name}" if split else key, value, record["epoch"])
        for name, rank in record["ranks"].items():
            self._writer.add_scalar(f"rank/{name}", rank, record["epoch"])
        self._writer.flush()

    def end(self, result: dict[str, Any]) -> None:
        self._writer.close()
