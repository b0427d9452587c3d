"""What models are judged by."""

from __future__ import annotations

from collections.abc import Mapping

from maestro_lod.cli.report.runs import METRICS

_LOWER_IS_BETTER = ("perplexity", "loss")


def metric_in(values: Mapping[str, float]) -> str | None:
    """Return which of the metrics that were measured a model is judged by; None without any."""
    return next((metric for metric in METRICS if metric in values), None)


def better(metric: str, value: float) -> float:
    """Return a value of a metric so that more is better."""
    return -value if metric in _LOWER_IS_BETTER else value
