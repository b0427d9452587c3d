"""`lod frontier`, `lod deploy` and `lod bench` on a finished run."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.cli import trained as deployment
from maestro_lod.cli.main import main
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.cli.run import Run
from maestro_lod.cli.trained import Trained
from maestro_lod.deploy import deployment as files
from maestro_lod.deploy.export import export, open_runner
from maestro_lod.errors import CheckpointError, LayerError, OptionError
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import count_params
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.inputs import ModelInputs
from maestro_lod.model.limits import Size
from maestro_lod.sizes import choice
from maestro_lod.sizes import latency as timing
from maestro_lod.sizes.latency import Latency, LayerLatency, round_ranks

TINY = ["--set", "data.limit=300", "--set", "epochs=3", "--set", "threads=1", "--quiet"]


def lod_program(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run, without a penalty, with its frontier."""
    directory = tmp_path_factory.mktemp("runs") / "a"
    out = ("--out", str(directory))
    assert lod_program("train", "digits", *TINY, "--set", "penalty=0", *out) == 0
    assert lod_program("frontier", str(directory), "--quiet") == 0
    return directory


def test_a_frontier_goes_into_the_run_its_report_and_its_file(finished: Path) -> None:
    sizes = Frontier.load(finished / "frontier.json")
    assert sizes[0].ranks == lod.ranks(Trained.of(Run.open(finished)).model)
    assert all(point.accuracy is not None and point.latency for point in sizes)
    assert "Every size" in (finished / "report.html").read_text()
    assert not list(finished.glob("frontier-*.unfinished"))
    small = lod.load(finished / "model.safetensors", into=LeNet(), max_params=0.5)
    assert lod.ranks(small) == sizes.pick(max_params=0.5)


