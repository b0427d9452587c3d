"""Hooks that collect second moments of a dense model's layers during calibration."""

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

LARGEST_OUTPUT = 4096  # for wider outputs only the diagonal of the moment is collected


@dataclass
class Moments:
    """Second moments of one layer."""

    inputs: Tensor | None = None
    """The sum of x·xᵀ over all positions, for each group: (groups, n, n)."""
    outputs: Tensor | None = None
    """The same for the gradients of the outputs, (groups, m, m); for embeddings and wide outputs
    only the diagonal, (groups, m). None means that all outputs count the same."""
    reached: Tensor | None = None
    """The groups with any input, as a mask."""
    count: int = 0
    """The number of positions at which the layer, or any of its experts, was used."""
    has_gradients: bool = False
    """Whether gradients of a loss weight the errors of the layer."""
    looked_up: bool = False
    """Whether rows of the weight are looked up, not multiplied: `outputs` counts them."""

    def add(self, side: str, moment: Tensor) -> None:
        """Add a moment of "inputs" or "outputs"."""
        total = getattr(self, side)
        if side == "inputs":
            now = moment.flatten(1).any(1)
            self.reached = now if self.reached is None else self.reached | now
        if total is None:
            setattr(self, side, moment.double())
        else:
            total += moment

    def to_disk(self) -> None:
        """Move CPU tensors to memory-mapped temporary files, to free memory until they are read."""
        for side in ("inputs", "outputs"):
            if (moment := getattr(self, side)) is not None and moment.device.type == "cpu":
                setattr(self, side, _on_disk(moment))

    def join_head(self, head: Moments) -> None:
        """Add the moments of an output head that shares this embedding.

        The head scores every row at every position, so all rows count the same. With gradients both
        uses count by their effect on the loss, else half each.
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
    """Hooks that collect moments of some layers of a model."""

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
        """Collect moments inside the `with` block."""
        modules = dict(self.model.named_modules())
        whole_of = {part: whole for whole, parts in self._plan.unpacked.items() for part in parts}
        wholes = {whole_of[name] for name in self._layers if name in whole_of}
        with ExitStack() as hooks:

            def hook(module: nn.Module, function: Callable[..., Any]) -> None:
                handle = module.register_forward_hook(function, with_kwargs=True)
                hooks.callback(handle.remove)

            for name in self._layers.keys() - whole_of.keys():
                hook(modules[name], self._layer_hook(name))
            for head, embedding in self._plan.heads.items():
                if embedding in self._layers:
                    hook(modules[head], self._head_hook(head))
            for name in wholes:
                hook(modules[name], self._unpacked_hook(name, modules[name]))
            hooks.enter_context(_without_nested_tensors(self.model))
            yield

    def _layer_hook(self, name: str) -> Callable[..., Tensor | None]:
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
        """Keep an output for its gradient; for frozen layers return a replacement with gradient."""
        frozen = not output.requires_grad
        kept = output.detach().requires_grad_() if frozen else output
        self._outputs.append((name, kept, inputs))
        return kept.clone() if frozen else None

    def _head_hook(self, head: str) -> Callable[..., Tensor | None]:
        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
            rows = next(iter((*args, *kwargs.values())))
            self._add(head, [rows.detach().reshape(-1, rows.shape[-1])])
            return self._remember(head, output) if self._gradients else None

        return look

    def _unpacked_hook(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """Observe a layer with several weights by running it again, unpacked."""
        unpacked = unpacked_type(type(module))(module)
        if unpacked.applies_parts:
            return lambda module, args, kwargs, output: unpacked.observed(
                self._part_callback(name), *args, **kwargs
            )  # None keeps the output
        for key, part in unpacked.named_children():
            if (full := f"{name}.{key}".lstrip(".")) in self._layers:
                part.register_forward_hook(self._layer_hook(full), with_kwargs=True)
        return lambda module, args, kwargs, output: unpacked(*args, **kwargs)

    def _part_callback(self, name: str) -> Callable[[str, Tensor, Tensor], None]:
        def on_product(part: str, rows: Tensor, product: Tensor) -> None:
            if (full := f"{name}.{part}".lstrip(".")) in self._layers:
                self._add(full, [rows])
                if self._gradients and product.requires_grad:
                    self._outputs.append((full, product, ()))

        return on_product

    def _count(self, name: str, counts: Tensor) -> None:
        """Weight the rows of an embedding by the numbers of their look-ups."""
        moments = self._moments[name]
        moments.add("outputs", counts[None])
        moments.count += int(counts.sum())
        moments.looked_up = True

    def _add(self, name: str, rows: Rows) -> None:
        moments = self._moments[name]
        moments.add("inputs", self._moment(name, rows))
        moments.count += sum(len(each) for each in rows)

    def _moment(self, name: str, rows: Rows) -> Tensor:
        exact = [r.to(torch.promote_types(r.dtype, torch.float32)) for r in rows]
        moment = torch.stack([r.mT @ r for r in exact])
        if not bool(torch.isfinite(moment).all()):
            raise DataError(
                f"calibration batch {self.batch} gives NaN or infinite values at layer "
                f"{name or '(the model itself)'}. Check the batch, or compute in float32."
            )
        return moment

    def differentiate(self, loss: Tensor) -> None:
        """Add the moments of the loss's gradients at the outputs of all called layers."""
        outputs, self._outputs = self._outputs, []
        gradients = torch.autograd.grad(loss, [y for _, y, _ in outputs], allow_unused=True)
        for (name, _, inputs), gradient in zip(outputs, gradients, strict=True):
            if gradient is None:
                continue
            layer = self._layers.get(name)
            flat = [gradient.reshape(-1, gradient.shape[-1])]  # the rows of a shared head
            rows = flat if layer is None else layer.output_rows(gradient, *inputs)
            if rows is None:
                continue
            # the outputs of an embedding are its columns; its rows are weighted by look-ups
            side = "inputs" if self._moments[name].looked_up else "outputs"
            wide = layer is None or rows[0].shape[1] > LARGEST_OUTPUT
            self._moments[name].add(side, (self._diagonal if wide else self._moment)(name, rows))
            self._moments[name].has_gradients = True

    def _diagonal(self, name: str, rows: Rows) -> Tensor:
        return torch.stack([each.float().square().sum(0) for each in rows])


@contextmanager
def _without_nested_tensors(model: nn.Module) -> Iterator[None]:
    """Keep torch's encoders from packing sequences into nested tensors, which hooks cannot use."""
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
    before = [encoder.use_nested_tensor for encoder in encoders]
    try:
        for encoder in encoders:
            encoder.use_nested_tensor = False
        yield
    finally:
        for encoder, use in zip(encoders, before, strict=True):
            encoder.use_nested_tensor = use
