"""What users get wrong is one clear error of ours, and nothing is changed by it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from conftest import Snapshot
from maestro_lod.cli import main as cli
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.run import Run
from maestro_lod.cli.tuning.search import tune
from maestro_lod.cli.tuning.trials import Reached
from maestro_lod.errors import CheckpointError, LayerError, OptionError, TrainingError
from maestro_lod.files.stage_cache import StageCache
from maestro_lod.files.state import load_state, save_state
from maestro_lod.files.tensor_file import opened_file, write_tensors
from maestro_lod.model.frontier import Frontier
from maestro_lod.train.evaluate import evaluate

X = torch.randn(8, 6)
CLASS = torch.ones(8, dtype=torch.int64)
DEEP = "[" * 100_000
LONG = "9" * 6000


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def fitted(model: nn.Module, *batches: tuple[Tensor, Any], **options: Any) -> None:
    model = lod.decompose(model)
    before = Snapshot.of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        method = lod.LoD(model, optimizer)
        lod.fit(model, batches, optimizer=optimizer, epochs=1, method=method, **options)
    except OptionError:
        if len(batches) == 1 and "validation" not in options:  # else it has trained
            before.assert_unchanged(model)
        raise


# -- targets and losses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (CLASS * 7, r"a target is class 7, but the model has scores for classes 0 to 2\. Give"),
        (CLASS * -7, r"a target is class -7"),
        (CLASS.float(), r"the targets are torch\.float32, not classes"),
        (CLASS[:5], r"scores of shape \(8, 3\) do not fit targets of shape \(5,\)\. Give"),
        ([1] * 8, r"a Tensor and a tuple"),
    ],
    ids=["too large", "negative", "float", "too few", "no tensor"],
)
def test_targets_that_are_no_classes_of_the_model(target: Any, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        fitted(net(), (X, target))
    with pytest.raises(OptionError, match=told):
        evaluate(net(), [(X, target)])
    with pytest.raises(OptionError, match=told):
        fitted(net(), (X, CLASS), validation=[(X, target)])


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda output, target: output, r"a tensor of shape \(8, 3\), not one number"),
        (lambda output, target: None, r"the loss is None, not a tensor"),
        (lambda output, target: 1.0, r"the loss is 1\.0, not a tensor"),
        (lambda output, target: output.sum().detach(), "the loss has no gradient"),
        (lambda output, target: output.sum().long(), "the loss has no gradient"),
    ],
    ids=["rows", "none", "float", "detached", "whole"],
)
def test_a_loss_that_is_no_number_to_train_on(loss: Any, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        fitted(net(), (X, CLASS), loss=loss)
    dense = net()
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=told):
        lod.fit(dense, [(X, CLASS)], optimizer=optimizer, epochs=1, loss=loss)
    model = lod.decompose(net())
    method = lod.LoD(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(OptionError, match=told):
        method.backward(lambda: model(X), lambda output: loss(output, CLASS))


def test_a_loss_to_judge_by_needs_no_gradient_but_is_one_number() -> None:
    assert evaluate(net(), [(X, CLASS)], lambda output, target: output.sum())
    with pytest.raises(OptionError, match=r"of shape \(8, 3\)"):
        evaluate(net(), [(X, CLASS)], lambda output, target: output)


def test_a_single_sample_cannot_train_a_norm_over_the_batch() -> None:
    normed = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(OptionError, match="a batch norm cannot train on a batch of one sample"):
        fitted(normed, (X, CLASS), (X[:1], CLASS[:1]))

    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):  # what a model says itself stays
        evaluate(Picky(), [(X, CLASS)])


def test_batches_in_place_of_a_calibration() -> None:
    model = net()
    before = Snapshot.of(model)
    with pytest.raises(OptionError, match=r"calibration is a list\. Give the result of lod\.calib"):
        lod.decompose(model, calibration=[X])  # type: ignore[arg-type]
    before.assert_unchanged(model)


# -- seeds and weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [2**64, 2**63, -1, "a", 1.5])
def test_seeds_that_no_generator_takes(seed: Any) -> None:
    with pytest.raises(OptionError, match=r"seed=.* must be"):
        fitted(net(), (X, CLASS), seed=seed)
    model = lod.decompose(net())
    with pytest.raises(OptionError, match=r"seed=.* must be"):
        lod.LoD(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=seed)


def test_weights_made_in_inference_mode_decompose_but_cannot_be_trained() -> None:
    with torch.inference_mode():
        model = net()
        expected = model(X)
    model = lod.decompose(model)
    torch.testing.assert_close(model(X).detach(), expected.clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = r"made in torch\.inference_mode\(\) cannot be trained: 0\.bias, 2\.bias\. Create"
    with pytest.raises(LayerError, match=told):
        lod.LoD(model, optimizer)
    with pytest.raises(LayerError, match="inference_mode"):
        lod.fit(nn.Sequential(model), [(X, CLASS)], optimizer=optimizer, epochs=1)


def test_a_file_is_not_rounded_silently(tmp_path: Path) -> None:
    path, model = tmp_path / "model.safetensors", lod.decompose(net())
    lod.save(model, path)
    for dtype in (torch.bfloat16, torch.float16):
        target = net().to(dtype)
        before = Snapshot.of(target)
        with pytest.raises(CheckpointError, match=rf"as torch\.float32, .*{dtype} would round"):
            lod.load(path, into=target)
        before.assert_unchanged(target)
    lod.save(model.bfloat16(), path)
    wider = lod.load(path, into=net())
    assert torch.equal(wider[0].u, model[0].u.float())


# -- files ---------------------------------------------------------------------------------------


def changed(path: Path, **texts: str) -> None:
    """Write a file anew, proven like any other, with other texts in its header."""
    with opened_file(path) as file:
        tensors, metadata = {key: file.read(key) for key in file.shapes}, dict(file.metadata)
    write_tensors(tensors, metadata | texts, path)


@pytest.mark.parametrize("text", [DEEP, LONG, "5", "[[]]", '{"0": "a"}', "NaN"], ids=repr)
@pytest.mark.parametrize("key", ["ranks", "heads", "aliases", "opened", "dense_only"])
def test_headers_that_nobody_writes(key: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    lod.save(lod.decompose(net()), path)
    changed(path, **{key: text})
    target = net()
    before = Snapshot.of(target)
    with pytest.raises(CheckpointError, match=r"damaged|of another model"):
        lod.load(path, into=target)
    before.assert_unchanged(target)


@pytest.mark.parametrize("text", [DEEP, LONG, "5", "{}", '{"points": 5}'], ids=lambda t: t[:9])
def test_frontiers_that_nobody_writes(text: str, tmp_path: Path) -> None:
    path, model = tmp_path / "frontier.json", tmp_path / "model.safetensors"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"frontier\.json is damaged"):
        Frontier.load(path)
    lod.save(lod.decompose(net()), model)
    changed(model, frontier=text)
    with pytest.raises(CheckpointError, match="is damaged"):
        lod.load(model, into=net(), max_params=0.5)


@pytest.mark.parametrize("line", [DEEP, LONG, "null", "5"], ids=lambda t: t[:9])
def test_answers_that_nobody_writes(line: str, tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    with StageCache(tmp_path, {}).answers("search") as answers:
        answers.answer({"number": 1}, lambda: 2.0)
    path.write_text(f"{path.read_text()}{line}\n")
    cache = StageCache(tmp_path, {})
    with pytest.raises(CheckpointError, match=r"line 2 of .* is damaged"), cache.answers("search"):
        pass


@pytest.mark.parametrize("text", [DEEP, LONG, "null", "5", "", "{"], ids=lambda t: t[:9])
def test_calls_that_nobody_records(text: str, tmp_path: Path) -> None:
    (tmp_path / "of.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"of.json is damaged .* Remove its directory"):
        StageCache(tmp_path, {"what": "a test"})


@pytest.mark.parametrize(
    "text",
    [
        DEEP, LONG, '{"tensor":5,"order":[0]}', '{"tensor":"0","order":[0,1]}', "{}",
        '{"tensor":"0","order":"a"}', '{"tensor":"0","order":[null]}', '{"mapping":5}',
        '{"mapping":[[[1],2]]}', '{"tensor":["0"],"order":[0]}',
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_states_that_nobody_writes(text: str, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_state([torch.ones(2)], path)
    changed(path, state=text)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_state(path)


def deep() -> list[Any]:
    state: list[Any] = []
    for _ in range(100_000):
        state = [state]
    return state


def endless() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["itself"] = state
    return state


@pytest.mark.parametrize(
    "state", [deep, endless, lambda: 10**6000], ids=["deep", "endless", "long"]
)
def test_states_that_no_file_can_hold(state: Callable[[], Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_state({"a": state()}, tmp_path / "state.safetensors")
    assert not [*tmp_path.iterdir()]


# -- states of a LoD -----------------------------------------------------------------------------


def begun() -> tuple[nn.Module, lod.LoD]:
    model = lod.decompose(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = lod.LoD(model, optimizer, penalty=1e-3)
    for _ in range(2):
        with train.step():
            (F.cross_entropy(model(X), CLASS) + train.penalty_loss()).backward()
        optimizer.step()
    return model, train


WRONG = [None, "x", [1], {"a": "b"}, -1, float("nan"), torch.ones(3)]
MAY_BE = {"penalty_use": [None], "unseen": [], "left_out": ["x", [1], {"a": "b"}]}
"""What those parts may be; names that the model has not are left out of `left_out`."""


@pytest.mark.parametrize(
    "key",
    [
        "epoch", "penalty", "ranks", "steps", "forwards", "whole", "optimized", "unseen",
        "sampler", "ledger", "unmoved", "penalty_use",
    ],
)  # fmt: skip
def test_states_of_wrong_types_change_nothing(key: str) -> None:
    _, train = begun()
    _, other = begun()
    before = str(other.state_dict())
    for value in WRONG:
        if any(value is allowed for allowed in MAY_BE.get(key, [])):
            continue
        with pytest.raises((TrainingError, OptionError)):
            other.load_state_dict(copy.deepcopy(train.state_dict()) | {key: value})
        assert str(other.state_dict()) == before, value
    other.load_state_dict(train.state_dict())


# -- the program ---------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments])
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize("value", [10**30, 2**31])
def test_batches_that_cannot_be(value: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = told(capsys, "train", "digits", "--set", f"batch={value}")
    assert code == 2 and f"batch={value} must be less than" in error
    assert error.count("\n") == 1


OWN = """
import torch
from torch import nn

