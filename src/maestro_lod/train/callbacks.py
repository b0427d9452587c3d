"""Who sees the progress of a training; a line from time to time where nobody else does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from maestro_lod.progress import ProgressLine
from maestro_lod.train.progress import Progress


def _ignore(progress: Progress) -> None:
    pass


@dataclass(frozen=True)
class Watch:
    """Who sees the progress after each optimizer step and each epoch; what they raise ends it."""

    step: Callable[[Progress], object] = _ignore
    epoch: Callable[[Progress], object] = _ignore


def usual_watch(epochs: int) -> Watch:
    """Return who watches if nobody else does: a line every few seconds, where progress is shown."""
    tell = ProgressLine("fit")

    def place(progress: Progress) -> str:
        if progress.batch or not progress.history:
            means = _measures("train", progress.score.means())
            return f"epoch {progress.epoch + 1} of {epochs}, batch {progress.batch}{means}"
        last = progress.history[-1]
        means = _measures(
            "validation" if last.validation else "train", last.validation or last.train
        )
        size = "" if last.relative_params is None else f", params {last.relative_params:.2f}×"
        return f"epoch {last.epoch} of {epochs} done{means}{size}"

    def epoch(progress: Progress) -> None:
        (tell.end if progress.epoch == epochs else tell)(lambda: place(progress))

    return Watch(step=lambda progress: tell(lambda: place(progress)), epoch=epoch)


def _measures(split: str, means: Mapping[str, float]) -> str:
    return "".join(f", {split} {name} {value:.4g}" for name, value in means.items())
