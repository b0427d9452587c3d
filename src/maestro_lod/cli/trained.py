"""Models of finished runs: frontier search and deployment."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maestro_lod.cli.data import Data
from maestro_lod.cli.report import write_report
from maestro_lod.cli.run import Run
from maestro_lod.cli.run_files import require_same_weights, weights_digest
from maestro_lod.cli.setup import dense_model_of, loss_of, optimizer_of
from maestro_lod.deploy.deployment import (
    Deployment,
    deploy_size,
    require_usable,
)
from maestro_lod.deploy.export import QUANTIZED
from maestro_lod.errors import OptionError, require_whole
from maestro_lod.files.atomic import alone_in, remove_leftovers
from maestro_lod.files.json_files import read_json_file
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.checkpoint import save
from maestro_lod.model.cost import cost_of
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.inputs import (
    Loss,
    ModelInputs,
    in_mode,
    map_tensors,
    model_device,
    on_device,
    samples_in,
)
from maestro_lod.model.limits import require_limits
from maestro_lod.model.surgery import decompose
from maestro_lod.progress import OnProgress
from maestro_lod.sizes.frontier_search import frontier
from maestro_lod.sizes.latency import all_dense, latency
from maestro_lod.train.evaluate import (
    SAMPLES,
    correct_predictions,
    evaluate,
    evaluation_loss,
    first_samples,
    recalibrate,
    score,
)
from maestro_lod.train.finetune import finetune
from maestro_lod.train.fit import FitOptions


@dataclass(frozen=True)
class Trained:
    """Model of a finished run in low-rank form, and its data."""

    run: Run
    model: nn.Module
    data: Data
    plain: nn.Module | None = None
    """The model of the run if it is not low-rank; zero weights stay zero in it."""

    @classmethod
    def of(cls, run: Run) -> Trained:
        """Load a finished run; a dense model is decomposed by SVD, without any training."""
        model, data = run.trained()
        if low_rank_layers(model):
            return cls(run, model, data)
        return cls(run, decompose(copy.deepcopy(model)), data, plain=model)

    def dense(self) -> nn.Module:
        """Return the model with every layer multiplied out."""
        return all_dense(self.model)

    def example(self, batch: int) -> Any:
        """Return inputs with `batch` samples, copies of the data's example."""
        return map_tensors(
            self.data.example, lambda value: value.repeat(batch, *[1] * (value.ndim - 1))
        )

    def tested(self, plain: nn.Module) -> dict[str, float]:
        """Recalibrate BatchNorm of a plain model, in place, and return its test metrics."""
        recalibrate(plain, self.data.train, max(1, self.run.recipe.recalibration))
        return self.test(plain)

    def test(self, model: nn.Module | None = None) -> dict[str, float]:
        """Return the test metrics of a model, by default of the run's at its active ranks."""
        if self.data.test is None:
            return {}
        return evaluate(model or self.model, self.data.test, self.loss)

    @property
    def loss(self) -> Loss:
        """The loss that evaluates sizes: the run's own, or plain cross-entropy."""
        return evaluation_loss(loss_of(self.run.recipe))


# -- the frontier ------------------------------------------------------------------------------


_SEARCHED, _COMPARED = 256, 512
"""Training samples on which the measured search chooses ranks, and then compares its sizes."""


def search(
    trained: Trained, *, method: str = "measured", resume: Path | None = None, **options: Any
) -> Frontier:
    """Search the sizes of the model of a run on its training data.

    Accuracy is measured on validation data if there is any, never on test data. Shares are relative
    to the dense model of the recipe at its full width.

    Args:
        trained: The model of a finished run.
        method: As for `frontier`. "measured" chooses ranks on 256 samples, and compares the sizes
            that it found on 512; the other methods do both on 2,048.
        resume: A directory in which the search stores its progress.
        **options: Further arguments of `frontier`.

    Returns:
        All sizes.
    """
    if method != "measured" or options.get("ranks") is not None:
        return _compared(trained, SAMPLES, method=method, resume=resume, **options)
    searched, compared = (resume and resume / stage for stage in ("search", "sizes"))
    few = _Samples.of(trained, _SEARCHED)
    chosen = frontier(
        trained.model, few.loss, example=trained.data.example, resume=searched, **options
    )
    options.pop("until", None)
    ranks = [size.ranks for size in chosen[1:]]
    found = _compared(trained, _COMPARED, ranks=ranks, memory=0, resume=compared, **options)
    return replace(found, method=chosen.method)


