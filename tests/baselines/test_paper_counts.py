"""The table of counts: known numbers, honest verdicts, and a record that reproduces exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import maestro_lod as lod
from maestro_lod.baselines.models import transformer_small
from maestro_lod.cli.models.lenet import LeNet
from paper import counts
from paper.published import COUNTS, DISAGREEMENTS
from paper.record import read
from paper.scale import Scale

KNOWN = {
    ("LeNet", "params"): 44_426,
    ("LeNet", "MACs"): 281_640,
    ("ResNet-18", "params"): 11_173_962,
    ("ResNet-18", "MACs"): 555_422_720,
    ("ResNet-18 with a 7×7 stem", "params"): 11_173_962 + 64 * 3 * (49 - 9),
    ("VGG-19", "params"): 20_035_018,
    ("VGG-19", "MACs"): 398_136_320,
    ("VGG-19 with two more linear layers", "params"): 20_560_330,
    ("VGG-19 with two more linear layers", "MACs"): 398_660_608,
    ("ResNet-50", "params"): 25_557_032,
    ("ResNet-50", "MACs"): 4_089_184_256,
    ("Transformer, tied output", "params"): 48_978_432,
    ("Transformer, tied output", "MACs"): 28 * 48_914_944,
    ("Transformer", "params"): 53_853_184,
    ("Transformer", "MACs"): 28 * 48_914_944,
    ("Pufferfish ResNet-18", "params"): 3_336_266,
    ("Pufferfish VGG-19", "params"): 8_370_634,
    ("Pufferfish ResNet-50", "params"): 15_202_344,
    ("Pufferfish Transformer", "params"): 26_696_192,
    ("Pufferfish Transformer", "MACs"): 28 * 26_632_704,
    ("LeNet, λ = 8e-5", "params, from its MACs"): 31_363,
    ("LeNet, λ = 16e-5", "params, from its MACs"): 18_155,
}
ABOUT = {
    ("LeNet", "training params"): 1.492,
    ("LeNet", "training MACs"): 1.134,
    ("ResNet-18", "training params"): 1.132,
    ("ResNet-18", "training MACs"): 1.098,
    ("VGG-19", "training params"): 1.120,
    ("VGG-19", "training MACs"): 1.095,
    ("ResNet-50", "training params"): 1.241,
    ("ResNet-50", "training MACs"): 1.221,
    ("ResNet-50", "MACs, batch norm and ReLU too"): 4.121e9,
    ("Transformer", "training params"): 1.472,
    ("Transformer", "training MACs, nothing drawn"): 1.520,
    ("Pufferfish ResNet-18", "MACs"): 0.2162e9,
    ("Pufferfish VGG-19", "MACs"): 0.2893e9,
    ("Pufferfish ResNet-50", "MACs"): 3.572e9,
    ("Pufferfish ResNet-50, but stem, stage 1 and classifier", "params"): 9.41e6,
    ("Pufferfish ResNet-50, all layers", "params"): 7.97e6,
    ("XNOR-Net ResNet-18", "params / 32"): 11_173_962 / 32,
    ("XNOR-Net VGG-19", "params / 32"): 20_560_330 / 32,
    ("Maestro VGG-19, λ = 32e-6, relative to Pufferfish", "params"): 2.20 / 8.370634,
    ("Maestro Transformer, λ = 2.56, relative to Pufferfish", "MACs"): 0.248 / 0.7457,
}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return counts.measure(Scale(Path("unused"), smoke=True))


@pytest.fixture(scope="module")
def ours(result: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(row["what"], row["quantity"]): row["ours"] for row in result["rows"]}


@pytest.mark.parametrize("key", KNOWN, ids=" ".join)
def test_counts_are_exact(ours: dict[tuple[str, str], float], key: tuple[str, str]) -> None:
    assert ours[key] == KNOWN[key]
    assert isinstance(ours[key], int)


@pytest.mark.parametrize("key", ABOUT, ids=" ".join)
def test_ratios_are_known(ours: dict[tuple[str, str], float], key: tuple[str, str]) -> None:
    assert ours[key] == pytest.approx(ABOUT[key], rel=5e-4)


@pytest.mark.parametrize(
    ("penalty", "macs"),
    [("0.32", 1.125), ("0.64", 0.957), ("1.28", 0.570), ("2.56", 0.248), ("5.12", 0.123)],
)
def test_rows_of_the_transformer_follow_from_their_macs(
    result: dict[str, Any], penalty: str, macs: float
) -> None:
    (row,) = [
        row
        for row in result["rows"]
        if row["what"] == f"Transformer, λ = {penalty}" and row["quantity"].startswith("params")
    ]
    assert row["ours"] == pytest.approx(9521 * 512 + macs * 1e9 / 28 + 63_488, abs=1)
    assert row["agrees"] == "yes"


def test_spectral_init_fits_its_budget_closely(ours: dict[tuple[str, str], float]) -> None:
    params = ours["Spectral init VGG-19, 2 % of dense", "params"]
    assert 0.97 < params / (0.02 * 20_035_018) <= 1


def test_binary_weights_with_all_that_is_not_binary(ours: dict[tuple[str, str], float]) -> None:
    stem, classifier, norms = 27 * 64, 5130, 9600  # ResNet-18's
    binary = 11_173_962 - stem - classifier - norms
    scales = 4 * 64 + (4 + 1) * (128 + 256 + 512)
    stored = binary / 32 + scales + stem + classifier + norms
    assert ours["XNOR-Net ResNet-18", "params, binary ones / 32"] == pytest.approx(stored, abs=0.1)


# -- verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ours", "same"),
    [
        ("44426", 44_426, True),
        ("44426", 44_427, False),
        ("11.17 M", 11_173_962, True),
        ("11.18 M", 11_173_962, False),
        ("11.2 M", 11_173_962, True),
        ("2e-4 G", 249_999, True),
        ("2e-4 G", 281_640, False),
        ("1.10 ×", 1.0977, True),
        ("1.10 ×", 1.0947, False),
        ("51.7 %", 0.5169, True),
        ("25 %", 0.3326, False),
        ("0.5 M", 550_000, True),
        ("0.5 M", 550_001, False),
    ],
)
def test_agreement_is_within_the_printed_digits(text: str, ours: float, same: bool) -> None:
    assert counts.agrees(text, ours) is same


def test_every_printed_number_is_compared(result: dict[str, Any]) -> None:
    compared = {(row["what"], row["quantity"], row["where"]) for row in result["rows"]}
    printed = {(*key, where) for key, places in COUNTS.items() for where in places}
    assert printed <= compared


def test_what_disagrees_has_a_reason_and_no_reason_is_stale(result: dict[str, Any]) -> None:
    compared = [row for row in result["rows"] if row["paper"] is not None]
    differing = {
        (row["what"], row["quantity"], row["where"])
        for row in compared
        if not counts.agrees(row["paper"], row["ours"])
    }
    assert differing == DISAGREEMENTS.keys()
    for row in compared:
        key = row["what"], row["quantity"], row["where"]
        assert row["agrees"] == DISAGREEMENTS.get(key, "yes")
        kinds = ("yes", "last digit", "misprint", "convention", "not reproducible")
        assert row["agrees"].partition(":")[0] in kinds


def test_a_number_that_differs_without_a_known_reason_is_said_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counts, "COUNTS", {("LeNet", "params"): {"Table 10": "44427"}})
    monkeypatch.setattr(counts, "models", lambda: iter([counts.Count("LeNet", "params", 44_426)]))
    for others in ("pufferfish", "others", "lenet_rows", "transformer_rows"):
        monkeypatch.setattr(counts, others, lambda: iter(()))
    found = counts.measure(Scale(Path("unused")))
    assert [row["agrees"] for row in found["rows"]] == ["no"]
    assert "0 of 1" in counts.markdown(found) and "without a reason: 1" in counts.markdown(found)


# -- how it is counted and shown ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "example", "choice"),
    [
        (LeNet, torch.empty(1, 1, 28, 28), {"ranks": 0.25}),
        (LeNet, torch.empty(1, 1, 28, 28), {"skip": "conv1"}),
        (
            lambda: transformer_small(50),
            (torch.ones(1, 4).long(), torch.ones(1, 4).long()),
            {"skip": "embedding", "ranks": 5},
        ),
    ],
    ids=["ranks", "skip", "transformer"],
)
def test_shapes_on_the_meta_device_are_those_of_decompose(
    build: Any, example: Any, choice: dict[str, Any]
) -> None:
    with torch.device("meta"):
        shapes = counts.low_rank(build(), **choice)
    real = lod.decompose(build(), **choice)
    assert lod.summary(shapes, example) == lod.summary(real, example)


def test_the_table_has_a_line_per_row(result: dict[str, Any]) -> None:
    text = counts.markdown(result)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(result["rows"])
    assert {line.count("|") for line in rows} == {6}
    assert "| LeNet | params | 44426 (Table 10) | 44,426 | yes |" in rows
    assert "| ResNet-50 | params | 25.26 M (Table 3) | 25,557,032 | misprint: 25.56 |" in rows
    assert "| Transformer | training MACs, nothing drawn | – | 1.5198 × | – |" in rows
    assert "without a reason: 0" in text
    agreeing = sum(row["agrees"] == "yes" for row in result["rows"])
    compared = sum(row["paper"] is not None for row in result["rows"])
    assert f"{agreeing} of {compared} comparisons" in text
    assert counts.figures(result) == {}


def test_the_recorded_result_reproduces_exactly(result: dict[str, Any]) -> None:
    record = read("counts")
    assert record is not None
    assert json.loads(json.dumps(result)) == record["result"]
