"""Kill the program at random moments, resume it, and compare with an undisturbed run.

python benchmarks/soak.py 1000      (resumes an earlier call on the same commit)
python benchmarks/soak.py 500 --only compress distill deploy tune compare    (its own record)

A life is one piece of work from its start: it is killed with SIGKILL up to twelve times, each at a
random moment, started again each time as the documentation says, and ends undisturbed. Then its
files have to be those of the undisturbed one, and nothing else may be left. Every start is a fork
of this process, because imports take longer than the work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import optuna
import torch
from interleaved import RESULTS, commit, keep
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from torch import nn

import maestro_lod as lod
from maestro_lod.cli import main as cli
from maestro_lod.cli.tuning import recipes  # noqa: F401  # here, so that no start has to
from maestro_lod.cli.tuning.trials import trials_of
from maestro_lod.files.atomic import alone_in, remove_leftovers
from maestro_lod.files.tensor_file import opened_file
from maestro_lod.model.checkpoint import verify
from maestro_lod.model.frontier import Frontier

KILLS_OF_A_LIFE = 12
SETTINGS = (
    *("data.limit=48", "batch=24", "epochs=3", "threads=1", "checkpoint_every=0"),
    *("recalibration=1", "schedule=constant", "proximal=true", "penalty=0.3", "threshold=1e-3"),
    "optimizer.lr=0.05",
)
CHANGES = [part for setting in SETTINGS for part in ("--set", setting)]
LIMITS = [
    *("--max-params", "30000", "--min-accuracy", "0.99", "--few", "0.95"),
    *("--largest", "4", "--smallest", "0.9"),
]
DEPLOY = ["--max-params", "0.5", "--to", "safetensors", "--out", "out"]
TEXTS = ["--data", "texts.txt", "--batches", "3"]
COMPRESS = [
    *TEXTS,
    "--max-params",
    "0.9",
    "--share-tied",
    "--distill-steps",
    "60",
    "--out",
    "small",
]
DISTILL = ["--teacher", "model", *TEXTS, "--steps", "60", "--out", "distilled"]
COMPARE = [*("--methods", "svd,narrow", "--sizes", "0.5", "--lr-trials", "1"), "--out", "compared"]

Work = Callable[[], object]


# -- kinds of work, each in the current directory --------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A piece of work: how it starts, and what it must have left at its end."""

    start: Callable[[], tuple[str, Work]]
    """Return the name of what is started next, and the work itself."""
    result: Callable[[], Any]
    """Return what ends are compared by; raises if something is missing or damaged."""
    needs: str = ""
    """The kind whose undisturbed end it begins with."""
    over: Callable[[], bool] = lambda: False
    """Return True if a killed start had finished its work."""


def program(*arguments: str) -> Work:
    return lambda: cli.main([*arguments])


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


def training() -> tuple[str, Work]:
    if Path("run/config.yaml").exists():
        return "resume", program("resume", "run", "-q")
    return "train", program("train", "digits", *CHANGES, "--out", "run", "-q")


def trained() -> Any:
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    return [
        untimed(read("run/result.json")),
        [untimed(json.loads(line)) for line in lines],
        Path("run/model.safetensors").read_bytes(),
        Path("run/config.yaml").read_text(),
    ]


def searched() -> Any:
    """Return what a search has found and what the elastic file holds; times are left out."""
    found = Frontier.load("run/frontier.json")
    with opened_file(Path("run/model.safetensors")) as file:
        tensors = {key: file.read(key).tolist() for key in file.shapes}
        assert Frontier.from_json(file.metadata["frontier"], "the model's") == found
    points = [(p.ranks, p.loss, p.accuracy, p.params, p.macs) for p in found.points]
    return points, tensors, trained()[:2]


def deployed() -> Any:
    """Return what was chosen; which layers are multiplied out goes by times."""
    told = read("out/deploy.json")
    assert verify("out/model.safetensors")
    return (
        told["point"]["ranks"],
        told["dense_test"],
        sorted(path.name for path in Path("out").iterdir()),
    )


def tuned() -> Any:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend("search/search.journal"))
    study = optuna.load_study(study_name=None, storage=storage)
    trials = [trial for trial in trials_of(study) if trial.status != "stopped"]
    return [(trial.penalty, trial.status, trial.reached) for trial in trials]


