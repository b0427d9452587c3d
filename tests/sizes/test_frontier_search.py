"""The search finds what a naive search finds, changes nothing, and goes on where it was killed."""

from __future__ import annotations

import copy
import itertools
import json
import math
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.errors import CheckpointError, LayerError, OptionError, RankError
from maestro_lod.layers import LowRank
from maestro_lod.layers.conv import LowRankConv
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.macs import dense_macs
from maestro_lod.sizes.frontier_search import METHODS, Frontier, Size, frontier
from maestro_lod.sizes.measured_search import most_evaluations
from maestro_lod.sizes.strategies import STEPWISE
from maestro_lod.train.shrink import cut

Search = Callable[..., Frontier]
Case = tuple[nn.Module, Tensor, Callable[[nn.Module], Tensor]]


class Residual(nn.Module):
    """A stem, two residual convolutions with BatchNorm, dropout, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.conv1, self.bn1 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.drop, self.fc = nn.Dropout(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x), inplace=True)
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.fc(self.drop(F.relu(y).mean((2, 3))))


class Twice(nn.Module):
    """Calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(12, 9), nn.Linear(9, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


class Attentive(nn.Module):
    """Self-attention, feed-forward, and a classifier on the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(14, 12), nn.ReLU(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (40, 14)),
    "residual": (Residual, (24, 2, 4, 4)),
    "called twice": (Twice, (40, 12)),
    "attention": (Attentive, (24, 3, 8)),
}


def made(name: str) -> Case:
    """Make a decomposed model that was trained a little, a batch, and the loss on it."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, x = build(), torch.randn(shape)
    y = torch.randint(4, shape[:1])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(30):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return lod.decompose(model), x, lambda m: F.cross_entropy(m(x), y)


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    return made(request.param)


def naive(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], x: Tensor, method: str, cost: str
) -> list[tuple[dict[str, int], float]]:
    """The search as it is written down: every candidate in full before each move."""
    layers = low_rank_layers(model)
    positions = dense_macs(model, x).positions
    for module in model.modules():
        module.training = isinstance(module, nn.BatchNorm2d)

    def evaluate(ranks: dict[str, int]) -> float:
        with torch.no_grad(), lod.at_ranks(model, ranks):
            return loss(model).item()

    def spent(name: str, rank: int) -> int:
        m, n = layers[name].matrix_shape
        index = m if isinstance(layers[name], LowRankConv) else n
        factored, pivoted = rank * (m + n), rank * (m + n - rank)
        if pivoted + index < min(m * n, factored):
            return pivoted * (positions[name] if cost == "macs" else 1)
        return min(m * n, factored) * (positions[name] if cost == "macs" else 1)

    def candidate(name: str, rank: int) -> int:
        lower = min(math.floor(0.9 * rank), rank - 1)
        while lower >= 1 and spent(name, lower) >= spent(name, rank):
            lower -= 1
        return lower

    def steps(name: str, rank: int) -> list[int]:
        below = [rank]
        while candidate(name, below[-1]) >= 1:
            below.append(candidate(name, below[-1]))
        return below[1:] if long else below[1:2]

    ranks = lod.ranks(model)
    own = current = evaluate(ranks)
    long = False  # steps of look-ahead are, once the loss is no longer about the model's own
    found = [(dict(ranks), current)]
    while candidates := [(n, r) for n, rank in ranks.items() for r in steps(n, rank)]:
        tries = {(n, r): evaluate({**ranks, n: r}) for n, r in candidates}

        scores: dict[tuple[str, int], tuple[float, int]] = {}
        for name, rank in candidates:
            saved = spent(name, ranks[name]) - spent(name, rank)
            increase = tries[name, rank] - current
            per_cost = max(0.0, increase) / saved, -saved
            scores[name, rank] = per_cost if long else (increase, 0)
        best = min(scores, key=scores.__getitem__)
        if method == "look-ahead" and not long and tries[best] > 1.01 * own:
            long = True
            continue

        def total(changed: tuple[str, int], ranks: dict[str, int] = ranks) -> int:
            return sum(spent(n, r) for n, r in {**ranks, changed[0]: changed[1]}.items())

        if long:  # of what lies on the way, all that nothing cheaper beats
            dearer = [c for c in candidates if total(c) > total(best)]
            for c in sorted(dearer, key=total, reverse=True):
                cheaper = [d for d in [*dearer, best] if d != c and total(d) <= total(c)]
                if all(tries[c] < tries[d] for d in cheaper):
                    found.append(({**ranks, c[0]: c[1]}, tries[c]))
        ranks[best[0]] = best[1]
        current = tries[best]
        found.append((dict(ranks), current))
    return found


