"""`lod compare`: equal conditions for all methods, resumed and shared runs, missing models."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from maestro_lod.baselines.compare import Comparison, compare
from maestro_lod.baselines.compare import measure as measuring
from maestro_lod.baselines.compare.contenders import contender, known
from maestro_lod.baselines.compare.plan import ComparisonPlan, Pace
from maestro_lod.cli import main as cli
from maestro_lod.cli.run import Interrupted, Run
from maestro_lod.cli.setup import Setup
from maestro_lod.errors import MaestroError, OptionError
from maestro_lod.files.atomic import alone_in
from maestro_lod.train.progress import EpochRecord, Progress

OWN = """
import torch
from torch import nn

SEEN = []  # the first number of each training batch that was given out

def model(width=16):
    inner = [nn.Linear(width, width) for _ in range(3)]
    return nn.Sequential(nn.Linear(12, width), nn.ReLU(), *inner, nn.ReLU(), nn.Linear(width, 4))

def fixed():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))

class Shuffled:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return 4

    def __iter__(self):
        for rows in torch.randperm(len(self.x)).chunk(4):
            x = self.x[rows] + 0.01 * torch.randn(len(rows), 12)  # drawn while training, too
            SEEN.append(float(x[0, 0]))
            yield x, self.y[rows]

def data(batch):
    x = torch.randn(96, 12, generator=torch.Generator().manual_seed(0))
    y = x[:, :4].argmax(1)
    held_out = [(x[64:80], y[64:80])]
    return {"train": Shuffled(x[:64], y[:64]), "validation": held_out, "test": [(x[80:], y[80:])]}
"""
RECIPE = """
model: own:model
data: own:data
epochs: 4
optimizer: {lr: 0.05}
schedule: {name: milestones, epochs: [3]}
threads: 1
checkpoint_every: 0
"""
EQUAL: dict[str, Any] = {"sizes": (0.6, 0.5), "seeds": 1, "lr_trials": 2, "lr_epochs": 2}
SMALL: dict[str, Any] = {"sizes": (0.6, 0.5), "seeds": 2, "lr_trials": 2, "lr_epochs": 2}
STEPS = 4  # in an epoch


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The task, which lies in the working directory."""
    return go_to_task(tmp_path, monkeypatch)


