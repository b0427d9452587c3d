"""The program `lod`: every command, every way to get it wrong, and one's own model and data."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from maestro_lod.cli import main as cli
from maestro_lod.cli.commands import demo
from maestro_lod.cli.display import Display
from maestro_lod.cli.recipe import recipe_names
from maestro_lod.cli.report import runs as report_runs
from maestro_lod.cli.run import Run
from maestro_lod.cli.settings_list import all_settings
from maestro_lod.text import install_command

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipes.md"
QUICK = ["data.limit=60", "batch=8", "epochs=1", "threads=1"]
SHRINKING = ["data.limit=120", "batch=8", "epochs=3", "penalty=0.02", "threshold=0.1", "threads=1"]

PARTS = """
import os, signal, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def model(width=8): return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
def batches(batch, count=3):
    return [(torch.randn(batch, 4), torch.randint(0, 3, (batch,))) for _ in range(count)]
def data(batch): return {"train": batches(batch)}
def no_splits(batch): return batches(batch)
def no_batch(): return {}
def generator(batch): return {"train": iter(batches(batch))}
def fails(): raise KeyError("my own bug")
def number(): return 3
def broken_loss(output, target): return output.no_such_thing
def interrupted(batch): signal.raise_signal(signal.SIGINT)

class Slow(list):
    def __iter__(self):
        for pair in super().__iter__():
            time.sleep(float(os.environ.get("SECONDS_PER_BATCH", 0)))
            yield pair
def slow(batch): return {"train": Slow(batches(batch, 15))}

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 1)
    def forward(self, left, right): return self.b(torch.relu(self.a(left) + self.a(right)))
def mappings(batch):
    rows = [torch.randn(batch, 4) for _ in range(4)]
    return {"train": [({"left": x, "right": -x}, x.sum(1, keepdim=True)) for x in rows],
            "test": [({"left": x, "right": x}, x.sum(1, keepdim=True)) for x in rows]}
