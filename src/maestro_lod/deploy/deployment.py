"""From a model and its frontier to files: the best size within limits, written and proven."""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maestro_lod.calls import Example, as_call
from maestro_lod.deploy.choice import Choice, Judge
from maestro_lod.deploy.export import FORMATS, Exported, export, opened
from maestro_lod.deploy.latency import all_dense, latency
from maestro_lod.deploy.limits import Point, require_limits
from maestro_lod.deploy.points import Frontier
from maestro_lod.deploy.timing import batch_of, drawn_call, interleaved
from maestro_lod.deploy.timing import run as run_call
from maestro_lod.errors import OptionError, listed, nearest
from maestro_lod.files import replacing, replacing_directory
from maestro_lod.table import table
from maestro_lod.train.evaluate import device_of

ROUNDS = 15
_NOISE = 1.05  # two timings this close are the same


@dataclass(frozen=True)
class Deployed:
    """One file that was written, beside the dense model in the same format."""

    file: Exported
    """Its path is the name alone, in the directory that it is deployed to."""
    seconds: float
    dense_seconds: float

    @property
    def over_dense(self) -> float:
        return self.seconds / self.dense_seconds


@dataclass(frozen=True)
class Deployment:
    """What `deploy` chose and wrote."""

    point: Point
    """The size, with the costs of the form that was written and the latency that was predicted."""
    params: int
    macs: int
    dense_params: int
    dense_macs: int
    test: dict[str, float]
    dense_test: dict[str, float]
    unhealed_test: dict[str, float] | None
    """Of the size before it was healed; None if it was not."""
    files: list[Deployed]
    batch: int
    threads: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        files = [
            {
                **deployed.file.to_dict(),
                "seconds": deployed.seconds,
                "dense_seconds": deployed.dense_seconds,
                "latency_over_dense": deployed.over_dense,
            }
            for deployed in self.files
        ]
        return {**asdict(self), "point": asdict(self.point), "files": files}

    def __str__(self) -> str:
        rows = [
            (
                deployed.file.path.name,
                f"{deployed.file.bytes:,}",
                f"{deployed.file.size_ratio:.2f}×",
                f"{deployed.file.difference:.0e}",
                f"{1e3 * deployed.seconds:.3f} ms",
                f"{deployed.over_dense:.2f}×",
                f"{self.macs / self.dense_macs:.2f}×",
            )
            for deployed in self.files
        ]
        header = ("file", "bytes", "of weights", "difference", "latency", "of dense", "MACs")
        lines = [
            f"params {self.params:,} ({self.params / self.dense_params:.2f}×)  "
            f"MACs {self.macs:,} ({self.macs / self.dense_macs:.2f}×)  "
            f"at batch {self.batch}, {self.threads} threads",
        ]
        for name, value in self.test.items():
            beside = f"dense form {self.dense_test[name]:.4f}"
            if self.unhealed_test is not None:
                beside = f"before healing {self.unhealed_test[name]:.4f}, {beside}"
            lines.append(f"test {name} {value:.4f}  ({beside})")
        return "\n".join([*lines, "", table(header, rows, right=range(1, 7))])


