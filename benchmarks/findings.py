"""Faults that were found once: whether each fails on the code before, and not on today's.

python benchmarks/findings.py

Every probe is the smallest program that shows a fault to a user, through names that both versions
have. It runs in a process of its own, first on a checkout of the commit that was reviewed, then on
this one. The tests that keep a fault from coming back stand beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import findings_models  # noqa: F401  # 11 to 13 of the first review
import findings_program  # noqa: F401  # 1 to 7, 10 to 12 and 15 to 20 of the second
import findings_values  # noqa: F401  # the others of the second
import torch
from probes import (
    FIRST,
    PROBES,
    PROGRAM,
    ROOT,
    SECOND,
    START,
    Fault,
    expect,
    forked,
    lod,
    probe,
    refuses,
    trained,
)
from torch import Tensor, nn
from torch.nn import functional as F


def low_rank_model() -> nn.Module:
    from maestro_lod import decompose

    torch.manual_seed(0)
    return decompose(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)))


def epoch(model: nn.Module, train: Any, *, step: bool = True, size: int = 8) -> None:
    with train.step():
        F.cross_entropy(model(torch.randn(4, size)), torch.tensor([0, 1, 2, 0])).backward()
    if step:
        train.optimizer.step()
    train.end_epoch()


def method(model: nn.Module, **options: Any) -> Any:
    from maestro_lod import LoD

    return LoD(model, torch.optim.SGD(model.parameters(), lr=0.05), **options)


# -- 1: two in one directory -----------------------------------------------------------------------

WAITING = """
import os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    '''Whose second epoch waits, in a process that is told so, until somebody says go.'''
    taken = 0
    def __len__(self): return 24
    def __getitem__(self, index):
        self.taken += 1
        while "WAITS" in os.environ and self.taken > 24 and not os.path.exists("go"):
            time.sleep(0.01)
        return torch.full((6,), float(index)), index % 3

def model(): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
def data(batch): return {"train": DataLoader(Samples(), batch_size=batch)}
"""


@probe(
    1,
    "`lod resume` in a directory where a training goes on",
    "files/test_locks.py::test_two_trainings_and_a_killed_one_with_living_workers",
)
def _() -> None:
    Path("own.py").write_text(WAITING)
    Path("own.yaml").write_text(
        "model: own:model\ndata: own:data\nepochs: 3\nbatch: 8\ncheckpoint_every: 0\n"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", START, "train", "own.yaml", "--out", "run"],
        env=os.environ | {"WAITS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while first.poll() is None and not Path("run/checkpoint.safetensors").exists():
            time.sleep(0.01)
        second = lod("resume", "run")
        assert first.poll() is None, "the first has ended"
    finally:
        Path("go").touch()
        first.wait()
    expect(second.returncode != 0, "both go on")
    expect(f"in use by process {first.pid}" in second.stderr, "nobody says who is there")
    expect(first.returncode == 0, "the first one fails")


# -- 2: files --------------------------------------------------------------------------------------


@probe(2, "one flipped bit of a weight",
       "files/test_digests.py::test_no_flipped_bit_loads_as_something_else")  # fmt: skip
def _() -> None:
    from maestro_lod import load, save

    save(low_rank_model(), "model.safetensors")
    data = bytearray(Path("model.safetensors").read_bytes())
    data[-3] ^= 1
    Path("model.safetensors").write_bytes(data)
    refuses(lambda: load("model.safetensors", into=low_rank_model()))


# -- 3: a directory is code ------------------------------------------------------------------------


@probe(3, "`lod summary` of a directory from elsewhere runs its code",
       "cli/test_run.py::test_a_directory_from_elsewhere_runs_nothing_unasked")  # fmt: skip
def _() -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text(
        "model: {name: 'subprocess:getoutput', options: {cmd: touch trace}}\n"
        "data: digits\nepochs: 1\n"
    )
    Path("run/result.json").write_text("{}")
    lod("summary", "run")
    expect(not Path("trace").exists(), "the command was run")


# -- 4: a checkpoint and its run -------------------------------------------------------------------


@probe(4, "settings edited before `resume`",
       "cli/test_run.py::test_settings_that_may_not_change_are_named")  # fmt: skip
def _() -> None:
    accepted = []
    for old, new in (("seed: 0", "seed: 1"), ("penalty: 0.02", "penalty: 0.2"),
                     ("min_rank: 0", "min_rank: 3"), ("batch: 8", "batch: 16")):  # fmt: skip
        directory = trained(f"run-{old[:4]}")
        (directory / "result.json").unlink()
        config = directory / "config.yaml"
        text = config.read_text()
        assert old in text
        config.write_text(text.replace(old, new).replace("epochs: 2", "epochs: 3"))
        if lod("resume", str(directory)).returncode == 0:
            accepted.append(old.split(":")[0])
    expect(not accepted, f"accepted: {', '.join(accepted)}")


@probe(4, "another run's checkpoint", "cli/test_run.py::test_files_of_another_run_are_refused")
def _() -> None:
    one, other = trained("one"), trained("other", "seed=1")
    (one / "result.json").unlink()
    (one / "checkpoint.safetensors").write_bytes((other / "checkpoint.safetensors").read_bytes())
    expect(lod("resume", str(one)).returncode != 0, "it is taken for the run's own")


# -- 5: what silently does nothing -----------------------------------------------------------------


@probe(5, "a penalty that is never applied",
       "base/test_noops.py::test_a_penalty_that_is_never_applied_is_refused")  # fmt: skip
def _() -> None:
    model = low_rank_model()
    refuses(lambda: epoch(model, method(model, penalty=0.1)))


@probe(
    5,
    "`optimizer.step()` is never called",
    "base/test_noops.py::test_an_epoch_without_a_step_of_the_optimizer_is_refused",
)
def _() -> None:
    model = low_rank_model()
    refuses(lambda: epoch(model, method(model), step=False))


@probe(5, "a step inside a step", "base/test_noops.py::test_a_step_inside_a_step_is_refused")
def _() -> None:
    train = method(low_rank_model())

    def both() -> None:
        with train.step(), train.step():
            pass

    refuses(both)


@probe(5, "a frozen model", "base/test_noops.py::test_a_model_that_is_frozen_is_refused")
def _() -> None:
    from maestro_lod import LoD

    model = low_rank_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refuses(lambda: LoD(model.requires_grad_(False), optimizer))


@probe(5, "`proximal='false'` is true", "base/test_noops.py::test_text_is_neither_true_nor_false")
def _() -> None:
    refuses(lambda: method(low_rank_model(), penalty=0.1, proximal="false"))


@probe(
    5,
    "`min_rank=10**6`",
    "base/test_noops.py::test_a_min_rank_above_all_ranks_is_refused_and_the_largest_is_not",
)
def _() -> None:
    refuses(lambda: method(low_rank_model(), min_rank=10**6))


@probe(
    5,
    "`decompose(ranks=0)`",
    "base/test_noops.py::test_rank_zero_for_all_layers_is_refused_and_by_name_it_is_not",
)
def _() -> None:
    from maestro_lod import decompose

    refuses(lambda: decompose(nn.Sequential(nn.Linear(8, 6)), ranks=0))


class Unreached(nn.Module):
    """Has a layer that its forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside = nn.Linear(8, 3), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