def _compared(trained: Trained, samples: int, **options: Any) -> Frontier:
    """Search or evaluate sizes with the same training samples for all of them."""
    batches, held_out = _Samples.of(trained, samples), trained.data.validation
    accuracy = None
    if _has_classes(trained.model, batches.batches):
        accuracy = batches.accuracy
        if held_out is not None:
            accuracy = partial(_accuracy, batches=held_out)
    found = frontier(
        trained.model, batches.loss, example=trained.data.example, accuracy=accuracy, **options
    )
    dense = cost_of(dense_model_of(trained.run.recipe, trained.data), trained.data.example)
    return replace(found, dense=replace(found.dense, **asdict(dense)))  # which may be wider


@dataclass(frozen=True)
class _Samples:
    """Training samples; one evaluation of a size returns its loss and its accuracy."""

    batches: list[tuple[Any, Any]]
    function: Loss
    accuracies: dict[tuple[int, ...], float] = field(default_factory=dict)
    """The accuracy at active ranks."""

    @classmethod
    def of(cls, trained: Trained, count: int) -> _Samples:
        return cls(first_samples(trained.data.train, count), trained.loss)

    def loss(self, model: nn.Module) -> float:
        means = score(model, self.batches, self.function).means()
        if "accuracy" in means:
            self.accuracies[self._ranks(model)] = means["accuracy"]
        return means.get("loss", math.nan)

    def accuracy(self, model: nn.Module) -> float:
        if self._ranks(model) not in self.accuracies:  # the loss is of a resumed search
            self.loss(model)
        return self.accuracies[self._ranks(model)]

    def _ranks(self, model: nn.Module) -> tuple[int, ...]:
        return tuple(layer.active_rank for layer in low_rank_layers(model).values())


def find_frontier(
    trained: Trained,
    *,
    method: str = "measured",
    cost: str = "macs",
    on_progress: OnProgress | None = None,
) -> Frontier:
    """Search the sizes of a run's model; write them to frontier.json, its file and its report.

    A search that was stopped is resumed.
    """
    data, run = trained.data, trained.run
    resume = run.directory / f"frontier-{method}{'' if cost == 'macs' else f'-{cost}'}.unfinished"
    with alone_in(run.directory):
        remove_leftovers(run.directory)
        found = search(trained, method=method, cost=cost, on_progress=on_progress, resume=resume)
        measured = latency(trained.model, data.example)
        found = found.with_latency(measured.predict, measured.dense)
        held_out = "training" if data.validation is None else "validation"
        of_model = {
            "weights": weights_digest(trained.model),
            "measured_on": {"loss": "training", "accuracy": held_out},
        }
        run.write_json("frontier.json", {**json.loads(found.to_json()), **of_model})
        if trained.plain is None:  # one file with every size and the ranks to choose from
            save(trained.model, run.model_file, frontier=found)
        shutil.rmtree(resume, ignore_errors=True)
        write_report([run.directory], run.directory / "report.html")
    return found


def frontier_of(trained: Trained, on_progress: OnProgress | None = None) -> Frontier:
    """Return the frontier that a run has, or search it."""
    path = trained.run.directory / "frontier.json"
    if not path.exists():
        return find_frontier(trained, on_progress=on_progress)
    found = Frontier.load(path)
    require_same_weights(read_json_file(path), trained.model, path)
    return found


def _accuracy(model: nn.Module, batches: Any) -> float:
    device, correct, count = model_device(model), 0, 0
    for inputs, target in batches:
        hits = correct_predictions(
            ModelInputs.wrap(inputs).to(device).call(model), on_device(target, device)
        )
        assert hits is not None
        correct, count = correct + int(hits.sum()), count + hits.numel()
        if count >= SAMPLES:
            break
    return correct / count


