"""Directories of tiny transformers models with a tokenizer of a few words, and texts for them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

LINES = ["the cat sat on a mat", "a dog ran", "", "and the dog ran far away"]
WORDS = ["[PAD]", "[UNK]", *dict.fromkeys(" ".join(LINES).split())]
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def write_llama(directory: Path) -> Path:
    """A language model with tied embeddings, in several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True))
    model.save_pretrained(directory, max_shard_size="10KB")
    return _with_tokenizer(directory)


def write_bert(directory: Path) -> Path:
    """An encoder."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES)).save_pretrained(directory)
    return _with_tokenizer(directory)


def _with_tokenizer(directory: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    fast.save_pretrained(directory)
    return directory


def write_texts(directory: Path) -> dict[str, Path]:
    """The same lines in every kind of file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = {suffix: directory / f"texts.{suffix}" for suffix in ("txt", "jsonl", "parquet")}
    files["txt"].write_text("\n".join(LINES))
    files["jsonl"].write_text("\n".join(json.dumps({"text": line}) for line in LINES))
    pq.write_table(pa.table({"text": [line or None for line in LINES]}), files["parquet"])
    return files
