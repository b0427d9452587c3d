"""Directories of compressed models in the hands of transformers itself, and of its relatives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import maestro_lod as lod
from maestro_lod.errors import CheckpointError, LayerError, OptionError

hf = pytest.importorskip("transformers")
from maestro_lod.integrations import huggingface  # noqa: E402
from tests.integrations.test_huggingface import ZOO, distance, run  # noqa: E402
from tests.support.directories import write_bert, write_llama  # noqa: E402

AUTO = {
    "bert": "AutoModelForMaskedLM",
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "qwen2": "AutoModelForCausalLM",
    "t5": "AutoModelForSeq2SeqLM",
    "whisper": "AutoModelForSpeechSeq2Seq",
    "vit": "AutoModelForImageClassification",
    "mixtral": "AutoModelForCausalLM",
    "clip": "AutoModel",
    "wav2vec2": "AutoModelForCTC",
}
FORMS = ["low-rank", "extracted"]
TOLERANCE = 1e-5


def compressed(name: str, form: str = "low-rank", **options: Any) -> Any:
    """A model with ranks that differ from layer to layer."""
    torch.manual_seed(0)
    model = ZOO[name]()
    full = lod.survey(model, **options).ranks
    ranks = {n: 1 + (rank // 4 + i) % max(rank // 2, 1) for i, (n, rank) in enumerate(full.items())}
    lod.decompose(model, ranks=ranks, **options)
    assert len({*lod.ranks(model).values()}) > 1
    return lod.extract(model) if form == "extracted" else model


def load_stock(name: str, directory: Path, **options: Any) -> Any:
    return getattr(hf, AUTO[name]).from_pretrained(directory, **options)


# -- loading and saving ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", AUTO)
def test_transformers_loads_and_saves_what_we_saved(name: str, form: str, tmp_path: Path) -> None:
    model, inputs = compressed(name, form), ZOO[name].inputs()
    expected = run(model, inputs)
    huggingface.save_pretrained(model, tmp_path / "ours")
    loaded = load_stock(name, tmp_path / "ours")
    assert type(loaded).__name__ == type(model).__name__
    assert lod.ranks(loaded) == lod.ranks(model)
    assert distance(expected, run(loaded, inputs)) <= TOLERANCE
    loaded.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    for again in (load_stock(name, tmp_path / "theirs"), lod_load(tmp_path / "theirs")):
        assert distance(expected, run(again, inputs)) <= TOLERANCE


def lod_load(directory: Path, **options: Any) -> Any:
    return huggingface.from_pretrained(directory, **options)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "qwen2", "vit", "mixtral"])
def test_a_model_without_the_head_takes_its_part(name: str, tmp_path: Path) -> None:
    model, inputs = compressed(name), ZOO[name].inputs()
    inputs.pop("labels")
    huggingface.save_pretrained(model, tmp_path)
    base = hf.AutoModel.from_pretrained(tmp_path)
    expected, found = run(model.base_model, inputs), run(base, inputs)
    assert expected
    assert distance(expected, {key: found[key] for key in expected}) <= TOLERANCE


def test_a_model_with_another_head_takes_the_body(tmp_path: Path) -> None:
    model, inputs = compressed("bert").bert, ZOO["bert"].inputs()
    inputs.pop("labels")
    huggingface.save_pretrained(model, tmp_path)
    classifier = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    expected, found = run(model, inputs), run(classifier.bert, inputs)
    found = {key: value for key, value in found.items() if key in expected}
    assert found
    assert distance({key: expected[key] for key in found}, found) <= TOLERANCE


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "bert"])
def test_a_shared_head_survives(name: str, tmp_path: Path) -> None:
    model, inputs = compressed(name, tied="share"), ZOO[name].inputs()
    huggingface.save_pretrained(model, tmp_path / "ours")
    loaded = load_stock(name, tmp_path / "ours")
    loaded.save_pretrained(tmp_path / "theirs")
    for again in (loaded, load_stock(name, tmp_path / "theirs"), lod_load(tmp_path / "theirs")):
        assert distance(run(model, inputs), run(again, inputs)) <= TOLERANCE


def test_what_is_done_after_loading_is_saved_too(tmp_path: Path) -> None:
    inputs = ZOO["llama"].inputs()
    huggingface.save_pretrained(compressed("llama"), tmp_path / "ours")
    loaded = load_stock("llama", tmp_path / "ours")
    plain = lod.extract(loaded, 2)
    plain.save_pretrained(tmp_path / "plain")
    assert distance(run(plain, inputs), run(load_stock("llama", tmp_path / "plain"), inputs)) == 0
    expected = run(loaded, inputs)
    loaded.dequantize()
    loaded.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    dense = load_stock("llama", tmp_path / "dense")
    assert lod.ranks(dense) == {}
    assert distance(expected, run(dense, inputs)) <= TOLERANCE


def test_a_half_precision_model_stays_one(tmp_path: Path) -> None:
    inputs = ZOO["llama"].inputs()
    huggingface.save_pretrained(compressed("llama").to(torch.bfloat16), tmp_path)
    loaded = load_stock("llama", tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert distance(run(lod_load(tmp_path), inputs), run(loaded, inputs)) == 0.0
    assert load_stock("llama", tmp_path, dtype=torch.float32).dtype == torch.float32


def test_a_smaller_size_reads_fewer_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from maestro_lod.files import tensor_file

    model, inputs = compressed("llama"), ZOO["llama"].inputs()
    huggingface.save_pretrained(model, tmp_path)
    counts = []
    read = tensor_file.TensorFile.read

    def counted(*arguments: Any) -> Any:
        found = read(*arguments)
        counts.append(found.nbytes)
        return found

    monkeypatch.setattr(tensor_file.TensorFile, "read", counted)
    small = lod_load(tmp_path, ranks=1)
    state = {key: value for key, value in small.state_dict().items()}
    assert sum(counts) == sum(value.nbytes for value in state.values())
    assert set(lod.ranks(small).values()) == {1}
    with lod.at_ranks(model, 1):
        assert distance(run(model, inputs), run(small, inputs)) <= TOLERANCE


def test_a_directory_of_the_first_version_is_read(tmp_path: Path) -> None:
    model, inputs = compressed("llama"), ZOO["llama"].inputs()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    lod.save(model, tmp_path / "lod.safetensors")
    assert distance(run(model, inputs), run(lod_load(tmp_path), inputs)) == 0.0
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        load_stock("llama", tmp_path)
    huggingface.save_pretrained(model, tmp_path)
    assert not (tmp_path / "lod.safetensors").exists()
    assert distance(run(model, inputs), run(load_stock("llama", tmp_path), inputs)) == 0.0


# -- relatives -------------------------------------------------------------------------------------


def test_pipelines_compute_what_the_model_does(tmp_path: Path) -> None:
    for write, task in ((write_llama, "text-generation"), (write_bert, "feature-extraction")):
        source, out = write(tmp_path / task), tmp_path / f"{task}-small"
        auto = hf.AutoModelForCausalLM if task == "text-generation" else hf.AutoModel
        model = lod.decompose(auto.from_pretrained(source), ranks=0.5)
        huggingface.save_pretrained(model, out)
        tokenizer = hf.AutoTokenizer.from_pretrained(source)
        tokenizer.save_pretrained(out)
        pipe = hf.pipeline(task, model=str(out))
        ids = tokenizer("the cat sat on", return_tensors="pt")
        if task == "feature-extraction":
            with torch.no_grad():
                expected = model.eval()(**ids).last_hidden_state
            found = torch.tensor(pipe("the cat sat on"))
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
        else:
            options = {"do_sample": False, "max_new_tokens": 5}
            written = model.eval().generate(**ids, **options)
            found = pipe("the cat sat on", return_tensors=True, **options)
            assert found[0]["generated_token_ids"] == written[0].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_a_trainer_tunes_resumes_and_saves(form: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    rows = [{key: value[0] for key, value in ZOO["llama"].inputs().items()} for _ in range(4)]
    huggingface.save_pretrained(compressed("llama", form), tmp_path / "ours")

    def trained(steps: int, resume: bool) -> Any:
        arguments = hf.TrainingArguments(
            str(tmp_path / "run"), max_steps=steps, use_cpu=True, report_to=[], save_steps=2,
            disable_tqdm=True, dataloader_pin_memory=False, learning_rate=0.05,
        )  # fmt: skip
        trainer = hf.Trainer(load_stock("llama", tmp_path / "ours"), arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    inputs = ZOO["llama"].inputs()
    trained(2, False)
    trainer = trained(4, True)
    trainer.save_model(tmp_path / "saved")
    expected = run(trainer.model, inputs)
    assert distance(expected, run(load_stock("llama", tmp_path / "ours"), inputs)) > 1e-3
    for directory in (tmp_path / "saved", tmp_path / "run" / "checkpoint-4"):
        assert distance(expected, run(load_stock("llama", directory), inputs)) <= TOLERANCE
        assert distance(expected, run(lod_load(directory), inputs)) <= TOLERANCE


LORA = {
    "low-rank": {"target_modules": [], "target_parameters": ["q_proj.u", "v_proj.u"]},
    "extracted": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_lora_on_top(name: str, form: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    inputs = ZOO[name].inputs()
    huggingface.save_pretrained(compressed(name, form), tmp_path / "base")
    options = LORA[form]
    if name == "gpt2" and form == "low-rank":
        options = {"target_modules": [], "target_parameters": ["c_attn.u", "c_fc.u"]}
    base = load_stock(name, tmp_path / "base")
    before = run(base, inputs)
    tuned = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2, **options))
    assert distance(before, run(tuned, inputs)) <= TOLERANCE
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        tuned.train()(**inputs).loss.backward()
        optimizer.step()
    after = run(tuned, inputs)
    assert distance(before, after) > 1e-3
    tuned.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        load_stock(name, tmp_path / "base"), tmp_path / "adapter"
    )
    assert distance(after, run(again, inputs)) <= TOLERANCE
    merged = again.merge_and_unload()
    assert distance(after, run(merged, inputs)) <= TOLERANCE
    merged.save_pretrained(tmp_path / "merged")
    assert distance(after, run(load_stock(name, tmp_path / "merged"), inputs)) <= TOLERANCE


# -- without this library --------------------------------------------------------------------------

ALONE = """
import json, os, sys
sys.modules["maestro_lod"] = None  # importing it fails
import torch, transformers
from safetensors.torch import save_file
from pathlib import Path