def deploy_size(
    model: nn.Module,
    sizes: Frontier,
    out: str | os.PathLike[str],
    *,
    example: Example,
    formats: Sequence[str] = ("onnx",),
    test: Callable[[nn.Module], dict[str, float]] | None = None,
    judge: Judge | None = None,
    heal: Callable[[nn.Module], object] | None = None,
    multiple: int | None = None,
    int8: bool = False,
    allow_slower: bool = False,
    **limits: float,
) -> Deployment:
    """Write the best size within limits to files in each format, verified, tested and timed.

    >>> sizes = lod.frontier(model, loss)
    >>> lod.deploy_size(model, sizes, "phone", example=x, max_macs=0.25, formats=["onnx", "pt2"])

    `limits` are those of `Frontier.pick`. They hold for what is written: ranks rounded if to a
    `multiple` (then `judge(ranks)` says how good that is), latency on this machine at the example's
    batch size. Layers that are slower factored are multiplied out as far as the limits allow.
    `test(plain)` may recalibrate the plain model and returns what to report of it; `heal(plain)`
    may train it before that, and the report says what it was without. A file that
    takes longer than the limit is refused, and so is one that is slower than the dense model in its
    format, unless `allow_slower`; then nothing is left of any.
    """
    out = Path(out)
    require_limits(limits)
    _require_usable(out, formats)
    measured = latency(model, example)
    sizes = sizes.with_latency(measured.predict, measured.dense)  # its own are of another batch
    choice = Choice(model, sizes, limits, measured, example, multiple, judge)
    point, small = choice.best()
    dense, test = all_dense(model), test or (lambda plain: {})
    unhealed = None
    if heal is not None:
        unhealed = test(small)
        heal(small)
    reached, of_dense = test(small), test(dense)
    batch = batch_of(as_call(example))
    with replacing_directory(out) as place:
        kinds: list[tuple[str, Any]] = [(format_, None) for format_ in formats]
        kinds += [("onnx", "int8")] if int8 and "onnx" in formats else []
        files = [_written(small, dense, place, *kind, example) for kind in kinds]
        _require_fast(files, batch, limits.get("max_latency", math.inf), allow_slower)
        deployment = Deployment(
            point, point.params, point.macs or 0, sizes.dense.params, sizes.dense.macs or 0,
            reached, of_dense, unhealed, files, batch, torch.get_num_threads(),
        )  # fmt: skip
        with replacing(place / "deploy.json") as description:
            description.write_text(json.dumps(deployment.to_dict(), indent=1))
    return deployment


def _require_usable(out: Path, formats: Sequence[str]) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OptionError(f"{out} exists and is not empty. Give another place.")
    if unknown := [name for name in formats if name not in FORMATS]:
        raise OptionError(
            f"format {unknown[0]!r} is not known.{nearest(unknown[0], FORMATS)} Formats: "
            f"{listed(FORMATS)}."
        )


def _require_fast(
    files: Sequence[Deployed], batch: int, most_seconds: float, allow_slower: bool
) -> None:
    """Refuse files that take longer than asked for, or than the dense model does."""
    longest = max(files, key=lambda file: file.seconds)
    if longest.seconds > most_seconds * _NOISE:
        raise OptionError(
            f"{longest.file.path.name} takes {1e3 * longest.seconds:.3g} ms here at batch "
            f"{batch}, above max_latency={most_seconds!r}. Allow more time, or ask for a smaller "
            "size too, such as by max_macs."
        )
    worst = max(files, key=lambda file: file.over_dense)
    if worst.over_dense > _NOISE and not allow_slower:
        raise OptionError(
            f"{worst.file.path.name} would be {worst.over_dense:.2f}× as slow as its dense form "
            f"here, at batch {batch}. Try a larger batch or a smaller size, or take it as it is: "
            "allow_slower."
        )


def _written(
    small: nn.Module, dense: nn.Module, folder: Path, format_: str, quantize: Any, example: Any
) -> Deployed:
    """Export a model, and time the file beside the dense model in the same format."""
    name = f"model.{quantize}" if quantize else "model"
    path = folder / f"{name}.{format_}"
    file = export(small, path, example=example, quantize=quantize)
    runs = drawn_call(as_call(example), device_of(small))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        other = Path(scratch) / path.name
        export(dense, other, example=example)
        if format_ == "safetensors":  # rebuilt, it is the model itself
            run_small, run_dense = eager(small, runs), eager(dense, runs)
        else:
            small_file, dense_file = opened(path), opened(other)
            run_small, run_dense = lambda: small_file(runs), lambda: dense_file(runs)
        with torch.inference_mode():
            times = interleaved({"small": run_small, "dense": run_dense}, rounds=ROUNDS)
    ratio = statistics.median(a / b for a, b in zip(times["small"], times["dense"], strict=True))
    seconds = statistics.median(times["dense"])
    return Deployed(replace(file, path=Path(path.name)), ratio * seconds, seconds)


def eager(model: nn.Module, runs: Any) -> Callable[[], object]:
    """Return what runs a copy of the model in eval mode on a call."""
    model = copy.deepcopy(model).eval()
    return lambda: run_call(model, runs)
