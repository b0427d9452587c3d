"""What does the pivoted form buy at the same number of parameters, and what does it cost in time?

    python benchmarks/forms.py MODELS_DIR [--only LeNet] [--no-times]

Quality: each model is calibrated, cut to a share of its decomposed layers' weights and judged,
without any training: once with ranks for dense and factored layers, once for all three forms. Time:
single layers at about the same number of parameters, CPU time relative to the factored layer,
interleaved in one process. Without MODELS_DIR only what needs no pretrained model is measured.
Results are stored at once. Writes benchmarks/results/forms.json, and the tables in
docs/measured.md from it.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from interleaved import RESULTS, seconds, write
from pretrained_models import CASES
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.cli.data import digits
from maestro_lod.cli.data.batches import Request
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import Costs, better_forms, count_params
from maestro_lod.sizes.calibrated_allocation import rank_energies, ranks_within
from maestro_lod.sizes.calibration import calibrate
from maestro_lod.sizes.outputs import own_scores
from maestro_lod.train.evaluate import recalibrate

SHARES = (0.9, 0.8, 0.7, 0.5, 0.3)
PAGE = Path(__file__).parent.parent / "docs" / "measured.md"
START, END = "<!-- benchmarks/forms.py -->\n", "<!-- end of forms -->"
SAMPLES = {
    "speaker encoder": (8, 0), "ResNet-20": (8, 2000), "language model": (8, 16),
    "sentence encoder": (8, 200),
}  # fmt: skip
"""Of each pretrained model: batches to calibrate on, and samples to judge by (0: all)."""


@dataclass(frozen=True)
class Subject:
    """A model with its data."""

    model: nn.Module
    quality: str
    evaluate: Callable[[nn.Module], float]
    calibration: list[Any]
    loss: Callable[[Any, Any], Tensor]


def pretrained(name: str, folder: Path) -> Subject:
    case, (batches, count) = CASES[name](folder), SAMPLES[name]
    count = count or case.all
    return Subject(
        case.model, f"{case.quality} ({count})", lambda model: case.evaluate(model, count),
        case.calibration[:batches], case.loss,
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
        nn.Linear(256, 10),
    )  # fmt: skip


def trained(build: Callable[[], nn.Module]) -> Subject:
    """Train a model on digits."""
    torch.manual_seed(0)
    data, model = digits.load(Request("digits", 64, 0, None, 0.0, None)), build()
    train, test = [*data.train], [*data.test]
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(12):
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    count = sum(len(y) for _, y in test)

    @torch.inference_mode()
    def loss(judged: nn.Module) -> float:
        total = sum(F.cross_entropy(judged(x), y, reduction="sum") for x, y in test)
        return float(total) / count

    batches = [(x, None) for x, _ in train[:16]]
    quality = f"cross-entropy of digits ({count})"
    return Subject(model.eval(), quality, loss, batches, own_scores)


def compare(subject: Subject, answer: dict[str, Any], keep: Callable[[], None]) -> None:
    """Judge a model at each share, in two and in three forms."""
    seen = calibrate(subject.model, subject.calibration, loss=subject.loss)
    elastic = lod.decompose(copy.deepcopy(subject.model), calibration=seen)
    layers = low_rank_layers(elastic)
    energies = rank_energies(layers, seen)
    decomposed = sum(layer.dense_weights for layer in layers.values())
    params = count_params(subject.model)
    answer |= {"params": params, "decomposed": decomposed, "quality": subject.quality}
    answer["dense"] = subject.evaluate(subject.model)
    for way, copied in (("factored", False), ("pivoted", True)):
        costs = Costs(elastic, None, copied=copied)
        cells = answer[way] = {}
        for share in SHARES:
            limit = int(params - (1 - share) * decomposed)
            ranks = ranks_within(limit, costs, energies)
            small = lod.extract(elastic, ranks, by=better_forms(elastic, ranks, copied=copied))
            if count_params(small) != costs.at(ranks).params or count_params(small) > limit:
                raise SystemExit(f"{way} at {share}: {count_params(small)} parameters of {limit}")
            recalibrate(small, subject.calibration)
            cells[str(share)] = subject.evaluate(small.eval())
            print(f"{way} at {share}: {cells[str(share)]:.4g}", flush=True)
            keep()


# -- times -------------------------------------------------------------------------------------


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "Linear 384×384, 64 rows": (lambda: nn.Linear(384, 384), (torch.randn(64, 384),)),
    "Linear 1536×384, 256 rows": (lambda: nn.Linear(384, 1536), (torch.randn(256, 384),)),
    "Linear 512×512, 1 row": (lambda: nn.Linear(512, 512), (torch.randn(1, 512),)),
    "Conv2d 64×64, 3×3, 16×16": (
        lambda: nn.Conv2d(64, 64, 3, padding=1), (torch.randn(4, 64, 16, 16),),
    ),
    "Conv2d 256×256, 1×1, 8×8": (lambda: nn.Conv2d(256, 256, 1), (torch.randn(4, 256, 8, 8),)),
    "Conv2d 64×64, 3×3, 4 groups": (
        lambda: nn.Conv2d(64, 64, 3, padding=1, groups=4), (torch.randn(4, 64, 16, 16),),
    ),
    "MultiheadAttention 256, 32 positions": (
        lambda: nn.MultiheadAttention(256, 4, batch_first=True), (torch.randn(2, 32, 256),) * 3,
    ),
    "MultiheadAttention 384, 256 positions": (
        lambda: nn.MultiheadAttention(384, 6, batch_first=True),
        (torch.randn(1, 256, 384),) * 3,
    ),
    "LSTM 128 → 256, 20 steps": (
        lambda: nn.LSTM(128, 256, batch_first=True), (torch.randn(2, 20, 128),),
    ),
    "Embedding 1000×256, 128 ids": (
        lambda: nn.Embedding(1000, 256), (torch.arange(128),),
    ),
}  # fmt: skip


def rank_at(model: nn.Module, forms: Mapping[str, Any], share: float) -> dict[str, int]:
    """Return the ranks, the same share of each layer's parameters, in given forms."""
    return {
        name: max(
            (r for r in range(1, layer.full_rank) if layer.plain_weights(forms[name], r)
             <= share * layer.dense_weights), default=1,
        )
        for name, layer in low_rank_layers(model).items()
    }  # fmt: skip


