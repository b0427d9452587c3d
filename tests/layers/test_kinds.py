"""What is promised of every kind of layer; `kinds.py` lists them, and how to add one."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import io
import itertools
import math
import pickle
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import maestro_lod as lod
from maestro_lod.layers.pivoted import PivotedForm
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import Costs
from maestro_lod.model.frontier import Frontier
from maestro_lod.model.macs import dense_macs
from tests.support.kinds import KINDS, Kind  # noqa: F401 (found by what makes the tests)

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
EXACT = {"rtol": 0, "atol": 0}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.08}


# torch's own, of a layer that is dense
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Hold every promise for every row of the file that the test stands in."""
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", metafunc.module.KINDS, ids=str)


def low_rank(
    kind: Kind, ranks: Any = None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    if ranks == 0:  # for all at once it is refused
        ranks = dict.fromkeys(kind.layers, 0)
    return lod.decompose(kind.dense(dtype, seed), tied=kind.tied, ranks=ranks)


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Call a model and list all tensors that it returns."""
    return [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]


def assert_same(one: list[Tensor], other: list[Tensor], **tolerance: float) -> None:
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or CLOSE))


def differ(one: list[Tensor], other: list[Tensor]) -> bool:
    return any(not torch.allclose(a, b, **CLOSE) for a, b in zip(one, other, strict=True))


def distance(one: list[Tensor], other: list[Tensor]) -> Tensor:
    return torch.stack([(a - b).square().mean() for a, b in zip(one, other, strict=True)]).sum()


def loss_of(results: list[Tensor]) -> Tensor:
    """Weigh every entry of the outputs differently, so that no gradient is missed."""
    source = torch.Generator().manual_seed(2)
    weights = [torch.randn(t.shape, generator=source, dtype=torch.float64) for t in results]
    return torch.stack([(t * w).sum() for t, w in zip(results, weights, strict=True)]).sum()


def some_ranks(model: nn.Module, seed: int) -> dict[str, int]:
    """Draw a rank from 1 to what is stored for each layer."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: int(torch.randint(1, rank + 1, (), generator=source))
        for name, rank in lod.ranks(model).items()
    }


def factors(model: nn.Module) -> list[tuple[str, nn.Parameter, int]]:
    """List every factor with its layer's name and the dimension of its ranks."""
    return [
        (name, factor, dim)
        for name, layer in low_rank_layers(model).items()
        for factor, dim in ((layer.u, 1), (layer.v, 0))
    ]


