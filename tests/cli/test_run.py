"""A run and its directory: what is in it, and that no stop, kill or full disk changes the end.

Run as a script, this file drives one training run from kill to kill: see `main`.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from torch.optim.optimizer import register_optimizer_step_post_hook

from maestro_lod.cli import main as cli
from maestro_lod.cli import run as run_module
from maestro_lod.cli.recipe import Recipe, checked, load_recipe
from maestro_lod.cli.run import Interrupted, Run
from maestro_lod.cli.setup import Setup
from maestro_lod.errors import CheckpointError, OptionError
from maestro_lod.files import tensor_file as tensor_files
from maestro_lod.files.state import load_state, save_state
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.evaluate import evaluate

# LeNet loses ranks in each of these epochs
SHRINKING = ["data.limit=120", "batch=8", "epochs=3", "penalty=0.02", "threshold=0.1", "threads=1"]
SMALL = ["data.limit=60", "batch=8", "epochs=2", "penalty=0.02", "threshold=0.1", "threads=1"]

OWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(),
        nn.Linear(8 * 16, 24), nn.BatchNorm1d(24), nn.Dropout(), nn.ReLU(), nn.Linear(24, 3),
    )

def data(batch):
    x = torch.randn(90, 1, 6, 6)
    y = (x.mean((1, 2, 3)) * 8).round().clamp(-1, 1).long() + 1
    train = DataLoader(TensorDataset(x[:70], y[:70]), batch_size=batch, shuffle=True)
    return {"train": train, "validation": [(x[70:], y[70:])]}
"""


def as_options(changes: list[str]) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


# -- the drive, in a process of its own ----------------------------------------------------------


