"""Correction: train each block of a cut model to give the outputs of the original's block.

A block is a module with a few cut layers, such as a residual block or a layer of a transformer.
Behind cut blocks it gets other inputs than in the original; it is trained on these, to the outputs
that the original has on its own inputs. The layers of a block compensate for each other, which
layers that are fitted one by one cannot.

Both models run on all batches at once: each forward has a thread, which waits at every block until
it is trained. So every module runs once per batch, besides the training, and only the inputs and
outputs of one block are in memory.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Adam
from torch.utils._pytree import tree_map

from maestro_lod.errors import DataError, OptionError
from maestro_lod.files.stage_cache import StageCache
from maestro_lod.layers.embedding import SharedHead
from maestro_lod.layers.ranks import activated, low_rank_layers, resolve_for, unwrapped
from maestro_lod.model.inputs import ModelInputs, in_mode, model_device, split_batch, tensors_in
from maestro_lod.pretrained.distillation import hold_out
from maestro_lod.pretrained.precision import in_single_precision, single
from maestro_lod.progress import OnProgress
from maestro_lod.sizes.calibration import Batches
from maestro_lod.train.evaluate import recalibrate
from maestro_lod.train.schedule import cosine

_MOST_LAYERS = 8  # of a block: those of a layer of a transformer
_STEPS = 100  # of each block and size
_LRS = (0.015, 0.002)
"""Relative to the size of a weight; the second where the first does not bring a block closer."""
_SMALLEST = 0.05  # size of a weight
_WARM_UP = 5  # steps


def correct(
    model: nn.Module,
    teacher: nn.Module,
    batches: Batches,
    *,
    sizes: Sequence[Mapping[str, int | float]] = ({},),
    on_progress: OnProgress = lambda done, total, note: None,
) -> int:
    """Train the blocks of a cut model, in place and in order, to the outputs of the original's.

    The model keeps its ranks; BatchNorms get new statistics. A block is the largest module with
    at most eight low-rank layers that a forward calls once. It keeps its former weights if its
    outputs do not come closer on held-out batches (every eighth).

    >>> lod.correct(model, original, batches)

    Args:
        model: The low-rank model.
        teacher: The original.
        batches: Batches (inputs, target), or inputs alone.
        sizes: The ranks of several sizes: each block is trained at all of them.
        on_progress: `on_progress(done, total, note)` gets the number of blocks that are done.

    Returns:
        The number of blocks that came closer.

    Raises:
        DataError: The data has no batch.
        OptionError: `sizes` is empty.
    """
    model, teacher = unwrapped(model), unwrapped(teacher)
    at_sizes = [resolve_for(model, ranks) for ranks in sizes]
    data = [single(batch) for batch in batches]
    if not data:
        raise DataError("the data to correct on has no batch. Give at least one.")
    if not at_sizes:
        raise OptionError("sizes=[] leaves nothing to correct. Give ranks, or leave it out.")
    with in_single_precision(model), in_single_precision(teacher):
        return correct_blocks(model, teacher, data, at_sizes, StageCache(), on_progress)


def correct_blocks(
    model: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Any],
    sizes: Sequence[Mapping[str, int]],
    cache: StageCache,
    on_progress: OnProgress,
) -> int:
    """Train the blocks of a cut model, as `correct` does, and keep what is done in a cache."""
    device, closer = model_device(model), 0
    data = [ModelInputs.wrap(split_batch(batch)[0]).to(device) for batch in batches]
    with ExitStack() as ends:
        for each in (model, teacher):
            ends.enter_context(in_mode(each, training=False))
        ends.enter_context(_without_caches(model, teacher))
        ends.enter_context(_trainable(model))
        for module in model.modules():  # norms by the statistics of the cut model
            module.training = isinstance(module, _BatchNorm)
        blocks = find_blocks(model, teacher, data[0])
        stops = {each.get_submodule(name): name for each in (model, teacher) for name in blocks}
        ends.enter_context(_stopping_at(stops))
        targets = [_Run(teacher, inputs, {}) for inputs in data]
        pairs = [
            (_Run(model, inputs, ranks), target)
            for inputs, target in zip(data, targets, strict=True)
            for ranks in sizes
        ]
        runs = [*targets, *(run for run, _ in pairs)]
        for run in runs:
            ends.callback(run.stop)
            run.advance()
        for number, name in enumerate(blocks):
            block, original = model.get_submodule(name), teacher.get_submodule(name)
            here = [pair for pair in pairs if {run.block for run in pair} == {name}]
            train = functools.partial(_train, model, block, original, here, _STEPS * len(sizes))
            if state := cache.get_or_compute(f"block {number}", train):
                block.load_state_dict(state)
                closer += 1
            for run in runs:
                if run.block == name:
                    run.advance()
            on_progress(number + 1, len(blocks), "correcting")
    recalibrate(model, [(inputs, None) for inputs in data])
    return closer


@contextmanager
def _trainable(model: nn.Module) -> Iterator[None]:
    """Let all parameters of a model be trained inside the block if none of them is."""
    frozen = [p for p in model.parameters() if p.is_floating_point()]
    if any(parameter.requires_grad for parameter in frozen):
        frozen = []
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def find_blocks(model: nn.Module, teacher: nn.Module, inputs: ModelInputs) -> list[str]:
    """Return the names of the blocks of a cut model, in order of their calls."""
    layers = {id(layer) for layer in low_rank_layers(model).values()}
    originals = {name for name, _ in teacher.named_modules()}  # not parts of unpacked layers
    modules = {name: each for name, each in model.named_modules() if name in originals}
    calls = _calls(model, modules, inputs)
    counts = {
        name: sum(id(part) in layers for part in module.modules())
        for name, module in modules.items()
    }
    found = set[str]()
    for name, layer in low_rank_layers(model).items():
        around = [each for each in (name, *_around(name)) if calls[each] == 1]
        suitable = [each for each in around if counts[each] <= _MOST_LAYERS]
        # alone, an embedding would learn the rows of these batches at the cost of others
        if suitable and (suitable[-1] != name or layer.positionwise):
            found.add(suitable[-1])
    return [name for name in calls if name in found]


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a module, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _calls(model: nn.Module, modules: Mapping[str, nn.Module], inputs: ModelInputs) -> Counter[str]:
    """Return how often each module is called, in order of the first calls."""
    calls: Counter[str] = Counter()
    with ExitStack() as hooks, torch.no_grad():
        for name, module in modules.items():
            hook = functools.partial(lambda name, *_: calls.update([name]), name)
            hooks.callback(module.register_forward_pre_hook(hook).remove)
        inputs.call(model)
    return calls


# -- forwards that wait at blocks ------------------------------------------------------------------


class _Stop(BaseException):
    """Ends a forward."""


class _Run:
    """A forward of a model in a thread of its own, which waits at every block.

    Only one thread runs at any time: whoever advances a run waits until it is at a block or ends.
    """

    def __init__(self, model: nn.Module, inputs: ModelInputs, ranks: Mapping[str, int]) -> None:
        layers = low_rank_layers(model)
        self.ranks = {layers[name]: rank for name, rank in ranks.items()}
        self.block: str | None = None
        """The block that it waits at; None before the first one and after the last one."""
        self.call: ModelInputs | None = None
        """The inputs of that block."""
        self.outputs: list[Tensor] = []
        """The outputs of that block, once they are computed."""
        self._go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._run, model, inputs), daemon=True
        )

    def _run(self, model: nn.Module, inputs: ModelInputs) -> None:
        _CURRENT.set(self)
        try:
            with torch.no_grad(), activated(self.ranks):
                inputs.call(model)
        except _Stop:
            pass
        except BaseException as error:  # raised by `advance`, in the thread that waits
            self._error = error
        self._leave()
        self._waits.release()

    def _leave(self) -> None:
        self.block, self.call, self.outputs = None, None, []

    def advance(self) -> None:
        """Run until the next block, or the end; raise the forward's error, if any."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._waits.acquire()
        if self._error is not None:
            raise self._error

    def wait(self, block: str, call: ModelInputs) -> None:
        """Wait at a block, in the run's own thread."""
        self.block, self.call = block, call
        self._waits.release()
        self._go.acquire()
        if self._stopped:
            raise _Stop
        self._leave()

    def stop(self) -> None:
        """End the forward, wherever it is."""
        if self._thread.is_alive():
            self._stopped = True
            self._go.release()
            self._thread.join()

    def compute(self, block: nn.Module) -> list[Tensor]:
        """Compute the outputs of a block on the inputs that it waits with."""
        assert self.call is not None
        call = _copied(self.call)
        with activated(self.ranks):
            found = tensors_in(block(*call.args, **call.kwargs))
        return [output for output in found if output.is_floating_point()]


