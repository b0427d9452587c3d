"""The pretrained models that `pretrained.py` compresses, each with its data and its judge.

Every folder of the models' directory has a `load.py` that builds, loads and evaluates its model.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod.pretrained.outputs import own_scores, own_values, scores_loss, values_loss

SoftLoss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Case:
    """One model: how good it is, what it is calibrated and healed on."""

    model: nn.Module
    evaluate: Callable[[nn.Module], float]
    quality: str
    calibration: list[Any]
    """Batches (inputs, target) to calibrate on, the first few of which correct sequentially."""
    loss: Callable[[Any, Any], Tensor]
    """What calibration differentiates: it needs no labels."""
    correction: int
    """How many of the batches correct sequentially."""
    healing: list[Any]
    soft_loss: SoftLoss
    lr: float


def loader(folder: Path) -> Any:
    """Import the `load.py` of a folder."""
    spec = importlib.util.spec_from_file_location(f"load_{folder.name}", folder / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def language_model(folder: Path) -> Case:
    load = loader(folder / "stories15m")
    windows, judged = load.windows("calib"), load.windows("eval")[:32]
    calibration = [({"input_ids": part}, None) for part in windows[:64].split(4)]
    pieces = windows.reshape(-1, 128)[torch.randperm(2 * len(windows), generator=seeded())]
    return Case(
        load.load(),
        lambda model: math.exp(load.evaluate(model, judged)),
        "perplexity, 32 windows of 256 tokens",
        calibration,
        own_scores,
        6,
        [({"input_ids": part}, None) for part in pieces.split(2)],
        scores_loss,
        1e-3,
    )


def resnet(depth: int) -> Callable[[Path], Case]:
    def case(folder: Path) -> Case:
        load = loader(folder / "resnet-cifar10")
        (x, _), (test_x, test_y) = load.cifar("train"), load.cifar("test")
        x = x[torch.randperm(len(x), generator=seeded())[:16000]]
        test_x, test_y = test_x[:500], test_y[:500]

        @torch.inference_mode()
        def accuracy(model: nn.Module) -> float:
            model.eval()
            hits = [
                (model(load.normalise(part)).argmax(1) == y).sum()
                for part, y in zip(test_x.split(250), test_y.split(250), strict=True)
            ]
            return 100 * float(sum(hits)) / len(test_y)

        prepared = load.normalise(x[:128])
        return Case(
            load.load(depth),
            accuracy,
            "% correct, first 500 test images",
            [(part, None) for part in prepared.split(64)],
            own_scores,
            2,
            [(mirrored(load.normalise(part)), None) for part in x.split(32)],
            scores_loss,
            1e-3,
        )

    return case


def mirrored(images: Tensor) -> Tensor:
    """Mirror every other image: the training data is known to the model by heart."""
    images[::2] = images[::2].flip(-1)
    return images


def sentence_encoder(folder: Path) -> Case:
    load = loader(folder / "minilm-l6")
    model, tokenizer = load.load()
    first, second, _ = load.stsb("train")
    texts = sorted(set(first + second), key=len)
    order = torch.randperm(len(texts) // 16, generator=seeded()).tolist()

    def batch(index: int) -> tuple[Any, None]:
        part = texts[16 * index : 16 * index + 16]  # of about one length: hardly any padding
        return dict(tokenizer(part, padding=True, truncation=True, return_tensors="pt")), None

    one, other, wanted = load.stsb("test")
    judged = torch.randperm(len(one), generator=seeded())[:200].tolist()

    def correlation(judged_model: nn.Module) -> float:
        texts = [one[i] for i in judged] + [other[i] for i in judged]
        vectors = load.embed(judged_model, tokenizer, texts)
        return load.spearman((vectors[:200] * vectors[200:]).sum(1), wanted[judged])

    def embedding(output: Any) -> Tensor:
        return F.normalize(output.last_hidden_state.mean(1), dim=1)

    def soft(output: Any, teacher: Any) -> Tensor:
        return 10 * values_loss(embedding(output), embedding(teacher)) + values_loss(
            output, teacher
        )

    healing = [batch(index) for index in order]
    return Case(
        model,
        correlation,
        "Spearman correlation, 200 pairs of STS-B test",
        healing[:32],
        lambda output, _: own_values(embedding(output)),
        32,
        healing,
        soft,
        5e-4,
    )


def speaker_encoder(folder: Path) -> Case:
    load = loader(folder / "resemblyzer-lstm")
    x = load.mels("calib")[0]
    x = x[torch.randperm(len(x), generator=seeded())]
    return Case(
        load.load(),
        lambda model: 100 * load.window_eer(model),
        "% equal error rate, windows of 1.6 s",
        [(part, None) for part in x[:256].split(32)],
        lambda output, _: own_values(output),
        4,
        [(part, None) for part in x.split(32)],
        values_loss,
        1e-3,
    )


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


CASES: dict[str, Callable[[Path], Case]] = {
    "speaker encoder": speaker_encoder,
    "language model": language_model,
    "ResNet-20": resnet(20),
    "sentence encoder": sentence_encoder,
    "ResNet-56": resnet(56),
}
