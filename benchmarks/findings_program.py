"""Findings of the second review that a user meets through `lod`: 1 to 7, 10, 11 and 15 to 19."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from probes import ROOT, SECOND, Fault, expect, lod, of, one_line, probe, trained

consent = partial(probe, review=SECOND, kind="code runs without consent")
wrong = partial(probe, review=SECOND, kind="wrong result, exit code 0")
lost = partial(probe, review=SECOND, kind="lost or stuck")
foreign = partial(probe, review=SECOND, kind="errors of others, or that mislead")

CODE = "import pathlib; (pathlib.Path(__file__).parent / 'trace').touch()\n"


# -- 1 and 2: code runs without consent ------------------------------------------------------------


def hostile_run(code: str = "") -> Path:
    """Make a directory whose parts are all built in, with a module as safetensors is called."""
    place = Path("evil")
    place.mkdir()
    (place / "safetensors.py").write_text(CODE)
    (place / "config.yaml").write_text(f"model: lenet\ndata: digits\nepochs: 1\n{code}")
    (place / "result.json").write_text("{}")
    return place


@consent(
    1,
    "`code:` beside built-in parts puts a folder first on the search path",
    "cli/test_user_code.py::test_no_folder_is_searched_for_parts_that_are_built_in",
)
def _() -> None:
    place = hostile_run(f"code: {Path('evil').absolute()}\n")
    ran = []
    for command in ("summary", "frontier", "bench", "resume"):
        lod(command, str(place), where=".")
        if (place / "trace").exists():
            ran.append(command)
            (place / "trace").unlink()
    expect(not ran, f"run by {', '.join(ran)}")


@consent(
    2,
    "the working directory is first on the search path",
    "cli/test_user_code.py::test_the_program_does_not_import_from_where_it_is_started",
)
def _() -> None:
    place = hostile_run()
    lod("summary", ".", where=str(place))
    expect(not (place / "trace").exists(), "its safetensors.py was run")


# -- 3 to 7: wrong results of compress and heal ----------------------------------------------------

COMPRESS = ["--data", "texts.txt", "--batches", "2", "--max-params", "0.9", "--share-tied"]


def tests_directories() -> Any:
    sys.path.append(str(ROOT))
    from tests.support import directories

    return directories


def texts() -> None:
    Path("texts.txt").write_text("the cat sat on a mat and a dog ran far away\n" * 200)


def encoder() -> Path:
    texts()
    place: Path = tests_directories().write_bert(Path("model"))
    return place


def language_model() -> Path:
    texts()
    place: Path = tests_directories().write_llama(Path("model"))
    return place


def compress(*arguments: str, data: list[str] = COMPRESS) -> Any:
    return lod("compress", "model", *data, "--out", "small", *arguments)


def changed_tensors(change: Callable[[dict[str, Any]], object]) -> None:
    from safetensors.torch import load_file, save_file

    file = encoder() / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@wrong(
    3,
    "`lod compress` fills tensors that are missing at random",
    "integrations/test_model_texts.py::test_tensors_that_do_not_fit_are_refused_by_name",
)
def _() -> None:
    key = "encoder.layer.0.attention.self.query.weight"
    changed_tensors(lambda tensors: tensors.pop(key))
    done = compress(data=[*COMPRESS[:-1], "--no-correction"])
    expect(done.returncode != 0 and key in done.stderr, "exit code 0")


@wrong(
    3,
    "`lod compress` leaves out tensors that are foreign",
    "integrations/test_model_texts.py::test_tensors_that_do_not_fit_are_refused_by_name",
)
def _() -> None:
    changed_tensors(lambda tensors: tensors.update(foreign=torch.ones(2)))
    done = compress(data=[*COMPRESS[:-1], "--no-correction"])
    expect(done.returncode != 0 and "foreign" in done.stderr, "exit code 0")


def weights_elsewhere(name: str) -> None:
    """Let the index name another file for all weights."""
    from safetensors.torch import load_file, save_file

    place, tensors = language_model(), dict[str, Any]()
    for shard in place.glob("*.safetensors"):  # which stay, so that not all is pickled
        tensors |= load_file(shard)
    if name.endswith(".bin"):
        torch.save(tensors, place / name)
    else:
        save_file(tensors, place / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


@wrong(
    4,
    "an index lets pickled weights be read",
    "integrations/test_model_texts.py::test_an_index_names_safetensors_files_of_its_directory_alone",
)
def _() -> None:
    weights_elsewhere("w.bin")
    expect(compress().returncode != 0, "exit code 0")


@wrong(
    4,
    "an index lets files outside of the directory be read",
    "integrations/test_model_texts.py::test_an_index_names_safetensors_files_of_its_directory_alone",
)
def _() -> None:
    weights_elsewhere("../outside.safetensors")
    expect(compress().returncode != 0, "exit code 0")


@wrong(
    6,
    "`lod heal` reports losses of different sizes, and has no `--lr`",
    "cli/test_compressing.py::"
    "test_distillation_reports_one_size_before_and_after_and_keeps_the_better",
)
def _() -> None:
    language_model()
    assert compress().returncode == 0
    distill = ["distill", "small", "--teacher", "model", *COMPRESS[:4], "--steps", "3", "--out"]
    done = lod(*distill, "distilled")
    assert done.returncode == 0, done.stderr
    expect("before" in done.stdout and "after" in done.stdout, "first and last step are compared")
    done = lod(*distill, "again", "--lr", "3.0")
    expect(done.returncode == 0 and "weights from before are kept" in done.stdout, "it is not said")


@wrong(
    7,
    "`lod compress` says nothing about quality",
    "cli/test_compressing.py::test_the_quality_before_and_after_and_the_way_out_are_printed",
)
def _() -> None:
    language_model()
    done = compress()
    assert done.returncode == 0, done.stderr
    expect("perplexity" in done.stdout, "no word")


@wrong(
    7,
    "`lod deploy` of a size that is much worse says nothing",
    "cli/test_trained.py::test_a_size_that_is_worse_says_so_and_what_helps",
)
def _() -> None:
    sets = ["epochs=4", "budget.params=25%", "threads=1"]
    options = [part for change in sets for part in ("--set", change)]
    assert lod("train", "digits", "--out", "run", *options).returncode == 0
    done = lod("deploy", "run", "--max-params", "3%", "--to", "safetensors", "--out", "phone")
    assert done.returncode == 0, done.stderr
    expect("worse" in done.stdout, "no word")


# -- 10 and 11: verify and compare -----------------------------------------------------------------


@wrong(
    10,
    "`lod verify` passes a deployed file with a flipped byte",
    "files/test_digests.py::test_a_damaged_deployed_file_is_named_in_one_line",
)
def _() -> None:
    run = trained()
    done = lod("deploy", str(run), "--to", "pt2", "--out", "phone")
    assert done.returncode == 0, done.stderr
    (file,) = Path("phone").glob("*.pt2")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    expect(lod("verify", "phone").returncode == 1, "exit code 0 or 2")


@wrong(
    11,
    "`lod compare` names an unknown method after training the others",
    "baselines/test_compare.py::test_an_unknown_method_is_refused_before_anything_starts",
)
def _() -> None:
    sets = ["data.limit=60", "epochs=1", "threads=1"]
    options = [part for change in sets for part in ("--set", change)]
    lod(
        "compare",
        "digits",
        "--methods",
        "dense,narow",
        "--sizes",
        "0.5",
        "--lr-trials",
        "1",
        "--out",
        "compared",
        *options,
    )
    expect(not Path("compared").exists(), "the other method was trained")


# -- 15 to 17: lost or stuck -----------------------------------------------------------------------

KILLED = """
import os
import maestro_lod.integrations.huggingface as saving
real = saving.save_pretrained
def killed(*arguments, **options):
    real(*arguments, **options)
    os._exit(137)
