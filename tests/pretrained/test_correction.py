"""Blocks of a cut model that are trained in order come closer to the original."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.errors import DataError, OptionError
from maestro_lod.model.inputs import in_mode
from maestro_lod.pretrained import correction
from maestro_lod.pretrained.correction import correct
from maestro_lod.sizes.calibration import calibrate
from maestro_lod.train.evaluate import recalibrate
from tests.support.kinds import Tied


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding="same", groups=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 16, 10),
    )  # fmt: skip


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 16)
    )


MODELS = {
    "perceptron": (perceptron, (24,)),
    "convolutions": (conv_net, (3, 8, 8)),
    "attention": (encoder, (5, 16)),
}


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Tensor]:
    """A model whose statistics are those of its data, data for it, and more of the same."""
    build, shape = request.param
    torch.manual_seed(0)
    model = build()
    scale = torch.logspace(0.7, -0.7, shape[-1])  # data with directions that matter more
    x, fresh = (torch.randn(256, *shape) * scale for _ in range(2))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
        model(x)  # in training mode, for BatchNorm
    return model.eval(), x, fresh


def error(model: nn.Module, teacher: nn.Module, x: Tensor) -> float:
    with torch.no_grad(), in_mode(model, training=False):
        return float((model(x) - teacher(x)).square().mean())


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Makes several blocks of a small model."""
    monkeypatch.setattr(correction, "_MOST_LAYERS", 4)


@pytest.mark.usefixtures("small_blocks")
def test_a_corrected_model_is_closer_to_the_original_on_other_data(pair):
    teacher, x, fresh = pair
    found = calibrate(teacher, [x])
    model = lod.decompose(copy.deepcopy(teacher), ranks=0.4, calibration=found)
    before, ranks = error(model, teacher, fresh), lod.ranks(model)
    threads = threading.active_count()
    told: list[tuple[int, int, str]] = []
    count = correct(model, teacher, list(x.split(64)), on_progress=lambda *done: told.append(done))
    assert error(model, teacher, fresh) < 0.9 * before
    assert lod.ranks(model) == ranks
    assert told[-1] == (len(told), len(told), "correcting")
    assert 1 <= count <= len(told)
    assert not any(m._forward_pre_hooks for m in (*model.modules(), *teacher.modules()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert threading.active_count() == threads


def test_a_model_that_is_corrected_for_two_sizes_is_closer_at_the_smaller_one(pair):
    """Judged by other data: beside no correction, and beside one for the larger size alone."""
    teacher, x, fresh = pair
    whole = lod.decompose(copy.deepcopy(teacher), ranks=0.6, calibration=calibrate(teacher, [x]))
    smaller = {name: round(0.5 * rank) for name, rank in lod.ranks(whole).items()}
    larger, both = copy.deepcopy(whole), copy.deepcopy(whole)
    data = list(x.split(64))
    correct(larger, teacher, data)
    correct(both, teacher, data, sizes=[{}, smaller])
    assert lod.ranks(both) == lod.ranks(whole)

    def error_of_smaller(model: nn.Module) -> float:
        cut = lod.extract(model, smaller)
        recalibrate(cut, [(x, None)])
        return error(cut, teacher, fresh)

    assert error_of_smaller(both) < min(error_of_smaller(whole), error_of_smaller(larger))


def test_one_size_that_is_the_model_is_as_if_none_were_named(pair):
    teacher, x, _ = pair
    model = lod.decompose(copy.deepcopy(teacher), ranks=0.5)
    same = copy.deepcopy(model)
    correct(model, teacher, [x])
    correct(same, teacher, [x], sizes=[lod.ranks(model)])
    for one, other in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_is_not_cut_is_not_made_worse(pair):
    teacher, x, _ = pair
    model = lod.decompose(copy.deepcopy(teacher))
    correct(model, teacher, [x])
    assert error(model, teacher, x) < 1e-4


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.LSTM(12, 16, batch_first=True), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)[0])


@pytest.mark.parametrize("most", [2, 8], ids=["alone", "with the head"])
def test_a_recurrent_layer_is_corrected_as_a_whole(most, monkeypatch):
    monkeypatch.setattr(correction, "_MOST_LAYERS", most)
    torch.manual_seed(0)
    teacher, x, fresh = Recurrent(), torch.randn(64, 9, 12), torch.randn(64, 9, 12)
    model = lod.decompose(copy.deepcopy(teacher), ranks=4, calibration=calibrate(teacher, [x]))
    before = error(model, teacher, fresh)
    assert correct(model, teacher, list(x.split(8))) == (2 if most == 2 else 1)
    assert error(model, teacher, fresh) < 0.9 * before


def test_frozen_models_are_corrected_and_stay_frozen():
    torch.manual_seed(0)
    teacher, x = perceptron().requires_grad_(False), torch.randn(128, 24)
    model = lod.decompose(copy.deepcopy(teacher), ranks=0.4)
    before = error(model, teacher, x)
    assert correct(model, teacher, list(x.split(16))) == 1
    assert error(model, teacher, x) < before
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_an_error_of_the_model_is_raised_and_leaves_no_thread_or_hook():
    teacher = perceptron()
    model = lod.decompose(copy.deepcopy(teacher), ranks=4)
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        correct(model, teacher, [torch.randn(3, 24), torch.randn(3, 23)])
    assert threading.active_count() == threads
    assert not any(m._forward_pre_hooks for m in (*model.modules(), *teacher.modules()))


def test_the_dense_model_is_untouched(pair, snapshot):
    teacher, x, _ = pair
    before = snapshot(teacher)
    model = lod.decompose(copy.deepcopy(teacher), ranks=0.5)
    correct(model, teacher, [x])
    before.assert_unchanged(teacher)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


def test_a_layer_that_is_used_twice_is_no_block_of_its_own(monkeypatch):
    monkeypatch.setattr(correction, "_MOST_LAYERS", 1)
    teacher, x = Twice(), torch.randn(50, 12)
    model = lod.decompose(copy.deepcopy(teacher), ranks=4)
    before = model.layer.u.detach().clone()
    assert correct(model, teacher, [x]) == 1
    torch.testing.assert_close(model.layer.u, before, rtol=0, atol=0)


class TiedBehindALayer(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(self.embedding, nn.Linear(16, 16)), nn.Linear(40, 40)
        del self.embedding

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.head(torch.tanh(self.inner(ids))))


@pytest.mark.parametrize("most", [1, 2], ids=["alone", "in a block"])
def test_an_embedding_is_not_trained_without_the_head_that_shares_it(most, monkeypatch):
    monkeypatch.setattr(correction, "_MOST_LAYERS", most)
    torch.manual_seed(0)
    teacher, ids = TiedBehindALayer(), torch.randint(40, (64, 12))
    model = lod.decompose(copy.deepcopy(teacher), ranks=6, tied="share")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert correct(model, teacher, list(ids.split(8))) == 2
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed and not any(key.startswith("inner.0") for key in changed)


def test_no_data_is_refused():
    teacher = nn.Linear(8, 8)
    with pytest.raises(DataError, match="to correct on has no batch"):
        correct(lod.decompose(copy.deepcopy(teacher)), teacher, [])


def test_no_size_is_refused():
    teacher = nn.Linear(8, 8)
    with pytest.raises(OptionError, match=r"sizes=\[\] leaves nothing"):
        correct(lod.decompose(copy.deepcopy(teacher)), teacher, [torch.randn(3, 8)], sizes=[])
