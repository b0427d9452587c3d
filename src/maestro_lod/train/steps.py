"""Training steps: active ranks, passes, counts, and hooks around the optimizer's steps."""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from maestro_lod.distributed.fsdp import shard_group
from maestro_lod.distributed.shards import is_sharded
from maestro_lod.errors import LayerError, TrainingError, listed, require_bool, require_whole
from maestro_lod.layers.lowrank import LowRank
from maestro_lod.layers.ranks import activated, require_low_rank
from maestro_lod.model.inputs import ModelInputs
from maestro_lod.train.diagnostics import require_finite_loss, require_loss
from maestro_lod.train.ledger import Ledger

logger = logging.getLogger(__name__)

Draw = Callable[[], dict[str, int]]
"""Returns the active ranks of the next step."""


class Steps:
    """Activates the ranks of each step, and counts the steps of an epoch."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, record_example: bool) -> None:
        self._model, self._layers = model, require_low_rank(model)
        self.count = 0
        """Steps in this epoch."""
        self.forwards = 0
        """Steps of this epoch in which a sampled layer ran, or a layer ran for the first time."""
        self.whole = 0
        """Steps of this epoch that trained the whole model."""
        self.optimized = False
        """Whether the optimizer has done a step in this epoch."""
        self.left_out: set[str] = set()
        """Layers that are not sampled, because the model's forward never reaches them."""
        self._unseen = dict(self._layers)  # layers that have not run in any step yet
        self._drawn: dict[LowRank, int] = {}
        self._whole_step = False
        self._active: ExitStack | None = None  # as long as a step lasts
        # MACs are counted on a copy of the model, which is not possible with shards
        record_example = record_example and shard_group(model) is None
        self._recorder = ExampleRecorder(model) if record_example else None
        call_after_steps(optimizer, self._note_optimized)

    def live_ranks(self) -> dict[str, int]:
        """Return the layers whose ranks are trained, with their current ranks."""
        return live_ranks(self._layers, self.left_out)

    @contextmanager
    def one(self, draw: Draw | None) -> Iterator[dict[str, int]]:
        """Do one step in the `with` block; a step that fails does not count."""
        drawn = self.begin(draw)
        try:
            yield drawn
        except BaseException:
            self._deactivate()
            raise
        self.end()

    def begin(self, draw: Draw | None) -> dict[str, int]:
        """Activate the ranks that `draw` returns; without it, all ranks are trained."""
        if self._active is not None:
            raise TrainingError(
                "the previous step has not ended. Call end_step(), or leave its `with "
                "train.step():`, before the next one."
            )
        self._require_finite_weights()
        drawn = self.live_ranks() if draw is None else draw()
        self._whole_step = draw is None
        self._drawn = {self._layers[name]: rank for name, rank in drawn.items()}
        for layer in (*self._drawn, *self._unseen.values()):
            layer.__dict__["positions"] = None  # without nn.Module's slow setattr
        self._active = ExitStack()
        self._active.enter_context(activated(self._drawn))
        if self._recorder is not None:
            self._recorder.listening = True
        return drawn

    def end(self) -> None:
        """Activate all ranks again and count the step."""
        if self._active is None:
            raise TrainingError("end_step() was called without a step. Call begin_step() before.")
        missed = any(layer.active_rank != min(r, layer.rank) for layer, r in self._drawn.items())
        self._deactivate()
        if missed:
            raise TrainingError(
                "end_step() was called without the active ranks of begin_step(), for example in "
                "another thread. Call both, and forward and backward, in the same thread."
            )
        self.count += 1
        self.whole += self._whole_step
        ran = [name for name, layer in self._unseen.items() if layer.positions is not None]
        self.forwards += bool(ran) or any(layer.positions is not None for layer in self._drawn)
        for name in ran:
            del self._unseen[name]
            self.left_out.discard(name)

    def _deactivate(self) -> None:
        assert self._active is not None
        self._active.close()
        self._active = None
        if self._recorder is not None:
            self._recorder.listening = False

    def _require_finite_weights(self) -> None:
        """Raise TrainingError if the last step made weights NaN.

        Only the layer that was sampled last is checked, and only on the CPU: accelerators would
        have to wait, and are covered by the check at the end of the epoch.
        """
        last = next(iter(self._drawn), None)
        if last is None or last.u.device.type != "cpu" or is_sharded(last.u):
            return
        if not math.isfinite(last.u.detach().sum(dtype=torch.float32).item()):
            raise TrainingError(
                "the last step made weights NaN or infinite: its loss was not finite. Lower the "
                "learning rate or clip gradients, and resume from the last good checkpoint."
            )

    def require_some(self, epoch: int) -> None:
        """Raise TrainingError if no low-rank layer was trained in this epoch."""
        if self.forwards == 0:
            raise TrainingError(
                f"no low-rank layer ran inside step() in epoch {epoch} ({self.count} steps), so "
                "that nothing was trained. Put forward and backward inside `with train.step():`."
            )
        if not self.optimized:
            raise TrainingError(
                f"optimizer.step() was never called in epoch {epoch} ({self.count} steps), so that "
                "nothing was trained. Call it on the method's optimizer after each step."
            )

    def new_epoch(self) -> None:
        """Reset the counts, and leave out layers that no forward has reached yet."""
        self.count = self.forwards = self.whole = 0
        self.optimized = False
        live = self.live_ranks()
        if unreached := [name for name in self._unseen if name in live]:
            self.left_out.update(unreached)
            warnings.warn(
                f"the forward never reached these layers in this epoch: {listed(unreached)}. They "
                "are not sampled until it does. Leave them dense with decompose(…, skip=…).",
                stacklevel=4,  # the caller of end_epoch
            )

    def _note_optimized(self) -> None:
        self.optimized = True

    @property
    def sampled(self) -> float:
        """The share of this epoch's steps that did not train the whole model."""
        return 1 - self.whole / self.count

    def chances(self, drawn: Mapping[str, list[float]]) -> dict[str, list[float]]:
        """Return the probability of each layer to be at rank 1, 2, … in a step of this epoch.

        `drawn` has these probabilities for the steps that did not train the whole model.
        """
        sampled = self.sampled
        return {
            name: [
                sampled * chance + (1 - sampled) * (b == len(rank_chances))
                for b, chance in enumerate(rank_chances, 1)
            ]
            for name, rank_chances in drawn.items()
        }

    def measure(self, ledger: Ledger) -> None:
        """Count the MACs of the recorded input in a ledger that has none."""
        if self._recorder is None:
            return
        example, self._recorder.example = self._recorder.example, None
        if self.forwards:  # an input that is not recorded by now never will be (compiled models)
            self._recorder.remove()
            self._recorder = None
        if example is not None and ledger.dense_macs is None:
            try:
                ledger.measure(self._model, example)
            except LayerError as error:
                logger.warning("the ledger has no MACs: %s Give LoD an example=.", error)

    def counts(self) -> dict[str, Any]:
        """Return the counts of this epoch and the layers that never ran, for a state."""
        return {
            "steps": self.count,
            "forwards": self.forwards,
            "whole": self.whole,
            "optimized": self.optimized,
            "unseen": list(self._unseen),
            "left_out": sorted(self.left_out),
        }

    def load_counts(self, state: Mapping[str, Any]) -> None:
        """Restore the counts from a state."""
        counts = (require_whole(key, state[key]) for key in ("steps", "forwards", "whole"))
        self.count, self.forwards, self.whole = counts
        # older states do not have it: assume that their optimizer was stepped
        self.optimized = require_bool("optimized", state.get("optimized", True))
        self._unseen = {name: self._layers[name] for name in state.get("unseen", ())}
        self.left_out.clear()
        self.left_out.update(n for n in state.get("left_out", ()) if n in self._layers)


