"""The pretrained models that `pretrained.py` compresses, each with its data and its judge.

Every folder of the models' directory has a `load.py` that builds, loads and evaluates its model.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod.files.stage_cache import StageCache
from maestro_lod.sizes.outputs import own_scores, own_values, scores_loss, values_loss

SoftLoss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Case:
    """One model: how good it is, what it is calibrated and healed on.

    Test data is in none of the other data. Learning rates are first guesses;
    `pretrained_rates.py` is there to choose them on `validation`.
    """

    model: nn.Module
    evaluate: Callable[[nn.Module, int], float]
    """Evaluates a model on a number of samples."""
    quality: str
    few: int
    """Samples that most cells of the table are judged by."""
    all: int
    """Samples that there are."""
    calibration: list[Any]
    """Batches (inputs, target) to calibrate on."""
    loss: Callable[[Any, Any], Tensor]
    """What calibration differentiates: it needs no labels."""
    correction: list[Any]
    """The same samples in batches to train blocks on."""
    distillation_batches: Callable[[StageCache], Iterable[Any]]
    """Makes the batches to heal on."""
    validation: list[Any]
    soft_loss: SoftLoss
    hidden: tuple[str, ...]
    """Modules whose outputs are compared with the original's while healing."""
    lr: float
    left_alone: tuple[str, ...] = ()
    """Parameters that were not cut and are not healed."""


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
    model, windows, judged = load.load(), load.windows("calib"), load.windows("eval")
    windows, held_out = windows[:-32], windows[-32:]

    def distillation_batches(kept: StageCache) -> list[Any]:
        written = kept.get_or_compute("written more", lambda: written_by(model, 640))
        told = torch.cat([windows, written]).reshape(-1, 128)
        told = told[torch.randperm(len(told), generator=seeded())]
        return [({"input_ids": part}, None) for part in told.split(4)]

    return Case(
        model,
        lambda judged_model, count: math.exp(load.evaluate(judged_model, judged[:count])),
        "perplexity by windows of 256 tokens",
        32,
        128,
        [({"input_ids": part}, None) for part in windows[:64].split(4)],
        own_scores,
        [({"input_ids": part}, None) for part in windows[:64].reshape(-1, 128).split(4)],
        distillation_batches,
        [({"input_ids": part}, None) for part in held_out.split(4)],
        scores_loss,
        (),
        1e-4,
        ("model.embed_tokens.weight",),
    )


@torch.no_grad()
def written_by(model: Any, count: int) -> Tensor:
    """Return windows of 256 tokens that a language model draws from itself."""
    torch.manual_seed(0)
    begin = torch.ones(64, 1, dtype=torch.int64)
    parts = [
        model.generate(begin, max_new_tokens=255, min_new_tokens=255, do_sample=True, top_k=0,
                       pad_token_id=2)
        for _ in range(count // 64)
    ]  # fmt: skip
    return torch.cat(parts)


class Augmented:
    """Batches of images that are moved and mirrored at random, differently each time."""

    def __init__(self, images: Tensor, size: int, prepare: Callable[[Tensor], Tensor]) -> None:
        self._images, self._size, self._prepare = images, size, prepare
        self._random = seeded()

    def __iter__(self) -> Iterator[tuple[Tensor, None]]:
        order = torch.randperm(len(self._images), generator=self._random)
        for part in self._images[order].split(self._size):
            yield self._moved(self._prepare(part)), None

    def _moved(self, images: Tensor) -> Tensor:
        padded = F.pad(images, (4, 4, 4, 4))
        moves = torch.randint(0, 9, (len(images), 2), generator=self._random).tolist()
        mirrored = torch.rand(len(images), generator=self._random) < 0.5
        images = torch.stack(
            [image[:, y : y + 32, x : x + 32] for image, (y, x) in zip(padded, moves, strict=True)]
        )
        return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


def resnet(depth: int) -> Callable[[Path], Case]:
    def case(folder: Path) -> Case:
        load = loader(folder / "resnet-cifar10")
        (x, _), (test_x, test_y) = load.cifar("train"), load.cifar("test")
        x = x[torch.randperm(len(x), generator=seeded())]

        @torch.inference_mode()
        def accuracy(model: nn.Module, count: int) -> float:
            model.eval()
            parts = zip(test_x[:count].split(250), test_y[:count].split(250), strict=True)
            hits = [(model(load.normalise(part)).argmax(1) == y).sum() for part, y in parts]
            return 100 * float(sum(hits)) / count

        return Case(
            load.load(depth),
            accuracy,
            "% correct of CIFAR-10's test images",
            2000,
            10000,
            [(load.normalise(part), None) for part in x[:1024].split(128)],
            own_scores,
            [(load.normalise(part), None) for part in x[:1024].split(64)],
            lambda _: Augmented(x[:-2000], 64, load.normalise),
            [(load.normalise(part), None) for part in x[-2000:].split(250)],
            scores_loss,
            ("layer1", "layer2", "layer3"),
            1e-4,
        )

    return case


def sentence_encoder(folder: Path) -> Case:
    load = loader(folder / "minilm-l6")
    model, tokenizer = load.load()
    first, second, _ = load.stsb("train")
    texts = sorted(set(first + second), key=len)
    order = torch.randperm(len(texts) // 32, generator=seeded()).tolist()

    def batch(index: int) -> tuple[Any, None]:
        part = texts[32 * index : 32 * index + 32]  # of about one length: hardly any padding
        return dict(tokenizer(part, padding=True, truncation=True, return_tensors="pt")), None

    one, other, wanted = load.stsb("test")
    shuffled = torch.randperm(len(one), generator=seeded()).tolist()

    def correlation(judged_model: nn.Module, count: int) -> float:
        judged = shuffled[:count]
        texts = [one[i] for i in judged] + [other[i] for i in judged]
        vectors = load.embed(judged_model, tokenizer, texts)
        return load.spearman((vectors[:count] * vectors[count:]).sum(1), wanted[judged])

    def embedding(output: Any) -> Tensor:
        return F.normalize(output.last_hidden_state.mean(1), dim=1)

    def soft(output: Any, teacher: Any) -> Tensor:
        return 10 * values_loss(embedding(output), embedding(teacher)) + values_loss(
            output, teacher
        )

    batches = [batch(index) for index in order]
    return Case(
        model,
        correlation,
        "Spearman correlation, pairs of STS-B test",
        500,
        len(one),
        batches[:16],
        lambda output, _: own_values(embedding(output)),
        batches[:16],
        lambda _: batches[:-16],
        batches[-16:],
        soft,
        (),
        2e-4,
    )


def speaker_encoder(folder: Path) -> Case:
    load = loader(folder / "resemblyzer-lstm")
    x, utterance, _ = load.mels("calib")
    held_out = utterance >= 230
    validation, x = x[held_out], x[~held_out]
    x = x[torch.randperm(len(x), generator=seeded())]
    count = len(load.mels("test")[0])
    return Case(
        load.load(),
        lambda model, _: 100 * load.window_eer(model),
        "% equal error rate, windows of 1.6 s",
        count,
        count,
        [(part, None) for part in x[:256].split(32)],
        lambda output, _: own_values(output),
        [(part, None) for part in x[:256].split(32)],
        lambda _: [(part, None) for part in x.split(32)],
        [(part, None) for part in validation.split(32)],
        values_loss,
        (),
        2e-4,
    )


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


CASES: dict[str, Callable[[Path], Case]] = {
    "language model": language_model,
    "ResNet-56": resnet(56),
    "sentence encoder": sentence_encoder,
    "speaker encoder": speaker_encoder,
    "ResNet-20": resnet(20),
}
