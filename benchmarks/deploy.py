"""Measure deployed models relative to their dense form: size on disk, latency and error.

    python benchmarks/deploy.py [--rounds 15] [--threads 1] [--batch 1]

Random weights: ranks are cut to a share of the full rank, each layer in the form that was measured
to be no slower than dense. Every file is verified by `export`; times are relative to the dense
model in the same format (int8: to the dense model in float32), within the same rounds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from interleaved import Times, seconds, write
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.baselines.models import resnet18
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.deploy.export import export, open_runner
from maestro_lod.model.cost import summary
from maestro_lod.model.inputs import ModelInputs
from maestro_lod.sizes.latency import latency

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LeNet": (LeNet, (1, 28, 28)),
    "ResNet-18 (CIFAR)": (resnet18, (3, 32, 32)),
}
SHARES = (0.25, 0.1)
FILES: dict[str, dict[str, Any]] = {
    "onnx": {},
    "onnx int8": {"quantize": "int8"},
    "pt2": {},
    "safetensors": {},
}


def measured(build: Callable[[], nn.Module], x: Tensor, rounds: int, place: Path) -> dict[str, Any]:
    """Deploy one model at every share and in every format, and time all of them side by side."""
    model = lod.decompose(build()).eval()
    by = latency(model, x, rounds=rounds)
    print(by, flush=True)
    models = {"dense": build().eval()}
    for share in SHARES:
        models[f"{share:.0%}"] = lod.extract(model, share, by=by)
        models[f"{share:.0%} by params"] = lod.extract(model, share)
    cost = {name: summary(m, x) for name, m in models.items()}
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], object]] = {}
    for name, deployed in models.items():
        runs[f"{name}, eager"] = lambda deployed=deployed: deployed(x)
        rows[f"{name}, eager"] = {
            "params": cost[name].params / cost["dense"].params,
            "macs": cost[name].macs / cost["dense"].macs,
        }
        for file, options in FILES.items() if "by" not in name else ():
            path = place / f"{name}-{file}.{file.partition(' ')[0]}".replace(" ", "-")
            done = export(deployed, path, example=x, **options)
            rows[f"{name}, {file}"] = rows[f"{name}, eager"] | {
                "bytes": done.bytes,
                "bytes_over_weights": done.size_ratio,
                "difference": done.difference,
            }
            if file != "safetensors":
                run = open_runner(path)
                runs[f"{name}, {file}"] = lambda run=run: run(ModelInputs((x,), {}))
    with torch.inference_mode():
        times = seconds(runs, rounds=rounds, repeats=3)
    for key in runs:
        rows[key]["time"] = times.ratio(key, f"dense, {key.partition(', ')[2].split()[0]}")
        rows[key]["slower_than_dense"] = _slower(times, key)
    predicted = {f"{share:.0%}": by.predict(share) / by.dense for share in SHARES}
    return {"rows": rows, "predicted_eager": predicted, "method": by.method}


def _slower(times: Times, key: str) -> bool:
    """Return True if a variant was slower than dense in at least nine of ten rounds."""
    dense = times[f"dense, {key.partition(', ')[2].split()[0]}"]
    slower = sum(one > other for one, other in zip(times[key], dense, strict=True))
    return slower >= 0.9 * len(dense)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    answer: dict[str, Any] = {"batch": options.batch}
    for title, (build, shape) in MODELS.items():
        with tempfile.TemporaryDirectory() as place:
            x = torch.randn(options.batch, *shape)
            answer[title] = measured(build, x, options.rounds, Path(place))
        print(f"\n{title}, batch {options.batch}   (× dense)")
        print(f"{'':24s}{'params':>8s}{'MACs':>8s}{'time':>8s}{'/weights':>10s}{'difference':>12s}")
        for key, row in answer[title]["rows"].items():
            time = f"{row['time']:8.2f}" if "time" in row else f"{'':8s}"
            file = ""
            if "bytes" in row:
                file = f"{row['bytes_over_weights']:10.3f}{row['difference']:12.1e}"
            note = "   slower than dense" if row.get("slower_than_dense") else ""
            print(f"{key:24s}{row['params']:8.2f}{row['macs']:8.2f}{time}{file}{note}")
        print(f"predicted for eager: {answer[title]['predicted_eager']}\n", flush=True)
    write("deploy", answer)


if __name__ == "__main__":
    main()
