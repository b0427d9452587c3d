"""Costs are exact: known counts, the paper's training costs, and what really runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import maestro_lod as lod
from maestro_lod.baselines.models import VGG19, resnet18, resnet50
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.errors import LayerError, OptionError
from maestro_lod.layers import LowRankConv, SharedHead, lowrank
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.layers.uses import factor_uses
from maestro_lod.model.cost import Cost, better_forms, count_params
from maestro_lod.train.ledger import Ledger

IMAGES = {
    "LeNet": (LeNet, (1, 1, 28, 28)),
    "ResNet-18": (resnet18, (1, 3, 32, 32)),
    "VGG-19": (VGG19, (1, 3, 32, 32)),
    "ResNet-50": (resnet50, (1, 3, 224, 224)),
}
# parameters, MACs, sum of full ranks
COUNTS = {
    "LeNet": (44_426, 281_640, 236),
    "ResNet-18": (11_173_962, 555_422_720, 4_325),
    "VGG-19": (20_035_018, 398_136_320, 5_477),
    "ResNet-50": (25_557_032, 4_089_184_256, 14_248),
}
# training at λ = 0 relative to dense: parameters, and MACs by how steps are sampled
TRAINING = {
    "LeNet": (1.492, {"pairs": 1.134, None: 1.208}),
    "ResNet-18": (1.132, {"pairs": 1.098, None: 1.128}),
    "VGG-19": (1.120, {"pairs": 1.095, None: 1.128}),
    "ResNet-50": (1.241, {"pairs": 1.221, None: 1.233}),
}


@pytest.fixture(scope="module", params=COUNTS)
def paper_model(request: pytest.FixtureRequest) -> tuple[str, nn.Module, Tensor]:
    """A decomposed model of the paper; only its shapes count, so the factors are left zero."""

    def zeros(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        groups, m, n = matrices.shape
        return matrices.new_zeros(groups, m, rank), matrices.new_zeros(groups, rank, n)

    build, shape = IMAGES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowrank, "svd_factors", zeros)
        model = lod.decompose(build())
    return request.param, model, torch.empty(shape)


def count_positions(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Count by hooks where each layer applies its weight: at the output, or input if transposed."""
    found: dict[str, int] = {}

    def note(name: str, layer: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            if "Transpose" in layer.kind:
                found[name] = args[0].numel() // layer.in_channels
            else:
                found[name] = output.numel() // layer.u.shape[0]

        return hook

    layers = low_rank_layers(model)
    handles = [layer.register_forward_hook(note(name, layer)) for name, layer in layers.items()]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


def counted_macs(model: nn.Module, x: Tensor) -> int:
    """Count what torch really runs."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(x)
    return counter.get_total_flops() // 2


# -- the models of the paper -------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTS)
def test_dense_models_have_the_known_counts(name: str) -> None:
    build, shape = IMAGES[name]
    with torch.device("meta"):
        result = lod.summary(build(), torch.empty(shape))
    params, macs, _ = COUNTS[name]
    assert (result.params, result.macs) == (params, macs)
    assert (result.dense_params, result.dense_macs) == (params, macs)
    assert (result.fused_params, result.fused_macs) == (params, macs)
    assert sum(row.params for row in result.layers) == params
    assert sum(row.macs for row in result.layers) == macs


def test_decomposed_models_have_the_known_counts(
    paper_model: tuple[str, nn.Module, Tensor],
) -> None:
    name, model, x = paper_model
    params, macs, total_rank = COUNTS[name]
    result = lod.summary(model, x)
    assert sum(lod.ranks(model).values()) == total_rank
    assert (result.dense_params, result.dense_macs) == (params, macs)
    assert (result.fused_params, result.fused_macs) == (params, macs)  # full rank: dense is cheaper
    layers = low_rank_layers(model).values()
    factors = sum(layer.rank * sum(layer.matrix_shape) for layer in layers)
    dense = sum(math.prod(layer.matrix_shape) for layer in layers)
    assert result.params == params + factors - dense == count_params(model)
    assert sum(row.params for row in result.layers) == result.params
    assert sum(row.macs for row in result.layers) == result.macs


def test_training_costs_at_no_penalty_are_those_of_the_paper(
    paper_model: tuple[str, nn.Module, Tensor],
) -> None:
    name, model, x = paper_model
    params, macs, total_rank = COUNTS[name]
    layers = low_rank_layers(model)
    positions = (
        count_positions(model.eval(), x) if name == "LeNet" else Ledger.open_for(model, x).positions
    )
    expected_params, expected_macs = TRAINING[name]
    per_rank = {n: sum(m.matrix_shape) * positions[n] for n, m in layers.items()}
    full = macs + sum(
        per_rank[n] * m.rank - positions[n] * m.dense_weights for n, m in layers.items()
    )
    shares = {
        "pairs": {n: m.rank / total_rank for n, m in layers.items()},
        None: {},
    }
    for strategy, share in shares.items():
        ledger = Ledger.open_for(model, x)
        sampled = {}
        if strategy is not None:
            sampled = lod.RankSampler(model, strategy=strategy).chances()
        ledger.epochs.append(ledger.epoch_cost(model, sampled))
        closed_form = full - sum(
            p * per_rank[n] * (layers[n].rank - 1) / 2 for n, p in share.items()
        )
        assert ledger.epochs[0].macs == pytest.approx(closed_form, rel=1e-12)
        assert ledger.relative_macs == pytest.approx(closed_form / macs, rel=1e-12)
        assert ledger.relative_macs == pytest.approx(expected_macs[strategy], abs=5e-4)
        assert ledger.relative_params == count_params(model) / params
        assert ledger.relative_params == pytest.approx(expected_params, abs=5e-4)


# -- layers ------------------------------------------------------------------------------------

# layer, input, MACs of the dense layer by hand
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(12, 9), (5, 12), 5 * 12 * 9),
    "linear on many dimensions": (lambda: nn.Linear(12, 9), (2, 3, 12), 6 * 12 * 9),
    "unbatched": (lambda: nn.Conv2d(4, 6, 3), (4, 8, 8), 36 * 4 * 6 * 9),
    "strided": (lambda: nn.Conv2d(4, 6, 3, stride=2), (2, 4, 9, 9), 2 * 16 * 4 * 6 * 9),
    "padded": (lambda: nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9), 2 * 9 * 4 * 6 * 3),
    "reflecting": (
        lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="reflect"),
        (2, 4, 9),
        2 * 9 * 4 * 6 * 3,
    ),
    "dilated": (lambda: nn.Conv1d(4, 6, 3, dilation=2), (2, 4, 9), 2 * 5 * 4 * 6 * 3),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 6, 6), 2 * 16 * 2 * 6 * 9),
    "3d": (lambda: nn.Conv3d(3, 5, 2), (1, 3, 4, 4, 4), 27 * 3 * 5 * 8),
    "transposed": (
        lambda: nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1),
        (2, 6, 5, 5),
        2 * 25 * 6 * 4 * 9,
    ),
    "transposed and grouped": (
        lambda: nn.ConvTranspose1d(6, 4, 3, 2, groups=2),
        (2, 6, 5),
        2 * 5 * 6 * 2 * 3,
    ),
}


@pytest.mark.parametrize(("build", "shape", "macs"), LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_macs_of_every_kind_are_those_done_by_hand(
    build: Callable[[], nn.Module], shape: tuple[int, ...], macs: int, rank: int
) -> None:
    x = torch.empty(shape)
    assert lod.summary(build(), x).macs == macs
    layer = lod.decompose(build(), ranks={"": rank})
    result = lod.summary(layer, x)
    (row,) = result.layers
    assert result.dense_macs == row.dense_macs == macs
    assert result.macs == row.macs == macs * layer.weights() // layer.dense_weights
    assert result.params == row.params == count_params(layer)
    assert result.dense_params == count_params(build())
    assert (row.rank, row.full_rank) == (rank, layer.full_rank)
    assert row.shape == tuple(build().weight.shape)


def small_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 12, 3, stride=2, groups=2),
        nn.ConvTranspose2d(12, 4, 2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


@pytest.mark.parametrize("ranks", [None, 1, 3, 0.5, {"0": 8, "3": 2, "6": 9}], ids=str)
def test_the_summary_says_what_fuse_and_extract_give(ranks: Any) -> None:
    model, x = lod.decompose(small_net(), ranks=ranks), torch.randn(2, 3, 8, 8)
    result = lod.summary(model, x)
    plain = lod.extract(model)
    assert count_params(plain) == result.fused_params
    assert lod.summary(plain, x).macs == counted_macs(plain, x) == result.fused_macs
    forms = better_forms(model, lod.ranks(model), copied=False)
    lod.fuse(model)
    assert result.fused_params <= count_params(model) <= result.dense_params
    assert set(lod.ranks(model)) == {name for name, form in forms.items() if form != "dense"}


def test_rows_cover_every_parameter_and_the_rest_is_one_row() -> None:
    model = lod.decompose(small_net(), ranks=2)
    result = lod.summary(model, torch.empty(1, 3, 8, 8))
    assert sum(row.params for row in result.layers) == count_params(model)
    assert [row.kind for row in result.layers] == [
        "Conv2d", "Conv2d", "Conv2d", "ConvTranspose2d", "Linear", "other",
    ]  # fmt: skip
    assert result.layers[-1].params == 16  # the norm


def test_a_layer_called_twice_counts_its_macs_twice_and_its_parameters_once() -> None:
    inner = nn.Linear(6, 6)
    model = lod.decompose(nn.Sequential(inner, nn.ReLU(), inner), ranks=2)
    result = lod.summary(model, torch.empty(5, 6))
    (row,) = result.layers
    assert row.macs == result.macs == 2 * 5 * 2 * 12
    assert row.dense_macs == 2 * 5 * 36
    assert result.params == 24 + 6


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.inner(self.embedding(x))))


@pytest.mark.parametrize("decomposed", [False, True])
def test_tied_weights_count_once(decomposed: bool) -> None:
    model = lod.decompose(Tied(), ranks=2) if decomposed else Tied()
    result = lod.summary(model, torch.zeros(1, 4, dtype=torch.int64))
    inner = 2 * 12 + 6 if decomposed else 42
    assert result.params == 54 + inner + 12
    assert result.dense_params == 54 + 42 + 12
    assert result.macs == 4 * ((24 if decomposed else 36) + 54)
    assert sum(row.params for row in result.layers) == result.params


def test_a_shared_bias_counts_once() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].bias = model[0].bias
    lod.decompose(model, ranks=2)
    result = lod.summary(model, torch.empty(1, 6))
    assert result.params == 2 * 24 + 6
    assert result.dense_params == 2 * 36 + 6
    assert sum(row.params for row in result.layers) == result.params


def test_frozen_parameters_count() -> None:
    model = lod.decompose(small_net())
    before = lod.summary(model, torch.empty(1, 3, 8, 8))
    model.requires_grad_(False)
    assert lod.summary(model, torch.empty(1, 3, 8, 8)) == before


# -- examples ----------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor, *, others: list[Tensor], scale: float = 1.0) -> Tensor:
        return self.a(x) + scale * sum(self.b(other) for other in others)


class Positional(TwoInputs):
    def forward(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        return super().forward(x, others=[y], scale=scale)


def test_examples_come_as_a_tensor_arguments_or_keywords() -> None:
    keywords = {"x": torch.empty(3, 6), "others": [torch.empty(3, 5)] * 2, "scale": 2.0}
    assert lod.summary(TwoInputs(), keywords).macs == 3 * (24 + 2 * 20)
    arguments = (torch.empty(3, 6), torch.empty(3, 5), 2.0)
    assert lod.summary(Positional(), arguments).macs == 3 * (24 + 20)
    assert lod.summary(nn.Linear(6, 4), torch.empty(3, 6)).macs == 3 * 24


def test_only_shapes_and_dtypes_of_the_example_matter() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(6, 6).double()))
    real = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert lod.summary(model, real) == lod.summary(model, real.detach().to("meta"))


@pytest.mark.parametrize("example", [[torch.empty(2, 6)], 3, "x"], ids=["list", "number", "text"])
def test_something_that_is_no_example_is_refused(example: Any) -> None:
    with pytest.raises(OptionError, match=f"example is a {type(example).__name__}.*tensor"):
        lod.summary(nn.Linear(6, 6), example)


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else x


class GroupedProduct(nn.Module):
    """Rows meet the matrices of a stack by a product that torch cannot do in float32 on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(2, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([1, len(x)], dtype=torch.int32, device=x.device)
        return F.grouped_mm(x, self.stack, offs=offsets)


class Differentiating(nn.Module):
    """Asks for gradients in its forward, and changes a view of what needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = self.fc(x)
            for part in y.split(3, dim=-1):
                part.add_(1.0)
            return y


class RecurrentWithValues(nn.Module):
    """Looks at values before it runs a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(16, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x if x.sum().item() >= 0 else -x)[0]


class RelativePositions(nn.Module):
    """Multiplies activations by positions that are looked up in a table, in one of two ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.table, self.fc, self.way = nn.Embedding(11, 8), nn.Linear(8, 8), way

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, 8)
        places = torch.arange(x.shape[1], device=x.device)
        distances = (places[:, None] - places).clamp(-5, 5) + 5
        found = self.table(distances) if self.way == "layer" else self.table.weight[distances]
        return torch.einsum("bld,lrd->blr", self.fc(x), found)


class Batched(nn.Module):
    """Multiplies by a stack of matrices in one of the ways there are; and activations by others."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.stack, self.way = nn.Parameter(torch.randn(3, 4, 5)), way

    def forward(self, x: Tensor) -> Tensor:  # (3, rows, 4)
        x = x + (x @ x.transpose(1, 2)).sum()  # no weight in it
        if self.way == "bmm":
            return torch.bmm(x, self.stack)
        if self.way == "baddbmm":
            return torch.baddbmm(x.new_zeros(3, 1, 5), x, self.stack)
        if self.way == "einsum":
            return torch.einsum("erm,emn->ern", x, self.stack)
        if self.way == "transposed":
            return torch.matmul(self.stack.mT, x.mT)
        if self.way == "selected":
            order = x.sum((1, 2)).argsort()
            return torch.bmm(x, self.stack[order])
        return torch.bmm(x, F.normalize(self.stack, dim=-1))


@pytest.mark.parametrize(
    "way", ["bmm", "baddbmm", "einsum", "transposed", "selected", "normalized"]
)
def test_batched_products_with_weights_count_and_those_of_activations_do_not(way: str) -> None:
    rows = lod.summary(Batched(way), torch.empty(3, 7, 4)).layers
    assert [row.macs for row in rows] == [3 * 7 * 4 * 5]


@pytest.mark.parametrize("way", ["layer", "index"])
def test_products_with_positions_that_are_looked_up_do_not_count(way: str) -> None:
    assert lod.summary(RelativePositions(way), torch.empty(3, 7, 8)).macs == 3 * 7 * 8 * 8


@pytest.mark.parametrize(
    ("model", "example", "macs"),
    [
        (DataDependent(), torch.ones(2, 6), 2 * 36),
        (DataDependent(), -torch.ones(2, 6), 0),
        (lod.decompose(DataDependent()), torch.ones(2, 6), 2 * 2 * 36),
        (GroupedProduct(), torch.ones(4, 8), 4 * 32),
        (Differentiating(), torch.ones(2, 6), 2 * 36),
        (RecurrentWithValues(nn.LSTM), torch.ones(2, 5, 16), 2 * 5 * 4 * 32 * (16 + 32)),
        (RecurrentWithValues(nn.GRU), torch.ones(2, 5, 16), 2 * 5 * 3 * 32 * (16 + 32)),
    ],
    ids=[
        "data-dependent",
        "the other way",
        "low-rank",
        "grouped",
        "differentiating",
        "LSTM",
        "GRU",
    ],
)
def test_models_that_need_values_are_counted_on_the_example_itself(
    model: nn.Module, example: Tensor, macs: int, capfd: Any, snapshot: Callable[[nn.Module], Any]
) -> None:
    before, random = snapshot(model), torch.get_rng_state()
    assert lod.summary(model, example).macs == macs
    before.assert_unchanged(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("what", ["model", "example"])
def test_a_model_that_needs_values_says_what_has_none(what: str) -> None:
    model, example = DataDependent(), torch.ones(2, 6)
    if what == "model":
        model = model.to("meta")
    else:
        example = example.to("meta")
    with pytest.raises(LayerError, match=f"DataDependent.*Give the {what} with values"):
        lod.summary(model, example)


@pytest.mark.parametrize(
    ("model", "example", "words"),
    [
        (nn.Linear(6, 6), torch.empty(2, 7), "Linear.*on this example"),
        (nn.Linear(6, 6), (torch.empty(2, 6),) * 2, "Linear.*TypeError"),
    ],
    ids=["wrong shape", "too many arguments"],
)
def test_a_model_that_cannot_run_on_the_example_is_refused(
    model: nn.Module, example: Any, words: str
) -> None:
    with pytest.raises(LayerError, match=words):
        lod.summary(model, example)
    assert torch.backends.mha.get_fastpath_enabled()


# -- what is not changed -----------------------------------------------------------------------


@pytest.mark.parametrize("fast_path", [True, False])
def test_a_summary_changes_nothing(fast_path: bool, snapshot: Callable[[nn.Module], Any]) -> None:
    model = lod.decompose(small_net()).train()
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    model[6].activate(2)
    before = snapshot(model)
    torch.backends.mha.set_fastpath_enabled(fast_path)
    try:
        lod.summary(model, torch.randn(2, 3, 8, 8))
        assert torch.backends.mha.get_fastpath_enabled() is fast_path
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    before.assert_unchanged(model)
    assert torch.is_grad_enabled()
    assert all(module.training for module in model.modules())
    assert calls == [] and len(model[0]._forward_hooks) == 1
    assert len(model[6]._forward_hooks) == 0
    assert model[6].active_rank == 2 and model[6].positions is None


def test_a_model_in_training_is_counted_on_a_single_sample() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))).train()
    assert lod.summary(model, torch.empty(1, 6)).dense_macs == 36  # the norm alone would refuse


