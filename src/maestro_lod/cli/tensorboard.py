"""TensorBoard events of a run: `--set tensorboard=true`, then `tensorboard --logdir DIR`."""

from __future__ import annotations

from typing import Any

from torch.utils.tensorboard import SummaryWriter

from maestro_lod.cli.run import Run
from maestro_lod.cli.setup import Setup
from maestro_lod.train.progress import EpochRecord, Progress


class TensorBoard:
    """Watcher that writes every number of an epoch as a scalar, and the rank of each layer."""

    def prepare(self, run: Run) -> None:
        pass

    def begin(self, run: Run, setup: Setup, progress: Progress) -> None:
        # after a resume, epochs that were written but not saved are written again
        self._writer: Any = SummaryWriter(
            run.directory / "tensorboard", purge_step=progress.epoch + 1
        )

    def step(self, progress: Progress) -> None:
        pass

    def epoch(self, record: EpochRecord) -> None:
        for key, value in record.numbers().items():
            if key != "epoch":
                split, _, measure = key.partition("_")
                measured = split in ("train", "validation")
                tag = f"{split}/{measure}" if measured else key
                self._writer.add_scalar(tag, value, record.epoch)
        for name, rank in record.ranks.items():
            self._writer.add_scalar(f"rank/{name}", rank, record.epoch)
        self._writer.flush()

    def end(self, result: dict[str, Any]) -> None:
        self._writer.close()
