"""The report: one page that needs nothing else, from runs of every kind."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import maestro_lod as lod
from maestro_lod.cli.report import charts, text, write_report
from maestro_lod.cli.report.runs import read_runs
from maestro_lod.errors import CheckpointError, MaestroError, OptionError
from maestro_lod.model import plot
from maestro_lod.text import tag

LENET = {"conv1": (6, 25), "conv2": (16, 150), "fc1": (120, 400), "fc2": (84, 120), "fc3": (10, 84)}
POSITIONS = {"conv1": 784, "conv2": 100}


def resnet(blocks: int = 29) -> dict[str, tuple[int, int]]:
    """Sixty layers with long names."""
    layers = {"conv1": (64, 147)}
    for block in range(blocks):
        width = 64 * 2 ** (4 * block // blocks)
        for conv in ("conv1", "conv2"):
            layers[f"layer{4 * block // blocks + 1}.{block}.{conv}"] = (width, width * 9)
    return layers | {"fc": (1000, 512)}


def write_run(
    path: Path,
    layers: Mapping[str, tuple[int, int]] = LENET,
    *,
    epochs: int = 20,
    done: int | None = None,
    strength: float = 1.0,
    dense: bool = False,
    validation: bool = True,
    frontier: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write what `lod train` writes, for a made-up training that is always the same."""
    path.mkdir(parents=True)
    full = {name: min(shape) for name, shape in layers.items()}
    config = {
        "recipe": "lenet-mnist",
        "description": "LeNet on MNIST, with ordered ranks.",
        "model": {"name": "lenet", "classes": 10},
        "data": {"name": "mnist", "augment": None, "validation": 0.1},
        "epochs": epochs,
        "batch": 64,
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "betas": [0.9, 0.999]},
        "penalty": None if dense else 0.00128 * strength,
        "seed": 0,
    }
    (path / "config.yaml").write_text(
        yaml.safe_dump({**config, **(settings or {})}, sort_keys=False)
    )
    (path / "environment.json").write_text(
        json.dumps(
            {
                "maestro_lod": "0.1.0",
                "python": "3.11.7",
                "torch": "2.13.0+cpu",
                "platform": "Linux-6.1-x86_64",
                "processor": "x86_64",
                "cores": 2,
                "threads": 1,
                "device": "cpu",
                "started": "2025-01-31T12:00:00+00:00",
                "data": "MNIST, sha256 440fcabf73cc546f",
            }
        )
    )
    dense_cost = cost(layers, None)
    records = []
    for epoch in range(1, (epochs if done is None else done) + 1):
        progress = epoch / epochs
        ranks = {} if dense else shrunk(full, progress, strength)
        params, macs = cost(layers, ranks)
        wave = 0.01 * math.sin(3.7 * epoch + strength)
        loss = 2.3 * math.exp(-5 * progress) + 0.03 * strength + wave
        record = {
            "epoch": epoch,
            "step": 844 * epoch,
            "seconds": 12.3 * (0.5 + 0.5 * params / dense_cost[0]) + 20 * wave,
            "lr": 0.05 * (1 + math.cos(math.pi * progress)) / 2,
            "train_loss": loss,
            "train_accuracy": 1 - 0.35 * loss,
            "params": params,
            "macs": macs,
            "relative_params": params / dense_cost[0],
            "relative_macs": macs / dense_cost[1],
            "ranks": ranks,
        }
        if validation:
            record["validation_loss"] = loss + 0.05 * progress + wave
            record["validation_accuracy"] = 1 - 0.35 * loss - 0.02 * progress + wave / 4
        if not dense:
            record |= {"penalty": 0.00128 * strength * progress, "total_rank": sum(ranks.values())}
        records.append(record)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (path / "metrics.jsonl").write_text(lines)
    if done is None:
        result = finished(layers, full, records, dense)
        (path / "result.json").write_text(json.dumps(result))
    if frontier:
        (path / "frontier.json").write_text(json.dumps(sizes(layers, ranks)))
    return path


