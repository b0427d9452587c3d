"""The same architecture with fewer channels: what one would try first."""

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
    """A size; the width follows."""

    size_in: Measure = setting("params", "what the size counts", choices=("params", "macs"))

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
    """Trains a narrower model as it is, and compares it with the one of full width."""
