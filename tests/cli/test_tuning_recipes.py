"""`lod tune`: searches whose trials are run directories, and what is left of them after a stop.

Run as a script, this file kills a search in the middle of a trial: see `main`.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from maestro_lod.cli import main as cli
from maestro_lod.cli.display import Display
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.cli.recipe import Recipe, load_recipe
from maestro_lod.cli.run import Interrupted, Run
from maestro_lod.cli.tuning.recipes import Tuning
from maestro_lod.cli.tuning.search import Tuned
from maestro_lod.errors import OptionError
from maestro_lod.model.cost import summary
from maestro_lod.model.surgery import extract

# λ=0.04 ends with 5,796 params, 0.02 with 14,108, 0.01 with 27,356; none has learnt much
SMALL = [
    "data.limit=120", "data.validation=0.3", "batch=8", "epochs=4", "threshold=0.1", "threads=1",
    "optimizer.lr=0.03", "penalty=0.02",
]  # fmt: skip
LIMITS: dict[str, Any] = {"max_params": 15_000, "min_accuracy": 0.9, "largest": 0.04}
STEPS = 11 * 4  # of one training
COMMAND = [
    *("tune", "digits", "--max-params", "15000", "--min-accuracy", "0.9", "--largest", "0.04"),
    *(part for change in SMALL for part in ("--set", change)),
]

OWN = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

def data(batch, validation, classes):
    x = torch.randn(16, 6)
    batches = [(x, x[:, :4].argmax(1) if classes else x[:, :4])]
    return {"train": batches, "validation": batches} if validation else {"train": batches}

def loss(output, target):
    return (output - target).square().mean()
"""


def small(*changes: str) -> Recipe:
    return load_recipe("digits", [*SMALL, *changes])


def rows(found: Tuned) -> list[tuple[Any, ...]]:
    """What a search has found, without the numbers of its trials and their places."""
    return [(t.penalty, t.status, t.reached) for t in found.trials if t.status != "stopped"]