_CURRENT: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("run", default=None)


@contextmanager
def _stopping_at(stops: Mapping[nn.Module, str]) -> Iterator[None]:
    """Make runs wait at some modules inside the `with` block."""

    def wait(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if (run := _CURRENT.get()) is not None:
            run.wait(name, ModelInputs(args, kwargs))

    with ExitStack() as hooks:
        for module, name in stops.items():
            hook = functools.partial(wait, name)
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


@contextmanager
def _without_caches(*models: nn.Module) -> Iterator[None]:
    """Keep transformers models from caching keys and values, which a second call would extend."""
    configs: dict[int, Any] = {
        id(config): config
        for model in models
        for module in model.modules()
        if getattr(config := getattr(module, "config", None), "use_cache", None)
    }
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


def _copied(call: ModelInputs) -> ModelInputs:
    """Return a copy of a call, so that a block that changes its inputs can be called again."""

    def copied(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    return ModelInputs(*tree_map(copied, (call.args, call.kwargs)))


# -- the training of a block -----------------------------------------------------------------------

_Pair: TypeAlias = "tuple[_Run, _Run]"
"""Runs of the cut model and of the original on the same batch."""


@torch.enable_grad()
def _train(
    model: nn.Module, block: nn.Module, original: nn.Module, pairs: Sequence[_Pair], steps: int
) -> dict[str, Tensor]:
    """Train a block in place; return its state, nothing if its outputs did not come closer."""
    targets = list(dict.fromkeys(target for _, target in pairs))
    for target in targets:
        with torch.no_grad():
            target.outputs = target.compute(original)
    parameters = _trained(model, block)
    if not parameters or not pairs or not _distance(block, pairs[0]).requires_grad:
        return {}
    trained, held_out = ([p for p in pairs if p[1] in part] for part in hold_out(targets))
    former, before = copy.deepcopy(block.state_dict()), _mean_distance(block, held_out)
    for lr in _LRS:
        _descend(block, parameters, trained, steps, lr)
        if _mean_distance(block, held_out) < before:
            return block.state_dict()
        block.load_state_dict(former)
    return {}


def _descend(
    block: nn.Module,
    parameters: list[nn.Parameter],
    pairs: Sequence[_Pair],
    steps: int,
    lr: float,
) -> None:
    """Train the parameters of a block by Adam, at rates relative to their size."""
    rates = [lr * _size(parameter) for parameter in parameters]
    optimizer = Adam([{"params": [p]} for p in parameters])
    schedule = cosine(steps, warmup=_WARM_UP)
    generator, order = torch.Generator().manual_seed(0), list[int]()
    for step in range(steps):
        order = order or torch.randperm(len(pairs), generator=generator).tolist()
        distance = _distance(block, pairs[order.pop()])
        gradients = torch.autograd.grad(distance, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * schedule(step)
        optimizer.step()
    optimizer.zero_grad()


def _trained(model: nn.Module, block: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters that a block alone has."""
    inside = set(block.modules())
    outside = [module for module in model.modules() if module not in inside]
    outside += [module.embedding for module in outside if isinstance(module, SharedHead)]
    others = {id(p) for module in outside for p in module.parameters(recurse=False)}
    return [p for p in block.parameters() if p.requires_grad and id(p) not in others]


def _size(parameter: Tensor) -> float:
    """Return the root mean square of a parameter, at least a small one for biases of zero."""
    return max(_SMALLEST, float(parameter.detach().square().mean().sqrt()))


@torch.no_grad()
def _mean_distance(block: nn.Module, pairs: Sequence[_Pair]) -> float:
    return sum(float(_distance(block, pair)) for pair in pairs) / len(pairs)


def _distance(block: nn.Module, pair: _Pair) -> Tensor:
    """Return the distance of a block's outputs from the original's, relative to their size."""
    run, target = pair
    parts = [
        (output - wanted).square().mean() / wanted.square().mean().clamp_min(1e-12)
        for output, wanted in zip(run.compute(block), target.outputs, strict=True)
    ]
    return torch.stack(parts).mean() if parts else torch.zeros(())
