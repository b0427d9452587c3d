"""Write the measured ratios into docs/measured.md, so that no number there is typed by hand.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
START, END = "<!-- benchmarks/readme.py -->\n", "<!-- end -->"
RESULTS = ROOT / "benchmarks" / "results"


def record(question: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{question}.json").read_text())
    return found


def rows_of(answer: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield name, ratio and spread of all measurements relative to dense."""
    for name, row in answer.items():
        if isinstance(row, dict) and "ratio" in row:
            low, high = row["middle half"]
            limit = f"{row['limit']:.2f}" if "limit" in row else ""
            yield name, f"{row['ratio']:.2f} | {low:.2f} to {high:.2f}", limit


def steps() -> list[str]:
    lines = ["| model | step | × dense | middle half of rounds | limit |", "|---|---|---|---|---|"]
    for model, answer in record("step")["answer"].items():
        lines += [f"| {model} | {n} | {ratio} | {limit} |" for n, ratio, limit in rows_of(answer)]
    machine = record("step")["machine"]
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    return [*lines, "", f"(CPU time, {threads}, {machine['vectors']}, torch {machine['torch']}.)"]


def memory() -> list[str]:
    lines = [
        "| model | dense | full rank, × dense | small ranks, × dense |",
        "|---|---|---|---|",
    ]
    for model, found in record("memory")["answer"].items():
        ratios = [f"{found[ranks]:.2f}" for ranks in ("full rank", "small ranks")]
        lines.append(f"| {model} | {found['dense_mib']:.1f} MiB | {' | '.join(ratios)} |")
    return lines


def layers() -> list[str]:
    shares = next(iter(record("layers")["answer"].values()))
    lines = [
        f"| layer | {' | '.join(f'{share} of the rank' for share in shares)} |",
        "|---" * (1 + len(shares)) + "|",
    ]
    for kind, found in record("layers")["answer"].items():
        cells = [
            f"{at['time']:.2f} ({'–' if at['macs'] is None else format(at['macs'], '.2f')})"
            for at in found.values()
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def compiled() -> list[str]:
    lines = [
        "| model | step | × dense, not compiled | middle half of rounds |",
        "|---|---|---|---|",
    ]
    for model, answer in record("step_compiled")["answer"].items():
        lines += [f"| {model} | {name} | {ratio} |" for name, ratio, _ in rows_of(answer)]
    return lines


def peers() -> list[str]:
    answer = record("peers")["answer"]
    lines = ["| library | × dense | middle half of rounds |", "|---|---|---|"]
    lines += [f"| {name} | {ratio} |" for name, ratio, _ in rows_of(answer)]
    return [
        *lines,
        *(f"| {name} | did not run: {why} | |" for name, why in answer["not_run"].items()),
    ]


def decomposing() -> str:
    found, by_blocks = record("decoder")["answer"], record("decoder_by_blocks")["answer"]
    return (
        f"A decoder of {found['params'] / 1e9:.2f} billion parameters in bfloat16, "
        f"{found['layers']} layers at full rank, takes {found['cpu_seconds']} seconds of CPU time "
        f"and at most {found['peak_gib']:.1f} GiB; the model has {found['dense_gib']:.1f} GiB "
        f"before and {found['factors_gib']:.1f} after (`python benchmarks/decoder.py`). "
        f"Decomposed block after block it is at most {by_blocks['peak_gib']:.1f} GiB in "
        f"{by_blocks['cpu_seconds']} seconds (`--by-blocks`)."
    )


def starting() -> list[str]:
    answer = record("startup")["answer"]["seconds"]
    older = next(name for name in answer["lod --help"] if name != "now")
    lines = [f"| command | at {older} | now |", "|---|--:|--:|"]
    lines += [
        f"| `{command}`{comma}{part} | {took[older]:.2f} s | {took['now']:.2f} s |"
        for title, took in answer.items()
        for command, comma, part in [title.partition(",")]
    ]
    return lines


def quantized() -> list[str]:
    lines = [
        "| model | params | bytes, × float | time, × float | difference |",
        "|---|--:|--:|--:|--:|",
    ]
    for model, found in record("deploy")["answer"].items():
        rows = found["rows"] if isinstance(found, dict) else {}
        for name, row in rows.items():
            cut = row["params"] < 1 or name.startswith("dense")  # or multiplied out, for speed
            if name.endswith(" int8") and cut:
                usual = rows[name.removesuffix(" int8")]
                smaller, slower = (row[key] / usual[key] for key in ("bytes", "time"))
                lines.append(
                    f"| {model} | {row['params']:.2f}× | {smaller:.2f} | {slower:.2f} | "
                    f"{row['difference']:.1e} |"
                )
    return lines


def block() -> str:
    """Return the page's tables as they follow from the results."""
    about_memory = (
        "The most that a step holds at once, in bytes of tensors: parameters, optimizer state, "
        "gradients, activations, products (`python benchmarks/memory.py`)."
    )
    about = (
        "Four linear layers of 512 units at rank 64, batch 256 (`python benchmarks/peers.py`, of "
        "what is installed). Only the first two hold nothing but two factors; LoRA keeps the dense "
        "weights frozen, `prototype.pat` trains them and decomposes them in every step."
    )
    about_int8 = (
        "ONNX files in onnxruntime, batch 1: int8 relative to the same model in float32. The "
        "difference is relative to the largest output (`python benchmarks/deploy.py`)."
    )
    about_starting = (
        "How much of the processor's time goes by until a command has answered, or says its first "
        "line in a pipe (`python benchmarks/startup.py COMMIT`, medians, one thread)."
    )
    about_layers = (
        "Forward and backward of single layers, × dense, and in brackets the MACs of the factors "
        "(`python benchmarks/layers.py`, CPU time). `lod.survey` says up to which rank a layer "
        "saves, and which kinds are hardly faster."
    )
    about_compiled = "With `torch.compile` (`python benchmarks/step.py --compiled`)."
    parts = {
        "### Single layers": [about_layers, "", *layers()],
        "### Compiled": [about_compiled, "", *compiled()],
        "### Memory of a step": [about_memory, "", *memory()],
        "### Other libraries": [about, "", *peers()],
        "### Decomposing": [decomposing()],
        "### int8": [about_int8, "", *quantized()],
        "### Start-up": [about_starting, "", *starting()],
    }
    lines = steps()
    for title, part in parts.items():
        lines += ["", title, "", *part]
    return "\n".join(lines) + "\n"


def main() -> None:
    readme = ROOT / "docs" / "measured.md"
    text = readme.read_text()
    head, rest = text.split(START)
    readme.write_text(head + START + block() + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
