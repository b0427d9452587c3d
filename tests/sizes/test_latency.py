"""Measured latency: the numbers are this machine's, what follows from them is exact."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.errors import CheckpointError, LayerError, OptionError
from maestro_lod.layers import LowRank, LowRankEmbedding, Recurrent
from maestro_lod.sizes import latency as module
from maestro_lod.sizes.latency import (
    MOST_NOISE,
    Latency,
    LayerLatency,
    RankTiming,
    latency,
    round_ranks,
)

# -- what follows from measurements, on made-up ones -------------------------------------------


def layer_with(*points: tuple[int, float, float], **more: Any) -> LayerLatency:
    given = {"rank": 32, "full_rank": 32, "break_even": 16, "dense": 1e-3} | more
    return LayerLatency(**given, points=tuple(RankTiming(*point) for point in points))


def latency_of(layers: Mapping[str, LayerLatency], dense: float = 5e-3) -> Latency:
    return Latency(
        dense=dense, layers=dict(layers), batch=4, rounds=15, threads=1, dtype="float32",
        device="cpu", torch="2.13",
    )  # fmt: skip


CURVE = layer_with((2, 0.5, 0.01), (4, 0.7, 0.01), (8, 0.9, 0.02), (16, 1.3, 0.01))


@pytest.mark.parametrize(
    ("rank", "form"),
    [(0, "factored"), (1, "factored"), (4, "factored"), (8, "factored"), (9, "factored"),
     (11, "dense"), (16, "dense"), (17, "dense"), (32, "dense")],
)  # fmt: skip
def test_the_faster_form_is_chosen_between_points_too(rank: int, form: str) -> None:
    assert CURVE.choose(rank) == form
    assert latency_of({"a": CURVE}).choose("a", rank) == form


@pytest.mark.parametrize(
    ("ratio", "noise", "form"),
    [
        (1.02, 0.00, "dense"),
        (1.02, 0.03, "factored"),  # as fast, as far as can be told, and smaller
        (1.20, 0.50, "dense"),  # no noise excuses that much
        (0.99, 0.00, "factored"),
    ],
)
def test_within_the_noise_the_smaller_form_wins(ratio: float, noise: float, form: str) -> None:
    assert layer_with((4, ratio, noise)).choose(4) == form


def test_ratios_are_interpolated_and_bounded_outside() -> None:
    assert CURVE.at(6).ratio == pytest.approx(0.8)
    assert CURVE.at(6).noise == 0.02
    assert CURVE.at(1).ratio == CURVE.at(0).ratio == 0.5  # not faster than what was measured
    assert CURVE.at(40).ratio == 1.3


def test_a_layer_that_did_not_run_is_kept_as_small_as_can_be() -> None:
    idle = layer_with(dense=0.0)
    assert [idle.choose(16), idle.choose(17)] == ["factored", "dense"]
    assert idle.seconds(3) == 0.0


def test_a_layer_without_a_factored_form_is_dense() -> None:
    assert layer_with(break_even=0).choose(1) == "dense"


def test_a_prediction_adds_up_what_layers_gain() -> None:
    measured = latency_of({"a": CURVE, "b": layer_with((8, 0.25, 0.0), dense=2e-3)})
    assert measured.predict() == measured.dense  # stored ranks are above break-even
    assert measured.predict({"a": 2}) == pytest.approx(5e-3 - 0.5e-3)
    assert measured.predict({"a": 16, "b": 8}) == pytest.approx(5e-3 - 1.5e-3)
    assert measured.predict(2) == measured.predict({"*": 2}) == measured.predict(2 / 32)


def test_a_prediction_can_be_told_the_forms() -> None:
    measured = latency_of({"a": CURVE, "b": layer_with((8, 0.25, 0.0), dense=2e-3)})
    forms: dict[str, Any] = {"a": "factored", "b": "dense"}  # the slower ones
    assert measured.predict({"a": 16, "b": 8}, forms=forms) == pytest.approx(5e-3 + 0.3e-3)
    forms = {name: measured.choose(name, 8) for name in measured.layers}
    assert measured.predict(8, forms=forms) == measured.predict(8)


def test_layers_that_take_longer_alone_than_the_model_gain_their_share_of_it() -> None:
    layer = layer_with((8, 0.25, 0.0), dense=4e-3)
    measured = latency_of({"a": layer, "b": layer})  # 8 ms alone, 5 ms in all
    assert measured.predict() == measured.dense
    assert measured.predict({"a": 8}) == pytest.approx((0.25 + 1) / 2 * 5e-3)
    assert measured.predict(8) == pytest.approx(0.25 * 5e-3)


@given(
    st.lists(
        st.tuples(st.integers(1, 16), st.floats(0.05, 20.0), st.floats(0.0, 2.0)),
        unique_by=lambda point: point[0],
        max_size=5,
    ),
    st.integers(0, 32),
)
def test_no_choice_is_slower_than_dense(points: list[Any], rank: int) -> None:
    layer = layer_with(*sorted(points))
    assert layer.seconds(rank) <= layer.dense * (1 + MOST_NOISE)
    for dense in (5e-3, 1e-3, 1e-5):
        measured = latency_of({"a": layer, "b": CURVE}, dense)
        assert 0 < measured.predict({"a": rank, "b": 1}) <= measured.dense * (1 + MOST_NOISE)
    if points:
        ratios = [ratio for _, ratio, _ in points]
        assert min(ratios) - 1e-9 <= layer.at(rank).ratio <= max(ratios) + 1e-9


def test_an_unknown_layer_is_refused_with_the_nearest() -> None:
    measured = latency_of({"conv1": CURVE})
    with pytest.raises(LayerError, match=r"conv2 was not measured.*'conv1'"):
        measured.choose("conv2", 1)
    with pytest.raises(LayerError, match=r"'conv2'.*'conv1'"):
        measured.predict({"conv2": 1})


def test_it_is_data() -> None:
    measured = latency_of({"a": CURVE, "b": layer_with()})
    assert Latency.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("layers"),
        lambda data: data.pop("dense"),
        lambda data: data["layers"]["a"].pop("points"),
        lambda data: data["layers"]["a"]["points"].append({"rank": 3}),
        lambda data: data.update(layers=[1]),
        lambda data: data.update(surprise=1),
    ],
)
def test_damaged_data_is_refused(damage: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(json.dumps(latency_of({"a": CURVE}).to_dict()))
    damage(data)
    with pytest.raises(CheckpointError, match="not a measured latency"):
        Latency.from_dict(data)


def test_it_prints_as_a_table_that_says_how_it_was_measured() -> None:
    curve = layer_with((2, 0.5, 0.0), (4, 1.01, 0.02))
    text = str(latency_of({"first": curve, "second": layer_with((1, 2.0, 0.0)), "": layer_with()}))
    assert "2: 0.50  4: 1.01≈" in text
    assert "up to 16" in text
    assert "never" in text
    assert "(the model itself)" in text
    assert "1.00 ms" in text
    assert "batch 4, 1 threads, float32, cpu, torch 2.13; medians of 15 interleaved" in text


# -- what is measured --------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 60, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.body(self.embedding(ids))))


class Sequence(nn.Module):
    """A recurrent layer, attention, and a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 16, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.idle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.recurrent(x)[0]))