def squares(output, target): return ((output - target) ** 2).mean()
"""


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


Lod = Callable[..., Done]


@pytest.fixture
def lod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Iterator[Lod]:
    """Run the program in this process, in an empty directory with some of one's own modules."""
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "syntax.py").write_text("def model(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "LOD_DATA"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, set: list[str] = ()) -> Done:  # type: ignore[assignment]
        changes = [part for change in set for part in ("--set", change)]
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([*arguments, *changes])
        return Done(int(end.value.code or 0), *capfd.readouterr())

    yield run
    for name in ("parts", "syntax"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; copy it before changing anything in it."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.raises(SystemExit) as end:
        changes = [part for change in SHRINKING for part in ("--set", change)]
        cli.main(["train", "digits", *changes, "--out", str(directory)])
    assert end.value.code == 0
    return directory


def contents(directory: Path) -> dict[str, bytes | None]:
    """All that is in a directory, however deep."""
    return {
        str(path): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")
    }


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def assert_same_model(one: Path, other: Path) -> None:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# -- wrong command lines -------------------------------------------------------------------------

DIGITS = "train digits --set data.limit=40 --set epochs=1"
OWN = "train digits --set model=parts:model --set data=parts:data"

WRONG = {
    # command lines
    "trian digits": "No such command 'trian'. Did you mean 'train'?",
    "--verbose": "No such option: --verbose",
    "heal small --steps 5": "'heal' is called 'distill' now.",
    "deploy runs/digits --fast": "'--fast' is called '--prefer-speed' now.",
    "deploy runs/digits --heal 1": "'--heal' is called '--finetune-epochs' now.",
    "compress small --fast": "'--fast' is called '--no-correction' now.",
    "compress small --heal=50": "'--heal' is called '--distill-steps' now.",
    "train": "Missing argument 'RECIPE'",
    "train digits lenet-mnist": "unexpected extra argument",
    "train digits epochs=3": "unexpected extra argument",
    "train digits --ste epochs=3": "No such option: --ste",
    "train digits --set": "Option '--set' requires an argument",
    "train digits --out": "Option '--out' requires an argument",
    "recipes digits": "unexpected extra argument",
    "resume": "Missing argument 'DIR'",
    "report": "Missing argument 'DIR…'",
    "summary": "Missing argument 'RECIPE|DIR'",
    # recipes
    "train digitz": "there is no recipe 'digitz'. Did you mean 'digits'?",
    "train lenet": "there is no recipe 'lenet'. Did you mean 'lenet-mnist'?",
    "train missing.yaml": "recipe missing.yaml cannot be read (No such file or directory)",
    "train binary.yaml": "recipe binary.yaml cannot be read",
    "train directory.yaml": "recipe directory.yaml cannot be read (Is a directory)",
    "train list.yaml": "list.yaml contains no settings. Write a mapping",
    "train empty.yaml": "empty.yaml contains no settings",
    "train broken.yaml": "broken.yaml is not valid YAML: while parsing",
    "train short.yaml": "short.yaml: 'epochs' is missing",
    "train notes.txt": "there is no recipe 'notes.txt'",
    "summary digitz": "there is no recipe 'digitz'. Did you mean 'digits'?",
    # settings
    "train digits --set epochs": "'epochs' is not a setting. Write key=value",
    "train digits --set epoch=3": "there is no setting 'epoch'. Did you mean 'epochs'?",
    "train digits --set optimizer.lrate=3": "there is no setting 'optimizer.lrate'",
    "train digits --set optimiser.lr=3": "no setting 'optimiser'. Did you mean 'optimizer'?",
    "train digits --set epochs=many": 'epochs="many" must be a whole number',
    "train digits --set epochs=2.5": "epochs=2.5 must be a whole number",
    "train digits --set epochs=0": "epochs=0 must be greater than or equal to 1",
    "train digits --set penalty=-1": "penalty=-1 must be greater than or equal to 0",
    "train digits --set penalty=true": "penalty=true must be a number",
    "train digits --set shrink=maybe": 'shrink="maybe" must be true or false',
    "train digits --set threshold=.nan": "threshold=NaN must be",
    "train digits --set epochs=[1": "the value in 'epochs=[1' is not valid YAML",
    "train digits --set method=svdd": 'method="svdd" is unknown',
    "train digits --set sampling=pair": "Did you mean 'pairs'?",
    "train digits --set optimizer=adamm": "Did you mean 'adam'?",
    "train digits --set schedule=cosin": "is unknown. Did you mean 'cosine'?",
    "train digits --set schedule=milestones": "'schedule.epochs' is missing",
    "train digits --set optimizer.nesterov=true --set optimizer.momentum=0": "needs a momentum",
    "train digits --set distill=true": "distill needs the full pass as its teacher",
    "train digits --set method=dense --set penalty=0.1": "method=dense does not use penalty",
    f"{DIGITS} --set budget.params=25": "cannot be reached: with rank 1 in every layer",
    f"{DIGITS} --set budget.macs=25": "Did you mean macs='25%'?",
    "train digits --set budget.params=25.0": "a percentage or a count: write '25%' or 25.",
    "train digits --set budget.params=[1]": "budget.params=[1] must be a number",
    "train digits --set seed=99999999999999999999": "must be less than 9223372036854775808",
    "train digits --set decompose.ranks=0": "decompose.ranks=0 must be 1 or more",
    "summary digits --set epoch=3": "there is no setting 'epoch'. Did you mean 'epochs'?",
    # built-in parts
    f"{DIGITS} --set model=lenett": "model 'lenett' is unknown. Did you mean 'lenet'?",
    f"{DIGITS} --set model.options.colour=3": "model 'lenet' takes no 'colour'",
    f"{DIGITS} --set model.options.classes=few": "model 'lenet' failed: TypeError",
    f"{DIGITS} --set model.options.classes=3": "'lenet' gives 3 scores, but data 'digits' has 10",
    f"{DIGITS} --set data=digitz": "Did you mean 'digits'?",
    f"{DIGITS} --set model=cancer.model": "is unknown. Did you mean 'cancer:model'?",
    f"{DIGITS} --set data=my.code.data": "Did you mean 'my.code:data'?",
    f"{DIGITS} --set data.options.colour=3": "digits has no option 'colour'",
    f"{DIGITS} --set data.limit=1": "leaves none to train on",
    f"{DIGITS} --set loss=mse": "loss 'mse' is unknown",
    f"{DIGITS} --set device=gpu": "device='gpu' cannot be used here",
    f"{DIGITS} --set device=meta": "device='meta' cannot be used here",
    f"{DIGITS} --set decompose.only=[fc9]": "only pattern 'fc9' matches no layer",
    f"{DIGITS} --set decompose.skip=[conv*,fc*]": "no layer of LeNet can be decomposed",
    "train lenet-mnist --data nowhere": "nowhere/mnist does not exist. Download",
    "train lenet-mnist --data 2024": "2024/mnist does not exist. Download",
    # one's own parts
    f"{DIGITS} --set model=nowhere:model": "cannot import 'nowhere' (No module named 'nowhere')",
    f"{DIGITS} --set model=parts:modle": "no function 'modle'. Did you mean 'model'?",
    f"{DIGITS} --set model=:model": "must be written as package.module:function",
    f"{DIGITS} --set model=parts:number": "returned an int. Return a torch.nn.Module",
    f"{OWN} --set model.options.widht=3": "takes no 'widht'. Did you mean 'width'?",
    f"{DIGITS} --set data=parts:data": "data.limit is for built-in data",
    "train digits --set data=parts:no_splits": "returned a list. Return a Data, or a mapping",
    "train digits --set data=parts:no_batch": "takes no 'batch'",
    "train digits --set data=parts:generator": "used up after one pass",
    "train digits --data x --set data=parts:data": "data.directory is for built-in data",
    # where to
    f"{DIGITS} --out notes.txt": "notes.txt is a file. Give a directory",
    f"{DIGITS} --out notes.txt/run": "notes.txt is a file. Give a directory",
    f"{DIGITS} --out full": "full is not empty. Give another --out, or resume the run in it",
    # runs
    "resume nowhere": "nowhere is not a directory",
    "resume notes.txt": "notes.txt is not a directory",
    "resume full": "full contains no run (no config.yaml)",
    "resume finished": "has finished. To write its report again: lod report finished",
    "resume damaged": "damaged/config.yaml is not valid YAML",
    "resume foreign": "foreign/config.yaml: there is no setting 'epoch'",
    "report nowhere": "there is no such directory",
    "report full": "full is not a run directory",
    "report finished nowhere": "there is no such directory",
    "report damaged": "damaged/config.yaml is not valid YAML",
    "summary full": "full contains no run",
    "summary finished --set epochs=3": "--set does not apply to a finished run: finished.",
    "summary unfinished": "has not finished. Resume with: lod resume unfinished",
}


@pytest.fixture
def wrong_files(tmp_path: Path, finished: Path) -> None:
    """Files and runs that are not what they should be."""
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "directory.yaml").mkdir()
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "broken.yaml").write_text("a: [1\nb: 2\n")
    (tmp_path / "short.yaml").write_text("model: lenet\ndata: digits\n")
    (tmp_path / "notes.txt").write_text("notes")
    for name in ("full", "damaged", "foreign"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "damaged" / "config.yaml").write_text("a: [1\n")
    (tmp_path / "foreign" / "config.yaml").write_text("epoch: 3\n")
    shutil.copytree(finished, tmp_path / "finished")
    shutil.copytree(finished, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "result.json").unlink()


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_one_clear_line_and_nothing_is_written(
    lod: Lod, wrong_files: None, tmp_path: Path, line: str
) -> None:
    before = contents(tmp_path)
    done = lod(*line.split(" "))
    assert done.code == 2, done
    assert done.err.startswith("lod: ") and done.err.count("\n") == 1, done.err
    assert WRONG[line] in done.err
    # which comes before data and model are there
    assert re.fullmatch(r"(training \S+ into \S+: .*, epochs=\d+\n)?", done.out), done.out
    assert contents(tmp_path) == before