saving.save_pretrained = killed
"""
NO_EXPORT = """
try:
    import maestro_lod.cli.commands.compressing as compressing
except ModuleNotFoundError:
    import maestro_lod.app.commands.compressing as compressing
def failed(*arguments, **options):
    raise compressing.OptionError('no export')
compressing.export = failed
"""
MINE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 10))

def data(batch):
    torch.manual_seed(1)
    pairs = [(torch.randn(batch, 12), torch.randint(10, (batch,))) for _ in range(4)]
    return {"train": pairs, "validation": pairs[:1]}

def graph():
    return torch.fx.symbolic_trace(build())

def on_meta():
    return build().to("meta")
"""


def own_recipe(**parts: str) -> None:
    Path("mine.py").write_text(MINE)
    settings = {"model": "mine:build", "data": "mine:data", "epochs": "1"} | parts
    Path("mine.yaml").write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))


@lost(
    15,
    "a kill while `lod compress` writes: the same command is refused",
    "cli/test_compressing.py::test_a_killed_command_goes_on",
)
def _() -> None:
    language_model()
    arguments = ["compress", "model", *COMPRESS, "--out", "small"]
    assert lod(*arguments, before=KILLED).returncode == 137
    expect(lod(*arguments).returncode == 0, "it is refused")
    expect(not Path("small.unfinished").exists(), "small.unfinished stays")


