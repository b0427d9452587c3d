"""From a model and its frontier to files: the best size within limits, written and proven."""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from maestro_lod.deploy.export import FORMATS, Exported, export, opened
from maestro_lod.deploy.manifest import write_manifest
from maestro_lod.errors import LayerError, OptionError, OutputError, listed, suggest
from maestro_lod.files.atomic import replacing_directory
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import cost_of
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.inputs import Example, as_call, device_of
from maestro_lod.model.limits import Point
from maestro_lod.progress import ProgressLine
from maestro_lod.sizes.choice import Judge, choose
from maestro_lod.sizes.latency import all_dense
from maestro_lod.sizes.timing import ROUNDS, batch_of, drawn_call, eager, interleaved, ratios
from maestro_lod.text import table

_NOISE = 1.05  # two timings this close are the same


@dataclass(frozen=True)
class Deployed:
    """One file that was written, beside the dense model in the same format."""

    file: Exported
    """Its path is the name alone, in the directory that it is deployed to."""
    seconds: float
    dense_seconds: float
    dense_bytes: int

    @property
    def over_dense(self) -> float:
        return self.seconds / self.dense_seconds


@dataclass(frozen=True)
class Deployment:
    """What `deploy` chose and wrote."""

    point: Point | None
    """The chosen size, with the costs of the form that was written; None if as it was trained."""
    ranks: dict[str, int]
    params: int
    macs: int
    dense_params: int
    dense_macs: int
    test: dict[str, float]
    dense_test: dict[str, float]
    unhealed_test: dict[str, float] | None
    """Of the size before it was healed; None if it was not."""
    files: list[Deployed]
    left_out: dict[str, str]
    """What was asked for and not written, by its name, and why."""
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
                "dense_bytes": deployed.dense_bytes,
            }
            for deployed in self.files
        ]
        return {**asdict(self), "files": files}

    def __str__(self) -> str:
        rows = [
            (
                deployed.file.path.name,
                f"{deployed.file.bytes:,}",
                f"{deployed.file.bytes / deployed.dense_bytes:.2f}×",
                f"{1e3 * deployed.seconds:.3f} ms",
                f"{deployed.over_dense:.2f}×",
                f"{deployed.file.difference:.0e}",
            )
            for deployed in self.files
        ]
        header = ("file", "bytes", "of dense", "latency", "of dense", "difference")
        lines = [
            f"params {self.params:,} ({self.params / self.dense_params:.2f}×)  "
            f"MACs {self.macs:,} ({self.macs / max(self.dense_macs, 1):.2f}×)  "
            f"at batch {self.batch}, {self.threads} threads",
        ]
        for name, value in self.test.items():
            beside = f"dense form {self.dense_test[name]:.4f}"
            if self.unhealed_test is not None:
                beside = f"before healing {self.unhealed_test[name]:.4f}, {beside}"
            lines.append(f"test {name} {value:.4f}  ({beside})")
        return "\n".join([*lines, "", table(header, rows, right=range(1, 6))])


def deploy_size(
    model: nn.Module,
    sizes: Frontier | None,
    out: str | os.PathLike[str],
    *,
    example: Example,
    formats: Sequence[str] = ("onnx",),
    test: Callable[[nn.Module], dict[str, float]] | None = None,
    judge: Judge | None = None,
    heal: Callable[[nn.Module], object] | None = None,
    multiple: int | None = None,
    int8: bool = False,
    fast: bool = False,
    **limits: float,
) -> Deployment:
    """Write the best size within limits to files in each format, verified, tested and timed.

    >>> sizes = lod.frontier(model, loss)
    >>> lod.deploy_size(model, sizes, "phone", example=x, max_macs=0.25, formats=["onnx", "pt2"])

    Without limits the model is written as it was trained, and `sizes` may be None. `limits` are
    those of `Frontier.pick`. They hold for what is written: ranks rounded if to a `multiple` (then
    `judge(ranks)` says how good that is), latency on this machine at the example's batch size.
    `fast`, and a limit on latency, trade size for speed: layers that are slower factored are
    multiplied out as far as the limits allow. `test(plain)` may recalibrate the plain model and
    returns what to report of it; `heal(plain)` may train it before, and the report says what it was
    without.

    A file that cannot be exported or verified, takes longer than the limit or, if it is to be
    `fast`, than the dense model, or is int8 and no smaller for it, is left out, and the result says
    why. If none is left it is an error, and nothing is there.
    """
    out = Path(out)
    require_usable(out, formats)
    ranks, point, plain = choose(model, sizes, limits, example, multiple, judge, fast=fast)
    dense = all_dense(model) if low_rank_layers(model) else copy.deepcopy(model)
    test, unhealed = test or (lambda plain: {}), None
    if heal is not None:
        unhealed = test(plain)
        heal(plain)
    reached, of_dense = test(plain), test(dense)
    cost, dense_cost = cost_of(plain, example), sizes.dense if sizes else cost_of(dense, example)
    with replacing_directory(out) as place:
        writer = _Writer(plain, dense, place, example, limits.get("max_latency"), fast)
        writer.write_all(formats, int8=int8)
        deployment = Deployment(
            point, ranks, cost.params, cost.macs or 0, dense_cost.params,
            dense_cost.macs or 0, reached, of_dense, unhealed, [*writer.files.values()],
            writer.left_out, batch_of(as_call(example)), torch.get_num_threads(),
        )  # fmt: skip
        write_manifest(place, deployment.to_dict())
    return deployment


