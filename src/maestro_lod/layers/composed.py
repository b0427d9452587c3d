"""Cache the product of a layer's factors, and its gradient, over several passes.

At full rank most layers multiply their factors out in every forward, and each backward takes the
gradient of the product to both factors. While the factors do not change, once is enough: the
passes run on the product as if it were a dense weight, and what they leave there goes to the
factors at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn

from maestro_lod.errors import TrainingError
from maestro_lod.layers.factors import Factors


class Composed:
    """The product of one layer's factors, made at its first use."""

    def __init__(self, passes: int) -> None:
        self.passes = passes
        """How often the product is to be used: it pays more often than for a single pass."""
        self._made: tuple[Tensor, Tensor] | None = None  # the product, and as a leaf
        self._factors: list[tuple[Tensor, int]] = []  # and how often they had been changed

    def of(self, u: Tensor, v: Tensor, compose: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the weight that passes run on, a leaf on which gradients gather."""
        if self._made is None:
            # past checkpoints, which would miss it when they run the pass again
            with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
                product = compose(u, v)
            self._made = product, product.detach().requires_grad_(product.requires_grad)
            self._factors = [(u, u._version), (v, v._version)]
        self._require_unchanged()
        return self._made[1]

    def left(self) -> tuple[Tensor, Tensor] | None:
        """Return the product and the gradient that passes left on it, if they did."""
        if self._made is None or self._made[1].grad is None:
            return None
        self._require_unchanged()
        gradient = self._made[1].grad
        if gradient.requires_grad:
            raise TrainingError(
                "backward(create_graph=True) is not for a block of composed_once, whose gradients "
                "reach the factors at its end. Leave one of them out."
            )
        return self._made[0], gradient

    def _require_unchanged(self) -> None:
        if any(factor._version != version for factor, version in self._factors):
            raise TrainingError(
                "weights changed inside of composed_once, before its end brought their gradients. "
                "Let the optimizer step after the block."
            )


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def kept_for(layer: Factors, u: Tensor, v: Tensor) -> Composed | None:
    """Return where the product of these factors is kept for several passes, if it is.

    It is for the layer's own factors, whole, in a pass like any other.
    """
    kept = layer.kept
    if kept is None or torch.compiler.is_compiling() or u is not layer.u or v is not layer.v:
        return None
    usual = (
        torch.is_grad_enabled()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled(u.device.type)
        # hooks count on one gradient per pass
        and not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in (layer.u, layer.v))
    )
    return kept if usual else None


@contextmanager
def composed_once(model: nn.Module, passes: int) -> Iterator[None]:
    """Multiply factors out once for `passes` forward and backward passes inside the block.

    >>> with composed_once(model, len(batches)):
    ...     for x, y in batches:
    ...         (F.cross_entropy(model(x), y) / len(batches)).backward()
    >>> optimizer.step()

    The gradients of these factors arrive when the block ends: clip them, and let the optimizer
    step, after it. Layers that run at fewer ranks, under autocast or compiled, or have hooks on
    their factors, do as they always do, and so does all that trains in several processes.
    """
    alone = not (distributed.is_available() and distributed.is_initialized())
    layers = [m for m in model.modules() if isinstance(m, Factors)] if alone else []
    mine = {layer: Composed(passes) for layer in layers if layer.kept is None}
    try:
        for layer, composed in mine.items():
            layer.__dict__["kept"] = composed  # past nn.Module's slow setattr
        yield
        if left := [pair for c in mine.values() if (pair := c.left()) is not None]:
            products, gradients = zip(*left, strict=True)
            torch.autograd.backward(products, gradients)  # on to the factors
    finally:
        for layer in mine:
            layer.__dict__["kept"] = None
