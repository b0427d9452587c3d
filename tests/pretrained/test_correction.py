"""Layers of a cut model that are fitted in order come closer to the original."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.errors import DataError, OptionError
from maestro_lod.model.inputs import in_mode
from maestro_lod.pretrained.correction import correct
from maestro_lod.sizes.calibration import calibrate
from maestro_lod.train.evaluate import recalibrate


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


def test_a_corrected_model_is_closer_to_the_original_on_other_data(pair):
    teacher, x, fresh = pair
    found = calibrate(teacher, [x])
    model = lod.decompose(copy.deepcopy(teacher), ranks=0.4, calibration=found)
    before, ranks = error(model, teacher, fresh), lod.ranks(model)
    told: list[tuple[int, int, str]] = []
    count = correct(model, teacher, list(x.split(64)), on_progress=lambda *done: told.append(done))
    assert error(model, teacher, fresh) < 0.95 * before
    assert lod.ranks(model) == ranks
    few = "7" in ranks and ranks["7"] == 4  # 256 positions for 256 inputs: nothing can be fitted
    assert count == len(ranks) - few
    assert told[-1] == (len(ranks), len(ranks), "correcting")
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_model_that_is_corrected_for_two_sizes_is_closer_at_the_smaller_one(pair):
    """Judged by other data: beside no correction, and beside one for the larger size alone."""
    teacher, x, fresh = pair
    whole = lod.decompose(copy.deepcopy(teacher), ranks=0.6, calibration=calibrate(teacher, [x]))
    smaller = {name: round(0.7 * rank) for name, rank in lod.ranks(whole).items()}
    larger, both = copy.deepcopy(whole), copy.deepcopy(whole)
    data = list(x.split(64))
    assert correct(larger, teacher, data) == correct(both, teacher, data, sizes=[{}, smaller])
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


def test_a_model_that_is_not_cut_stays_as_it_is(pair):
    teacher, x, _ = pair
    model = lod.decompose(copy.deepcopy(teacher))
    correct(model, teacher, [x])
    assert error(model, teacher, x) < 1e-4


def test_the_first_layer_is_the_regression_of_that_rank():
    """One layer alone: the closed form with centered data, the mean being the bias's."""
    torch.manual_seed(0)
    teacher, x = nn.Sequential(nn.Linear(10, 8)), torch.randn(200, 10) @ torch.randn(10, 10) + 2
    model = lod.decompose(copy.deepcopy(teacher), ranks=3, calibration=calibrate(teacher, [x]))
    correct(model, teacher, [x])
    y = (x @ teacher[0].weight.T + teacher[0].bias).detach()
    left, scale, right = torch.linalg.svd(y - y.mean(0), full_matrices=False)
    best = left[:, :3] * scale[:3] @ right[:3] + y.mean(0)
    torch.testing.assert_close(model(x).detach(), best, rtol=1e-3, atol=1e-2)


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


def test_a_layer_that_is_used_twice_stays_as_it_was():
    teacher, x = Twice(), torch.randn(50, 12)
    model = lod.decompose(copy.deepcopy(teacher), ranks=4)
    before = model.layer.u.detach().clone()
    assert correct(model, teacher, [x]) == 1
    torch.testing.assert_close(model.layer.u, before, rtol=0, atol=0)


def test_no_data_is_refused():
    teacher = nn.Linear(8, 8)
    with pytest.raises(DataError, match="to correct on has no batch"):
        correct(lod.decompose(copy.deepcopy(teacher)), teacher, [])


def test_no_size_is_refused():
    teacher = nn.Linear(8, 8)
    with pytest.raises(OptionError, match=r"sizes=\[\] leaves nothing"):
        correct(lod.decompose(copy.deepcopy(teacher)), teacher, [torch.randn(3, 8)], sizes=[])