def test_without_an_example_all_but_macs_is_counted() -> None:
    model = lod.decompose(small_net(), ranks=2)
    counted = lod.summary(model, torch.empty(1, 3, 8, 8))
    result = lod.summary(model)
    for one, other in zip((result, *result.layers), (counted, *counted.layers), strict=True):
        assert one.macs is one.fused_macs is one.dense_macs is None
        assert one.params == other.params
        assert one.fused_params == other.fused_params
        assert one.dense_params == other.dense_params
    assert "MACs" not in str(result)
    assert len(str(result).splitlines()) == len(str(counted).splitlines())


def test_a_summary_draws_no_random_numbers() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(6, 6), nn.Dropout()))
    state = torch.get_rng_state()
    lod.summary(model, torch.empty(2, 6))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_fast_path_of_transformers_does_not_hide_macs(decomposed: bool, mode: str) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).train(mode == "train")
    if decomposed:
        lod.decompose(model, ranks=2)
    result = lod.summary(model, torch.empty(1, 5, 8))
    attention, feed_forward = 5 * 4 * 64, 5 * 2 * 8 * 16
    assert result.dense_macs == attention + feed_forward  # no products of activations
    factored = 4 * 5 * 2 * 16 + 2 * 5 * 2 * 24
    assert result.macs == (factored if decomposed else attention + feed_forward)
    rows = {row.name: row.dense_macs for row in result.layers}
    assert rows["linear1"] == rows["linear2"] == 5 * 8 * 16