def records(directory: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without times."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuned, str]:
    """A whole search: its directory, what it found, and what a terminal showed."""
    directory = tmp_path_factory.mktemp("searched") / "search"
    terminal = io.StringIO()
    display = Display(Console(file=terminal, force_terminal=True, width=120))
    found = Tuning(small(), directory, watchers=[display]).tune(**LIMITS)
    return directory, found, terminal.getvalue()


# -- a search --------------------------------------------------------------------------------------


def test_each_trial_is_a_finished_run(searched: tuple[Path, Tuned, str]):
    directory, found, terminal = searched
    assert found.status == "params_only"
    assert [(t.penalty, t.status) for t in found.trials] == [
        (0.04, "too sparse"),
        (0.02, "complete"),
        (0.01, "complete"),
    ]
    assert found.penalty == 0.02
    for trial in found.trials:
        assert trial.where == str(directory / f"trial-{trial.number}")
        assert f" into {trial.where}: " in terminal
        run = Run.open(Path(trial.where))
        result, reached = run.result(), trial.reached
        assert reached is not None
        assert run.recipe.penalty == trial.penalty
        assert result["epochs"] == reached.epoch
        assert result["validation"]["accuracy"] == reached.accuracy
        cost = result["ledger"]["relative_macs"] * reached.epoch / 4
        assert trial.spent == reached.cost == pytest.approx(cost)
        model, data = run.trained()
        deployed = summary(extract(model), data.example)
        assert (deployed.params, deployed.macs) == (reached.params, reached.macs)


def test_a_trial_is_the_training_that_the_recipe_has_with_its_lambda(
    searched: tuple[Path, Tuned, str], tmp_path: Path
):
    directory, _, _ = searched
    Run.create(small("penalty=0.02"), tmp_path / "run").train()
    assert records(tmp_path / "run") == records(directory / "trial-1")


def test_a_model_within_both_limits_ends_the_search_where_it_is(tmp_path: Path):
    tuning = Tuning(small(), tmp_path / "search")
    found = tuning.tune(max_params=30_000, min_accuracy=0.05)
    assert (found.status, found.penalty) == ("satisfied", 0.16)  # 8 × the recipe's
    assert found.chosen is not None and found.chosen.reached is not None
    assert found.chosen.reached.epoch == 3
    run = Run.open(Path(found.chosen.where))
    assert run.recipe == small("penalty=0.16", "epochs=3")  # which makes that very model
    assert run.result()["epochs"] == 3
    assert run.result()["summary"]["fused_params"] == found.chosen.reached.params
    assert run.model_file.exists() and (run.directory / "report.html").exists()


def test_a_trial_that_collapses_ends_as_failed(tmp_path: Path):
    ends: list[dict[str, Any]] = []
    tuning = Tuning(small("epochs=2"), tmp_path / "search", watchers=[Ends(ends)])
    found = tuning.tune(max_params=15_000, min_accuracy=0.9, largest=30.0, smallest=30.0)
    assert [trial.status for trial in found.trials] == ["failed"]
    assert found.verdict.startswith("infeasible: every trial failed, the last with: ")
    assert ends == [{}]  # watchers are let go


class Ends:
    """A watcher that notes how runs end."""

    def __init__(self, ends: list[dict[str, Any]]) -> None:
        self.ends = ends

    def prepare(self, *_: Any) -> None:
        pass

    def begin(self, *_: Any) -> None:
        pass

    def step(self, *_: Any) -> None:
        pass

    def epoch(self, *_: Any) -> None:
        pass

    def end(self, result: dict[str, Any]) -> None:
        self.ends.append(result)


def test_tradeoffs_vary_lambda_and_learning_rate(tmp_path: Path):
    tuning = Tuning(small("epochs=1", "data.limit=40"), tmp_path / "search")
    front = tuning.explore(3)
    assert len(front.trials) == 3
    assert front.best
    for trial in front.trials:
        assert trial.penalty is not None and trial.lr is not None
        recipe = Run.open(Path(trial.where)).recipe
        assert (recipe.penalty, recipe.optimizer.lr) == (trial.penalty, trial.lr)
        assert 0.16 / 1024 <= trial.penalty <= 0.16
        assert 0.003 <= trial.lr <= 0.09


# -- stop and go on --------------------------------------------------------------------------------


def after(steps: int) -> Callable[[], bool]:
    """Ask to stop once so many steps are done."""
    counter = count(1)
    return lambda: next(counter) > steps


@pytest.mark.slow
@pytest.mark.parametrize("trial", [0, 1])
def test_a_search_that_is_stopped_goes_on_where_it_was(
    trial: int, searched: tuple[Path, Tuned, str], tmp_path: Path
):
    # asked after each step, and after each epoch
    stop = after(trial * (STEPS + 4) + STEPS // 2)
    with pytest.raises(Interrupted):
        Tuning(small(), tmp_path, stop=stop).tune(**LIMITS)
    assert not (tmp_path / f"trial-{trial + 1}").exists()
    steps: list[int] = []
    found = Tuning(small(), tmp_path, watchers=[Steps(steps)]).tune(**LIMITS)
    whole = searched[1]
    assert rows(found) == rows(whole)
    assert found.cost == pytest.approx(whole.cost)
    assert found.trials[trial + 1].again == trial
    assert sum(steps) < 3 * STEPS - trial * STEPS  # not all of it again
    assert not (tmp_path / f"trial-{trial}").exists()  # it has moved


class Steps(Ends):
    """A watcher that counts steps."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def step(self, *_: Any) -> None:
        self.steps.append(1)

    def end(self, result: dict[str, Any]) -> None:
        pass


def test_a_stopped_trial_whose_directory_is_elsewhere_starts_anew(tmp_path: Path):
    one: dict[str, Any] = {**LIMITS, "smallest": 0.04}
    with pytest.raises(Interrupted):
        Tuning(small(), tmp_path / "a", tmp_path / "journal", stop=after(30)).tune(**one)
    found = Tuning(small(), tmp_path / "b", tmp_path / "journal").tune(**one)
    first, again = found.trials
    assert (first.status, again.status) == ("stopped", "too sparse")
    assert again.where == str(tmp_path / "b" / "trial-1")
    assert first.reached is not None and first.reached.epoch == 2
    assert found.cost == pytest.approx(first.spent + again.spent)
    assert first.spent > 0.4


def test_a_stop_is_obeyed_while_others_are_waited_for(tmp_path: Path):
    tuning = Tuning(small(), tmp_path, stop=lambda: True)
    with pytest.raises(Interrupted):
        tuning._sleep(60.0)


def test_where_and_how_to_train_may_differ_but_not_what(searched: tuple[Path, Tuned, str]):
    directory, found, _ = searched
    machine = small("threads=2", "checkpoint_every=1", "data.directory=elsewhere", "penalty=0.3")
    assert Tuning(machine, directory, name="digits").tune(**LIMITS) == found
    with pytest.raises(OptionError, match=r"has epochs=4, not 5\."):
        Tuning(small("epochs=5"), directory).tune(**LIMITS)


# -- what makes no sense ---------------------------------------------------------------------------


def test_a_recipe_without_validation_gets_some_and_says_so(tmp_path: Path):
    with pytest.warns(UserWarning, match="they hold out 10% of the training set") as warned:
        tuning = Tuning(small("data.validation=0"), tmp_path)
    assert Path(warned[0].filename) == Path(__file__)
    assert tuning.recipe == small("data.validation=0.1")
    assert Tuning(small(), tmp_path).recipe == small()


@pytest.mark.parametrize(
    ("changes", "limits", "message"),
    [
        (["shrink=false"], {}, "with shrink=false no λ makes a model smaller"),
        (["penalty=0"], {"largest": None}, "the recipe has no λ (penalty) to start from"),
        ([], {"max_params": 44_426}, "max_params=44426 is not below the dense model's 44426"),
        ([], {"max_params": 235}, "max_params=235 cannot be reached: with one rank in every layer"),
        (["min_rank=1"], {"max_params": 1106}, "or min_rank=1 of them"),
        ([], {"max_params": 0}, "max_params=0 cannot be reached"),
        ([], {"smallest": 1.0}, "smallest=1 is above largest=0.04"),
        ([], {"min_accuracy": 95}, "Did you mean 0.95?"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_written(
    changes: list[str], limits: dict[str, Any], message: str, tmp_path: Path
):
    with pytest.raises(OptionError) as refused:
        Tuning(small(*changes), tmp_path / "search").tune(**{**LIMITS, **limits})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "search").exists()


def test_dense_training_has_nothing_to_tune(tmp_path: Path):
    with pytest.raises(OptionError, match="with method=dense no λ makes a model smaller"):
        Tuning(load_recipe("digits", ["method=dense"]), tmp_path)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Recipe]]:
    """Recipes of a user's own model and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_tuning.py").write_text(OWN)

    def recipe(*, validation: bool, classes: bool) -> Recipe:
        options = {"validation": validation, "classes": classes}
        Path("own.yaml").write_text(
            "model: own_tuning:model\nepochs: 1\npenalty: 0.1\nthreshold: 0.01\n"
            f"data: {{name: 'own_tuning:data', options: {json.dumps(options)}}}\n"
            + ("" if classes else "loss: own_tuning:loss\n")
        )
        return load_recipe("own.yaml")

    yield recipe
    sys.modules.pop("own_tuning", None)


def test_data_without_validation_or_accuracy_are_refused(own: Callable[..., Recipe]):
    limits: dict[str, Any] = {"max_params": 60, "min_accuracy": 0.5}
    blind = own(validation=False, classes=True)
    with pytest.raises(OptionError, match="'own_tuning:data' has no validation split"):
        Tuning(blind, Path("a")).tune(**limits)
    with pytest.raises(OptionError, match="'own_tuning:data' has no validation split"):
        Tuning(blind, Path("a")).explore(2)
    with pytest.raises(OptionError, match="there is no accuracy to tune"):
        Tuning(own(validation=True, classes=False), Path("b")).tune(**limits)


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path):
    (tmp_path / "trial-0").mkdir()
    (tmp_path / "trial-0" / "mine.txt").write_text("mine")
    with pytest.raises(OptionError, match="trial-0 is not empty"):
        Tuning(small(), tmp_path).tune(**LIMITS)
    assert [path.name for path in (tmp_path / "trial-0").iterdir()] == ["mine.txt"]


# -- the program -----------------------------------------------------------------------------------


def lod(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def test_the_program_ends_with_a_table_and_where_the_model_is(
    searched: tuple[Path, Tuned, str], capsys: pytest.CaptureFixture[str]
):
    directory, found, _ = searched
    assert lod(*COMMAND, "--out", str(directory)) == 1  # no model is within both limits
    shown, errors = capsys.readouterr()
    assert shown == f"\n{found}\nmodel and report: {directory / 'trial-1'}\n"
    assert errors == ""


@pytest.mark.filterwarnings("default")
def test_the_program_says_which_trial_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    limits = ["--max-params", "30000", "--min-accuracy", "0.05"]
    changes = [part for change in (*SMALL, "data.validation=0") for part in ("--set", change)]
    assert lod("tune", "digits", *limits, *changes) == 0
    shown, errors = capsys.readouterr()
    lines = shown.splitlines()
    assert lines[0] == "trial 0 with λ=0.16: running"
    assert any(line.startswith("epoch 3/4  validation loss") for line in lines)
    assert any(line.startswith("trial 0 with λ=0.16: satisfied at epoch 3") for line in lines)
    assert lines[-1] == "model and report: runs/tune-digits/trial-0"
    assert errors == (
        "lod: note: data.validation=0 leaves no data to judge trials by: they hold out 10% of the "
        "training set.\n"
    )
    assert lod("tune", "digits", *limits, *changes, "--quiet") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("trial")


def test_the_program_searches_tradeoffs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    changes = [part for change in (*SMALL, "epochs=1") for part in ("--set", change)]
    out = str(tmp_path / "out")
    assert lod("tune", "digits", "--pareto", "2", *changes, "--out", out, "--quiet") == 0
    assert "from the smallest to the most accurate: trials" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give both --max-params and --min-accuracy, or --pareto."),
        (["--max-params", "9000"], "Give both --max-params and --min-accuracy, or --pareto."),
        (["--max-params", "9000", "--pareto", "3"], "--pareto searches without limits"),
        (["--pareto", "0"], "trials=0 must be at least 1."),
        (["--max-params", "9000", "--min-accuracy", "98"], "Did you mean 0.98?"),
        (["--pareto", "3", "--storage", "sqlite:////no/where"], "storage sqlite:////no/where cann"),
    ],
)
def test_the_program_refuses_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert lod("tune", "digits", "--set", "penalty=1e-3", *arguments) == 2
    shown, errors = capsys.readouterr()
    assert shown == ""
    assert message in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_program_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupt(self: Display, record: dict[str, Any]) -> None:
        if record.epoch == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Display, "epoch", interrupt)
    assert lod(*COMMAND, "--out", str(tmp_path)) == 130
    assert capsys.readouterr().out.endswith(
        "stopped; everything is saved. Resume with: the same command\n"
    )
    assert (tmp_path / "trial-0" / "checkpoint.safetensors").exists()