def fake_times(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Any, int], float]) -> list[Any]:
    """Run every variant once, for its effects, and make up its times; return what was run."""
    keys: list[Any] = []

    def fake(variants: Mapping[Any, Callable[[], object]], *, rounds: int) -> dict[Any, Any]:
        for key, run in variants.items():
            keys.append(key)
            run()
        return {key: [seconds(key, i) for i in range(rounds)] for key in variants}

    monkeypatch.setattr(module, "interleaved", fake)
    return keys


def test_ranks_up_to_break_even_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = fake_times(monkeypatch, lambda key, i: 1.0)
    model = lod.decompose(LeNet())
    latency(model, torch.empty(2, 1, 28, 28), rounds=3)
    ranks: dict[str, dict[str, list[int]]] = {}
    for name, form, rank in keys[1:]:
        ranks.setdefault(form, {}).setdefault(name, []).append(rank)
    # 6·25/31 = 4, 16·150/166 = 14, 256·120/376 = 81, 84·120/204 = 49, 840/94 = 8
    assert ranks["factored"] == {
        "conv1": [1, 2, 4], "conv2": [1, 3, 7, 14], "fc1": [10, 20, 40, 81],
        "fc2": [6, 12, 24, 49], "fc3": [1, 2, 4, 8],
    }  # fmt: skip
    # r² is more than the index, 6, 16, 256, 120 or 84, and r·(m+n-r) with it less than m·n
    assert ranks["pivoted"] == {
        "conv1": [3, 5], "conv2": [5, 7, 15], "fc1": [17, 29, 59, 118], "fc2": [11, 20, 40, 80],
    }  # fmt: skip
    assert ranks["dense"].keys() == ranks["factored"].keys()
    shrunk = lod.decompose(nn.Linear(256, 120), ranks=6)
    keys.clear()
    latency(shrunk, torch.empty(2, 256))
    assert [key[1:] for key in keys[1:]] == [
        ("dense", 6), ("factored", 1), ("factored", 3), ("factored", 6)
    ]  # fmt: skip


