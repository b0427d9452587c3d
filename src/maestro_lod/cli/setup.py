"""The parts that a recipe names: data, model, optimizer, method, loss and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from maestro_lod.cli import recipe as settings
from maestro_lod.cli.data import Data, load_data
from maestro_lod.cli.recipe import Recipe
from maestro_lod.cli.registry import MODELS
from maestro_lod.cli.user_code import (
    call_with_options,
    import_function,
    parameters_of,
    unknown_name,
    user_error,
    with_article,
)
from maestro_lod.errors import OptionError, listed
from maestro_lod.model.cost import Cost, cost_of
from maestro_lod.model.inputs import Loss, ModelInputs, in_mode, model_device
from maestro_lod.train.evaluate import CrossEntropy
from maestro_lod.train.method import Method, Schedule
from maestro_lod.train.schedule import cosine, linear, milestones, vaswani


@dataclass(frozen=True)
class Setup:
    """All parts of a run; the same recipe makes the same parts."""

    data: Data
    model: nn.Module
    optimizer: Optimizer
    method: Method
    loss: Loss
    schedule: Schedule | None
    dense: Cost
    """Cost of the dense model, before the method changes it."""

    @classmethod
    def of(cls, recipe: Recipe) -> Setup:
        """Make the parts of a recipe, from its seed."""
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        loss = loss_of(recipe)  # before the data, which may take long
        data = data_of(recipe)
        dense = _dense_cost(recipe, data)
        model = model_of(recipe, data)
        _rehearse(recipe, model, data)  # as it is trained, on the device where it is
        optimizer = optimizer_of(recipe, model)
        method = recipe.settings.make(
            model, optimizer, example=data.example, seed=recipe.seed, dense=dense
        )
        return cls(data, model, optimizer, method, loss, _schedule(recipe, data), dense)


def user_function_names(recipe: Recipe) -> list[str]:
    """Return the user functions that a recipe names."""
    named = (recipe.model.name, recipe.data.name, recipe.loss.name, recipe.method)
    return [name for name in named if ":" in name]


def data_of(recipe: Recipe) -> Data:
    """Load the data of a recipe."""
    chosen = recipe.data
    torch.manual_seed(recipe.seed)  # for user functions that draw random numbers
    if ":" in chosen.name:
        return _own_data(chosen, recipe)
    common: dict[str, Any] = {
        "batch": recipe.batch,
        "seed": recipe.seed,
        "directory": chosen.directory,
        "validation": chosen.validation,
        "limit": chosen.limit,
    }
    if twice := common.keys() & chosen.options:
        raise OptionError(
            f"data.options contains {listed(sorted(twice))}, which every dataset has. Set it under "
            "data."
        )
    return load_data(chosen.name, **common, **chosen.options)


def model_of(recipe: Recipe, data: Data) -> nn.Module:
    """Build the model that a recipe trains, prepared by its method, with initial weights."""
    device = _device(recipe.device)
    model = recipe.settings.build(Builds(recipe, data), data.example).to(device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def dense_model_of(recipe: Recipe, data: Data) -> nn.Module:
    """Build the dense model of a recipe."""
    return Builds(recipe, data)()


@dataclass(frozen=True)
class Builds:
    """Builds the dense model of a recipe, at its own width or another one."""

    recipe: Recipe
    data: Data

    @property
    def width(self) -> int | None:
        """The recipe's width, or else the default of the model's function; None without a width."""
        given = parameters_of(*self._function()).get("width")
        width = self.recipe.model.options.get("width", given.default if given else None)
        whole = isinstance(width, int) and not isinstance(width, bool)
        return width if given is not None and whole else None

    def __call__(self, width: int | None = None) -> nn.Module:
        build, what = self._function()
        options = dict(self.recipe.model.options)
        for size in ("classes", "vocabulary"):  # of the data, unless the recipe sets it
            if self.data.classes and size in parameters_of(build, what):
                options.setdefault(size, self.data.classes)
        if width is not None:
            options["width"] = width
        torch.manual_seed(self.recipe.seed)
        model = call_with_options(build, options, what)
        if not isinstance(model, nn.Module):
            raise OptionError(f"{what} returned {with_article(model)}. Return a torch.nn.Module.")
        return model

    def _function(self) -> tuple[Callable[..., Any], str]:
        name = self.recipe.model.name
        what = f"model {name!r}"
        if ":" in name:
            return import_function(name, "model", self.recipe.code), what
        if name not in MODELS:
            raise OptionError(unknown_name("model", name, MODELS))
        return MODELS[name], what


def _dense_cost(recipe: Recipe, data: Data) -> Cost:
    """Return the cost of the dense model; raise OptionError if it cannot run on the data."""
    model = dense_model_of(recipe, data)
    _rehearse(recipe, model, data)
    return cost_of(model, data.example)


def _rehearse(recipe: Recipe, model: nn.Module, data: Data) -> None:
    """Run the model on one sample to find a mismatch before anything is written."""
    inputs = ModelInputs.wrap(data.example)
    """Run the model on one sample, to find a mismatch before anything is written."""
    try:
        with torch.no_grad(), in_mode(model, training=False):
            output = inputs.to(model_device(model)).call(model)
    except Exception as error:
        what = f"model {recipe.model.name!r} cannot run on data {recipe.data.name!r}"
        shapes = ["×".join(map(str, t.shape)) for t in inputs.tensors]
        raise user_error(
            f"{what} (input {listed(shapes)})", error, bool(user_function_names(recipe))
        ) from error
    scores = output.shape[1] if isinstance(output, Tensor) and output.ndim == 2 else data.classes
    if recipe.loss.name == "cross_entropy" and scores < data.classes:
        raise OptionError(
            f"model {recipe.model.name!r} gives {scores} scores, but data {recipe.data.name!r} has "
            f"{data.classes} classes. Leave model.options.classes out, or set it to that."
        )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device).tolist()  # not possible on the meta device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise OptionError(
            f"device={name!r} cannot be used here ({reason}). Give another, such as cpu."
        ) from None
    return device


def optimizer_of(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return the optimizer of a recipe for the trainable parameters of a model."""
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
    kind: Any = settings.OPTIMIZERS[chosen.name]
    optimizer: Optimizer = kind(groups, betas=chosen.betas, eps=chosen.eps, **common)
    return optimizer