@torch.no_grad()
def scramble(model: nn.Module) -> Any:
    """Make weights what no fresh model has."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def storages(model: nn.Module) -> set[int]:
    tensors = [*model.parameters(), *model.buffers()]
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


# -- decompose ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_outputs_and_precision_are_kept(kind: Kind, dtype: torch.dtype) -> None:
    dense, inputs = kind.dense(dtype), kind.inputs(dtype)
    model = copy.deepcopy(dense)
    assert lod.decompose(model, tied=kind.tied) is model
    assert {p.dtype for p in model.parameters()} == {dtype}
    expected, limit = outputs(dense, inputs), TOLERANCE[dtype]
    assert_same(outputs(model, inputs), expected, rtol=limit, atol=limit)
    converted = low_rank(kind).to(dtype)
    with lod.at_ranks(converted, 1):
        assert {t.dtype for t in outputs(converted, inputs)} == {dtype}
    assert {p.dtype for p in lod.extract(model, 1).parameters()} == {dtype}
    single = max(limit, TOLERANCE[torch.float32])  # the precision in which that was factored
    assert_same(outputs(converted, inputs), expected, rtol=2 * single, atol=2 * single)
    for plain in (lod.extract(model), lod.fuse(model)):
        assert {p.dtype for p in plain.parameters()} == {dtype}
        assert_same(outputs(plain, inputs), expected, rtol=2 * limit, atol=2 * limit)


def test_the_survey_says_what_decompose_does(kind: Kind) -> None:
    model = kind.dense()
    plan = lod.survey(model, tied=kind.tied, ranks=0.5)
    assert set(plan.ranks) == set(kind.layers)
    lod.decompose(model, tied=kind.tied, ranks=0.5)
    assert lod.ranks(model) == plan.ranks == lod.survey(model).ranks
    layers = low_rank_layers(model)
    assert {n: max(1, round(0.5 * m.full_rank)) for n, m in layers.items()} == plan.ranks
    lod.decompose(model)  # what is low-rank already is kept
    assert all(low_rank_layers(model)[name] is layer for name, layer in layers.items())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ranks", [None, 1])
def test_what_a_user_put_on_a_layer_stays_with_it(
    kind: Kind, ranks: int | None, training: bool
) -> None:
    model, calls = kind.dense().train(training), []
    for child in model.children():
        child.register_forward_hook(lambda *_: calls.append("hook"))
        child.register_buffer("count", torch.tensor(3.0))
        child.register_buffer("passing", torch.tensor(4.0), persistent=False)
        child.label = ["mine"]
    children, kept = list(dict(model.named_children())), model.state_dict().keys()
    lod.decompose(model, tied=kind.tied, ranks=ranks)
    for changed, hooks in ((model, 1), (lod.extract(model), 0), (lod.fuse(model), 1)):
        assert list(dict(changed.named_children())) == children
        assert all(m.training is training for m in changed.modules())
        assert {k for k in kept if k.endswith("count")} <= changed.state_dict().keys()
        assert not any(key.endswith("passing") for key in changed.state_dict())
        for child in changed.children():
            assert (float(child.count), float(child.passing), child.label) == (3.0, 4.0, ["mine"])
        calls.clear()
        outputs(changed, kind.inputs())
        assert calls == ["hook"] * hooks * len(children)


def test_frozen_weights_stay_frozen(kind: Kind) -> None:
    model = kind.dense()
    for parameter in kind.weights:
        model.get_parameter(parameter).requires_grad_(False)
    lod.decompose(model, tied=kind.tied, ranks=2)
    for changed in (model, lod.extract(model), lod.extract(model, 1), lod.fuse(model)):
        for name, parameter in changed.named_parameters():
            assert parameter.requires_grad is (parameter.ndim == 1), name


# -- ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_at_ranks_is_the_dense_model_with_truncated_weights(kind: Kind, seed: int) -> None:
    model, inputs = low_rank(kind, dtype=torch.float64), kind.inputs(torch.float64)
    whole, ranks = outputs(model, inputs), some_ranks(model, seed)
    expected = outputs(kind.truncated(ranks, torch.float64), inputs)
    with lod.at_ranks(model, ranks):
        assert_same(outputs(model, inputs), expected)
    assert_same(outputs(model, inputs), whole, **EXACT)
    lod.set_ranks(model, ranks)
    assert_same(outputs(model, inputs), expected)
    assert_same(outputs(low_rank(kind, ranks, torch.float64), inputs), expected)
    assert differ(whole, expected)


def test_rank_zero_leaves_what_needs_no_weight(kind: Kind) -> None:
    model, inputs = low_rank(kind, dtype=torch.float64), kind.inputs(torch.float64)
    expected = outputs(kind.truncated(dict.fromkeys(kind.layers, 0), torch.float64), inputs)
    with lod.at_ranks(model, 0):
        assert_same(outputs(model, inputs), expected)
    assert_same(outputs(lod.extract(model, 0), inputs), expected)
    assert_same(outputs(low_rank(kind, 0, torch.float64), inputs), expected)


@pytest.mark.parametrize("cut", [False, True], ids=["all ranks", "some ranks"])
def test_gradients_are_those_of_the_dense_product(kind: Kind, cut: bool) -> None:
    dense, model = kind.dense(torch.float64), low_rank(kind, dtype=torch.float64)
    inputs, layers = kind.inputs(torch.float64), low_rank_layers(model)
    with lod.at_ranks(model, some_ranks(model, 1) if cut else {}):
        products = {
            parameter: torch.cat([layers[name].weight for name in names])
            for parameter, names in kind.weights.items()
        }
        results = outputs(model, inputs)
        loss_of(results).backward()
    found = [factor.grad for _, factor, _ in factors(model)]
    theirs = tree_leaves(functional_call(dense, products, inputs))
    assert_same(results, theirs)
    same = {n: p for n, p in dense.named_parameters() if n in dict(model.named_parameters())}
    both = [*(factor for _, factor, _ in factors(model)), *same.values()]
    found += [model.get_parameter(name).grad for name in same]
    assert_same(found, list(torch.autograd.grad(loss_of(theirs), both)))
    assert all(gradient.any() for gradient in found)
    assert all(p.grad is not None for p in model.parameters())


# -- training ----------------------------------------------------------------------------------


def test_a_step_runs_at_drawn_ranks_and_training_lowers_the_loss(kind: Kind) -> None:
    model, inputs = low_rank(kind).train(), kind.inputs()
    target = [t.detach() for t in outputs(kind.dense(seed=5), inputs)]
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    train, layers, drawn_ever = lod.LoD(model, optimizer), low_rank_layers(model), set()
    before = distance(outputs(model, inputs), target)
    for _ in range(30):
        twin = copy.deepcopy(model)
        with train.step() as drawn:
            assert all(layers[name].active_rank == rank for name, rank in drawn.items())
            results = outputs(model, inputs)
            distance(results, target).backward()
        with lod.at_ranks(twin, drawn):
            assert_same(results, outputs(twin, inputs), **EXACT)
        assert all(layer.active_rank == layer.rank for layer in layers.values())
        optimizer.step()
        optimizer.zero_grad()
        drawn_ever |= set(drawn)
    assert drawn_ever <= set(kind.layers) and len(drawn_ever) > len(kind.layers) / 2
    assert distance(outputs(model, inputs), target) < 0.8 * before
    assert train.end_epoch() == {}
    epoch = train.ledger.epochs[0]
    assert epoch.params == sum(p.numel() for p in model.parameters()) and epoch.macs is not None


def test_the_penalty_is_the_sum_over_tails_of_factors(kind: Kind) -> None:
    model = scramble(low_rank(kind, dtype=torch.float64))
    tails = {
        name: [(m.u[:, b:].norm(), m.v[b:].norm()) for b in range(m.rank)]
        for name, m in low_rank_layers(model).items()
    }
    expected = sum(u + v for pairs in tails.values() for u, v in pairs)
    torch.testing.assert_close(lod.group_lasso(model), expected)
    importance = lod.importance(model)
    assert set(importance) == set(kind.layers)
    for name, pairs in tails.items():
        torch.testing.assert_close(importance[name], torch.stack([u * v for u, v in pairs]))
    lod.group_lasso(model).backward()
    for _, factor, _ in factors(model):
        (wanted,) = torch.autograd.grad(expected, factor, retain_graph=True)
        torch.testing.assert_close(factor.grad, wanted)


def test_the_proximal_step_zeroes_tails_and_nothing_but_factors(kind: Kind) -> None:
    model = low_rank(kind)
    rest = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim == 1}
    last = [f.detach().select(dim, -1).norm() for _, f, dim in factors(model)]
    lod.prox_group_lasso_(model, 1.01 * float(min(last)))
    alive = [
        f.detach().transpose(0, dim).flatten(1).any(1).tolist() for _, f, dim in factors(model)
    ]
    assert all(of_factor == sorted(of_factor, reverse=True) for of_factor in alive)
    assert any(map(any, alive)) and not all(map(all, alive))
    lod.prox_group_lasso_(model, 1e9)
    assert not any(factor.any() for _, factor, _ in factors(model))
    assert all(torch.equal(model.get_parameter(name), value) for name, value in rest.items())


OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-2),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
}


def train_on(model: nn.Module, optimizer: optim.Optimizer, inputs: tuple[Tensor, ...]) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(outputs(model, inputs)).backward()
        optimizer.step()


def state_of(optimizer: optim.Optimizer, factor: nn.Parameter) -> dict[str, Tensor]:
    return {k: v for k, v in optimizer.state[factor].items() if v.shape == factor.shape}


@torch.no_grad()
def zero_tails(model: nn.Module, optimizer: optim.Optimizer, keep: Mapping[str, int]) -> None:
    for name, factor, dim in factors(model):
        for tensor in (factor, factor.grad, *state_of(optimizer, factor).values()):
            tensor.narrow(dim, keep[name], factor.shape[dim] - keep[name]).zero_()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_shrunk_model_trains_on_as_one_whose_tail_is_zero(
    kind: Kind, make: Callable[..., optim.Optimizer]
) -> None:
    shrunk, whole = (low_rank(kind, dtype=torch.float64) for _ in range(2))
    inputs = kind.inputs(torch.float64)
    ours, theirs = make(shrunk.parameters()), make(whole.parameters())
    keep = some_ranks(shrunk, 3)
    for model, optimizer in ((shrunk, ours), (whole, theirs)):
        train_on(model, optimizer, inputs)
        zero_tails(model, optimizer, keep)

    def assert_survivors_equal(**tolerance: float) -> None:
        for (name, one, dim), (_, other, _) in zip(factors(shrunk), factors(whole), strict=True):
            pairs = [(one, other)]
            states = state_of(ours, one), state_of(theirs, other)
            assert states[0].keys() == states[1].keys() and states[0]
            pairs += [(states[0][key], states[1][key]) for key in states[0]]
            for small, large in pairs:
                torch.testing.assert_close(small, large.narrow(dim, 0, keep[name]), **tolerance)

    full = lod.ranks(shrunk)
    lost = lod.shrink(shrunk, ours, threshold=1e-12)
    assert lost == {n: full[n] - keep[n] for n in full if keep[n] < full[n]}
    assert lod.ranks(shrunk) == keep
    assert_survivors_equal(**EXACT)
    for _, factor, _ in factors(shrunk):
        assert factor.untyped_storage().nbytes() == factor.numel() * factor.element_size()
    for model, optimizer in ((shrunk, ours), (whole, theirs)):
        train_on(model, optimizer, inputs)
    assert_survivors_equal(rtol=1e-8, atol=1e-10)
    assert_same(outputs(shrunk, inputs), outputs(whole, inputs), rtol=1e-8, atol=1e-10)


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [None, 1, 0], ids=["all ranks", "one rank", "no rank"])
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_state_dict_goes_into_a_model_of_other_ranks(
    kind: Kind, start: int | None, assign: bool
) -> None:
    for stored in (3, 0):
        model = scramble(low_rank(kind, stored))
        fresh = low_rank(kind, start, seed=9)
        fresh.load_state_dict(bits(model), assign=assign)
        assert lod.ranks(fresh) == lod.ranks(model)
        assert_same(outputs(fresh, kind.inputs()), outputs(model, kind.inputs()), **EXACT)
        assert model.state_dict().keys() == dict(model.named_parameters()).keys()


TARGETS: dict[str, Callable[[Kind, torch.dtype], nn.Module]] = {
    "dense": lambda kind, dtype: kind.dense(dtype, seed=9),
    "decomposed": lambda kind, dtype: low_rank(kind, dtype=dtype, seed=9),
    "smaller": lambda kind, dtype: low_rank(kind, 1, dtype, seed=9),
}


ROUND_TRIPS = [(name, torch.float32) for name in TARGETS] + [
    ("dense", torch.float64), ("dense", torch.bfloat16), ("dense", torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("into", "dtype"), ROUND_TRIPS, ids=str)
def test_a_file_returns_bit_for_bit(
    kind: Kind, into: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    for ranks in (3, 0, None):
        model = scramble(low_rank(kind, ranks, dtype))
        lod.save(model, path)
        params = sum(p.numel() for p in model.parameters())
        assert sum(t.numel() for t in load_file(path).values()) == params
        target = TARGETS[into](kind, dtype)
        loaded = lod.load(path, into=target)
        assert loaded is target and lod.ranks(loaded) == lod.ranks(model)
        state, wanted = loaded.state_dict(), bits(model)
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[k], v) and state[k].dtype == dtype for k, v in wanted.items())
        for parameter in loaded.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.numel() * dtype.itemsize
    inputs = kind.inputs(dtype)
    assert_same(outputs(loaded, inputs), outputs(model, inputs), **EXACT)


@pytest.mark.parametrize("into", TARGETS.values(), ids=TARGETS)
def test_loading_fewer_ranks_equals_at_ranks(
    kind: Kind, into: Callable[..., nn.Module], tmp_path: Path
) -> None:
    model, inputs = scramble(low_rank(kind)), kind.inputs()
    lod.save(model, tmp_path / "model.safetensors")
    for ranks in (some_ranks(model, 4), dict.fromkeys(kind.layers, 0)):
        target = into(kind, torch.float32)
        loaded = lod.load(tmp_path / "model.safetensors", into=target, ranks=ranks)
        assert lod.ranks(loaded) == ranks
        with lod.at_ranks(model, ranks):
            assert_same(outputs(loaded, inputs), outputs(model, inputs))


def test_a_file_of_the_dense_form_makes_its_target_dense(kind: Kind, tmp_path: Path) -> None:
    """Layers become what the file says: here low-rank beside the kind, which is dense."""
    first = kind.layers[0]
    model = nn.ModuleList([nn.Linear(8, 8), kind.dense()])
    lod.decompose(model, only="0")
    lod.save(model, tmp_path / "model.safetensors")
    target = nn.ModuleList([nn.Linear(8, 8), kind.dense(seed=9)])
    lod.decompose(target, tied=kind.tied)
    assert f"1.{first}" in lod.ranks(target)
    lod.load(tmp_path / "model.safetensors", into=target)
    assert lod.ranks(target) == {"0": 8}
    assert str(target) == str(model)
    assert_same(outputs(target[1], kind.inputs()), outputs(model[1], kind.inputs()), **EXACT)


# -- plain models ------------------------------------------------------------------------------


OURS = "maestro_lod.layers.pivoted"


def assert_plain(model: nn.Module) -> None:
    """Ours may be there only classes from files that need torch alone."""
    for module in model.modules():
        file = type(module).__module__
        if file.startswith("maestro_lod"):
            assert file in {f"maestro_lod.layers.{n}" for n in ("attention", "recurrent")} | {OURS}
            tree = ast.parse(inspect.getsource(sys.modules[file]))
            imports = {
                name if name == OURS else name.split(".")[0]
                for node in ast.walk(tree)
                for name in (
                    [alias.name for alias in node.names] if isinstance(node, ast.Import)
                    else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                )
            }  # fmt: skip
            assert imports <= {"torch", OURS, *sys.stdlib_module_names}, file
    assert low_rank_layers(model) == {}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by", ["params", "macs"])
def test_extract_is_plain_and_equals_at_ranks(
    kind: Kind, seed: int, by: Any, snapshot: Callable[[nn.Module], Any]
) -> None:
    model, inputs = scramble(low_rank(kind)), kind.inputs()
    before, ranks = snapshot(model), some_ranks(model, seed)
    plain = lod.extract(model, ranks, by=by)
    before.assert_unchanged(model)
    assert_plain(plain)
    with lod.at_ranks(model, ranks):
        expected = outputs(model, inputs)
    assert_same(outputs(plain, inputs), expected)
    with torch.no_grad():  # where torch has fast paths
        assert_same(outputs(plain, inputs), expected)
    loss_of(outputs(plain.train(), inputs)).backward()
    assert all(p.grad is not None for p in plain.parameters())
    assert all(p.grad is None for p in model.parameters())


def pivoted_forms(model: nn.Module, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Name the pivoted form of every layer that has it at its rank."""
    layers = low_rank_layers(model)
    return {n: {2: "factored", 3: "pivoted"}[len(layers[n].forms(r))] for n, r in ranks.items()}


