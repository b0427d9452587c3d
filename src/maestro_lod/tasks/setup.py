"""From a recipe to what it names: data, model, optimizer, LoD, loss and schedule."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from maestro_lod.errors import MaestroError, OptionError, listed, nearest
from maestro_lod.surgery import decompose
from maestro_lod.tasks import recipe as settings
from maestro_lod.tasks.data import Data, load_data
from maestro_lod.tasks.models import MODELS
from maestro_lod.tasks.recipe import Recipe
from maestro_lod.train.evaluate import (
    CrossEntropy,
    Loss,
    call,
    device_of,
    in_mode,
    on_device,
)
from maestro_lod.train.fit import Schedule, milestones, vaswani
from maestro_lod.train.lod import LoD


@dataclass(frozen=True)
class Setup:
    """All the parts of a run, made from its recipe; the same recipe makes the same parts."""

    data: Data
    model: nn.Module
    optimizer: Optimizer
    lod: LoD | None
    loss: Loss
    schedule: Schedule | None

    @classmethod
    def of(cls, recipe: Recipe) -> Setup:
        """Make the parts; randomness comes from the recipe's seed."""
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        loss = loss_of(recipe)  # before the data, which may take long
        data = data_of(recipe)
        model = model_of(recipe, data)
        _rehearse(recipe, model, data)
        optimizer = _optimizer(recipe, model)
        lod = None
        if recipe.method == "lod":
            lod = LoD(
                model,
                optimizer,
                penalty=recipe.penalty,
                pressure=recipe.pressure,
                budget=recipe.budget.model_dump(exclude_none=True) if recipe.budget else None,
                threshold=recipe.threshold,
                seed=recipe.seed,
                sampling=recipe.sampling,
                proximal=recipe.proximal,
                shrink=recipe.shrink,
                min_rank=recipe.min_rank,
                full_pass=recipe.full_pass,
                distill=recipe.distill,
                example=data.example,
            )
        return cls(data, model, optimizer, lod, loss, _schedule(recipe, data))


def own_names(recipe: Recipe) -> list[str]:
    """Return which of its user's own functions a recipe names."""
    return [part.name for part in (recipe.model, recipe.data, recipe.loss) if ":" in part.name]


def data_of(recipe: Recipe) -> Data:
    """Load the data of a recipe."""
    chosen = recipe.data
    torch.manual_seed(recipe.seed)  # for a user's function that draws or splits at random
    if ":" in chosen.name:
        return _own_data(chosen, recipe.batch)
    common: dict[str, Any] = {
        "batch": recipe.batch,
        "seed": recipe.seed,
        "directory": chosen.directory,
        "validation": chosen.validation,
        "limit": chosen.limit,
    }
    if twice := common.keys() & chosen.options:
        raise OptionError(f"data.options has {listed(sorted(twice))}, a setting of every dataset.")
    return load_data(chosen.name, **common, **chosen.options)


def model_of(recipe: Recipe, data: Data) -> nn.Module:
    """Build the model of a recipe, low-rank unless the method is dense, with initial weights."""
    device = _device(recipe.device)
    torch.manual_seed(recipe.seed)
    model = dense_model_of(recipe, data)
    if recipe.method == "lod":
        chosen = recipe.decompose
        model = decompose(
            model,
            only=chosen.only,
            skip=chosen.skip or None,
            ranks=chosen.ranks,
            tied=chosen.tied,
        )
    model = model.to(device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def dense_model_of(recipe: Recipe, data: Data) -> nn.Module:
    """Build the model of a recipe as it is before it is decomposed."""
    chosen, what = recipe.model, f"model {recipe.model.name!r}"
    if ":" in chosen.name:
        build = _own_function(chosen.name, "model")
    elif chosen.name in MODELS:
        build = MODELS[chosen.name]
    else:
        raise OptionError(_unknown("model", chosen.name, MODELS))
    options = dict(chosen.options)
    for size in ("classes", "vocabulary"):  # what the data asks for, unless the recipe says it
        if data.classes and size in _parameters(build, what):
            options.setdefault(size, data.classes)
    model = _called(build, options, what)
    if not isinstance(model, nn.Module):
        raise OptionError(f"{what} returned {_a(model)}, no torch.nn.Module.")
    return model


def _rehearse(recipe: Recipe, model: nn.Module, data: Data) -> None:
    """Run the model on one sample: what does not fit is found before anything is written."""
    try:
        with torch.no_grad(), in_mode(model, training=False):
            call(model, on_device(data.example, device_of(model)))
    except Exception as error:
        what = f"model {recipe.model.name!r} cannot run on data {recipe.data.name!r}"
        raise _failure(what, error, bool(own_names(recipe))) from error


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device).tolist()  # which the meta device cannot
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise OptionError(f"device={name!r} cannot be used here ({reason}).") from None
    return device