def pretrained() -> None:
    """Write what is compressed: a directory of a language model, and texts for it."""
    sys.path.append(str(Path(__file__).parent.parent))
    from tests.support.directories import LINES, write_llama

    write_llama(Path("model"))
    Path("texts.txt").write_text("\n".join(LINES * 400))


def written(directory: str) -> Callable[[], Any]:
    """Return what gives all files of a directory, once nothing unfinished is beside it."""

    def files() -> Any:
        assert not Path(f"{directory}.unfinished").exists()
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}

    return files


def is_written(directory: str) -> Callable[[], bool]:
    def over() -> bool:
        return Path(directory).exists() and not Path(f"{directory}.unfinished").exists()

    return over


def compared() -> Any:
    """Return what a comparison has found; times are left out."""
    found = read("compared/compare.json")
    found["fronts"].pop("latency")
    rows = [{k: v for k, v in row.items() if k != "latency"} for row in found.pop("rows")]
    runs = sorted(Path("compared/runs").glob("*/model.safetensors"))
    return found, [untimed(row) for row in rows], {str(run): run.read_bytes() for run in runs}


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return lod.decompose(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)))


def written_again_and_again(write: Callable[[nn.Module], object]) -> None:
    """Write two models in turn until killed, for a limited time."""
    models, until = cycle((model(0), model(1))), time.monotonic() + 0.5
    while time.monotonic() < until:
        write(next(models))
    write(model(0))


def save(live: nn.Module) -> None:
    lod.save(live, "model.safetensors")


def export(live: nn.Module) -> None:
    lod.export(live, "model.safetensors", example=torch.ones(1, 256))


def one_of_two() -> Any:
    assert verify("model.safetensors")
    return Path("model.safetensors").read_bytes()


KINDS = {
    "train": Kind(training, trained, over=lambda: Path("run/result.json").exists()),
    "frontier": Kind(
        lambda: ("frontier", program("frontier", "run", "-q")), searched, needs="train"
    ),
    "deploy": Kind(
        lambda: ("deploy", program("deploy", "run", *DEPLOY, "-q")),
        deployed, needs="frontier", over=lambda: Path("out").exists(),
    ),
    "tune": Kind(
        lambda: ("tune", program("tune", "digits", *CHANGES, *LIMITS, "--out", "search", "-q")),
        tuned,
    ),
    "pretrained": Kind(lambda: ("pretrained", pretrained), written("model")),
    "compress": Kind(
        lambda: ("compress", program("compress", "model", *COMPRESS, "-q")),
        written("small"), needs="pretrained", over=is_written("small"),
    ),
    "distill": Kind(
        lambda: ("distill", program("distill", "small", *DISTILL, "-q")),
        written("distilled"), needs="compress", over=is_written("distilled"),
    ),
    "compare": Kind(
        lambda: ("compare", program("compare", "digits", *CHANGES, *COMPARE, "-q")), compared
    ),
    "save": Kind(lambda: ("save", partial(written_again_and_again, save)), one_of_two),
    "export": Kind(lambda: ("export", partial(written_again_and_again, export)), one_of_two),
}  # fmt: skip
WEIGHTS = {
    "train": 6, "frontier": 2, "deploy": 2, "tune": 2, "save": 2, "export": 2,
    "compress": 2, "distill": 2, "compare": 2,
}  # fmt: skip
"""How often each is drawn."""
PLACES = {"deploy": "out", "compress": "small", "distill": "distilled"}
"""Directory that a command moves into place; its lock file stays, unlocked."""


# -- one life --------------------------------------------------------------------------------------


def started(work: Work, after: float | None = None) -> str:
    """Run an action in a fork that is killed after some seconds; return how it ended."""
    child = os.fork()
    if child == 0:
        sink = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        code = 70
        try:
            work()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            os._exit(code)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "killed" if code == -signal.SIGKILL else f"exit {code}"