@pytest.mark.parametrize("seed", range(3))
def test_pivoted_layers_equal_factored_ones_and_come_back_from_files(
    kind: Kind, seed: int, tmp_path: Path
) -> None:
    model, inputs = scramble(low_rank(kind)), kind.inputs()
    ranks = dict.fromkeys(kind.layers, 0) if seed == 0 else some_ranks(model, seed)
    forms = pivoted_forms(model, ranks)
    plain = lod.extract(model, ranks, by=forms)
    assert_plain(plain)
    pivoted = [m for m in plain.modules() if isinstance(m, PivotedForm)]
    assert len(pivoted) == [*forms.values()].count("pivoted")
    assert pivoted or seed > 0 or not any(m.pivots for m in low_rank_layers(model).values())
    expected = outputs(lod.extract(model, ranks, by=dict.fromkeys(forms, "factored")), inputs)
    assert_same(outputs(plain, inputs), expected)
    cost = Costs(model, dense_macs(model, inputs)).at(ranks, forms)
    assert asdict(cost) == real_costs(plain, inputs)
    loss_of(outputs(plain.train(), inputs)).backward()
    assert all(p.grad is not None for p in plain.parameters())
    lod.export(plain.eval(), tmp_path / "small.safetensors", example=inputs)
    loaded = lod.load(tmp_path / "small.safetensors", into=kind.dense(seed=9))
    assert str(loaded) == str(plain)
    assert_same(outputs(loaded, inputs), outputs(plain, inputs), **EXACT)


