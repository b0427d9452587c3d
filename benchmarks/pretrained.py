"""How good are pretrained models at a share of their weights, cut in which way?

    python benchmarks/pretrained.py MODELS_DIR [--only "language model"] [--shares 0.8 0.7]
                                                [--ways calibrated] [--larger 4 --lr 2e-4]

Every way gets the same share of the decomposed layers' weights; BatchNorms get statistics of their
own each time. Results are stored at once: the same command resumes after a stop. Writes
benchmarks/results/pretrained.json, and the table in docs/benchmarks/pretrained.md from it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from interleaved import RESULTS, write
from pretrained_models import CASES, Case
from torch import nn
from torch.utils._pytree import tree_map

import maestro_lod as lod
from maestro_lod.files.stage_cache import StageCache
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import Costs
from maestro_lod.pretrained.compression import Distance
from maestro_lod.pretrained.correction import correct
from maestro_lod.pretrained.distillation import Sizes, distill
from maestro_lod.sizes.calibrated_allocation import choose_ranks, rank_energies, ranks_by_losses
from maestro_lod.sizes.calibration import Calibration, calibrate
from maestro_lod.sizes.measured_allocation import FEW_SHARES, measure_losses
from maestro_lod.train.evaluate import recalibrate

SHARES = (0.9, 0.8, 0.7, 0.5, 0.3)
FULLY_JUDGED = 0.7  # by all data that there is to judge by
STEPS = 500  # of healing
IN_TURN = (0.9, 0.3, 0.5, 0.8, 0.3, 0.7, 0.5, 0.3)  # sizes of one healing: small ones more often
_MOST_SECONDS = math.inf
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks" / "pretrained.md"
START, END = "<!-- benchmarks/pretrained.py -->\n", "<!-- end -->"


Way: TypeAlias = "Callable[[Bench, float], nn.Module]"


class Bench:
    """One model, decomposed in the ways that are compared."""

    def __init__(
        self, case: Case, answer: dict[str, Any], keep: Callable[[], None], unfinished: Path | None
    ) -> None:
        self.case, self.answer, self.keep = case, answer, keep
        self.larger = 1
        """How many batches are one, to heal on."""
        self.unfinished = unfinished
        self.kept = StageCache(self.place("stages"), {"quality": case.quality})
        self.seen = calibrate(
            case.model, case.calibration, loss=case.loss, resume=self.place("calibration")
        )
        self.elastic = lod.decompose(copy.deepcopy(case.model), calibration=self.seen)
        costs, layers = Costs(self.elastic, None), low_rank_layers(self.elastic)
        self.decomposed = sum(layer.dense_weights for layer in layers.values())
        self.rest = costs.dense.params - self.decomposed
        answer |= {
            "params": costs.dense.params, "decomposed": self.decomposed,
            "quality": case.quality, "few": case.few, "all": case.all,
        }  # fmt: skip
        if "dense" not in answer:
            answer["dense"] = self.judged(case.model, everything=True)

    def judged(self, model: nn.Module, *, everything: bool) -> dict[str, float]:
        found = {"value": self.case.evaluate(model, self.case.few)}
        if everything:
            found["all"] = self.case.evaluate(model, self.case.all)
        return found

    def run(self, way: str, share: float, make: Way) -> None:
        """Measure one cell of the table, unless it is known."""
        known = self.answer.setdefault("ways", {}).setdefault(way, {})
        if str(share) in known:
            return
        start = time.process_time()
        model = make(self, share)
        seconds = time.process_time() - start
        found = self.judged(model, everything=share == FULLY_JUDGED and way not in RULES)
        known[str(share)] = {**found, "cpu_seconds": round(seconds, 1)}
        print(f"{way} at {share}: {found['value']:.4g} ({seconds:.0f} s)", flush=True)
        self.keep()

    # -- the ways ------------------------------------------------------------------------------

    @functools.cached_property
    def inputs_only(self) -> Calibration:
        return calibrate(self.case.model, self.case.calibration)

    @functools.cache  # noqa: B019
    def uniformly(self, rule: str) -> nn.Module:
        """The model with all ranks, split by one of the rules that treat all layers alike."""
        seen = {"weights": lambda: None, "ASVD": self.scaled, "SVD-LLM": lambda: self.inputs_only}
        return lod.decompose(copy.deepcopy(self.case.model), calibration=seen[rule]())

    def uniform(self, rule: str, share: float) -> nn.Module:
        """The same share of every layer."""
        model = self.uniformly(rule)
        ranks = {
            name: max(1, int(share * layer.dense_weights / layer.weights(1)))
            for name, layer in low_rank_layers(model).items()
        }
        return self.normed(lod.extract(model, ranks))

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

    def place(self, name: str) -> Path | None:
        """Return where unfinished work of a name is kept."""
        return None if self.unfinished is None else self.unfinished / name

    def limit(self, share: float) -> int:
        """Return the parameters of the model at a share of the decomposed layers' weights."""
        return int(self.rest + share * self.decomposed)

    @functools.cached_property
    def measured(self) -> dict[int, dict[str, int]]:
        """Nested ranks for all shares, by the losses that `compress` measures."""
        data = [inputs for inputs, _ in self.case.calibration]
        distance = Distance(self.case.model, data, len(low_rank_layers(self.elastic)),
                            self.case.soft_loss)  # fmt: skip
        energies = rank_energies(low_rank_layers(self.elastic), self.seen)
        losses = self.kept.get_or_compute(
            "losses", lambda: measure_losses(self.elastic, distance, energies, shares=FEW_SHARES)
        )
        return ranks_by_losses(self.elastic, losses, [self.limit(share) for share in SHARES])

    def ranks(self, share: float) -> dict[str, int]:
        return self.measured[self.limit(share)]

    def by_theory(self, share: float) -> nn.Module:
        """Allocate by calibration alone."""
        ranks = choose_ranks(self.elastic, self.seen, max_params=self.limit(share))
        return self.normed(lod.extract(self.elastic, ranks))

    def calibrated(self, share: float) -> nn.Module:
        return self.normed(lod.extract(self.elastic, self.ranks(share)))

    def corrected(self, share: float) -> nn.Module:
        model = lod.decompose(
            copy.deepcopy(self.case.model), ranks=self.ranks(share), calibration=self.seen
        )
        self.correct(model, f"corrected {share}", [{}])
        return self.normed(model)

    def correct(self, model: nn.Module, name: str, sizes: Sequence[Mapping[str, int]]) -> None:
        batches = self.case.correction

        def corrected() -> dict[str, Any]:
            correct(model, self.case.model, batches, sizes=sizes)
            return model.state_dict()

        model.load_state_dict(self.kept.get_or_compute(name, corrected))

    def distilled(self, share: float, steps: int) -> nn.Module:
        model = self.corrected(share)
        self.distill(model, steps, "only", f"healing {share} {steps}{self._unusual()}")
        return self.normed(model)

    @functools.cache  # noqa: B019
    def distilled_together(self, steps: int, *, first_corrected: bool) -> nn.Module:
        """One model, healed at all shares in turn."""
        sizes = {share: self.ranks(share) for share in SHARES}
        most = {name: max(of[name] for of in sizes.values()) for name in sizes[SHARES[0]]}
        model = lod.decompose(copy.deepcopy(self.case.model), ranks=most, calibration=self.seen)
        if first_corrected:
            self.correct(model, "corrected for all sizes", list(sizes.values()))
        name = "healing in turn, corrected" if first_corrected else "healing in turn"
        self.distill(model, steps, [sizes[share] for share in IN_TURN], f"{name} {steps}")
        return model

    def of_all_sizes(self, share: float, steps: int, *, first_corrected: bool) -> nn.Module:
        model = self.distilled_together(steps, first_corrected=first_corrected)
        return self.normed(lod.extract(model, self.ranks(share)))

    def _unusual(self) -> str:
        return "" if self.larger == 1 else f" {self.larger} {self.case.lr}"

    @functools.cached_property
    def batches(self) -> Iterable[Any]:
        found = self.case.distillation_batches(self.kept)
        return found if self.larger == 1 else _joined(list(found), self.larger)

    def distill(self, model: nn.Module, steps: int, sizes: Sizes, name: str) -> None:
        case = self.case
        for fixed in case.left_alone:
            model.get_parameter(fixed).requires_grad_(False)
        distill(
            model, case.model, self.batches, steps=steps, lr=case.lr, sizes=sizes,
            soft_loss=case.soft_loss, hidden=case.hidden,
            resume=self.place(name), on_progress=_tell,
        )  # fmt: skip

    def normed(self, model: nn.Module) -> nn.Module:
        recalibrate(model, self.case.calibration)
        return model.eval()


