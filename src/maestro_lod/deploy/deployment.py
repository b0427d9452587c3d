"""Deployment: choose the best size within limits, and write verified files of it."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from maestro_lod.deploy.export import FORMATS, QUANTIZED, Exported, export, open_runner
from maestro_lod.deploy.file_model import FileModel
from maestro_lod.deploy.manifest import write_manifest
from maestro_lod.errors import LayerError, OptionError, OutputError, listed, suggest
from maestro_lod.files.atomic import replacing_directory
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import cost_of
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.inputs import Example, ModelInputs, model_device
from maestro_lod.model.limits import Size
from maestro_lod.progress import ProgressLine
from maestro_lod.sizes.choice import Judge, choose
from maestro_lod.sizes.latency import all_dense
from maestro_lod.sizes.timing import ROUNDS, eager, interleaved, relative
from maestro_lod.text import table

_NOISE = 1.05  # timings that differ by less are equal


@dataclass(frozen=True)
class Deployed:
    """One file that was written, compared with the dense model in the same format."""

    file: Exported
    """Its path is the file name alone."""
    seconds: float
    dense_seconds: float
    dense_bytes: int
    test: dict[str, float]
    """Test metrics of the file: its own if it is quantized, else those of the model."""

    @property
    def over_dense(self) -> float:
        """The time of the file over the time of the dense model."""
        return self.seconds / self.dense_seconds


@dataclass(frozen=True)
class Deployment:
    """The result of `deploy_size`: the size that was chosen, and the files."""

    point: Size | None
    """The chosen size, with the costs of the written form; None if nothing was chosen."""
    ranks: dict[str, int]
    params: int
    macs: int
    dense_params: int
    dense_macs: int
    test: dict[str, float]
    dense_test: dict[str, float]
    untuned_test: dict[str, float] | None
    """Metrics before fine-tuning; None without it."""
    files: list[Deployed]
    left_out: dict[str, str]
    """The reason for each requested file that was not written."""
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
                "test": deployed.test,
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
                *(f"{value:.4f}" for value in deployed.test.values()),
            )
            for deployed in self.files
        ]
        header = (
            "file", "bytes", "of dense", "latency", "of dense", "difference",
            *(f"test {name}" for name in self.test),
        )  # fmt: skip
        lines = [
            f"params {self.params:,} ({self.params / self.dense_params:.2f}×)  "
            f"MACs {self.macs:,} ({self.macs / max(self.dense_macs, 1):.2f}×)  "
            f"at batch {self.batch}, {self.threads} threads",
        ]
        for name, value in self.test.items():
            other = f"dense form {self.dense_test[name]:.4f}"
            if self.untuned_test is not None:
                other = f"before fine-tuning {self.untuned_test[name]:.4f}, {other}"
            lines.append(f"test {name} {value:.4f}  ({other})")
        files = table(header, rows, right=range(1, len(header)))
        return "\n".join([*lines, "", files, *self._slower_than_dense()])

    def _slower_than_dense(self) -> list[str]:
        """Return a line for each file that is slower than dense, with the reason."""
        share = self.macs / max(self.dense_macs, 1)
        calls = "its layers are so small that calls take the time, not arithmetic"
        int8 = "quantizing activations takes more time than products in 8 bits save"
        return [
            f"{deployed.file.path.name} is slower than its dense form, with {share:.2f}× of its "
            f"MACs: {int8 if deployed.file.quantize else calls}."
            for deployed in self.files
            if deployed.over_dense > _NOISE
        ]


def deploy_size(
    model: nn.Module,
    sizes: Frontier | None,
    out: str | os.PathLike[str],
    *,
    example: Example,
    timed: Example | None = None,
    formats: Sequence[str] = ("onnx",),
    test: Callable[[nn.Module], dict[str, float]] | None = None,
    judge: Judge | None = None,
    finetune: Callable[[nn.Module], object] | None = None,
    multiple: int | None = None,
    int8: bool = False,
    calibration: Sequence[Example] = (),
    prefer_speed: bool = False,
    **limits: float,
) -> Deployment:
    """Write the best size within limits to files in each format, verified, tested and timed.

    The result lists files that are left out, with the reason: those that cannot be exported or
    verified, that take longer than the limit or, with `prefer_speed`, than the dense model, and
    int8 files that are not smaller. If no file is left, an error is raised and nothing is written.

    >>> sizes = lod.frontier(model, objective)
    >>> lod.deploy_size(model, sizes, "phone", example=x, max_macs=0.25, formats=["onnx", "pt2"])

    Args:
        model: The low-rank model.
        sizes: The sizes to choose from; None without limits.
        out: A new directory for the files.
        example: An input of the model, for which MACs are counted.
        timed: An input with the batch size to write and time files for; by default the example.
        formats: "onnx", "pt2", "pte" or "safetensors".
        test: `test(plain)` may recalibrate the extracted model and returns metrics to report.
        judge: `judge(ranks)` evaluates ranks that were rounded, which the search did not see.
        finetune: `finetune(plain)` may train the extracted model before it is written; the report
            has its metrics before and after.
        multiple: Round ranks to multiples of this number.
        int8: Write an additional .onnx and .pte file in 8 bits, and test it too.
        calibration: Inputs from which int8 files take the ranges of activations; see `export`.
        prefer_speed: Multiply out layers that are slower factored, as far as the limits allow, and
            leave out files slower than dense. A limit on latency multiplies out too, and so does
            a limit on the size if the frontier has measured latencies.
        **limits: The limits of `Frontier.pick`. They hold for the written model: for rounded ranks,
            and for the latency on this machine at the example's batch size. Without limits the
            model is written at its stored ranks.

    Returns:
        The chosen size and the files, with costs, times and metrics.

    Raises:
        OptionError: An option is not usable, no size is within the limits, or no file can be kept.
    """
    out = Path(out)
    require_usable(out, formats)
    ranks, point, plain = choose(
        model, sizes, limits, example, multiple, judge, timed=timed, prefer_speed=prefer_speed
    )
    timed = example if timed is None else timed
    dense = all_dense(model) if low_rank_layers(model) else copy.deepcopy(model)
    test, untuned = test or (lambda plain: {}), None
    if finetune is not None:
        untuned = test(plain)
        finetune(plain)
    reached, reached_dense = test(plain), test(dense)
    cost, dense_cost = cost_of(plain, example), sizes.dense if sizes else cost_of(dense, example)
    with replacing_directory(out) as directory:
        writer = _Writer(
            plain, dense, directory, timed, limits.get("max_latency"), prefer_speed,
            calibration, test, reached,
        )  # fmt: skip
        writer.write_all(formats, int8=int8)
        deployment = Deployment(
            point, ranks, cost.params, cost.macs or 0, dense_cost.params,
            dense_cost.macs or 0, reached, reached_dense, untuned, [*writer.files.values()],
            writer.left_out, ModelInputs.from_example(timed).batch_size, torch.get_num_threads(),
        )  # fmt: skip
        write_manifest(directory, deployment.to_dict())
    return deployment


def require_usable(out: Path, formats: Sequence[str]) -> None:
    """Raise OptionError if `out` is not empty, or a format is not known."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OptionError(f"{out} exists and is not empty. Give another directory.")
    if unknown := [name for name in formats if name not in FORMATS]:
        raise OptionError(
            f"format {unknown[0]!r} is not known.{suggest(unknown[0], FORMATS)} Formats: "
            f"{listed(FORMATS)}."
        )


