"""A penalty that means about the same for every model: λ in units of the model and of its training.

The paper's λ spans six orders of magnitude because it has units: under it a rank moves towards zero
by λ times the learning rate at every step, once for each of the groups that hold it, and how far it
has to go is its norm. Dividing these out leaves a number without units, the pressure:

    pressure = λ · Σ learning rates · mean rank / mean norm of a rank

with the learning rates that a step really has, 1 / (1 - momentum) times the nominal one where the
penalty goes through the gradient. In the paper's three tables for CNNs the models that end at 0.11
to 0.18 of their size have pressures of 55 to 79, at λ = 64e-5, 64e-6 and 32e-6.
"""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, Optimizer

from maestro_lod.errors import OptionError, require_nonnegative
from maestro_lod.layers.ranks import low_rank_layers


def penalty_for(
    pressure: float, model: nn.Module, optimizer: Optimizer, steps: float, *, proximal: bool
) -> float:
    """Return the λ of this pressure for so many optimizer steps at the optimizer's learning rates.

    Where the rates will change, `steps` is the sum of their shares of the present ones.
    """
    require_plain_gradient(pressure, type(optimizer), proximal=proximal)
    if require_nonnegative("steps", steps) == 0.0:
        raise OptionError("steps=0 must be above 0: nothing would move.")
    layers = [m for m in low_rank_layers(model).values() if m.rank and m.u.requires_grad]
    if not layers:
        raise OptionError(
            f"pressure={pressure:g} is for layers that are trained; all are frozen or have rank 0."
        )
    rates = [_rate(layer.u, optimizer, proximal) for layer in layers]
    ranks = sum(layer.rank for layer in layers)
    norms = sum(
        float(factor.detach().float().movedim(along, 0).flatten(1).norm(dim=1).sum()) / 2
        for layer in layers
        for factor, along in ((layer.u, 1), (layer.v, 0))
    )
    way = steps * sum(rates) / len(rates)
    if way == 0.0:
        raise OptionError(
            f"pressure={pressure:g} needs learning rates above 0: nothing would move."
        )
    mean_rank, mean_norm = ranks / len(layers), norms / ranks
    return pressure * mean_norm / (mean_rank * way)


def require_plain_gradient(pressure: float, kind: type[Optimizer], *, proximal: bool) -> None:
    """Refuse a kind of optimizer under which λ has no units that could be divided out."""
    if not proximal and not issubclass(kind, SGD):
        raise OptionError(
            f"pressure={pressure:g} needs proximal=True with {kind.__name__}, which rescales the "
            "gradient of a penalty: its λ would mean nothing."
        )


def _rate(parameter: nn.Parameter, optimizer: Optimizer, proximal: bool) -> float:
    """Return how far a unit of penalty moves a parameter in a step."""
    for group in optimizer.param_groups:
        if any(parameter is p for p in group["params"]):
            gain = 1.0 if proximal else (1 - group["dampening"]) / (1 - group["momentum"])
            return float(group["lr"] * gain)
    return 0.0