def _joined(batches: list[Any], count: int) -> list[Any]:
    """Return one batch of `count` samples; drop the rest."""
    groups = [batches[i : i + count] for i in range(0, len(batches) - count + 1, count)]
    return [(tree_map(lambda *t: torch.cat(t), *(x for x, _ in group)), None) for group in groups]


def _tell(step: int, steps: int, _: str) -> None:
    if step % 50 == 0:
        print(f"  step {step} of {steps}", flush=True)
        if time.process_time() > _MOST_SECONDS:
            raise SystemExit(75)  # to be continued by the same command


RULES = ("magnitude pruning", "ASVD's rule", "SVD-LLM's rule")


def ways(steps: int) -> dict[str, Way]:
    """Return all ways to a size; some of them distil for a number of steps."""
    each = steps // len(SHARES)
    return {
        "magnitude pruning": Bench.pruned,
        "SVD of the weights": lambda bench, share: bench.uniform("weights", share),
        "ASVD's rule": lambda bench, share: bench.uniform("ASVD", share),
        "SVD-LLM's rule": lambda bench, share: bench.uniform("SVD-LLM", share),
        "calibrated, allocated by theory": Bench.by_theory,
        "calibrated": Bench.calibrated,
        "+ correction": Bench.corrected,
        f"+ healing, {steps} steps": lambda bench, share: bench.distilled(share, steps),
        f"all sizes healed at once, {steps} steps": lambda bench, share: bench.of_all_sizes(
            share, steps, first_corrected=False
        ),
        f"all sizes corrected and healed at once, {steps} steps": (
            lambda bench, share: bench.of_all_sizes(share, steps, first_corrected=True)
        ),
        f"each size healed alone, {each} steps": lambda bench, share: bench.distilled(share, each),
    }