def test_a_weight_normed_layer_beside_low_rank_ones_is_counted() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    model = lod.decompose(nn.Sequential(nn.Linear(6, 6), layer), ranks=2)
    assert lod.summary(model, torch.empty(3, 6)).macs == 3 * (2 * 12 + 36)


def test_old_style_weight_norm_after_a_forward_is_counted() -> None:
    layer = nn.utils.spectral_norm(nn.Linear(6, 6))
    model = lod.decompose(nn.Sequential(nn.Linear(6, 6), layer), ranks=2).eval()
    model(torch.randn(3, 6))
    assert lod.summary(model, torch.empty(3, 6)).macs == 3 * (2 * 12 + 36)


# -- text and data -----------------------------------------------------------------------------

LENET_TABLE = """\
layer      kind    weight      rank  params     MACs  form
──────────────────────────────────────────────────────────────────
conv1      Conv2d  6×1×5×5      6/6     192  107,136  dense
conv2      Conv2d  16×6×5×5    9/16   1,510   95,616  pivoted
fc1        Linear  120×256   20/120   7,640    7,520  pivoted
fc2        Linear  84×120     84/84  17,220   17,136  dense
fc3        Linear  10×84      10/10     950      940  dense
total                                27,512  228,348  0.62×, 0.81×
extracted                            19,839  194,872  0.45×, 0.69×
dense                                44,426  281,640  1.00×, 1.00×"""