def require_usable(out: Path, formats: Sequence[str]) -> None:
    """Refuse a place that is taken, and formats that are not known."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OptionError(f"{out} exists and is not empty. Give another place.")
    if unknown := [name for name in formats if name not in FORMATS]:
        raise OptionError(
            f"format {unknown[0]!r} is not known.{suggest(unknown[0], FORMATS)} Formats: "
            f"{listed(FORMATS)}."
        )


@dataclass
class _Writer:
    """Writes files into a directory, and times each beside the dense model in the same format."""

    small: nn.Module
    dense: nn.Module
    folder: Path
    example: Example
    most_seconds: float | None
    fast: bool
    files: dict[str, Deployed] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def write_all(self, formats: Sequence[str], *, int8: bool) -> None:
        """Write a file in each format; raises if none of them can be kept."""
        tell = ProgressLine("deploy")
        wanted: list[tuple[str, Literal["int8"] | None]] = [(format_, None) for format_ in formats]
        if int8 and "onnx" in formats:
            wanted.append(("onnx", "int8"))
        for format_, quantize in wanted:
            name = f"model.{quantize}.{format_}" if quantize else f"model.{format_}"
            tell(lambda name=name: f"writing {name}")  # type: ignore[misc]
            self._write(name, format_, quantize)
        if not self.files:
            raise OptionError(" ".join(dict.fromkeys(self.left_out.values())))

    def _write(self, name: str, format_: str, quantize: Literal["int8"] | None) -> None:
        """Write one file, or note why it is left out."""
        try:
            file = self._written(self.folder / name, format_, quantize)
        except (LayerError, OptionError, OutputError) as error:  # not a full disk
            self.left_out[name] = str(error)
            return
        if why := self._against(file):
            self.left_out[name] = why
            (self.folder / name).unlink()
        else:
            self.files[name] = file

    def _against(self, written: Deployed) -> str | None:
        """Say why a file is not good enough to be kept, or None."""
        name, most = written.file.path.name, self.most_seconds
        batch = batch_of(as_call(self.example))
        if most is not None and written.seconds > most * _NOISE:
            return (
                f"{name} takes {1e3 * written.seconds:.3g} ms here at batch {batch}, above "
                f"max_latency={most!r}. Allow more time, or ask for a smaller size too, such as by "
                "max_macs."
            )
        if self.fast and written.over_dense > _NOISE:
            return (
                f"{name} would be {written.over_dense:.2f}× as slow as its dense form here, at "
                f"batch {batch}. Try a larger batch or a smaller size, or take it as it is: "
                "without fast."
            )
        usual = self.files.get("model.onnx")
        if written.file.quantize and usual and written.file.bytes >= usual.file.bytes:
            return (
                f"{name} has {written.file.bytes:,} bytes, {usual.file.path.name} "
                f"{usual.file.bytes:,}: a model this small is no smaller in int8."
            )
        return None

    def _written(self, path: Path, format_: str, quantize: Literal["int8"] | None) -> Deployed:
        file = export(self.small, path, example=self.example, quantize=quantize)
        runs = drawn_call(as_call(self.example), device_of(self.small))
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            other = Path(scratch) / f"dense.{format_}"
            beside = export(self.dense, other, example=self.example)
            if format_ == "safetensors":  # rebuilt, it is the model itself
                run_small, run_dense = eager(self.small, runs), eager(self.dense, runs)
            else:
                small_file, dense_file = opened(path), opened(other)
                run_small, run_dense = lambda: small_file(runs), lambda: dense_file(runs)
            times = interleaved({"small": run_small, "dense": run_dense}, rounds=ROUNDS)
        ratio = statistics.median(ratios(times["small"], times["dense"]))
        dense_seconds = statistics.median(times["dense"])
        named = replace(file, path=Path(path.name))
        return Deployed(named, ratio * dense_seconds, dense_seconds, beside.bytes)