def shrunk(full: Mapping[str, int], progress: float, strength: float) -> dict[str, int]:
    """Ranks that fall at a pace of their own in each layer."""
    ranks = {}
    for place, (name, rank) in enumerate(full.items()):
        pace = strength * (0.6 + 0.5 * math.sin(1 + 2.3 * place))
        ranks[name] = max(1, round(rank * (1 - min(0.97, pace * progress**0.7))))
    return ranks


def cost(layers: Mapping[str, tuple[int, int]], ranks: Mapping[str, int] | None) -> tuple[int, int]:
    params = macs = 0
    for name, (m, n) in layers.items():
        weights = m * n
        if ranks and name in ranks:
            weights = min(weights, ranks[name] * (m + n))
        params += weights + m
        macs += weights * POSITIONS.get(name, 1)
    return params, macs


def finished(
    layers: Mapping[str, tuple[int, int]],
    full: Mapping[str, int],
    records: list[dict[str, Any]],
    dense: bool,
) -> dict[str, Any]:
    last, rows = records[-1], []
    for name, (m, n) in layers.items():
        rank, times = last["ranks"].get(name), POSITIONS.get(name, 1)
        factored = m * n if rank is None else rank * (m + n)
        rows.append(
            {
                "name": name,
                "kind": ("Linear" if dense else "LowRankLinear"),
                "shape": [m, n],
                "rank": rank,
                "full_rank": None if rank is None else full[name],
                "params": factored + m,
                "macs": factored * times,
                "dense_params": m * n + m,
                "dense_macs": m * n * times,
                "form": "factored" if factored < m * n else "dense",
            }
        )
    mean = sum(record["relative_macs"] for record in records) / len(records)
    return {
        "status": "finished",
        "test": {"loss": last["train_loss"] + 0.04, "accuracy": last["train_accuracy"] - 0.004},
        "validation": {"loss": last.get("validation_loss"), "accuracy": 0.97},
        "summary": {
            "layers": rows,
            "params": sum(row["params"] for row in rows),
            "macs": sum(row["macs"] for row in rows),
            "fused_params": last["params"],
            "fused_macs": last["macs"],
            "dense_params": sum(row["dense_params"] for row in rows),
            "dense_macs": sum(row["dense_macs"] for row in rows),
        },
        "ledger": None
        if dense
        else {
            "relative_params": mean * 1.1,
            "relative_macs": mean * 1.2,
            "relative_executed_macs": mean * 1.05,
        },
        "full_ranks": {} if dense else full,
        "seconds": sum(record["seconds"] for record in records),
        "epochs": len(records),
    }


def sizes(layers: Mapping[str, tuple[int, int]], ranks: Mapping[str, int]) -> dict[str, Any]:
    points = []
    for step in range(1, 13):
        share = (step / 12) ** 1.5
        chosen = {name: max(1, round(rank * share)) for name, rank in ranks.items()}
        params, macs = cost(layers, chosen)
        points.append(
            {
                "ranks": chosen,
                "loss": 0.08 + 1.5 * math.exp(-6 * share),
                "accuracy": 0.985 - 0.4 * math.exp(-6 * share),
                "params": params,
                "macs": macs,
                "latency": 1e-4 + macs * 1e-9,
                "bytes": 4 * params,
            }
        )
    params, macs = cost(layers, None)
    dense = {"params": params, "macs": macs, "latency": 1e-4 + macs * 1e-9, "bytes": 4 * params}
    return {"points": points, "dense": {**dense, "loss": 0.07, "accuracy": 0.987}}


# --- reading a page back ----------------------------------------------------------------------