@lost(
    15,
    "a failed `--to onnx` fills the directory halfway",
    "cli/test_compressing.py::test_a_failed_export_leaves_no_directory_and_no_lost_work",
)
def _() -> None:
    own_recipe()
    done = lod(
        "compress",
        "mine.yaml",
        "--max-params",
        "0.6",
        "--out",
        "small",
        "--to",
        "safetensors",
        "--to",
        "onnx",
        before=NO_EXPORT,
    )
    assert done.returncode == 2, done.stderr
    expect(not Path("small").exists(), "it is there")


def tuned() -> None:
    sets = ["data.limit=48", "batch=24", "epochs=1", "threads=1", "penalty=0.3"]
    options = [part for change in sets for part in ("--set", change)]
    limits = [
        "--max-params",
        "30000",
        "--min-accuracy",
        "0.99",
        "--largest",
        "2",
        "--smallest",
        "0.9",
    ]
    command = ["tune", "digits", *options, *limits, "--out", "search"]
    storage = f"sqlite:///{Path('search.db').absolute()}"
    if not Path("search.db").exists():
        lod(*command, "--storage", storage)
        assert Path("search.db").exists()
    one_line(*command, "--storage", storage, seconds=40)


def changed_search(command: str) -> None:
    tuned()
    with closing(sqlite3.connect("search.db")) as base, base:
        base.execute(command)


@lost(
    16,
    "`lod tune` waits for ever where attributes of trials are gone",
    "cli/test_tuning_trials.py::test_a_damaged_search_is_refused_and_not_waited_for",
)
def _() -> None:
    changed_search("DELETE FROM trial_user_attributes")
    tuned()


@lost(
    16,
    "a λ in the search that is no number",
    "cli/test_tuning_trials.py::test_a_damaged_search_is_refused_and_not_waited_for",
)
def _() -> None:
    changed_search("UPDATE trial_params SET param_value = 'NaN'")
    tuned()


@lost(
    16,
    "`lod tune --storage /dev/zero` reads until memory is gone",
    "cli/test_tuning_trials.py::test_what_cannot_be_a_journal_is_never_read",
)
def _() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))"
    done = lod(
        "tune",
        "digits",
        "--max-params",
        "30000",
        "--min-accuracy",
        "0.9",
        "--storage",
        "/dev/zero",
        "--largest",
        "2",
        "--out",
        "search",
        before=limit,
    )
    expect("not a regular file" in done.stderr, "it is read")


@lost(
    16,
    "a line of text comes to the tokenizer as a whole, however long it is",
    "integrations/test_model_texts.py::test_a_long_text_comes_in_pieces_that_together_are_it",
)
def _() -> None:
    read_texts = of("integrations.model_texts.read_texts", "pretrained.directory.read_texts")
    Path("long.txt").write_text("a word " * 100_000)
    longest = max(map(len, read_texts(Path("long.txt"))))
    expect(longest < 2**17, f"{longest:,} characters at once")