@probe(
    5,
    "layers that no forward reaches are sampled",
    "base/test_noops.py::test_layers_that_the_forward_never_reaches_are_not_sampled",
)
def _() -> None:
    from maestro_lod import decompose

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = decompose(Unreached())
    train = method(model)
    drawn: set[str] = set()
    for number in range(2):
        drawn.clear()
        for _ in range(20):
            with train.step() as ranks:
                F.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 2, 0])).backward()
            train.optimizer.step()
            drawn |= {*ranks}
        if not number:
            train.end_epoch()
    expect("beside" not in drawn, "drawn in the second epoch too")


# -- 6 and 7: limits, and models that have diverged ------------------------------------------------


@probe(6, "`lod deploy --max-macs -1` searches first",
       "cli/test_trained.py::test_limits_are_checked_before_the_run_is_even_opened")  # fmt: skip
def _() -> None:
    directory = trained()
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    done = lod("deploy", str(directory), "--max-macs=-1", "--out", "phone")
    after = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    assert done.returncode != 0
    expect(after == before and not Path("phone").exists(), "files are written before it refuses")


@probe(
    7,
    "NaN outside the factors",
    "base/test_noops.py::test_an_epoch_is_not_ended_with_parameters_that_are_not_finite",
)
def _() -> None:
    model = low_rank_model()
    train = method(model)
    with train.step():
        model(torch.randn(4, 8)).square().mean().backward()
    train.optimizer.step()
    model[2].bias.data.fill_(float("nan"))
    refuses(train.end_epoch)


@probe(
    7,
    "a model that answers NaN alone is exported",
    "base/test_noops.py::test_a_model_that_answers_with_nan_alone_is_not_exported",
)
def _() -> None:
    from maestro_lod.deploy.export import export

    model = low_rank_model()
    model[2].bias.data.fill_(float("nan"))
    refuses(lambda: export(model, "model.safetensors", example=torch.randn(4, 8)))


# -- 8 to 10 ---------------------------------------------------------------------------------------


@probe(8, "`save` gives other bytes each time",
       "files/test_digests.py::test_the_same_gives_the_same_bytes")  # fmt: skip
