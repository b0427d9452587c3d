"""Hooks that see what the layers of a dense model are called with, and what they say to a loss."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maestro_lod.errors import DataError
from maestro_lod.layers.lowrank import LowRank, Rows
from maestro_lod.layers.registry import unpacked_type
from maestro_lod.model.survey import Plan

LARGEST_OUTPUT = 4096  # of a layer whose output gradients are related to each other


@dataclass
class Moments:
    """What was seen of one layer."""

    inputs: Tensor | None = None
    """The sum of x·xᵀ over all positions, for each group: (groups, n, n)."""
    outputs: Tensor | None = None
    """The same for the gradients of the outputs, (groups, m, m); of embeddings and wide outputs
    the diagonal alone, (groups, m). None means that all outputs count the same."""
    reached: Tensor | None = None
    """Which groups got any input."""
    count: int = 0
    """At how many positions the layer was used, or its experts together."""
    has_gradients: bool = False
    """Whether a loss said how much errors of the layer count."""
    looked_up: bool = False
    """Whether rows of the weight are looked up, not multiplied: `outputs` counts them."""

    def add(self, what: str, moment: Tensor) -> None:
        known = getattr(self, what)
        if what == "inputs":
            now = moment.flatten(1).any(1)
            self.reached = now if self.reached is None else self.reached | now
        if known is None:
            setattr(self, what, moment.double())
        else:
            known += moment

    def to_disk(self) -> None:
        """Let tensors of a CPU lie in temporary files: what nobody reads needs no memory then."""
        for what in ("inputs", "outputs"):
            if (known := getattr(self, what)) is not None and known.device.type == "cpu":
                setattr(self, what, _on_disk(known))

    def join_head(self, head: Moments) -> None:
        """Take over what was seen of an output head that uses the rows of this embedding too.

        Every row is scored at every position, so that all of them count the same. With gradients
        both uses count by what they do to the loss, else half each.
        """
        if head.inputs is None:
            return
        self.reached = head.reached
        if self.inputs is not None and head.outputs is not None:
            looked_up = self.count / head.outputs.shape[1] * self.inputs
            self.inputs = head.outputs.mean() * head.inputs + looked_up
        else:
            usual = head.inputs.diagonal(dim1=1, dim2=2).mean()
            self.inputs = head.inputs + usual * torch.eye(head.inputs.shape[1]).to(usual)
            self.has_gradients = False
        self.outputs = None


def _on_disk(tensor: Tensor) -> Tensor:
    with tempfile.TemporaryFile() as file:
        file.truncate(tensor.nbytes)
        pages = mmap.mmap(file.fileno(), tensor.nbytes)
    copied = torch.frombuffer(pages, dtype=tensor.dtype).view_as(tensor).copy_(tensor)
    if hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)
    return copied


class Observer:
    """Sees what some layers of a model are called with, by hooks."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        layers: Mapping[str, LowRank],
        moments: Mapping[str, Moments],
        *,
        gradients: bool,
    ) -> None:
        self.model, self._plan, self._layers, self._moments = model, plan, layers, moments
        self._gradients, self.batch = gradients, 0
        self._outputs: list[tuple[str, Tensor, Any]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the layers inside the `with` block."""
        modules = dict(self.model.named_modules())
        opened = {part: whole for whole, parts in self._plan.opened.items() for part in parts}
        wholes = {opened[name] for name in self._layers if name in opened}
        with ExitStack() as hooks:

            def hook(module: nn.Module, function: Callable[..., Any]) -> None:
                handle = module.register_forward_hook(function, with_kwargs=True)
                hooks.callback(handle.remove)

            for name in self._layers.keys() - opened.keys():
                hook(modules[name], self._seen(name))
            for head, embedding in self._plan.heads.items():
                if embedding in self._layers:
                    hook(modules[head], self._head_seen(head))
            for name in wholes:
                hook(modules[name], self._opened(name, modules[name]))
            hooks.enter_context(_without_nested_tensors(self.model))
            yield

    def _seen(self, name: str) -> Callable[..., Tensor | None]:
        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
            layer, inputs = self._layers[name], (*args, *kwargs.values())
            with torch.no_grad():
                if (counts := layer.lookups(*inputs)) is not None:
                    self._count(name, counts)
                for rows in layer.input_rows(*inputs):
                    self._add(name, rows)
            return self._remember(name, output, inputs) if self._gradients else None

        return look

    def _remember(self, name: str, output: Tensor, inputs: Any = ()) -> Tensor | None:
        """Keep an output for its gradient; frozen layers give one that has it instead of theirs."""
        frozen = not output.requires_grad
        seen = output.detach().requires_grad_() if frozen else output
        self._outputs.append((name, seen, inputs))
        return seen.clone() if frozen else None

    def _head_seen(self, head: str) -> Callable[..., Tensor | None]:
        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
            rows = next(iter((*args, *kwargs.values())))
            self._add(head, [rows.detach().reshape(-1, rows.shape[-1])])
            return self._remember(head, output) if self._gradients else None

        return look

    def _opened(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """Look into a layer with several weights: run it once more, with parts that can be seen."""
        opened = unpacked_type(type(module))(module)
        if opened.applies_parts:
            return lambda module, args, kwargs, output: opened.shown(
                self._part_seen(name), *args, **kwargs
            )  # None leaves the output as it is
        for key, part in opened.named_children():
            if (full := f"{name}.{key}".lstrip(".")) in self._layers:
                part.register_forward_hook(self._seen(full), with_kwargs=True)
        return lambda module, args, kwargs, output: opened(*args, **kwargs)

    def _part_seen(self, name: str) -> Callable[[str, Tensor, Tensor], None]:
        def see(part: str, rows: Tensor, product: Tensor) -> None:
            if (full := f"{name}.{part}".lstrip(".")) in self._layers:
                self._add(full, [rows])
                if self._gradients and product.requires_grad:
                    self._outputs.append((full, product, ()))

        return see

    def _count(self, name: str, counts: Tensor) -> None:
        """Add how often rows of a weight are looked up: that is how much they count."""
        seen = self._moments[name]
        seen.add("outputs", counts[None])
        seen.count += int(counts.sum())
        seen.looked_up = True

    def _add(self, name: str, rows: Rows) -> None:
        seen = self._moments[name]
        seen.add("inputs", self._moment(name, rows))
        seen.count += sum(len(each) for each in rows)

    def _moment(self, name: str, rows: Rows) -> Tensor:
        exact = [r.to(torch.promote_types(r.dtype, torch.float32)) for r in rows]
        moment = torch.stack([r.mT @ r for r in exact])
        if not bool(torch.isfinite(moment).all()):
            raise DataError(
                f"calibration batch {self.batch} gives NaN or infinite values at layer "
                f"{name or '(the model itself)'}. Look at the batch, or compute in float32."
            )
        return moment

    def differentiate(self, loss: Tensor) -> None:
        """Add what the loss says about the outputs of all layers that were called."""
        outputs, self._outputs = self._outputs, []
        gradients = torch.autograd.grad(loss, [y for _, y, _ in outputs], allow_unused=True)
        for (name, _, inputs), gradient in zip(outputs, gradients, strict=True):
            if gradient is None:
                continue
            layer = self._layers.get(name)
            of_head = [gradient.reshape(-1, gradient.shape[-1])]
            rows = of_head if layer is None else layer.output_rows(gradient, *inputs)
            if rows is None:
                continue
            # what an embedding puts out are its columns; its rows count by what is looked up
            side = "inputs" if self._moments[name].looked_up else "outputs"
            wide = layer is None or rows[0].shape[1] > LARGEST_OUTPUT
            self._moments[name].add(side, (self._diagonal if wide else self._moment)(name, rows))
            self._moments[name].has_gradients = True

    def _diagonal(self, name: str, rows: Rows) -> Tensor:
        return torch.stack([each.float().square().sum(0) for each in rows])


@contextmanager
def _without_nested_tensors(model: nn.Module) -> Iterator[None]:
    """Keep torch's encoders from packing sequences, of which layers would see no plain tensor."""
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
    before = [encoder.use_nested_tensor for encoder in encoders]
    try:
        for encoder in encoders:
            encoder.use_nested_tensor = False
        yield
    finally:
        for encoder, use in zip(encoders, before, strict=True):
            encoder.use_nested_tensor = use