def loss_of(recipe: Recipe) -> Loss:
    """Return the training loss of a recipe."""
    name = recipe.loss.name
    if ":" in name:
        return import_function(name, "loss", recipe.code)
    if name != "cross_entropy":
        raise OptionError(unknown_name("loss", name, ["cross_entropy"]))
    return CrossEntropy(recipe.label_smoothing, recipe.reduction)


def _schedule(recipe: Recipe, data: Data) -> Schedule | None:
    chosen, steps = recipe.schedule, -(-len(data.train) // recipe.accumulate)
    if isinstance(chosen, settings.Milestones):
        return milestones(chosen.epochs, steps, chosen.factor)
    if isinstance(chosen, settings.Falling):
        falling = {"cosine": cosine, "linear": linear}[chosen.name]
        return falling(recipe.epochs * steps, warmup=chosen.warmup, end=chosen.end)
    if isinstance(chosen, settings.Vaswani):
        return vaswani(chosen.warmup)
    return None


# -- a user's own data ---------------------------------------------------------------------------


def _own_data(chosen: settings.DataSettings, recipe: Recipe) -> Data:
    """Call a user's data function, which returns a Data or splits of (inputs, target) batches."""
    what = f"data {chosen.name!r}"
    for key in ("directory", "validation", "limit"):
        if getattr(chosen, key) != type(chosen).model_fields[key].default:
            raise OptionError(
                f"data.{key} is for built-in data. {what} is called with batch and data.options: "
                f"set data.options.{key} if it takes that."
            )
    function = import_function(chosen.name, "data", recipe.code)
    given = call_with_options(function, {"batch": recipe.batch, **chosen.options}, what)
    if isinstance(given, Data):
        _first_batch(given.train, what)
        return given
    if not isinstance(given, Mapping) or "train" not in given:
        raise OptionError(
            f"{what} returned {with_article(given)}. Return a Data, or a mapping with 'train' and "
            "optionally 'validation' and 'test', each yielding (inputs, target) batches."
        )
    unknown = sorted(set(given) - {"train", "validation", "test"})
    if unknown:
        raise OptionError(
            f"{what} returned unknown splits: {listed(unknown)}. Known: train, validation, test."
        )
    for split, batches in given.items():
        if isinstance(batches, Iterator):
            raise OptionError(
                f"{what}: {split!r} is {with_article(batches)}, used up after one pass. Return "
                "something that can be iterated again, such as a list or a DataLoader."
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
    """Return the first batch of a user's training data; raise OptionError if there is none."""
    try:
        count = len(train)
    except TypeError:
        raise OptionError(
            f"{what}: 'train' has no length. Return something whose len() is the number of batches."
        ) from None
    try:
        batch = next(iter(train), None) if count else None
    except Exception as error:
        raise user_error(f"{what}: 'train' yields no batch", error) from error
    if batch is None:
        raise OptionError(f"{what}: 'train' has no batch. Return at least one.")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise OptionError(
            f"{what}: 'train' yields {with_article(batch)}. Yield pairs (inputs, target)."
        )
    return batch[0], batch[1]


def _first_of(inputs: Any) -> Any:
    """Return the first sample of a batch of inputs."""
    if isinstance(inputs, Tensor):
        return inputs[:1]
    if isinstance(inputs, Mapping):
        return {key: _first_of(part) for key, part in inputs.items()}
    return tuple(_first_of(part) for part in inputs) if isinstance(inputs, tuple | list) else inputs