def go_to_task(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    write_task(directory)
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
    return "task.yaml"


def write_task(directory: Path) -> None:
    (directory / "own.py").write_text(OWN)
    (directory / "task.yaml").write_text(RECIPE)


def facts(found: Comparison) -> dict[str, Any]:
    """All that a comparison says, but for times."""
    said = found.to_dict()
    said["fronts"].pop("latency")
    said["rows"] = [
        {key: value for key, value in row.items() if key not in ("latency", "seconds")}
        for row in said["rows"]
    ]
    return said


class Notes:
    """A watcher that notes which batches each run was trained on, epoch by epoch."""

    def __init__(self, when: Callable[[int], None] = lambda step: None) -> None:
        self.batches: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.when, self.steps = when, count(1)

    def prepare(self, run: Run) -> None: ...
    def begin(self, run: Run, setup: Setup, progress: Progress) -> None:
        self.run = run.directory.name

    def step(self, progress: Progress) -> None:
        self.batches[self.run][progress.epoch].append(sys.modules["own"].SEEN[-1])
        self.when(next(self.steps))

    def epoch(self, record: EpochRecord) -> None: ...
    def end(self, result: dict[str, Any]) -> None: ...


# -- equal terms -------------------------------------------------------------------------------

METHODS = [
    "dense", "svd", "lod", "elastic", "narrow", "pufferfish", "svd-finetuned", "cuttlefish",
    "spectral", "imp", "raregems", "xnor",
]  # fmt: skip


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A comparison of all methods, the batches that they saw, and what they were judged on."""
    judged: dict[str, set[str]] = defaultdict(set)
    evaluate, notes = measuring.evaluate, Notes()

    def watched(model: Any, data: Any, loss: Any) -> dict[str, float]:
        rows = b"".join(x.numpy().tobytes() for x, _ in data)
        judged[type(loss).__name__].add(hashlib.sha256(rows).hexdigest())
        return evaluate(model, data, loss)

    with pytest.MonkeyPatch.context() as monkeypatch:
        place = tmp_path_factory.mktemp("equal")
        recipe = go_to_task(place, monkeypatch)
        monkeypatch.setattr(measuring, "evaluate", watched)
        found = compare(recipe, METHODS, out=place / "out", watchers=[notes], **EQUAL)
    return found, notes, judged


@pytest.mark.slow
def test_all_see_the_same_batches_the_same_evaluation_and_as_many_trials(equal: Any) -> None:
    found, notes, judged = equal
    assert not found.missing
    assert {row.method for row in found.rows} == {*METHODS}
    seen: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    for name, epochs in notes.batches.items():
        parts = dict(part.split("=") for part in name.split(",") if "=" in part)
        seen[parts["seed"], parts["epochs"]].append({e: tuple(b) for e, b in epochs.items()})
    assert set(seen) == {("1000", "2"), ("0", "4")}
    for (_, epochs), runs in seen.items():
        assert all(run == runs[0] for run in runs)
        assert [*map(len, runs[0].values())] == [STEPS] * int(epochs)
    assert len(judged) == 1 and len(*judged.values()) == 2  # one loss; validation and test
    tried = found.trials
    assert set(tried) == {*METHODS}
    assert {tuple(rates) for rates in tried.values()} == {(0.05, 0.15)}
    for name, rates in tried.items():  # the chosen one is the best on validation data
        assert rates[found.paces[name][0]] == max(rates.values())
    assert {epochs for _, epochs in found.paces.values()} == {4}


@pytest.mark.slow
def test_every_model_is_within_its_size_and_one_training_serves_several(equal: Any) -> None:
    found, _, _ = equal
    for row in found.rows:
        assert row.size is None or row.share <= row.size
        assert len(row.scores) == 1
    runs = {row.method: {run for r in found.rows if r.method == row.method for run in r.runs}
            for row in found.rows}  # fmt: skip
    assert len(runs["elastic"]) == len(runs["svd"]) == len(runs["dense"]) == 1
    assert len(runs["lod"]) == len(runs["narrow"]) == 2
    if found.paces["svd"] == found.paces["dense"]:
        assert runs["svd"] == runs["dense"]
    costs = {row.training for row in found.rows if row.method in ("dense", "svd")}
    assert costs == {1.0}


def test_a_budget_gives_each_the_epochs_that_cost_as_much(recipe: str, tmp_path: Path) -> None:
    plain = {**SMALL, "seeds": 1, "lr_trials": 1, "sizes": (0.5,)}
    found = compare(recipe, ["dense", "narrow"], out=tmp_path / "out", budget=2.0, **plain)
    assert found.paces["dense"][1] == 8
    narrow = next(row for row in found.rows if row.method == "narrow")
    assert found.paces["narrow"][1] > 8  # an epoch of it costs less
    assert narrow.training == pytest.approx(2.0, rel=0.05)
    config = (tmp_path / "out" / "runs" / narrow.runs[0] / "config.yaml").read_text()
    stretched = round(3 * found.paces["narrow"][1] / 4)
    assert f"- {stretched}\n" in config  # the milestone keeps its place in the run


# -- which runs --------------------------------------------------------------------------------


def plan(recipe: str, **others: Any) -> ComparisonPlan:
    common: dict[str, Any] = {
        "changes": (), "sizes": (0.5,), "seeds": 1, "budget": None, "lr_trials": 3,
        "lr_epochs": None, "out": Path("out"),
    }  # fmt: skip
    return ComparisonPlan(recipe, **{**common, **others})


def test_more_trials_seeds_and_sizes_keep_the_runs_that_there_were(recipe: str) -> None:
    few, many = plan(recipe), plan(recipe, lr_trials=5, seeds=3, sizes=(0.5, 0.25))
    assert few.rates == [0.05, 0.15, 0.01667]
    assert many.rates[:3] == few.rates and many.rates[3:] == [0.45, 0.005556]
    narrow = contender("narrow")
    names = [{t.name for t in each.trials(narrow)} for each in (few, many)]
    assert names[0] < names[1]
    reported = [{t.name for t in each.reported(narrow, Pace(0.05, 4))} for each in (few, many)]
    assert reported[0] < reported[1]
    assert not names[1] & reported[1]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"sizes": ()}, "sizes are not between 0 and 1: none. Give shares"),
        ({"sizes": (0.5, 1.5)}, "sizes are not between 0 and 1: 0.5, 1.5. Give shares"),
        ({"seeds": 0}, "seeds=0 must be at least 1"),
        ({"lr_trials": 0}, "lr_trials=0 must be at least 1"),
        ({"lr_epochs": 0}, "lr_epochs=0 must be at least 1"),
        ({"budget": 0.0}, "budget=0 must be above 0"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(wrong: Any, message: str, recipe: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan(recipe, **wrong)


def test_changes_for_one_method_do_not_disturb_the_others(recipe: str) -> None:
    mine = plan(recipe, changes=("threshold=0.5", "batch=7"))
    lod, dense = (mine.trials(contender(name))[0].run.recipe for name in ("lod", "dense"))
    assert lod.model_dump()["threshold"] == 0.5
    assert lod.batch == dense.batch == 7
    with pytest.raises(OptionError, match="no setting 'thresold'"):
        plan(recipe, changes=("thresold=0.5",)).base  # noqa: B018


@pytest.mark.parametrize(
    "how", ["a high loss", pytest.param("no finite loss", marks=pytest.mark.slow)]
)
def test_a_rate_that_does_not_last_gives_way_to_the_next_best(
    recipe: str, tmp_path: Path, how: str
) -> None:
    out = tmp_path / "out"
    first = compare(recipe, ["dense", "narrow"], out=out, **KILLED)
    (best, epochs), tried = first.paces["dense"], first.trials["dense"]
    directory = out / "runs" / f"dense,lr={best:g},epochs={epochs},seed=1"
    if how == "a high loss":
        *lines, last = (directory / "metrics.jsonl").read_text().splitlines()
        diverged = json.dumps({**json.loads(last), "train_loss": 1e3})
        (directory / "metrics.jsonl").write_text("\n".join([*lines, diverged, ""]))
    else:
        (directory / "failed.json").write_text('{"reason": "the loss is inf."}')
    found = compare(recipe, ["dense", "narrow"], out=out, **KILLED)
    assert found.trials["dense"] == tried  # the same trials for all
    assert found.paces["dense"] == (next(rate for rate in tried if rate != best), epochs)
    assert found.paces["narrow"] == first.paces["narrow"]
    dense = next(row for row in found.rows if row.method == "dense")
    assert len(dense.scores) == KILLED["seeds"] and not found.missing


# -- killed, reused, shared --------------------------------------------------------------------


class Killed(BaseException):
    """Nothing catches this."""


KILLED: dict[str, Any] = {**SMALL, "sizes": (0.6,)}
RIVALS = ["dense", "svd", "lod", "narrow"]


def killed_after(steps: int) -> Callable[[int], None]:
    def kill(step: int) -> None:
        if step == steps:
            raise Killed

    return kill


@pytest.mark.slow
def test_a_comparison_that_is_killed_again_and_again_ends_with_the_same_table(
    recipe: str, tmp_path: Path
) -> None:
    whole = compare(recipe, RIVALS, out=tmp_path / "whole", **KILLED)
    trained, kills = 0, 0
    for steps in (1, 3, 4, 5, 9, 12, 7, 8, 2, 6):  # within an epoch, at its end, between runs
        notes = Notes(killed_after(steps))
        with pytest.raises(Killed):
            compare(recipe, RIVALS, out=tmp_path / "killed", watchers=[notes], **KILLED)
        trained, kills = trained + steps, kills + 1
    notes = Notes()
    found = compare(recipe, RIVALS, out=tmp_path / "killed", watchers=[notes], **KILLED)
    assert kills == 10
    assert facts(found) == facts(whole)
    left = sum(len(batches) for run in notes.batches.values() for batches in run.values())
    # a kill costs no more than the step that was under way
    runs = 3 * 2 * 2 * STEPS + 3 * 2 * 4 * STEPS
    assert trained + left <= runs + kills


@pytest.mark.slow
def test_the_same_call_reuses_everything_and_another_size_trains_only_that(
    recipe: str, tmp_path: Path
) -> None:
    first = compare(recipe, RIVALS, out=tmp_path / "out", **KILLED)
    notes = Notes()
    again = compare(recipe, RIVALS, out=tmp_path / "out", watchers=[notes], **KILLED)
    assert again == first and not notes.batches  # latency is kept too
    wider = {**KILLED, "sizes": (0.6, 0.5)}
    found = compare(recipe, RIVALS, out=tmp_path / "out", watchers=[notes], **wider)
    assert all("size=0.5" in name for name in notes.batches)
    assert len(notes.batches) == 4  # lod and narrow, two seeds each
    kept = [{**row, "runs": None} for row in facts(found)["rows"] if row["size"] != 0.5]
    assert kept == [{**row, "runs": None} for row in facts(first)["rows"]]


@pytest.mark.parametrize("content", ["[1]", '{"reason": 3}', "[" * 100_000, ""])
@pytest.mark.parametrize("name", ["failed.json", "compared.json", "result.json"])
def test_files_of_runs_that_are_damaged_are_one_line(
    recipe: str, tmp_path: Path, name: str, content: str
) -> None:
    few = {**KILLED, "seeds": 1, "lr_trials": 1, "out": tmp_path / "out"}
    compare(recipe, ["dense"], **few)
    (run,) = (tmp_path / "out" / "runs").iterdir()
    (run / name).write_text(content)
    with pytest.raises(MaestroError, match=name) as refused:
        compare(recipe, ["dense"], **few)
    assert "\n" not in str(refused.value)


def test_latencies_that_are_damaged_are_measured_again_or_refused(
    recipe: str, tmp_path: Path
) -> None:
    few = {**KILLED, "seeds": 1, "lr_trials": 1, "out": tmp_path / "out"}
    found = compare(recipe, ["dense"], **few)
    for content in ("[1]", '{"dense": {}}', "[" * 100_000, ""):
        (tmp_path / "out" / "latency.json").write_text(content)
        try:
            assert len(compare(recipe, ["dense"], **few).rows) == len(found.rows)
        except MaestroError as refused:
            assert "latency.json" in str(refused) and "\n" not in str(refused)


def test_what_a_kill_left_in_a_finished_training_is_removed(recipe: str, tmp_path: Path) -> None:
    few = {**KILLED, "seeds": 1, "lr_trials": 1, "out": tmp_path / "out"}
    compare(recipe, ["dense"], **few)
    (run,) = (tmp_path / "out" / "runs").iterdir()
    before = sorted(run.iterdir())
    (run / ".lock").write_text("process 1 on elsewhere")
    (run / ".writing-compared.json-x").touch()
    compare(recipe, ["dense"], **few)
    assert sorted(run.iterdir()) == before


def test_what_another_process_is_at_is_left_to_it(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    busy = plan(recipe, out=out, **KILLED).trials(contender("dense"))[0].run.directory
    busy.mkdir(parents=True)
    said: list[str] = []
    with alone_in(busy), pytest.raises(Interrupted):
        compare(
            recipe, ["narrow", "dense"], out=out, **KILLED, say=said.append,
            stop=lambda: any("seed=1" in line for line in said[-1:]) and _others_done(out),
        )  # fmt: skip
    runs = {path.parent.name for path in out.glob("runs/*/result.json")}
    assert busy.name not in runs
    assert sum("narrow" in name for name in runs) == 2 + 2
    assert sum("dense" in name for name in runs) == 1  # the other trial; more has to wait
    found = compare(recipe, ["narrow", "dense"], out=out, **KILLED)
    assert len(found.rows) == 2


def _others_done(out: Path) -> bool:
    return len([*out.glob("runs/*/compared.json")]) == 2 + 2 + 1


def test_runs_of_other_settings_are_not_taken_for_ours(recipe: str, tmp_path: Path) -> None:
    few = {**KILLED, "seeds": 1, "lr_trials": 1}
    compare(recipe, ["dense"], out=tmp_path / "out", **few)
    with pytest.raises(OptionError, match=r"run with settings other than.*Give another --out"):
        compare(recipe, ["dense"], out=tmp_path / "out", changes=["batch=3"], **few)


# -- what cannot be had ------------------------------------------------------------------------


def test_each_thing_that_is_missing_is_a_line_and_the_others_go_on(
    recipe: str, tmp_path: Path
) -> None:
    Path("task.yaml").write_text(RECIPE.replace("own:model", "own:fixed"))
    said: list[str] = []
    found = compare(
        recipe, ["dense", "narrow", "svd", "lod"], out=tmp_path / "out", sizes=(0.6, 0.01),
        lr_trials=1, say=said.append,
    )  # fmt: skip
    assert {(row.method, row.size) for row in found.rows} == {
        ("dense", None), ("svd", 0.6), ("lod", 0.6),
    }  # fmt: skip
    missing = dict(found.missing)
    assert "must take a whole number as `width`" in missing["narrow at 0.6×, seed 0"]
    assert "no submodel meets" in missing["svd at 0.01×, seed 0"]
    assert "lod at 0.01×, seed 0" in missing
    assert all("\n" not in reason for reason in missing.values())
    for what in missing:
        assert f"missing: {what}: " in str(found)
    assert len(said) == len(set(said))


def test_a_learning_rate_that_diverges_is_not_chosen_nor_tried_again(
    recipe: str, tmp_path: Path
) -> None:
    text = RECIPE.replace("lr: 0.05", "lr: 1.0e+30, momentum: 0")
    Path("task.yaml").write_text(text)
    few = {"sizes": (0.5,), "lr_trials": 3, "lr_epochs": 1, "out": tmp_path / "out"}
    found = compare(recipe, ["dense"], **few)
    (reason,) = {reason for _, reason in found.missing}
    assert "loss" in reason or "finite" in reason
    notes = Notes()
    assert compare(recipe, ["dense"], **few, watchers=[notes]) == found
    assert not notes.batches


def test_without_validation_data_no_learning_rate_can_be_chosen(
    recipe: str, tmp_path: Path
) -> None:
    Path("own.py").write_text(OWN.replace('"validation": held_out, ', ""))
    few = {"sizes": (0.5,), "out": tmp_path / "out"}
    with pytest.raises(OptionError, match=r"no validation split.*--lr-trials 1"):
        compare(recipe, ["dense"], lr_trials=2, **few)
    assert not (tmp_path / "out").exists()
    found = compare(recipe, ["dense"], lr_trials=1, budget=0.5, **few)
    assert found.rows[0].training == 0.5


def test_an_unknown_method_is_refused_before_anything_starts(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^method 'lo' is unknown\. Did you mean 'lod'"):
        compare(recipe, ["dense", "lo"], sizes=(0.5,), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- the command -------------------------------------------------------------------------------


def lod(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_the_command_prints_the_table_and_writes_page_and_json(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "compare", recipe, "--methods", "dense, narrow", "--sizes", "0.5",
        "--lr-trials", "1", "--out", "here",
    )  # fmt: skip
    assert lod(*arguments) == 0
    printed = capsys.readouterr().out
    assert "training narrow,size=0.5" in printed and "≤ 0.5×" in printed
    said = json.loads(Path("here/compare.json").read_text())
    assert [row["method"] for row in said["rows"]] == ["dense", "narrow"]
    assert "narrow" in Path("here/compare.html").read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--sizes", "half"), "--sizes is not a list of numbers: 'half'. Give shares"),
        (("--sizes", "2"), "sizes are not between 0 and 1: 2. Give shares"),
        (("--methods", "lodd"), "Did you mean 'lod'?"),
        (("--set", "epoch=3"), "there is no setting 'epoch'"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lod("compare", recipe, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_help_names_every_contender(capsys: pytest.CaptureFixture[str]) -> None:
    assert lod("compare", "--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("narrow", "elastic"))
    assert {"lod", "dense", "narrow", "svd", "elastic"} <= {*known()}
