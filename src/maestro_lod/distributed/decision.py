"""Which ranks are kept: the first process decides, the others make sure that they could have."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from maestro_lod.distributed.collectives import Group, told_by_all
from maestro_lod.errors import TrainingError, listed

_ROUNDING = 1e-3  # relative: more than any order of summation, less than one step's difference


def decided_by_the_first(
    ranks: Mapping[str, int], importance: Mapping[str, Tensor], group: Group
) -> Mapping[str, int]:
    """Return what the first process keeps, or refuse if the weights of others are not the same.

    Where they are, rounding alone could make another process decide otherwise.
    """
    total = {name: float(value.sum()) for name, value in importance.items()}
    everyone = told_by_all((dict(ranks), total), group)
    first_ranks, first_total = everyone[0]
    for process, (_, theirs) in enumerate(everyone):
        other = [
            name
            for name, value in first_total.items()
            if not math.isclose(value, theirs.get(name, math.nan), rel_tol=_ROUNDING, abs_tol=1e-12)
        ]
        if other:
            raise TrainingError(
                f"process {process} has other weights than process 0 at {listed(other)}: they have "
                "not trained the same model. Wrap it before training, and step every process alike."
            )
    return first_ranks