def _() -> None:
    from maestro_lod import save

    found = set()
    for _ in range(8):
        save(low_rank_model(), "model.safetensors")
        found.add(Path("model.safetensors").read_bytes())
    expect(len(found) == 1, f"{len(found)} of 8 differ")


@probe(9, "float32 is rounded to bfloat16 without a word",
       "base/test_mistakes.py::test_a_file_is_not_rounded_silently")  # fmt: skip
def _() -> None:
    from maestro_lod import load, save

    save(low_rank_model(), "model.safetensors")
    refuses(lambda: load("model.safetensors", into=low_rank_model().to(torch.bfloat16)))


@probe(
    10,
    "a layer of zeros gets no gradient",
    "train/test_zero_ranks.py::test_layers_that_begin_as_zeros_learn_as_dense_ones_do",
)
def _() -> None:
    from maestro_lod import decompose

    dense = nn.Linear(8, 3)
    nn.init.zeros_(dense.weight)
    layer: Any = decompose(dense)
    layer(torch.randn(4, 8)).square().sum().backward()
    layer(torch.randn(4, 8) + 1).sum().backward()
    expect(bool(layer.u.grad.any() or layer.v.grad.any()), "both gradients are zero")


@probe(10, "an epoch that has not moved it removes a layer of zeros",
       "train/test_zero_ranks.py::test_a_rate_that_begins_at_zero_removes_nothing")  # fmt: skip
def _() -> None:
    from maestro_lod import decompose, ranks

    warnings.simplefilter("ignore")
    dense = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    nn.init.zeros_(dense[1].weight)
    model = decompose(dense)
    train = method(model, threshold=1e-3)
    train.optimizer.param_groups[0]["lr"] = 0.0
    epoch(model, train)
    expect(ranks(model)["1"] == 3, f"rank {ranks(model)['1']} is left of 3")


# -- before and after ------------------------------------------------------------------------------


def ends_on(tree: Path, titles: list[str]) -> Iterator[tuple[str, str]]:
    """Yield how probes end on the code of a tree: 'holds', or what is wrong."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--probes", json.dumps(titles)],
        stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        title, end = json.loads(line)
        yield title, end
    if process.wait() != 0:
        raise RuntimeError(f"the probes ended with {process.returncode} on {tree}")


def try_all(titles: list[str]) -> None:
    """Try each probe in a fork and a folder of its own; imports are shared."""
    exec(PROGRAM, {})
    for title in titles:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LOD_CACHE"] = folder
            done = forked(lambda title=title, folder=folder: attempt(title, folder), 600)
        if done.returncode not in (0, 3):
            print(f"{title}:\n{done.stderr}", file=sys.stderr, flush=True)
        else:
            print(json.dumps([title, done.stdout.strip()]), flush=True)


def attempt(title: str, folder: str) -> None:
    os.chdir(folder)
    try:
        PROBES[title].run()
    except Fault as fault:
        print(fault)
        sys.exit(3)
    print("holds")


@contextmanager
def reviewed() -> Iterator[dict[str, Path]]:
    """Check out the commits that were reviewed."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        trees = {review: Path(folder) / review for review in (FIRST, SECOND)}
        try:
            for review, tree in trees.items():
                subprocess.run([*git, "add", "-q", "--detach", str(tree), review], check=True)
            yield trees
        finally:
            for tree in trees.values():
                subprocess.run([*git, "remove", "--force", str(tree)], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="titles or parts of them; others stay recorded")
    parser.add_argument(
        "--today", action="store_true", help="only today's code; what was before stays recorded"
    )
    parser.add_argument("--probes", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probes is not None:
        try_all(options.probes)
        return
    from interleaved import RESULTS, commit, keep

    known = dict[str, Any]()
    if options.only is not None or options.today:
        record = json.loads((RESULTS / "findings.json").read_text())
        known = {row["title"]: row for row in record["answer"]["rows"]}
    asked = [
        title for title in PROBES
        if options.only is None or any(part in title for part in options.only)
    ]  # fmt: skip
    before = {title: known.pop(title)["before"] for title in asked if title in known}
    if not options.today:
        before = {}
        with reviewed() as trees:
            for review, tree in trees.items():
                of_it = [title for title in asked if PROBES[title].review == review]
                for title, end in ends_on(tree, of_it):
                    before[title] = end
                    print(f"before: {title}: {end}", flush=True)
    for title, end in ends_on(ROOT, [*before]):
        known[title] = {"commit": commit(), "before": before[title], "after": end}
        print(f"after: {title}: {end}", flush=True)
    rows = []
    for title, of in PROBES.items():
        if title in known:
            about = {"review": of.review, "finding": of.finding, "kind": of.kind}
            ends = {key: known[title][key] for key in ("commit", "before", "after")}
            rows.append(about | {"title": title, "test": of.test} | ends)
    keep("findings", {"rows": rows})


if __name__ == "__main__":
    main()