def test_extract_of_decompose_is_the_model_itself(kind: Kind) -> None:
    dense, plain = kind.dense(), lod.extract(low_rank(kind))
    if "transformers" not in kind.name:  # whose layers become torch's own
        assert str(plain) == str(dense)
        state = dense.state_dict()
        assert plain.state_dict().keys() == state.keys()
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(value, state[key], **CLOSE)
    assert type(plain) is type(dense)


@pytest.mark.parametrize("by", ["params", "macs"])
@pytest.mark.parametrize("ranks", [None, 1, 0.5], ids=str)
def test_fuse_keeps_outputs(kind: Kind, ranks: Any, by: Any) -> None:
    model, inputs = scramble(low_rank(kind, ranks)), kind.inputs()
    expected = outputs(model, inputs)
    assert lod.fuse(model, by=by) is model
    assert_same(outputs(model, inputs), expected)
    dense_is_free = kind.ids is not None and not kind.saves_macs  # a look-up multiplies nothing
    if ranks is None or (by == "macs" and dense_is_free):
        assert low_rank_layers(model) == {}
    elif ranks == 1:
        assert set(low_rank_layers(model)) == set(kind.layers)


def through_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
    "extract": lod.extract,
    "deepcopy of the extract": lambda model: copy.deepcopy(lod.extract(model)),
    "pickle of the extract": lambda model: through_pickle(lod.extract(model)),
}