class Page(HTMLParser):
    """A page taken apart: its elements, its texts, and the data for its script."""

    VOID = frozenset({"input", "link", "meta", "wbr"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.data: list[Any] = []
        self.open: list[str] = []
        self.feed(self.source)
        self.close()
        assert self.open == [], "an element was not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            if self.elements[-1][1].get("type") == "application/json":
                self.data.append(json.loads(data))
        elif self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self) -> str:
        """All that is read, in one line, with plain spaces."""
        return " ".join("".join(self.texts).replace("\N{NO-BREAK SPACE}", " ").split())

    def all(self, tag: str, class_: str | None = None) -> list[dict[str, str]]:
        found = [attributes for name, attributes in self.elements if name == tag]
        return [a for a in found if class_ is None or class_ in a.get("class", "").split()]

    @property
    def headings(self) -> list[str]:
        """The titles of the sections."""
        return [a["aria-labelledby"] for a in self.all("section")]


@pytest.fixture
def report(tmp_path):
    """Write a report on runs and take it apart."""

    def write(*runs: Path) -> Page:
        return Page(write_report(runs, tmp_path / "pages" / "report.html"))

    return write


# --- what a page shows ------------------------------------------------------------------------


def test_one_run(tmp_path, report):
    page = report(write_run(tmp_path / "lenet-mnist", frontier=True))
    assert page.headings == [
        *("every-size-0", "training", "cost", "ranks-0", "layers-0"),
        *("also", "settings", "environment"),
    ]
    for shown in (
        "LeNet on MNIST, with ordered ranks.",
        "Test accuracy98.14 %loss 0.08162",
        "Parameters47.6 k0.77× of 61.7 k",
        "MACs203 k0.49× of 417 k",
        "Total rank105of 236",
        "Training MACs0.84×of dense; parameters 0.77×",
        "Training time3.9 min20 epochs",
        "training, as executed–0.74×",
        "conv216×150",
        "optimizer.betas[0.9, 0.999]",
        "torch2.13.0+cpu",
    ):
        assert shown in page.text.replace("LowRankLinear", ""), shown
    assert "Unfinished" not in page.text
    assert len(page.all("div", "plot")) == 2 + 2 + 3 + 3  # sizes, training, cost, also
    assert len(page.all("td", "strip")) == len(LENET)


def test_several_runs_side_by_side(tmp_path, report):
    runs = [
        write_run(tmp_path / "strong"),
        write_run(tmp_path / "weak", strength=0.5),
        write_run(tmp_path / "dense", dense=True, strength=0.2),
        write_run(tmp_path / "stopped", done=7),
        write_run(tmp_path / "started", done=0),
    ]
    page = report(*runs)
    assert page.headings[:4] == ["comparison", "planes", "training", "cost"]
    table = page.text.partition("total rankepochstime")[2].partition("Scores are on test data")[0]
    assert all(run.name in table for run in runs)
    assert not page.all("div", "card")  # the table has their numbers
    assert "stopped is unfinished. 7 of 20 epochs are finished" in page.text
    assert "started is unfinished. No epoch is finished" in page.text
    planes = [chart for chart in page.data if chart.get("by") == "xy"]
    for chart in planes:  # the dense run included, the unfinished one too
        assert [hit[1] for hit in chart["hits"]] == ["strong", "weak", "dense", "stopped"]
    assert len(planes) == 2
    assert len(page.all("path", "hollow")) == 2
    loss = next(chart for chart in page.data if chart.get("by") == "x")
    assert [row[1] for row in loss["hits"][0][2]] == [
        f"{run}, {split}"
        for run in ("strong", "weak", "dense", "stopped")
        for split in ("train", "validation")
    ]
    assert len(loss["hits"]) == 20
    assert len(loss["hits"][7][2]) == 6  # the stopped run ends before
    assert "Different" in page.text  # the penalty
    assert page.text.count("The same in all runs") == 2


def test_runs_of_one_name_are_told_apart_and_equal_paths_are_one_run(tmp_path):
    a, b = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")
    assert [run.name for run in read_runs([a, b])] == ["a/run", "b/run"]
    assert [run.name for run in read_runs([a, a / ".." / "run"])] == ["run"]


def test_an_unfinished_run_has_a_page(tmp_path, report):
    run = write_run(tmp_path / "run", done=7)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    page = report(run)
    assert (
        "Unfinished. 7 of 20 epochs are finished; the numbers are those of the last one."
        in page.text
    )
    assert f"Validation accuracy{100 * last['validation_accuracy']:.2f} %" in page.text
    assert "full rank means the largest rank seen" in page.text
    assert "layers-0" not in page.headings


def test_a_run_without_an_epoch_has_a_page(tmp_path, report):
    run = write_run(tmp_path / "run", done=0)
    page = report(run)
    assert page.headings == ["settings", "environment"]
    assert "No epoch is finished, so there are no numbers yet." in page.text
    for name in ("metrics.jsonl", "environment.json"):
        (run / name).unlink()
    assert report(run).headings == ["settings"]


def test_a_dense_run_has_no_ranks(tmp_path, report):
    page = report(write_run(tmp_path / "run", dense=True))
    assert "ranks-0" not in page.headings
    assert "Parameters61.7 k1.00× of 61.7 k" in page.text
    assert "Total rank" not in page.text


def test_sixty_layers(tmp_path, report):
    page = report(write_run(tmp_path / "run", resnet(), epochs=90))
    assert len(page.all("td", "strip")) == 60
    assert page.all("table", "many")
    assert len(page.source) < 500_000


def test_without_validation_training_is_the_solid_line(tmp_path, report):
    page = report(write_run(tmp_path / "run", validation=False))
    assert not page.all("path", "faint")
    assert "dashed" not in page.text


def test_numbers_that_are_missing_are_left_out(tmp_path, report):
    run = write_run(tmp_path / "run", done=4)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records[1]["train_loss"] = None
    records[2]["validation_loss"] = math.nan
    for record in records:
        record |= {"macs": None, "relative_macs": None, "perplexity": 3.0 / record["epoch"]}
        del record["penalty"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    page = report(run)
    assert "NaN" not in page.source
    assert "Perplexity" in page.text
    assert "Penalty" not in page.text
    assert "MACs relative to dense" not in page.text
    loss = next(chart for chart in page.data if chart.get("by") == "x")
    assert [len(hit[2]) for hit in loss["hits"]] == [2, 1, 1, 2]
    # a value between gaps is a dot of its own
    assert page.all("path", "faint")[0]["d"].count("M") == 2


def test_other_metrics_take_the_headline(tmp_path, report):
    run = write_run(tmp_path / "run")
    result = json.loads((run / "result.json").read_text())
    result["test"] = {"loss": 3.1, "perplexity": 22.2, "accuracy": 0.4, "bleu": 27.31}
    (run / "result.json").write_text(json.dumps(result))
    page = report(run)
    assert "Test BLEU27.31accuracy 40.00 %, perplexity 22.2, loss 3.1" in page.text


def test_real_summaries_are_shown(tmp_path, report):
    run = write_run(tmp_path / "run")
    result = json.loads((run / "result.json").read_text())
    model = lod.decompose(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 12)))
    summary = lod.summary(model, torch.empty(1, 3, 4, 4))
    result["summary"] = summary.to_dict()
    (run / "result.json").write_text(json.dumps(result))
    page = report(run)
    for row in summary.layers:
        assert f"{row.kind}{'×'.join(map(str, row.shape))}" in page.text
    assert f"{text.quantity(summary.dense_params)}1.00×".replace("\xa0", " ") in page.text


