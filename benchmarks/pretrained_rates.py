"""Which learning rate heals best, with or without hidden states? On data that nothing is judged by.

    python benchmarks/pretrained_rates.py MODELS_DIR [--only "ResNet-20"]

Heals each model for a few steps at 0.7 of its weights, and compares it with the original on samples
that are neither healed on nor in the table of `pretrained.py`. Results are stored at once. Writes
benchmarks/results/pretrained_rates.json; what was chosen stands in `pretrained_models.py`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from interleaved import RESULTS, write
from pretrained_models import CASES
from torch import nn

from maestro_lod.model.inputs import ModelInputs
from pretrained import Bench

STEPS, SHARE = 60, 0.7
RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)


@torch.no_grad()
def distance(bench: Bench, model: nn.Module) -> float:
    """Return how far a model is from the original on held-out samples."""
    case, total = bench.case, 0.0
    for inputs, _ in case.validation:
        call = ModelInputs.wrap(inputs)
        total += float(case.soft_loss(call.call(model), call.call(case.model)))
    return total / len(case.validation)


def tried(bench: Bench, known: dict[str, Any]) -> None:
    """Try all settings that are not known yet."""
    start = bench.corrected(SHARE)
    known.setdefault("original", distance(bench, bench.case.model))
    known.setdefault("before healing", distance(bench, start))
    given = bench.case
    for hidden in dict.fromkeys(((), given.hidden)):
        for lr in RATES:
            name = f"lr {lr:g}" + (" with hidden states" if hidden else "")
            if name not in known:
                model = copy.deepcopy(start)
                bench.case = dataclasses.replace(given, lr=lr, hidden=hidden)
                bench.distill(model, STEPS, "only", name)
                known[name] = distance(bench, bench.normed(model))
                print(f"{name}: {known[name]:.4g}", flush=True)
                bench.keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--unfinished", type=Path, help="Where half a cell is kept.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kept = RESULTS / "pretrained_rates.json"
    answer = json.loads(kept.read_text())["answer"] if kept.exists() else {}
    for name in options.only or [name for name in CASES if name != "ResNet-56"]:  # as ResNet-20
        print(name, flush=True)
        known = answer.setdefault(name, {})
        case, place = CASES[name](options.models), options.unfinished and options.unfinished / name
        tried(Bench(case, {"dense": {}}, lambda: write("pretrained_rates", answer), place), known)


if __name__ == "__main__":
    main()
