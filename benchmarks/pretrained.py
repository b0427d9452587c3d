"""How good are pretrained models at a share of their weights, cut in which way?

    python benchmarks/pretrained.py MODELS_DIR [--only "language model"] [--shares 0.8 0.7]
                                                [--heal 0.7] [--steps 500]

Every way gets the same share of the decomposed layers' weights; BatchNorms get statistics of their
own each time. What is measured is kept: the same command goes on where it was stopped. Writes
benchmarks/results/pretrained.json, and the table in docs/pretrained.md from it.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from interleaved import RESULTS, write
from pretrained_models import CASES, Case
from torch import nn

import maestro_lod as lod
from maestro_lod.cost import Costs
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.pretrained.allocation import choose_ranks
from maestro_lod.pretrained.calibration import Calibration, calibrate
from maestro_lod.pretrained.healing import heal
from maestro_lod.pretrained.sequential import correct
from maestro_lod.train.evaluate import recalibrate

SHARES = (0.9, 0.8, 0.7, 0.5, 0.3)
PAGE = Path(__file__).parent.parent / "docs" / "pretrained.md"
START, END = "<!-- benchmarks/pretrained.py -->\n", "<!-- end -->"


class Bench:
    """One model, decomposed in the ways that are compared."""

    def __init__(self, case: Case, answer: dict[str, Any], keep: Callable[[], None]) -> None:
        self.case, self.answer, self.keep = case, answer, keep
        start = time.process_time()
        self.inputs_only = calibrate(case.model, case.calibration)
        answer.setdefault("calibration_cpu_seconds", round(time.process_time() - start, 1))
        answer.setdefault("calibration_peak_mb", _peak_mb())
        self.seen = calibrate(case.model, case.calibration, loss=case.loss)
        self.elastic = lod.decompose(copy.deepcopy(case.model), calibration=self.seen)
        costs, layers = Costs(self.elastic, None), low_rank_layers(self.elastic)
        self.decomposed = sum(layer.dense_weights for layer in layers.values())
        self.rest = costs.dense.params - self.decomposed
        answer |= {"params": costs.dense.params, "decomposed": self.decomposed}
        if "dense" not in answer:
            answer["dense"], answer["quality"] = case.evaluate(case.model), case.quality

    def run(self, way: str, share: float, make: Callable[[float], nn.Module]) -> None:
        """Measure one cell of the table, unless it is known."""
        known = self.answer.setdefault("ways", {}).setdefault(way, {})
        if str(share) in known:
            return
        start = time.process_time()
        model = make(share)
        seconds = time.process_time() - start
        value = self.case.evaluate(model)
        known[str(share)] = {"value": value, "cpu_seconds": round(seconds, 1)}
        print(f"{way} at {share}: {value:.4g} ({seconds:.0f} s)", flush=True)
        self.keep()

    # -- the ways ------------------------------------------------------------------------------

    def uniform(self, calibration: Calibration | None) -> Callable[[float], nn.Module]:
        """The same share of every layer."""
        model = lod.decompose(copy.deepcopy(self.case.model), calibration=calibration)

        def make(share: float) -> nn.Module:
            ranks = {
                name: max(1, int(share * layer.dense_weights / layer.weights(1)))
                for name, layer in low_rank_layers(model).items()
            }
            return self.normed(lod.extract(model, ranks))

        return make

    def scaled(self) -> Calibration:
        """ASVD's rule: inputs count by the square root of their size, channel by channel."""
        found = copy.copy(self.inputs_only)
        found.moments = copy.deepcopy(found.moments)
        for seen in found.moments.values():
            if seen.inputs is not None:
                size = (seen.inputs.diagonal(dim1=1, dim2=2) / seen.count).sqrt()
                seen.inputs = torch.diag_embed(size)
        return found

    def pruned(self, share: float) -> nn.Module:
        """Zero the smallest weights of each layer."""
        model = copy.deepcopy(self.case.model)
        names = {name.partition(".weight_")[0] for name in low_rank_layers(self.elastic)}
        for name in names:
            for key, weight in model.get_submodule(name).named_parameters(recurse=False):
                if weight.ndim > 1:
                    kept = max(1, int(share * weight.numel()))
                    least = weight.detach().abs().flatten().topk(kept).values[-1]
                    with torch.no_grad():
                        weight.mul_(weight.abs() >= least)
                    assert key.startswith("weight")
        return self.normed(model)

    def ranks(self, share: float) -> dict[str, int]:
        return choose_ranks(
            self.elastic, self.seen, max_params=int(self.rest + share * self.decomposed)
        )

    def calibrated(self, share: float) -> nn.Module:
        return self.normed(lod.extract(self.elastic, self.ranks(share)))

    def corrected(self, share: float) -> nn.Module:
        model = lod.decompose(
            copy.deepcopy(self.case.model), ranks=self.ranks(share), calibration=self.seen
        )
        batches = self.case.calibration[: self.case.correction]
        correct(model, self.case.model, batches, calibration=self.seen)
        return self.normed(model)

    def healed(self, steps: int) -> Callable[[float], nn.Module]:
        def make(share: float) -> nn.Module:
            model = self.corrected(share)
            heal(
                model, self.case.healing, teacher=self.case.model, steps=steps, lr=self.case.lr,
                sizes="only", soft_loss=self.case.soft_loss,
                progress=_tell,
            )  # fmt: skip
            return model

        return make

    def normed(self, model: nn.Module) -> nn.Module:
        recalibrate(model, self.case.calibration)
        return model.eval()


