"""docs/trainers.md keeps its promises: each example runs and ends at the size that it names."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import maestro_lod as lod
from tests.support.trainers import SGD

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trainers.md").read_text()


def example(heading: str) -> str:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    return code.group(1)


def run(heading: str, **names: Any) -> dict[str, Any]:
    given = {"torch": torch, "F": F, "lod": lod, **names}
    exec(compile(example(heading), f"docs/trainers.md, {heading}", "exec"), given)
    return given


def require_half(train: Any) -> None:
    """Hold what was trained against the size of the examples."""
    share = train.record().relative_params
    assert share is not None and 0.4 < share <= 0.5


def loader() -> DataLoader:
    return DataLoader(TensorDataset(*SGD.samples()), batch_size=8)


@pytest.mark.filterwarnings("ignore:.*treespec")
@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.integrations.test_lightning import Module

        done = run("Lightning", MyLightningModule=Module, loader=loader())
    assert done["callback"].lod.epoch == 3
    require_half(done["callback"].lod)


def test_hugging_face_trainer(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from tests.integrations.test_hf_trainer import Classifier, Samples

    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=2, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    done = run("Hugging Face Trainer", model=Classifier(), arguments=arguments, data=Samples())
    train = done["trainer"].callback_handler.callbacks[-1].lod
    assert train.epoch == 2
    require_half(train)


def test_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        done = run("Accelerate", network=SGD.network(), loader=loader())
    finally:
        for shared in (AcceleratorState, GradientState, PartialState):
            shared._reset_state()
    assert done["train"].lod.epoch == 3
    require_half(done["train"].lod)


def test_a_loop_of_ones_own() -> None:
    done = run("A loop of your own", network=SGD.network(), loader=loader())
    assert done["train"].epoch == 3
    require_half(done["train"])


def test_the_table_is_made_from_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = runpy.run_path(str(ROOT / "benchmarks" / "trainers.py"))
    kept = json.loads((ROOT / "benchmarks" / "results" / "trainers.json").read_text())
    assert script["START"] + script["table"](kept["answer"]) + script["END"] in PAGE
    assert all(ratio <= 1.02 for ratio in kept["answer"]["over_by_hand"].values())
