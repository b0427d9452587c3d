"""The example that compresses a pretrained model runs offline and keeps its promise."""

from __future__ import annotations

import re

import pytest
import torch

from examples import pretrained


@pytest.mark.slow
def test_calibrated_is_better_than_the_weights_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "EPOCHS", 3)
    monkeypatch.setattr(pretrained, "SHARES", (0.2,))
    torch.manual_seed(0)
    pretrained.main()
    shown = capsys.readouterr().out
    original = float(re.findall(r"([\d.]+)% of test", shown)[0])
    kept, by_weights, calibrated, healed = re.findall(r"[\d.]+(?=[×%])", shown.splitlines()[-1])
    assert float(kept) <= 0.2
    assert float(calibrated) > float(by_weights) + 1
    assert float(healed) > original - 3
