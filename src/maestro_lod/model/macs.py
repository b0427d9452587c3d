"""MACs of a model's dense form, counted on the meta device where possible.

MACs are the multiply-accumulates of weights: no bias, norm, activation, pooling or attention
product. torch's flop counter counts them on a meta copy in which every low-rank layer is dense. A
model whose code reads values, or uses operations that need them, runs once on the example instead,
as a copy on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from maestro_lod.errors import LayerError
from maestro_lod.layers.registry import low_rank_type
from maestro_lod.layers.uses import factor_uses
from maestro_lod.model.inputs import Example, ModelInputs
from maestro_lod.model.replace import copy_on_meta, copy_without_hooks
from maestro_lod.model.structure import read_structure, restructure, uninitialized

# Products with a weight; products of two activations are batched ones or attention.
_WEIGHT_OPS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution}
_BATCHED_OPS = {torch.ops.aten.bmm, torch.ops.aten.baddbmm}
_LOOKUPS = {torch.ops.aten.embedding, torch.ops.aten.index, torch.ops.aten.index_select}


@dataclass(frozen=True)
class DenseMacs:
    """MACs of a model's dense form on one input."""

    total: int
    layers: dict[str, int]
    """MACs by the module that owns the weight matrices, for layers that are dense already."""
    positions: dict[str, int]
    """The number of positions at which each low-rank layer, and each head that shares factors,
    applies its weight."""


def dense_macs(model: nn.Module, example: Example) -> DenseMacs:
    """Count the MACs of the model's dense form; the model itself does not run."""
    call = ModelInputs.from_example(example)
    try:
        try:
            return _counted_macs(copy_on_meta(model), call.on_meta(), without_values=True)
        except Exception:
            # tensors that the forward creates may have to be on meta too, which excludes models
            # that read values of their constants
            with torch.device("meta"):
                return _counted_macs(copy_on_meta(model), call.on_meta(), without_values=True)
    except Exception as error:
        return _macs_with_values(model, call, error)


def _macs_with_values(model: nn.Module, call: ModelInputs, why: Exception) -> DenseMacs:
    """Count on a copy that runs on the example, since the model needs values."""
    inputs = {
        "the model": (*model.parameters(), *model.buffers()),
        "the example": [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor)],
    }
    problem = f"MACs cannot be counted: {type(model).__name__} could not be run"
    for source, tensors in inputs.items():
        if any(tensor.is_meta for tensor in tensors):
            raise LayerError(
                f"{problem} without values ({type(why).__name__}: {why}), and {source} is on the "
                f"meta device, which has none. Give {source} with values, on any other device."
            ) from why
    try:
        twin, call = copy_without_hooks(model, {}).cpu(), call.map_tensors(Tensor.cpu)
        with torch.random.fork_rng(devices=[]):
            return _counted_macs(twin, call, without_values=False)
    except Exception as error:
        raise LayerError(
            f"{problem} on this example ({type(error).__name__}: {error}). Give another example."
        ) from error


def _counted_macs(twin: nn.Module, call: ModelInputs, *, without_values: bool) -> DenseMacs:
    """Count on a copy of the model, whose low-rank layers are made dense in place."""
    uses = factor_uses(twin)
    opened = {name: form for name, form in read_structure(twin).items() if form.kind == "unpacked"}
    # frozen, since some operations record gradients whatever the mode
    twin = restructure(twin, opened, fill=uninitialized).eval().requires_grad_(False)
    modules, counter = dict(twin.named_modules()), _Counter(twin.parameters())
    for use in uses:
        counter.locate(use.name, modules[use.caller], use.count_positions)
    for name, module in modules.items():
        if name in opened and module.applies_parts:
            counter.watch_parts(name, module)
        elif any(p is not None and p.ndim > 1 for p in module._parameters.values()):
            counter.watch(name, module)
    # with fake tensors transformers does not read the values of its masks; torch reads the
    # lengths of packed sequences in any case
    fake = without_values and not call.is_packed
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    call = call if mode is None else call.map_tensors(mode.from_tensor)
    with (
        torch.no_grad(),
        _no_attention_fast_path(),
        _no_fused_recurrence(),
        _no_traces_of_fakes(),
        mode or nullcontext(),
        counter.products,
    ):
        twin(*call.args, **call.kwargs)
    total = counter.so_far() + counter.more
    return DenseMacs(total, counter.layers, {use.name: counter.positions[use.name] for use in uses})