transformers.logging.set_verbosity_error()
report = {}
for name, (auto, directory, trusted) in json.loads(Path(sys.argv[1]).read_text()).items():
    inputs = torch.load(Path(directory) / "inputs.pt", weights_only=True)
    load = getattr(transformers, auto).from_pretrained
    try:
        model = load(directory, trust_remote_code=True) if trusted else load(directory)
    except Exception as error:
        report[name] = f"{type(error).__name__}: {error}"
        continue
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = model(**inputs, return_dict=True)
    found = {k: v.contiguous().clone() for k, v in outputs.items() if isinstance(v, torch.Tensor)}
    save_file(found, Path(directory) / "outputs.safetensors")
    params = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    report[name] = params
print(json.dumps(report))
"""


def in_a_process_without_us(
    cases: dict[str, tuple[str, Path, bool]], tmp_path: Path
) -> dict[str, Any]:
    """Load directories by transformers alone; return what went wrong, or the parameters."""
    (tmp_path / "cases.json").write_text(json.dumps(cases, default=str))
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", ALONE, str(tmp_path / "cases.json")],
        capture_output=True, text=True, check=False,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
def test_without_this_library(tmp_path: Path) -> None:
    cases: dict[str, tuple[str, Path, bool]] = {}
    outputs, sizes = {}, {}
    for name, auto in AUTO.items():
        torch.manual_seed(0)
        inputs = ZOO[name].inputs()
        for form in FORMS:
            model = compressed(name, form)
            directory = tmp_path / name / form
            huggingface.save_pretrained(model, directory)
            torch.save(inputs, directory / "inputs.pt")
            cases[f"{name} {form}"] = (auto, directory, False)
            if form == "low-rank":
                cases[f"{name} trusted"] = (auto, directory, True)
                outputs[name] = run(model, inputs)
                sizes[name] = sum(p.numel() for p in model.parameters())
                dense = tmp_path / name / "dense"
                lod.fuse(model, by=dict.fromkeys(lod.ranks(model), "dense")).save_pretrained(dense)
                torch.save(inputs, dense / "inputs.pt")
                cases[f"{name} dense"] = (auto, dense, False)
    report = in_a_process_without_us(cases, tmp_path)
    for name in AUTO:
        for form in FORMS:  # never random weights
            assert "mismatch" in str(report[f"{name} {form}"]), (name, report[f"{name} {form}"])
        found = {"dense": tmp_path / name / "dense"}
        if name == "mixtral":  # the modelling file has no stacked experts
            assert "mismatch" in str(report[f"{name} trusted"]), report[f"{name} trusted"]
        else:
            assert report[f"{name} trusted"] == sizes[name]
            found["trusted"] = tmp_path / name / "low-rank"
        for directory in found.values():
            result = load_file(directory / "outputs.safetensors")
            expected = {key: value for key, value in outputs[name].items() if key[1:] in result}
            assert expected
            actual = {f".{key}": value for key, value in result.items() if f".{key}" in expected}
            assert distance(expected, actual) <= TOLERANCE, (name, directory)


def test_trusted_code_leaves_the_work_to_the_library_if_it_is_there(tmp_path: Path) -> None:
    model, inputs = compressed("llama"), ZOO["llama"].inputs()
    huggingface.save_pretrained(model, tmp_path)
    loaded = load_stock("llama", tmp_path, trust_remote_code=True)
    assert lod.ranks(loaded) == lod.ranks(model)
    assert distance(run(model, inputs), run(loaded, inputs)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("first", ["maestro_lod", "transformers"])
def test_either_may_be_imported_first_and_neither_imports_the_other(
    first: str, tmp_path: Path
) -> None:
    huggingface.save_pretrained(compressed("llama"), tmp_path)
    second = {"maestro_lod": "transformers", "transformers": "maestro_lod"}[first]
    code = f"""
