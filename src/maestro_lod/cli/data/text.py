"""Multi30k, German to English: tokenized sentences, batches of similar lengths, BLEU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sacrebleu.metrics.bleu import BLEU
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import NFC, Lowercase
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordLevelTrainer
from torch import Tensor, nn

from maestro_lod.cli.data.batches import USUAL_SHARE, Data, Request, epoch_generator
from maestro_lod.cli.data.cache import cached
from maestro_lod.cli.data.sources import Source, find_source, rows
from maestro_lod.errors import DataError, LayerError, OptionError, require_whole
from maestro_lod.files.json_files import read_json_file

PAD, UNKNOWN, START, STOP = range(4)
_SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
_UNKNOWN_IN_TEXT = "⁇"  # BLEU counts it as one word, but <unk> as three
_IGNORED = -100
_LANGUAGES = ("de", "en")
_SPLITS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}
_LONGEST = 100
_LONGEST_TRANSLATION = 64
_EVALUATION_BATCH = 100
_BATCHES_PER_POOL = 50


@dataclass(frozen=True)
class Sentences:
    """Pairs of sentences as (samples, length) int64: start, words, stop, padding."""

    source: Tensor
    target: Tensor

    def __getitem__(self, chosen: slice) -> Sentences:
        return Sentences(self.source[chosen], self.target[chosen])

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class TextBatches:
    """((source, target so far), next word of the target); shuffled if there is a seed."""

    sentences: Sentences
    batch: int
    seed: int | None = None

    def __len__(self) -> int:
        return -(-len(self.sentences) // self.batch)

    def __iter__(self) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        if self.seed is None:
            return map(self._batch, torch.split(torch.arange(len(self.sentences)), self.batch))
        return map(self._batch, self._shuffled(epoch_generator(self.seed)))

    def _shuffled(self, generator: torch.Generator) -> list[Tensor]:
        """Return the rows of each batch, in random order; similar lengths save padding."""
        source, target = (_lengths(x) for x in (self.sentences.source, self.sentences.target))
        length = target * (_LONGEST + 1) + source
        order = torch.randperm(len(length), generator=generator)
        batches: list[Tensor] = []
        for pool in torch.split(order, _BATCHES_PER_POOL * self.batch):
            batches += torch.split(pool[length[pool].argsort(stable=True)], self.batch)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator)]

    def _batch(self, chosen: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        source = _trimmed(self.sentences.source[chosen])
        target = _trimmed(self.sentences.target[chosen])
        following = target[:, 1:]
        padding = following == PAD
        so_far = target[:, :-1].masked_fill(padding, PAD)
        return (source, so_far), following.masked_fill(padding, _IGNORED)


def _lengths(sentences: Tensor) -> Tensor:
    return (sentences != PAD).sum(1)


def _trimmed(sentences: Tensor) -> Tensor:
    """Remove columns that contain only padding."""
    return sentences[:, : int(_lengths(sentences).max())]


@dataclass(frozen=True)
class Corpus:
    """Preprocessed text of the dataset."""

    tokenizer: Tokenizer
    splits: dict[str, Sentences]
    references: list[str]
    """The English sentences of the test set."""


def load(request: Request, *, min_count: int = 3) -> Data:
    """Load the translation pairs; words that occur fewer than `min_count` times are unknown.

    The validation set is the one that is published with the data: `validation` may only turn it
    off. The vocabulary, one for both languages, is that of the training set, whatever `limit` says.
    """
    if request.validation not in (0, USUAL_SHARE):
        raise OptionError(
            f"validation={request.validation!r}: multi30k has a validation set of its own, so no "
            "share of the training set is kept apart. Leave the option out, or set 0 for none."
        )
    require_whole("min_count", min_count)
    source = find_source("multi30k", request.directory, _SPLITS, "bentrevett/multi30k")
    checksum, corpus = cached(
        "multi30k",
        source,
        f"words 1 min_count={min_count}",
        partial(_encode_all, source, min_count),
        _read,
    )
    used = {name: part[: request.first(len(part))] for name, part in corpus.splits.items()}
    evaluation = max(request.batch, _EVALUATION_BATCH)
    validated = used["validation"][: None if request.validation else 0]
    words = corpus.tokenizer.get_vocab_size()
    return Data(
        train=TextBatches(used["train"], request.batch, request.seed),
        validation=TextBatches(validated, evaluation) if len(validated) else None,
        test=TextBatches(used["test"], evaluation),
        example=(torch.full((1, 28), UNKNOWN), torch.full((1, 28), UNKNOWN)),
        classes=words,
        note=f"multi30k (de → en): {len(used['train']):,} training, {len(validated):,} validation "
        f"and {len(used['test']):,} test pairs; {words:,} words; sha256 {checksum[:12]}; BLEU of "
        "lower-cased text",
        score=partial(_score, corpus.tokenizer, used["test"].source, corpus.references),
    )


def _encode_all(source: Source, min_count: int, folder: Path) -> None:
    """Write the tokenizer, the encoded sentences and the test references to `folder`."""
    texts = {name: _texts(name, files) for name, files in source.splits.items()}
    tokenizer = _tokenizer(texts["train"], min_count)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, pairs in texts.items():
        for language, sentences in zip(_LANGUAGES, zip(*pairs, strict=True), strict=True):
            encoded = [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]
            np.save(folder / f"{name}-{language}.npy", np.array(encoded, dtype=np.int64))
    references = [english for _, english in texts["test"]]
    (folder / "references.json").write_text(json.dumps(references))


def _read(folder: Path) -> Corpus:
    def tensor(name: str) -> Tensor:
        return torch.from_numpy(np.load(folder / f"{name}.npy", allow_pickle=False))

    return Corpus(
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        {name: Sentences(tensor(f"{name}-de"), tensor(f"{name}-en")) for name in _SPLITS},
        read_json_file(folder / "references.json", [str]),
    )


def _texts(split: str, files: Sequence[Path]) -> list[tuple[str, str]]:
    pairs = []
    for number, (german, english) in enumerate(rows(files, *_LANGUAGES)):
        if not isinstance(german, str) or not isinstance(english, str):
            raise DataError(
                f"multi30k, {split} split: row {number} is not a pair of texts: {german!r}, "
                f"{english!r}. Download it again."
            )
        pairs.append((german, english))
    if not pairs:
        raise DataError(f"multi30k, {split} split is empty. Download it again.")
    return pairs


def _tokenizer(pairs: Sequence[tuple[str, str]], min_count: int) -> Tokenizer:
    """Return a tokenizer to lower-cased words and punctuation, as frequent in `pairs` as asked."""
    tokenizer = Tokenizer(WordLevel(unk_token=_SPECIAL[UNKNOWN]))
    tokenizer.normalizer = Normalizers([NFC(), Lowercase()])
    tokenizer.pre_tokenizer = Whitespace()
    trainer = WordLevelTrainer(
        vocab_size=2**31, min_frequency=min_count, special_tokens=_SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    start, stop = _SPECIAL[START], _SPECIAL[STOP]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A {stop}", special_tokens=[(start, START), (stop, STOP)]
    )
    tokenizer.enable_truncation(_LONGEST)
    tokenizer.enable_padding(pad_id=PAD, pad_token=_SPECIAL[PAD])
    return tokenizer


def _score(
    tokenizer: Tokenizer, source: Tensor, references: Sequence[str], model: nn.Module
) -> dict[str, float]:
    """Return the BLEU of greedy translations, both sides as lower-cased plain text."""
    translate = getattr(model, "translate", None)
    if translate is None:
        raise LayerError(
            f"{type(model).__name__} cannot be scored by BLEU: it has no method "
            "translate(source, start, stop, longest)."
        )
    first = next(model.parameters(), None)
    device = None if first is None else first.device
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            parts = [
                translate(_trimmed(part).to(device), START, STOP, _LONGEST_TRANSLATION)
                for part in torch.split(source, _EVALUATION_BATCH)
            ]
    finally:
        model.train(training)
    translations = [_text(tokenizer, row) for part in parts for row in part.tolist()]
    # `force` silences a warning about unusual ends of sentences
    bleu = BLEU(lowercase=True, force=True).corpus_score(translations, [references[: len(source)]])
    return {"bleu": bleu.score}


def _text(tokenizer: Tokenizer, words: Sequence[int]) -> str:
    """Return a sentence as text: up to the stop token, without spaces before punctuation."""
    end = words.index(STOP) if STOP in words else len(words)
    kept = [
        _UNKNOWN_IN_TEXT if word == UNKNOWN else str(tokenizer.id_to_token(word))
        for word in words[:end]
        if word not in (PAD, START)
    ]
    text = re.sub(r" ([.,!?;:%)]+)(?= |$)", r"\1", " ".join(kept))
    return re.sub(r"(\w) (['&-]) (?=\w)", r"\1\2", text)