@pytest.mark.parametrize("ranks", [None, 2], ids=["all ranks", "two ranks"])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_compute_the_same_and_share_nothing(
    kind: Kind, copied: Callable[[nn.Module], nn.Module], ranks: int | None
) -> None:
    model, inputs = scramble(low_rank(kind, ranks)), kind.inputs()
    twin = copied(model)
    assert not storages(model) & storages(twin)
    expected, again = outputs(model, inputs), outputs(twin, inputs)
    assert_same(again, expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    lod.set_ranks(model, 1)
    assert_same(outputs(twin, inputs), again, **EXACT)
    assert differ(outputs(model, inputs), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(0.1)
    assert not any(parameter.any() for parameter in model.parameters())
    assert differ(outputs(twin, inputs), again)


# -- what it costs -----------------------------------------------------------------------------


_BILINEAR = torch.ops.aten._trilinear


def _bilinear_flops(x1: Any, weight: Any, x2: Any, *_: Any, **__: Any) -> int:
    """Torch's counter does not know bilinear maps of (N, in1) and (N, in2) by (out, in1, in2)."""
    return 2 * int(x1[0]) * math.prod(weight)


def counted_macs(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Count products with weights by torch's own counter, in a second call."""
    twin = copy.deepcopy(model).to("meta")
    inputs = tuple(x.to("meta") for x in inputs)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            twin(*inputs)
            with FlopCounterMode(display=False, custom_mapping={_BILINEAR: _bilinear_flops}) as (
                counter
            ):
                twin(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    counts = counter.get_flop_counts().get("Global", {})
    aten = torch.ops.aten
    weighted = (aten.mm, aten.addmm, aten.convolution, _BILINEAR)
    return sum(counts.get(op, 0) for op in weighted) // 2


def real_costs(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, int]:
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "params": sum(p.numel() for p in model.parameters()),
        "macs": counted_macs(model, inputs),
        "bytes": sum(t.numel() * t.element_size() for t in tensors),
    }


def bytes_of_tensors(path: Path) -> int:
    """Return how large a safetensors file is without its header."""
    with path.open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
    return path.stat().st_size - 8 - header


@functools.lru_cache
def searched(kind: Kind) -> tuple[nn.Module, Frontier]:
    """Search the sizes of a kind once for all limits."""
    model, inputs = low_rank(kind), kind.inputs()
    with torch.no_grad():
        expected = outputs(model, inputs)
    return model, lod.frontier(
        model, lambda m: distance(outputs(m, inputs), expected), method="greedy", cost="params"
    )


def test_a_summary_counts_what_extract_gives(kind: Kind) -> None:
    inputs = kind.inputs()
    was = real_costs(kind.dense(), inputs)
    for ranks in (1, 0.3, some_ranks(low_rank(kind), 6), None):
        model = low_rank(kind, ranks)
        cost = lod.summary(model, inputs)
        assert cost.params == sum(p.numel() for p in model.parameters())
        assert (cost.dense_params, cost.dense_macs) == (was["params"], was["macs"])
        assert sum(row.params for row in cost.layers) == cost.params
        assert sum(row.macs for row in cost.layers) == cost.macs
        now = real_costs(lod.extract(model), inputs)
        assert (cost.fused_params, cost.fused_macs) == (now["params"], now["macs"])
        fused = sum(p.numel() for p in lod.fuse(model).parameters())
        assert fused <= max(cost.params, cost.dense_params)


@pytest.mark.parametrize("what", ["params", "macs", "bytes"])
def test_what_pick_promises_is_what_extract_and_the_file_have(
    kind: Kind, what: str, tmp_path: Path
) -> None:
    (model, sizes), inputs = searched(kind), kind.inputs()
    was = real_costs(kind.dense(), inputs)
    assert {key: getattr(sizes.dense, key) for key in was} == was
    for share in (0.95, 0.9, 0.8, 0.6, 0.4, 0.2):
        limit = {f"max_{what}": share}
        if what == "macs" and not kind.saves_macs and was["macs"]:
            with pytest.raises(lod.MaestroError, match="no submodel meets max_macs"):
                sizes.pick(**limit)
            continue
        promised = sizes.point(**limit)
        assert promised.ranks == sizes.pick(**limit)
        assert getattr(promised, what) <= share * was[what]
        small = lod.extract(model, promised.ranks)
        now = real_costs(small, inputs)
        assert {key: getattr(promised, key) for key in now} == now
        if what == "bytes":
            lod.export(small, tmp_path / "small.safetensors", example=inputs)
            assert bytes_of_tensors(tmp_path / "small.safetensors") == promised.bytes


# -- other programs ----------------------------------------------------------------------------


def test_exported_tensors_rebuild_the_model(kind: Kind, tmp_path: Path) -> None:
    model, inputs, path = scramble(low_rank(kind, 2)), kind.inputs(), tmp_path / "m.safetensors"
    done = lod.export(model, path, example=inputs)
    assert done.bytes == path.stat().st_size
    rebuilt = lod.load(path, into=kind.dense(seed=9))
    assert_same(outputs(rebuilt, inputs), outputs(model, inputs))
    assert str(rebuilt) == str(lod.extract(model))


class Together(nn.Module):
    """Models side by side: most of the time that tracing takes is not that of the layers."""

    def __init__(self, kinds: list[Kind]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(scramble(low_rank(kind, 2)) for kind in kinds)
        self.counts = [len(kind.shapes) for kind in kinds]

    def forward(self, *inputs: Tensor) -> list[Any]:
        left = iter(inputs)
        return [
            part(*itertools.islice(left, count))
            for part, count in zip(self.parts, self.counts, strict=True)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_exported_programs_compute_what_models_do(
    format: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    kinds = [kind for kind in request.module.KINDS if kind.in_onnx or format == "pt2"]
    model, inputs = Together(kinds).eval(), tuple(x for kind in kinds for x in kind.inputs())
    path = tmp_path / f"m.{format}"
    assert lod.export(model, path, example=inputs).batch is None
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        got = [torch.as_tensor(t) for t in session.run(None, feed)]
    else:
        got = tree_leaves(torch.export.load(path).module()(*inputs))
    with torch.no_grad():
        assert_same(got, outputs(model, inputs), rtol=1e-3, atol=1e-4)


def test_what_onnx_cannot_say_is_refused(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    for kind in request.module.KINDS:
        if not kind.in_onnx:
            with pytest.raises(lod.MaestroError, match="cannot be exported as onnx"):
                lod.export(low_rank(kind, 2), tmp_path / "m.onnx", example=kind.inputs())
    assert not list(tmp_path.iterdir())


class CountGraphs:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        self.count += 1
        return graph


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@torch._dynamo.config.patch(allow_rnn=True)
def test_one_compiled_graph_serves_all_ranks(kind: Kind) -> None:
    torch._dynamo.reset()
    model, inputs, graphs = low_rank(kind), kind.inputs(), CountGraphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for ranks in ({}, 1, 0.5, some_ranks(model, 5), 0):
        found = []
        for forward in (model, compiled):
            model.zero_grad()
            with lod.at_ranks(model, ranks):
                results = outputs(forward, inputs)
                loss_of(results).backward()
            found.append([*results, *(p.grad for p in model.parameters())])
        assert_same(found[1], found[0])
    assert graphs.count == 1
    torch._dynamo.reset()


# -- refusals ----------------------------------------------------------------------------------


def cut_file(model: nn.Module, path: Path) -> None:
    lod.save(model, path)
    path.write_bytes(path.read_bytes()[:-1])


def with_nan(kind: Kind, model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter(list(kind.weights)[-1]).flatten()[-1] = float("nan")


def test_refused_calls_leave_a_dense_model_as_it_was(
    kind: Kind, tmp_path: Path, snapshot: Callable[[nn.Module], Any]
) -> None:
    model, name = kind.dense(), kind.layers[-1]
    full = lod.survey(model, tied=kind.tied).ranks[name]
    lod.save(lod.decompose(nn.Sequential(nn.Linear(3, 3))), tmp_path / "other")
    cut_file(low_rank(kind), tmp_path / "cut")
    before = snapshot(model)
    for options in (
        {"ranks": {name: full + 1}}, {"ranks": {"nothing": 1}}, {"ranks": 1.5}, {"only": "nothing"},
    ):  # fmt: skip
        with pytest.raises(lod.MaestroError):
            lod.decompose(model, tied=kind.tied, **options)
    for file in ("other", "cut", "missing"):
        with pytest.raises(lod.MaestroError, match=file):
            lod.load(tmp_path / file, into=model)
    before.assert_unchanged(model)
    with_nan(kind, model)
    before = snapshot(model)
    with pytest.raises(lod.MaestroError, match=rf"{name} has NaN"):
        lod.decompose(model, tied=kind.tied)
    before.assert_unchanged(model)


def test_refused_calls_leave_a_low_rank_model_as_it_was(
    kind: Kind, tmp_path: Path, snapshot: Callable[[nn.Module], Any]
) -> None:
    model, name = low_rank(kind, 2), kind.layers[-1]
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    lod.save(model, tmp_path / "two")
    lod.save(lod.decompose(nn.Sequential(nn.Linear(3, 3))), tmp_path / "other")
    cut_file(model, tmp_path / "cut")
    before = snapshot(model)
    refused: list[Callable[[], object]] = [
        lambda: lod.extract(model, {name: 3}),
        lambda: lod.set_ranks(model, {name: 3}),
        lambda: lod.decompose(model, ranks=1),
        lambda: lod.fuse(model, by="nothing"),
        lambda: lod.shrink(model, optimizer, threshold=float("nan")),
        lambda: lod.shrink(model, optim.SGD([nn.Parameter(torch.ones(1))]), threshold=9.0),
        lambda: lod.load(tmp_path / "two", into=model, ranks={name: 3}),
        lambda: lod.load(tmp_path / "other", into=model),
        lambda: lod.load(tmp_path / "cut", into=model),
        lambda: lod.export(model, tmp_path / "m.onx", example=kind.inputs()),
    ]
    for call in refused:
        with pytest.raises(lod.MaestroError):
            call()
        before.assert_unchanged(model)
    lod.set_ranks(model, 1)
    with pytest.raises(lod.MaestroError):
        lod.fuse(model)
    before.assert_unchanged(model)
