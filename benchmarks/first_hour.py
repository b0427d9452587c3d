"""Train five tasks that are new to the library to a quarter of their size, as a newcomer would.

    python benchmarks/first_hour.py           # 45 short trainings; resumes after a stop
    python benchmarks/first_hour.py table     # writes the page again, from the results

Each task of `examples/first_hour` is copied to an empty folder and trained there by `lod train`
alone: to a budget, dense, and as a narrower dense model of the same size, with three seeds. Nothing
of them is tuned. Time is that of the processor, on one thread.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from interleaved import RESULTS, keep

ROOT = Path(__file__).resolve().parents[1]
TASKS = ROOT / "examples" / "first_hour"
PAGE = ROOT / "docs" / "first-hour.md"
START, END = "<!-- benchmarks/first_hour.py -->\n", "<!-- end -->"
WAYS = {
    "budget": ["budget.params=0.25"],
    "dense": ["method=dense"],
    "narrower": ["method=narrow", "size=0.25"],
}
SEEDS = 3


def tasks() -> list[str]:
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


def trained(task: str, changes: list[str]) -> dict[str, Any]:
    """Train a task in an empty folder and return its test metrics, size and processor time."""
    with tempfile.TemporaryDirectory() as place:
        for suffix in (".py", ".yaml"):
            shutil.copy(TASKS / f"{task}{suffix}", place)
        change = [part for text in changes for part in ("--set", text)]
        command = [sys.executable, "-m", "maestro_lod", "train", f"{task}.yaml", *change]
        before = _children_seconds()
        done = subprocess.run(
            [*command, "--out", "run", "--quiet"], cwd=place, capture_output=True, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "LOD_CACHE": f"{place}/cache"}, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"lod train {task}.yaml {' '.join(change)} failed:\n{done.stderr}")
        result = json.loads(Path(place, "run", "result.json").read_text())
    return {
        "seconds": round(_children_seconds() - before, 1),
        "relative_params": result["size"]["relative_params"],
        "test": result["test"],
    }


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure() -> dict[str, Any]:
    """Train all combinations that have no result yet, and store each result at once."""
    path = RESULTS / "first_hour.json"
    answer: dict[str, Any] = json.loads(path.read_text())["answer"] if path.exists() else {}
    for seed in range(SEEDS):
        for task in tasks():
            for way, changes in WAYS.items():
                runs = answer.setdefault(task, {}).setdefault(way, [])
                if len(runs) == seed:
                    runs.append(trained(task, [*changes, f"seed={seed}"]))
                    keep("first_hour", answer)
    return answer


def table(answer: dict[str, Any]) -> str:
    """Return what came out, a row for each task."""
    lines = [
        "| task | YAML | minutes | params | at a quarter | dense | narrower dense |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for task, ways in answer.items():
        yaml = len((TASKS / f"{task}.yaml").read_text().splitlines())
        minutes = statistics.mean(run["seconds"] for run in ways["budget"]) / 60
        params = statistics.mean(run["relative_params"] for run in ways["budget"])
        shown = " | ".join(_metric([run["test"] for run in ways[way]]) for way in WAYS)
        about = (TASKS / f"{task}.py").read_text().splitlines()[0].strip('".')
        about += "" if "%" in shown else "; its loss"
        lines.append(f"| `{task}`. {about} | {yaml} | {minutes:.1f} | {params:.3f}× | {shown} |")
    lines += ["", f"Test data, mean and standard deviation of {_seeds(answer)} seeds."]
    return "\n".join(lines) + "\n"


def _seeds(answer: dict[str, Any]) -> int:
    """Return how many seeds every training has; one that was stopped may have more of some."""
    return min(len(runs) for ways in answer.values() for runs in ways.values())


def _metric(tests: list[dict[str, float]]) -> str:
    """Return mean and spread over the seeds: accuracy in percent, or else the loss."""
    name = "accuracy" if "accuracy" in tests[0] else "loss"
    values = [test[name] for test in tests]
    mean, spread = statistics.mean(values), statistics.pstdev(values)
    if name == "accuracy":
        return f"{100 * mean:.1f} ± {100 * spread:.1f} %"
    return f"{mean:.3g} ± {spread:.1g}"


def write_page(answer: dict[str, Any]) -> None:
    head, rest = PAGE.read_text().split(START)
    PAGE.write_text(head + START + table(answer) + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    if sys.argv[1:] == ["table"]:
        write_page(json.loads((RESULTS / "first_hour.json").read_text())["answer"])
    else:
        write_page(measure())
