"""The reproduction of the paper: generated pages, shared runs, and smoke tests of its items."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import maestro_lod as lod
from maestro_lod.cli.models.lenet import LeNet
from paper import times
from paper.__main__ import END, ITEMS, START, item, main, pages, readme, summary
from paper.budgets import at_size
from paper.record import RESULTS, read
from paper.scale import Scale, spread
from paper.sizes import at_most

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("LOD_DATA", ""))


def test_every_item_has_its_parts():
    for name in ITEMS:
        module = item(name)
        assert module.TITLE and module.measure and module.figures
        assert module.markdown and module.judgement


def test_the_pages_are_generated_from_the_results():
    assert (ROOT / "paper" / "README.md").read_text() == readme()
    assert START + summary() + END in (ROOT / "docs" / "measured.md").read_text()


def test_every_result_belongs_to_an_item_and_has_its_figures():
    for path in RESULTS.glob("*.json"):
        record = read(path.stem)
        assert record is not None and path.stem in ITEMS
        assert {"commit", "machine", "seconds", "command", "result"} <= record.keys()
        for figure, drawing in item(path.stem).figures(record["result"]).items():
            assert (RESULTS / f"{figure}.svg").read_text() == drawing
        for page, content in pages(item(path.stem), record["result"]).items():
            assert (RESULTS / f"{page}.html").read_text() == content


def needs(data: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not (DATA / data).exists(), reason=f"{DATA / data} is missing: set LOD_DATA"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("table10", marks=needs("mnist")),
        pytest.param("swings", marks=needs("mnist")),
        "compare_digits",
        pytest.param("cifar", marks=needs("cifar10")),
        pytest.param("multi30k", marks=needs("multi30k")),
    ],
)
def test_smoke(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOD_DATA", str(DATA))
    arguments = [name, "--smoke", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
    before = (ROOT / "paper" / "README.md").read_text()
    main(arguments)
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert item(name).markdown(record["result"]) in readme(tmp_path)
    assert (ROOT / "paper" / "README.md").read_text() == before
    capsys.readouterr()
    main(arguments)  # again, from the runs that are there
    assert "training" not in capsys.readouterr().err


@needs("mnist")
def test_steps_are_timed_at_the_ranks_of_every_epoch(tmp_path, monkeypatch):
    monkeypatch.setenv("LOD_DATA", str(DATA))
    timed = []
    seconds = times._Steps.seconds

    def noted(steps):
        timed.append(lod.ranks(steps.model))
        return seconds(steps)

    monkeypatch.setattr(times._Steps, "seconds", noted)
    full = lod.survey(LeNet()).ranks
    less = {**full, "fc1": 7}
    monkeypatch.setattr(times, "_ranks_during", lambda run: [full, full, less])
    found = times._recipe(Scale(tmp_path, smoke=True), "lenet-mnist", ("64e-5",))
    assert [ranks for ranks in timed if ranks] == [full, less]  # dense ones in between
    first, second, third = found["runs"]["64e-5"]["per_epoch"]
    assert first == second and third > 0
    assert "| | 64e-5 |" in times.markdown({"lenet-mnist": found})


@needs("mnist")
def test_a_run_with_other_settings_is_not_taken_for_the_wanted_one(tmp_path, monkeypatch):
    monkeypatch.setenv("LOD_DATA", str(DATA))
    scale = Scale(tmp_path, smoke=True)
    run = scale.trained("lenet-mnist", penalty=0, seed=0)
    config = run.directory / "config.yaml"
    config.write_text(config.read_text().replace("batch: 64", "batch: 32"))
    with pytest.raises(SystemExit, match="other settings"):
        scale.trained("lenet-mnist", penalty=0, seed=0)


def test_without_items_it_lists_them(capsys):
    main([])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ITEMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tabel10"], "Did you mean 'table10'"),
        (["toy", "--smoke"], "--smoke needs --results"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_spread_shows_the_deviation_of_several_values():
    assert spread([1.0]) == "1.00"
    assert spread([1.0, 2.0, 3.0]) == "2.00 ± 1.00"


def test_a_sweep_is_interpolated_in_the_logarithm_of_the_size():
    assert at_size([(0.1, 90.0), (0.4, 92.0)], 0.2) == pytest.approx(91.0)
    assert at_size([(0.1, 90.0), (0.4, 92.0)], 0.4) == pytest.approx(92.0)
    assert at_size([(0.1, 90.0), (0.4, 92.0)], 0.05) is None


def test_the_size_is_chosen_by_the_loss_that_the_search_saw():
    curve = [
        {"params": 10, "loss": 0.3, "accuracy": 0.99},
        {"params": 8, "loss": 0.1, "accuracy": 0.90},
        {"params": 20, "loss": 0.0, "accuracy": 1.0},
    ]
    assert at_most(curve, "params", 10) == curve[1]
    assert at_most(curve, "params", 5) is None
