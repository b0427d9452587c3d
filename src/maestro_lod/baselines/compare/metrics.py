"""Metrics that models are compared by."""

from __future__ import annotations

from collections.abc import Mapping

from maestro_lod.cli.report.runs import METRICS

_LOWER_IS_BETTER = ("perplexity", "loss")


def metric_in(values: Mapping[str, float]) -> str | None:
    """Return the metric that a model is compared by; None if none was measured."""
    return next((metric for metric in METRICS if metric in values), None)


def better(metric: str, value: float) -> float:
    """Return the value with a sign such that larger is better."""
    return -value if metric in _LOWER_IS_BETTER else value