def test_settings_are_told_as_they_were_written(tmp_path, report):
    odd = {"nested": {"deep": {"er": 1}}, "empty": {}, "many": ["a", {"b": None}], "day": "on"}
    page = report(write_run(tmp_path / "run", settings=odd))
    for shown in ("nested.deep.er1", "empty{}", 'many["a", {"b": null}]', "dayon"):
        assert shown in page.text


def test_the_same_runs_give_the_same_page(tmp_path):
    run = write_run(tmp_path / "run", frontier=True)
    first, second = (write_report([run], tmp_path / name) for name in ("a.html", "b.html"))
    assert first.read_bytes() == second.read_bytes()


def test_a_directory_gets_a_page_of_its_own(tmp_path):
    run = write_run(tmp_path / "run")
    assert write_report([run], run) == run / "report.html"
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


# --- what a page must not do ------------------------------------------------------------------

HOSTILE = "</script><img src=x onerror=alert(1)>&amp;<!--\"'\ud800 "


def test_nothing_in_a_file_becomes_markup(tmp_path, report):
    layers = {f"{HOSTILE}{i}": shape for i, shape in enumerate(LENET.values())}
    folder = tmp_path / "<b onclick='x'>&\""
    settings = {"description": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}}
    run = write_run(folder, layers, frontier=True)
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    (run / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    for line in (metrics := (run / "metrics.jsonl").read_text()).splitlines():
        extra = {**json.loads(line), HOSTILE: len(line), f"validation_{HOSTILE}": 0.5}
        metrics = metrics.replace(line, json.dumps(extra))
    (run / "metrics.jsonl").write_text(metrics)
    page = report(run, write_run(tmp_path / "plain"))
    assert not {"img", "iframe", "object"} & {name for name, _ in page.elements}
    assert not [a for _, a in page.elements if any(name.startswith("on") for name in a)]
    scripts = page.all("script")
    assert [s for s in scripts if s.get("type") != "application/json"] == [{}]  # ours alone
    assert len(page.data) == len(scripts) - 1
    assert "onerror=alert(1)>&amp;<!--" in page.text  # as text


@given(st.text(max_size=9), st.text(max_size=9), st.dictionaries(st.text(max_size=9), st.text()))
def test_markup_gives_back_the_text_it_was_given(content, value, facts):
    class Reader(HTMLParser):
        texts, values = "", ()

        def handle_data(self, data):
            self.texts += data

        def handle_starttag(self, tag, attrs):
            self.values = (*self.values, *attrs)

    reader = Reader()
    reader.feed(tag("p", content, title=value))
    reader.close()
    assert reader.texts == content
    assert reader.values == (("title", value),)
    script = charts.data(facts)
    assert script.count("<") == 2
    assert json.loads(re.sub(r"</?script[^>]*>", "", script)) == facts


def test_a_page_needs_nothing_else(tmp_path, report):
    page = report(write_run(tmp_path / "run", frontier=True), write_run(tmp_path / "other"))
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for name, attributes in page.elements:
        assert "src" not in attributes
        if "href" in attributes:
            link = attributes["href"]
            assert link.startswith("data:") if name == "link" else link[1:] in ids
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page.source)
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv")]
    assert policy.startswith("default-src 'none';")


