"""Choosing from a frontier: within the limits, the best; otherwise one clear line."""

from __future__ import annotations

import json
import math
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maestro_lod.errors import CheckpointError, OptionError
from maestro_lod.model.frontier import Frontier, Size


def points(with_accuracy: bool = True) -> st.SearchStrategy[Size]:
    share = st.floats(0.0, 1.0)
    return st.builds(
        Size,
        ranks=st.dictionaries(st.sampled_from(["a", "b", "c.d"]), st.integers(0, 64), min_size=1),
        loss=st.floats(0.0, 10.0),
        accuracy=share if with_accuracy else st.none(),
        params=st.integers(1, 1000),
        macs=st.integers(1, 1000),
        bytes=st.integers(1, 4000),
        latency=st.floats(1e-6, 1.0),
    )


DENSE = Size({}, 0.5, 0.9, params=1000, macs=1000, bytes=4000, latency=1.0)


def frontiers() -> st.SearchStrategy[Frontier]:
    some = st.one_of(
        st.lists(points(), min_size=1, max_size=8),
        st.lists(points(with_accuracy=False), min_size=1, max_size=8),
    )
    return st.builds(
        lambda found, cost: Frontier(tuple(found), DENSE, "greedy", cost),
        some,
        st.sampled_from(["macs", "params"]),
    )


LIMITS: dict[str, st.SearchStrategy[float]] = {
    "max_params": st.one_of(st.integers(1, 1100), st.floats(0.01, 1.0)),
    "max_macs": st.one_of(st.integers(1, 1100), st.floats(0.01, 1.0)),
    "max_bytes": st.one_of(st.integers(1, 4400), st.floats(0.01, 1.0)),
    "max_latency": st.floats(1e-3, 2.0),
}


def meets(point: Size, option: str, limit: float) -> bool:
    key = option.partition("_")[2]
    value = getattr(point, key)
    if option == "min_accuracy":
        return bool(value >= limit)
    relative = key != "latency" and isinstance(limit, float)
    return bool(value <= (limit * getattr(DENSE, key) if relative else limit))


@given(frontiers(), st.fixed_dictionaries({}, optional=LIMITS).filter(bool))
def test_the_best_within_all_limits_is_picked(found: Frontier, limits: dict[str, float]) -> None:
    within = [p for p in found if all(meets(p, *limit) for limit in limits.items())]
    in_order = found.within(limits)
    assert sorted(map(id, in_order)) == sorted(map(id, within))
    losses = [p.loss for p in in_order]
    assert losses == sorted(losses)
    if not within:
        with pytest.raises(OptionError, match="no submodel meets"):
            found.pick(**limits)
        return
    chosen = found.point(**limits)
    assert chosen is in_order[0]
    assert found.pick(**limits) == chosen.ranks
    assert chosen.loss == min(losses)


@given(frontiers(), st.floats(0.0, 1.0))
def test_the_cheapest_of_an_accuracy_is_picked(found: Frontier, accuracy: float) -> None:
    if found[0].accuracy is None:
        with pytest.raises(OptionError, match="has no accuracy"):
            found.pick(min_accuracy=accuracy)
        return
    within = [p for p in found if meets(p, "min_accuracy", accuracy)]
    if within:
        chosen = found.point(min_accuracy=accuracy)
        assert chosen in within
        assert getattr(chosen, found.cost) == min(getattr(p, found.cost) for p in within)
    else:
        with pytest.raises(OptionError, match="no submodel meets min_accuracy"):
            found.pick(min_accuracy=accuracy)


@given(frontiers(), st.integers(1, 1000), st.integers(0, 100))
def test_more_room_is_never_worse(found: Frontier, limit: int, more: int) -> None:
    if any(getattr(p, found.cost) <= limit for p in found):
        tight = found.point(**{f"max_{found.cost}": limit})
        wide = found.point(**{f"max_{found.cost}": limit + more})
        assert wide.loss <= tight.loss


@given(frontiers())
def test_the_best_points_are_monotone_and_beat_all_others(found: Frontier) -> None:
    best = found.best
    costs, losses = [getattr(p, found.cost) for p in best], [p.loss for p in best]
    assert costs == sorted(set(costs), reverse=True)
    assert losses == sorted(set(losses))
    for point in found:
        assert any(
            getattr(p, found.cost) <= getattr(point, found.cost) and p.loss <= point.loss
            for p in best
        )
    assert set(map(id, best)) <= set(map(id, found))
    assert best.best == best


def small(**changes: Any) -> Frontier:
    """Three submodels of a model with 100 parameters and 1000 MACs."""
    found = [
        Size({"a": 8}, 0.10, 0.98, 100, 1000, 400),
        Size({"a": 4}, 0.20, 0.95, 50, 600, 200),
        Size({"a": 1}, 0.90, 0.60, 20, 100, 80),
    ]
    found = [replace(point, **changes) for point in found]
    return Frontier(tuple(found), replace(found[0], ranks={}), "per-cost", "macs")