@lost(
    17,
    "a kill behind `result.json` leaves a lock that nothing clears",
    "cli/test_cli.py::test_resume_of_a_finished_run_removes_what_a_kill_left",
)
def _() -> None:
    run = trained()
    (run / ".lock").write_text("process 1 on elsewhere")
    lod("resume", str(run))
    expect(not (run / ".lock").exists(), "it stays")


@lost(
    17,
    "links in a run directory are written through",
    "files/test_atomic.py::test_permissions_stay_and_links_are_replaced",
)
def _() -> None:
    run, reached = trained(), []
    for name, command in (("report.html", "report"), ("frontier.json", "frontier")):
        outside = Path(f"outside-{name}")
        outside.write_text("{}")
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside.absolute())
        lod(command, str(run))
        if outside.read_text() != "{}":
            reached.append(name)
    expect(not reached, f"written through: {', '.join(reached)}")


# -- 18: errors of others --------------------------------------------------------------------------

HOSTILE = "cli/test_hostile.py::test_what_somebody_else_made_is_opened_safely"


def tracebacks(attempts: dict[str, Callable[[], object]]) -> None:
    """Expect one line of each attempt, and name those that end in something else."""
    failed = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except Fault:
            failed.append(name)
    expect(not failed, f"a traceback: {', '.join(failed)}")


def compress_changed(file: str, content: bytes | None = None, **changes: Any) -> None:
    shutil.rmtree("model", ignore_errors=True)
    shutil.rmtree("small", ignore_errors=True)
    encoder()
    path = Path("model") / file
    if content is None:
        content = json.dumps(json.loads(path.read_text()) | changes).encode()
    path.write_bytes(content)
    one_line("compress", "model", *COMPRESS[:-1], "--no-correction", "--out", "small")


@foreign(18, "odd values in `config.json`", HOSTILE)
def _() -> None:
    config = "config.json"
    tracebacks(
        {
            "hidden_size text": lambda: compress_changed(config, hidden_size="x"),
            "num_hidden_layers -7": lambda: compress_changed(config, num_hidden_layers=-7),
            "vocab_size null": lambda: compress_changed(config, vocab_size=None),
            "model_type list": lambda: compress_changed(config, model_type=[[]]),
            "architectures number": lambda: compress_changed(config, architectures=3),
            "dtype object": lambda: compress_changed(config, torch_dtype={"a": 1}, dtype={"a": 1}),
            "deep": lambda: compress_changed(config, b"[" * 200_000),
        }
    )


@foreign(18, "odd tokenizer and index files", HOSTILE)
def _() -> None:
    tracebacks(
        {
            "tokenizer.json list": lambda: compress_changed("tokenizer.json", b"[1, 2]"),
            "tokenizer.json half": lambda: compress_changed("tokenizer.json", b'{"a": ['),
            "tokenizer_config.json list": lambda: compress_changed("tokenizer_config.json", b"[1]"),
            "index list": lambda: compress_changed("model.safetensors.index.json", b"[1]"),
        }
    )


@foreign(
    18, "odd texts", "integrations/test_model_texts.py::test_files_that_hold_no_texts_are_refused"
)
def _() -> None:
    encoder()
    for name, content in (
        ("no.txt", b"\xff\xfe\x00"),
        ("number.jsonl", b"3\n"),
        ("no.parquet", b"PAR1"),
    ):
        Path(name).write_bytes(content)
    tracebacks(
        {
            name: lambda name=name: one_line(
                "compress", "model", "--data", name, *COMPRESS[2:-1], "--out", "small"
            )
            for name in ("no.txt", "number.jsonl", "no.parquet")
        }
    )