def test_everything_has_a_name(tmp_path, report):
    page = report(write_run(tmp_path / "run", frontier=True), write_run(tmp_path / "other"))
    for picture in page.all("svg"):
        assert picture.get("aria-hidden") == "true" or picture["aria-label"]
    assert len(page.all("table")) == len(page.all("caption"))
    assert all(a["scope"] in ("row", "col") for a in page.all("th"))
    ids = {a["id"] for _, a in page.elements if "id" in a}
    references = [
        a[key] for _, a in page.elements for key in ("aria-labelledby", "for") if key in a
    ]
    assert references
    assert ids >= set(references)
    assert all(a["aria-label"] for a in page.all("div", "box") if "tabindex" in a)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_read(scheme):
    style = Path(charts.__file__).with_name("style.css").read_text()
    colours = dict(re.findall(r"--(\w+): (#\w{6})", style.split(":root {")[1 + scheme]))

    def contrast(front: str, back: str) -> float:
        lights = sorted(luminance(colours[name]) for name in (front, back))
        return (lights[1] + 0.05) / (lights[0] + 0.05)

    if scheme == 0:  # a plot on its own looks like one in a page
        assert tuple(colours[f"s{i}"] for i in range(len(plot.COLOURS))) == plot.COLOURS
    for back in ("ground", "surface"):
        assert all(contrast(front, back) >= 4.5 for front in ("text", "muted", "link"))
        series = {plot.colour(i) for i in range(42)}
        assert series == {name for name in colours if re.fullmatch(r"s\d", name)}
        assert all(contrast(name, back) >= 3 for name in series)
    assert contrast("text", "notice") >= 4.5


# --- bad input --------------------------------------------------------------------------------


def test_nothing_to_report():
    with pytest.raises(OptionError, match="no run directory was given"):
        write_report([], Path("report.html"))


