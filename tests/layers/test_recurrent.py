"""Recurrent layers over low-rank weights are torch's own in all they compute."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._pytree import tree_leaves

import maestro_lod as lod
from maestro_lod.layers import LowRank, LowRankMatrix, Matrix, Product
from maestro_lod.layers.recurrent import PivotedProduct

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
I, H, T, N = 4, 5, 6, 3  # noqa: E741

KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {}),
    "LSTM with projections": (nn.LSTM, {"proj_size": 3}),
    "GRU": (nn.GRU, {}),
    "RNN": (nn.RNN, {}),
    "RNN with relu": (nn.RNN, {"nonlinearity": "relu"}),
}
OPTIONS = [
    {"num_layers": layers, "bidirectional": two, "batch_first": first, "bias": bias}
    for layers, two, first, bias in itertools.product((1, 2), *[(False, True)] * 3)
]
INPUTS = list(
    itertools.product(("batched", "unbatched", "packed", "packed unsorted"), (True, False))
)


def recurrent(kind: str, **options: Any) -> nn.RNNBase:
    make, given = KINDS[kind]
    return make(I, H, **(given | options))


def low_rank_copy(model: nn.Module, **options: Any) -> nn.Module:
    return lod.decompose(copy.deepcopy(model), **options)


def low_rank_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, LowRank)]


def weight_names(layer: nn.RNNBase) -> list[str]:
    return [name for name, parameter in layer.named_parameters() if parameter.ndim == 2]


def option_id(options: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in options.items()) or "plain"


def inputs_for(layer: nn.RNNBase, form: str, given: bool) -> tuple[Tensor | PackedSequence, Any]:
    """Make an input of one form, and initial states if they are to be given."""
    batched = form != "unbatched"
    shape = (N, T, I) if layer.batch_first else (T, N, I)
    x: Any = torch.randn(shape if batched else (T, I), requires_grad=True)
    states = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or H] + [H] * (type(layer) is nn.LSTM)
    hx: Any = None
    if given:
        hx = tuple(torch.randn((states, N, size) if batched else (states, size)) for size in sizes)
        hx = hx if type(layer) is nn.LSTM else hx[0]
        for state in tree_leaves(hx):
            state.requires_grad_()
    if form.startswith("packed"):
        lengths = [3, T, 2] if "unsorted" in form else [T, 3, 2]
        x = pack_padded_sequence(
            x, lengths, layer.batch_first, enforce_sorted="unsorted" not in form
        )
        x = PackedSequence(x.data.detach().requires_grad_(), *x[1:])
    return x, hx


def results(layer: nn.Module, x: Any, hx: Any) -> list[Tensor]:
    """Return outputs, hidden states, and the gradients of inputs and initial states."""
    found = layer(x, hx) if hx is not None else layer(x)
    outputs = [t for t in tree_leaves(found) if isinstance(t, Tensor) and t.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    loss = sum((t * torch.randn(t.shape, generator=generator)).sum() for t in outputs)
    states = [state for state in tree_leaves(hx) if state is not None]
    wrt = [x.data if isinstance(x, PackedSequence) else x, *states]
    return [*outputs, *torch.autograd.grad(loss, wrt)]


def output_of(layer: nn.Module, x: Any, hx: Any) -> Tensor:
    found: Tensor = layer(x, hx)[0] if hx is not None else layer(x)[0]
    return found


def assert_results_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


# -- torch's own, option by option -------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_outputs_states_and_gradients_equal_torch(kind: str, options: dict[str, Any]) -> None:
    dense = recurrent(kind, **options)
    ours = low_rank_copy(dense)
    assert low_rank_names(ours) == weight_names(dense)
    for form, given in INPUTS:
        x, hx = inputs_for(dense, form, given)
        assert_results_equal(results(ours, x, hx), results(dense, x, hx))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_draws_what_torch_draws_from_the_same_seed(kind: str) -> None:
    dense = recurrent(kind, num_layers=3, dropout=0.5)
    ours = low_rank_copy(dense)
    x, hx = inputs_for(dense, "batched", True)
    outcomes = []
    for layer in (dense, ours):
        torch.manual_seed(4)
        outcomes.append(results(layer, x, hx))
    assert_results_equal(outcomes[1], outcomes[0])
    undropped = results(ours.eval(), x, hx)
    assert not torch.allclose(undropped[0], outcomes[1][0])
    assert_results_equal(undropped, results(dense.eval(), x, hx))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_smaller_rank_is_the_dense_layer_with_truncated_weights(kind: str, rank: int) -> None:
    dense = recurrent(kind, num_layers=2, bidirectional=True)
    truncated, ours = copy.deepcopy(dense), low_rank_copy(dense)
    with torch.no_grad():
        for name in weight_names(dense):
            left, scale, right = torch.linalg.svd(dense.get_parameter(name), full_matrices=False)
            scale[rank:] = 0
            truncated.get_parameter(name).copy_(left * scale @ right)
    x, hx = inputs_for(dense, "packed", True)
    expected = results(truncated, x, hx)
    with lod.at_ranks(ours, rank):
        assert_results_equal(results(ours, x, hx), expected)
    assert_results_equal(results(low_rank_copy(dense, ranks={"*": rank}), x, hx), expected)
    assert_results_equal(results(lod.extract(ours, rank), x, hx), expected)


def test_inputs_of_wrong_shape_are_refused_as_by_torch() -> None:
    dense = nn.LSTM(I, H)
    good = torch.randn(T, N, I)
    states = torch.zeros(1, N, H)
    bad = {
        "width": (torch.randn(T, N, I + 1), None),
        "dimensions": (torch.randn(1, T, N, I), None),
        "states": (good, (states, torch.zeros(1, N + 1, H))),
        "one state": (good, (states,)),
    }
    for layer in (dense, low_rank_copy(dense)):
        for x, hx in bad.values():
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                layer(x, hx)


# -- the module as users meet it ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_torch_can_be_read(kind: str) -> None:
    dense = recurrent(kind, num_layers=2, bidirectional=True, dropout=0.25, batch_first=True)
    ours = low_rank_copy(dense)
    names = [
        "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout",
        "bidirectional", "proj_size", "mode",
    ]  # fmt: skip
    assert {n: getattr(ours, n) for n in names} == {n: getattr(dense, n) for n in names}
    ours.flatten_parameters()
    assert str(KINDS[kind][0].__name__) in str(ours)
    with pytest.raises(AttributeError, match="no_such_thing"):
        ours.no_such_thing  # noqa: B018


def test_options_of_torch_can_be_set() -> None:
    dense = nn.GRU(I, H, num_layers=2, dropout=0.5)
    ours = low_rank_copy(dense)
    x = torch.randn(N, T, I)
    for layer in (dense, ours):
        layer.dropout, layer.batch_first = 0.0, True
    for mine, theirs in zip(ours(x), dense(x), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    plain = lod.extract(ours)
    assert plain.dropout == 0.0 and plain.batch_first is True


def test_arguments_can_be_given_by_the_names_of_torch() -> None:
    dense = nn.GRU(I, H)
    x, hx = inputs_for(dense, "batched", True)
    expected, _ = dense(input=x, hx=hx)
    torch.testing.assert_close(low_rank_copy(dense)(input=x, hx=hx)[0], expected, **CLOSE)


def test_all_weights_are_never_those_of_an_empty_layer() -> None:
    ours = low_rank_copy(nn.LSTM(I, H))
    try:
        weights = ours.all_weights
    except AttributeError:
        return
    assert not any(weight.is_meta for group in weights for weight in group)


def test_mode_trainability_and_hooks_follow_the_dense_layer() -> None:
    model, calls = nn.ModuleDict({"rnn": nn.LSTM(I, H, 2, dropout=0.5)}).eval(), []
    model["rnn"].weight_hh_l0.requires_grad_(False)
    model["rnn"].bias_ih_l1.requires_grad_(False)
    model["rnn"].register_forward_hook(lambda *_: calls.append("post"))
    lod.decompose(model)
    frozen = {"weight_hh_l0.u", "weight_hh_l0.v", "bias_ih_l1"}
    assert {n for n, p in model["rnn"].named_parameters() if not p.requires_grad} == frozen
    assert not any(module.training for module in model.modules())
    x = torch.randn(T, N, I)
    torch.testing.assert_close(model["rnn"](x)[0], model["rnn"](x)[0], rtol=0, atol=0)
    assert calls == ["post"] * 2
    plain = lod.extract(model)["rnn"]
    frozen = {"weight_hh_l0", "bias_ih_l1"}
    assert {n for n, p in plain.named_parameters() if not p.requires_grad} == frozen
    assert not plain.training
    plain(x)
    assert calls == ["post"] * 2


def test_biases_stay_the_parameters_they_were() -> None:
    dense = nn.LSTM(I, H)
    biases = {name: p for name, p in dense.named_parameters() if p.ndim == 1}
    ours = lod.decompose(dense)
    assert biases and all(ours.get_parameter(name) is p for name, p in biases.items())


# -- parts, extract, fuse ----------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["weight_ih_l0", "*_hh_*", "*_l1*"])
def test_weights_that_are_skipped_stay_dense(kept: str) -> None:
    dense = nn.LSTM(I, H, 2, bidirectional=True)
    ours = low_rank_copy(dense, skip=kept)
    hit = {name for name, part in ours.named_children() if type(part) is Matrix}
    assert hit and hit == set(weight_names(dense)) - set(low_rank_names(ours))
    x, hx = inputs_for(dense, "packed", True)
    assert_results_equal(results(ours, x, hx), results(dense, x, hx))
    lod.decompose(ours)
    assert low_rank_names(ours) == weight_names(dense)
    assert_results_equal(results(ours, x, hx), results(dense, x, hx))


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_no_rank_makes_smaller_stays_dense(kind: str) -> None:
    make, given = KINDS[kind]
    dense = make(1, H, **given)
    plan = lod.survey(dense)
    rows = dense.weight_ih_l0.shape[0]
    assert plan.left_alone == {"weight_ih_l0": f"no rank saves anything ({rows}×1)"}
    ours = low_rank_copy(dense)
    assert "weight_ih_l0" not in low_rank_names(ours) and "weight_hh_l0" in low_rank_names(ours)
    x = torch.randn(T, N, 1)
    torch.testing.assert_close(ours(x)[0], dense(x)[0], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [None, 0, 1, 0.5, {"weight_hh_l0": 2}], ids=str)
def test_extract_equals_at_ranks_and_holds_the_factors_alone(kind: str, ranks: Any) -> None:
    dense = recurrent(kind, num_layers=2, bidirectional=True, batch_first=True, dropout=0.5).eval()
    ours = low_rank_copy(dense)
    x, hx = inputs_for(dense, "batched", True)
    with lod.at_ranks(ours, {} if ranks is None else ranks):
        expected = results(ours, x, hx)
    plain = lod.extract(ours, ranks)
    if ranks is None:
        assert type(plain) is type(dense) and str(plain) == str(dense)
        assert plain.state_dict().keys() == dense.state_dict().keys()
    else:
        assert {type(part) for part in plain.children()} <= {Matrix, Product, PivotedProduct}
    size = sum(p.numel() for p in plain.parameters())
    assert size == lod.summary(lod.extract(ours, ranks), (x, hx)).params
    assert ranks is None or size < sum(p.numel() for p in dense.parameters())
    assert_results_equal(results(plain, x, hx), expected)
    with torch.no_grad():  # where the product is kept
        for _ in range(2):
            torch.testing.assert_close(output_of(plain, x, hx), expected[0], **CLOSE)
        for p in plain.parameters():
            p.mul_(0.5)
        assert ranks == 0 or not torch.allclose(output_of(plain, x, hx), expected[0])
        for p in plain.parameters():
            p.mul_(2)
        torch.testing.assert_close(output_of(plain, x, hx), expected[0], **CLOSE)
    plain.train()(x)[0].sum().backward()  # memory of its own, and its flat weights follow
    assert all(p.grad is not None for p in plain.parameters())
    assert all(p.grad is None for p in ours.parameters())


# -- cost --------------------------------------------------------------------------------------


def test_a_summary_counts_each_weight_at_each_step() -> None:
    model = low_rank_copy(nn.LSTM(I, H), ranks=2)
    cost = lod.summary(model, torch.randn(T, 1, I))
    rows = {row.name: row for row in cost.layers}
    into, within = rows["weight_ih_l0"], rows["weight_hh_l0"]
    assert (into.params, into.dense_params) == (2 * (4 * H + I), 4 * H * I)
    assert (within.params, within.dense_params) == (2 * (4 * H + H), 4 * H * H)
    assert (into.dense_macs, within.dense_macs) == (T * 4 * H * I, T * 4 * H * H)
    assert (into.macs, within.macs) == (T * into.params, T * within.params)
    assert cost.params == sum(p.numel() for p in model.parameters())
    assert cost.dense_params == sum(p.numel() for p in nn.LSTM(I, H).parameters())
    assert cost.dense_macs == into.dense_macs + within.dense_macs
    assert cost.macs == into.macs + within.macs


def test_weights_that_stay_dense_have_their_macs_in_the_summary() -> None:
    model = low_rank_copy(nn.LSTM(I, H), skip="weight_ih_l0")
    cost = lod.summary(model, torch.randn(T, 1, I))
    rows = {row.name: row.macs for row in cost.layers}
    assert rows["weight_ih_l0"] == T * 4 * H * I
    assert sum(rows.values()) == cost.macs


def test_the_ledger_books_what_a_step_of_the_sampled_layer_costs() -> None:
    model = low_rank_copy(nn.LSTM(I, H), ranks={"weight_ih_l0": 2, "weight_hh_l0": 4})
    train = lod.LoD(model, optim.SGD(model.parameters(), lr=0.1), example=torch.randn(T, N, I))
    with train.step():
        model(torch.randn(T, N, I))[0].sum().backward()
    train.optimizer.step()
    train.end_epoch()
    steps, into, within = T * N, 2 / 6, 4 / 6
    # ranks are drawn uniformly from 1..r: mean (r + 1) / 2
    expected = steps * (4 * H + I) * (2 - into * 0.5) + steps * (4 * H + H) * (4 - within * 1.5)
    epoch = train.ledger.epochs[0]
    assert epoch.macs == pytest.approx(expected)
    # really, the factors are multiplied out once and applied as a dense weight
    composed = (steps + 2 - into * 0.5) * 4 * H * I + (steps + 4 - within * 1.5) * 4 * H * H
    assert epoch.executed_macs == pytest.approx(composed)
    assert epoch.params == sum(p.numel() for p in model.parameters())


# -- training and files ------------------------------------------------------------------------


class Tagger(nn.Module):
    """A recurrent layer under a name, and a head."""

    def __init__(self, kind: str = "LSTM", **options: Any) -> None:
        super().__init__()
        self.rnn = recurrent(kind, batch_first=True, **options)
        self.head = nn.Linear(self.rnn.proj_size or H, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("into", ["dense", "other weights"])
@pytest.mark.parametrize("kept", [(), ("rnn.weight_hh_l0",)], ids=["all", "some"])
@pytest.mark.parametrize("kind", ["LSTM with projections", "GRU"])
def test_a_file_loads_into_dense_and_decomposed_models(
    tmp_path: Path, kind: str, into: str, kept: tuple[str, ...]
) -> None:
    model = lod.decompose(Tagger(kind), skip=kept, ranks=2)
    lod.save(model, tmp_path / "model.safetensors")
    target = Tagger(kind)
    if into != "dense":
        lod.decompose(target, skip="rnn.weight_ih_l0")
    loaded = lod.load(tmp_path / "model.safetensors", into=target)
    assert loaded is target and lod.ranks(loaded) == lod.ranks(model)
    x = torch.randn(N, T, I)
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)


# -- what is left alone ------------------------------------------------------------------------


class OwnLSTM(nn.LSTM):
    def forward(self, *args: Any) -> Any:
        return super().forward(*args)


def tied() -> nn.Module:
    layer = nn.LSTM(I, H, 2)
    layer.weight_hh_l1 = layer.weight_hh_l0
    return layer


def replaced_forward() -> nn.Module:
    layer = nn.GRU(I, H)
    layer.forward = lambda x: x
    return layer


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "parametrized": (
        lambda: parametrizations.weight_norm(nn.LSTM(I, H), "weight_hh_l0"),
        "parametrized",
    ),
    "pruned": (
        lambda: prune.l1_unstructured(nn.GRU(I, H), "weight_hh_l0", 0.5),
        "its weights are computed",
    ),
    "subclass": (lambda: OwnLSTM(I, H), "a subclass of LSTM, whose forward may differ"),
    "tied": (tied, "tied (special.weight_hh_l0 = special.weight_hh_l1)"),
    "replaced forward": (replaced_forward, "forward was replaced"),
    "cell": (lambda: nn.LSTMCell(I, H), "LSTMCell is not a supported kind"),
}


@pytest.mark.parametrize(("make", "words"), LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_what_must_not_be_opened_is_left_alone_with_the_reason(
    make: Callable[[], nn.Module], words: str
) -> None:
    special = make()
    model = nn.ModuleDict({"plain": nn.GRU(I, H), "special": special})
    reasons = lod.survey(model).left_alone
    assert words in reasons["special"] and list(reasons) == ["special"]
    lod.decompose(model)
    assert model["special"] is special
    assert low_rank_names(model) == ["plain.weight_ih_l0", "plain.weight_hh_l0"]
    assert isinstance(model["plain"].weight_ih_l0, LowRankMatrix)