@dataclass
class Soak:
    """All lives so far, and the undisturbed ends that they are compared with."""

    seed: int
    only: list[str] = field(default_factory=lambda: [*WEIGHTS])
    kills: dict[str, int] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def prepare(self) -> None:
        """Do each work once undisturbed, and remember how long it took and what it gave."""
        self.whole, self.seconds, self.results, self.codes = Path.cwd(), {}, {}, {}
        needed = {KINDS[name].needs for name in self.only} | {*self.only}
        needed |= {KINDS[name].needs for name in needed if name}
        for name, kind in KINDS.items():
            if name not in needed:
                continue
            with self._folder(f"first-{name}", kind), suppress(SystemExit):
                kind.start()[1]()  # in this process, so that no fork has to import anything
            with self._folder(name, kind):
                begin = time.monotonic()
                self.codes[name] = started(kind.start()[1])
                self.seconds[name] = time.monotonic() - begin
                self.results[name] = kind.result()

    @contextmanager
    def _folder(self, folder: str, kind: Kind) -> Iterator[Path]:
        """Work in a new folder that holds what is needed."""
        place = self.whole / folder
        if kind.needs:
            before = self.whole / kind.needs
            shutil.copytree(before if before.exists() else f"first-{kind.needs}", place)
        else:
            place.mkdir()
        os.chdir(place)
        try:
            yield place
        finally:
            os.chdir(self.whole)

    def live(self, number: int) -> None:
        """Let one work be killed several times, and note whether it ended as it should."""
        draw = random.Random(f"{self.seed} {number}")
        name = draw.choices(self.only, [WEIGHTS[kind] for kind in self.only])[0]
        with self._folder(f"life-{number}", KINDS[name]) as place:
            log: list[str] = []
            try:
                self._killed(name, draw, log)
                self._compare(name)
            except Exception as error:  # whatever it is, it is a failure to be counted
                told = f"{type(error).__name__}: {error}"[:500]
                output = Path("output.txt").read_text()[-500:]
                self.failures.append(
                    {"life": number, "kind": name, "starts": log, "why": told, "output": output}
                )
        self.lives[name] = self.lives.get(name, 0) + 1
        shutil.rmtree(place)

    def _killed(self, name: str, draw: random.Random, log: list[str]) -> None:
        kind = KINDS[name]
        for _ in range(draw.randint(KILLS_OF_A_LIFE // 3, KILLS_OF_A_LIFE)):
            what, work = kind.start()
            after = draw.uniform(0, 0.9 * self.seconds[name])
            log.append(f"{what} {after:.3f}: {started(work, after)}")
            if log[-1].endswith("killed"):
                self.kills[what] = self.kills.get(what, 0) + 1
            if not log[-1].endswith("killed") or kind.over():
                break
        if not kind.over():
            what, work = kind.start()
            log.append(f"{what}: {(ended := started(work))}")
            assert ended == self.codes[name], ended

    def _compare(self, name: str) -> None:
        assert KINDS[name].result() == self.results[name], "the end is another"
        run = Path("run")
        if run.is_dir():  # of a run that was killed behind its end: what the next start does
            with alone_in(run):
                remove_leftovers(run)
        if name in ("compress", "heal"):  # of one that was killed while it cleaned up, too
            ended = started(KINDS[name].start()[1])
            assert ended == "exit 2", f"a finished command, once more: {ended}"
        left = {path.name for path in Path().rglob(".*")}
        if name in PLACES and KINDS[name].over():
            left -= {f".{PLACES[name]}.lock"}  # held by nobody; whoever wants the place takes it
        assert not left, f"left behind: {left}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kills", type=int, help="how many, those of earlier calls included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="*", choices=WEIGHTS, help="kinds, in a record of their own"
    )
    parser.add_argument("--sample", action="store_true", help="print the counts, keep nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    soak = Soak(options.seed, options.only or [*WEIGHTS])
    record = "soak_commands" if options.only else "soak"
    before = RESULTS / f"{record}.json"
    if not options.sample and before.exists() and (old := read(str(before)))["commit"] == commit():
        soak = Soak(**old["answer"])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        soak.prepare()
        print({name: round(taken, 2) for name, taken in soak.seconds.items()}, flush=True)
        while sum(soak.kills.values()) < options.kills:
            soak.live(sum(soak.lives.values()))
            counts = {key: value for key, value in vars(soak).items() if key in Soak.__match_args__}
            if not options.sample:
                keep(record, counts)
        os.chdir("/")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
