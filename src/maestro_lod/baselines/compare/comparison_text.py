"""Comparison as text: the table for a terminal and sentences about the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_lod.cli.report.parts import show
from maestro_lod.cli.report.text import duration, of_dense, plain, quantity, times
from maestro_lod.text import table

if TYPE_CHECKING:
    from maestro_lod.baselines.compare.table import Comparison, Row, Winner

HEADER = ("size", "method", "params", "MACs", "bytes", "latency", "training")


def as_text(found: Comparison) -> str:
    """Return the comparison as text for a terminal."""
    rows = [
        (size_text(row), row.method, *cost_texts(found, row), score_text(found, row))
        for row in sorted_rows(found)
    ]
    header = (*HEADER, f"{found.split} {found.metric}")
    parts = [
        describe_conditions(found),
        table(header, rows, right=range(2, len(header))) if rows else "No model could be measured.",
        "\n".join(describe_winner(found, winner) for winner in found.winners),
        describe_front(found),
        "\n".join(f"missing: {what}: {reason}" for what, reason in found.missing),
    ]
    return "\n\n".join(part for part in parts if part)


def describe_conditions(found: Comparison) -> str:
    """Describe the conditions that were the same for all methods."""
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


def sorted_rows(found: Comparison) -> list[Row]:
    """Return the rows by size, best first; methods that determine their size come first."""
    return sorted(found.rows, key=lambda row: (-(row.size or 1.0), -found.order(row)))


def size_text(row: Row) -> str:
    """Return the requested size of a row as text."""
    return "own" if row.size is None else f"≤ {row.size:g}×"


def cost_texts(found: Comparison, row: Row) -> tuple[str, str, str, str, str]:
    """Return the costs of a model and of its training as text."""
    return (
        of_dense(row.params, row.params / found.dense["params"]),
        of_dense(row.macs, row.macs / found.dense["macs"]),
        quantity(row.bytes, "B"),
        duration(row.latency),
        times(row.training),
    )


def score_text(found: Comparison, row: Row) -> str:
    """Return mean and spread as text."""
    write = show(found.metric)
    return write(row.mean) + ("" if row.spread is None else f" ± {write(row.spread)}")


def describe_winner(found: Comparison, winner: Winner) -> str:
    """Describe the winner of a size, and whether its lead is larger than the spread."""
    write, row = show(found.metric), winner.row

    def apart(value: float) -> str:
        return f"{100 * value:.2f} points" if found.metric == "accuracy" else plain(value)

    text = f"Up to {winner.size:g}× of dense: {row.method} ({write(row.mean)})"
    if winner.second is None or winner.ahead is None:
        return f"{text}; there is no other method of that size."
    if winner.tied:
        second = f"{winner.second.method} ({write(winner.second.mean)})"
        if winner.spread is None:
            return f"{text}, a tie with {second}."
        return (
            f"{text}, a tie with {second}: {apart(winner.ahead)} apart, not more than the spread "
            f"over seeds ({apart(winner.spread)})."
        )
    text += f", ahead of {winner.second.method} by {apart(winner.ahead)}"
    if winner.spread is None:
        return f"{text}; one seed cannot show whether that is more than chance."
    return f"{text}, more than the spread over seeds ({apart(winner.spread)})."


def describe_front(found: Comparison) -> str:
    """Describe the models that no other beats in both params and quality."""
    front = [f"{row.method} {times(row.share)}" for row in found.front("params")]
    return f"Not beaten in both params and {found.metric}: {', '.join(front)}." if front else ""