def test_a_frontier_of_another_model_is_refused(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    record = json.loads((copy / "frontier.json").read_text())
    (copy / "frontier.json").write_text(json.dumps(record | {"weights": "another's"}))
    trained = Trained.of(Run.open(copy))
    with pytest.raises(CheckpointError, match=r"frontier\.json is of another model"):
        deployment.frontier_of(trained)
    del record["weights"]  # as older versions wrote it
    (copy / "frontier.json").write_text(json.dumps(record))
    assert deployment.frontier_of(trained) == Frontier.load(copy / "frontier.json")


def test_searching_again_gives_the_same_frontier(finished: Path) -> None:
    before = Frontier.load(finished / "frontier.json")
    again = deployment.find_frontier(Trained.of(Run.open(finished)))
    assert [p.ranks for p in again] == [p.ranks for p in before]
    assert [p.loss for p in again] == [p.loss for p in before]


@pytest.mark.slow
def test_a_run_is_deployed_to_every_format(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, limits = tmp_path / "phone", ("--max-macs", "0.5", "--quiet")
    formats = ("--to", "onnx", "--to", "pt2", "--to", "safetensors", "--int8")
    assert lod_program("deploy", str(finished), *formats, *limits, "--out", str(out)) == 0
    names = {"model.onnx", "model.int8.onnx", "model.pt2", "model.safetensors", "deploy.json"}
    assert {file.name for file in out.iterdir()} == names
    written = json.loads((out / "deploy.json").read_text())
    assert written["macs"] <= 0.5 * written["dense_macs"]
    assert written["test"].keys() == {"loss", "accuracy"}
    assert {file["path"] for file in written["files"]} == names - {"deploy.json"}
    for file in written["files"]:
        assert file["latency_over_dense"] > 0.0
        assert file["difference"] <= (1e-4 if file["quantize"] is None else 0.2)
    assert "of dense" in capsys.readouterr().out
    trained = Trained.of(Run.open(finished))
    rebuilt = lod.load(out / "model.safetensors", into=LeNet()).eval()
    assert not low_rank_layers(rebuilt)
    example = trained.example(5).normal_()
    (answer,) = open_runner(out / "model.onnx")(ModelInputs.wrap(example))
    torch.testing.assert_close(answer, rebuilt(example), rtol=1e-4, atol=1e-4)


def test_a_size_that_is_worse_says_so_and_what_helps(finished: Path, tmp_path: Path) -> None:
    trained = Trained.of(Run.open(finished))
    options: dict[str, Any] = {"example": trained.example(1), "formats": ["safetensors"]}
    done = files.deploy_size(trained.model, None, tmp_path / "out", test=trained.test, **options)
    before = replace(done, dense_test={"accuracy": 0.959}, test={"accuracy": 0.705})
    said = deployment.quality_loss(trained, before)
    assert said is not None
    assert "fell from 95.9% to 70.5%" in said
    assert "--finetune-epochs 1" in said and "elastic" in said
    assert deployment.quality_loss(trained, replace(before, test={"accuracy": 0.952})) is None


def test_a_size_is_fine_tuned_before_it_is_written(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned"
    limits = ("--max-macs", "0.25", "--quiet", "--to", "safetensors")
    command = ("deploy", str(finished), *limits, "--finetune-epochs", "2", "--out", str(out))
    assert lod_program(*command) == 0
    assert "before fine-tuning" in capsys.readouterr().out
    written = json.loads((out / "deploy.json").read_text())
    assert written["test"]["loss"] != written["untuned_test"]["loss"]
    (kept,) = finished.glob("finetuning-2-*.unfinished")
    assert lod_program("verify", str(kept)) == 0
    rebuilt = lod.load(out / "model.safetensors", into=LeNet())
    assert Trained.of(Run.open(finished)).test(rebuilt) == pytest.approx(written["test"])
    shutil.rmtree(kept)


def beside_dense(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Make up that each file takes so many times as long as its dense form."""
    times = {"small": [2.0 * share] * 3, "dense": [2.0] * 3}
    monkeypatch.setattr(files, "interleaved", lambda *_, **__: times)


def test_what_is_slower_than_dense_is_written_and_says_so(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    beside_dense(monkeypatch, 1.5)
    options = to_safetensors(tmp_path / "phone", "--max-macs", "50%")
    assert lod_program("deploy", str(finished), *options) == 0
    said = capsys.readouterr().out
    assert "1.50×" in said
    assert "model.safetensors is slower than its dense form, with 0." in said


def test_what_is_to_be_fast_and_is_slower_than_dense_is_refused_and_leaves_nothing(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    beside_dense(monkeypatch, 1.5)
    options = to_safetensors(tmp_path / "phone", "--max-macs", "0.5", "--prefer-speed")
    assert lod_program("deploy", str(finished), *options) == 2
    assert "takes 1.50× the time of its dense form" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_good_is_left_out_and_the_others_stay(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(model: nn.Module, path: Path, **options: Any) -> Any:
        if path.suffix == ".pt2":
            raise LayerError("LeNet cannot be exported as pt2.")
        return export(model, path, **options)

    monkeypatch.setattr(files, "export", failing)
    out = tmp_path / "phone"
    options = to_safetensors(out, "--max-macs", "0.5", "--to", "pt2")
    assert lod_program("deploy", str(finished), *options) == 3
    assert {file.name for file in out.iterdir()} == {"model.safetensors", "deploy.json"}
    assert deployed(out)["left_out"] == {"model.pt2": "LeNet cannot be exported as pt2."}
    error = capsys.readouterr().err
    assert error == "lod: left out: model.pt2. LeNet cannot be exported as pt2.\n"


@pytest.mark.slow
def test_an_int8_file_that_is_no_smaller_is_left_out(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grown(model: nn.Module, path: Path, **options: Any) -> Any:
        done = export(model, path, **options)
        return replace(done, bytes=done.bytes * 9) if options.get("quantize") else done

    monkeypatch.setattr(files, "export", grown)
    out = tmp_path / "phone"
    options = ("--max-params", "30%", "--int8", "--quiet", "--out", str(out))
    assert lod_program("deploy", str(finished), *options) == 3
    assert {file.name for file in out.iterdir()} == {"model.onnx", "deploy.json"}
    assert (
        "int8 does not make a model of this size smaller"
        in deployed(out)["left_out"]["model.int8.onnx"]
    )


def test_asked_for_nothing_a_run_is_deployed_as_it_was_trained(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "frontier_of", None)  # there is nothing to search for
    out = tmp_path / "phone"
    assert lod_program("deploy", str(finished), *to_safetensors(out)) == 0
    trained = Trained.of(Run.open(finished))
    written = deployed(out)
    assert written["ranks"] == lod.ranks(trained.model)
    assert written["point"] is None
    assert written["params"] == lod.summary(trained.model, trained.data.example).fused_params
    result = json.loads((finished / "result.json").read_text())
    assert written["test"]["accuracy"] == pytest.approx(result["test"]["accuracy"])


@pytest.mark.parametrize("limit", ["max_params", "max_macs", "max_bytes"])
def test_a_size_has_the_fastest_forms_within_its_limit(
    finished: Path, tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Frontier.load(finished / "frontier.json")
    wanted = found.point(**{limit: 0.4})
    option = (f"--{limit.replace('_', '-')}", "40%")
    for name, factored in (("factored", 1e-4), ("dense", 1e4)):
        times_are(monkeypatch, factored=factored)
        assert lod_program("deploy", str(finished), *to_safetensors(tmp_path / name, *option)) == 0
    key = limit.removeprefix("max_")
    factored, dense = (deployed(tmp_path / name)["point"] for name in ("factored", "dense"))
    for written in (factored, dense):
        assert written["ranks"] == wanted.ranks
        assert getattr(wanted, key) <= written[key] <= 0.4 * getattr(found.dense, key)


# -- limits ------------------------------------------------------------------------------------


def deployed(out: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads((out / "deploy.json").read_text())
    return written


def times_are(monkeypatch: pytest.MonkeyPatch, factored: float, file: float = 1e-6) -> None:
    """Make times up: 1 ms per layer and sample dense; factored so much times the share of rank.

    The written file takes so many seconds, whatever the batch.
    """

    def measured(model: nn.Module, example: Tensor) -> Latency:
        batch, layers = len(example), {}
        for name, layer in low_rank_layers(model).items():
            most = layer.dense_weights // layer.weights(1)
            points = tuple(timing.RankTiming(r, factored * r / most, 0.0) for r in (1, most))
            layers[name] = LayerLatency(layer.rank, layer.full_rank, most, 1e-3 * batch, points)
        return Latency(5e-3 * batch, layers, batch, 1, 1, "float32", "cpu", torch.__version__)

    for module in (deployment, choice):
        monkeypatch.setattr(module, "latency", measured)
    times = {"small": [file], "dense": [file]}
    monkeypatch.setattr(files, "interleaved", lambda *_, **__: times)


def to_safetensors(out: Path, *limits: str) -> list[str]:
    return ["--to", "safetensors", "--quiet", "--out", str(out), *limits]


@pytest.mark.parametrize("batch", [1, 2])
def test_latency_is_limited_at_the_batch_that_is_deployed(
    finished: Path, tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_are(monkeypatch, factored=1.0)
    trained = Trained.of(Run.open(finished))
    measured = deployment.latency(trained.model, trained.example(batch))
    found = Frontier.load(finished / "frontier.json")
    wanted = found.with_latency(measured.predict, measured.dense).point(max_latency=0.004)
    options = to_safetensors(tmp_path / "phone", "--max-latency", "0.004", "--batch", str(batch))
    assert lod_program("deploy", str(finished), *options) == 0
    point = deployed(tmp_path / "phone")["point"]
    assert point["ranks"] == wanted.ranks
    assert point["latency"] == wanted.latency <= 0.004


def test_macs_are_those_of_one_sample_at_any_batch(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_are(monkeypatch, factored=1e-4)
    options = to_safetensors(tmp_path / "phone", "--max-macs", "50%", "--batch", "4")
    assert lod_program("deploy", str(finished), *options) == 0
    written = deployed(tmp_path / "phone")
    assert (written["batch"], written["dense_macs"]) == (4, 281_640)
    assert written["macs"] == written["point"]["macs"] <= 0.5 * 281_640


def test_a_latency_that_no_size_has_at_this_batch_is_refused(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    times_are(monkeypatch, factored=1.0)
    options = to_safetensors(tmp_path / "phone", "--max-latency", "0.004", "--batch", "256")
    assert lod_program("deploy", str(finished), *options) == 2
    assert "no submodel meets max_latency=0.004: the nearest has" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_takes_longer_than_the_limit_is_refused_and_leaves_nothing(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    times_are(monkeypatch, factored=1.0, file=0.0125)
    options = to_safetensors(tmp_path / "phone", "--max-latency", "0.01")
    assert lod_program("deploy", str(finished), *options) == 2
    error = capsys.readouterr().err
    slow = "model.safetensors takes 12.5 ms on this machine at batch 1, above max_latency=0.01."
    assert slow in error
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_is_either_small_or_fast_is_refused(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    times_are(monkeypatch, factored=1e4)  # so each layer would have to be dense
    for limits, code in ((["--max-latency", "0.006"], 0), (["--max-params", "0.3"], 0)):
        options = to_safetensors(tmp_path / limits[0][2:], *limits)
        assert lod_program("deploy", str(finished), *options) == code
    options = to_safetensors(
        tmp_path / "both", "--max-latency", "0.006", "--max-params", "0.3", "--max-macs", "0.5"
    )
    capsys.readouterr()
    assert lod_program("deploy", str(finished), *options) == 2
    error = capsys.readouterr().err
    assert "no submodel meets max_params=0.3 and max_macs=0.5 and max_latency=0.006 toge" in error
    assert not (tmp_path / "both").exists()


def test_rounded_ranks_are_within_the_limit_too(finished: Path, tmp_path: Path) -> None:
    trained = Trained.of(Run.open(finished))

    def rounded_params(ranks: dict[str, int]) -> int:
        rounded = round_ranks(trained.model, ranks, multiple=8)
        return count_params(lod.extract(trained.model, rounded))

    found = Frontier.load(finished / "frontier.json")
    smallest = min(rounded_params(point.ranks) for point in found)
    limit = next(
        point.params
        for point in found
        if point.params >= smallest
        and rounded_params(found.pick(max_params=point.params)) > point.params
    )
    options = to_safetensors(tmp_path / "phone", "--max-params", str(limit), "--round", "8")
    assert lod_program("deploy", str(finished), *options) == 0
    written = deployed(tmp_path / "phone")
    assert written["params"] <= limit
    ranks = written["point"]["ranks"]
    assert round_ranks(trained.model, ranks, multiple=8) == ranks
    again = deployment.search(trained, ranks=[ranks])[-1]  # not what was found before rounding
    assert (written["point"]["loss"], written["point"]["accuracy"]) == (again.loss, again.accuracy)


def test_rounded_ranks_reach_the_accuracy_too(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, int]] = []

    def judged(trained: Trained, ranks: list[dict[str, int]]) -> list[Size]:
        """Let the first size that is asked for be useless once it is rounded."""
        asked.extend(ranks)
        return [Size(ranks[0], 0.5, float(len(asked) > 1), 1, 1, 1)]

    monkeypatch.setattr(deployment, "search", judged)
    options = to_safetensors(tmp_path / "phone", "--min-accuracy", "0.001", "--round", "8")
    assert lod_program("deploy", str(finished), *options) == 0
    point = deployed(tmp_path / "phone")["point"]
    assert len(asked) == 2 and asked[0] != asked[1]
    assert (point["ranks"], point["accuracy"]) == (asked[1], 1.0)


def test_a_limit_that_no_rounded_size_meets_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smallest = Frontier.load(finished / "frontier.json")[-1].params
    options = to_safetensors(tmp_path / "phone", "--max-params", str(smallest), "--round", "8")
    assert lod_program("deploy", str(finished), *options) == 2
    error = capsys.readouterr().err
    assert f"no submodel meets max_params={smallest}: the nearest has params" in error
    assert "rounded to multiples of 8" in error
    assert list(tmp_path.iterdir()) == []


# -- comparison --------------------------------------------------------------------------------


def test_a_bench_compares_dense_and_smaller_sizes(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert lod_program("bench", str(finished), "--batch", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("dense form") and "(1.00×)" in lines[2]
    assert any(line.startswith("≤ 50% of MACs") for line in lines)
    assert "batch 2, 1 threads" in lines[-1]


def test_a_dense_run_is_searched_by_svd(tmp_path: Path) -> None:
    directory = tmp_path / "dense"
    out = ("--out", str(directory))
    assert lod_program("train", "digits", *TINY, "--set", "method=dense", *out) == 0
    assert lod_program("frontier", str(directory), "--quiet") == 0
    sizes = Frontier.load(directory / "frontier.json")
    assert sizes[0].ranks == {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84, "fc3": 10}
    assert not low_rank_layers(Run.open(directory).trained()[0])


@pytest.mark.slow
def test_a_sparse_run_is_deployed_with_its_zeros(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, whole, cut = (str(tmp_path / name) for name in ("run", "whole", "cut"))
    sparse = ("--set", "method=imp", "--set", "size=0.3", "--set", "epochs=2")
    assert lod_program("train", "digits", *TINY, *sparse, "--out", run) == 0
    assert lod_program("deploy", run, "--to", "safetensors", "--out", whole) == 0
    assert "SVD" not in capsys.readouterr().out
    trained, _ = Run.open(Path(run)).trained()
    deployed = lod.load(f"{whole}/model.safetensors", into=LeNet())
    for name, weight in trained.state_dict().items():
        assert torch.equal(deployed.state_dict()[name], weight), name
    assert (trained.fc1.weight == 0).float().mean() > 0.5
    limit = ("--max-params", "20%")
    assert lod_program("deploy", run, *limit, "--to", "safetensors", "--out", cut) == 0
    assert "it was cut by SVD" in capsys.readouterr().out


def test_a_dense_run_stands_beside_the_sizes(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = ("--set", "method=dense")
    for name, options in (("plain", dense), ("other", (*dense, "--set", "data.limit=200"))):
        assert lod_program("train", "digits", *TINY, *options, "--out", str(tmp_path / name)) == 0
    result = Run.open(tmp_path / "plain").result()
    capsys.readouterr()
    assert lod_program("bench", str(finished), "--reference", str(tmp_path / "plain")) == 0
    row = capsys.readouterr().out.splitlines()[2]
    assert row.startswith("run plain ") and row.endswith(f"{result['test']['accuracy']:.4f}")
    assert lod_program("bench", str(finished), "--reference", str(tmp_path / "other")) == 2
    assert "was not trained on the data of" in capsys.readouterr().err


# -- losses of one's own -----------------------------------------------------------------------

OWN = """
import torch
from torch import nn

def net(out=2):
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(),
                         nn.Linear(24, out))

def data(batch, kind):
    x = torch.randn(8, batch, 6)
    y = torch.stack([x[..., 0] - x[..., 1], x.mean(-1)], -1)
    target = {"numbers": y, "pair": list(zip(y[..., 0], y[..., 1])), "classes": y.argmax(-1),
              "counts": y.abs().round().long()}[kind]
    batches = list(zip(x, target))
    return {"train": batches[:6], "validation": batches[6:7], "test": batches[7:]}

def squares(output, target):
    target = torch.stack(target, -1) if isinstance(target, tuple) else target
    return ((output - target) ** 2).mean()

def margin(output, target): return nn.functional.multi_margin_loss(output, target)

class Summed:
    reduction = "sum"
    def __call__(self, output, target): return margin(output, target) * len(target)

summed = Summed()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Train a recipe of one's own parts in the working directory."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def trained(loss: str, kind: str) -> Path:
        recipe = {
            "model": "mine:net", "data": {"name": "mine:data", "options": {"kind": kind}},
            "loss": f"mine:{loss}", "epochs": 2, "batch": 16, "threads": 1,
        }  # fmt: skip
        (tmp_path / "own.yaml").write_text(json.dumps(recipe))
        assert lod_program("train", "own.yaml", "--quiet", "--out", "run") == 0
        return tmp_path / "run"

    yield trained
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        ("squares", "numbers"),
        ("squares", "pair"),
        ("squares", "counts"),
        ("margin", "classes"),
        ("summed", "classes"),
    ],
)
def test_a_recipe_is_searched_and_tested_by_its_own_loss(
    own: Callable[..., Path], loss: str, kind: str
) -> None:
    run = own(loss, kind)
    assert lod_program("frontier", str(run), "--quiet") == 0
    found = Frontier.load(run / "frontier.json")
    trained = Trained.of(Run.open(run))
    assert (found[0].accuracy is not None) == (kind == "classes")
    judge = getattr(sys.modules["mine"], loss.replace("summed", "margin"))
    with torch.no_grad():
        losses = [judge(trained.model(x), y).item() for x, y in trained.data.train]
    assert found[0].loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    result = json.loads((run / "result.json").read_text())
    assert trained.test() == pytest.approx(result["test"])
    out = ("--to", "safetensors", "--quiet", "--out", "phone")
    assert lod_program("deploy", str(run), "--max-params", "0.8", *out) == 0
    assert deployed(Path("phone"))["test"].keys() == result["test"].keys()
    assert lod_program("bench", str(run), "--quiet") == 0


# -- what is refused ---------------------------------------------------------------------------


def damaged(run: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "damaged"
    copy.mkdir()
    for file in run.iterdir():
        content = file.read_bytes()
        cut = len(content) // 2 if file.name == "model.safetensors" else len(content)
        (copy / file.name).write_bytes(content[:cut])
    return copy


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["deploy", "RUN", "--max-macs", "0.0001", "--out", "OUT"], 2, "max_macs=0.0001"),
        (["deploy", "RUN", "--max-params", "10", "--out", "OUT"], 2, "max_params=10"),
        (["deploy", "RUN", "--max-params", "-3", "--out", "OUT"], 2, "'-3' is not a size"),
        (["deploy", "RUN", "--max-params", "1.5", "--out", "OUT"], 2, "nor a whole count"),
        (["deploy", "RUN", "--max-params", "1", "--out", "OUT"], 2, "Write 100% or 1x"),
        (["deploy", "RUN", "--max-params", "1.0", "--out", "OUT"], 2, "Write 100% or 1x"),
        (["deploy", "RUN", "--max-params", "150%", "--out", "OUT"], 2, "share of the dense"),
        (["deploy", "RUN", "--max-params", "few", "--out", "OUT"], 2, "'few' is not a size"),
        (["deploy", "RUN", "--min-accuracy", "2", "--out", "OUT"], 2, "min_accuracy=2"),
        (["deploy", "RUN", "--max-macs", "0.5", "--to", "onx", "--out", "OUT"], 2, "'onnx'"),
        (["deploy", "RUN", "--max-macs", "0.5", "--out", "RUN"], 2, "not empty"),
        (["deploy", "NONE", "--max-macs", "0.5", "--out", "OUT"], 2, "is not a directory"),
        (["deploy", "UNFINISHED", "--max-macs", "0.5", "--out", "OUT"], 2, "has not finished"),
        (["deploy", "DAMAGED", "--max-macs", "0.5", "--out", "OUT"], 1, "model.safetensors"),
        (["frontier", "UNFINISHED"], 2, "has not finished"),
        (["frontier", "RUN", "--method", "greed"], 2, "'greedy'"),
        (["bench", "UNFINISHED"], 2, "has not finished"),
        (["bench", "RUN", "--batch", "0"], 2, "--batch"),
    ],
)
def test_bad_input_gets_one_line(
    finished: Path,
    tmp_path: Path,
    arguments: list[str],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "config.yaml").write_text((finished / "config.yaml").read_text())
    places: dict[str, Any] = {
        "RUN": finished,
        "OUT": tmp_path / "out",
        "NONE": tmp_path / "none",
        "UNFINISHED": unfinished,
        "DAMAGED": damaged(finished, tmp_path) if "DAMAGED" in arguments else None,
    }
    capsys.readouterr()
    assert lod_program(*[str(places.get(a, a)) for a in arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("lod: ") and error.count("\n") == 1
    assert words in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--max-macs", "-1"], "--max-macs '-1' is not a size"),
        (["--max-macs", "0"], "max_macs=0.0 must be a finite number above 0"),
        (["--max-macs", "1e999"], "'1e999' is not a size"),
        (["--max-macs", "9" * 300], "must be a finite number above 0"),
        (["--max-macs", "9" * 6000], "is not a size"),
        (["--max-macs", "nan"], "--max-macs 'nan' is not a size"),
        (["--max-params", "-0.5"], "'-0.5' is not a size"),
        (["--max-params", "0.0"], "max_params=0.0 must be a finite number above 0"),
        (["--max-bytes", "1.5"], "--max-bytes '1.5' is neither a share below 1 nor a whole count"),
        (["--max-bytes", "2x"], "max_bytes=2.0: a float is a share"),
        (["--max-latency", "0"], "max_latency=0.0 must be a finite number above 0"),
        (["--max-latency", "nan"], "max_latency=nan must be a finite number above 0"),
        (["--max-latency", "inf"], "max_latency=inf must be a finite number above 0"),
        (["--max-latency", "5ms"], "--max-latency"),
        (["--min-accuracy", "90"], "min_accuracy=90.0 must be a share between 0 and 1"),
        (["--min-accuracy", "nan"], "min_accuracy=nan must be a share between 0 and 1"),
        (["--max-macs", "0.5", "--min-accuracy", "-1"], "min_accuracy=-1.0 must be a share"),
        (["--max-macs", "0.5", "--int8", "--to", "pt2"], "--int8 needs the format onnx or pte"),
        (["--max-macs", "0.5", "--batch", "99999999"], "--batch"),
        (["--max-macs", "0.5", "--round", "0"], "--round"),
    ],
)
def test_limits_are_checked_before_the_run_is_even_opened(
    option: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none, out = str(tmp_path / "none"), str(tmp_path / "out")
    assert lod_program("deploy", none, *option, "--out", out) == 2
    error = capsys.readouterr().err
    assert error.startswith("lod: ") and error.count("\n") == 1
    assert words in error and "none" not in error
    assert [*tmp_path.iterdir()] == []


def test_a_way_to_search_is_checked_before_the_run_is_even_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lod_program("frontier", str(tmp_path / "none"), "--method", "greed") == 2
    assert "Did you mean 'greedy'?" in capsys.readouterr().err


def test_limits_are_checked_before_a_search(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "frontier_of", None)
    trained = Trained.of(Run.open(finished))
    with pytest.raises(OptionError, match="max_macs=-1 must be"):
        deployment.deploy(trained, {"max_macs": -1}, ["onnx"], tmp_path / "out")


def test_an_empty_training_set_is_refused(finished: Path) -> None:
    trained = Trained.of(Run.open(finished))
    empty = deployment.Data(
        train=[], validation=None, test=None, example=trained.data.example, classes=10, note=""
    )
    with pytest.raises(lod.MaestroError, match="training data has no batch"):
        deployment.find_frontier(Trained(trained.run, trained.model, empty))


def test_targets_that_are_all_ignored_are_refused(finished: Path) -> None:
    trained = Trained.of(Run.open(finished))
    inputs, target = next(iter(trained.data.train))
    ignored = [(inputs, torch.full_like(target, -100))]
    data = deployment.Data(
        train=ignored, validation=None, test=None, example=inputs[:1], classes=10, note=""
    )
    with pytest.raises(OptionError, match="the batch is not empty"):
        deployment.find_frontier(Trained(trained.run, trained.model, data))
