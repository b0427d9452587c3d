"""Table 13, scaled down: a smaller Transformer on Multi30k, dense and three λ."""

from __future__ import annotations

import math
from typing import Any

from paper.published import MULTI30K
from paper.scale import Scale, row

TITLE = "Table 13, scaled down: a Transformer on Multi30k for different λ"
RECIPE = "transformer-small-multi30k"
LAMBDAS = ("0.1", "0.2", "0.4")


def measure(scale: Scale) -> dict[str, Any]:
    runs = {"dense": scale.trained(RECIPE, method="dense", seed=0)}
    runs |= {name: scale.trained(RECIPE, penalty=name, seed=0) for name in scale.some(LAMBDAS)}
    return {name: row(run) for name, run in runs.items()}


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"Our model has 3 + 3 layers of width 128 (the paper: 6 + 6 of width 512) and trains for "
        f"{result['dense']['epochs']} epochs (the paper: 400), with the mean loss over tokens and "
        "proximal steps, so its λ is on another scale.",
        "",
        "| λ | perplexity | accuracy % | BLEU | MACs | params | training MACs, params |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {math.exp(r['loss']):.2f} | {100 * r['accuracy']:.2f} | {r['bleu']:.2f} "
            f"| {r['relative_macs']:.2f}× | {r['relative_params']:.2f}× "
            f"| {r['training_macs']:.2f}×, {r['training_params']:.2f}× |"
            for name, r in result.items()
        ),
        *(
            f"| paper, {name} | {perplexity:.2f} | {accuracy:.2f} | | {macs:.2f}× | {params:.2f}× "
            f"| {training_macs:.2f}×, {training_params:.2f}× |"
            for name, (
                perplexity,
                accuracy,
                macs,
                params,
                training_macs,
                training_params,
            ) in MULTI30K.items()
        ),
        "",
        judgement(result),
    ]
    return "\n".join(lines)


def judgement(result: dict[str, Any]) -> str:
    dense = math.exp(result["dense"]["loss"])
    better = [n for n in result if math.exp(result[n]["loss"]) < dense]
    found = (
        f"λ = {', '.join(better)} {'has' if len(better) == 1 else 'have'} a lower perplexity than "
        "the dense model, as the paper found"
        if better
        else "No factorized model has a lower perplexity than the dense one here"
    )
    best = min(MULTI30K, key=lambda name: MULTI30K[name][0])
    return (
        f"{found} (there: {MULTI30K[best][0]:.2f} at λ = {best} against "
        f"{MULTI30K['dense'][0]:.2f})."
    )