def test_the_summary_of_lenet_prints_as_a_table() -> None:
    model = lod.decompose(LeNet(), ranks={"conv2": 9, "fc1": 20})
    assert str(lod.summary(model, torch.empty(1, 1, 28, 28))) == LENET_TABLE


def test_a_summary_is_frozen_and_turns_into_json() -> None:
    model = lod.decompose(LeNet(), ranks={"conv2": 9, "fc1": 20})
    result = lod.summary(model, torch.empty(1, 1, 28, 28))
    data = json.loads(json.dumps(result.to_dict()))
    assert (data["params"], data["macs"], data["fused_params"]) == (27_512, 228_348, 19_839)
    assert data["layers"][1] == {
        "name": "conv2", "kind": "Conv2d", "shape": [16, 6, 5, 5], "rank": 9, "full_rank": 16,
        "params": 1510, "macs": 95616, "dense_params": 2416, "dense_macs": 153600,
        "form": "pivoted", "fused_params": 1429, "fused_macs": 90432,
    }  # fmt: skip
    with pytest.raises(AttributeError):
        result.params = 0


# -- what is executed --------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 16, 300])
@pytest.mark.parametrize("ranks", [1, 4, 0.5, 99], ids=str)
def test_executed_macs_are_what_torch_counts(batch: int, ranks: Any) -> None:
    model, x = lod.decompose(LeNet()), torch.randn(batch, 1, 28, 28)
    layers = low_rank_layers(model)
    positions = count_positions(model, x)
    with lod.at_ranks(model, ranks):
        executed = sum(m.executed_macs(positions[n], m.active_rank) for n, m in layers.items())
        assert counted_macs(model, x) == executed


