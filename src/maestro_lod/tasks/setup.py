"""From a recipe to what it names: data, model, optimizer, LoD, loss and schedule."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from maestro_lod.errors import OptionError, listed, nearest
from maestro_lod.surgery import decompose
from maestro_lod.tasks import recipe as settings
from maestro_lod.tasks.data import Data, load_data
from maestro_lod.tasks.models import MODELS
from maestro_lod.tasks.recipe import Recipe
from maestro_lod.train.evaluate import CrossEntropy, Loss
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
        data = data_of(recipe)
        model = model_of(recipe, data)
        optimizer = _optimizer(recipe, model)
        lod = None
        if recipe.method == "lod":
            lod = LoD(
                model,
                optimizer,
                penalty=recipe.penalty,
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
        return cls(data, model, optimizer, lod, _loss(recipe), _schedule(recipe, data))


def data_of(recipe: Recipe) -> Data:
    """Load the data of a recipe."""
    chosen = recipe.data
    if ":" in chosen.name:
        return _own_data(chosen, recipe.batch)
    return load_data(
        chosen.name,
        batch=recipe.batch,
        seed=recipe.seed,
        directory=chosen.directory,
        validation=chosen.validation,
        limit=chosen.limit,
        **chosen.options,
    )


def model_of(recipe: Recipe, data: Data) -> nn.Module:
    """Build the model of a recipe, low-rank unless the method is dense, with initial weights."""
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
    model = model.to(_device(recipe.device))
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def dense_model_of(recipe: Recipe, data: Data) -> nn.Module:
    """Build the model of a recipe as it is before it is decomposed."""
    chosen = recipe.model
    if ":" in chosen.name:
        function = _own_function(chosen.name, "model")
        model = _called(function, chosen.options, f"model {chosen.name!r}")
        if not isinstance(model, nn.Module):
            raise OptionError(
                f"model {chosen.name!r} returned a {type(model).__name__}, no Module."
            )
        return model
    if chosen.name not in MODELS:
        raise OptionError(_unknown("model", chosen.name, MODELS))
    build = MODELS[chosen.name]
    options = dict(chosen.options)
    for size in ("classes", "vocabulary"):  # what the data asks for, unless the recipe says it
        if size in inspect.signature(build).parameters:
            options.setdefault(size, data.classes)
    return _called(build, options, f"model {chosen.name!r}")  # type: ignore[no-any-return]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
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


def _loss(recipe: Recipe) -> Loss:
    chosen = recipe.loss
    if chosen.options:
        raise OptionError(f"loss {chosen.name!r} has no options; it is called with output, target.")
    if ":" in chosen.name:
        return _own_function(chosen.name, "loss")
    if chosen.name != "cross_entropy":
        raise OptionError(_unknown("loss", chosen.name, {"cross_entropy": CrossEntropy}))
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


def _own_function(name: str, what: str) -> Callable[..., Any]:
    """Import a user's `package.module:function`; the working directory is searched too."""
    module_name, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise OptionError(f"{what} {name!r}: cannot import {module_name!r} ({error}).") from None
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
    function = _own_function(chosen.name, "data")
    given = _called(function, {"batch": batch, **chosen.options}, f"data {chosen.name!r}")
    if isinstance(given, Data):
        return given
    if not isinstance(given, Mapping) or "train" not in given:
        raise OptionError(
            f"data {chosen.name!r} returned a {type(given).__name__}: return a Data, or a mapping "
            "with 'train' and maybe 'validation' and 'test', each giving (inputs, target) batches."
        )
    unknown = sorted(set(given) - {"train", "validation", "test"})
    if unknown:
        raise OptionError(f"data {chosen.name!r} returned unknown splits: {listed(unknown)}.")
    try:
        inputs, target = next(iter(given["train"]))
    except (StopIteration, TypeError, ValueError) as error:
        raise OptionError(
            f"data {chosen.name!r}: 'train' gives no (inputs, target) batches ({error})."
        ) from None
    return Data(
        train=given["train"],
        validation=given.get("validation"),
        test=given.get("test"),
        example=_first_of(inputs),
        classes=int(target.max()) + 1 if isinstance(target, Tensor) and target.numel() else 0,
        note=chosen.name,
    )


def _first_of(inputs: Any) -> Any:
    """Cut a batch of inputs to its first sample."""
    if isinstance(inputs, Tensor):
        return inputs[:1]
    if isinstance(inputs, Mapping):
        return {key: _first_of(part) for key, part in inputs.items()}
    return tuple(_first_of(part) for part in inputs) if isinstance(inputs, tuple | list) else inputs


def _accepted(
    function: Callable[..., Any], options: Mapping[str, Any], what: str
) -> Mapping[str, Any]:
    """Return options that a function has parameters for, or refuse them."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return options
    for option in options:
        if option not in parameters:
            raise OptionError(
                f"{what} has no option {option!r}.{nearest(option, parameters)} Options: "
                f"{listed(parameters, 12)}."
            )
    return options


def _called(function: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    """Call a function with options, or say which of them it cannot take."""
    try:
        inspect.signature(function).bind(**_accepted(function, options, what))
    except TypeError as error:
        raise OptionError(f"{what}: {error}.") from None
    return function(**options)


def _unknown(what: str, name: str, known: Mapping[str, Any]) -> str:
    return (
        f"there is no {what} {name!r}.{nearest(name, known)} Known: {listed(known, 12)}; "
        "or name your own as package.module:function."
    )