def test_there_are_many_wrong_command_lines() -> None:
    assert len(WRONG) >= 80


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        ("resume", "checkpoint.safetensors", "checkpoint.safetensors is damaged"),
        ("summary", "model.safetensors", "model.safetensors is damaged"),
        ("summary", "result.json", "result.json is damaged"),
    ],
)
def test_damaged_run_is_one_line(
    lod: Lod, finished: Path, tmp_path: Path, command: str, name: str, message: str
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / name).write_bytes((finished / name).read_bytes()[:500])
    if command == "resume":
        (tmp_path / "run" / "result.json").unlink()
    before = contents(tmp_path)
    done = lod(command, "run")
    assert done.code == 1
    assert re.fullmatch(f"lod: run/{re.escape(message)} .*\n", done.err)
    assert contents(tmp_path) == before


def test_diverged_training_is_one_line(lod: Lod) -> None:
    done = lod("train", "digits", "--out", "run", set=[*QUICK, "optimizer.lr=1e9"])
    assert done.code == 1
    assert re.fullmatch("lod: the .*Lower the learning rate.*\n", done.err)


def test_full_disk_is_one_line(lod: Lod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    before = contents(tmp_path)
    done = lod("train", "digits", "--out", "run", set=QUICK)
    assert done.code == 1
    assert re.fullmatch("lod: run has 0 MB free; .*Make room or give another --out.\n", done.err)
    assert contents(tmp_path) == before


def test_failing_writes_are_one_line(lod: Lod, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr("maestro_lod.files.tensor_file.save_file", full)
        done = lod("train", "digits", "--out", "run", set=QUICK)
    assert done.code == 1
    assert re.fullmatch("lod: .*No space left.*resume with: lod resume run\n", done.err)
    assert lod("resume", "run").code == 0


def test_unexpected_trouble_with_files_is_one_line(
    lod: Lod, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(13, os.strerror(13), "some/file")

    monkeypatch.setattr(demo, "recipe_names", refused)
    done = lod("recipes")
    assert (done.code, done.err) == (1, "lod: some/file: Permission denied.\n")


def test_our_own_fault_is_owned_up_to(lod: Lod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "recipe_names", lambda: 1 / 0)
    done = lod("recipes")
    assert done.code == 1
    assert done.err.startswith("Traceback") and "ZeroDivisionError" in done.err
    assert done.err.endswith(
        "lod: this is a bug in lod; please report it with the traceback above.\n"
    )


@pytest.mark.parametrize(
    ("changes", "place", "message"),
    [
        (["model=parts:fails"], 'raise KeyError("my own bug")', "model 'parts:fails' failed: KeyE"),
        (["model=syntax:model"], "def model(:", "model 'syntax:model' cannot be imported: Syntax"),
        (
            ["data=parts:data"],
            "conv2d",
            "model 'lenet' cannot run on data 'parts:data' (input 1×4): Runtime",
        ),
    ],
)
def test_own_code_that_fails_shows_its_traceback_and_nothing_is_written(
    lod: Lod, tmp_path: Path, changes: list[str], place: str, message: str
) -> None:
    before = contents(tmp_path)
    done = lod("train", "digits", set=changes)
    assert done.code == 1
    assert done.err.startswith("Traceback") and place in done.err
    assert done.err.splitlines()[-1].startswith(f"lod: {message}")
    assert contents(tmp_path) == before


def test_own_code_that_fails_in_training_shows_its_traceback(lod: Lod) -> None:
    parts = [
        "model=parts:model",
        "data=parts:data",
        "loss=parts:broken_loss",
        "epochs=1",
        "penalty=0",
    ]
    done = lod("train", "digits", "--out", "run", set=parts)
    assert done.code == 1
    assert done.err.startswith("Traceback") and "no attribute 'no_such_thing'" in done.err
    assert done.err.splitlines()[-1].endswith(
        "This recipe runs your own parts:model, parts:data, parts:broken_loss: the traceback above "
        "shows where it failed. Fix it, then resume with: lod resume run"
    )
    Path("parts.py").write_text(
        PARTS.replace("return output.no_such_thing", "return squares(output, 0)")
    )
    sys.modules.pop("parts")
    assert lod("resume", "run").code == 0


def test_tensorboard_that_is_not_installed_is_one_line(
    lod: Lod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "maestro_lod.cli.tensorboard", None)
    before = contents(tmp_path)
    done = lod("train", "digits", set=["tensorboard=true"])
    assert done.code == 2
    assert done.err == (
        f"lod: tensorboard=true needs more packages: {install_command('tensorboard')}.\n"
    )
    assert contents(tmp_path) == before


# -- stopping ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ctrl_c_saves_and_says_how_to_go_on(
    lod: Lod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.yaml").write_text(
        "{model: parts:model, data: parts:slow, epochs: 3, batch: 8, penalty: 0.01, threads: 1}"
    )
    assert lod("train", "mine.yaml", "--out", "whole").code == 0
    monkeypatch.setenv("SECONDS_PER_BATCH", "0.2")  # six seconds to press it in
    command = [sys.executable, "-m", "maestro_lod", "train", "mine.yaml", "--out", "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("epoch 1/3"):
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert lines[-1] == "stopped; everything is saved. Resume with: lod resume run\n"
    assert not Path("run/result.json").exists()
    monkeypatch.setenv("SECONDS_PER_BATCH", "0")
    assert lod("resume", "run").code == 0
    assert_same_model(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("signals", "code", "message"),
    [
        ([signal.SIGINT], 130, "stopped; everything is saved. Resume with: lod resume 'a run'"),
        ([signal.SIGTERM], 143, "stopped; everything is saved. Resume with: lod resume 'a run'"),
        ([signal.SIGINT] * 2, 130, "lod: interrupted. Resume from the last checkpoint with: lod "),
    ],
)
def test_signals_in_training(
    lod: Lod, monkeypatch: pytest.MonkeyPatch, signals: list[int], code: int, message: str
) -> None:
    def step(self: Display, progress: Any) -> None:
        for number in signals if progress.step == 3 else ():
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(Display, "step", step)
        done = lod("train", "digits", "--out", "a run", set=QUICK)
    assert done.code == code
    assert message in done.out + done.err
    assert done.err.count("\n") <= 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert lod("resume", "a run").code == 0


def test_ctrl_c_before_training_ends_at_once(lod: Lod, tmp_path: Path) -> None:
    before = contents(tmp_path)
    done = lod("train", "digits", set=["data=parts:interrupted"])
    assert (done.code, done.err) == (130, "lod: interrupted.\n")
    assert contents(tmp_path) == before


# -- commands ------------------------------------------------------------------------------------


def test_help_names_every_command_option_and_setting(lod: Lod) -> None:
    whole = lod("--help")
    assert whole.code == 0 and whole.err == ""
    for command in ("train", "resume", "report", "summary", "recipes"):
        assert re.search(rf"^│ {command} ", whole.out, re.MULTILINE)
        shown = lod(command, "--help")
        assert shown.code == 0
        assert f"Usage: lod {command}" in shown.out
    for option in ("--set", "--out", "--data", "--quiet", "RECIPE", "lod resume", "Ctrl-C"):
        assert option in lod("train", "--help").out
    shown = lod("train", "--help")
    for setting in all_settings():
        assert re.search(rf"^ {re.escape(setting.key)} ", shown.out, re.MULTILINE), setting.key


def test_help_is_shown_where_nothing_is_asked_for(lod: Lod) -> None:
    done = lod()
    assert done.code == 2
    assert "Usage: lod" in done.out + done.err and "Traceback" not in done.err


def test_recipes_are_listed(lod: Lod) -> None:
    done = lod("recipes")
    assert done.code == 0
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert "LeNet on 8×8 digits" in lines[0]


@pytest.mark.slow
def test_the_demo_ends_with_a_table_and_a_report_with_a_slider(lod: Lod, tmp_path: Path) -> None:
    done = lod("demo", "--out", "a demo")
    assert done.code == 0, done.err
    commands = [line for line in done.out.splitlines() if line.startswith("$ lod ")]
    assert [shlex.split(line)[2] for line in commands] == ["train", "train", "deploy", "bench"]
    table = done.out.split("$ lod bench")[1]
    for row in ("run dense", "dense form", "as trained", "≤ 50% of MACs"):
        assert re.search(rf"^{row} .* ms .* 0\.\d{{4}}$", table, re.MULTILINE), row
    deployed = json.loads((tmp_path / "a demo/phone/deploy.json").read_text())
    assert deployed["params"] <= 0.3 * deployed["dense_params"]
    assert deployed["test"]["accuracy"] >= deployed["dense_test"]["accuracy"] - 0.01
    assert 'type="range"' in (tmp_path / "a demo/digits/report.html").read_text()
    assert lod("demo", "--out", "a demo").code == 2


def test_summary_of_a_recipe_and_of_a_run(lod: Lod, finished: Path) -> None:
    recipe = lod("summary", "digits", set=["decompose.skip=[fc3]", "data.limit=40", "penalty=0"])
    assert recipe.code == 0
    assert "fc1" in recipe.out and "120/120" in recipe.out and "10/10" not in recipe.out
    run = lod("summary", str(finished))
    assert run.code == 0
    ranks = metrics(finished)[-1]["ranks"]
    for name, full in (("conv1", 6), ("fc1", 120)):
        assert re.search(rf"^{name} .* {ranks[name]}/{full} ", run.out, re.MULTILINE)


def test_reports(lod: Lod, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "one")
    shutil.copytree(finished, tmp_path / "two")
    (tmp_path / "one" / "report.html").unlink()
    done = lod("report", "one")
    assert (done.code, done.out) == (0, "one/report.html\n")
    done = lod("report", "one", "two", "--out", "both.html")
    assert (done.code, done.out) == (0, "both.html\n")
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "one" in page and "two" in page
    assert [run.name for run in report_runs.read_runs([tmp_path / "one", tmp_path / "two"])] == [
        "one", "two",
    ]  # fmt: skip


def test_directories_are_chosen_where_none_is_given(lod: Lod) -> None:
    for name in ("runs/digits", "runs/digits-2"):
        done = lod("train", "digits", set=QUICK)
        assert done.code == 0 and f"training digits into {name}: " in done.out
        assert Run.open(Path(name)).finished
    assert lod("train", "digits", set=[*QUICK, "recipe=../x"]).code == 0
    assert Run.open(Path("runs/x")).finished


def test_end_of_a_training_is_a_table(lod: Lod, finished: Path) -> None:
    done = lod("train", str(finished / "config.yaml"), "--out", "again", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert "epoch" not in done.out
    assert_same_model(Path("again"), finished)
    result = Run.open(finished).result()
    lines = done.out.strip().splitlines()
    assert lines[0].split() == ["params", "MACs"]
    assert lines[1].split() == ["dense", "44,426", "281,640"]
    assert f"{result['summary']['fused_params']:,}" in lines[2]
    assert lines[3].startswith("ranks") and "fc1" in lines[3]
    assert lines[4].startswith("training cost")
    assert f"accuracy {result['test']['accuracy']:.2%}" in lines[6]
    assert lines[-1] == "report: again/report.html"


def test_the_list_of_commands_says_what_each_of_them_says_itself() -> None:
    for name, (module, said) in cli.COMMANDS.items():
        command = getattr(import_module(f"maestro_lod.{module}"), name)
        assert (command.__doc__ or "").partition("\n")[0] == said


def test_several_runs_have_a_page_of_their_own(lod: Lod, finished: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(finished, tmp_path / name)
    before = (tmp_path / "a" / "report.html").read_bytes()
    done = lod("report", str(tmp_path / "a"), str(tmp_path / "b"))
    assert (done.code, done.out) == (0, "report-a-b.html\n")
    assert "2 runs" in Path("report-a-b.html").read_text(encoding="utf-8")
    assert (tmp_path / "a" / "report.html").read_bytes() == before


@pytest.mark.filterwarnings("default")
def test_warnings_are_lines(lod: Lod) -> None:
    changes = [*QUICK, "optimizer=adam", "penalty=1", "threshold=0"]
    done = lod("train", "digits", "--out", "run", set=changes)
    assert done.code == 0
    floor, unshrunk = done.err.splitlines()
    assert floor.startswith("lod: note: at this learning rate Adam keeps ")
    assert unshrunk.startswith("lod: note: the model has not shrunk: after ")
    report = Path("run/report.html").read_text(encoding="utf-8")
    assert "<b>Note.</b> The model has not shrunk: after " in report


# -- the switches of the paper's ablations -------------------------------------------------------

ABLATION = ["data.limit=120", "batch=8", "epochs=2", "threads=1", "threshold=0.1"]


def test_without_the_penalty_no_rank_is_lost(lod: Lod) -> None:
    assert lod("train", "digits", "--out", "run", set=[*ABLATION, "penalty=0"]).code == 0
    assert [r["total_rank"] for r in metrics(Path("run"))] == [236, 236]
    assert metrics(Path("run"))[0]["penalty"] == 0


def test_without_shrinking_no_rank_is_lost(lod: Lod) -> None:
    changes = [*ABLATION, "penalty=0.05"]
    assert lod("train", "digits", "--out", "shrunk", set=changes).code == 0
    assert lod("train", "digits", "--out", "kept", set=[*changes, "shrink=false"]).code == 0
    assert metrics(Path("shrunk"))[-1]["total_rank"] < 236
    assert [r["total_rank"] for r in metrics(Path("kept"))] == [236, 236]
    # until the first epoch ends, both are the same
    assert metrics(Path("kept"))[0]["train_loss"] == metrics(Path("shrunk"))[0]["train_loss"]


def test_full_pass_and_distillation(lod: Lod) -> None:
    for name, more in (
        ("plain", []), ("full", ["full_pass=true"]),
        ("distilled", ["full_pass=true", "distill=true"]),
    ):  # fmt: skip
        changes = [*ABLATION, "penalty=0.001", *more]
        assert lod("train", "digits", "--out", name, set=changes).code == 0
    cost = {
        name: Run.open(Path(name)).result()["ledger"]["relative_macs"]
        for name in ("plain", "full", "distilled")
    }
    assert cost["full"] == cost["distilled"] > 1.7 * cost["plain"]
    losses = {metrics(Path(name))[-1]["validation_loss"] for name in cost}
    assert len(losses) == 3


def test_dense_training(lod: Lod) -> None:
    changes = ["data.limit=120", "batch=8", "epochs=2", "threads=1", "method=dense"]
    done = lod("train", "digits", "--out", "run", set=changes)
    assert done.code == 0
    assert "dense" in done.out and "rank" not in done.out
    assert metrics(Path("run"))[-1]["params"] == 44_426
    assert lod("summary", "run").code == 0
    # of another model, about which torch has several lines to say
    shutil.copy("run/checkpoint.safetensors", "run/model.safetensors")
    done = lod("summary", "run")
    assert done.code == 1
    assert re.fullmatch(r"lod: run/model\.safetensors is of another model\. .*conv1.*\n", done.err)


# -- one's own model and data --------------------------------------------------------------------


def test_documented_recipe_trains(lod: Lod, tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, kind in (("my.yaml", "yaml"), ("parts.py", "python")):
        block = text.partition(f"```{kind}\n")[2].partition("```")[0]
        (tmp_path / name).write_text(block, encoding="utf-8")
    done = lod("train", "my.yaml")
    assert done.code == 0, done.err
    assert "training my into runs/my: " in done.out
    records = metrics(Path("runs/my"))
    assert records[-1]["validation_loss"] < records[0]["validation_loss"]
    assert Run.open(Path("runs/my")).result()["test"]["accuracy"] > 0.5
    assert lod("summary", "runs/my").code == 0


def test_own_data_without_validation_and_test(lod: Lod) -> None:
    done = lod("train", "digits", "--out", "run",
               set=["model=parts:model", "data=parts:data", "epochs=2", "penalty=0"])  # fmt: skip
    assert done.code == 0, done.err
    assert "train loss" in done.out and "validation" not in done.out
    result = Run.open(Path("run")).result()
    assert (result["test"], result["validation"]) == ({}, {})


def test_own_loss_on_mappings(lod: Lod) -> None:
    parts = ["model=parts:Pair", "data=parts:mappings", "loss=parts:squares"]
    done = lod("train", "digits", "--out", "run", set=[*parts, "epochs=2", "penalty=0"])
    assert done.code == 0, done.err
    assert set(Run.open(Path("run")).result()["test"]) == {"loss"}
    assert "accuracy" not in done.out


def test_resume_of_a_finished_run_removes_what_a_kill_left(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = sorted(run.iterdir())
    (run / ".lock").write_text("process 1 on elsewhere")
    (run / ".writing-report.html-x").mkdir()
    with pytest.raises(SystemExit) as end:
        cli.main(["resume", str(run)])
    assert end.value.code == 2 and sorted(run.iterdir()) == before
