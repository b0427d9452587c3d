"""The examples in docstrings of public names run."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
import torch
from torch import nn

import maestro_lod as lod
from maestro_lod.layers import registry

RUN = [
    *("at_ranks", "decompose", "extract", "fuse", "load", "match_ranks", "ranks", "register"),
    *("save", "set_ranks", "show_progress", "survey", "verify"),
    *("calibrate", "choose_ranks", "frontier", "latency", "load_state", "own_scores"),
    *("own_values", "round_ranks", "save_state", "scores_loss", "summary"),
]
"""Names whose examples are complete programs, given `lod`, `nn` and `torch`."""


@pytest.mark.parametrize("name", RUN)
def test_the_example_of_a_public_name_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    names = {"lod": lod, "nn": nn, "torch": torch}
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(lod, name), name, globs=names)
    assert test.examples
    results = doctest.DocTestRunner().run(test)
    lod.show_progress(None)
    assert results.failed == 0
