"""What `lod frontier`, `lod deploy` and `lod bench` do with a finished run."""

from __future__ import annotations

import copy
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.checkpoint import save
from maestro_lod.cost import as_call, dense_macs, summary
from maestro_lod.deploy.export import Exported, export, opened
from maestro_lod.deploy.frontier import frontier
from maestro_lod.deploy.latency import Latency, all_dense, latency, round_ranks
from maestro_lod.deploy.points import Frontier, Point
from maestro_lod.deploy.search import Cost, Costs
from maestro_lod.deploy.trial import drawn_call, interleaved
from maestro_lod.deploy.trial import run as run_call
from maestro_lod.errors import CheckpointError, OptionError
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.surgery import Form, decompose, extract
from maestro_lod.table import table
from maestro_lod.tasks.data import Data
from maestro_lod.tasks.run import Run
from maestro_lod.tasks.setup import loss_of
from maestro_lod.train.evaluate import (
    CrossEntropy,
    Loss,
    Score,
    call,
    device_of,
    evaluate,
    hits_of,
    in_mode,
    on_device,
    recalibrate,
    samples_in,
    sums,
)

SAMPLES = 2048  # of the training set, in the one batch that the search looks at; as in the paper
SUFFIXES = {"onnx": ".onnx", "pt2": ".pt2", "safetensors": ".safetensors"}
_ROUNDS = 15
_NOISE = 1.05  # two timings this close are the same

Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Trained:
    """A finished run, loaded: its model, low-rank in any case, and its data."""

    run: Run
    model: nn.Module
    data: Data

    @classmethod
    def of(cls, run: Run) -> Trained:
        """Load a finished run; a dense model is decomposed by SVD, without any training."""
        model, data = run.trained()
        if not low_rank_layers(model):
            chosen = run.recipe.decompose
            model = decompose(model, only=chosen.only, skip=chosen.skip or None)
        return cls(run, model, data)

    def dense(self) -> nn.Module:
        """Return the model with every layer multiplied out."""
        return all_dense(self.model)

    def example(self, batch: int) -> Any:
        """Return inputs of so many samples, copies of the data's example."""

        def repeated(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.repeat(batch, *[1] * (value.ndim - 1))
            if isinstance(value, Mapping):
                return {key: repeated(part) for key, part in value.items()}
            return tuple(map(repeated, value)) if isinstance(value, tuple) else value

        return repeated(self.data.example)

    def tested(self, plain: nn.Module) -> dict[str, float]:
        """Recalibrate BatchNorm of a plain model, in place, and return its test metrics."""
        recalibrate(plain, self.data.train, max(1, self.run.recipe.recalibration))
        return self.test(plain)

    def test(self, model: nn.Module | None = None) -> dict[str, float]:
        """Return the test metrics of the model, at its active ranks, or of another one."""
        if self.data.test is None:
            return {}
        return evaluate(model or self.model, self.data.test, self.loss)

    @property
    def loss(self) -> Loss:
        """What sizes are judged by, as the run itself was: its own loss, or plain cross-entropy."""
        loss = loss_of(self.run.recipe)
        return CrossEntropy() if isinstance(loss, CrossEntropy) else loss


# -- the frontier ------------------------------------------------------------------------------


def search(trained: Trained, **options: Any) -> Frontier:
    """Search the sizes of a run's model on its training data; `options` are those of `frontier`.

    Accuracies are those of the validation data, if there are any: the test set stays out.
    """
    batches, loss = _search_batches(trained.data), trained.loss
    held_out = trained.data.validation or batches
    has_classes = _has_classes(trained.model, batches)
    return frontier(
        trained.model,
        lambda model: _mean_loss(model, batches, loss),
        example=trained.data.example,
        accuracy=(lambda model: _accuracy(model, held_out)) if has_classes else None,
        **options,
    )


def find_frontier(
    trained: Trained, *, method: str = "look-ahead", progress: Progress | None = None
) -> Frontier:
    """Search the sizes of a run's model, and write them to frontier.json and the elastic file.

    A search that was stopped goes on where it was.
    """
    data, run = trained.data, trained.run
    journal = run.directory / f"frontier-{method}.jsonl"
    found = search(trained, method=method, progress=progress, resume=journal)
    measured = latency(trained.model, data.example)
    found = found.with_latency(measured.predict, measured.dense)
    found.save(run.directory / "frontier.json")
    if run.recipe.method == "lod":  # one file, every size, and how to choose among them
        save(trained.model, run.model_file, frontier=found)
    journal.unlink(missing_ok=True)
    return found


def frontier_of(trained: Trained, progress: Progress | None = None) -> Frontier:
    """Return the frontier that a run has, or search it."""
    path = trained.run.directory / "frontier.json"
    return Frontier.load(path) if path.exists() else find_frontier(trained, progress=progress)


def _search_batches(data: Data) -> list[tuple[Any, Any]]:
    """Return the same training samples each time, as one batch where they can be put together."""
    torch.manual_seed(0)
    batches, count = [], 0
    for inputs, target in data.train:
        batches.append((inputs, target))
        count += samples_in(target)
        if count >= SAMPLES:
            break
    if not batches:
        raise OptionError("the training data is empty: there is nothing to search on.")
    if all(isinstance(part, Tensor) for batch in batches for part in batch):
        inputs = torch.cat([inputs for inputs, _ in batches])[:SAMPLES]
        return [(inputs, torch.cat([target for _, target in batches])[:SAMPLES])]
    return batches


def _mean_loss(model: nn.Module, batches: Sequence[tuple[Any, Any]], loss: Loss) -> float:
    """Return the mean loss over all targets of some batches; NaN if none of them counts."""
    device, score = device_of(model), Score()
    for inputs, target in batches:
        target = on_device(target, device)
        output = call(model, on_device(inputs, device))
        score.add(loss(output, target), output, target, summed=sums(loss))
    return score.means().get("loss", math.nan)


def _accuracy(model: nn.Module, batches: Any) -> float:
    device, correct, count = device_of(model), 0, 0
    for inputs, target in batches:
        hits = hits_of(call(model, on_device(inputs, device)), on_device(target, device))
        assert hits is not None
        correct, count = correct + int(hits.sum()), count + hits.numel()
        if count >= SAMPLES:
            break
    return correct / count


def _has_classes(model: nn.Module, batches: Sequence[tuple[Any, Any]]) -> bool:
    """Say whether the model scores classes that are the targets, so that it has an accuracy."""
    device, (inputs, target) = device_of(model), batches[0]
    with torch.no_grad(), in_mode(model, training=False):
        output = call(model, on_device(inputs, device))
    return hits_of(output, on_device(target, device)) is not None


# -- deployment --------------------------------------------------------------------------------


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
            lines.append(f"test {name} {value:.4f}  (dense form {self.dense_test[name]:.4f})")
        return "\n".join([*lines, "", table(header, rows, right=range(1, 7))])


def deploy(
    trained: Trained,
    limits: Mapping[str, float],
    formats: Sequence[str],
    out: Path,
    *,
    batch: int = 1,
    multiple: int | None = None,
    int8: bool = False,
    allow_slower: bool = False,
    progress: Progress | None = None,
) -> Deployment:
    """Write the best size within limits to files in each format, verified, tested and timed.

    The limits hold for what is written, ranks rounded if to a `multiple`, latency on this machine
    at this batch size. Layers that are slower factored are multiplied out as far as the limits
    allow. A file that takes longer than the limit is refused, and so is one that is slower than the
    dense model in its format, unless `allow_slower`; then nothing is left of any.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OptionError(f"--out {out} exists and is not empty. Give another.")
    found = frontier_of(trained, progress)
    example = trained.example(batch)
    measured = latency(trained.model, example)
    found = found.with_latency(measured.predict, measured.dense)  # its own are of another batch
    point, small = _best_within(trained, found, limits, measured, multiple)
    dense = trained.dense()
    test, dense_test = trained.tested(small), trained.tested(dense)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as workplace:
        files = [
            _written(small, dense, Path(workplace), format_, example, quantize)
            for format_ in formats
            for quantize in ((None, "int8") if int8 and format_ == "onnx" else (None,))
        ]
        longest = max(files, key=lambda file: file.seconds)
        if longest.seconds > limits.get("max_latency", math.inf) * _NOISE:
            raise OptionError(
                f"{longest.file.path.name} takes {1e3 * longest.seconds:.3g} ms here at batch "
                f"{batch}, above max_latency={limits['max_latency']!r}. Allow more time, or ask "
                "for a smaller size too, such as with --max-macs."
            )
        slow = [file for file in files if file.over_dense > _NOISE]
        if slow and not allow_slower:
            worst = max(slow, key=lambda file: file.over_dense)
            raise OptionError(
                f"{worst.file.path.name} would be {worst.over_dense:.2f}× as slow as its dense "
                f"form here, at batch {batch}. Try a larger --batch or a smaller size, or take it "
                "as it is with --allow-slower."
            )
        deployment = Deployment(
            point, point.params, point.macs or 0, found.dense.params,
            found.dense.macs or 0, test, dense_test, files, batch, torch.get_num_threads(),
        )  # fmt: skip
        (Path(workplace) / "deploy.json").write_text(json.dumps(deployment.to_dict(), indent=1))
        try:
            out.mkdir(exist_ok=True)
            for file in Path(workplace).iterdir():
                file.replace(out / file.name)
        except OSError as error:
            raise CheckpointError(f"cannot write to {out} ({error.strerror}).") from None
    return deployment


class _Forms:
    """Chooses the form of each layer as it was told."""

    def __init__(self, forms: Mapping[str, Form]) -> None:
        self.forms = forms

    def choose(self, name: str, rank: int) -> Form:
        return self.forms[name]


def _best_within(
    trained: Trained,
    found: Frontier,
    limits: Mapping[str, float],
    measured: Latency,
    multiple: int | None = None,
) -> tuple[Point, nn.Module]:
    """Return the best size that is within the limits as it is deployed, and its plain model.

    With a `multiple`, sizes are those of the frontier with their ranks rounded. What such a size
    is worth was not searched, so it is evaluated.
    """
    found.point(**limits)  # refuses limits that no size meets even as it was found
    model, example = trained.model, trained.data.example
    costs = Costs(model, dense_macs(model, example))
    tried: list[Point] = []
    for point in found.within(limits):
        ranks = point.ranks
        if multiple is not None:
            ranks = round_ranks(model, ranks, multiple=multiple)
        if any(ranks == other.ranks for other in tried):
            continue
        size, forms = _fastest_within(costs, replace(point, ranks=ranks), found, limits, measured)
        if ranks != point.ranks and _holds(size, found, limits):
            again = search(trained, ranks=[ranks])[-1]
            size = replace(size, loss=again.loss, accuracy=again.accuracy)
        if _holds(size, found, limits):
            plain = extract(model, ranks, by=_Forms(forms))
            size = replace(size, **asdict(_cost_of(plain, example)))
            if _holds(size, found, limits):  # where a layer has no plain form of its factors
                return size, plain
        tried.append(size)
    why = replace(found, points=tuple(tried)).why_none(limits, together=True)
    rounded = "" if multiple is None else f" with its ranks rounded to multiples of {multiple}"
    raise OptionError(
        f"{why} That is as it would be deployed{rounded}. Give wider limits"
        f"{'' if multiple is None else ', or another --round'}."
    )


def _fastest_within(
    costs: Costs,
    point: Point,
    found: Frontier,
    limits: Mapping[str, float],
    measured: Latency,
) -> tuple[Point, dict[str, Form]]:
    """Multiply out the layers that are slower factored, as long as limits on the size hold.

    Returns the point with the costs of this, whether or not it is within the limits, and the forms.
    """
    sizes = {key: limits[key] for key in limits if key in ("max_params", "max_macs", "max_bytes")}
    forms = costs.forms(point.ranks)

    def in_forms(forms: Mapping[str, Form]) -> Point:
        seconds = measured.predict(point.ranks, forms=forms)
        return replace(point, latency=seconds, **asdict(costs.at(point.ranks, forms)))

    for name, form in [*forms.items()]:
        if form == "factored" and measured.choose(name, point.ranks[name]) == "dense":
            tried: dict[str, Form] = {**forms, name: "dense"}
            if not sizes or _holds(in_forms(tried), found, sizes):
                forms = tried
    return in_forms(forms), forms


def _cost_of(plain: nn.Module, example: Any) -> Cost:
    counted = summary(plain, example)
    size = sum(t.nbytes for t in (*plain.parameters(), *plain.buffers()))
    return Cost(counted.params, counted.macs, size)


def _holds(point: Point, found: Frontier, limits: Mapping[str, float]) -> bool:
    """Say whether a point is within limits, of which shares are of the frontier's dense model."""
    return bool(replace(found, points=(point,)).within(limits))


def _written(
    small: nn.Module, dense: nn.Module, folder: Path, format_: str, example: Any, quantize: Any
) -> Deployed:
    """Export a model, and time the file beside the dense model in the same format."""
    name = f"model.{quantize}" if quantize else "model"
    path = folder / f"{name}{SUFFIXES[format_]}"
    file = export(small, path, example=example, quantize=quantize)
    runs = drawn_call(as_call(example), device_of(small))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        other = Path(scratch) / path.name
        export(dense, other, example=example)
        if format_ == "safetensors":  # rebuilt, it is the model itself
            run_small, run_dense = _eager(small, runs), _eager(dense, runs)
        else:
            small_file, dense_file = opened(path), opened(other)
            run_small, run_dense = lambda: small_file(runs), lambda: dense_file(runs)
        with torch.inference_mode():
            times = interleaved({"small": run_small, "dense": run_dense}, rounds=_ROUNDS)
    ratio = statistics.median(a / b for a, b in zip(times["small"], times["dense"], strict=True))
    seconds = statistics.median(times["dense"])
    return Deployed(replace(file, path=Path(path.name)), ratio * seconds, seconds)


def _eager(model: nn.Module, runs: Any) -> Callable[[], object]:
    model = copy.deepcopy(model).eval()
    return lambda: run_call(model, runs)


# -- comparison --------------------------------------------------------------------------------


def bench(
    trained: Trained,
    *,
    shares: Sequence[float] = (0.5, 0.25, 0.1),
    batch: int = 1,
    progress: Progress | None = None,
) -> str:
    """Return a table of dense, trained and deployed sizes: cost, latency and test metrics."""
    found = frontier_of(trained, progress)
    measured = latency(trained.model, example := trained.example(batch))
    models: dict[str, nn.Module] = {
        "dense": trained.dense(),
        "as trained": extract(trained.model, by=measured),
    }
    for share in shares:
        try:
            _, small = _best_within(trained, found, {"max_macs": share}, measured)
        except OptionError:
            continue  # the frontier does not reach so far down
        models[f"MACs ≤ {share:g}×"] = small
    tests = {name: trained.tested(model) for name, model in models.items()}
    runs = drawn_call(as_call(example), device_of(trained.model))
    with torch.inference_mode():
        times = interleaved(
            {name: _eager(model, runs) for name, model in models.items()}, rounds=_ROUNDS
        )
    dense_cost = summary(models["dense"], trained.data.example)
    rows = []
    for name, model in models.items():
        cost = summary(model, trained.data.example)
        size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        ratio = statistics.median(a / b for a, b in zip(times[name], times["dense"], strict=True))
        rows.append(
            (
                name,
                f"{cost.params:,} ({cost.params / dense_cost.params:.2f}×)",
                f"{cost.macs:,} ({cost.macs / dense_cost.macs:.2f}×)",
                f"{size:,}",
                f"{1e3 * statistics.median(times[name]):.3f} ms ({ratio:.2f}×)",
                *(f"{value:.4f}" for value in tests[name].values()),
            )
        )
    header = ("", "params", "MACs", "bytes", "latency", *(f"test {n}" for n in tests["dense"]))
    method = f"batch {batch}, {torch.get_num_threads()} threads, medians of {_ROUNDS} rounds"
    return f"{table(header, rows, right=range(1, len(header)))}\n{method}"