@pytest.mark.parametrize("way", ["factored", "composed"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_executed_macs_of_every_kind_are_what_torch_counts(
    sample: tuple[nn.Module, Tensor], rank: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowrank, "compose_is_cheaper", lambda *_: way == "composed")
    dense, x = sample
    layer = lod.decompose(dense, ranks={"": rank})
    counted = counted_macs(layer, x)
    assert layer.executed_macs(layer.positions, rank) == counted


def test_the_ledger_expects_what_several_cuts_at_a_time_cost() -> None:
    model = lod.decompose(small_net(), ranks={"0": 2, "3": 2, "4": 1, "6": 4}).eval()
    ledger = Ledger.open_for(model, torch.randn(4, 3, 8, 8))
    sampler = lod.RankSampler(model, strategy="several", seed=1)
    layers = low_rank_layers(model)
    full = ledger.epoch_cost(model, {}).macs
    saved = []
    for _ in range(4000):
        drawn = sampler.sample()
        saved.append(
            sum(
                layers[n].macs(ledger.positions[n], layers[n].rank)
                - layers[n].macs(ledger.positions[n], b)
                for n, b in drawn.items()
            )
        )
    expected = full - sum(saved) / len(saved)
    assert ledger.epoch_cost(model, sampler.chances()).macs == pytest.approx(expected, rel=0.01)


def test_the_ledger_expects_the_mean_over_all_samples() -> None:
    model = lod.decompose(small_net(), ranks={"0": 2, "3": 2, "4": 1, "6": 4}).eval()
    x = torch.randn(4, 3, 8, 8)
    ledger = Ledger.open_for(model, x)
    sampler = lod.RankSampler(model)
    cost = ledger.epoch_cost(model, sampler.chances())
    executed = factored = 0
    pairs = [(n, b) for n, m in low_rank_layers(model).items() for b in range(1, m.rank + 1)]
    for name, b in pairs:
        with lod.at_ranks(model, {name: b}):
            executed += counted_macs(model, x)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lowrank, "compose_is_cheaper", lambda *_: False)
                patch.setattr(LowRankConv, "padded_rank", lambda _, rank: rank)  # no zeros
                factored += counted_macs(model, x)
    assert cost.executed_macs == pytest.approx(executed / len(pairs), rel=1e-12)
    assert cost.macs == pytest.approx(factored / len(pairs), rel=1e-12)


def test_a_full_pass_adds_all_that_a_forward_at_full_rank_does() -> None:
    model, x = lod.decompose(small_net(), skip="0"), torch.zeros(1, 3, 8, 8)
    ledger = Ledger.open_for(model, x)
    one, two = (
        ledger.epoch_cost(model, {"1": [0.5, 0.5]}, full_pass=full).executed_macs
        for full in (False, True)
    )
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert two - one == counter.get_total_flops() // 2


# -- the ledger --------------------------------------------------------------------------------


def test_the_ledger_averages_over_epochs_at_the_ranks_in_force() -> None:
    model, x = lod.decompose(nn.Sequential(nn.Linear(8, 8, bias=False))), torch.empty(1, 8)
    ledger = Ledger.open_for(model, x)
    assert ledger.relative_params is ledger.relative_macs is None
    for rank in (8, 4, 0):
        model[0].resize(rank)
        ledger.epochs.append(ledger.epoch_cost(model, {}))
    assert [epoch.ranks for epoch in ledger.epochs] == [{"0": 8}, {"0": 4}, {"0": 0}]
    assert [epoch.params for epoch in ledger.epochs] == [128, 64, 0]
    assert ledger.dense_params == 64 and ledger.dense_macs == 64
    assert ledger.relative_params == ledger.relative_macs == pytest.approx(1.0)


def test_a_ledger_without_an_example_counts_parameters_alone() -> None:
    model = lod.decompose(LeNet())
    ledger = Ledger.open_for(model)
    ledger.epochs.append(ledger.epoch_cost(model, {}))
    assert ledger.relative_params == pytest.approx(1.492, abs=5e-4)
    assert ledger.epochs[0].macs is ledger.relative_macs is ledger.relative_executed_macs is None


def test_a_ledger_opened_on_shrunk_layers_knows_the_dense_model() -> None:
    model = lod.decompose(LeNet(), ranks=3)
    ledger = Ledger.open_for(model, torch.empty(1, 1, 28, 28))
    assert (ledger.dense_params, ledger.dense_macs) == COUNTS["LeNet"][:2]


def test_a_ledger_is_restored_from_plain_data() -> None:
    model = lod.decompose(LeNet())
    ledger = Ledger.open_for(model, torch.empty(1, 1, 28, 28))
    ledger.epochs.append(ledger.epoch_cost(model, lod.RankSampler(model).chances()))
    other = Ledger(dense_params=0)
    other.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert other == ledger


# -- what a model in training would be deployed as ---------------------------------------------


class Language(nn.Module):
    """An embedding tied to its head, around a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(x)))


class Upsampling(nn.Module):
    """A transposed convolution whose output size only the dense layer can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x, output_size=[8, 8])


