"""Translation pairs become numbers of words, batches of like lengths, and a BLEU score."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer
from torch import Tensor, nn

from maestro_lod.cli.data import Data, load_data, text
from maestro_lod.cli.data.text import PAD, START, STOP, UNKNOWN, TextBatches
from maestro_lod.errors import DataError, LayerError, OptionError

REAL = Path(os.environ.get("LOD_DATA", ""))
PAIRS = [
    ("Ein Mann läuft.", "A man's dog runs."),
    ("Der Hund schläft, der Mann nicht!", "The dog sleeps, the man does not!"),
    ("Ein Hund und ein Mann", "A dog and a man in a t-shirt"),
]


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the data or the cache of the machine."""
    monkeypatch.setenv("LOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOD_DATA", str(tmp_path))


def write(folder: Path, **splits: list[tuple[Any, Any]]) -> None:
    (folder / "multi30k").mkdir(exist_ok=True)
    for split, pairs in splits.items():
        lines = [json.dumps({"en": english, "de": german}) for german, english in pairs]
        (folder / "multi30k" / f"{split}.jsonl").write_text("".join(f"{x}\n" for x in lines))


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """Pairs of sentences of 1 to 30 words out of 40."""
    draw = random.Random(seed)
    words = [f"w{i}" for i in range(40)]
    return [
        (" ".join(draw.choices(words, k=length)), " ".join(draw.choices(words, k=length)))
        for length in (draw.randint(1, 30) for _ in range(count))
    ]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write(tmp_path, train=3 * PAIRS, val=PAIRS[:2], test=PAIRS)
    return tmp_path


@pytest.fixture
def large(tmp_path: Path) -> Path:
    write(tmp_path, train=sentences(500, 0), val=sentences(30, 1), test=sentences(150, 2))
    return tmp_path


def tokenizer_of(folder: Path) -> Tokenizer:
    (path,) = folder.glob("cache/multi30k-*/tokenizer.json")
    return Tokenizer.from_file(str(path))


def told(row: Tensor, tokenizer: Tokenizer) -> list[str]:
    return [str(tokenizer.id_to_token(i)) for i in row.tolist()]


# --- words ----------------------------------------------------------------------------------------


def test_words_are_lower_case_without_punctuation_and_shared_by_both_languages(small: Path):
    data = load_data("multi30k", batch=2)
    vocabulary = tokenizer_of(small).get_vocab()
    expected = "<pad> <unk> <s> </s> ein mann läuft . der hund schläft , nicht ! und a man ' s dog"
    expected += " runs the sleeps does not and in t - shirt"
    assert set(vocabulary) == set(expected.split())
    assert data.classes == len(vocabulary)
    special = [vocabulary[word] for word in ("<pad>", "<unk>", "<s>", "</s>")]
    assert special == [PAD, UNKNOWN, START, STOP] == [0, 1, 2, 3]


def test_words_must_occur_often_enough_in_the_training_split(tmp_path: Path):
    write(
        tmp_path,
        train=[("oft oft", "Often rare"), ("oft", "often OFTEN")],
        val=[("neu neu neu", "new new new")],
        test=[("oft neu", "new often")],
    )
    data = load_data("multi30k", batch=2)
    assert data.classes == 4 + 2
    (source, so_far), following = next(iter(data.test))
    vocabulary = tokenizer_of(tmp_path).get_vocab()
    assert source.tolist() == [[START, vocabulary["oft"], UNKNOWN, STOP]]
    assert so_far.tolist() == [[START, UNKNOWN, vocabulary["often"]]]
    assert following.tolist() == [[UNKNOWN, vocabulary["often"], STOP]]
    assert load_data("multi30k", batch=2, min_count=1).classes == 4 + 3
    assert load_data("multi30k", batch=2).classes == 4 + 2, "each count has its own entry"


def test_min_count_must_be_a_whole_number(small: Path):
    with pytest.raises(OptionError, match="min_count=-1"):
        load_data("multi30k", batch=2, min_count=-1)
    with pytest.raises(OptionError, match="Did you mean 'min_count'"):
        load_data("multi30k", batch=2, min_counts=1)


def test_long_sentences_are_cut(tmp_path: Path):
    write(tmp_path, train=[("wort " * 300, "word")] * 3, val=PAIRS, test=PAIRS)
    (source, so_far), _ = next(iter(load_data("multi30k", batch=3).train))
    assert source.shape == (3, 100) and so_far.shape == (3, 2)
    assert source[:, -1].tolist() == [STOP] * 3


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_is_source_target_so_far_and_what_follows(small: Path):
    data = load_data("multi30k", batch=3)
    assert len(data.test) == 1
    (source, so_far), following = next(iter(data.test))
    assert source.dtype == so_far.dtype == following.dtype == torch.int64
    assert so_far.shape == following.shape
    tokenizer = tokenizer_of(small)
    first = ["<s>", "ein", "mann", "läuft", ".", "</s>"]
    assert told(source[0], tokenizer) == first + ["<pad>"] * (source.shape[1] - len(first))
    last = ["a", "dog", "and", "a", "man", "in", "a", "t", "-", "shirt"]
    assert told(so_far[2], tokenizer) == ["<s>", *last]
    assert told(following[2], tokenizer) == [*last, "</s>"]


