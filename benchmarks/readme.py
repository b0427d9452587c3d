"""Write the measured ratios into docs/measured.md, so that no number there is typed by hand.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
START, END = "<!-- benchmarks/readme.py -->\n", "<!-- end -->"
QUESTIONS = {
    "step_lenet_batch128": "LeNet, batch 128",
    "step_resnet18_batch32": "ResNet-18 (CIFAR), batch 32",
}


def block() -> str:
    """Return the page's table as it follows from the results."""
    lines = ["| model | step | × dense |", "|---|---|---|"]
    machine = {}
    for question, title in QUESTIONS.items():
        record = json.loads((ROOT / "benchmarks" / "results" / f"{question}.json").read_text())
        machine = record["machine"]
        for name, ratio in record["answer"]["over_dense"].items():
            if name != "dense":
                lines.append(f"| {title} | {name} | {ratio:.2f} |")
    lines.append("")
    threads = machine["threads"]
    lines.append(f"(CPU, {threads} thread{'s' * (threads > 1)}, torch {machine['torch']}.)")
    return "\n".join(lines) + "\n"


def main() -> None:
    readme = ROOT / "docs" / "measured.md"
    text = readme.read_text()
    head, rest = text.split(START)
    readme.write_text(head + START + block() + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
