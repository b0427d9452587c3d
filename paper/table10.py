"""Table 10: LeNet on MNIST, dense and seven λ, 20 epochs, three seeds."""

from __future__ import annotations

from statistics import mean
from typing import Any

from paper.published import LENET, LENET_PARAMS_MEANT
from paper.scale import Scale, row, spread

TITLE = "Table 10: LeNet on MNIST for different λ"


def measure(scale: Scale) -> dict[str, Any]:
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in LENET}
    for seed in scale.seeds:
        for name, runs in rows.items():
            change = {"method": "dense"} if name == "dense" else {"penalty": name}
            runs.append(row(scale.trained("lenet-mnist", **change, seed=seed)))
    return {"seeds": list(scale.seeds), "rows": rows}


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "| λ | % | paper | params | paper | MACs | paper | training MACs, params | paper |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in result["rows"].items():
        accuracy, deviation, macs, params, train_macs, train_params = LENET[name]
        mine = [100 * run["accuracy"] for run in runs]
        size, meant = mean(run["params"] for run in runs), _params_meant(name)
        misprint = "" if meant == params else f" (meant: {meant:,})"
        lines.append(
            f"| {name} | {spread(mine)} | {accuracy:.2f} ± {deviation:.2f} "
            f"| {size:,.0f} | {params:,}{misprint} "
            f"| {mean(run['macs'] for run in runs):,.0f} | {macs:,} "
            f"| {mean(run['training_macs'] for run in runs):.2f}×, "
            f"{mean(run['training_params'] for run in runs):.2f}× "
            f"| {train_macs:.2f}×, {train_params:.2f}× |"
        )
    return "\n".join([*lines, "", judgement(result)])


def judgement(result: dict[str, Any]) -> str:
    missed = [
        name
        for name, runs in result["rows"].items()
        if 100 * mean(run["accuracy"] for run in runs) < LENET[name][0] - 0.3
        or mean(run["params"] for run in runs) > 1.15 * _params_meant(name)
    ]
    count = len(result["rows"])
    return (
        f"{count - len(missed)} of {count} rows reach the paper's accuracy − 0.3 pp or more, at no "
        "more than 1.15 × its params"
        + (f"; not so {', '.join(missed)}, see `swings`." if missed else ".")
    )


def _params_meant(name: str) -> int:
    return LENET_PARAMS_MEANT.get(name, LENET[name][3])