def _optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    chosen = recipe.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if chosen.weight_decay and not chosen.decay_norms:
        groups = [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
    common: dict[str, Any] = {"lr": chosen.lr, "weight_decay": chosen.weight_decay, "fused": True}
    if isinstance(chosen, settings.SGD):
        return SGD(groups, momentum=chosen.momentum, nesterov=chosen.nesterov, **common)
    kind: Any = {"adam": Adam, "adamw": AdamW}[chosen.name]
    optimizer: Optimizer = kind(groups, betas=chosen.betas, eps=chosen.eps, **common)
    return optimizer


def loss_of(recipe: Recipe) -> Loss:
    """Return the loss of a recipe, as it is trained with."""
    name = recipe.loss.name
    if ":" in name:
        return _own_function(name, "loss")
    if name != "cross_entropy":
        raise OptionError(_unknown("loss", name, ["cross_entropy"]))
    return CrossEntropy(recipe.label_smoothing, recipe.reduction)


def _schedule(recipe: Recipe, data: Data) -> Schedule | None:
    chosen = recipe.schedule
    if isinstance(chosen, settings.Milestones):
        steps = -(-len(data.train) // recipe.accumulate)
        return milestones(chosen.epochs, steps, chosen.factor)
    if isinstance(chosen, settings.Vaswani):
        return vaswani(chosen.warmup)
    return None


# -- what users name ---------------------------------------------------------------------------


class OwnCodeError(MaestroError, RuntimeError):
    """Code that a recipe names as its user's own has failed; the cause is what it raised."""


def _own_function(name: str, what: str) -> Callable[..., Any]:
    """Import a user's `package.module:function`; the working directory is searched too."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise OptionError(f"{what} {name!r} must be written as package.module:function.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise OptionError(f"{what} {name!r}: cannot import {module_name!r} ({error}).") from None
    except Exception as error:
        raise _failure(f"{what} {name!r} cannot be imported", error) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise OptionError(
            f"{what} {name!r}: {module_name} has no function {attribute!r}."
            f"{nearest(attribute, known)}"
        )
    return function  # type: ignore[no-any-return]


def _own_data(chosen: settings.DataSettings, batch: int) -> Data:
    """Call a user's data function with the batch size; it returns splits of (inputs, target)."""
    what = f"data {chosen.name!r}"
    for key in ("directory", "validation", "limit"):
        if getattr(chosen, key) != type(chosen).model_fields[key].default:
            raise OptionError(
                f"data.{key} is for built-in data. {what} is called with batch and data.options: "
                f"set data.options.{key} if it takes that."
            )
    function = _own_function(chosen.name, "data")
    given = _called(function, {"batch": batch, **chosen.options}, what)
    if isinstance(given, Data):
        _first_batch(given.train, what)
        return given
    if not isinstance(given, Mapping) or "train" not in given:
        raise OptionError(
            f"{what} returned {_a(given)}: return a Data, or a mapping with 'train' and maybe "
            "'validation' and 'test', each giving (inputs, target) batches."
        )
    unknown = sorted(set(given) - {"train", "validation", "test"})
    if unknown:
        raise OptionError(f"{what} returned unknown splits: {listed(unknown)}.")
    for split, batches in given.items():
        if isinstance(batches, Iterator):
            raise OptionError(
                f"{what}: {split!r} is {_a(batches)}, used up after one pass. Return something "
                "that can be iterated again, such as a list or a DataLoader."
            )
    inputs, _ = _first_batch(given["train"], what)
    return Data(
        train=given["train"],
        validation=given.get("validation"),
        test=given.get("test"),
        example=_first_of(inputs),
        classes=0,
        note=chosen.name,
    )


def _first_batch(train: Any, what: str) -> tuple[Any, Any]:
    """Return the first batch of a user's training data, or say what is wrong with them."""
    try:
        count = len(train)
    except TypeError:
        raise OptionError(f"{what}: 'train' has no length: len() must give its batches.") from None
    try:
        batch = next(iter(train), None) if count else None
    except Exception as error:
        raise _failure(f"{what}: 'train' gives no batch", error) from error
    if batch is None:
        raise OptionError(f"{what}: 'train' has no batch.")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise OptionError(f"{what}: 'train' gives {_a(batch)}, not pairs (inputs, target).")
    return batch[0], batch[1]


def _first_of(inputs: Any) -> Any:
    """Cut a batch of inputs to its first sample."""
    if isinstance(inputs, Tensor):
        return inputs[:1]
    if isinstance(inputs, Mapping):
        return {key: _first_of(part) for key, part in inputs.items()}
    return tuple(_first_of(part) for part in inputs) if isinstance(inputs, tuple | list) else inputs


def _parameters(function: Callable[..., Any], what: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError as error:  # some that are written in C
        raise OptionError(f"{what} cannot be called: {error}.") from None


def _called(function: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    """Call a function with options, or say which of them it cannot take."""
    parameters = _parameters(function, what)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for option in options:
            if option not in parameters:
                raise OptionError(
                    f"{what} takes no {option!r}.{nearest(option, parameters)} It takes: "
                    f"{listed(parameters, 12)}."
                )
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise OptionError(f"{what}: {error}.") from None
    try:
        return function(**options)
    except MaestroError:
        raise
    except Exception as error:
        raise _failure(f"{what} failed", error, own=":" in what) from error


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    return (
        f"there is no {what} {name!r}.{nearest(name, known)} Known: {listed(known, 12)}; "
        "or name your own as package.module:function."
    )


def _failure(what: str, error: Exception, own: bool = True) -> MaestroError:
    """Blame a user's own code if there is any in it, or else the options that were given."""
    return (OwnCodeError if own else OptionError)(f"{what}: {type(error).__name__}: {error}")


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