def test_times_become_paired_ratios_and_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(key: Any, i: int) -> float:
        load = [1.0, 4.0, 1.0, 9.0][i]  # what slows the machine down for a round cancels out
        if isinstance(key, str):
            return 10.0 * load
        _, form, rank = key
        return load * (2.0 if form == "dense" else rank / 8 + (0.1 * i if rank == 8 else 0.0))

    fake_times(monkeypatch, seconds)
    measured = latency(lod.decompose(nn.Linear(16, 16)), torch.empty(3, 16), rounds=4)
    layer = measured.layers[""]
    assert measured.dense == 25.0
    assert layer.dense == pytest.approx(5.0)  # a fifth of the whole in every round
    assert [(p.rank, p.ratio) for p in layer.points] == [
        (1, 0.0625), (2, 0.125), (4, 0.25), (8, pytest.approx(0.575)),
    ]  # fmt: skip
    assert [p.noise for p in layer.points[:3]] == [0.0] * 3
    assert layer.points[3].noise == pytest.approx(0.075 / 2)  # of 0.5, 0.55, 0.6, 0.65
    assert (measured.batch, measured.rounds, measured.dtype, measured.device) == (
        3, 4, "float32", "cpu",
    )  # fmt: skip
    assert measured.threads == torch.get_num_threads()
    assert measured.torch == torch.__version__


def test_layers_run_on_the_shapes_they_get_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, lambda key, i: 1.0)
    seen: dict[str, set[tuple[int, ...]]] = {}
    names = {}

    class Recorder(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            seen.setdefault(self.name, set()).add(tuple(x.shape))
            return x

    monkeypatch.setattr(module, "all_dense", lambda _: nn.Identity())
    monkeypatch.setattr(LowRank, "to_torch", lambda layer, form, rank: Recorder(names[layer]))
    model = lod.decompose(LeNet())
    names |= {layer: name for name, layer in model.named_modules() if isinstance(layer, LowRank)}
    latency(model, torch.empty(7, 1, 28, 28), rounds=1)
    assert seen == {
        "conv1": {(7, 1, 28, 28)}, "conv2": {(7, 6, 12, 12)}, "fc1": {(7, 256)},
        "fc2": {(7, 120)}, "fc3": {(7, 84)},
    }  # fmt: skip


def test_all_places_where_a_weight_is_used_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lod.decompose(Tied(), tied="share", ranks=4)
    ids = torch.randint(60, (2, 5))
    calls: list[tuple[type, Tensor]] = []
    keys = fake_times(monkeypatch, lambda key, i: 1.0)
    forward = nn.Linear.forward

    def counted(self: nn.Linear, x: Tensor) -> Tensor:
        calls.append((type(self), x))
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    latency(model, ids, rounds=1)
    assert {name for name, *_ in keys[1:]} == {"embedding", "body"}  # the head is the embedding's
    # dense model: body twice, head; embedding dense: head; factored at 1, 2, 4: look-up, two of
    # the head; body dense twice; factored at 1, 2, 4 two of it, twice
    assert len(calls) == 3 + 1 + 3 * 3 + 2 + 3 * 4


def test_every_kind_is_measured_and_nothing_is_touched(
    snapshot: Callable[[nn.Module], Any],
) -> None:
    model = lod.decompose(Sequence())
    model.encoder.eval()
    before, modes = snapshot(model), [m.training for m in model.modules()]
    randomness = torch.get_rng_state()
    measured = latency(model, torch.empty(2, 3, 8), rounds=1)
    before.assert_unchanged(model)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), randomness)
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert measured.layers.keys() == lod.ranks(model).keys()
    assert measured.dense > 0
    for name, layer in measured.layers.items():
        if name.startswith("recurrent") or name == "idle":
            assert (layer.dense, layer.points, layer.choose(1)) == (0.0, (), "factored")
        else:
            assert layer.dense > 0
            assert all(p.ratio > 0 and p.noise == 0 for p in layer.points)
    plain = lod.extract(model, 0.25, by=measured)
    assert type(plain.recurrent) is Recurrent


