"""A low-rank layer computes what the dense one does, at any rank, by either way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import maestro_lod as lod
from maestro_lod.errors import MaestroError, RankError
from maestro_lod.layers import LowRank, LowRankLinear, lowrank
from maestro_lod.layers.registry import low_rank_type
from maestro_lod.model.cost import better_forms

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
KINDS = ("linear", "conv1", "conv2", "conv3", "transposed1", "transposed2", "transposed3")
# relative to the output's scale; the half types round both factors and the value between them
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}


@dataclass(frozen=True)
class Case:
    """A dense layer and an input that it takes."""

    dense: nn.Module
    x: Tensor

    def __repr__(self) -> str:
        return f"{self.dense} on {tuple(self.x.shape)}"

    def low_rank(self, rank: int | None = None) -> LowRank:
        return low_rank_type(type(self.dense)).from_dense(self.dense, rank)


@st.composite
def linear_cases(draw: st.DrawFn) -> Case:
    into, out = draw(st.integers(2, 12)), draw(st.integers(2, 12))
    leading = draw(st.lists(st.integers(1, 4), max_size=3))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    return Case(nn.Linear(into, out, bias=draw(st.booleans())), torch.randn(*leading, into))


@st.composite
def conv_cases(draw: st.DrawFn, dims: int, transposed: bool) -> Case:
    def per_dim(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.tuples(*[st.integers(low, high)] * dims)))

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    into = groups * draw(st.integers(1, 4))
    out = groups * draw(st.integers(2, 4))
    kernel, stride, dilation = per_dim(1, 3), per_dim(1, 3), per_dim(1, 2)
    options = {
        "stride": stride,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    if transposed:
        options["padding"] = per_dim(0, 1)
        options["output_padding"] = tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        )
    else:
        options["padding"] = draw(
            st.one_of(st.just(per_dim(0, 2)), st.sampled_from(["same", "valid", 1]))
        )
        options["padding_mode"] = draw(st.sampled_from(PADDING_MODES))
        if options["padding"] == "same":
            options["stride"] = 1
    size = per_dim(5, 7)
    batch = draw(st.sampled_from([(), (1,), (3,)]))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    dense = (TRANSPOSED if transposed else CONVS)[dims](into, out, kernel, **options)
    return Case(dense, torch.randn(*batch, into, *size))


def cases(kind: str) -> st.SearchStrategy[Case]:
    if kind == "linear":
        return linear_cases()
    return conv_cases(dims=int(kind[-1]), transposed=kind.startswith("transposed"))


def run_dense(case: Case) -> Tensor:
    """Run the dense layer; drop examples that torch itself cannot do in this dtype."""
    try:
        return case.dense(case.x).detach()
    except RuntimeError as error:
        assume("not implemented" not in str(error))
        raise


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, scale: float) -> None:
    assert actual.shape == expected.shape
    difference = (actual.detach().double() - expected.detach().double()).abs().max()
    assert float(difference) <= tolerance * scale, f"off by {float(difference) / scale:.1e}"


def scale_of(tensor: Tensor) -> float:
    return max(float(tensor.detach().abs().max()), 1e-30)


def truncated_weight(dense: nn.Module, rank: int) -> Tensor:
    """Keep the leading singular directions of every group; groups divide dimension 0."""
    parts = []
    for part in dense.weight.detach().chunk(getattr(dense, "groups", 1)):
        left, values, right = torch.linalg.svd(part.flatten(1), full_matrices=False)
        kept = left[:, :rank] * values[:rank] @ right[:rank]
        parts.append(kept.view(part.shape))
    return torch.cat(parts)


@contextmanager
def computed(way: str) -> Iterator[None]:
    """Force one of the two ways to compute a layer."""
    with mock.patch.object(lowrank, "compose_is_cheaper", lambda *_: way == "composed"):
        yield


any_way = pytest.mark.parametrize("way", ["factored", "composed"])
any_kind = pytest.mark.parametrize("kind", KINDS)
any_data = given(data=st.data())


# -- outputs and gradients ---------------------------------------------------------------------


@any_kind
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@any_data
@settings(max_examples=15)
def test_outputs_are_those_of_the_dense_layer(
    kind: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    drawn = data.draw(cases(kind))
    # what the output could be without cancellation, for the dtypes that round coarsely
    terms = copy.deepcopy(drawn.dense)
    with torch.no_grad():
        for parameter in terms.parameters():
            parameter.abs_()
    case = Case(drawn.dense.to(dtype), drawn.x.to(dtype))
    expected = run_dense(case)
    wide = dtype in (torch.float32, torch.float64)
    scale = scale_of(expected if wide else terms(drawn.x.abs()))
    for way in ("factored", "composed"):
        with computed(way):
            actual = case.low_rank()(case.x)
        assert actual.dtype == dtype
        assert_near(actual, expected, TOLERANCE[dtype], scale)


@any_kind
@any_data
def test_truncation_keeps_the_leading_singular_directions_of_every_group(
    kind: str, data: st.DataObject
) -> None:
    drawn = data.draw(cases(kind))
    case = Case(drawn.dense.double(), drawn.x.double())
    layer = case.low_rank()
    b = data.draw(st.integers(0, layer.full_rank))
    weight = truncated_weight(case.dense, b)
    expected = functional_call(case.dense, {"weight": weight}, case.x)
    scale = scale_of(expected) + scale_of(case.dense(case.x))
    stored = case.low_rank(b)
    assert stored.rank == b
    layer.activate(b)
    for way in ("factored", "composed"):
        with computed(way):
            assert_near(layer(case.x), expected, 1e-12, scale)
            assert_near(stored(case.x), expected, 1e-12, scale)
    torch.testing.assert_close(layer.weight, weight)
    for plain in (layer.dense(b), layer.factored(b)):
        assert_near(plain(case.x), expected, 1e-12, scale)


@any_kind
@any_data
def test_gradients_are_those_of_the_dense_layer_at_the_product(
    kind: str, data: st.DataObject
) -> None:
    drawn = data.draw(cases(kind))
    case = Case(drawn.dense.double(), drawn.x.double().requires_grad_())
    layer = case.low_rank()
    b = data.draw(st.integers(0, layer.full_rank))
    layer.activate(b)
    leaves = [case.x, *layer.parameters()]
    through_weight = {"weight": layer.weight}
    if layer.bias is not None:
        through_weight["bias"] = layer.bias
    dense_output = functional_call(case.dense, through_weight, case.x)
    upstream = torch.randn_like(dense_output)
    expected = torch.autograd.grad(dense_output, leaves, upstream)
    for way in ("factored", "composed"):
        with computed(way):
            actual = torch.autograd.grad(layer(case.x), leaves, upstream)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@any_way
def test_gradients_pass_gradcheck(sample: tuple[nn.Module, Tensor], way: str) -> None:
    dense, x = sample
    dense, x = dense.double(), x.double()[:1].requires_grad_()
    layer = low_rank_type(type(dense)).from_dense(dense)
    layer.activate(2)
    parameters = dict(layer.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(parameters, values, strict=True)), x)

    with computed(way):
        assert torch.autograd.gradcheck(run, (x, *parameters.values()), fast_mode=True)


ONE_PIXEL = [
    (nn.Conv1d(3, 4, 3, padding=1), 1),
    (nn.Conv2d(3, 4, 3, padding=1), 4),
    (nn.Conv2d(3, 4, (3, 1), padding="same", bias=False), 1),
    (nn.Conv2d(3, 4, 3, 2, 4, dilation=4), 4),
    (nn.Conv2d(3, 4, 1, 2), 0),
    (nn.Conv3d(3, 4, (1, 3, 5), padding=(0, 1, 2)), 7),
    (nn.Conv2d(3, 4, 3, padding=2), None),  # more than one pixel comes out
    (nn.Conv2d(3, 4, 3, padding=3, dilation=2, stride=3), None),  # the kernel jumps over it
    (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), None),
    (nn.Conv2d(4, 4, 3, padding=1, groups=2), None),
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("dense", "tap"), ONE_PIXEL, ids=str)
def test_images_of_one_pixel_meet_one_value_of_each_kernel(dense, tap, channels_last):
    dense = copy.deepcopy(dense).double()
    x = torch.randn(3, dense.in_channels, *[1] * (dense.weight.ndim - 2), dtype=torch.float64)
    layer = low_rank_type(type(dense)).from_dense(dense)
    if channels_last and x.ndim == 4:
        layer = layer.to(memory_format=torch.channels_last)
    assert layer._only_tap(x) == tap
    layer.activate(2)
    leaves = [x.requires_grad_(), layer.u, layer.v]
    expected = functional_call(dense, {"weight": layer.weight}, x)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(
        torch.autograd.grad(layer(x), leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
    )
    assert layer.positions == expected.numel() // 4


@pytest.mark.parametrize("kernel", [(3, 2), (2, 3, 2)])
def test_products_lie_in_memory_as_their_factors_do(kernel):
    dims = len(kernel)
    layout = torch.channels_last if dims == 2 else torch.channels_last_3d
    dense = (nn.Conv2d if dims == 2 else nn.Conv3d)(3, 4, kernel)
    layer = low_rank_type(type(dense)).from_dense(dense)
    expected = layer.weight
    assert expected.is_contiguous()
    layer.v.data = layer.v.data.contiguous(memory_format=layout)
    assert layer.weight.is_contiguous(memory_format=layout)
    torch.testing.assert_close(layer.weight, expected)
    layer(torch.randn(2, 3, *[4] * dims)).sum().backward()
    assert layer.v.grad is not None
    assert layer.v.grad.is_contiguous(memory_format=layout)


def test_ranks_beyond_the_active_one_get_zero_gradients(sample: tuple[nn.Module, Tensor]) -> None:
    dense, x = sample
    layer = low_rank_type(type(dense)).from_dense(dense)
    layer.activate(2)
    layer(x).square().sum().backward()
    assert layer.u.grad[:, :2].abs().sum() > 0 and layer.v.grad[:2].abs().sum() > 0
    assert not layer.u.grad[:, 2:].any() and not layer.v.grad[2:].any()


# -- shapes, options and costs -----------------------------------------------------------------


@any_kind
@any_data
def test_shapes_options_and_counts_follow_the_dense_layer(kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(kind))
    layer = case.low_rank()
    weight = case.dense.weight
    groups = getattr(case.dense, "groups", 1)
    first = weight.shape[0] // groups
    assert layer.weight_shape == weight.shape == layer.weight.shape
    assert layer.full_rank == layer.rank == min(first, weight.numel() // weight.shape[0])
    assert layer.dense_weights == weight.numel()
    assert layer.weights() == layer.u.numel() + layer.v.numel()
    assert layer.weights(1) * layer.rank == layer.weights()
    assert layer.kind == type(case.dense).__name__
    assert layer.u.shape[1] == layer.v.shape[0] == layer.rank
    options = ["in_features", "out_features"]
    if kind != "linear":
        options = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"]
        options += ["groups", "padding_mode", "output_padding"]
    for option in options:
        assert getattr(layer, option) == getattr(case.dense, option), option


@any_kind
@any_data
def test_positions_are_where_the_weight_is_applied(kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(kind))
    layer = case.low_rank()
    assert layer.positions is None
    output = layer(case.x)
    if kind.startswith("transposed"):  # every input position is multiplied
        expected = case.x.numel() // layer.in_channels
    else:
        expected = output.numel() // layer.u.shape[0]
    assert layer.positions == expected


@pytest.mark.parametrize(
    ("rank", "dense_is_cheaper"), [(1, False), (5, False), (6, False), (7, True), (12, True)]
)
def test_dense_is_cheaper_only_strictly_above_break_even(rank: int, dense_is_cheaper: bool) -> None:
    layer = LowRankLinear.from_dense(nn.Linear(12, 12), 12)  # 144 = 6 · (12 + 12)
    forms = better_forms(layer, {"": rank}, copied=False)
    assert (forms[""] == "dense") is dense_is_cheaper


@pytest.mark.parametrize(
    ("positions", "m", "n", "rank", "composed"),
    [
        (1, 64, 64, 64, False),  # one vector: composing costs a whole matrix product
        (10_000, 64, 64, 64, True),  # twice the multiplications factored
        (10_000, 64, 64, 8, False),  # an eighth of the ranks: a quarter of the multiplications
        (0, 64, 64, 64, False),
    ],
)
def test_the_way_follows_the_shapes(
    positions: int, m: int, n: int, rank: int, composed: bool
) -> None:
    assert lowrank.compose_is_cheaper(positions, m, n, rank) is composed


# -- rank zero ---------------------------------------------------------------------------------


@any_way
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "active"])
def test_rank_zero_gives_the_bias_in_the_right_shape(
    sample: tuple[nn.Module, Tensor], stored: bool, way: str
) -> None:
    dense, x = sample
    layer = low_rank_type(type(dense)).from_dense(dense, 0 if stored else None)
    layer.activate(0)
    with torch.no_grad():
        dense.weight.zero_()
    with computed(way):
        output = layer(x)
        torch.testing.assert_close(output, dense(x), rtol=0, atol=0)
        if output.requires_grad:
            output.sum().backward()
    if stored:  # frozen, for optimizers that cannot take empty gradients
        assert not layer.u.requires_grad and not layer.v.requires_grad
    else:
        assert all(p.grad is not None and not p.grad.any() for p in (layer.u, layer.v))
    assert layer.active_rank == 0
    assert not layer.weight.any() and layer.weight.shape == dense.weight.shape
    for plain in (layer.dense(0), layer.factored(0)):
        torch.testing.assert_close(plain(x), dense(x), rtol=0, atol=0)


# -- trainability, active rank -----------------------------------------------------------------


@pytest.mark.parametrize("weight_trains", [True, False])
@pytest.mark.parametrize("bias_trains", [True, False])
def test_frozen_parameters_stay_frozen(
    sample: tuple[nn.Module, Tensor], weight_trains: bool, bias_trains: bool
) -> None:
    dense, _ = sample
    dense.weight.requires_grad_(weight_trains)
    if dense.bias is not None:
        dense.bias.requires_grad_(bias_trains)
    alone = low_rank_type(type(dense)).from_dense(dense)
    layer = lod.decompose(dense)
    assert layer.u.requires_grad is layer.v.requires_grad is weight_trains
    for plain in (alone, layer, layer.dense(), layer.factored()[1], lod.extract(layer)):
        for name, parameter in plain.named_parameters():
            trains = bias_trains if name.endswith("bias") else weight_trains
            assert parameter.requires_grad is trains, name


def test_active_rank_starts_at_the_stored_rank_and_returns_to_it() -> None:
    layer = LowRankLinear.from_dense(nn.Linear(6, 5))
    assert layer.active_rank == layer.rank == 5
    layer.activate(2)
    assert (layer.active_rank, layer.rank) == (2, 5)
    layer.activate(None)
    assert layer.active_rank == 5


@pytest.mark.parametrize("rank", [-1, 6])
def test_an_active_rank_that_is_not_stored_is_refused(rank: int) -> None:
    layer = LowRankLinear.from_dense(nn.Linear(6, 5))
    with pytest.raises(RankError, match=f"{rank}.* 5"):
        layer.activate(rank)
    assert layer.active_rank == 5


def test_the_weight_is_that_of_the_active_rank_and_differentiable() -> None:
    dense = nn.Linear(6, 5).double()
    layer = LowRankLinear.from_dense(dense)
    layer.activate(2)
    torch.testing.assert_close(layer.weight, truncated_weight(dense, 2))
    layer.weight.sum().backward()
    assert layer.u.grad[:, :2].any()


# -- dtypes and SVD ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
def test_factors_share_the_singular_values_evenly(dtype: torch.dtype) -> None:
    layer = LowRankLinear.from_dense(nn.Linear(8, 6, dtype=dtype))
    assert layer.u.dtype == layer.v.dtype == layer.bias.dtype == dtype
    u, v = layer.u.detach().double(), layer.v.detach().double()
    values = u.square().sum(0)
    torch.testing.assert_close(values, v.square().sum(1), rtol=0.02, atol=1e-3)
    assert (values.diff() <= 1e-2 * values[0]).all(), "not ordered"
    gram = u.T @ u / values[0]
    assert (gram - gram.diag().diag()).abs().max() <= TOLERANCE[dtype] * 4


def test_half_types_are_factored_at_float32_precision() -> None:
    dense = nn.Linear(32, 32, dtype=torch.bfloat16)
    layer = LowRankLinear.from_dense(dense)
    exact = LowRankLinear.from_dense(copy.deepcopy(dense).float())
    # each entry is the float32 factor, rounded once; signs of a pair may differ together
    for ours, reference in ((layer.u, exact.u), (layer.v, exact.v)):
        rounded = reference.to(torch.bfloat16)
        assert torch.equal(ours.abs(), rounded.abs())


# -- state dicts -------------------------------------------------------------------------------


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(72, 10))


X2 = (3, 4, 5, 5)
SHRUNK = {"0": 3, "2": 4}


def shrunk_model() -> nn.Module:
    return lod.decompose(two_layers(), ranks=SHRUNK)


def test_the_state_dict_holds_parameters_alone_and_the_ranks_in_its_shapes() -> None:
    state = shrunk_model().state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "0.u": (8, 3), "0.v": (3, 4, 3, 3), "0.bias": (8,),
        "2.u": (10, 4), "2.v": (4, 72), "2.bias": (10,),
    }  # fmt: skip


def test_an_optimizer_created_before_loading_trains_what_was_loaded() -> None:
    trained, x = shrunk_model(), torch.randn(X2)
    fresh = lod.decompose(two_layers())
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    fresh.load_state_dict(trained.state_dict())
    expected = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    for model, stepper in ((fresh, optimizer), (trained, expected)):
        for _ in range(2):
            stepper.zero_grad()
            model(x).square().sum().backward()
            stepper.step()
    for (name, one), other in zip(fresh.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=name)


def test_a_stale_gradient_does_not_survive_a_resizing_load() -> None:
    fresh = lod.decompose(two_layers())
    fresh(torch.randn(X2)).sum().backward()
    fresh.load_state_dict(shrunk_model().state_dict())
    for parameter in fresh.parameters():
        assert parameter.grad is None or parameter.grad.shape == parameter.shape


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"2.u": (10, 3)}, "do not fit together"),  # one rank less than v
        ({"2.v": (5, 72)}, "do not fit together"),
        ({"2.u": (10, 11), "2.v": (11, 72)}, "full rank 10"),
        ({"2.u": (9, 4)}, "size mismatch"),
        ({"2.v": (4, 71)}, "size mismatch"),
        ({"2.v": (4, 72, 1)}, "mismatch"),
        ({"2.u": (10, 4, 1)}, "do not fit together"),
        ({"2.v": None}, "Missing key"),
        ({"2.u": None}, "Missing key"),
        ({"2.weight": (10, 72)}, "Unexpected key"),
    ],
    ids=str,
)
def test_factors_of_other_shapes_are_refused(
    changes: dict[str, tuple[int, ...] | None], words: str
) -> None:
    state = shrunk_model().state_dict()
    for key, shape in changes.items():
        state.pop(key, None)
        if shape is not None:
            state[key] = torch.zeros(shape)
    fresh = lod.decompose(two_layers())
    before = fresh[2].u.clone(), fresh[2].v.clone()
    with pytest.raises(RuntimeError, match=words):
        fresh.load_state_dict(state)
    if "2.weight" not in changes:
        assert fresh[2].rank in (10, 4)
        assert fresh[2].u.shape[1] == fresh[2].v.shape[0]
    if "do not fit together" in words:
        assert torch.equal(fresh[2].u, before[0]) and torch.equal(fresh[2].v, before[1])


def test_loading_fewer_ranks_than_are_active_uses_what_there_is() -> None:
    fresh = lod.decompose(two_layers())
    with lod.at_ranks(fresh, {"2": 9}):
        fresh.load_state_dict(shrunk_model().state_dict())
        assert fresh[2].active_rank == 4
        assert fresh(torch.randn(X2)).shape == (3, 10)


# -- output_size, repr, copies -----------------------------------------------------------------


@any_way
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions_take_output_size(dims: int, groups: int, way: str) -> None:
    dense = TRANSPOSED[dims](4, 6, 3, stride=3, padding=1, groups=groups)
    x = torch.randn(2, 4, *[5] * dims)
    layer = lod.decompose(copy.deepcopy(dense))
    with computed(way):
        for size in (13, 14, 15):
            expected = dense(x, output_size=[size] * dims)
            torch.testing.assert_close(layer(x, output_size=[size] * dims), expected)
        torch.testing.assert_close(layer(x), dense(x))  # the option of one call does not stay
    plain = lod.extract(layer)
    torch.testing.assert_close(plain(x, output_size=[14] * dims), dense(x, [14] * dims))


def test_an_output_size_out_of_reach_is_refused_and_does_not_stay() -> None:
    layer = lod.decompose(nn.ConvTranspose2d(4, 6, 3, stride=3))
    x = torch.randn(2, 4, 5, 5)
    with pytest.raises(ValueError, match="output size"):
        layer(x, output_size=[99, 99])
    assert layer.output_padding == (0, 0)


@pytest.mark.parametrize(
    ("dense", "rank", "text"),
    [
        (
            nn.Linear(6, 5),
            2,
            "LowRankLinear(in_features=6, out_features=5, rank=2/5, bias=True)",
        ),
        (
            nn.Linear(6, 5, bias=False),
            None,
            "LowRankLinear(in_features=6, out_features=5, rank=5/5, bias=False)",
        ),
        (
            nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular", groups=2, bias=False),
            0,
            "LowRankConv(4, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), "
            "dilation=(1, 1), padding_mode=circular, groups=2, rank=0/4, bias=False)",
        ),
        (
            nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1),
            3,
            "LowRankConvTranspose(4, 6, kernel_size=(3,), stride=(2,), padding=(0,), "
            "dilation=(1,), output_padding=(1,), groups=1, rank=3/4, bias=True)",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_repr_tells_options_rank_and_bias(dense: nn.Module, rank: int | None, text: str) -> None:
    assert repr(low_rank_type(type(dense)).from_dense(dense, rank)) == text


def test_errors_are_one_family_and_keep_their_usual_meaning() -> None:
    layer = LowRankLinear.from_dense(nn.Linear(3, 3))
    for expected in (MaestroError, ValueError):
        with pytest.raises(expected):
            layer.activate(7)


# -- options that were set after construction ----------------------------------------------------


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize(
    "options",
    [
        {"padding": (0, 0)},
        {"padding": 2},
        {"dilation": (2, 2), "padding": (2, 2)},
        {"dilation": 2},
        {"stride": 2},
    ],
    ids=str,
)
def test_options_count_as_they_stand_when_a_convolution_is_decomposed(
    options: dict[str, Any], mode: str
) -> None:
    conv = nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode)
    for key, value in options.items():
        setattr(conv, key, value)
    x = torch.randn(2, 4, 9, 9)
    wanted = conv(x)
    model = lod.decompose(nn.Sequential(conv))
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lod.extract(model)(x), wanted, rtol=1e-4, atol=1e-5)
    assert model[0].positions == wanted[:, 0].numel()


def test_options_of_a_low_rank_convolution_can_be_set_too() -> None:
    dense = nn.Conv2d(4, 6, 3, padding=1)
    model = lod.decompose(nn.Sequential(copy.deepcopy(dense)))
    for conv in (dense, model[0]):
        conv.stride, conv.padding, conv.dilation = (2, 2), (2, 2), (2, 2)
    x = torch.randn(2, 4, 9, 9)
    torch.testing.assert_close(model(x), dense(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("conv", [nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3), nn.Linear(4, 4)])
def test_layers_take_their_input_by_torchs_name(conv: nn.Module) -> None:
    x = torch.randn(2, 4, 6, 4)
    wanted = conv(input=x)
    layer = lod.decompose(nn.Sequential(conv))[0]
    torch.testing.assert_close(layer(input=x), wanted, rtol=1e-4, atol=1e-5)


def test_from_dense_shares_no_memory_with_the_dense_layer() -> None:
    dense = nn.Linear(6, 6)
    weight, bias = dense.weight.detach().clone(), dense.bias.detach().clone()
    layer = LowRankLinear.from_dense(dense)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7.0)
    assert torch.equal(dense.weight, weight) and torch.equal(dense.bias, bias)
