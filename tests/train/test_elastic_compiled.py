"""Compiled models train every size: the numbers of eager ones, and one graph for all sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import maestro_lod as lod
from maestro_lod.train.fit import FitOptions, Watch


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def data(count: int = 8) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(count, 16, 2, 6, 6, generator=torch.Generator().manual_seed(3))
    return [*zip(x, x.flatten(2)[..., :4].argmax(-1), strict=True)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(128, 24), nn.ReLU(), nn.Linear(24, 4),
    )  # fmt: skip


def trained(backend: Any, **options: Any) -> tuple[nn.Module, list[int], int]:
    """Train both phases; return the model, the graphs after each epoch, and the sizes drawn."""
    model = lod.decompose(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train = lod.Elastic(model, optimizer, **options)
    run = model if backend is None else torch.compile(model, backend=backend)
    graphs, drawn = [], set()
    draw = train.rungs.draw

    def noted() -> dict[str, int]:
        ranks = draw()
        drawn.add(tuple(ranks.values()))
        return ranks

    train.rungs.draw = noted  # type: ignore[method-assign]
    watch = Watch(epoch=lambda _: graphs.append(getattr(backend, "frame_count", 0)))
    lod.fit(
        run, data(), optimizer=optimizer, method=train, epochs=3, watch=watch,
        options=FitOptions(recalibration=0),
    )  # fmt: skip
    assert train.phase == "consolidation"
    return model, graphs, len(drawn)


@pytest.mark.parametrize("options", [{"smallest": 0.2}, {"sizes": [0.6]}], ids=["all", "one"])
def test_all_sizes_run_in_one_graph_with_the_numbers_of_the_eager_model(
    options: dict[str, Any],
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled, graphs, drawn = trained(counter, **options)
    eager, _, _ = trained(None, **options)
    assert lod.ranks(compiled) == lod.ranks(eager)
    for one, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert drawn >= (5 if "smallest" in options else 1)
    assert graphs[0] == graphs[2] == 1  # the whole phase
    assert graphs[3] - graphs[2] == 1  # consolidation, at whatever sizes