def _tell(step: int, loss: float) -> None:
    if step % 50 == 0:
        print(f"  step {step}: {loss:.4g}", flush=True)


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def table(answer: Mapping[str, Any]) -> str:
    """Lay out what was measured, a model to a table."""
    lines = []
    for name, of in answer.items():
        if "dense" not in of:  # nothing was measured yet
            continue
        share = of["decomposed"] / of["params"]
        lines += [
            f"**{name}**: {of['params']:,} parameters, {share:.0%} of them in decomposed layers; "
            f"{of['quality']}; dense {of['dense']:.4g}",
            "",
            "| weights of decomposed layers | " + " | ".join(map(str, SHARES)) + " |",
            "|---" * (len(SHARES) + 1) + "|",
        ]
        whole = [1 - share * (1 - s) for s in SHARES]
        lines.append(
            "| parameters of the whole model | " + " | ".join(f"{w:.2f}" for w in whole) + " |"
        )
        for way, cells in of.get("ways", {}).items():
            row = [f"{cells[str(s)]['value']:.4g}" if str(s) in cells else "" for s in SHARES]
            lines.append(f"| {way} | " + " | ".join(row) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--shares", type=float, nargs="+", choices=SHARES, default=SHARES)
    parser.add_argument("--heal", type=float, action="append", default=[])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--table", action="store_true", help="Only write the page.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kept = RESULTS / "pretrained.json"
    answer = json.loads(kept.read_text())["answer"] if kept.exists() else {}
    for name in () if options.table else options.only or CASES:
        print(name, flush=True)
        bench = Bench(
            CASES[name](options.models),
            answer.setdefault(name, {}),
            lambda: write("pretrained", answer),
        )
        ways: dict[str, Callable[[float], nn.Module]] = {
            "magnitude pruning": bench.pruned,
            "SVD of the weights": bench.uniform(None),
            "ASVD's rule": bench.uniform(bench.scaled()),
            "SVD-LLM's rule": bench.uniform(bench.inputs_only),
            "calibrated": bench.calibrated,
            "calibrated + sequential": bench.corrected,
        }
        for way, make in ways.items():
            for share in options.shares:
                bench.run(way, share, make)
        for share in options.heal:
            bench.run(f"+ healing, {options.steps} steps", share, bench.healed(options.steps))
    head, rest = PAGE.read_text().split(START)
    PAGE.write_text(head + START + table(answer) + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
