"""Layers that are trained as their weights: what happens is what happens to the dense model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import maestro_lod as lod
from maestro_lod.errors import CheckpointError, RankError
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.sizes.rank_order import order_ranks
from maestro_lod.train.unfactored import Unfactored
from tests.support.kinds import KINDS, Kind

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def output_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    output = model(*inputs)
    return output if isinstance(output, Tensor) else output[0]


def steps(model: nn.Module, optimizer: Any, kind: Kind, count: int = 4) -> None:
    for seed in range(count):
        loss = output_of(model, kind.inputs(torch.float64, seed)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def begun(kind: Kind, name: str) -> tuple[nn.Module, Any, Unfactored]:
    model = lod.decompose(kind.dense(torch.float64), tied=kind.tied).train()
    optimizer = OPTIMIZERS[name](model.parameters())
    unfactored = Unfactored(model, optimizer, None)
    unfactored.begin()
    return model, optimizer, unfactored


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_training_is_that_of_the_dense_model(kind: Kind, name: str) -> None:
    dense = kind.dense(torch.float64).train()
    steps(dense, OPTIMIZERS[name](dense.parameters()), kind)
    model, optimizer, unfactored = begun(kind, name)
    assert unfactored.names == [*low_rank_layers(model)]
    steps(model, optimizer, kind)
    inputs = kind.inputs(torch.float64, 9)
    torch.testing.assert_close(
        output_of(model, inputs), output_of(dense, inputs), rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_leaves_identities_alone_where_they_must_have_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[0]
    alone, optimizer, _ = begun(kind, name)
    steps(alone, optimizer, kind)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    model, optimizer, _unfactored = begun(kind, name)
    steps(model, optimizer, kind)
    still = low_rank_layers(model)["layer"].u
    assert still.grad is not None and not still.grad.any()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_an_averaged_copy_follows() -> None:
    model = lod.decompose(KINDS[0].dense())
    ema = AveragedModel(model)
    ema.update_parameters(model)
    before = ema.module.layer.weight.detach().clone()
    unfactored = Unfactored(model, torch.optim.SGD(model.parameters(), lr=0.1), ema)
    unfactored.begin()
    torch.testing.assert_close(ema.module.layer.weight, before)
    with torch.no_grad():
        model.layer.v += 1.0
    ema.update_parameters(model)
    torch.testing.assert_close(ema.module.layer.weight, before + 0.5)
    order_ranks(model, ema=ema)
    assert model.layer.identity_factor is ema.module.layer.identity_factor is None


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_optimizer_goes_on_with_both_factors(kind: Kind) -> None:
    """What it remembers of a gradient of the weight becomes that of both factors."""
    model, _, _ = begun(kind, "sgd")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    steps(model, optimizer, kind, count=1)
    order_ranks(model, optimizer)
    remembered = {p: optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()}
    fresh = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    steps(model, fresh, kind, count=1)
    for layer in low_rank_layers(model).values():
        for factor in (layer.u, layer.v):
            torch.testing.assert_close(remembered[factor], factor.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fused_optimizers_go_on_after_ranks_have_an_order(name: str) -> None:
    kind = KINDS[0]
    model = lod.decompose(kind.dense(torch.float64))
    make: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    more = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = make(model.parameters(), lr=0.01, fused=True, **more)
    Unfactored(model, optimizer, None).begin()
    steps(model, optimizer, kind)
    order_ranks(model, optimizer)
    steps(model, optimizer, kind)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_fewer_ranks_are_refused_until_they_have_an_order(tmp_path: Path) -> None:
    model, _, unfactored = begun(KINDS[0], "sgd")
    whole = copy.deepcopy(model)
    with pytest.raises(CheckpointError, match="layer are still trained as dense weights"):
        lod.save(model, tmp_path / "model.safetensors")
    assert not [*tmp_path.iterdir()]
    for cut in (lambda: lod.extract(model, 3), lambda: lod.set_ranks(model, 3)):
        with pytest.raises(RankError, match="no order yet"):
            cut()
    with pytest.raises(RankError, match="no order yet"), lod.at_ranks(model, 3):
        pass
    inputs = KINDS[0].inputs(torch.float64)
    torch.testing.assert_close(lod.extract(model)(*inputs), whole(*inputs))
    order_ranks(model)
    assert unfactored.names == []
    torch.testing.assert_close(model(*inputs), whole(*inputs))
    assert lod.extract(model, 3)(*inputs).shape == whole(*inputs).shape


def test_layers_without_all_their_ranks_or_frozen_ones_stay_as_they_are() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 9)), ranks={"0": 3})
    model[1].u.requires_grad_(False)
    factors = [p.clone() for p in model.parameters()]
    unfactored = Unfactored(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    unfactored.begin()
    assert unfactored.names == []
    for now, before in zip(model.parameters(), factors, strict=True):
        torch.testing.assert_close(now, before, rtol=0, atol=0)


def test_a_loaded_state_is_no_weight_until_its_trainer_says_so() -> None:
    model, _, unfactored = begun(KINDS[0], "sgd")
    held, state = unfactored.names, copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    assert unfactored.names == []
    unfactored.hold(held)
    assert unfactored.names == held