TOKENS = torch.zeros(2, 5, dtype=torch.int64)
DEPLOYED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "convolutions": (small_net, torch.randn(2, 3, 8, 8)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 6)), TOKENS),
    "tied": (Language, TOKENS),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        torch.randn(2, 5, 8),
    ),
    "output size": (Upsampling, torch.randn(1, 8, 3, 3)),
    "lstm": (lambda: nn.LSTM(8, 12, num_layers=2), torch.randn(5, 2, 8)),
    "gru": (lambda: nn.GRU(8, 12, bidirectional=True), torch.randn(5, 2, 8)),
}


@pytest.mark.parametrize("ranks", [None, 0, 1, 3, 0.5], ids=str)
@pytest.mark.parametrize(("build", "x"), DEPLOYED.values(), ids=DEPLOYED)
def test_the_ledger_knows_what_the_model_would_be_deployed_as(
    build: Callable[[], nn.Module], x: Any, ranks: Any
) -> None:
    model = lod.decompose(build(), tied="share").eval()
    ledger = Ledger.open_for(model, x)
    for layer in low_rank_layers(model).values():
        wanted = ranks if isinstance(ranks, int) else round((ranks or 1.0) * layer.full_rank)
        layer.resize(min(wanted, layer.full_rank))
    model(x)
    after = lod.summary(model, x)
    promised = ledger.deployed(model)
    assert (promised.params, promised.macs) == (after.fused_params, after.fused_macs)
    plain = lod.extract(model)
    real = lod.summary(plain, x)
    assert (real.params, real.macs) == (after.fused_params, after.fused_macs)
    assert promised.bytes == sum(t.nbytes for t in (*plain.parameters(), *plain.buffers()))
    assert count_params(lod.fuse(model)) <= after.dense_params