class _Counter:
    """Hooks that attribute the MACs that torch counts to modules."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._flops = FlopCounterMode(display=False)
        self._batched = _BatchedProducts(weights)
        self.layers: dict[str, int] = {}
        self.positions: dict[str, int] = {}
        self.more = 0
        """MACs of layers of registered types that torch does not count as products with weights."""
        self._inner = [0]  # for each running watched module: the MACs of those inside it

    @property
    @contextmanager
    def products(self) -> Iterator[None]:
        """Count the products inside the block."""
        with self._batched, self._flops:  # the last comes first, and splits composite operations
            yield

    def so_far(self) -> int:
        """Return torch's count of the MACs of products with weights."""
        flops = self._flops.flop_counts["Global"]
        return sum(n for op, n in flops.items() if op in _WEIGHT_OPS) // 2 + self._batched.macs

    def locate(self, name: str, caller: nn.Module, count_positions: Callable[..., int]) -> None:
        """Sum the positions at which a weight is applied, over the calls of its caller."""
        self.positions[name] = 0

        def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.positions[name] += count_positions(*args, *kwargs.values())

        caller.register_forward_pre_hook(add, with_kwargs=True)

    def watch(self, name: str, module: nn.Module) -> None:
        """Record the MACs of a module that owns weights, without watched modules inside it."""
        if low_rank_type(type(module)) is None:
            self._book(module, lambda *inputs: None, lambda macs: {name: macs})
            return
        layer = uninitialized(name, module, 0)  # which computes its own cost
        self._book(
            module,
            lambda *inputs: layer.dense_macs(layer.count_positions(*inputs)),
            lambda macs: {name: macs},
        )

    def watch_parts(self, prefix: str, module: Any) -> None:
        """Record the MACs of the parts of a module that multiplies by their weights."""
        sizes = {
            f"{prefix}.{key}".lstrip("."): part.weight.numel()
            for key, part in module.named_children()
        }
        whole = sum(sizes.values())
        self._book(
            module,
            lambda *inputs: whole * module.count_positions(*inputs),
            lambda macs: {name: macs * size // whole for name, size in sizes.items()},
        )

    def _book(
        self,
        module: nn.Module,
        compute: Callable[..., int | None],
        split: Callable[[int], dict[str, int]],
    ) -> None:
        """Record the MACs of each call of a module, computed from its inputs, else as counted."""
        started: list[tuple[int, int]] = []

        def enter(*_: Any) -> None:
            started.append((self.so_far(), self.more))
            self._inner.append(0)

        def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
            before, more = started.pop()
            counted, macs = self.so_far() - before, compute(*args, *kwargs.values())
            if macs is None:
                macs = counted + self.more - more
            else:
                self.more = more + macs - counted
            for name, own in split(macs - self._inner.pop()).items():
                self.layers[name] = self.layers.get(name, 0) + own
            self._inner[-1] += macs

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, with_kwargs=True)


class _BatchedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the MACs of batched and grouped products with an operand made of weights.

    Results of operations on weights alone count as weights, except products: views, selected
    experts, normalized weights; but not rows that are looked up in a table.
    """

    supports_higher_order_operators = True

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.macs = 0
        self._weights = WeakIdKeyDictionary({weight: True for weight in weights})

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        values = [t for t in tensors if t.is_floating_point()]  # indices only select
        op = getattr(func, "overloadpacket", func)
        if op in _BATCHED_OPS:
            if any(value in self._weights for value in values[-2:]):
                self.macs += flop_registry[op](*args, **kwargs, out_val=result) // 2
        elif "grouped_mm" in str(op):  # of torch, or of transformers where that is missing
            if any(value in self._weights for value in values[:2]):
                self.macs += _grouped_macs(values[0], values[1], result)
        elif op in _LOOKUPS and args[0].ndim == 2:
            pass  # rows of a table, such as relative positions, count as inputs
        elif op not in _WEIGHT_OPS and values and all(value in self._weights for value in values):
            self._weights.update({t: True for t in tree_leaves(result) if isinstance(t, Tensor)})
        return result


def _grouped_macs(left: Tensor, right: Tensor, product: Tensor) -> int:
    """Count the MACs of rows (or columns) that are each multiplied by one matrix of a stack."""
    if right.ndim == 3:
        return left.numel() * product.shape[-1]
    return right.numel() * product.shape[-2]


@contextmanager
def _no_attention_fast_path() -> Iterator[None]:
    """Make torch's transformer layers call their sublayers, so that their MACs are counted."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def _no_fused_recurrence() -> Iterator[None]:
    """Make recurrent layers multiply step by step: oneDNN's LSTM is one operation without a count.

    `torch.backends.mkldnn.flags` also sets an option of Intel GPUs, and warns.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def _no_traces_of_fakes() -> Iterator[None]:
    """Silence torch's log about operations that need values; the model then runs with values."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
