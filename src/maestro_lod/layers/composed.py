"""Cache the product of a layer's factors, and its gradient, over several passes.

At full rank most layers multiply their factors out in every forward, and each backward computes the
gradients of both factors from that of the product. While the factors do not change, once is enough:
the passes use the product as a dense weight, whose accumulated gradient goes to the factors last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn

from maestro_lod.errors import TrainingError
from maestro_lod.layers.factors import Factors


class ProductCache:
    """The product of one layer's factors, computed at its first use."""

    def __init__(self, passes: int) -> None:
        self.passes = passes
        """The number of passes that share the product; the more, the sooner it pays."""
        self._product: tuple[Tensor, Tensor] | None = None  # and the same as a leaf
        self._factors: list[tuple[Tensor, int]] = []  # with their versions at that time

    def get(self, u: Tensor, v: Tensor, compose: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the product as a leaf, on which the gradients of all passes accumulate."""
        if self._product is None:
            # not through the hooks of checkpoints, which would miss it when they repeat the pass
            with torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
                product = compose(u, v)
            self._product = product, product.detach().requires_grad_(product.requires_grad)
            self._factors = [(u, u._version), (v, v._version)]
        self._require_unchanged()
        return self._product[1]

    def accumulated(self) -> tuple[Tensor, Tensor] | None:
        """Return the product and its accumulated gradient; None if no pass used it."""
        if self._product is None or self._product[1].grad is None:
            return None
        self._require_unchanged()
        gradient = self._product[1].grad
        if gradient.requires_grad:
            raise TrainingError(
                "backward(create_graph=True) does not work inside composed_once, whose gradients "
                "reach the factors at the end of the block. Leave one of them out."
            )
        return self._product[0], gradient

    def _require_unchanged(self) -> None:
        if any(factor._version != version for factor, version in self._factors):
            raise TrainingError(
                "weights changed inside composed_once, before gradients reached them at its end. "
                "Call optimizer.step() after the block."
            )


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def usable_cache(layer: Factors, u: Tensor, v: Tensor) -> ProductCache | None:
    """Return the cache of a layer's product if this pass can use it: full rank, usual modes."""
    cache = layer.product_cache
    if cache is None or torch.compiler.is_compiling() or u is not layer.u or v is not layer.v:
        return None
    usual = (
        torch.is_grad_enabled()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled(u.device.type)
        # hooks expect one gradient per pass
        and not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in (layer.u, layer.v))
    )
    return cache if usual else None


@contextmanager
def composed_once(model: nn.Module, passes: int) -> Iterator[None]:
    """Multiply factors out once for `passes` forward and backward passes inside the block.

    The gradients of the factors arrive when the block ends: clip them and call the optimizer after
    it. Layers that run at fewer ranks, under autocast or compiled, or with hooks on their factors,
    and all layers of a training with several processes, compute as without the block.

    Args:
        model: A decomposed model.
        passes: The number of forward and backward passes in the block.

    Raises:
        TrainingError: If the factors change inside the block.

    Example:
        >>> with composed_once(model, len(batches)):
        ...     for x, y in batches:
        ...         (F.cross_entropy(model(x), y) / len(batches)).backward()
        >>> optimizer.step()
    """
    single = not (distributed.is_available() and distributed.is_initialized())
    layers = [m for m in model.modules() if isinstance(m, Factors)] if single else []
    caches = {layer: ProductCache(passes) for layer in layers if layer.product_cache is None}
    try:
        for layer, cache in caches.items():
            layer.__dict__["product_cache"] = cache  # past nn.Module's slow setattr
        yield
        if pairs := [p for cache in caches.values() if (p := cache.accumulated()) is not None]:
            products, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(products, gradients)  # of the factors
    finally:
        for layer in caches:
            layer.__dict__["product_cache"] = None
