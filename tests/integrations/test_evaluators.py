"""The field's own evaluators on compressed directories: lm-eval and sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import maestro_lod as lod

hf = pytest.importorskip("transformers")
from maestro_lod.integrations import huggingface  # noqa: E402
from maestro_lod.integrations.directory_files import complete_directory  # noqa: E402
from tests.support.directories import LINES, write_bert, write_llama  # noqa: E402

TASKS = {
    "local_perplexity": """
task: local_perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {texts}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}]
""",
    "local_choice": """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]
""",
}


def write_tasks(directory: Path) -> Path:
    """Write two tasks of lm-eval with data of their own."""
    directory.mkdir()
    texts, questions = directory / "texts.jsonl", directory / "questions.jsonl"
    texts.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES if line))
    words = ["mat", "dog", "cat", "far"]
    questions.write_text(
        "".join(
            json.dumps({"question": "the cat sat on a", "choices": words, "label": label}) + "\n"
            for label in range(4)
        )
    )
    for name, text in TASKS.items():
        filled = text.format(texts=texts, questions=questions)
        (directory / f"{name}.yaml").write_text(filled)
    return directory


@pytest.mark.filterwarnings("ignore")  # of lm-eval and datasets
def test_lm_eval_measures_a_compressed_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval: Any = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source, small = write_llama(tmp_path / "source"), tmp_path / "small"
    model = lod.decompose(hf.AutoModelForCausalLM.from_pretrained(source), ranks=0.5)
    huggingface.save_pretrained(model, small)
    complete_directory(small, source)
    manager = TaskManager(include_path=str(write_tasks(tmp_path / "tasks")))

    def measured(evaluated: Any) -> dict[str, float]:
        results = lm_eval.simple_evaluate(
            model=evaluated, tasks=list(TASKS), task_manager=manager, device="cpu", batch_size=1,
            bootstrap_iters=0,
        )["results"]  # fmt: skip
        keys = {"local_perplexity": "word_perplexity,none", "local_choice": "acc,none"}
        return {task: results[task][key] for task, key in keys.items()}

    by_directory = measured(HFLM(pretrained=str(small), device="cpu", batch_size=1))
    tokenizer = hf.AutoTokenizer.from_pretrained(source)
    in_memory = measured(HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=1))
    assert by_directory == pytest.approx(in_memory, rel=1e-5)
    whole = measured(HFLM(pretrained=str(source), device="cpu", batch_size=1))
    assert by_directory["local_perplexity"] != pytest.approx(whole["local_perplexity"], rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # of sentence-transformers
def test_sentence_transformers_encodes_and_evaluates_a_compressed_directory(tmp_path: Path) -> None:
    st: Any = pytest.importorskip("sentence_transformers")
    from sentence_transformers import models
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator

    torch.manual_seed(0)
    bert, source, small = write_bert(tmp_path / "bert"), tmp_path / "source", tmp_path / "small"
    whole = st.SentenceTransformer(
        modules=[models.Transformer(str(bert)), models.Pooling(16), models.Dense(16, 8)]
    )
    whole.save(str(source))
    model = lod.decompose(hf.AutoModel.from_pretrained(source), ranks=0.4)
    huggingface.save_pretrained(model, small)
    complete_directory(small, source)
    lines = [line for line in LINES if line]

    encoder = st.SentenceTransformer(str(small))
    found = encoder.encode(lines)
    by_hand = st.SentenceTransformer(str(source))
    vars(by_hand[0])["_modules"]["model" if "model" in by_hand[0]._modules else "auto_model"] = (
        model.eval()
    )
    np.testing.assert_allclose(found, by_hand.encode(lines), atol=1e-5)
    assert abs(found - whole.encode(lines)).max() > 1e-3
    encoder.save(str(tmp_path / "again"))
    again = st.SentenceTransformer(str(tmp_path / "again"))
    np.testing.assert_allclose(again.encode(lines), found, atol=1e-5)
    evaluate = EmbeddingSimilarityEvaluator(lines, lines[::-1], [0.1, 0.9, 0.3])
    assert -1 <= evaluate(encoder)[evaluate.primary_metric] <= 1
