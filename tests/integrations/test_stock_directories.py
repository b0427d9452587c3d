"""Directories that transformers wrote of low-rank and extracted models come back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import maestro_lod as lod
from maestro_lod.errors import CheckpointError, OptionError
from maestro_lod.layers.pivoted import PivotedForm

pytest.importorskip("transformers")
from maestro_lod.integrations import huggingface
from tests.integrations.test_huggingface import ZOO, distance, run

NAMES = ["gpt2", "llama", "bert", "t5", "vit", "whisper", "clip"]


def shrunk(name: str, ranks: float = 0.25, **options: Any) -> Any:
    return lod.decompose(ZOO[name](), ranks=ranks, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["low-rank", "factored", "pivoted"])
def test_what_save_pretrained_wrote_comes_back(name: str, form: str, tmp_path: Path) -> None:
    model = shrunk(name, 0.6 if form == "pivoted" else 0.1)
    model = model if form == "low-rank" else lod.extract(model)
    pivoted = [m for m in model.modules() if isinstance(m, PivotedForm)]
    assert bool(pivoted) is (form == "pivoted")
    model.save_pretrained(tmp_path, max_shard_size="20KB" if name == "llama" else "5GB")
    loaded = huggingface.from_pretrained(tmp_path)
    inputs = ZOO[name].inputs()
    assert lod.ranks(loaded) == lod.ranks(model)
    assert distance(run(model, inputs), run(loaded, inputs)) == 0.0


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "bert"])
def test_a_shared_head_comes_back(name: str, tmp_path: Path) -> None:
    model = shrunk(name, tied="share")
    model.save_pretrained(tmp_path)
    loaded, inputs = huggingface.from_pretrained(tmp_path), ZOO[name].inputs()
    assert distance(run(model, inputs), run(loaded, inputs)) == 0.0


def test_what_a_trainer_saved_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from maestro_lod.integrations.hf_trainer import LoDTrainerCallback

    rows = [{key: value[0] for key, value in ZOO["llama"].inputs().items()} for _ in range(4)]
    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=2, use_cpu=True, report_to=[], save_strategy="epoch",
        disable_tqdm=True, dataloader_pin_memory=False, learning_rate=0.05,
    )  # fmt: skip
    model = lod.decompose(ZOO["llama"]())
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.add_callback(LoDTrainerCallback(trainer, penalty=0.1, threshold=0.5, proximal=True))
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    assert sum(lod.ranks(model).values()) < sum(lod.ranks(lod.decompose(ZOO["llama"]())).values())
    for directory in (tmp_path / "saved", tmp_path / "checkpoint-2"):
        loaded = huggingface.from_pretrained(directory)
        inputs = ZOO["llama"].inputs()
        assert distance(run(model, inputs), run(loaded, inputs)) == 0.0


def test_fewer_ranks_are_kept_and_one_size_stays_one(tmp_path: Path) -> None:
    model, inputs = shrunk("llama"), ZOO["llama"].inputs()
    model.save_pretrained(tmp_path / "every")
    small = huggingface.from_pretrained(tmp_path / "every", ranks=3)
    assert set(lod.ranks(small).values()) == {3}
    with lod.at_ranks(model, 3):
        assert distance(run(model, inputs), run(small, inputs)) < 1e-5
    lod.extract(model).save_pretrained(tmp_path / "one")
    with pytest.raises(OptionError, match="holds one size"):
        huggingface.from_pretrained(tmp_path / "one", ranks=3)


def test_what_cannot_be_known_is_refused(tmp_path: Path) -> None:
    square = lod.decompose(ZOO["gpt2"](), skip=["*.c_attn", "*.c_fc"])
    lod.extract(square).save_pretrained(tmp_path / "square")
    with pytest.raises(CheckpointError, match="whether the square weights of"):
        huggingface.from_pretrained(tmp_path / "square")
    shrunk("mixtral").save_pretrained(tmp_path / "experts")
    with pytest.raises(CheckpointError, match="as it does with experts"):
        huggingface.from_pretrained(tmp_path / "experts")
    shrunk("llama").save_pretrained(tmp_path / "cut off")
    file = tmp_path / "cut off" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="cannot be read"):
        huggingface.from_pretrained(tmp_path / "cut off")