@torch.inference_mode()
def times_of(name: str, share: float, rounds: int) -> dict[str, float]:
    build, inputs = LAYERS[name]
    model = lod.decompose(nn.ModuleList([build()])).eval()
    runs: dict[str, Callable[[], object]] = {}
    for form in ("dense", "factored", "pivoted"):
        forms = dict.fromkeys(low_rank_layers(model), form)
        plain = lod.extract(model, rank_at(model, forms, share), by=forms)[0]
        runs[form] = lambda plain=plain: plain(*inputs)
    start = time.process_time()
    runs["dense"]()
    runs["dense"]()
    repeats = max(1, int(4e-3 / max(1e-6, (time.process_time() - start) / 2)))
    times = seconds(runs, rounds=rounds, repeats=repeats, clock=time.process_time)
    return {form: times.ratio(form, "factored") for form in ("dense", "pivoted")}


# -- the tables --------------------------------------------------------------------------------


def table(answer: Mapping[str, Any]) -> str:
    """Lay out what was measured."""
    lines = [
        f"| model | form | dense | {' | '.join(map(str, SHARES))} |",
        "|---" * (len(SHARES) + 3) + "|",
    ]
    for name, cells in answer.get("models", {}).items():
        for way, text in (("factored", "dense, factored"), ("pivoted", "and pivoted")):
            row = [f"{cells[way][str(s)]:.4g}" for s in SHARES if str(s) in cells.get(way, {})]
            first = f"{name}: {cells['quality']}" if way == "factored" else ""
            dense = f"{cells['dense']:.4g}" if way == "factored" else ""
            lines.append(f"| {first} | {text} | {dense} | {' | '.join(row)} |")
    if times := answer.get("times"):
        lines += [
            "",
            "| layer | " + " | ".join(f"pivoted, {s}" for s in TIMED) + " | "
            + " | ".join(f"dense, {s}" for s in TIMED) + " |",
            "|---" * (2 * len(TIMED) + 1) + "|",
        ]  # fmt: skip
        for name, shares in times.items():
            cells = [f"{shares[str(s)][f]:.2f}" for f in ("pivoted", "dense") for s in TIMED]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TIMED = (0.8, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="?")
    trained_here = {"LeNet": LeNet, "MLP": mlp}
    parser.add_argument("--only", choices=[*trained_here, *SAMPLES], action="append")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-times", action="store_true", help="Only judge quality.")
    parser.add_argument("--no-quality", action="store_true", help="Only measure times.")
    parser.add_argument("--table", action="store_true", help="Only write the page.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kept = RESULTS / "forms.json"

    def keep(change: Callable[[dict[str, Any]], object]) -> None:
        """Store a change, with what another run may have stored since."""
        answer = json.loads(kept.read_text())["answer"] if kept.exists() else {}
        change(answer)
        write("forms", answer)

    names = options.only or [*trained_here, *(SAMPLES if options.models else ())]
    for name in () if options.table or options.no_quality else names:
        print(name, flush=True)
        build = trained_here.get(name)
        subject = trained(build) if build else pretrained(name, options.models)
        cells: dict[str, Any] = {}
        compare(
            subject, cells,
            lambda n=name, c=cells: keep(lambda a: a.setdefault("models", {}).update({n: c})),
        )  # fmt: skip
    for name in () if options.table or options.no_times else LAYERS:
        found = {str(share): times_of(name, share, options.rounds) for share in TIMED}
        print(name, found, flush=True)
        keep(lambda a, n=name, f=found: a.setdefault("times", {}).update({n: f}))
    answer = json.loads(kept.read_text())["answer"]
    head, rest = PAGE.read_text().split(START)
    PAGE.write_text(head + START + table(answer) + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