@pytest.mark.parametrize("cost", ["macs", "params"])
@pytest.mark.parametrize("method", STEPWISE)
def test_the_exact_search_is_the_naive_one(case: Case, method: str, cost: Any) -> None:
    model, x, loss = case
    found = frontier(model, loss, method=method, cost=cost, exact=True)
    expected = naive(model, loss, x, method, cost)
    assert [(p.ranks, p.loss) for p in found] == expected
    assert all(rank == 1 for rank in found[-1].ranks.values())


@pytest.mark.parametrize("method", METHODS)
def test_every_point_says_what_it_is(case: Case, method: str) -> None:
    model, x, loss = case
    found = frontier(model, loss, method=method, accuracy=lambda m: 1 / (1 + loss(m).item()))
    assert found[0].ranks == lod.ranks(model)
    assert len(found) > 5
    full = lod.summary(model, x)
    assert (found.dense.params, found.dense.macs) == (full.dense_params, full.dense_macs)
    for module in model.modules():
        module.training = isinstance(module, nn.BatchNorm2d)
    for point in (found[0], found[len(found) // 2], found[-1]):
        with torch.no_grad(), lod.at_ranks(model, point.ranks):
            assert point.loss == loss(model).item()
        assert point.accuracy == 1 / (1 + point.loss)
        small = lod.extract(model, point.ranks)
        assert point.params == sum(p.numel() for p in small.parameters())
        tensors = [*small.parameters(), *small.buffers()]
        assert point.bytes == sum(t.numel() * t.element_size() for t in tensors)
        cost = lod.summary(_cut_copy(model, point.ranks), x)
        assert (point.params, point.macs) == (cost.fused_params, cost.fused_macs)


def _cut_copy(model: nn.Module, ranks: dict[str, int]) -> nn.Module:
    twin = made(next(n for n, (build, _) in MODELS.items() if isinstance(model, type(build()))))[0]
    twin.load_state_dict(model.state_dict())
    cut(twin, ranks)
    return twin


@pytest.mark.parametrize("method", METHODS)
def test_each_point_costs_less_than_the_one_before(case: Case, method: str) -> None:
    model, _, loss = case
    found = frontier(model, loss, method=method)
    costs = [p.macs for p in found if p.macs is not None]
    assert all(later < earlier for earlier, later in itertools.pairwise(costs))
    assert len(costs) == len(found)


def uses_of_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often a low-rank layer computes, from now on."""
    count = [0]
    before = LowRank._active_factors

    def counted(layer: LowRank) -> tuple[Tensor, Tensor]:
        count[0] += 1
        return before(layer)

    monkeypatch.setattr(LowRank, "_active_factors", counted)
    return count


@pytest.mark.parametrize("method", STEPWISE)
def test_the_quick_search_does_less_and_is_nearly_as_good(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    parts = [part for _ in range(8) for part in (nn.Linear(12, 12), nn.Tanh())]
    x, y = torch.randn(64, 12), torch.randint(12, (64,))
    model = lod.decompose(nn.Sequential(*parts))

    def loss(m: nn.Module) -> Tensor:
        return F.cross_entropy(m(x), y)

    count = uses_of_layers(monkeypatch)
    naive(model, loss, x, method, "macs")
    of_naive, count[0] = count[0], 0
    exact = frontier(model, loss, method=method, exact=True)
    of_exact, count[0] = count[0], 0
    quick = frontier(model, loss, method=method)
    assert of_exact < 0.7 * of_naive  # outputs are used again
    assert count[0] < 0.7 * of_exact
    for share in (0.9, 0.7, 0.5, 0.3):
        assert quick.point(max_macs=share).loss < exact.point(max_macs=share).loss + 0.05


def test_the_search_is_deterministic(case: Case) -> None:
    model, _, loss = case
    first = frontier(model, loss)
    assert frontier(model, loss) == first
    assert frontier(model, loss, memory=0) == first


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_left_as_it_was(
    case: Case, method: str, snapshot: Callable[[nn.Module], Any]
) -> None:
    model, _, loss = case
    model.train()
    before = snapshot(model)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}

    def accuracy(m: nn.Module) -> float:
        m.eval()
        for module in m.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        return 0.5

    with lod.at_ranks(model, 2):
        frontier(model, loss, method=method, accuracy=accuracy, until=0.5)
        assert all(layer.active_rank == 2 for layer in low_rank_layers(model).values())
    before.assert_unchanged(model)
    assert all(module.training for module in model.modules())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.is_grad_enabled()


def test_nothing_holds_the_model_afterwards() -> None:
    model, _, loss = made("mlp")
    found = frontier(model, loss, until=0.5)
    gone = weakref.ref(model)
    del model
    assert gone() is None
    assert len(found) > 1


# -- the measured search -------------------------------------------------------------------------


def deep(layers: int) -> Case:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(6, 6), nn.Tanh())]
    x = torch.randn(16, 6)
    model = lod.decompose(nn.Sequential(*parts))
    with torch.no_grad():
        target = model(x)
    return model, x, lambda m: F.mse_loss(m(x), target)


@pytest.mark.parametrize("layers", [1, 2, 11, 12, 24])
def test_evaluations_are_bounded_linearly_in_layers(layers: int) -> None:
    model, _, loss = deep(layers)
    count = Counted(loss)
    found = frontier(model, count, cost="params")
    of_replay = 3 + layers  # the loss, whether it repeats, and whether outputs can be used again
    assert count.count <= most_evaluations(layers) + of_replay
    assert len(found) > 2
    assert most_evaluations(11) == 18 * 11 + 110 and most_evaluations(300) == 7 * 300 + 75


def test_larger_sizes_have_smaller_losses(case: Case) -> None:
    model, _, loss = case
    found = frontier(model, loss, cost="params")
    assert found[0].ranks == lod.ranks(model)
    assert all(rank == 1 for rank in found[-1].ranks.values())
    rises = [later.loss - earlier.loss for earlier, later in itertools.pairwise(found)]
    assert sum(rise > -0.05 for rise in rises) >= 0.8 * len(rises)


@pytest.mark.parametrize("cost", ["macs", "params"])
def test_sizes_are_about_as_good_as_those_of_the_papers_search(case: Case, cost: Any) -> None:
    model, _, loss = case
    found = frontier(model, loss, cost=cost)
    papers = frontier(model, loss, cost=cost, method="greedy")
    least = min(getattr(point, cost) for point in found) / _dense(found)
    rises = [
        found.point(**{f"max_{cost}": share}).loss - papers.point(**{f"max_{cost}": share}).loss
        for share in (0.75, 0.5, 0.33, 0.25)
        if share >= least
    ]
    assert sum(rises) <= 0.1 * len(rises)


def _dense(found: Frontier) -> int:
    dense: int = getattr(found.dense, found.cost)
    return dense


@pytest.mark.parametrize("seed", range(4))
def test_sizes_are_nearly_the_best_of_all(seed: int) -> None:
    torch.manual_seed(seed)
    model = lod.decompose(nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 8)))
    x = torch.randn(64, 9)
    with torch.no_grad():
        target = model(x)

    def loss(m: nn.Module) -> Tensor:
        return F.mse_loss(m(x), target)

    found = frontier(model, loss, cost="params")
    maps = [{"0": a, "2": b} for a in range(1, 8) for b in range(1, 8)]
    every = frontier(model, loss, cost="params", ranks=maps)
    for share in (0.75, 0.5):
        best = every.point(max_params=share).loss
        assert found.point(max_params=share).loss <= 1.15 * best


def test_frozen_layers_are_searched_too() -> None:
    model, _, loss = made("mlp")
    expected = frontier(model, loss, cost="params")
    assert frontier(model.requires_grad_(False), loss, cost="params") == expected


def test_a_model_of_one_layer_has_sizes() -> None:
    torch.manual_seed(0)
    model, x = lod.decompose(nn.Sequential(nn.Linear(12, 10))), torch.randn(32, 12)
    found = frontier(model, lambda m: m(x).square().mean())
    ranks = [size.ranks["0"] for size in found]
    assert ranks == sorted(ranks, reverse=True) and ranks[0] == 10 and ranks[-1] == 1


def test_layers_of_rank_one_are_left_alone() -> None:
    model, _, loss = made("mlp")
    cut(model, {"2": 1})
    found = frontier(model, loss)
    assert {size.ranks["2"] for size in found} == {1}
    cut(model, {"0": 1, "4": 1})
    with pytest.raises(LayerError, match="has a rank at which it has fewer"):
        frontier(model, loss)


def test_a_size_that_cannot_be_reached_ends_at_the_smallest() -> None:
    model, _, loss = made("mlp")
    found = frontier(model, loss, until=0.01)
    assert all(rank == 1 for rank in found[-1].ranks.values())


# -- options -----------------------------------------------------------------------------------


def test_the_search_ends_where_it_is_told_to() -> None:
    model, _, loss = made("mlp")
    found = frontier(model, loss, until=0.6)
    assert found.dense.macs is not None
    shares = [point.macs / found.dense.macs for point in found if point.macs is not None]
    assert shares[-1] <= 0.6 < shares[-2]
    seen: list[Size] = []

    def enough(point: Size) -> bool:
        seen.append(point)
        return point.loss > found[0].loss + 0.1

    stopped = frontier(model, loss, until=enough)
    assert list(stopped) == seen
    assert stopped[-1].loss > found[0].loss + 0.1 >= stopped[-2].loss


def test_progress_is_told() -> None:
    model, _, loss = made("mlp")
    told: list[tuple[int, int, str]] = []
    found = frontier(
        model, loss, method="greedy", until=0.5, on_progress=lambda *step: told.append(step)
    )
    shares = [p.macs / found.dense.macs for p in found]  # type: ignore[operator]
    assert told == [
        (round(100 * max(0, 1 - share)), 100, f"{n} size{'s' * (n > 1)}, down to {share:.2f}×")
        for n, share in enumerate(shares, 1)
    ]


def test_the_measured_search_tells_how_much_of_it_is_done() -> None:
    model, _, loss = made("mlp")
    told: list[tuple[int, int, str]] = []
    found = frontier(model, loss, on_progress=lambda *step: told.append(step))
    percents = [done for done, _, _ in told]
    assert percents == sorted(percents) and percents[0] == 0 and 50 < percents[-1] <= 100
    assert {total for _, total, _ in told} == {100}
    assert told[1][2] == "1 size, down to 1.00×"
    assert told[-1][2].startswith(f"{len(found)} sizes, down to ")


def test_ranks_of_other_runs_are_evaluated() -> None:
    model, _, loss = made("mlp")
    maps = [{"0": 6, "2": 4, "4": 3}, {"0": 0.25}, {"0": 0, "4": 1}]
    found = frontier(model, loss, ranks=maps)
    assert found.method == "given"
    assert [p.ranks for p in found] == [
        {"0": 12, "2": 10, "4": 4},
        {"0": 6, "2": 4, "4": 3},
        {"0": 3, "2": 10, "4": 4},
        {"0": 0, "2": 10, "4": 1},
    ]
    for point in found:
        with lod.at_ranks(model.eval(), point.ranks), torch.no_grad():
            assert point.loss == loss(model).item()
    with pytest.raises(RankError, match="larger than the rank of the layer"):
        frontier(model, loss, ranks=[{"0": 13}])
    with pytest.raises(LayerError, match="not a low-rank layer"):
        frontier(model, loss, ranks=[{"1": 3}])
    with pytest.raises(OptionError, match=r"ranks\[1\]"):
        frontier(
            model,
            lambda m: loss(m) if m[0].active_rank > 1 else math.nan,
            ranks=[{"0": 2}, {"0": 1}],
        )


def test_macs_are_those_of_the_example() -> None:
    model, x, loss = made("residual")
    batch, one = frontier(model, loss, until=0.9), frontier(model, loss, until=0.9, example=x[:1])
    assert [p.macs for p in batch] == [24 * p.macs for p in one if p.macs is not None]
    assert [p.ranks for p in batch] == [p.ranks for p in one]


def test_without_macs_parameters_can_be_saved() -> None:
    model, x, _ = made("mlp")

    def by_parts(m: nn.Module) -> Tensor:
        y = x
        for part in m.children():
            y = part(y)
        return y.square().mean()

    with pytest.raises(OptionError, match="Give an example="):
        frontier(model, by_parts)
    found = frontier(model, by_parts, cost="params", until=0.8)
    assert all(point.macs is None for point in (*found, found.dense))
    assert len(frontier(model, by_parts, example=x, until=0.8)) > 1


def test_layers_that_save_no_macs_are_left_alone() -> None:
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8))
    tokens = torch.randint(30, (5, 4))
    lod.decompose(model)

    def loss(m: nn.Module) -> Tensor:
        return m(tokens).square().mean()

    found = frontier(model, loss)
    assert {point.ranks["0"] for point in found} == {8}
    assert found[-1].ranks["1"] == 1
    assert frontier(model, loss, cost="params")[-1].ranks == {"0": 1, "1": 1}


def test_recurrent_layers_save_parameters_but_no_macs() -> None:
    model = nn.LSTM(6, 8)
    x = torch.randn(5, 3, 6)

    def loss(m: nn.Module) -> Tensor:
        return m(x)[0].square().mean()

    model = lod.decompose(model)
    with pytest.raises(LayerError, match=r"fewer macs.*Try cost='params'"):
        frontier(model, loss)
    found = frontier(model, loss, cost="params")
    assert {point.macs for point in found} == {found.dense.macs}
    assert found[-1].params < found[0].params == found.dense.params


def test_a_head_that_shares_an_embedding_saves_with_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    tokens = torch.randint(30, (5, 4))
    model = lod.decompose(Tied(), tied="share")
    found = frontier(model, lambda m: F.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten()))
    assert found[-1].ranks == {"embedding": 1}
    twin = lod.decompose(Tied(), tied="share")
    for point in found:
        cut(twin, point.ranks)
        cost = lod.summary(twin, tokens)
        assert (point.params, point.macs) == (cost.fused_params, cost.fused_macs)


def test_a_model_with_layers_that_have_lost_all_ranks() -> None:
    model, _, loss = made("mlp")
    cut(model, {"2": 0, "0": 5})
    for method in METHODS:
        found = frontier(model, loss, method=method)
        assert found[-1].ranks == {"0": 1, "2": 0, "4": 1}


def test_candidates_without_a_finite_loss_are_not_taken() -> None:
    model, _, loss = made("mlp")
    for method in METHODS:
        found = frontier(
            model,
            lambda m: loss(m) if m[2].active_rank > 3 else math.inf,
            method=method,
        )
        assert all(math.isfinite(p.loss) for p in found)
        assert all(p.ranks["2"] > 3 for p in found)
        assert found[-1].ranks["0"] == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
def test_a_compiled_model_is_unwrapped() -> None:
    model, _, loss = made("mlp")
    assert frontier(torch.compile(model), loss, until=0.7) == frontier(model, loss, until=0.7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gredy"}, "Did you mean 'greedy'"),
        ({"cost": "flops"}, "Choose 'macs' or 'params'"),
        ({"exact": True}, "exact=True does not apply to method='measured'"),
        ({"step": 0.0}, "step=0.0 must be a share"),
        ({"step": math.nan}, "step=nan must be a share"),
        ({"step": 1.5}, "step=1.5 must be a share"),
        ({"until": 1.5}, "until=1.5 must be a share"),
        ({"until": math.nan}, "until=nan must be a share"),
        ({"until": "0.5"}, "until='0.5' must be a share"),
        ({"accuracy": lambda m: 97.0}, "accuracy returned 97.0"),
        ({"accuracy": lambda m: math.nan}, "accuracy returned nan"),
        ({"accuracy": lambda m: "high"}, "accuracy returned a str"),
        ({"memory": -1}, "memory=-1 must be a whole number"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    model, _, loss = made("mlp")
    with pytest.raises(OptionError, match=message):
        frontier(model, loss, **options)


def test_what_cannot_be_searched_is_refused() -> None:
    model, x, _ = made("residual")
    with pytest.raises(OptionError, match="batch is not empty"):
        frontier(model, lambda m: m(x).sum() * math.nan)
    with pytest.raises(LayerError, match="no low-rank layer"):
        frontier(mlp(), lambda m: 0.0)


# -- resuming ----------------------------------------------------------------------------------


class Killed(BaseException):
    """What a search cannot catch."""


class Counted:
    """A loss that counts its evaluations, and dies when it has had enough."""

    def __init__(self, loss: Callable[[nn.Module], Tensor], most: float = math.inf) -> None:
        self.loss, self.most, self.count = loss, most, 0

    def __call__(self, model: nn.Module) -> Tensor:
        self.count += 1
        if self.count > self.most:
            raise Killed
        return self.loss(model)


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_search_is_resumed(case: Case, method: str, tmp_path: Path) -> None:
    model, _, loss = case

    def accuracy(m: nn.Module) -> float:
        return 1 / (1 + loss(m).item())

    def search(loss: Callable[[nn.Module], Tensor], name: str) -> Frontier:
        return frontier(model, loss, method=method, accuracy=accuracy, resume=tmp_path / name)

    expected, finished = search(loss, "whole"), Counted(loss)
    assert search(finished, "whole") == expected
    for _ in range(2):  # each time it gets two evaluations further
        with pytest.raises(Killed):
            search(Counted(loss, finished.count + 2), "killed")
    assert search(loss, "killed") == expected
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "killed" / file.name).read_bytes() == file.read_bytes()


def test_a_finished_search_needs_no_more_evaluations(tmp_path: Path) -> None:
    model, _, loss = made("mlp")
    first = frontier(model, loss, resume=tmp_path, until=0.5)
    count = Counted(loss)
    assert frontier(model, count, resume=tmp_path, until=0.5) == first
    assert count.count == 6  # what the loss is, and whether outputs can be used again


def test_a_stepwise_search_goes_on_to_smaller_sizes(tmp_path: Path) -> None:
    model, _, loss = made("mlp")
    first = frontier(model, loss, method="greedy", resume=tmp_path, until=0.5)
    further = frontier(model, loss, method="greedy", resume=tmp_path, until=0.3)
    assert further[: len(first)] == first.points
    assert further == frontier(model, loss, method="greedy", until=0.3)


@pytest.mark.parametrize("cut_off", [1, 7, 40, 200, 1000])
def test_truncated_answers_are_used_up_to_where_they_are_whole(
    cut_off: int, tmp_path: Path
) -> None:
    model, _, loss = made("mlp")
    answers = tmp_path / "search.jsonl"
    expected = frontier(model, loss, resume=tmp_path)
    whole = answers.read_bytes()
    for content in (whole[:-cut_off], whole[:5], b""):  # killed within the first line, or before
        answers.write_bytes(content)
        assert frontier(model, loss, resume=tmp_path) == expected
        assert answers.read_bytes() == whole


def test_unfinished_work_of_another_search_is_refused(tmp_path: Path) -> None:
    model, _, loss = made("mlp")
    frontier(model, loss, resume=tmp_path, until=0.5)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for options, what in (
        ({"step": 0.2}, "step is 0.1, not 0.2"),
        ({"method": "greedy"}, "method is 'measured'"),
        ({"cost": "params"}, "cost is 'macs'"),
        ({"until": 0.3}, "until is 0.5, not 0.3"),
        ({"ranks": [{"0": 3}]}, "method is 'measured'"),
    ):
        with pytest.raises(OptionError, match=f"unfinished work of another call: {what}"):
            frontier(model, loss, resume=tmp_path, **{"until": 0.5, **options})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="another call: loss is"):
        frontier(model, lambda m: 2 * loss(m), resume=tmp_path, until=0.5)
    with pytest.raises(OptionError, match="another call: ranks is"):
        frontier(lod.decompose(mlp(), ranks=3), loss, resume=tmp_path, until=0.5)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].u[:, -1], other[0].v[-1] = 2 * other[0].u[:, -1], other[0].v[-1] / 2
    with pytest.raises(OptionError, match=r"another call: (loss|model) is"):
        frontier(other, loss, resume=tmp_path, until=0.5)
    with pytest.raises(CheckpointError, match=r"line 1 of .* does not answer"):
        frontier(model, loss, resume=tmp_path, until=0.5, accuracy=lambda m: 0.5)
    assert before == {file: file.read_bytes() for file in tmp_path.iterdir()}


def test_damaged_answers_are_refused(tmp_path: Path) -> None:
    model, _, loss = made("mlp")
    answers = tmp_path / "search.jsonl"
    frontier(model, loss, resume=tmp_path, until=0.5)
    lines = answers.read_text().splitlines()
    for damaged in ("{", "[]", '{"question": 3}', lines[4].replace("answer", "anser"), "\xff"):
        answers.write_text("\n".join([*lines[:4], damaged, *lines[5:]]) + "\n", encoding="latin-1")
        content = answers.read_bytes()
        with pytest.raises(CheckpointError, match="line 5 of"):
            frontier(model, loss, resume=tmp_path, until=0.5)
        assert answers.read_bytes() == content


FOREIGN = {
    "text": b"some notes\nof mine, without an end",
    "json": b'{"format": "other"}\n{"half": ',
    "tensors": safetensors.torch.save({"a": torch.arange(99, dtype=torch.uint8)}),
}


@pytest.mark.parametrize("place", ["the file itself", "in the directory"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_unfinished_work_is_left_unchanged(
    kind: str, place: str, tmp_path: Path
) -> None:
    model, _, loss = made("mlp")
    path = tmp_path / "mine"
    path.write_bytes(FOREIGN[kind])
    with pytest.raises(OptionError, match="holds other files than unfinished work"):
        frontier(model, loss, resume=path if place == "the file itself" else tmp_path)
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == FOREIGN[kind]


def test_a_refused_search_keeps_its_last_line(tmp_path: Path) -> None:
    model, _, loss = made("mlp")
    answers = tmp_path / "search.jsonl"
    frontier(model, loss, resume=tmp_path, until=0.5)
    whole = answers.read_bytes()[:-7]
    damaged = whole.replace(b'"answer"', b"answer", 1)
    for content, options in ((whole, {"step": 0.2}), (damaged, {})):
        answers.write_bytes(content)
        with pytest.raises(lod.MaestroError, match=r"step is 0\.1|line 1 of"):
            frontier(model, loss, resume=tmp_path, until=0.5, **options)  # type: ignore[arg-type]
        assert answers.read_bytes() == content


def test_infinite_losses_are_kept_as_json(tmp_path: Path) -> None:
    model, _, loss = made("mlp")

    def sometimes(m: nn.Module) -> Any:
        return loss(m) if m[2].active_rank > 3 else math.nan

    expected = frontier(model, sometimes)
    assert frontier(model, sometimes, resume=tmp_path) == expected
    lines = (tmp_path / "search.jsonl").read_text().splitlines()
    answers = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert any(line.get("answer", 0) is None for line in answers)
    assert frontier(model, sometimes, resume=tmp_path) == expected


def test_one_model_is_searched_and_summed_up_in_several_threads_at_once() -> None:
    torch.manual_seed(0)
    model = lod.decompose(nn.Sequential(nn.Linear(12, 12), nn.Dropout(), nn.Linear(12, 4)))
    x = torch.randn(16, 12)

    def search(_: int) -> Any:
        return frontier(model, lambda m: m(x).square().mean()).points

    def sums(_: int) -> Any:
        return [lod.summary(model, x).macs for _ in range(10)]

    expected, modes = search(0), [m.training for m in model.modules()]
    whole = sums(0)
    with ThreadPoolExecutor(4) as threads:
        searches, summaries = threads.map(search, range(4)), threads.map(sums, range(4))
    assert list(searches) == [expected] * 4
    assert list(summaries) == [whole] * 4
    assert [m.training for m in model.modules()] == modes
    assert not any("forward" in vars(m) for m in model.modules())