def _has_classes(model: nn.Module, batches: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether the model gives class scores, so that it has an accuracy."""
    device, (inputs, target) = model_device(model), batches[0]
    with torch.no_grad(), in_mode(model, training=False):
        output = ModelInputs.wrap(inputs).to(device).call(model)
    return correct_predictions(output, on_device(target, device)) is not None


# -- deployment --------------------------------------------------------------------------------


def deploy(
    trained: Trained,
    limits: Mapping[str, float],
    formats: Sequence[str],
    out: Path,
    *,
    batch: int = 1,
    multiple: int | None = None,
    int8: bool = False,
    prefer_speed: bool = False,
    finetune_epochs: int = 0,
    on_progress: OnProgress | None = None,
) -> Deployment:
    """Export the model of a run, or its best size within limits, by `deploy_size`.

    Sizes are searched only if there is a limit. Before the export the model is trained for
    `finetune_epochs`; finished epochs are stored in the directory of the run, so that the same call
    resumes.
    """
    require_deployable(limits, formats, out, int8=int8)
    require_whole("finetune_epochs", finetune_epochs)
    cut = bool(limits or multiple or prefer_speed)
    return deploy_size(
        trained.model if cut or trained.plain is None else trained.plain,
        frontier_of(trained, on_progress) if limits else None,
        out,
        example=trained.data.example,
        timed=trained.example(batch),
        formats=formats,
        test=trained.tested,
        judge=lambda ranks: search(trained, ranks=[ranks])[-1],
        finetune=partial(_finetuned, trained, finetune_epochs) if finetune_epochs else None,
        multiple=multiple,
        int8=int8,
        calibration=_calibration(trained) if int8 else (),
        prefer_speed=prefer_speed,
        **limits,
    )


_CALIBRATED = 128  # samples per batch: ranges of activations need few


def _calibration(trained: Trained) -> list[ModelInputs]:
    batches = first_samples(trained.data.train, _CALIBRATED)
    return [ModelInputs.wrap(inputs).rows(0, _CALIBRATED) for inputs, _ in batches]


_NOTICEABLE = 0.01  # fall of the accuracy


def quality_loss(trained: Trained, done: Deployment) -> str | None:
    """Return a warning if a deployed size is noticeably less accurate than the run; else None.

    A fall is noticeable if it exceeds one point and the standard errors of both accuracies.
    """
    if trained.data.test is None or "accuracy" not in done.test:
        return None
    before, after = done.dense_test["accuracy"], done.test["accuracy"]
    count = sum(samples_in(target) for _, target in trained.data.test)
    error = math.sqrt((before * (1 - before) + after * (1 - after)) / max(1, count))
    if before - after <= max(_NOTICEABLE, error):
        return None
    return (
        f"this size is worse: test accuracy fell from {before:.1%} to {after:.1%}. Deploy a larger "
        "size, train it with --finetune-epochs 1, or train the run with elastic for every size."
    )


def _finetuned(trained: Trained, epochs: int, plain: nn.Module) -> None:
    """Train a deployed model with the settings of its run."""
    recipe = trained.run.recipe
    name = f"finetuning-{epochs}-{weights_digest(plain)[:16]}.unfinished"
    options = FitOptions(recipe.clip_norm, recipe.accumulate, recipe.amp, recipe.recalibration)
    finetune(
        plain, trained.data.train, optimizer=optimizer_of(recipe, plain), epochs=epochs,
        loss=loss_of(recipe), seed=recipe.seed, options=options,
        resume=trained.run.directory / name,
    )  # fmt: skip


def require_deployable(
    limits: Mapping[str, float], formats: Sequence[str], out: Path, *, int8: bool = False
) -> None:
    """Raise OptionError for unusable options before anything is loaded or written."""
    if limits:
        require_limits(limits)
    require_usable(out, formats)
    if int8 and not set(formats) & set(QUANTIZED):
        raise OptionError("--int8 needs the format onnx or pte. Add --to onnx, or remove --int8.")