def test_rank_zero_is_measured_as_the_rank_of_zeros_that_it_becomes() -> None:
    model = lod.decompose(nn.Linear(16, 16), ranks={"": 0})
    layer = latency(model, torch.empty(2, 16), rounds=1).layers[""]
    assert [p.rank for p in layer.points] == [1]


def test_keyword_and_several_arguments_are_examples_too() -> None:
    model = lod.decompose(Tied(), tied="share", ranks=2)
    ids = torch.randint(60, (3, 5))
    for example in ((ids,), {"ids": ids}):
        assert latency(model, example, rounds=1).batch == 3


@pytest.mark.parametrize(
    ("example", "options", "error", "words"),
    [
        ([1, 2], {}, OptionError, "example is a list"),
        ({"n": 3}, {}, OptionError, "no tensor with a batch dimension"),
        (torch.empty(2, 9), {}, LayerError, "Linear does not run on this example"),
        (torch.empty(2, 8), {"rounds": 0}, OptionError, "rounds=0"),
        (torch.empty(2, dtype=torch.long, device="meta"), {}, OptionError, "cannot be drawn"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    example: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = lod.decompose(nn.Linear(8, 8))
    with pytest.raises(error, match=words):
        latency(model, example, **options)
    assert model.training


def test_a_dense_model_has_nothing_to_choose() -> None:
    with pytest.raises(LayerError, match=r"no low-rank layer.*decompose"):
        latency(nn.Linear(8, 8), torch.empty(1, 8))


# -- ranks that kernels like -------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 12))
def test_ranks_round_to_the_nearest_multiple_that_is_there(
    stored: int, rank: int, multiple: int
) -> None:
    rank = min(rank, stored)
    model = lod.decompose(nn.Linear(40, 40), ranks=stored)
    rounded = round_ranks(model, {"": rank}, multiple=multiple)[""]
    if rank == 0 or stored < multiple:
        assert rounded == rank
        return
    there = range(multiple, stored + 1, multiple)
    assert rounded in there
    assert abs(rounded - rank) == min(abs(other - rank) for other in there)


def test_rounded_ranks_are_named_and_resolved() -> None:
    model = lod.decompose(LeNet())
    assert round_ranks(model, 0.25) == {"conv1": 2, "conv2": 8, "fc1": 32, "fc2": 24, "fc3": 8}
    assert round_ranks(model, None, multiple=16)["fc1"] == 112
    lod.extract(model, round_ranks(model, 0.5))
    for multiple in (0, -8, 2.0, True):
        with pytest.raises(OptionError, match=r"multiple=.*whole number"):
            round_ranks(model, 0.5, multiple=multiple)  # type: ignore[arg-type]


def test_embeddings_and_their_heads_follow_one_choice() -> None:
    model = lod.decompose(Tied(), tied="share", ranks=4)
    assert isinstance(model.embedding, LowRankEmbedding)
    slow = latency_of({"embedding": layer_with((4, 2.0, 0.0)), "body": CURVE})
    fast = latency_of({"embedding": layer_with((4, 0.5, 0.0)), "body": CURVE})
    ids = torch.randint(60, (2, 5))
    for measured, kinds in ((slow, (nn.Embedding, nn.Linear)), (fast, (nn.Sequential,) * 2)):
        plain = lod.extract(model, by=measured)
        assert (type(plain.embedding), type(plain.head)) == kinds
        torch.testing.assert_close(plain(ids), model(ids), rtol=1e-4, atol=1e-5)
