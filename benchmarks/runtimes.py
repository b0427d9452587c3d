"""Measure dense and low-rank models of equal size in the runtimes that run them.

    python benchmarks/runtimes.py [--rounds 15] [--only LSTM]

Random weights, one thread, batches of 1 and 16. Each form has about the given share of the dense
parameters. Files are verified against the model; times are relative to the dense model in the same
runtime, within the same rounds. Runtimes that are not installed are left out. The results are the
table of docs/deploy.md.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from interleaved import seconds, write
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.deploy.export import export, open_runner
from maestro_lod.model.cost import count_params
from maestro_lod.model.inputs import ModelInputs

PAGE = Path(__file__).parents[1] / "docs" / "deploy.md"
START, END = "<!-- benchmarks/runtimes.py -->\n", "<!-- end -->\n"
SHARE = 0.3
BATCHES = (1, 16)
FORMS = ("factored",)  # of all layers that are not dense
FILES = {"onnxruntime": "onnx", "executorch": "pte"}
RUNTIMES = ("eager", "onnxruntime", "executorch", "openvino")
_TOLERANCE = 1e-4


class Encoder(nn.Module):
    """A Transformer encoder over vectors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class SentenceEncoder(nn.Module):
    """The shape of MiniLM: 6 layers of 384 units, 12 heads, 30,522 tokens, means over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(30522, 384), nn.Embedding(512, 384)
        self.norm = nn.LayerNorm(384)
        layer = nn.TransformerEncoderLayer(384, 12, 1536, dropout=0.0, batch_first=True,
                                           activation="gelu")  # fmt: skip
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.norm(self.tokens(ids) + self.positions(places))
        return nn.functional.normalize(self.encoder(hidden).mean(1), dim=-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, 256, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "LeNet": (lod.MODELS["lenet"], floats(1, 28, 28)),
    "ResNet-18 (CIFAR)": (lod.MODELS["resnet18"], floats(3, 32, 32)),
    "Transformer encoder": (Encoder, floats(32, 256)),
    "sentence encoder": (SentenceEncoder, lambda batch: torch.randint(30522, (batch, 32))),
    "LSTM": (Recurrent, floats(16, 128)),
}


def of_share(model: nn.Module, share: float) -> nn.Module:
    """Return the model with its layers cut to one share of their ranks, at a share of params."""
    low_rank, dense = lod.decompose(copy.deepcopy(model)), count_params(model)
    low, high = 0.0, 1.0
    for _ in range(8):
        middle = (low + high) / 2
        small = lod.extract(low_rank, middle)
        low, high = (middle, high) if count_params(small) <= share * dense else (low, middle)
    return lod.extract(low_rank, low)


def runners(
    model: nn.Module, x: Tensor, place: Path
) -> tuple[dict[str, Callable[[], object]], dict[str, Any]]:
    """Return a function for each runtime that runs the model on x, and its file's facts."""
    runs: dict[str, Callable[[], object]] = {"eager": lambda: model(x)}
    facts: dict[str, Any] = {"params": count_params(model)}
    call = ModelInputs((x,), {})
    for runtime, suffix in FILES.items():
        if importlib.util.find_spec(runtime) is None:
            continue
        try:
            done = export(model, place / f"model.{suffix}", example=x)
        except lod.MaestroError as error:
            facts[runtime] = {"error": str(error)}
            print(f"{runtime}: {error}")
            continue
        run = open_runner(done.path)
        runs[runtime] = lambda run=run: run(call)
        facts[runtime] = {"bytes": done.bytes, "difference": done.difference}
    if importlib.util.find_spec("openvino") is not None and "onnxruntime" in runs:
        run = openvino_runner(place / "model.onnx")
        with torch.no_grad():
            expected, got = model(x), torch.from_numpy(run(x))
        difference = float((got - expected).abs().max() / expected.abs().max())
        assert difference <= _TOLERANCE, f"OpenVINO differs by {difference}"
        runs["openvino"] = lambda: run(x)
        facts["openvino"] = {"difference": difference}
    return runs, facts


def openvino_runner(path: Path) -> Callable[[Tensor], Any]:
    import openvino

    # in float32 like the others: on some processors it computes in bfloat16 by default
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(path, "CPU", options)
    request = compiled.create_infer_request()
    return lambda x: request.infer([x.numpy()])[compiled.output(0)]


def measured(name: str, rounds: int) -> dict[str, Any]:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    dense = build().eval()
    with torch.no_grad():  # layers begin as copies, which a file would store once
        for parameter in dense.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    models = {"dense": dense} | {form: of_share(dense, SHARE).eval() for form in FORMS}
    answer: dict[str, Any] = {}
    for batch in BATCHES:
        x = inputs(batch)
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False):
            calls, facts = {}, {}
            for form, model in models.items():
                place = Path(folder) / form
                place.mkdir()
                runs, facts[form] = runners(model, x, place)
                calls |= {(form, runtime): run for runtime, run in runs.items()}
            with torch.inference_mode():
                times = seconds({str(key): run for key, run in calls.items()}, rounds=rounds)
        for form, runtime in calls:
            row = facts[form].setdefault(runtime, {})
            row["seconds"] = times.median(str((form, runtime)))
            if ("dense", runtime) in calls:
                row["ratio"] = times.ratio(str((form, runtime)), str(("dense", runtime)))
        answer[str(batch)] = facts
    return answer


def table(answer: dict[str, Any]) -> str:
    """Return the tables of the page as they follow from the results."""
    head = ["model", "batch", "form", "params", *RUNTIMES]
    lines = [f"| {' | '.join(head)} |", f"|---|--:|---|{'--:|' * (len(head) - 3)}"]
    files = [
        "| model | form | weights | `.onnx` | `.pte` | difference |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name in (name for name in MODELS if name in answer):
        for batch, facts in answer[name].items():
            whole = facts["dense"]["params"]
            for form, found in facts.items():
                cells = [_cell(found.get(runtime, {}), form) for runtime in RUNTIMES]
                share = f"{found['params'] / whole:.2f}×"
                lines.append(f"| {' | '.join([name, batch, form, share, *cells])} |")
                if batch == str(BATCHES[0]):
                    files.append(_files(name, form, found))
    about = (
        f"`python benchmarks/runtimes.py`: one thread, random weights, ranks cut to {SHARE} of the "
        "parameters. Times of dense models in milliseconds, of the others relative to them."
    )
    bytes_ = "Bytes of the files at batch 1; the difference is that of the `.pte` file."
    return "\n".join([*lines, "", about, "", *files, "", bytes_, ""])


def _cell(found: dict[str, Any], form: str) -> str:
    if "seconds" not in found:
        return "–"
    return f"{1e3 * found['seconds']:.2f} ms" if form == "dense" else f"{found['ratio']:.2f}×"


def _files(name: str, form: str, found: dict[str, Any]) -> str:
    onnx, pte = (found.get(runtime, {}) for runtime in FILES)
    counts = [f"{each['bytes']:,}" if "bytes" in each else "–" for each in (onnx, pte)]
    difference = f"{pte['difference']:.0e}" if "difference" in pte else "–"
    weights = f"{4 * found['params']:,}"
    return f"| {' | '.join([name, form, weights, *counts, difference])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=[*MODELS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    answer: dict[str, Any] = {}
    for name in options.only:
        answer[name] = measured(name, options.rounds)
        print(table({name: answer[name]}), flush=True)
    if options.only == [*MODELS]:
        write("runtimes", answer)
        head, rest = PAGE.read_text().split(START)
        PAGE.write_text(head + START + table(answer) + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
