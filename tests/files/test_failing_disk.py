"""Whichever file operation fails, nothing is lost, and the next start clears what is left."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import maestro_lod as lod
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.run import Run
from maestro_lod.deploy import deployment
from maestro_lod.errors import MaestroError
from maestro_lod.files.atomic import remove_leftovers
from maestro_lod.files.stage_cache import StageCache
from maestro_lod.files.state import load_state, save_state
from maestro_lod.model.frontier import Frontier
from tests.support.faults import CODES, failing_disk

X = torch.ones(4, 6)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def sizes() -> Frontier:
    return lod.frontier(lod.decompose(net()), lambda m: m(X).square().mean(), example=X)


def saved(path: Path, size: int) -> None:
    lod.save(lod.decompose(net(), ranks=size), path)


def loaded(path: Path) -> int:
    return lod.ranks(lod.load(path, into=net()))["0"]


def exported(path: Path, size: int) -> None:
    lod.export(lod.decompose(net(), ranks=size), path, example=X)


def export_size(path: Path) -> int:
    """Tell exports apart by the rank of the first layer."""
    plain = lod.load(path, into=net())
    return plain[0][0].out_features


def saved_state(path: Path, size: int) -> None:
    save_state({"size": size, "a": torch.full((9,), size)}, path)


def state_size(path: Path) -> int:
    state = load_state(path)
    assert state["a"].tolist() == [state["size"]] * 9
    return state["size"]


FRONTIER: list[Frontier] = []


def saved_frontier(path: Path, size: int) -> None:
    if not FRONTIER:
        FRONTIER.append(sizes())
    found = FRONTIER[0]
    replace(found, points=found.points[:size]).save(path)


def frontier_size(path: Path) -> int:
    return len(Frontier.load(path).points)


KINDS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], int], str]] = {
    "save": (saved, loaded, "m.safetensors"),
    "save_state": (saved_state, state_size, "s.safetensors"),
    "export": (exported, export_size, "e.safetensors"),
    "frontier": (saved_frontier, frontier_size, "f.json"),
}


def operations(action: Callable[[], object]) -> int:
    with failing_disk(None) as disk:
        action()
    return disk.done


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_the_old_or_the_new_one(kind: str, code: int, tmp_path: Path) -> None:
    write, read, name = KINDS[kind]
    path = tmp_path / name
    count = operations(lambda: write(path, 2))
    assert count >= 4  # at least a write, two syncs and a rename
    for number in range(1, count + 1):
        write(path, 2)
        with failing_disk(number, code):
            try:
                write(path, 1)
                failed = False
            except MaestroError:
                failed = True
        assert read(path) in ({1, 2} if failed else {1}), number
        remove_leftovers(tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == [name], number
        write(path, 1)
        assert read(path) == 1


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_search_is_resumed_from_its_answers(code: int, tmp_path: Path) -> None:
    resume, answers = tmp_path / "unfinished", [0.5, 1.5, 2.5]

    def search() -> list[float]:
        with StageCache(resume, {"what": "a test"}).answers("search") as known:
            return [
                known.answer({"number": n}, lambda v=v: v)  # type: ignore[misc]
                for n, v in enumerate(answers)
            ]

    count = operations(search)
    assert count >= 3 + 4  # at least a write for each answer, and a file of the call
    for number in range(1, count + 1):
        shutil.rmtree(resume, ignore_errors=True)
        with suppress(MaestroError, OSError), failing_disk(number, code):
            search()
        assert search() == answers, number
        assert len((resume / "search.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_finished_stages_are_kept_as_a_whole_or_not_at_all(code: int, tmp_path: Path) -> None:
    resume, made = tmp_path / "unfinished", list[str]()

    def work() -> list[int]:
        cache = StageCache(resume, {"what": "a test"})

        def compute(name: str, value: int) -> int:
            made.append(name)
            return value

        return [
            cache.get_or_compute(name, lambda n=name, v=v: compute(n, v))  # type: ignore[misc]
            for name, v in (("first", 1), ("second", 2))
        ]

    count = operations(work)
    for number in range(1, count + 1):
        shutil.rmtree(resume, ignore_errors=True)
        with suppress(MaestroError, OSError), failing_disk(number, code):
            work()
        assert work() == [1, 2], number
        made.clear()
        assert work() == [1, 2], number
        assert not made


@pytest.mark.slow
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_deployment_is_there_as_a_whole_or_not_at_all(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "ROUNDS", 1)
    model, found = lod.decompose(net()), sizes()

    def deploy() -> None:
        deployment.deploy_size(
            model, found, tmp_path / "out", example=X, formats=["safetensors"],
            max_params=0.9,
        )  # fmt: skip

    def removed() -> None:
        for file in (tmp_path / "out").iterdir():
            file.unlink()
        (tmp_path / "out").rmdir()

    names = ["deploy.json", "model.safetensors"]
    count = operations(deploy)
    removed()
    for number in range(1, count + 1):
        with failing_disk(number, code):
            try:
                deploy()
                failed = False
            except (MaestroError, OSError):
                failed = True
        if not (tmp_path / "out").exists():
            assert failed, number
            deploy()
        assert [file.name for file in sorted((tmp_path / "out").iterdir())] == names, number
        json.loads((tmp_path / "out" / "deploy.json").read_text())
        removed()
    left = {file.name for file in tmp_path.iterdir()}
    deploy()
    assert [file.name for file in tmp_path.iterdir()] == ["out"], left


@pytest.mark.slow
def test_a_training_goes_on_whatever_failed(tmp_path: Path) -> None:
    """Some operations of a short training, one failure each; the end is the same."""
    recipe = load_recipe(
        "digits", ["data.limit=24", "batch=12", "epochs=1", "threads=1", "checkpoint_every=0"]
    )

    def train(directory: Path) -> dict[str, Any]:
        return Run.create(recipe, directory).train()

    count = operations(lambda: train(tmp_path / "whole"))
    expected = (tmp_path / "whole" / "model.safetensors").read_bytes()
    for number in range(1, count + 1, 7):
        directory = tmp_path / str(number)
        with failing_disk(number, CODES[number % 3]):
            try:
                train(directory)
                failed = False
            except (MaestroError, OSError):
                failed = True
        run = Run(directory, recipe)
        if failed and not run.finished:
            run.train()
        assert (directory / "model.safetensors").read_bytes() == expected, number
        assert [file.name for file in directory.glob(".*") if failed] in ([], [".lock"]), number