def test_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"is not a run directory: it has no config\.yaml\. Give a dir"
    ):
        write_report([tmp_path], tmp_path / "report.html")
    write_run(tmp_path / "runs" / "lenet")
    with pytest.raises(CheckpointError, match=r"it contains runs\. Give these: .*lenet\."):
        write_report([tmp_path / "runs"], tmp_path / "report.html")
    with pytest.raises(CheckpointError, match=r"no such directory\. Did you mean 'lenet'\?"):
        write_report([tmp_path / "runs" / "lenett"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_torn_last_line_is_left_out(tmp_path, report):
    run = write_run(tmp_path / "run", done=3)
    whole = (run / "metrics.jsonl").read_bytes()
    for torn in (b'{"epoch": 4, "train_lo', b'{"note": "\xc3', b"{}"[:1], b"\0\0\0\0"):
        (run / "metrics.jsonl").write_bytes(whole + torn)
        assert "3 of 20 epochs are finished" in report(run).text
    (run / "metrics.jsonl").write_bytes(whole[: whole.index(b"\n") // 2])
    assert "No epoch is finished" in report(run).text


@pytest.mark.parametrize("damage", [b"{", b"[1]", b"\xff", b'{"epoch": 2}}'])
def test_a_damaged_line_is_named(tmp_path, damage):
    run = write_run(tmp_path / "run", done=3)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = damage + b"\n"
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2 is damaged \(.*Repair or"):
        write_report([run], tmp_path / "report.html")


def test_the_later_record_of_an_epoch_counts(tmp_path):
    run = write_run(tmp_path / "run", done=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": 2, "train_loss": 9.0}) + "\n\n")
    (read,) = read_runs([run])
    assert [epoch for epoch, _ in read.trend("train_loss")] == [1, 2, 3]
    assert read.trend("train_loss")[1] == (2, 9.0)


@pytest.mark.parametrize("name", ["environment.json", "result.json", "frontier.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\0"])
def test_a_damaged_file_is_named(tmp_path, name, content):
    run = write_run(tmp_path / "run", done=1)
    (run / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} .*remove it to report without"):
        write_report([run], tmp_path / "report.html")


@pytest.mark.parametrize("content", ["a: [", "just a text", "!!python/object/apply:os.getcwd []"])
def test_damaged_settings_are_named(tmp_path, content):
    run = write_run(tmp_path / "run", done=1)
    (run / "config.yaml").write_text(content)
    with pytest.raises(
        CheckpointError, match=r"config\.yaml (is not valid YAML|contains no settings)"
    ) as raised:
        write_report([run], tmp_path / "report.html")
    assert "\n" not in str(raised.value)


def test_a_page_that_cannot_be_written(tmp_path):
    run = write_run(tmp_path / "run", done=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*Give another path"):
        write_report([run], tmp_path / "file" / "report.html")


ODD = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1e-9,
        1e250,
        10**400,
        math.nan,
        -math.inf,
        "",
        "text",
        [],
        [[]],
        {},
        {"": 0},
    ]
)


@st.composite
def odd_place(draw: st.DrawFn, document: Any) -> Any:
    """The document with something odd at one place."""
    if not isinstance(document, dict | list) or not document or draw(st.integers(0, 4)) == 0:
        return draw(ODD)
    keys = list(document) if isinstance(document, dict) else range(len(document))
    key = draw(st.sampled_from(keys))
    changed = document.copy()
    changed[key] = draw(odd_place(document[key]))
    return changed


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "frontier.json"])
@given(draw=st.data())
def test_odd_content_gives_a_page_or_one_clear_error(tmp_path_factory, name, draw):
    run = write_run(tmp_path_factory.mktemp("odd") / "run", epochs=2, frontier=True)
    document = json.loads((run / name).read_text().splitlines()[-1])
    (run / name).write_text(json.dumps(draw.draw(odd_place(document))) + "\n")
    try:
        Page(write_report([run], run))
    except MaestroError as error:
        assert name in str(error)


# --- numbers and axes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (text.quantity(None), "–"),
        (text.quantity(0), "0"),
        (text.quantity(999.4), "999"),
        (text.quantity(999.6), "1 k"),
        (text.quantity(66296), "66.3 k"),
        (text.quantity(999_600), "1 M"),
        (text.quantity(1.82e9, "B"), "1.82 GB"),
        (text.quantity(12, "B"), "12 B"),
        (text.plain(0.00001), "1e-5"),
        (text.plain(0.314159), "0.3142"),
        (text.plain(123456), "123 k"),
        (text.times(0.2345), "0.23×"),
        (text.times(0.01234), "0.012×"),
        (text.times(1), "1.00×"),
        (text.percent(0.98912), "98.91 %"),
        (text.duration(0.00171), "1.71 ms"),
        (text.duration(12.34), "12.3 s"),
        (text.duration(246), "4.1 min"),
        (text.duration(9000), "2.5 h"),
    ],
)
def test_numbers_as_people_read_them(written, expected):
    assert written.replace("\N{NO-BREAK SPACE}", " ") == expected


MODERATE = st.floats(-1e9, 1e9, allow_subnormal=False)


@pytest.mark.parametrize("make", [plot.linear_axis, charts.epoch_axis, charts.log_axis])
@given(st.data())
def test_an_axis_holds_all_values_and_a_few_round_ones(make, data):
    positive = make is charts.log_axis
    numbers = st.floats(1e-9, 1e9) if positive else MODERATE
    if make is charts.epoch_axis:
        numbers = st.integers(1, 10_000)
    values = data.draw(st.lists(numbers, min_size=1, max_size=20))
    axis = make(values, 50.0, 400.0)
    for place in map(axis.at, [*values, *axis.ticks]):
        assert 50 - 1e-6 <= place <= 400 + 1e-6
    assert 1 <= len(axis.ticks) <= 10
    assert list(axis.ticks) == sorted(set(axis.ticks))
    if make is charts.epoch_axis:
        assert all(tick == int(tick) for tick in axis.ticks)


# --- in a browser -----------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page with")
ARTIFACTS = Path(os.environ.get("LOD_ARTIFACTS", Path(__file__).parents[2] / "artifacts"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    switches = ["no-sandbox", "disable-gpu", "disable-background-networking", "no-first-run"]
    switches += ["disable-component-update", "disable-sync"]
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[f"--{switch}" for switch in switches]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open a report on runs; at the end there must have been no error and no other request."""
    contexts, faults = [], []

    def open_page(*runs: Path, width: int = 1280, **options: Any) -> Any:
        path = write_report(runs, tmp_path / "pages" / "report.html")
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()

        def allow_only_the_page(route: Any) -> None:
            if route.request.url == path.as_uri():
                route.continue_()
            else:
                faults.append(f"asked for {route.request.url}")
                route.abort()

        page.route("**/*", allow_only_the_page)
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


@pytest.mark.browser
@in_browser
@pytest.mark.parametrize("width", [1280, 375])
def test_a_page_fits_the_screen(opened, tmp_path, width):
    runs = [
        write_run(tmp_path / "a-run-with-a-rather-long-name-that-goes-on-and-on", frontier=True),
        write_run(tmp_path / "resnet", resnet(), dense=width == 1280),
        write_run(tmp_path / "stopped", done=7),
    ]
    for chosen in (runs, runs[:1], runs[1:2], runs[2:]):
        page = opened(*chosen, width=width)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator("h1").is_visible()
        drawn = page.locator(".plot svg")
        for place in range(drawn.count()):
            assert drawn.nth(place).bounding_box()["width"] > 300
        if chosen == runs[:1]:
            ARTIFACTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=ARTIFACTS / f"report-{width}.png", full_page=True)


OVERLAPS = """() => [...document.querySelectorAll('.plot svg')].flatMap(svg => {
    const boxes = [...svg.querySelectorAll('text')].map(
        text => ({name: text.textContent, ...text.getBoundingClientRect().toJSON()}))
    const air = 0.2  // of the height of a box, above and below its letters
    const meet = (a, b) => a.left < b.right && b.left < a.right &&
        a.top + air * a.height < b.bottom - air * b.height &&
        b.top + air * b.height < a.bottom - air * a.height
    return boxes.flatMap((a, place) =>
        boxes.slice(place + 1).filter(b => meet(a, b)).map(b => `${a.name} and ${b.name}`))
})"""


@pytest.mark.browser
@in_browser
@pytest.mark.parametrize("width", [1280, 375])
def test_no_text_of_a_chart_covers_another(opened, tmp_path, width):
    run = write_run(tmp_path / "run", frontier=True)
    frontier = json.loads((run / "frontier.json").read_text())
    for point in (*frontier["points"], frontier["dense"]):  # 30 k is next to "MACs" then
        point["macs"] = point["macs"] * 34_000 // 42_242
    (run / "frontier.json").write_text(json.dumps(frontier))
    assert opened(run, width=width).evaluate(OVERLAPS) == []


@pytest.mark.browser
@in_browser
def test_hovering_and_arrow_keys_tell_the_values(opened, tmp_path):
    run = write_run(tmp_path / "run")
    page = opened(run)
    plot, tooltip = page.locator(".plot").first, page.locator("#tooltip")
    assert not tooltip.is_visible()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + box["height"] / 2)
    assert tooltip.is_visible()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    values = [text.plain(last[f"{split}_loss"]) for split in ("train", "validation")]
    told = tooltip.inner_text().split()
    assert told == ["Epoch", "20", "train", values[0], "validation", values[1]]
    page.mouse.move(0, 0)
    assert not tooltip.is_visible()
    plot.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert tooltip.inner_text().startswith("Epoch 2")
    page.keyboard.press("Escape")
    assert not tooltip.is_visible()


@pytest.mark.browser
@in_browser
def test_a_tooltip_stays_on_a_narrow_screen(opened, tmp_path):
    page = opened(write_run(tmp_path / ("long-name" * 9)), write_run(tmp_path / "b"), width=375)
    for place in range(page.locator(".plot").count()):
        plot = page.locator(".plot").nth(place)
        plot.focus()
        page.keyboard.press("ArrowLeft")  # the last value
        box = page.locator("#tooltip").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 375
        assert page.evaluate("document.documentElement.scrollWidth") == 375


@pytest.mark.browser
@in_browser
def test_the_slider_picks_the_best_size_within_the_budget(opened, tmp_path):
    run = write_run(tmp_path / "run", frontier=True)
    points = json.loads((run / "frontier.json").read_text())["points"]
    page = opened(run)
    slider, shown = page.locator("input[type=range]"), page.locator(".controls dd")

    def chosen(kind: str) -> dict[str, Any]:
        """What the page should choose, from the place of the slider."""
        costs = [point[kind] for point in points]
        share = int(slider.input_value()) / 1000
        budget = min(costs) * (max(costs) / min(costs)) ** share
        within = [p for p in points if p[kind] <= budget * (1 + 1e-9)]
        return min(within, key=lambda point: point["loss"])

    slider.focus()
    for kind in ("macs", "params"):
        page.locator(f"input[value={kind}]").check()
        slider.focus()
        for key in ("End", "PageDown", "PageDown", "PageDown", "ArrowLeft", "Home"):
            page.keyboard.press(key)
            point = chosen(kind)
            assert shown.nth(0).inner_text() == text.percent(point["accuracy"])
            assert shown.nth(1).inner_text() == text.plain(point["loss"])
            assert shown.nth(2).inner_text().startswith(text.quantity(point["macs"]))
            ranks = page.locator(".frontier .number b").all_inner_texts()
            assert ranks == [str(rank) for rank in point["ranks"].values()]
            assert page.locator("output").inner_text() == slider.get_attribute("aria-valuetext")
    assert points[0]["params"] == chosen("params")["params"]  # Home: the smallest there is


@pytest.mark.browser
@in_browser
def test_without_a_script_charts_and_numbers_are_there(opened, tmp_path):
    page = opened(write_run(tmp_path / "run", frontier=True), java_script_enabled=False)
    assert page.locator(".plot svg").first.is_visible()
    assert page.get_by_text("All sizes", exact=True).is_visible()
    assert not page.locator("input[type=range]").is_visible()


@pytest.mark.browser
@in_browser
def test_hostile_names_do_nothing(opened, tmp_path):
    layers = {f"{HOSTILE}{i}": shape for i, shape in enumerate(LENET.values())}
    run = write_run(tmp_path / "<b>", layers, frontier=True, settings={"description": HOSTILE[:-2]})
    page = opened(run)
    assert page.locator("img").count() == 0
    page.locator(".plot").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tooltip").is_visible()


def test_a_budget_is_drawn_where_the_run_had_to_land(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", settings={"budget": {"params": 0.2, "macs": None}})
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [{**json.loads(line), "budget": 0.2, "phase": "landed"} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = write_report([run], tmp_path / "report.html").read_text()
    assert page.count(">budget</text>") == 1  # of params, not of MACs
    other = write_report([write_run(tmp_path / "other")], tmp_path / "other.html").read_text()
    assert ">budget</text>" not in other
