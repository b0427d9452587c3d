"""docs/distributed.md says what benchmarks/wire.py has measured, which is within its bars."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def wire(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    import wire

    yield wire
    sys.modules.pop("wire")


def test_the_page_is_made_from_the_results(wire):
    page = (DOCS / "distributed.md").read_text(encoding="utf-8")
    assert wire.START + wire.table() + wire.END in page
    assert (DOCS / "images" / "wire.svg").read_text(encoding="utf-8") == wire.picture()


def test_bytes_follow_what_is_stored_and_a_shrink_takes_less_than_a_step(wire):
    for name, rows in wire.kept("wire")["per_epoch"].items():
        assert rows[-1]["stored_bytes"] < rows[0]["stored_bytes"] / 4
        # but for rows with which FSDP2 fills up the last part
        per_byte = [row["sent"] / row["stored_bytes"] for row in rows]
        assert per_byte == pytest.approx([1 if name.endswith("DDP") else 3] * len(rows), rel=0.01)
    for name, times in wire.kept("shrink")["median_seconds"].items():
        assert times["steps_per_shrink"] < 1, name
