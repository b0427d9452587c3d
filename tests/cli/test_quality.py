"""Quality: what is measured of a model before and after compression."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from maestro_lod.cli.quality import Quality
from maestro_lod.integrations.model_texts import open_model
from tests.support.directories import write_llama


def test_perplexity_is_that_of_the_loss_over_tokens_that_are_not_padding(tmp_path: Path) -> None:
    model = open_model(write_llama(tmp_path / "llama"))
    torch.manual_seed(0)
    ids = torch.randint(32, (2, 7))
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss.exp().item()
    apart = [{"input_ids": row[None], "attention_mask": torch.ones(1, 7)} for row in ids]
    padded = torch.cat([ids, torch.zeros(2, 3, dtype=ids.dtype)], 1)
    mask = torch.cat([torch.ones(2, 7), torch.zeros(2, 3)], 1).long()
    for batches in ([{"input_ids": ids}], apart, [{"input_ids": padded, "attention_mask": mask}]):
        before, after = Quality(model, batches).compare()["perplexity"]
        assert before == after == pytest.approx(expected, rel=1e-5)
