"""Averaging by ranks: properties over tiers, weights and orders; what is sent; refused states."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod import at_ranks, decompose, load, ranks, save
from maestro_lod.errors import LayerError, MaestroError, OptionError, TrainingError
from maestro_lod.integrations.federated import aggregate, leading, receive
from maestro_lod.layers import RanksCutWarning, match_ranks
from tests.conftest import Snapshot

FULL = {"0": 4, "3": 6, "5": 3}
RANKS = st.fixed_dictionaries({name: st.integers(0, full) for name, full in FULL.items()})
CLIENTS = st.lists(st.tuples(RANKS, st.floats(0.1, 100)), min_size=1, max_size=4)


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 6), nn.Tanh(),
        nn.Linear(6, 3),
    )  # fmt: skip


def server() -> nn.Module:
    return decompose(dense())


def client_state(model: nn.Module, of: dict[str, int], seed: int) -> dict[str, Tensor]:
    """What a client would send: the shapes that it received, other values."""
    torch.manual_seed(seed)
    return {
        key: value + torch.randn(value.shape).mul(3).to(value.dtype).abs()
        for key, value in leading(model, of).items()
    }


@given(CLIENTS)
def test_each_rank_is_the_mean_over_those_who_hold_it(clients: list) -> None:
    model = server()
    before = copy.deepcopy(model.state_dict())
    states = [(client_state(model, of, i), w) for i, (of, w) in enumerate(clients)]
    aggregate(model, states)
    after = model.state_dict()
    for name, full in FULL.items():
        for rank in range(full):
            holding = [(s, w) for (s, w), (of, _) in zip(states, clients, strict=True)
                       if of[name] > rank]  # fmt: skip
            for key, dim in ((f"{name}.u", 1), (f"{name}.v", 0)):
                now = after[key].select(dim, rank)
                if not holding:
                    assert torch.equal(now, before[key].select(dim, rank))
                    continue
                total = sum(w for _, w in holding)
                mean = sum(s[key].select(dim, rank).double() * (w / total) for s, w in holding)
                torch.testing.assert_close(now.double(), mean, rtol=1e-6, atol=1e-7)
    total = sum(w for _, w in states)
    for key in ("0.bias", "1.weight", "1.running_mean"):
        mean = sum(s[key].double() * (w / total) for s, w in states)
        torch.testing.assert_close(after[key].double(), mean, rtol=1e-6, atol=1e-7)


@given(RANKS, st.floats(0.1, 100))
def test_one_clients_values_come_back_bit_for_bit(of: dict[str, int], weight: float) -> None:
    model = server()
    state = client_state(model, of, 1)
    aggregate(model, [(state, weight)])
    for key, value in leading(model, of).items():
        assert torch.equal(value, state[key]), key


@given(CLIENTS, st.randoms(use_true_random=False), st.floats(0.5, 50))
def test_order_and_scale_of_the_weights_do_not_matter(
    clients: list, random: object, scale: float
) -> None:
    one, other = server(), server()
    states = [(client_state(one, of, i), w) for i, (of, w) in enumerate(clients)]
    aggregate(one, states)
    shuffled = [(state, weight * scale) for state, weight in states]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    aggregate(other, shuffled)
    for mine, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        ties = 0 if mine.is_floating_point() else 1  # of whole numbers, which are rounded
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7 + ties)


@given(st.lists(RANKS, min_size=1, max_size=3))
def test_clients_that_changed_nothing_change_nothing(clients: list[dict[str, int]]) -> None:
    model = server()
    before = copy.deepcopy(model.state_dict())
    aggregate(model, [(leading(model, of), 2.0) for of in clients])
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


@given(RANKS)
def test_what_is_sent_is_cut_by_reference_and_runs_as_the_submodel_does(of: dict) -> None:
    model, x = server().eval(), torch.randn(2, 1, 4, 4)
    sent = leading(model, of)
    own = model.state_dict()
    assert all(sent[key].data_ptr() == own[key].data_ptr() for key in sent if sent[key].numel())
    stored = {name: (own[f"{name}.u"].shape, own[f"{name}.v"].shape) for name in FULL}
    for name, rank in of.items():
        m, n = stored[name][0][0], stored[name][1][1:].numel()
        assert sent[f"{name}.u"].numel() + sent[f"{name}.v"].numel() == rank * (m + n)
    client = decompose(dense(), ranks=1).eval()  # whatever it was before
    receive(client, sent)
    assert ranks(client) == of
    with at_ranks(model, of):
        torch.testing.assert_close(client(x), model(x))


def test_a_share_is_one_of_the_full_rank_and_the_whole_model_is_one() -> None:
    model = server()
    assert leading(model, 0.5)["3.v"].shape == (3, 16)
    for whole in (None, 1.0):
        assert {k: v.shape for k, v in leading(model, whole).items()} == {
            k: v.shape for k, v in model.state_dict().items()
        }


def test_tiers_train_one_model_that_is_saved_as_an_elastic_file(tmp_path: Path) -> None:
    torch.manual_seed(1)
    x = torch.randn(120, 1, 4, 4)
    y = (x.mean((1, 2, 3)) * 8).round().clamp(-1, 1).long() + 1
    model = server()
    losses = []
    for _ in range(5):
        updates = []
        for part, share in enumerate((0.25, 0.5, 1.0)):
            client = decompose(dense())
            receive(client, leading(model, share))
            optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
            for own in torch.arange(120).view(3, 4, 10)[part]:
                optimizer.zero_grad()
                F.cross_entropy(client(x[own]), y[own]).backward()
                optimizer.step()
            updates.append((client.state_dict(), 40))
        aggregate(model, updates)
        losses.append(F.cross_entropy(model.eval()(x), y).item())
        model.train()
    assert losses[-1] < losses[0]
    assert ranks(model) == FULL
    save(model, tmp_path / "model.safetensors")
    small = load(tmp_path / "model.safetensors", into=dense(), ranks=0.5).eval()
    with at_ranks(model.eval(), 0.5):
        torch.testing.assert_close(small(x), model(x))


# -- a server is not cut by accident ---------------------------------------------------------------


def test_loading_a_smaller_model_into_a_server_warns_once_with_the_way_out() -> None:
    model, client = server(), decompose(dense(), ranks=2)
    with pytest.warns(
        RanksCutWarning, match=r"cut 0 from rank 4 to 2.*federated\.aggregate"
    ) as got:
        model.load_state_dict(client.state_dict())
    assert len(got) == 1
    with pytest.warns(RanksCutWarning):  # every time that it happens
        server().load_state_dict(client.state_dict())


def test_whoever_says_that_it_is_wanted_is_not_warned(recwarn: pytest.WarningsRecorder) -> None:
    small = decompose(dense(), ranks=2).state_dict()
    model = server()
    match_ranks(model, small)
    model.load_state_dict(small)
    receive(server(), small)
    decompose(dense(), ranks=1).load_state_dict(small)  # grows
    match_ranks(model, {"0.u": small["0.u"], "0.v": torch.empty(2, 7), "3.u": 1})  # of another
    assert ranks(model) == {"0": 2, "3": 2, "5": 2}
    assert not recwarn.list


# -- refused updates -------------------------------------------------------------------------------


BAD_VALUES: dict[str, Callable[[Tensor], object]] = {
    "NaN": lambda value: value.new_full(value.shape, torch.nan, dtype=torch.float32),
    "infinite": lambda value: value.new_full(value.shape, -torch.inf, dtype=torch.float32),
    "overflows": lambda value: value.new_full(value.shape, 1e39, dtype=torch.float64),
    "complex": lambda value: value.to(torch.complex64),
    "of another kind": lambda value: value.to(
        torch.int64 if value.is_floating_point() else torch.float32
    ),
    "boolean": lambda value: value > 0,
    "of another shape": lambda value: value.new_zeros(*value.shape, 2),
    "flat": lambda value: value.new_zeros(()) if value.ndim else value.new_zeros(1),
    "with more ranks": lambda value: value.new_zeros([size + 40 for size in value.shape] or [2]),
    "sparse": lambda value: value.to_sparse() if value.ndim else value[None].to_sparse(),
    "on the meta device": lambda value: value.to("meta"),
    "a list": lambda value: value.tolist(),
    "None": lambda value: None,
}
"""What a tensor of an update may be replaced by, none of which a model can hold."""

KEYS = [*server().state_dict()]


def spoilt(state: dict[str, Tensor], key: str, bad: str) -> dict[str, Tensor]:
    return state | {key: BAD_VALUES[bad](state[key])}  # type: ignore[dict-item]


@given(
    RANKS.filter(lambda of: all(of.values())), st.sampled_from(KEYS), st.sampled_from([*BAD_VALUES])
)
@settings(max_examples=150)
def test_values_that_a_model_cannot_hold_change_nothing(of: dict, key: str, bad: str) -> None:
    state = spoilt(client_state(server(), of, 1), key, bad)
    model, client = server(), decompose(dense(), ranks=2)
    before, before_client = Snapshot.of(model), Snapshot.of(client)
    with pytest.raises(MaestroError, match=r"^update 1 has "):
        aggregate(model, [(client_state(model, FULL, 2), 1.0), (state, 1.0)])
    with pytest.raises(MaestroError, match=r"^the state has "):
        receive(client, state)
    before.assert_unchanged(model)
    before_client.assert_unchanged(client)


Change = Callable[[dict[str, Tensor]], object]
SPOILT: dict[str, tuple[Change, type[MaestroError], str]] = {
    "missing": (lambda s: s.pop("3.bias"), LayerError, "only one of them has 3.bias"),
    "foreign": (lambda s: s.update(x=torch.ones(1)), LayerError, "only one of them has x"),
    "larger": (lambda s: s.update({"5.u": torch.zeros(3, 4), "5.v": torch.zeros(4, 6)}),
               LayerError, "has 4 ranks of 5, and the model can have 3"),
    "unpaired": (lambda s: s.update({"3.u": torch.zeros(6, 1)}), LayerError, "1 ranks in"),
    "variance": (lambda s: s["1.running_var"].neg_(), TrainingError,
                 "negative values in 1.running_var"),
    "counter": (lambda s: s["1.num_batches_tracked"].fill_(-1), TrainingError, "negative values"),
    "large counter": (lambda s: s["1.num_batches_tracked"].fill_(2**63 - 1), TrainingError,
                      "values that overflow as torch.int64 in 1.num"),
    "no text": (lambda s: s.update({3: torch.ones(1)}), LayerError, "only one of them has 3"),  # type: ignore[dict-item]
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_a_refused_update_changes_nothing(case: str) -> None:
    change, error, match = SPOILT[case]
    state = {key: value.clone() for key, value in leading(server(), 0.5).items()}
    change(state)
    model, client = server(), decompose(dense(), ranks=1)
    before, before_client = Snapshot.of(model), Snapshot.of(client)
    with pytest.raises(error, match=match):
        aggregate(model, [(client_state(model, FULL, 1), 1.0), (state, 1.0)])
    before.assert_unchanged(model)
    with pytest.raises(error, match=match):
        receive(client, state)
    before_client.assert_unchanged(client)


@pytest.mark.parametrize(
    "weight", [0.0, -1.0, float("nan"), float("inf"), True, "3", None, 10**400, 1j], ids=type
)
def test_a_weight_that_is_not_finite_and_above_zero_changes_nothing(weight: Any) -> None:
    model = server()
    before = Snapshot.of(model)
    with pytest.raises(OptionError, match=r"update 1 has the weight .*a finite number above zero"):
        aggregate(model, [(client_state(model, FULL, i), w) for i, w in enumerate((1.0, weight))])
    before.assert_unchanged(model)


@given(
    st.lists(st.sampled_from([5e-324, 1e-308, 1e-30, 1.0, 1e30, 1e300, 1e308]), min_size=1),
    st.sampled_from([torch.float32, torch.float64]),
    st.floats(0.1, 1.0),
)
def test_means_by_extreme_weights_are_finite_and_within_the_values(
    weights: list[float], dtype: torch.dtype, share: float
) -> None:
    model, largest = server().to(dtype), torch.finfo(dtype).max
    states = []
    for i in range(len(weights)):
        state = client_state(model, FULL, i)
        state["3.u"] = torch.full_like(state["3.u"], largest * share * (-1) ** i)
        states.append(state)
    before = Snapshot.of(model)
    if sum(weights) == float("inf"):
        with pytest.raises(OptionError, match=r"add up to more than 1.8e\+308"):
            aggregate(model, zip(states, weights, strict=True))
        before.assert_unchanged(model)
        return
    aggregate(model, zip(states, weights, strict=True))
    for key, value in model.state_dict().items():
        values = torch.stack([state[key] for state in states]).double()
        room = 1e-6 * values.abs().amax(0)
        assert (value.double() <= values.amax(0) + room).all(), key
        assert (value.double() >= values.amin(0) - room).all(), key


def test_a_dense_server_is_refused() -> None:
    for refused in (
        lambda: leading(dense(), 0.5),
        lambda: aggregate(dense(), []),
        lambda: receive(dense(), {}),
    ):
        with pytest.raises(LayerError, match="no low-rank layer"):
            refused()


def test_the_table_of_the_page_is_made_from_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    script = runpy.run_path(str(root / "benchmarks" / "federated.py"))
    kept = json.loads((root / "benchmarks" / "results" / "federated.json").read_text())
    assert script["START"] + script["table"](kept["answer"]) + script["END"] in (
        script["PAGE"].read_text()
    )