def live_ranks(layers: Mapping[str, LowRank], left_out: set[str]) -> dict[str, int]:
    """Return the rank of each layer that has ranks, trains them, and is not left out."""
    return {
        name: layer.rank
        for name, layer in layers.items()
        if name not in left_out and layer.rank and layer.u.requires_grad
    }


# -- passes ----------------------------------------------------------------------------------------


def backward_pass(
    forward: Callable[[], Any], loss: Callable[[Any], Tensor], weight: float
) -> Tensor:
    """Do forward and backward of one pass, and return its weighted loss."""
    # without a variable for the output, it is freed before the backward if the loss permits
    value = require_finite_loss(require_loss(loss(forward())) * weight)
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def teacher_pass(
    forward: Callable[[], Any],
    loss: Callable[[Any], Tensor],
    weight: float,
    teaches: Callable[[Any], bool],
) -> tuple[Tensor, Any]:
    """Do one pass whose output is a target of the next one.

    Returns:
        The weighted loss, and the detached output; None instead if `teaches` is False for it.
    """
    output = forward()
    teaching = teaches(output)
    value = require_finite_loss(require_loss(loss(output)) * weight)
    output = tree_map_only(Tensor, Tensor.detach, output) if teaching else None
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach(), output


def soft_cross_entropy(output: Tensor, teacher: Tensor) -> Tensor:
    """Return the cross-entropy of scores (N, classes, …) with the teacher's probabilities."""
    return F.cross_entropy(output, teacher.softmax(1))


