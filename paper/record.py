"""Results as files: JSON with commit, machine and time; figures; the README made of them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent
RESULTS = ROOT / "results"


def write(name: str, result: dict[str, Any], seconds: float, results: Path) -> None:
    """Write the result of an item with the commit and the machine that produced it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    record = {
        "item": name,
        "command": f"python -m paper {name}",
        "commit": described.stdout.strip(),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "seconds": round(seconds, 1),
        "result": result,
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def read(name: str, results: Path = RESULTS) -> dict[str, Any] | None:
    """Return the record of an item; None if it has not been measured."""
    path = results / f"{name}.json"
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    return record