def test_without_an_example_only_the_parameters_of_what_is_deployed_are_known() -> None:
    model = lod.decompose(LeNet(), ranks={"conv2": 9, "fc1": 20})
    size = 4 * 19_839 + 4 * (16 + 256)  # with the order of rows of conv2, and of columns of fc1
    assert Ledger.open_for(model).deployed(model) == Cost(19_839, None, size)
    known = Ledger.open_for(model, torch.empty(1, 1, 28, 28))
    assert known.deployed(model) == Cost(19_839, 194_872, size)


def test_a_head_whose_embedding_is_elsewhere_belongs_to_no_layer_here() -> None:
    model = lod.decompose(Language(), tied="share")
    head = next(m for m in model.modules() if isinstance(m, SharedHead))
    part = nn.Sequential(lod.decompose(nn.Linear(8, 8)), head)
    assert [use.owner for use in factor_uses(part)] == ["0"]


class OwnsMatrices(nn.Module):
    """Owns a matrix itself, beside layers, and makes tensors of its own as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4, 16))
        self.mix = nn.Parameter(torch.randn(16, 16))
        self.block = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
        self.out = nn.Linear(16, 2)
        self.anchors = [torch.ones(4, 16)]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position + self.anchors[0] + torch.zeros(len(x), 1, 1) + torch.tensor([1.0])
        return self.out(self.block(x @ self.mix))


def test_layers_inside_a_module_with_a_matrix_of_its_own_count_once() -> None:
    model = lod.decompose(OwnsMatrices(), only="block.0", ranks=3)
    found = lod.summary(model, torch.empty(1, 4, 16))
    assert {row.name: row.macs for row in found.layers} == {
        "": 4 * 16 * 16, "block.0": 4 * 3 * 48, "block.1": 4 * 32 * 16, "out": 4 * 16 * 2,
    }  # fmt: skip
    assert sum(row.macs for row in found.layers) == found.macs


def test_tensors_that_a_model_makes_or_keeps_do_not_keep_it_from_being_counted() -> None:
    model = lod.decompose(OwnsMatrices())
    model(torch.randn(2, 4, 16))
    assert lod.summary(model, torch.empty(2, 4, 16)).dense_macs == 2 * 4 * 16 * (16 + 64 + 2)


class LooksAtConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * torch.tensor(3).item() * int(torch.ceil(torch.tensor(1.5)))


def test_models_that_look_at_constants_of_their_own_are_counted() -> None:
    assert lod.summary(lod.decompose(LooksAtConstants()), torch.ones(2, 8)).dense_macs == 2 * 64