import sys
import {first}
assert {second!r} not in sys.modules
if {first!r} == "maestro_lod":
    assert "torch" not in sys.modules
else:
    from transformers import AutoModelForCausalLM
import {second}
import maestro_lod, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
assert maestro_lod.ranks(model)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- what cannot be loaded -------------------------------------------------------------------------


def damaged(directory: Path, change: dict[str, Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= change
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("form", FORMS)
def test_missing_and_wrong_tensors_are_refused(form: str, tmp_path: Path) -> None:
    huggingface.save_pretrained(compressed("llama", form), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    factor = next(
        name for name in sorted(tensors) if name.startswith("model.layers.0.mlp.up_proj.")
    )
    for key in (factor, "model.norm.weight"):
        rest = {name: value for name, value in tensors.items() if name != key}
        save_file(rest, tmp_path / "model.safetensors")
        for load in (load_stock, lambda _, where: lod_load(where)):
            with pytest.raises(CheckpointError, match=f"missing: {key}"):
                load("llama", tmp_path)
        save_file(rest | {key: tensors[key][:-1].clone()}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"of another shape: {key}"):
            load_stock("llama", tmp_path)


def test_a_damaged_description_is_refused(tmp_path: Path) -> None:
    huggingface.save_pretrained(compressed("llama"), tmp_path)
    good = (tmp_path / "config.json").read_text()
    layer = "model.layers.0.mlp.up_proj"
    cases = [
        ({"version": 2}, "has version 2"),
        ({"layers": {layer: {"form": "low-rank", "rank": "two"}}}, "is damaged"),
        ({"layers": {layer: {"form": "low-rank", "rank": -1}}}, "is damaged"),
        ({"layers": {layer: {"form": "folded"}}}, "is damaged"),
        ({"layers": []}, "is damaged"),
        ({"layers": {"model.nothing": {"form": "low-rank", "rank": 2}}}, "of another model"),
    ]
    for change, match in cases:
        damaged(tmp_path, change)
        for load in (load_stock, lambda _, where: lod_load(where)):
            with pytest.raises(CheckpointError, match=match):
                load("llama", tmp_path)
        (tmp_path / "config.json").write_text(good)


def test_what_no_model_can_have_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    huggingface.save_pretrained(compressed("llama"), tmp_path)
    good = (tmp_path / "config.json").read_text()
    layer = {"form": "low-rank", "rank": 2**40}
    damaged(tmp_path, {"layers": {"model.layers.0.mlp.up_proj": layer}})
    with pytest.raises(CheckpointError, match=r"has rank 1099511627776, and at most \d+ ranks\.$"):
        lod_load(tmp_path)
    for change in ({"vocab_size": -7}, {"hidden_act": "none"}):
        (tmp_path / "config.json").write_text(json.dumps(json.loads(good) | change))
        with pytest.raises(CheckpointError, match="describes a model that cannot be built"):
            lod_load(tmp_path)


def test_what_is_not_offered_is_refused(tmp_path: Path) -> None:
    from maestro_lod.integrations.model_texts import open_model
    from maestro_lod.integrations.quantizer import LowRankConfig

    dense = write_llama(tmp_path / "dense")
    with pytest.raises(LayerError, match="cannot compress a model while it is loaded"):
        hf.AutoModelForCausalLM.from_pretrained(dense, quantization_config=LowRankConfig())
    huggingface.save_pretrained(compressed("llama", "extracted"), tmp_path / "plain")
    with pytest.raises(OptionError, match="holds one size"):
        lod_load(tmp_path / "plain", ranks=2)
    with pytest.raises(CheckpointError, match="holds a compressed model"):
        open_model(tmp_path / "plain")
    with pytest.raises(LayerError, match="no low-rank layer that could be multiplied out"):
        load_stock("llama", tmp_path / "plain").dequantize()