def table(answer: Mapping[str, Any]) -> str:
    """Lay out what was measured, a model to a table."""
    lines = []
    for name, of in answer.items():
        if "dense" not in of:  # nothing was measured yet
            continue
        share, dense = of["decomposed"] / of["params"], of["dense"]
        lines += [
            f"**{name}**: {of['params']:,} parameters, {share:.0%} of them in decomposed layers. "
            f"{of['quality']}, {of['few']:,} of them, and in the last column all {of['all']:,}.",
            "",
            f"| weights of decomposed layers | {' | '.join(map(str, SHARES))} | {FULLY_JUDGED} |",
            "|---" * (len(SHARES) + 2) + "|",
        ]
        whole = [f"{1 - share * (1 - s):.2f}" for s in (*SHARES, FULLY_JUDGED)]
        lines.append(f"| parameters of the whole model | {' | '.join(whole)} |")
        lines.append(
            f"| the original{f' | {_shown(dense)}' * len(SHARES)} | {_shown(dense, 'all')} |"
        )
        measured = of.get("ways", {})
        for way in dict.fromkeys((*ways(STEPS), *measured)):
            cells = measured.get(way, {})
            row = [_shown(cells.get(str(s))) for s in SHARES]
            if cells:
                last = _shown(cells.get(str(FULLY_JUDGED)), "all")
                lines.append(f"| {way} | {' | '.join(row)} | {last} |")
        lines.append("")
    return "\n".join(lines)


def _shown(cell: Mapping[str, float] | None, key: str = "value") -> str:
    return "" if cell is None or key not in cell else f"{cell[key]:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--shares", type=float, nargs="+", choices=SHARES, default=SHARES)
    parser.add_argument("--ways", nargs="+", help="Names as in the table. [default: all]")
    parser.add_argument("--steps", type=int, default=STEPS, help="Of healing.")
    parser.add_argument("--unfinished", type=Path, help="Where half a cell is kept.")
    parser.add_argument("--seconds", type=float, default=math.inf, help="CPU time to stop after.")
    parser.add_argument("--larger", type=int, default=1, help="Batches in one, to heal on.")
    parser.add_argument("--lr", type=float, help="To heal at. [default: the model's]")
    parser.add_argument("--table", action="store_true", help="Only write the page.")
    options = parser.parse_args()
    global _MOST_SECONDS
    _MOST_SECONDS = options.seconds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kept = RESULTS / "pretrained.json"
    answer = json.loads(kept.read_text())["answer"] if kept.exists() else {}
    for name in () if options.table else options.only or CASES:
        print(name, flush=True)
        case = CASES[name](options.models)
        unfinished = options.unfinished and options.unfinished / name
        bench = Bench(
            case, answer.setdefault(name, {}), lambda: write("pretrained", answer), unfinished
        )
        makes = ways(options.steps)
        settings = ""
        if options.larger > 1 or options.lr:
            bench.larger, bench.case = options.larger, replace(case, lr=options.lr or case.lr)
            settings = f", batches {options.larger} times as large, lr {bench.case.lr:g}"
        for way in options.ways or makes:
            for share in options.shares:
                bench.run(way + settings, share, makes[way])
    head, rest = PAGE.read_text().split(START)
    PAGE.write_text(head + START + table(answer) + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
