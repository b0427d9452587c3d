"""Extent of a measurement, and the training runs that items share."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.run import Run

Setting = str | int | float | bool


@dataclass(frozen=True)
class Scale:
    """All of an item, or a smoke test of it: one seed, one epoch, few samples."""

    runs: Path
    smoke: bool = False

    @property
    def seeds(self) -> tuple[int, ...]:
        return (0,) if self.smoke else (0, 1, 2)

    def some(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of variants, in a smoke test only the first."""
        return names[:1] if self.smoke else names

    def trained(self, recipe: str, **changes: Setting) -> Run:
        """Return a finished run of a recipe, trained now if it does not exist.

        A stopped run is resumed. Changes are settings with `__` for the dot: `budget__params=0.2`.
        """
        given = {key.replace("__", "."): value for key, value in changes.items()}
        name = Path(recipe).stem  # of a recipe of ours, or of a file
        directory = self.runs / name / ",".join(f"{k}={_written(v)}" for k, v in given.items())
        given["threads"] = 1
        if self.smoke:
            own = ":" in load_recipe(recipe).data.name
            few = "data.options.lines" if own else "data.limit"
            given |= {"epochs": 1, few: 512, "schedule": "constant"}
        wanted = load_recipe(recipe, [f"{key}={_written(value)}" for key, value in given.items()])
        run = Run(directory, wanted)
        if (directory / "config.yaml").exists():
            run = Run.open(directory)
            if run.recipe != wanted:
                raise SystemExit(
                    f"{directory} was trained with other settings than {recipe} has now. "
                    "Move it away, or give another --runs."
                )
        if not run.finished:
            start = time.monotonic()
            print(f"  training {directory} …", end=" ", file=sys.stderr, flush=True)
            run.train()
            print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
        return run


def _written(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def row(run: Run) -> dict[str, Any]:
    """Return quality, deployed size and training cost of a run, as in the paper's tables."""
    result = run.result()
    summary, ledger = result["summary"], result["ledger"]
    return {
        **result["test"],
        "params": summary["fused_params"],
        "macs": summary["fused_macs"],
        "relative_params": summary["fused_params"] / summary["dense_params"],
        "relative_macs": summary["fused_macs"] / summary["dense_macs"],
        "training_params": 1.0 if ledger is None else ledger["relative_params"],
        "training_macs": 1.0 if ledger is None else ledger["relative_macs"],
        "seconds": result["seconds"],
        "epochs": result["epochs"],
    }


def spread(values: list[float]) -> str:
    """Return the mean and, of several values, their standard deviation."""
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")