def test_padding_is_the_same_in_both_targets_and_ignored_in_the_loss(large: Path):
    for batches in (data := load_data("multi30k", batch=32)).train, data.test:
        for (source, so_far), following in batches:
            assert torch.equal(so_far == PAD, following == -100)
            assert torch.equal(so_far[:, 1:][following[:, 1:] != -100], joined(following)), (
                "shifted"
            )
            assert (source[:, 0] == START).all() and (so_far[:, 0] == START).all()
            assert ((following == STOP).sum(1) == 1).all() and (so_far != STOP).all()
            assert (source != PAD).any(0).all() and (so_far != PAD).any(0).all(), "no empty column"


def joined(following: Tensor) -> Tensor:
    """All words that follow and are themselves followed by another."""
    return following[:, :-1][following[:, 1:] != -100]


def rows_of(batches: Any) -> list[tuple[int, ...]]:
    rows = []
    for (source, so_far), _ in batches:
        for pair in zip(source.tolist(), so_far.tolist(), strict=True):
            rows.append(tuple(word for part in pair for word in part if word != PAD))
    return rows


def test_every_pair_comes_once_per_epoch(large: Path):
    data = load_data("multi30k", batch=32)
    sizes = [len(target) for _, target in data.train]
    assert len(sizes) == len(data.train) == 16
    assert sorted(sizes) == [20] + [32] * 15, "the last one is whatever is left"
    ordered = TextBatches(data.train.sentences, 32)
    assert Counter(rows_of(data.train)) == Counter(rows_of(ordered))


def test_batches_are_of_like_lengths_in_no_order(large: Path):
    data = load_data("multi30k", batch=32)

    def padding(batches: Any) -> float:
        targets = [target for _, target in batches]
        padded = sum(int((target == -100).sum()) for target in targets)
        return padded / sum(target.numel() for target in targets)

    assert padding(data.train) < 0.1 < 0.3 < padding(TextBatches(data.train.sentences, 32))
    lengths = [target.shape[1] for _, target in data.train]
    assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))


def test_one_seed_fixes_an_epoch_and_another_one_changes_it(large: Path):
    data = load_data("multi30k", batch=32)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(rows_of(data.train))
    assert runs[0] == runs[1] != runs[2]
    torch.manual_seed(1)
    begun = iter(data.train)
    torch.manual_seed(2)
    assert rows_of(begun) == runs[0]


def test_evaluation_keeps_the_order_of_the_file_and_draws_nothing(large: Path):
    data = load_data("multi30k", batch=32)
    before = torch.get_rng_state()
    assert rows_of(data.test) == rows_of(data.test)
    assert torch.equal(torch.get_rng_state(), before)
    assert [len(target) for _, target in data.test] == [100, 50]
    words = [len(german.split()) for german, _ in sentences(150, 2)]
    assert [int((s != PAD).sum()) - 2 for (x, _), _ in data.test for s in x] == words


def test_the_published_validation_set_is_used_and_no_share_is_cut_off(large: Path):
    data = load_data("multi30k", batch=32)
    assert data.validation is not None
    assert len(rows_of(data.validation)) == 30 and len(rows_of(data.train)) == 500
    assert load_data("multi30k", batch=32, validation=0).validation is None
    with pytest.raises(OptionError, match="validation set of its own"):
        load_data("multi30k", batch=32, validation=0.2)


def test_limit_takes_the_first_pairs_but_all_words(large: Path):
    everything = load_data("multi30k", batch=32)
    data = load_data("multi30k", batch=32, limit=20)
    assert data.validation is not None
    assert rows_of(data.test) == rows_of(everything.test)[:20]
    first = TextBatches(everything.train.sentences[:20], 32)
    assert Counter(rows_of(data.train)) == Counter(rows_of(first))
    assert data.classes == everything.classes
    assert "20 training, 20 validation and 20 test pairs" in data.note


def test_the_example_is_one_pair_of_28_words(small: Path):
    source, target = load_data("multi30k", batch=2).example
    assert source.shape == target.shape == (1, 28)
    assert source.dtype == target.dtype == torch.int64
    assert PAD not in source and PAD not in target


# --- BLEU -----------------------------------------------------------------------------------------


class Memory(nn.Module):
    """Translates what it has seen, word by word as it was."""

    def __init__(self, data: Data, after_stop: int = PAD) -> None:
        super().__init__()
        self.after_stop = after_stop
        self.asked: list[tuple[int, int, int, bool]] = []
        self.known = {}
        for (source, _), following in data.test:
            for one, other in zip(source.tolist(), following.tolist(), strict=True):
                key = tuple(word for word in one if word != PAD)
                self.known[key] = [word for word in other if word != -100]

    def translate(self, source: Tensor, start: int, stop: int, longest: int) -> Tensor:
        self.asked.append((start, stop, longest, self.training))
        rows = [self.known[tuple(w for w in row if w != PAD)] for row in source.tolist()]
        length = max(map(len, rows))
        return torch.tensor([row + [self.after_stop] * (length - len(row)) for row in rows])


