"""A comparison as text: the table for a terminal, and what follows from it in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_lod.cli.report.parts import show
from maestro_lod.cli.report.text import duration, of_dense, plain, quantity, times
from maestro_lod.text import table

if TYPE_CHECKING:
    from maestro_lod.baselines.compare.table import Comparison, Row, Winner

HEADER = ("size", "method", "params", "MACs", "bytes", "latency", "training")


def in_words(found: Comparison) -> str:
    """Return all of a comparison for a terminal."""
    rows = [
        (size_of(row), row.method, *costs(found, row), score(found, row)) for row in ranked(found)
    ]
    header = (*HEADER, f"{found.split} {found.metric}")
    parts = [
        setting(found),
        table(header, rows, right=range(2, len(header))) if rows else "Nothing could be measured.",
        "\n".join(winning(found, winner) for winner in found.winners),
        best(found),
        "\n".join(f"missing: {what}: {reason}" for what, reason in found.missing),
    ]
    return "\n\n".join(part for part in parts if part)


def setting(found: Comparison) -> str:
    """Say in a sentence what was the same for all."""
    lasting = (
        f"{found.epochs} epochs each"
        if found.budget is None
        else f"training MACs of {found.budget:g} × {found.epochs} epochs of the dense model each"
    )
    seeds = "one seed" if found.seeds == 1 else f"{found.seeds} seeds"
    rate = (
        "the recipe's learning rate"
        if found.lr_trials == 1
        else f"learning rate of each method chosen among {found.lr_trials} on validation data"
    )
    return f"{found.recipe}: {lasting}, {seeds}, {rate}."


def ranked(found: Comparison) -> list[Row]:
    """Return the rows: methods with a size of their own, then size by size, best first."""
    return sorted(found.rows, key=lambda row: (-(row.size or 1.0), -found.order(row)))


def size_of(row: Row) -> str:
    return "own" if row.size is None else f"≤ {row.size:g}×"


def costs(found: Comparison, row: Row) -> tuple[str, str, str, str, str]:
    """Write what a model costs, and what its training did."""
    return (
        of_dense(row.params, row.params / found.dense["params"]),
        of_dense(row.macs, row.macs / found.dense["macs"]),
        quantity(row.bytes, "B"),
        duration(row.latency),
        times(row.training),
    )


def score(found: Comparison, row: Row) -> str:
    """Write mean and spread."""
    write = show(found.metric)
    return write(row.mean) + ("" if row.spread is None else f" ± {write(row.spread)}")


def winning(found: Comparison, winner: Winner) -> str:
    """Say who is best at a size, and whether that means anything."""
    write, row = show(found.metric), winner.row

    def apart(value: float) -> str:
        return f"{100 * value:.2f} points" if found.metric == "accuracy" else plain(value)

    said = f"Up to {winner.size:g}× of dense: {row.method} ({write(row.mean)})"
    if winner.second is None or winner.ahead is None:
        return f"{said}; there is no other method of that size."
    if winner.tied:
        second = f"{winner.second.method} ({write(winner.second.mean)})"
        if winner.spread is None:
            return f"{said}, a tie with {second}."
        return (
            f"{said}, a tie with {second}: {apart(winner.ahead)} apart, not more than the spread "
            f"over seeds ({apart(winner.spread)})."
        )
    said += f", ahead of {winner.second.method} by {apart(winner.ahead)}"
    if winner.spread is None:
        return f"{said}; with one seed nobody knows whether that is more than chance."
    return f"{said}, more than the spread over seeds ({apart(winner.spread)})."


def best(found: Comparison) -> str:
    """Say which models none beats in both params and quality."""
    front = [f"{row.method} {times(row.share)}" for row in found.front("params")]
    return f"Not beaten in both params and {found.metric}: {', '.join(front)}." if front else ""