def test_accuracies_that_differ_by_chance_do_not_choose_the_smallest_size() -> None:
    costs = {"macs": None, "bytes": 40}
    found = Frontier(
        (
            Size({"a": 8}, 0.10, 0.9700, params=50, **costs),
            Size({"a": 4}, 0.14, 0.9694, params=25, **costs),
            Size({"a": 1}, 0.29, 0.9705, params=5, **costs),  # one sample in 2000 more
        ),
        replace(DENSE, params=100),
        "greedy",
        "params",
    )
    for limit, rank in ((0.5, 8), (0.25, 4), (0.1, 1)):
        assert found.pick(max_params=limit) == {"a": rank}


def test_it_is_a_sequence() -> None:
    found = small()
    assert len(found) == 3
    assert found[-1].ranks == {"a": 1}
    assert found[:2] == found.points[:2]
    assert [p.params for p in found] == [100, 50, 20]
    with pytest.raises(AttributeError):
        found.points = ()  # type: ignore[misc]


def test_numbers_and_shares_are_told_apart() -> None:
    found = small()
    assert found.pick(max_params=50) == found.pick(max_params=0.5) == {"a": 4}
    assert found.pick(max_params=1.0) == {"a": 8}
    assert found.pick(max_macs=999) == {"a": 4}
    assert found.pick(max_bytes=0.2) == {"a": 1}
    assert found.pick(max_macs=0.7, min_accuracy=0.9) == {"a": 4}
    assert found.pick(min_accuracy=0.9) == {"a": 4}
    found.pick(max_params=50)["a"] = 7  # one's own copy
    assert found[1].ranks == {"a": 4}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "no limit was given"),
        ({"max_params": 5}, r"no submodel meets max_params=5: the nearest has params 20 \(0.20×\)"),
        ({"max_macs": 0.05}, r"max_macs=0.05: the nearest has macs 100 \(0.10×\)"),
        ({"min_accuracy": 0.99}, "min_accuracy=0.99: the nearest has accuracy 0.9800"),
        (
            {"max_params": 0.5, "min_accuracy": 0.97},
            "max_params=0.5 and min_accuracy=0.97 together: the nearest has params 50 .* "
            "accuracy 0.9500",
        ),
        ({"max_params": 1.5}, r"lies in \(0, 1\]. Give an int"),
        ({"max_params": -3}, "max_params=-3 must be a finite number above 0"),
        ({"max_params": 0}, "max_params=0 must be a finite number above 0"),
        ({"max_macs": math.nan}, "max_macs=nan must be"),
        ({"max_bytes": math.inf}, "max_bytes=inf must be"),
        ({"min_accuracy": 97.0}, "min_accuracy=97.0 must be a share"),
        ({"min_accuracy": math.nan}, "min_accuracy=nan must be a share"),
        ({"max_latency": 0.1}, "has no latency. Use with_latency"),
        ({"max_params": "5"}, "max_params='5' is not a number"),
        ({"max_params": True}, "max_params=True is not a number"),
    ],
)
def test_bad_limits_get_one_clear_line(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as error:
        small().pick(**limits)
    assert "\n" not in str(error.value)


def test_all_within_limits_are_listed_best_first() -> None:
    found = small()
    assert [p.ranks["a"] for p in found.within({"max_macs": 600})] == [4, 1]
    assert [p.ranks["a"] for p in found.within({"min_accuracy": 0.9})] == [4, 8]
    assert [p.ranks["a"] for p in found.within({"max_macs": 600, "min_accuracy": 0.9})] == [4]
    assert found.within({"max_macs": 5}) == []
    assert "max_macs=5: the nearest has macs 100" in found.why_none({"max_macs": 5})
    with pytest.raises(OptionError, match=r"no limit 'max_mac'\. Did you mean 'max_macs'\?"):
        found.within({"max_mac": 5})


def test_what_was_not_measured_cannot_be_limited() -> None:
    with pytest.raises(OptionError, match=r"has no macs. Give frontier.* an example="):
        replace(small(macs=None), cost="params").pick(max_macs=10)
    with pytest.raises(OptionError, match=r"has no accuracy. Give frontier.* an accuracy="):
        small(accuracy=None).pick(min_accuracy=0.5)


def test_latency_is_added_in_seconds() -> None:
    found = small()
    timed = found.with_latency(lambda ranks: 1e-3 * ranks["a"], dense=0.010)
    assert [p.latency for p in timed] == [0.008, 0.004, 0.001]
    assert timed.dense.latency == 0.010
    assert timed.pick(max_latency=0.005) == {"a": 4}
    assert timed.pick(max_latency=1) == {"a": 8}
    assert found[0].latency is None
    with pytest.raises(OptionError, match=r"max_latency=0.0005: the nearest has latency 1 ms"):
        timed.pick(max_latency=0.0005)
    for bad in (math.nan, -1.0, 0.0, math.inf):
        with pytest.raises(OptionError, match="returned a latency"):
            found.with_latency(lambda ranks, bad=bad: bad, dense=1.0)  # type: ignore[misc]
        with pytest.raises(OptionError, match="dense returned a latency"):
            found.with_latency(lambda ranks: 1.0, dense=bad)


# -- files -------------------------------------------------------------------------------------


@given(frontiers())
def test_files_hold_everything(found: Frontier) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "frontier.json"
        found.save(path)
        assert Frontier.load(path) == found


def test_the_layout_of_the_file(tmp_path: Path) -> None:
    small().save(tmp_path / "frontier.json")
    record = json.loads((tmp_path / "frontier.json").read_text())
    assert record["points"][1] == {
        "ranks": {"a": 4}, "loss": 0.2, "accuracy": 0.95, "params": 50, "macs": 600, "bytes": 200,
        "latency": None,
    }  # fmt: skip
    assert record["dense"]["params"] == 100
    assert (record["method"], record["cost"]) == ("per-cost", "macs")


def damaged(record: dict[str, Any], where: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Set a value deep inside, or delete it."""
    *path, last = where
    inner: Any = record
    for key in path:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return record


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("points",), []),
        (("points",), 3),
        (("points",), ...),
        (("points", 0), None),
        (("points", 0, "ranks"), 4),
        (("points", 0, "ranks", "a"), 1.5),
        (("points", 0, "ranks", "a"), -1),
        (("points", 0, "ranks", "a"), True),
        (("points", 0, "params"), "many"),
        (("points", 0, "params"), None),
        (("points", 0, "bytes"), ...),
        (("points", 0, "macs"), None),
        (("points", 0, "loss"), None),
        (("points", 0, "loss"), "NaN"),
        (("points", 0, "accuracy"), [0.5]),
        (("points", 0, "more"), 1),
        (("dense",), {}),
        (("dense", "macs"), None),
        (("cost",), "latency"),
        (("method",), ...),
        (("method",), 3),
        (("format",), "other 7"),
        (("format",), ...),
    ],
)
def test_damaged_files_are_refused(where: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    path = tmp_path / "frontier.json"
    small().save(path)
    path.write_text(json.dumps(damaged(json.loads(path.read_text()), where, value)))
    with pytest.raises(CheckpointError, match=r"frontier\.json"):
        Frontier.load(path)


def test_files_that_are_no_frontier_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "frontier.json"
    with pytest.raises(CheckpointError, match="does not exist"):
        Frontier.load(path)
    small().save(path)
    whole = path.read_bytes()
    nan = whole.replace(b'"loss": 0.1', b'"loss": NaN')
    assert nan != whole
    for content in (b"", whole[:-30], b"[1, 2]", b"\xff\xfe", b"null", nan):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is damaged"):
            Frontier.load(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Frontier.load(tmp_path)
    with pytest.raises(CheckpointError, match="cannot write"):
        small().save(tmp_path / "missing" / "frontier.json")


# -- for people to look at ---------------------------------------------------------------------


def test_the_table_shows_the_best() -> None:
    lines = str(small()).splitlines()
    assert lines[0].split() == ["params", "MACs", "bytes", "loss", "accuracy"]
    assert lines[2].split()[0] == "dense"
    assert "50 (0.50×)" in lines[4]
    assert len(lines) == 6
    many = tuple(Size({"a": i}, 1 / i, None, i, i, i) for i in range(1, 200))
    assert len(str(Frontier(many, many[-1], "greedy", "params")).splitlines()) < 25


def test_the_picture_is_svg_with_every_point(tmp_path: Path) -> None:
    found, path = small(), tmp_path / "frontier.svg"
    found.plot(path, others={"SVD & more <": small()})
    root = ElementTree.fromstring(path.read_text())
    assert root.tag.endswith("svg")
    names = {e.text for e in root.iter() if e.tag.endswith("text")}
    assert {"per-cost", "SVD & more <", "accuracy"} <= names
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    assert len(circles) == 6
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert all(0 < float(c.attrib["cx"]) < width for c in circles)
    assert all(0 < float(c.attrib["cy"]) < height for c in circles)


@given(frontiers())
def test_any_frontier_can_be_drawn_and_printed(found: Frontier) -> None:
    assert "dense" in str(found)
    with tempfile.TemporaryDirectory() as folder:
        found.plot(Path(folder) / "frontier.svg")
        drawn = (Path(folder) / "frontier.svg").read_text()
    ElementTree.fromstring(drawn)
    assert "nan" not in drawn
