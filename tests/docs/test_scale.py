"""docs/scale.md says what the arithmetic does, and the arithmetic what the code does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from maestro_lod import decompose
from maestro_lod.model.cost import count_params

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scale

    yield scale
    sys.modules.pop("scale")


def test_the_page_is_what_the_arithmetic_says(scale):
    assert (ROOT / "docs" / "scale.md").read_text(encoding="utf-8") == scale.page()


def test_a_small_decoder_has_the_scalars_that_the_arithmetic_says(scale, monkeypatch):
    small = {"LAYERS": 2, "WIDTH": 24, "HIDDEN": 40, "VOCABULARY": 50}
    for name, value in small.items():
        monkeypatch.setattr(scale, name, value)
    for share in (None, 0.25):
        of = scale.sizes(share)
        model = scale.decoder().to_empty(device="cpu")
        for p in model.parameters():
            nn.init.normal_(p)
        ranks = {
            f"blocks.{name}": rank
            for (name, _), (*_, rank) in zip(linears(model["blocks"]), of.factors, strict=True)
        }
        decompose(model, only=["blocks"], ranks=ranks)
        assert count_params(model) == of.params
        assert of.params == sum(p.numel() for p in model.parameters())


def linears(blocks: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, m) for name, m in blocks.named_modules() if isinstance(m, nn.Linear)]


def test_bytes_of_padded_rows_are_those_that_torch_stores(scale):
    for rank, workers in ((5, 2), (3, 8), (16, 4)):
        of = scale.Sizes(0, ((6, 10, rank),))
        rows = len(torch.empty(rank, 10).chunk(workers)[0])
        assert of.padded(workers) == 6 * rank + rows * workers * 10
        assert of.moved(workers) == rows * 10
