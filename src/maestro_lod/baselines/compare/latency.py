"""Latency of the compared models, measured in interleaved rounds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from maestro_lod.baselines.compare.measure import Measured, plain_model
from maestro_lod.cli.run import Run
from maestro_lod.cli.trained import Trained
from maestro_lod.errors import CheckpointError
from maestro_lod.files.atomic import replacing
from maestro_lod.files.json_files import read_json_file
from maestro_lod.model.inputs import ModelInputs, model_device
from maestro_lod.sizes.timing import ROUNDS, eager, interleaved

Models: TypeAlias = Mapping[str, tuple[Run, Measured]]


def latencies(models: Models, kept: Path) -> dict[str, float]:
    """Return seconds per call with one sample, for each model of a finished run.

    Times are stored in the file `kept`, and measured again only if the models have changed.
    """
    about = {
        name: [run.result().get("weights"), model.ranks] for name, (run, model) in models.items()
    }
    known = _read(kept)
    if known.get("models") != about:
        calls = {name: _call(run, model) for name, (run, model) in models.items()}
        times = interleaved(calls, rounds=ROUNDS) if calls else {}
        medians = {name: statistics.median(found) for name, found in times.items()}
        known = {"models": about, "seconds": medians}
        with replacing(kept) as place:
            place.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    seconds: dict[str, float] = known["seconds"]
    return seconds


def _call(run: Run, model: Measured) -> Callable[[], object]:
    if model.ranks is None:
        trained, data = run.trained()
    else:
        whole = Trained.of(run)
        trained, data = whole.model, whole.data
    call = ModelInputs.from_example(data.example).drawn(model_device(trained))
    return eager(plain_model(trained, model.ranks), call)


def _read(kept: Path) -> dict[str, Any]:
    """Return the stored times; an unreadable file counts as empty and is measured again."""
    try:
        known: dict[str, Any] = read_json_file(kept, {"models": dict, "seconds": {str: float}})
    except CheckpointError:
        return {}
    return known if known["models"].keys() == known["seconds"].keys() else {}