def model():
    net = nn.Sequential()
    net.add_module('a"b', nn.Linear(6, 8))
    net.add_module("c'd", nn.Linear(8, 3))
    return net

def data(batch, last=2):
    torch.manual_seed(0)
    return {"train": [(torch.randn(batch, 6), torch.arange(batch) % (last + 1)) for _ in range(2)]}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("quoted.py").write_text(OWN)
    Path("own.yaml").write_text(
        "model: quoted:model\ndata: quoted:data\nepochs: 1\nbatch: 8\nthreads: 1\n"
    )


def test_targets_out_of_range_are_one_line(own: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = told(capsys, "train", "own.yaml", "--set", "data.options.last=7", "--out", "run")
    assert code == 2 and error.startswith("lod: a target is class 3, but the model has scores for")
    assert error.count("\n") == 1


def test_names_with_quotes(own: None, capsys: pytest.CaptureFixture[str]) -> None:
    Run.create(load_recipe("own.yaml"), Path("run")).train()
    for format_ in ("pt2", "onnx"):
        deploy = ["deploy", "run", "--max-params", "0.99", "--to", format_, "--out", "out"]
        code, error = told(capsys, *deploy, "-q")
        assert code == 2 and "whose name has quotes or backslashes: 'a\"b'" in error
        assert error.count("\n") == 1 and not Path("out").exists()


@pytest.mark.parametrize(
    "damage",
    [
        ('"epoch":', '"epch":'),
        ('"epoch":1', '"epoch":[1]'),
        ('"ended":"complete"', '"ended":5'),
        ('"param_name":"penalty"', '"param_name":"pnalty"'),
        ('"reached":{', '"reached":5,"x":{'),
    ],
)
def test_damaged_searches_are_refused(damage: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "search.journal"

    def objective(penalty: float, report: Callable[[Reached], None]) -> None:
        report(Reached(1, 0.5, 100))

    limits = {"max_params": 200, "min_accuracy": 0.9, "largest": 1.0, "smallest": 0.6, "few": 0.1}
    tune(objective, **limits, storage=path)  # type: ignore[arg-type]
    lines = [
        json.dumps(json.loads(line), separators=(",", ":"))
        for line in path.read_text().splitlines()
    ]
    text = "\n".join(lines) + "\n"
    assert damage[0] in text
    path.write_text(text.replace(*damage))
    with pytest.raises(OptionError, match=r"trial 0 of the search is damaged|cannot be used"):
        tune(objective, **limits, storage=path)  # type: ignore[arg-type]