class Killer:
    """Kills its own process with SIGKILL at the n-th thing it does, or at a named one."""

    def __init__(self, *when: int | str) -> None:
        self.when, self.done = when, 0

    def did(self, what: str) -> None:
        self.done += 1
        if self.done in self.when or what in self.when:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Be told of every optimizer step, and of every stage of every write."""
        save_file, replace, report = tensor_files.save_file, os.replace, run_module.write_report

        def save_in_halves(tensors: Any, path: str, metadata: Any = None) -> None:
            save_file(tensors, path, metadata=metadata)
            whole = Path(path).read_bytes()
            Path(path).unlink()
            half = Path(path).with_name(".tmpHalf")  # as safetensors does, from 0.8 on
            half.write_bytes(whole[: len(whole) // 2])
            self.did(f"half of {Path(path).name}")
            half.unlink()
            Path(path).write_bytes(whole)

        def replace_slowly(source: Any, target: Any, **options: Any) -> None:
            self.did(f"before {Path(target).name}")
            replace(source, target, **options)
            self.did(f"after {Path(target).name}")

        def report_late(*arguments: Any) -> Path:
            self.did("before report.html")
            return report(*arguments)

        tensor_files.save_file = save_in_halves
        os.replace = replace_slowly
        run_module.write_report = report_late
        register_optimizer_step_post_hook(lambda *_: self.did("step"))


def forked(arguments: list[str], *when: int | str, after: float | None = None) -> str:
    """Run the program in a child to its end, or until it is killed, and say how it ended."""
    child = os.fork()
    if child == 0:
        sink = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        Killer(*when).watch()
        try:
            cli.main(arguments)
        except SystemExit as error:
            os._exit(int(error.code or 0))
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return "killed" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def drive(train: list[str], draw: random.Random) -> dict[str, list[str]]:
    """Train uninterrupted, then once more from kill to kill, and say how each start ended."""
    whole = forked(["train", *train, "--out", "whole"])
    new, again = ["train", *train, "--out", "killed"], ["resume", "killed"]
    end = "half of model.safetensors"  # none of the kills before this may miss
    killed = [
        forked(new, "before config.yaml"),
        forked(again),  # refused: there is nothing yet
        forked(new, "after config.yaml"),
        forked(again, "half of checkpoint.safetensors"),
        *[forked(again, draw.randint(1, 30), end) for _ in range(4)],
        *[forked(again, end, after=draw.uniform(0.1, 0.6)) for _ in range(3)],
        *[forked(again, draw.randint(1, 30), end) for _ in range(4)],
        forked(again, end),
        forked(again, "after model.safetensors"),
        forked(again, "before report.html"),
    ]
    return {"whole": [whole], "killed": killed}


def main() -> None:
    """Drive a run in each directory of the JSON in the first argument: {name: what to train}.

    Every start is a fork of this process, because the imports take longer than the training.
    """
    torch.set_num_threads(1)
    Setup.of(load_recipe("digits"))  # what torch and others import late is there before the forks
    ends = {}
    for seed, (name, train) in enumerate(json.loads(sys.argv[1]).items()):
        os.chdir(name)
        ends[name] = drive(train, random.Random(seed))
        os.chdir("..")
    sys.stdout.write(json.dumps(ends))


# -- comparing two runs --------------------------------------------------------------------------


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Compare nested values bit for bit; how long something took does not count."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one.keys() - {"seconds"}:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{place}]")
    else:
        assert one == other, where


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def assert_same_end(one: Path, other: Path) -> None:
    """Compare model, result, metrics and the complete training state of two finished runs."""
    assert_same(tensors(one / "model.safetensors"), tensors(other / "model.safetensors"))
    assert_same(
        load_state(one / "checkpoint.safetensors"), load_state(other / "checkpoint.safetensors")
    )
    assert_same(metrics(one), metrics(other))
    assert_same(Run.open(one).result(), Run.open(other).result())
    assert (one / "config.yaml").read_text() == (other / "config.yaml").read_text()
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())


# -- killed --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_killed_at_any_moment_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """LeNet, which shrinks and is saved at each step; own code with dropout and batch norm."""
    lenet = ["digits", *as_options(SHRINKING), "--set", "checkpoint_every=0"]
    own = {"model": "own:model", "data": "own:data", "epochs": 6, "batch": 8, "threads": 1}
    for name in ("lenet", "own"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "own.py").write_text(OWN)
    (tmp_path / "own" / "own.yaml").write_text(
        yaml.safe_dump(own | {"penalty": 0.01, "checkpoint_every": 0.02})
    )
    done = subprocess.run(
        [sys.executable, __file__, json.dumps({"lenet": lenet, "own": ["own.yaml"]})],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name, ends in json.loads(done.stdout).items():
        assert ends["whole"] == ["exit 0"]
        assert ends["killed"] == ["killed", "exit 2", *["killed"] * 16]
        whole, killed = tmp_path / name / "whole", tmp_path / name / "killed"
        assert not (killed / "report.html").exists()  # the last kill came right before it
        (whole / "report.html").unlink()
        (killed / ".lock").unlink()  # held by nobody: the next start would take it
        assert_same_end(killed, whole)
        shrinks = metrics(whole)[0]["ranks"] != metrics(whole)[-1]["ranks"]
        assert shrinks is (name == "lenet")


# -- stopped -------------------------------------------------------------------------------------


def digits(*changes: str) -> Recipe:
    return load_recipe("digits", changes)


def stopped_at(step: int) -> Callable[[], bool]:
    """Ask a run to stop after so many steps of this process."""
    steps = count(1)
    return lambda: next(steps) == step


@pytest.mark.parametrize(
    "changes",
    [
        ["optimizer={name: adamw, weight_decay: 0.1, decay_norms: false}", "proximal=true",
         "clip_norm=1", "accumulate=2"],
        ["channels_last=true", "amp=true", "sampling=several", "label_smoothing=0.1"],
        ["full_pass=true", "distill=true", "optimizer.nesterov=true",
         "schedule={name: milestones, epochs: [1]}", "min_rank=3"],
        ["sampling=several", "schedule={name: vaswani, warmup: 5}", "reduction=sum",
         "penalty=0", "decompose={only: [fc1, fc2], ranks: 0.5}"],
        ["method=dense", "optimizer=adam"],
    ],
    ids=["adamw", "channels_last", "full_pass", "several", "dense"],
)  # fmt: skip
def test_a_stopped_run_ends_as_if_it_had_not_been(tmp_path: Path, changes: list[str]) -> None:
    low_rank = SMALL if "method=dense" not in changes else [*SMALL[:3], SMALL[-1]]
    recipe = digits(*low_rank, *changes)
    Run.create(recipe, tmp_path / "whole").train()
    run = Run.create(recipe, tmp_path / "stopped")
    for step in (2, 1, 3):
        with pytest.raises(Interrupted):
            run.train(stop=stopped_at(step))
        run = Run.open(run.directory)
    run.train()
    assert_same_end(tmp_path / "stopped", tmp_path / "whole")


def test_a_run_asked_to_stop_at_the_end_of_an_epoch_stops_there(tmp_path: Path) -> None:
    run = Run.create(digits(*SMALL), tmp_path / "run")
    with pytest.raises(Interrupted):
        run.train(stop=lambda: (run.directory / "metrics.jsonl").read_text() != "")
    state = load_state(run.checkpoint)["progress"]
    assert (state["epoch"], state["batch"]) == (1, 0)
    assert len(metrics(run.directory)) == 1


def test_a_run_stopped_in_its_last_moment_is_finished_instead(tmp_path: Path) -> None:
    run = Run.create(digits(*SMALL, "epochs=1"), tmp_path / "run")
    run.train(stop=lambda: (run.directory / "metrics.jsonl").read_text() != "")
    assert run.finished


# -- code that a directory names -----------------------------------------------------------------

HOSTILE = """
from pathlib import Path
Path("imported").touch()
def model(): return __import__("torch").nn.Linear(4, 3)
def data(batch): raise SystemExit
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory from elsewhere; an import of what it names leaves a trace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("LOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOD_TRUST", raising=False)
    (tmp_path / "hostile.py").write_text(HOSTILE)
    (tmp_path / "run").mkdir()
    result = {"summary": {"dense_params": 1}, "ledger": None, "seconds": 0, "epochs": 1}
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    yield tmp_path / "run"
    sys.modules.pop("hostile", None)


