"""Same architecture with fewer channels: the simplest baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from maestro_lod.baselines.stages import Staged
from maestro_lod.errors import OptionError
from maestro_lod.model.cost import Cost
from maestro_lod.model.inputs import Example
from maestro_lod.train.method import Builder, setting
from maestro_lod.train.size_settings import Measure, SizedSettings, build_narrower


@dataclass(frozen=True)
class NarrowSettings(SizedSettings):
    """Size, from which the width follows."""

    size_in: Measure = setting("params", "unit of the size", choices=("params", "macs"))

    def build(self, builder: Builder, example: Example) -> nn.Module:
        if builder.width is None:
            raise OptionError(
                "method=narrow needs a model that can be built with other widths: its function "
                "must take a whole number as `width`."
            )

        return build_narrower(builder, example, self.size, self.size_in)

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> Narrow:
        return Narrow(model, optimizer, example=example, dense=dense)


class Narrow(Staged):
    """Trains a narrower model and reports its costs relative to the full width."""
