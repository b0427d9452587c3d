"""`lod frontier`, `lod deploy` and `lod bench` on a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import maestro_lod as lod
from maestro_lod.cli import main
from maestro_lod.deploy.export import opened
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.tasks import deployment
from maestro_lod.tasks.deployment import Trained
from maestro_lod.tasks.models import LeNet
from maestro_lod.tasks.run import Run

pytest.importorskip("sklearn")
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
    sizes = lod.Frontier.load(finished / "frontier.json")
    assert sizes[0].ranks == lod.ranks(Trained.of(Run.open(finished)).model)
    assert all(point.accuracy is not None and point.latency for point in sizes)
    assert "Every size" in (finished / "report.html").read_text()
    assert not list(finished.glob("frontier-*.jsonl"))
    small = lod.load(finished / "model.safetensors", into=LeNet(), max_params=0.5)
    assert lod.ranks(small) == sizes.pick(max_params=0.5)


def test_searching_again_gives_the_same_frontier(finished: Path) -> None:
    before = lod.Frontier.load(finished / "frontier.json")
    again = deployment.find_frontier(Trained.of(Run.open(finished)))
    assert [p.ranks for p in again] == [p.ranks for p in before]
    assert [p.loss for p in again] == [p.loss for p in before]


def test_a_run_is_deployed_to_every_format(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, limits = tmp_path / "phone", ("--max-macs", "0.5", "--allow-slower", "--quiet")
    formats = ("--to", "onnx", "--to", "pt2", "--to", "safetensors", "--int8")
    assert lod_program("deploy", str(finished), *formats, *limits, "--out", str(out)) == 0
    names = {"model.onnx", "model.int8.onnx", "model.pt2", "model.safetensors", "deploy.json"}
    assert {file.name for file in out.iterdir()} == names
    written = json.loads((out / "deploy.json").read_text())
    assert written["macs"] <= 0.5 * written["dense_macs"]
    assert written["test"].keys() == {"loss", "accuracy"}
    for file in written["files"]:
        assert file["latency_over_dense"] > 0.0
        assert file["difference"] <= (1e-4 if file["quantize"] is None else 0.2)
    assert "of dense" in capsys.readouterr().out
    trained = Trained.of(Run.open(finished))
    rebuilt = lod.rebuild(out / "model.safetensors", into=LeNet()).eval()
    assert not low_rank_layers(rebuilt)
    example = trained.example(5).normal_()
    (answer,) = opened(out / "model.onnx")(deployment.as_call(example))
    torch.testing.assert_close(answer, rebuilt(example), rtol=1e-4, atol=1e-4)


def test_what_is_slower_than_dense_is_refused_and_leaves_nothing(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = {"small": [3.0] * 3, "dense": [2.0] * 3}
    monkeypatch.setattr(deployment, "interleaved", lambda *_, **__: slow)
    out = tmp_path / "phone"
    limits = ("--max-macs", "0.5", "--to", "safetensors", "--out", str(out))
    assert lod_program("deploy", str(finished), *limits) == 2
    assert "1.50× as slow as its dense form" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_bench_compares_dense_and_smaller_sizes(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert lod_program("bench", str(finished), "--batch", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("dense") and "(1.00×)" in lines[2]
    assert any(line.startswith("MACs ≤ 0.5×") for line in lines)
    assert "batch 2, 1 threads" in lines[-1]


def test_a_dense_run_is_searched_by_svd(tmp_path: Path) -> None:
    directory = tmp_path / "dense"
    out = ("--out", str(directory))
    assert lod_program("train", "digits", *TINY, "--set", "method=dense", *out) == 0
    assert lod_program("frontier", str(directory), "--quiet") == 0
    sizes = lod.Frontier.load(directory / "frontier.json")
    assert sizes[0].ranks == {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84, "fc3": 10}
    assert not low_rank_layers(Run.open(directory).trained()[0])


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
        (["deploy", "RUN", "--max-params", "-3", "--out", "OUT"], 2, "max_params=-3"),
        (["deploy", "RUN", "--max-params", "1.5", "--out", "OUT"], 2, "share of the dense"),
        (["deploy", "RUN", "--max-params", "few", "--out", "OUT"], 2, "'few' is no number"),
        (["deploy", "RUN", "--min-accuracy", "2", "--out", "OUT"], 2, "min_accuracy=2"),
        (["deploy", "RUN", "--out", "OUT"], 2, "give a limit"),
        (["deploy", "RUN", "--max-macs", "0.5", "--to", "onx", "--out", "OUT"], 2, "'onnx'"),
        (["deploy", "RUN", "--max-macs", "0.5", "--out", "RUN"], 2, "not empty"),
        (["deploy", "NONE", "--max-macs", "0.5", "--out", "OUT"], 2, "is no directory"),
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


def test_an_empty_training_set_is_refused(finished: Path) -> None:
    trained = Trained.of(Run.open(finished))
    empty = deployment.Data(
        train=[], validation=None, test=None, example=trained.data.example, classes=10, note=""
    )
    with pytest.raises(lod.MaestroError, match="training data is empty"):
        deployment.find_frontier(Trained(trained.run, trained.model, empty))