def name_in(directory: Path, **parts: Any) -> None:
    settings = {"model": "lenet", "data": "digits", "epochs": 1, **parts}
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize(
    "part",
    [
        {"model": {"name": "hostile:model", "options": {"cmd": "touch x"}}},
        {"model": "hostile:model"},
        {"data": {"name": "hostile:data"}},
        {"loss": "hostile:model"},
        {"method": "hostile:model"},
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["summary", "frontier", "bench", "resume", "deploy"])
def test_a_directory_from_elsewhere_runs_nothing_unasked(
    hostile: Path, part: dict[str, Any], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name_in(hostile, **part)
    before = sorted(hostile.parent.rglob("*"))
    limits = ["--max-macs", "0.5", "--out", "phone"] if command == "deploy" else []
    with pytest.raises(SystemExit) as end:
        cli.main([command, "run", *limits])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("lod: run/config.yaml names code to run, ") and error.count("\n") == 1
    assert "hostile:" in error and "--trust" in error and "LOD_TRUST=1" in error
    assert sorted(hostile.parent.rglob("*")) == before


@pytest.mark.parametrize("how", ["option", "environment", "python"])
def test_consent_lets_the_code_of_a_directory_run(
    hostile: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_in(hostile, model="hostile:model")
    if how == "environment":
        monkeypatch.setenv("LOD_TRUST", "1")
    if how == "python":
        with pytest.raises(OptionError, match="names code to run, model hostile:model"):
            Run.open(hostile)
        Run.open(hostile, trust=True)
        return
    with pytest.raises(SystemExit):
        cli.main(["summary", "run", *(["--trust"] if how == "option" else [])])
    assert Path("imported").exists()


def test_what_one_has_trained_is_trusted_but_not_other_options_of_it(
    hostile: Path, tmp_path: Path
) -> None:
    (tmp_path / "hostile.py").write_text(OWN)
    own = {"model": "hostile:model", "data": "hostile:data", "epochs": 1, "threads": 1}
    recipe = checked(own, "here")
    Run.create(recipe, tmp_path / "mine").train()
    assert Run.open(tmp_path / "mine").recipe == recipe
    name_in(hostile, **own | {"epochs": 7})
    assert Run.open(hostile).recipe.epochs == 7
    name_in(hostile, **own | {"model": {"name": "hostile:model", "options": {"cmd": "rm"}}})
    with pytest.raises(OptionError, match="was not trained here by you"):
        Run.open(hostile)


# -- what is in the directory --------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.manual_seed(0)
    run = Run.create(digits(*SHRINKING), tmp_path_factory.mktemp("runs") / "new" / "run")
    run.train()
    return run


def test_directory_holds_all_of_a_run(finished: Run) -> None:
    assert sorted(path.name for path in finished.directory.iterdir()) == [
        "checkpoint.safetensors", "config.yaml", "environment.json", "metrics.jsonl",
        "model.safetensors", "report.html", "result.json",
    ]  # fmt: skip
    assert finished.finished
    assert Run.open(finished.directory).recipe == finished.recipe
    environment = json.loads((finished.directory / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == 1
    assert environment["data"].startswith("digits: 108 training, 12 validation and 120 test")
    assert {"maestro_lod", "python", "platform", "processor", "cores", "device", "started"} < {
        *environment
    }


def test_metrics_have_one_line_per_epoch_with_its_ranks(finished: Run) -> None:
    records = metrics(finished.directory)
    assert [record["epoch"] for record in records] == [1, 2, 3]
    assert [record["step"] for record in records] == [14, 28, 42]
    totals = [record["total_rank"] for record in records]
    assert totals == [sum(record["ranks"].values()) for record in records]
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[-1]
    assert list(records[0]["ranks"]) == ["conv1", "conv2", "fc1", "fc2", "fc3"]
    for key in (
        *("train_loss", "train_accuracy", "validation_loss", "validation_accuracy", "lr"),
        *("penalty", "params", "macs", "relative_params", "relative_macs", "seconds"),
    ):
        assert all(isinstance(record[key], int | float) for record in records), key
    assert records[-1]["relative_params"] < 1


def test_result_agrees_with_the_model_that_was_saved(finished: Run) -> None:
    result = finished.result()
    model, data = finished.trained()
    last = metrics(finished.directory)[-1]
    assert {name: layer.rank for name, layer in low_rank_layers(model).items()} == last["ranks"]
    assert data.test is not None
    assert result["test"] == evaluate(model, data.test)
    assert result["validation"] == {key: last[f"validation_{key}"] for key in ("loss", "accuracy")}
    assert result["summary"]["fused_params"] == last["params"]
    assert result["summary"]["fused_macs"] == last["macs"]
    assert result["full_ranks"] == {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84, "fc3": 10}
    assert result["status"] == "finished" and result["epochs"] == 3
    assert result["ledger"]["relative_macs"] > 0
    assert result["seconds"] == pytest.approx(
        sum(r["seconds"] for r in metrics(finished.directory))
    )


def test_settings_alone_make_the_same_run_again(finished: Run, tmp_path: Path) -> None:
    settings = load_recipe(str(finished.directory / "config.yaml"))
    Run.create(settings, tmp_path / "again").train()
    assert_same_end(tmp_path / "again", finished.directory)


def test_another_seed_makes_another_run(finished: Run, tmp_path: Path) -> None:
    run = Run.create(digits(*SHRINKING, "seed=1"), tmp_path / "run")
    run.train()
    ours, theirs = tensors(run.model_file), tensors(finished.model_file)
    assert not torch.equal(ours["conv1.bias"], theirs["conv1.bias"])


def test_dense_run_is_saved_and_read_back(tmp_path: Path) -> None:
    run = Run.create(digits("method=dense", "data.limit=60", "epochs=1"), tmp_path / "run")
    result = run.train()
    model, data = Run.open(run.directory).trained()
    assert not low_rank_layers(model)
    assert data.test is not None
    assert evaluate(model, data.test) == result["test"]
    assert set(result["ledger"].values()) == {1.0} and result["full_ranks"] == {}
    assert metrics(run.directory)[0]["relative_params"] == 1.0


# -- refused -------------------------------------------------------------------------------------


def test_only_a_finished_run_has_a_result(finished: Run, tmp_path: Path) -> None:
    shutil.copytree(finished.directory, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    run = Run.open(tmp_path / "run")
    assert not run.finished
    with pytest.raises(OptionError, match=r"has not finished\. Resume with: lod resume"):
        run.trained()


def test_damaged_files_are_named(finished: Run, tmp_path: Path) -> None:
    shutil.copytree(finished.directory, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    (run.directory / "result.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"result\.json is damaged"):
        run.result()
    run.checkpoint.write_bytes(run.checkpoint.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors is damaged"):
        run.train()


def test_checkpoint_of_other_settings_is_refused(finished: Run, tmp_path: Path) -> None:
    shutil.copytree(finished.directory, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("skip: []", "skip: [fc1]"))
    with pytest.raises(CheckpointError, match=r"does not belong to .*config\.yaml"):
        Run.open(tmp_path / "run").train()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seed: 0", "seed: 1"), "seed is 0 in one and 1 in the other"),
        (("batch: 8", "batch: 16"), "batch is 8 in one and 16 in the other"),
        (("lr: 0.05", "lr: 0.5"), "optimizer.lr is "),
        (("penalty: 0.02", "penalty: 0.2"), "penalty is 0.02 in one and 0.2"),
        (("limit: 60", "limit: 50"), "data.limit is 60 in one and 50"),
        (("sampling: pairs", "sampling: several"), 'sampling is "pairs" in one and "several"'),
        (("shrink: true", "shrink: false"), "shrink is true in one and false"),
        (("clip_norm: null", "clip_norm: 1.0"), "clip_norm is null in one and 1.0"),
        (("options: {}", "options: {classes: 12}"), "model.options.classes is null"),
        (("min_rank: 0", "min_rank: 3"), "min_rank is 0 in one and 3"),
    ],
)
def test_settings_that_may_not_change_are_named(
    begun: Path, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    shutil.copytree(begun, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    if change[0].startswith("lr"):
        change = (f"lr: {yaml.safe_load(config.read_text())['optimizer']['lr']}", change[1])
    assert change[0] in config.read_text()
    config.write_text(config.read_text().replace(*change, 1))
    before = run_files(tmp_path / "run")
    with pytest.raises(CheckpointError, match="only epochs, device, threads") as raised:
        Run.open(tmp_path / "run").train()
    assert message in str(raised.value)
    assert run_files(tmp_path / "run") == before


def run_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its second epoch."""
    run = Run.create(digits(*SMALL), tmp_path_factory.mktemp("begun") / "run")
    with pytest.raises(Interrupted):
        run.train(stop=stopped_at(9))
    return run.directory


def test_settings_that_may_change_are_applied(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    text = config.read_text().replace("epochs: 2", "epochs: 3")
    config.write_text(text.replace("checkpoint_every: 300.0", "checkpoint_every: 9.0"))
    assert Run.open(tmp_path / "run").train()["epochs"] == 3
    Run.create(digits(*SMALL, "epochs=3"), tmp_path / "whole").train()
    assert_same(tensors(tmp_path / "run" / "model.safetensors"),
                tensors(tmp_path / "whole" / "model.safetensors"))  # fmt: skip


def test_fewer_epochs_than_are_done_are_refused(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("epochs: 2", "epochs: 1"))
    with pytest.raises(OptionError, match=r"has finished 1 epochs\. Give that number or more"):
        Run.open(tmp_path / "run").train()


def test_files_of_another_run_are_refused(finished: Run, begun: Path, tmp_path: Path) -> None:
    other = Run.create(digits(*SHRINKING, "seed=1"), tmp_path / "other")
    other.train()
    shutil.copytree(begun, tmp_path / "begun")
    shutil.copy(other.checkpoint, tmp_path / "begun")
    with pytest.raises(CheckpointError, match="seed is 1 in one and 0 in the other"):
        Run.open(tmp_path / "begun").train()
    for name, message in (
        ("model.safetensors", "result.json is of another model"),
        ("result.json", "result.json does not belong to .*seed is 1 in one and 0"),
    ):
        shutil.copytree(finished.directory, tmp_path / name)
        shutil.copy(other.directory / name, tmp_path / name)
        with pytest.raises(CheckpointError, match=message):
            Run.open(tmp_path / name).trained()


def test_a_run_of_before_settings_were_in_its_files_goes_on(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    state = load_state(run.checkpoint)
    del state["settings"]
    save_state(state, run.checkpoint)
    result = run.train()
    old = {key: value for key, value in result.items() if key not in ("settings", "weights")}
    run.write_json("result.json", old)
    run.trained()


def test_dense_file_of_another_model_is_refused(finished: Run, tmp_path: Path) -> None:
    run = Run.create(digits("method=dense", "data.limit=20", "epochs=1"), tmp_path / "run")
    run.train()
    shutil.copy(finished.checkpoint, run.model_file)
    with pytest.raises(CheckpointError, match="is of another model"):
        run.trained()


def test_directory_is_found_unfit_before_anything_is_done(tmp_path: Path, monkeypatch: Any) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    Run.create(digits(), taken)
    (taken / ".hidden").touch()
    Run.create(digits(), taken)
    (taken / "notes.txt").touch()
    with pytest.raises(OptionError, match="is not empty"):
        Run.create(digits(), taken)
    with pytest.raises(OptionError, match=r"notes\.txt is a file"):
        Run.create(digits(), taken / "notes.txt" / "run")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OptionError, match="link is a file"):
        Run.create(digits(), tmp_path / "link")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OptionError, match="cannot be written to"):
        Run.create(digits(), tmp_path / "run")


# -- the disk ------------------------------------------------------------------------------------


def test_too_little_room_is_found_before_training(tmp_path: Path, monkeypatch: Any) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_500_000))
    run = Run.create(digits(*SMALL), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"has 2 MB free; .* need about 2 MB\. Make room"):
        run.train()
    assert not run.directory.exists()


def test_directory_that_cannot_be_made_is_found_before_training(
    tmp_path: Path, monkeypatch: Any
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    run = Run.create(digits(*SMALL), tmp_path / "run")
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OptionError, match="Read-only file system"):
        run.train()


@pytest.fixture
def full_disk(monkeypatch: Any) -> Callable[[int], None]:
    """Let the n-th write of tensors from now on fail halfway, and all after it."""
    save_file = tensor_files.save_file

    def fill_after(good: int) -> None:
        left = iter(range(good))

        def save(tensors: Any, path: str, metadata: Any = None) -> None:
            save_file(tensors, path, metadata=metadata)
            if next(left, None) is None:
                with open(path, "r+b") as file:  # noqa: PTH123
                    file.truncate(1000)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

        monkeypatch.setattr(tensor_files, "save_file", save)

    return fill_after


@pytest.mark.slow
@pytest.mark.parametrize("good", [0, 1, 6, 17], ids="{} good writes".format)
def test_full_disk_leaves_the_last_good_checkpoint(
    tmp_path: Path, full_disk: Callable[[int], None], monkeypatch: Any, good: int
) -> None:
    recipe = digits(*SMALL, "checkpoint_every=0")
    Run.create(recipe, tmp_path / "whole").train()
    run = Run.create(recipe, tmp_path / "run")
    with monkeypatch.context():
        full_disk(good)
        with pytest.raises(CheckpointError, match=r"No space left.*: lod resume .*run"):
            run.train()
    monkeypatch.undo()
    assert run.checkpoint.exists() is (good > 0)
    assert not list(run.directory.glob(".*"))
    if good:
        load_state(run.checkpoint)
    Run.open(run.directory).train()
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def failures(at: int) -> Iterator[bool]:
    return (number == at for number in count(1))


@pytest.mark.parametrize(
    ("at", "hint"), [(1, "give another --out"), (2, "lod resume"), (4, "lod resume")]
)
def test_full_disk_while_a_small_file_is_written(
    tmp_path: Path, monkeypatch: Any, at: int, hint: str
) -> None:
    fsync, fails = os.fsync, failures(at)

    def sync(handle: int) -> None:
        if next(fails):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    run = Run.create(digits(*SMALL), tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        with pytest.raises(CheckpointError, match=f"No space left.*{hint}"):
            run.train()
    again = Run.open(run.directory) if at > 1 else Run.create(digits(*SMALL), run.directory)
    again.train()
    assert again.finished


def test_full_disk_while_metrics_are_written(tmp_path: Path, monkeypatch: Any) -> None:
    run = Run.create(digits(*SMALL), tmp_path / "run")
    opened = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("metrics.jsonl") and flags & os.O_APPEND:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, flags, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl \(No space left.*lod resume"):
            run.train()
    assert metrics(run.directory) == []
    run.train()
    assert [record["epoch"] for record in metrics(run.directory)] == [1, 2]


def test_state_that_no_file_can_hold_is_found_before_training(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_parts.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Odd(nn.Linear):\n"
        "    def get_extra_state(self): return {1, 2}\n"
        "    def set_extra_state(self, state): pass\n"
        "def model(): return nn.Sequential(nn.Linear(784, 16), Odd(16, 10))\n"
        "def data(batch): return {'train': [(torch.randn(batch, 784), torch.arange(batch) % 10)]}\n"
    )
    settings = {"model": "odd_parts:model", "data": "odd_parts:data", "epochs": 1}
    run = Run.create(checked(settings, "here"), tmp_path / "run")
    with pytest.raises(CheckpointError, match="a set cannot be saved without pickle") as error:
        run.train()
    assert "make room" not in str(error.value)


if __name__ == "__main__":
    main()