@pytest.mark.parametrize("after_stop", [PAD, STOP, 5])
def test_perfect_translations_score_100(small: Path, after_stop: int):
    data = load_data("multi30k", batch=2)
    assert data.score is not None
    model = Memory(data, after_stop)
    assert data.score(model)["bleu"] == pytest.approx(100)
    assert model.asked == [(START, STOP, 64, False)]
    assert model.training, "the mode is restored"


def test_wrong_translations_score_less(large: Path):
    data = load_data("multi30k", batch=2)
    assert data.score is not None
    model = Memory(data)
    perfect = data.score(model)["bleu"]
    for key in list(model.known)[::2]:
        model.known[key] = [UNKNOWN, STOP]
    assert perfect == pytest.approx(100)
    assert 10 < data.score(model)["bleu"] < 60


def test_the_score_is_of_the_limited_test_set(large: Path):
    data = load_data("multi30k", batch=2, limit=10)
    assert data.score is not None
    assert data.score(Memory(data))["bleu"] == pytest.approx(100)


def test_a_model_that_cannot_translate_is_told_so(small: Path):
    data = load_data("multi30k", batch=2)
    assert data.score is not None
    with pytest.raises(LayerError, match="Linear cannot be scored by BLEU"):
        data.score(nn.Linear(2, 2))


def test_the_mode_is_restored_after_an_error(small: Path):
    data = load_data("multi30k", batch=2)
    assert data.score is not None
    model = Memory(data)
    model.known.clear()
    with pytest.raises(KeyError):
        data.score(model)
    assert model.training


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("a man ' s dog runs .", "a man's dog runs."),
        ("the dog , the man !", "the dog, the man!"),
        ("in a t - shirt", "in a t-shirt"),
        ("<unk> and <unk> .", "⁇ and ⁇."),
        ("", ""),
    ],
)
def test_words_are_written_as_a_text(small: Path, words: str, written: str):
    load_data("multi30k", batch=2)
    tokenizer = tokenizer_of(small)
    ids = [tokenizer.token_to_id(word) for word in words.split()]
    assert text._text(tokenizer, [START, *ids, STOP, 7, 8]) == written
    assert text._text(tokenizer, ids) == written, "a translation may have no end"


# --- files ----------------------------------------------------------------------------------------


def test_everything_is_kept(small: Path, monkeypatch: pytest.MonkeyPatch):
    before = load_data("multi30k", batch=2)

    def forbidden(*_: Any) -> None:
        raise AssertionError("this should not be called")

    monkeypatch.setattr(text, "_encode_all", forbidden)
    after = load_data("multi30k", batch=2)
    assert after.note == before.note and "sha256" in after.note
    assert rows_of(after.test) == rows_of(before.test)
    assert after.score is not None and after.score(Memory(after))["bleu"] == pytest.approx(100)


def test_tables_are_read_as_well(small: Path):
    note = load_data("multi30k", batch=2).note
    for path in list((small / "multi30k").iterdir()):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        name = {"val": "validation"}.get(path.stem, path.stem)
        place = small / "multi30k" / f"{name}-00000-of-00001.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), place)
        path.unlink()
    data = load_data("multi30k", batch=2)
    assert data.note.partition("; sha256")[0] == note.partition("; sha256")[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ('{"en": "a", "de": \n', "cannot be read"),
        ('{"en": "a", "fr": "b"}\n', "has no column de; it has en, fr"),
        ('{"en": "a", "de": "b"}\n{"en": "a"}\n', "row 1 is not a pair of texts"),
        ('{"en": 1, "de": 2}\n', "row 0 is not a pair of texts: 2, 1"),
    ],
)
@pytest.mark.parametrize("split", ["train", "val"])
def test_bad_files_give_one_clear_line(small: Path, split: str, content: str, said: str):
    (small / "multi30k" / f"{split}.jsonl").write_text(content)
    with pytest.raises(DataError) as raised:
        load_data("multi30k", batch=2)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_split_is_named(small: Path):
    (small / "multi30k" / "val.jsonl").unlink()
    with pytest.raises(DataError, match="has no val split"):
        load_data("multi30k", batch=2)


@pytest.mark.slow
def test_the_real_files_give_9723_words():
    if not (REAL / "multi30k").is_dir():
        pytest.skip(f"no multi30k in {REAL}; put it there or set LOD_DATA")
    data = load_data("multi30k", batch=256, directory=REAL)
    assert data.classes == 9723
    assert data.note.startswith(
        "multi30k (de → en): 29,000 training, 1,014 validation and 1,000 test pairs; 9,723 words"
    )
    target = torch.cat([following.flatten() for _, following in data.test])
    words = target[(target != -100) & (target != STOP)]
    assert 0.01 < float((words == UNKNOWN).float().mean()) < 0.03
    assert data.score is not None
    assert data.score(Memory(data))["bleu"] > 94, "only words unknown to the tokenizer are lost"
