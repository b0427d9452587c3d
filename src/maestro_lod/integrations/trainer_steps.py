"""The steps of a trainer as `Elastic` needs them: outputs to compare, and losses on fixed batches.

A trainer runs forward and loss itself. A hook therefore collects the output of a size, and the
output of the teacher for the same inputs. To put ranks into order and to measure losses, the
trainer's own step runs on copies of the model, and leaves random states, data loaders, metrics and
logs as they were.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from maestro_lod.errors import OptionError
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.inputs import (
    Loss,
    ModelInputs,
    batch_statistics,
    model_device,
)
from maestro_lod.model.replace import copy_without_hooks
from maestro_lod.sizes.outputs import SoftLoss
from maestro_lod.train.consolidation import Comparison, comparison_for
from maestro_lod.train.evaluate import CrossEntropy

RunStep = Callable[[nn.Module, Any], Tensor]
"""Runs a trainer's step on a model and a batch, without its effects, and returns the loss."""

_BATCHES = 100
"""The most batches of a dataset without a length."""


class StepOutput(NamedTuple):
    """The result of a step."""

    loss: Tensor
    output: Any
    """The output that is compared with the teacher's; None if there is none."""
    labels: Any
    """The argument `labels` of the call with this output."""


# -- batches ---------------------------------------------------------------------------------------


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Seed all global generators inside the `with` block, and restore their states after it."""
    numpy, python = sys.modules.get("numpy"), random.getstate()
    drawn = None if numpy is None else numpy.random.get_state()
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(0)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(0)
        random.seed(0)
        if numpy is not None:
            numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(drawn)


class FixedBatches:
    """The same batches of a data loader's dataset each time, without the loader's own sampler.

    They are full batches of samples in one random order. The loader, its sampler and its workers
    are not used, because their state is part of the training.

    Args:
        loader: A data loader with a batch size.

    Raises:
        OptionError: It is not a single data loader, or has no batch size.
    """

    def __init__(self, loader: Any) -> None:
        if not isinstance(loader, DataLoader):
            raise OptionError(
                f"Elastic orders ranks by training batches, but the data is a "
                f"{type(loader).__name__}. Train on one DataLoader."
            )
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if size is None:
            raise OptionError(
                f"{type(loader).__name__} has no batch_size, so that Elastic cannot form batches "
                "of its dataset. Give one, or a batch_sampler that has the attribute batch_size."
            )
        self._loader, self._size = loader, int(size)

    def __iter__(self) -> Iterator[Any]:
        dataset, size = self._loader.dataset, self._size
        try:
            count = len(dataset)  # type: ignore[arg-type]
        except TypeError:
            yield from self._stream()
            return
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        for start in range(0, max(count - size, 0) + 1, size):
            yield from self._loaded(batch_sampler=[order[start : start + size]])

    def _stream(self) -> list[Any]:
        state = getattr(self._loader.dataset, "state_dict", None)
        before = None if state is None else copy.deepcopy(state())
        found = self._loaded(batch_size=self._size, most=_BATCHES)
        if before is not None:
            self._loader.dataset.load_state_dict(before)  # type: ignore[attr-defined]
        return found

    def _loaded(self, *, most: int | None = None, **options: Any) -> list[Any]:
        with undisturbed(torch.device("cpu")):
            batches = DataLoader(
                self._loader.dataset, collate_fn=self._loader.collate_fn, **options
            )
            return list(itertools.islice(batches, most))


@dataclass(frozen=True)
class StepInputs(ModelInputs):
    """A trainer's batch: a model is called on it by running the trainer's step.

    The arguments have the shapes of a call of the whole model, for counting its MACs.
    """

    steps: TrainerSteps
    batch: Any

    def call(self, model: nn.Module) -> StepOutput:
        """Run the step on a model."""
        return self.steps.run(model, self.batch)

    def to(self, device: torch.device) -> StepInputs:
        """Return the same inputs: the step moves its batch."""
        return self


class _StepLoss:
    """The loss of a step's output, and its comparison with a teacher's output."""

    def __init__(self, compare: Comparison | None) -> None:
        if compare is not None:
            self.soft: Comparison = lambda one, other, _: compare(
                one.output, other.output, one.labels
            )

    def __call__(self, output: StepOutput, target: Any) -> Tensor:
        return output.loss


# -- steps -----------------------------------------------------------------------------------------


Seen = list[tuple[Any, Any, Any]]
"""The outputs of the model and of its teacher, and the labels, of each call in a step."""


class TrainerSteps:
    """Runs a trainer's step on copies of its model, and compares outputs in its real steps.

    Args:
        model: The model that is trained.
        run: Runs the step.
        batches: The training batches, to be iterated again.
        soft_loss: `soft_loss(output, teacher)`; by default cross-entropy of `logits`, or the
            torch loss that the step calls with the output of the model.
        isolated: Whether the step may change attributes of the model, such as metrics, so that it
            must not run on the model itself.
        precision: Returns the context of forward and loss.
    """

    def __init__(
        self,
        model: nn.Module,
        run: RunStep,
        batches: Sequence[Any] | FixedBatches,
        soft_loss: SoftLoss | None = None,
        *,
        isolated: bool = False,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self._run, self._batches = model, run, batches
        self._precision = precision
        self._soft_loss, self._isolated = soft_loss, isolated
        self._twin: nn.Module | None = None
        self.target: str | None = None
        """The module whose output is compared; None if no call computes all low-rank layers."""
        self.example: ModelInputs | None = None
        """Shapes of the inputs of the whole model, if it is called."""
        self.compare: Comparison | None = None
        self._probe()

    def __iter__(self) -> Iterator[tuple[StepInputs, None]]:
        call = self.example or ModelInputs((), {})
        for batch in self._batches:
            yield StepInputs(call.args, call.kwargs, self, batch), None

    @property
    def loss(self) -> Loss:
        """The loss of the outputs of these batches."""
        return _StepLoss(self.compare)

    def run(self, model: nn.Module, batch: Any) -> StepOutput:
        """Run the step on the model or on a dense copy of it, in the mode that it has."""
        model = self._stand_in(model)
        seen: list[tuple[Any, Any]] = []

        def note(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            seen.append((output, kwargs.get("labels")))

        with ExitStack() as hooks, undisturbed(model_device(model)):
            if self.target is not None:
                target = model.get_submodule(self.target)
                hooks.callback(target.register_forward_hook(note, with_kwargs=True).remove)
            loss = self._run_eagerly(model, batch)
        return StepOutput(loss, *(seen[0] if len(seen) == 1 else (None, None)))

    def _run_eagerly(self, model: nn.Module, batch: Any) -> Tensor:
        """Run the step without compiling anything for it: copies run a few batches only."""
        compiles = "torch._dynamo" in sys.modules
        eager: Any = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        with eager, self._precision():
            return self._run(model, batch)

    def forget(self) -> None:
        """Drop the copy of the model's attributes."""
        self._twin = None

    def _stand_in(self, model: nn.Module) -> nn.Module:
        """Return the model, or a copy that shares its tensors, low-rank layers and norms."""
        if model is not self.model or not self._isolated:
            return model
        if self._twin is None:
            memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
            for module in model.modules():
                if isinstance(module, LowRank | _NormBase):
                    memo[id(module)] = module
            self._twin = copy_without_hooks(model, memo)
        for mine, copied in zip(model.modules(), self._twin.modules(), strict=True):
            copied.training = mine.training
        return self._twin

    # -- what is compared ----------------------------------------------------------------------

    def _probe(self) -> None:
        """Run one step to find the output to compare: of one call that computes all layers."""
        layers = low_rank_layers(self.model)
        model = self._stand_in(self.model)
        names = [
            name
            for name, module in model.named_modules()
            if not isinstance(module, LowRank)
            and (not name or all(layer.startswith(f"{name}.") for layer in layers))
        ]
        if layers.keys() == {""}:
            names = [""]
        calls: dict[str, list[tuple[ModelInputs, Any]]] = {name: [] for name in names}
        with ExitStack() as hooks, batch_statistics(model), _SeenLosses() as losses:
            for name in names:

                def note(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                    calls[name].append((ModelInputs(args, kwargs).on_meta(), output))

                handle = model.get_submodule(name).register_forward_hook(note, with_kwargs=True)
                hooks.callback(handle.remove)
            first = next(iter(self._batches), None)
            if first is None:
                raise OptionError(
                    "the training data has no batch: ranks cannot be put into order. Give one."
                )
            with undisturbed(model_device(model)):
                self._run_eagerly(model, first)
        self.forget()
        if calls.get(""):
            self.example = calls[""][0][0]
        self.target = next((name for name in names if len(calls[name]) == 1), None)
        if self.target is None:
            warnings.warn(
                f"no module of {type(self.model).__name__} that contains all low-rank layers is "
                "called exactly once in a step, so that sizes learn from the target alone, not "
                "from the whole model. Compute the output by one call of the model.",
                stacklevel=2,
            )
            return
        output = calls[self.target][0][1]
        compare = self._comparison(output, losses.function_of(output))
        if compare is not None:
            self.compare = self._in_precision(compare)
        else:
            warnings.warn(
                f"the loss of {type(self.model).__name__} does not say how two outputs are "
                "compared, so that sizes learn from the target alone, not from the whole model. "
                "Give soft_loss=lod.scores_loss for class scores, or a function of (output, "
                "teacher).",
                stacklevel=2,
            )

    def _comparison(self, output: Any, loss: Loss | None) -> Comparison | None:
        if (soft_loss := self._soft_loss) is not None:
            return lambda one, other, _: soft_loss(one, other)
        if (logits := _logits(output)) is not None and logits.shape[-1] > 1:
            return compare_logits
        return None if loss is None else comparison_for(loss)

    def _in_precision(self, compare: Comparison) -> Comparison:
        def compared(output: Any, teacher: Any, labels: Any) -> Tensor:
            with self._precision():
                return compare(output, teacher, labels)

        return compared

    @contextmanager
    def watching(self, module: nn.Module, teacher: nn.Module) -> Iterator[Seen]:
        """Collect the outputs of a module and of the teacher inside the `with` block.

        Args:
            module: The model, or a wrapper of it.
            teacher: The frozen whole model.

        Yields:
            The outputs, filled by the calls inside the block.
        """
        seen: Seen = []
        if self.target is None or self.compare is None:
            yield seen
            return
        teaching = teacher.get_submodule(self.target)

        def ask(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            if torch.is_grad_enabled():  # not an evaluation inside the step
                with torch.no_grad():
                    seen.append((output, teaching(*args, **kwargs), kwargs.get("labels")))

        watched = self.model.get_submodule(self.target) if self.target else module
        handle = watched.register_forward_hook(ask, with_kwargs=True)
        try:
            yield seen
        finally:
            handle.remove()

    def soft_loss(self, seen: Seen) -> Tensor | None:
        """Return how far the step's output is from the teacher's; None without a comparison."""
        if self.compare is None:
            return None
        if len(seen) != 1:
            warnings.warn(
                f"a step has called {self.target or type(self.model).__name__} {len(seen)} times, "
                "not once, and learns from the target alone. Compute the output by one call.",
                stacklevel=2,
            )
            return None
        return self.compare(*seen[0])


class _SeenLosses(TorchFunctionMode):
    """Records which losses of torch are called, and on which output."""

    def __init__(self) -> None:
        super().__init__()
        self._called: list[tuple[Any, Any]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if comparison_for(function) is not None:
            self._called.append((function, args[0] if args else (kwargs or {}).get("input")))
        return function(*args, **(kwargs or {}))

    def function_of(self, output: Any) -> Loss | None:
        """Return the loss that was called with this output, unless several were."""
        found = {f for f, given in self._called if isinstance(given, Tensor) and given is output}
        return found.pop() if len(found) == 1 else None


def _logits(output: Any) -> Tensor | None:
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else None


def compare_logits(output: Any, teacher: Any, labels: Any) -> Tensor:
    """Return the cross-entropy of logits with a teacher's, where labels are not ignored."""
    one, other = _logits(output), _logits(teacher)
    assert one is not None and other is not None
    alike = isinstance(labels, Tensor) and labels.shape == one.shape[:-1]
    target = labels if alike else torch.zeros(one.shape[:-1], device=one.device)
    return CrossEntropy().soft(one, other, target)