def main() -> None:
    """Start the program, kill it once its second trial has saved an epoch, and start it again."""

    def ended(epoch: Callable[[Display, dict[str, Any]], None]) -> int:
        child = os.fork()
        if child == 0:
            sink = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            Display.epoch = epoch  # type: ignore[method-assign]
            try:
                cli.main([*COMMAND, "--out", "search"])
            except SystemExit as ended:
                os._exit(int(ended.code or 0))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def killed(display: Display, record: dict[str, Any]) -> None:
        if Path("search/trial-1").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    summary(LeNet(), torch.empty(1, 1, 28, 28))  # so that children need not import all it needs
    assert ended(killed) == -signal.SIGKILL
    sys.exit(ended(Display.epoch))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_kill_loses_nothing_but_the_epoch_it_was_in(
    searched: tuple[Path, Tuned, str], tmp_path: Path
):
    done = subprocess.run([sys.executable, __file__], cwd=tmp_path, timeout=300)
    assert done.returncode == 1, (tmp_path / "output.txt").read_text()
    found = Tuning(small(), tmp_path / "search").tune(**LIMITS)
    whole = searched[1]
    assert rows(found) == rows(whole)
    assert [trial.status for trial in found.trials].count("stopped") == 1
    assert found.cost == pytest.approx(whole.cost)  # what it had spent was not spent again
    shown = (tmp_path / "output.txt").read_text()
    assert re.search(r"resuming search/trial-2: .*\n.*\nresuming at epoch", shown)


if __name__ == "__main__":
    main()


def test_the_search_starts_where_useless_ranks_still_reach_the_threshold(tmp_path):
    # LeNet's largest rank is 120: the floor is (0.3 · 120 · lr · λ)²
    for lr, started in ((0.02, 8e-3), (0.2, 1e-3)):
        recipe = load_recipe("digits", ["penalty=1e-3", f"optimizer.lr={lr}", "threshold=1e-4"])
        high, low = Tuning(recipe, tmp_path)._penalties(None, None)
        assert high == pytest.approx(started)
        assert low == pytest.approx(high / 1024)
    recipe = load_recipe("digits", ["penalty=1e-3", "optimizer.lr=0.2", "proximal=true"])
    assert Tuning(recipe, tmp_path)._penalties(None, None)[0] == pytest.approx(8e-3)
