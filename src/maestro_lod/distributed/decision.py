"""Broadcast process 0's ranks to keep, after checking that all processes have its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from maestro_lod.distributed.collectives import Group, gather_objects
from maestro_lod.errors import TrainingError, listed

_ROUNDING = 1e-3  # relative: more than any order of summation, less than one step's difference


def agree_on_ranks(
    ranks: Mapping[str, int], importance: Mapping[str, Tensor], group: Group
) -> Mapping[str, int]:
    """Return the ranks that process 0 keeps; raise TrainingError if other weights differ from its.

    Equal weights can lead to different decisions by rounding alone.
    """
    total = {name: float(value.sum()) for name, value in importance.items()}
    everyone = gather_objects((dict(ranks), total), group)
    first_ranks, first_total = everyone[0]
    for process, (_, its_total) in enumerate(everyone):
        other = [
            name
            for name, value in first_total.items()
            if not math.isclose(
                value, its_total.get(name, math.nan), rel_tol=_ROUNDING, abs_tol=1e-12
            )
        ]
        if other:
            raise TrainingError(
                f"process {process} has other weights than process 0: {listed(other)}. Wrap the "
                "model before training, and do the same steps in every process."
            )
    return first_ranks
