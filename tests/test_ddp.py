"""Two processes in DistributedDataParallel: one process on the whole batch, through shrinks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from maestro_lod import LoD, MaestroError, decompose, ranks

EPOCHS, STEPS, BATCH = 6, 3, 8


def small_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 12), nn.Tanh(), nn.Linear(12, 4),
    )  # fmt: skip
    return decompose(model.to(dtype))


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 2, 4, 4, generator=drawn, dtype=dtype)
    return x, torch.randint(4, (BATCH,), generator=drawn)


def share(x: Tensor) -> Tensor:
    """Return this process's part of a batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: optim.AdamW(p, lr=5e-3),
}


def drop_last_rank(model: nn.Module, optimizer: optim.Optimizer, epoch: int) -> None:
    """Make one more rank of one layer useless, as the penalty would in a longer training."""
    layers = [m for m in model.modules() if hasattr(m, "u")]
    layer = layers[epoch % len(layers)]
    with torch.no_grad():
        layer.u[:, -1:] = 0.0
        layer.v[-1:] = 0.0


def trained(
    name: str, dtype: torch.dtype = torch.float64, *, accumulate: int = 1, **options: Any
) -> dict[str, Any]:
    """Train, in as many processes as there are, and return what became of the model."""
    wraps = dist.is_initialized()
    use = {key: options.pop(key) for key in ("compiled", "loss", "ema") if key in options}
    model = inner = small_model(dtype)
    if use.get("compiled") == "inside":
        model = torch.compile(model, backend="eager")
    if wraps:
        model = ddp = DistributedDataParallel(model, **options)
    if use.get("compiled") == "outside":
        model = torch.compile(model, backend="eager")
    optimizer = OPTIMIZERS[name](inner.parameters())
    ema = AveragedModel(inner) if use.get("ema") else None
    train = LoD(model, optimizer, penalty=1e-3, seed=5, threshold=1e-4, ema=ema)
    lost, equal = [], []
    for epoch in range(EPOCHS):
        for step in range(STEPS):
            for part in range(accumulate):
                x, y = batch(100 * epoch + 10 * step + part, dtype)
                if wraps:
                    x, y = share(x), share(y)
                quiet = wraps and part + 1 < accumulate
                with ddp.no_sync() if quiet else contextlib.nullcontext(), train.step():
                    loss = F.cross_entropy(model(x), y) / accumulate
                    if use.get("loss"):
                        loss = loss + train.penalty_loss() / accumulate
                    loss.backward()
            if not use.get("loss"):
                train.add_penalty_gradients()
            optimizer.step()
            optimizer.zero_grad()
            if ema is not None:
                ema.update_parameters(inner)
        drop_last_rank(inner, optimizer, epoch)
        lost.append(train.end_epoch())
        equal.append(same_everywhere(inner) if wraps else True)
    state = {k: v.detach().clone() for k, v in inner.state_dict().items()}
    if ema is not None:
        state |= {f"ema.{k}": v.clone() for k, v in ema.module.state_dict().items()}
    return {"state": state, "lost": lost, "equal": equal, "ranks": ranks(model)}


def same_everywhere(model: nn.Module) -> bool:
    """Say whether the parameters of all processes are equal, bit for bit."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(everyone[0], other) for other in everyone)


def in_process(name: str, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    return trained(name, dtype, **options)


def assert_as_one_process(
    results: list[dict[str, Any]], alone: dict[str, Any], within: float
) -> None:
    assert sum(bool(lost) for lost in alone["lost"]) >= 4
    for result in results:
        assert all(result["equal"])
        assert result["lost"] == alone["lost"] and result["ranks"] == alone["ranks"]
        for key, value in alone["state"].items():
            torch.testing.assert_close(result["state"][key], value, rtol=within, atol=within)


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "penalty in the loss": {"loss": True},
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "small buckets, accumulated without sync": {"accumulate": 2, "bucket_cap_mb": 1},
    "averaged": {"ema": True},
    "compiled inside": {"compiled": "inside"},
    "compiled outside": {"compiled": "outside"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_processes_train_what_one_does_on_the_whole_batch(pair, options, name):
    here = {key: v for key, v in options.items() if key in ("accumulate", "loss", "ema")}
    alone = trained(name, **here)
    assert_as_one_process(pair(in_process, name, torch.float64, options), alone, 1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_processes_train_what_one_does_in_single_precision(pair, name):
    results = pair(in_process, name, torch.float32, {})
    assert_as_one_process(results, trained(name, torch.float32), 1e-6)
