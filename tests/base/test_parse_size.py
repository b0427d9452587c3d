"""Amounts as people write them: read as they were meant, refused where they could mean two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maestro_lod.errors import OptionError
from maestro_lod.text import parse_size


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("25%", 0.25), ("100%", 1.0), ("0.25x", 0.25), ("0.25×", 0.25), ("1x", 1.0), (".5", 0.5),
        ("0.25", 0.25), ("12.5 %", 0.125), ("5000", 5000), ("5,000", 5000), ("2", 2),
        ("300k", 300_000), ("300K", 300_000), ("1.2M", 1_200_000), ("7B", 7_000_000_000),
        ("1.2MB", 1_200_000), ("300 kB", 300_000), ("5e3", 5000), ("1e-2", 0.01),
    ],
)  # fmt: skip
def test_a_share_is_a_float_and_a_count_an_int(text: str, meant: float) -> None:
    read = parse_size(text)
    assert read == pytest.approx(meant)
    assert type(read) is type(meant)


@pytest.mark.parametrize("text", ["1", "1.0", "1.", "1.00"])
def test_one_could_be_either_and_is_explained(text: str) -> None:
    with pytest.raises(OptionError, match=r"all of the dense model or a single one.*100%"):
        parse_size(text, "--max-params")


@pytest.mark.parametrize("text", ["", "x", "%", "many", "-5", "1.5", "0.3k5", "12%%", "nan", "inf"])
def test_what_is_no_amount_is_refused_with_the_ways_to_write_one(text: str) -> None:
    with pytest.raises(OptionError, match=r"25%.*300k") as refused:
        parse_size(text, "--max-macs")
    assert "--max-macs" in str(refused.value)


@given(st.integers(2, 10**12))
def test_every_whole_number_above_one_is_that_count(count: int) -> None:
    assert parse_size(str(count)) == count
    assert parse_size(f"{count}k") == 1000 * count


@given(st.integers(1, 9999))
def test_a_percentage_and_its_share_are_the_same(hundredths: int) -> None:
    assert parse_size(f"{hundredths / 100}%") == pytest.approx(parse_size(f"{hundredths / 10**4}x"))