@foreign(18, "run files with other types of JSON", HOSTILE)
def _() -> None:
    run = trained()
    result = json.loads((run / "result.json").read_text())

    def changed(file: str, content: str, *commands: str) -> None:
        shutil.rmtree("odd", ignore_errors=True)
        shutil.copytree(run, "odd")
        (Path("odd") / file).write_text(content)
        for command in commands or ("report",):
            one_line(command, "odd")

    attempts: dict[str, Callable[[], object]] = {
        "metrics.jsonl": lambda: changed("metrics.jsonl", "[1]\n"),
        "environment.json": lambda: changed("environment.json", "[" * 100_000),
        "frontier.json": lambda: changed("frontier.json", '{"points": 3}'),
    }
    for content in ("[1]", "3", "null", json.dumps(result | {"full_ranks": -7})):
        attempts[f"result.json {content[:4]}"] = partial(
            changed, "result.json", content, "summary", "report"
        )
    tracebacks(attempts)


@foreign(18, "YAML that is deep, or contains itself", HOSTILE)
def _() -> None:
    run = trained()

    def changed(text: str) -> None:
        (run / "config.yaml").write_text(text)
        one_line("report", str(run))

    tracebacks(
        {
            "recursive": lambda: changed("&a {model: *a, data: *a, epochs: 1}"),
            "deep": lambda: changed("epochs: " + "[" * 5000),
            "deep but closed": lambda: changed("epochs: " + "[" * 200 + "]" * 200),
            "binary": lambda: changed("epochs: !!timestamp no"),
        }
    )


@foreign(
    18,
    "damaged `failed.json` of a comparison",
    "baselines/test_compare.py::test_files_of_runs_that_are_damaged_are_one_line",
)
def _() -> None:
    sets = ["data.limit=60", "epochs=1", "threads=1"]
    options = [part for change in sets for part in ("--set", change)]
    command = [
        "compare",
        "digits",
        "--methods",
        "dense",
        "--sizes",
        "0.5",
        "--lr-trials",
        "1",
        "--out",
        "compared",
        *options,
    ]
    assert lod(*command).returncode == 0
    (run,) = Path("compared/runs").iterdir()
    (run / "failed.json").write_text("[1]")
    one_line(*command)


@foreign(
    18,
    "fx graphs and models on the meta device",
    "cli/test_compressing.py::test_graphs_are_compressed_and_models_without_values_are_one_line",
)
def _() -> None:
    def attempt(name: str) -> None:
        own_recipe(model=f"mine:{name}")
        one_line("compress", "mine.yaml", "--max-params", "0.6", "--out", f"small-{name}")

    tracebacks({name: partial(attempt, name) for name in ("graph", "on_meta")})


@foreign(18, "NUL in paths", "cli/test_hostile.py::test_what_somebody_else_made_is_opened_safely")
def _() -> None:
    Path("nul.yaml").write_text(
        'data: {name: digits, directory: "a\\0b"}\nmodel: lenet\nepochs: 1\ncode: "a\\0b"\n'
    )
    one_line("train", "nul.yaml", "--out", "run")


# -- 19: messages that mislead ---------------------------------------------------------------------


@foreign(
    19,
    "a hub id given to `lod compress` is taken for a recipe",
    "cli/test_compressing.py::test_mistakes_are_one_line_and_exit_code_two_or_one",
)
def _() -> None:
    texts()
    done = lod("compress", "meta/Small-1B", *COMPRESS, "--out", "small")
    expect("hf download" in done.stderr, "nothing about a download")


@foreign(
    19,
    "`cancer.model` does not suggest `cancer:model`",
    "cli/test_cli.py::test_wrong_input_is_one_clear_line_and_nothing_is_written",
)
def _() -> None:
    own_recipe(model="mine.build")
    done = lod("train", "mine.yaml", "--out", "run")
    expect("mine:build" in done.stderr, "it does not")


@foreign(
    19,
    "`budget.params=25` does not suggest `25%`",
    "train/test_budget.py::test_a_budget_that_cannot_be_met_is_refused",
)
def _() -> None:
    done = lod("train", "digits", "--set", "budget.params=25", "--set", "data.limit=60")
    expect(done.returncode == 2 and "25%" in done.stderr, "it does not")