def missing_shape(output: Any) -> str:
    """Return the shape that an output needs to be a target by its class scores; '' if it has it."""
    if not isinstance(output, Tensor) or output.ndim in (0, 1, 3):  # 3: classes second or last?
        description = (
            f"{tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        )
        return f"shape (N, classes) or (N, classes, height, width); the output is {description}"
    if output.shape[1] < 2:
        return (
            "classes, but the output has a single score, which cannot be compared as probabilities"
        )
    return ""


# -- an example of the input -----------------------------------------------------------------------


class ExampleRecorder:
    """Records the shapes of the first input that reaches a model while `listening`."""

    def __init__(self, model: nn.Module) -> None:
        self.listening = False
        self.example: ModelInputs | None = None
        hook = _RecordingHook(weakref.ref(self))
        self._handle = model.register_forward_pre_hook(hook, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hook from the model."""
        self._handle.remove()


class _RecordingHook:
    """A forward hook that records one input; in a pickled or copied model it does nothing."""

    def __init__(self, recorder: weakref.ref[ExampleRecorder] | None = None) -> None:
        self._recorder = recorder

    def __reduce__(self) -> tuple[type[_RecordingHook], tuple[()]]:
        return _RecordingHook, ()

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._recorder is None:
            return  # inside a compiled graph this hook must have no effect
        recorder = self._recorder()
        if recorder is not None and recorder.listening and recorder.example is None:
            recorder.example = ModelInputs(args, kwargs).on_meta()


# -- steps of the optimizer ------------------------------------------------------------------------


def call_after_steps(optimizer: Optimizer, method: Callable[[], None]) -> None:
    """Call a bound method after each optimizer step that is not skipped, while its object lives."""
    weak = weakref.WeakMethod(method)

    def after_step(stepped: Optimizer, *_: Any) -> None:
        skipped = getattr(stepped, "found_inf", None)
        if skipped is not None and skipped > 0:
            return  # GradScaler lets fused optimizers skip the step themselves
        if (call := weak()) is not None:
            call()

    optimizer.register_step_post_hook(after_step)


def call_before_steps(optimizer: Optimizer, method: Callable[[], None]) -> None:
    """Call a bound method before each update, when gradients are complete, while its object lives.

    A closure that is given to the optimizer, as by Lightning, computes gradients inside the step:
    the method is called after it.
    """
    weak = weakref.WeakMethod(method)

    def before_step(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if (call := weak()) is None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            call()
            return None

        def then_called() -> Any:
            value = closure()
            call()
            return value

        return args[:1], {**kwargs, "closure": then_called}

    optimizer.register_step_pre_hook(before_step)