@dataclass
class _Writer:
    """Writes files into a directory, and times each together with the dense model in its format."""

    small: nn.Module
    dense: nn.Module
    folder: Path
    example: Example
    most_seconds: float | None
    prefer_speed: bool
    calibration: Sequence[Example]
    test: Callable[[nn.Module], dict[str, float]]
    reached: dict[str, float]
    files: dict[str, Deployed] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def write_all(self, formats: Sequence[str], *, int8: bool) -> None:
        """Write a file in each format; raise OptionError if none can be kept."""
        progress = ProgressLine("deploy")
        requested: list[tuple[str, Literal["int8"] | None]] = [
            (format_, None) for format_ in formats
        ]
        if int8:
            requested += [(format_, "int8") for format_ in formats if format_ in QUANTIZED]
        for format_, quantize in requested:
            name = f"model.{quantize}.{format_}" if quantize else f"model.{format_}"
            progress(lambda name=name: f"writing {name}")  # type: ignore[misc]
            self._write(name, format_, quantize)
        if not self.files:
            raise OptionError(" ".join(dict.fromkeys(self.left_out.values())))

    def _write(self, name: str, format_: str, quantize: Literal["int8"] | None) -> None:
        """Write one file, or add the reason to `left_out`."""
        try:
            file = self._written(self.folder / name, format_, quantize)
        except (LayerError, OptionError, OutputError) as error:  # not a full disk
            self.left_out[name] = str(error)
            return
        if why := self._reason_against(file):
            self.left_out[name] = why
            (self.folder / name).unlink()
        else:
            self.files[name] = file

    def _reason_against(self, written: Deployed) -> str | None:
        """Return the reason not to keep a file, or None."""
        name, most = written.file.path.name, self.most_seconds
        batch = ModelInputs.from_example(self.example).batch_size
        if most is not None and written.seconds > most * _NOISE:
            return (
                f"{name} takes {1e3 * written.seconds:.3g} ms on this machine at batch {batch}, "
                f"above max_latency={most!r}. Allow more time, or add a limit on the size, such as "
                "max_macs."
            )
        if self.prefer_speed and written.over_dense > _NOISE:
            return (
                f"{name} takes {written.over_dense:.2f}× the time of its dense form on this "
                f"machine at batch {batch}. Try a larger batch or a smaller size, or leave "
                "prefer_speed out."
            )
        usual = self.files.get(f"model.{written.file.format}")
        if written.file.quantize and usual and written.file.bytes >= usual.file.bytes:
            return (
                f"{name} has {written.file.bytes:,} bytes, and {usual.file.path.name} has "
                f"{usual.file.bytes:,}: int8 does not make a model of this size smaller."
            )
        return None

    def _written(self, path: Path, format_: str, quantize: Literal["int8"] | None) -> Deployed:
        file = export(
            self.small, path, example=self.example, quantize=quantize,
            calibration=self.calibration if quantize else (),
        )  # fmt: skip
        runs = ModelInputs.from_example(self.example).drawn(model_device(self.small))
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            other = Path(scratch) / f"dense.{format_}"
            dense_export = export(self.dense, other, example=self.example)
            if format_ == "safetensors":  # rebuilt, it is the model itself
                run_small, run_dense = eager(self.small, runs), eager(self.dense, runs)
            else:
                small_file, dense_file = open_runner(path), open_runner(other)
                run_small, run_dense = lambda: small_file(runs), lambda: dense_file(runs)
            times = interleaved({"small": run_small, "dense": run_dense}, rounds=ROUNDS)
        seconds, ratio = relative(times, "small", "dense")
        test = self.test(FileModel(file, self.small, runs)) if quantize else self.reached
        named = replace(file, path=Path(path.name))
        return Deployed(named, seconds, seconds / ratio, dense_export.bytes, test)
