"""Low-rank embeddings, and embeddings that are tied to an output head as one factor pair."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.errors import CheckpointError, LayerError, OptionError
from maestro_lod.layers import LowRank, LowRankEmbedding, LowRankLinear, SharedHead

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
V, D = 20, 6  # rows and width of the table
IDS = (3, 4)


class Language(nn.Module):
    """A language model in small: an embedding, something between, and an output head."""

    def __init__(
        self, *, tied: bool = True, bias: bool = True, head_first: bool = False, **options: Any
    ) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(D, V, bias=bias)
        self.embedding = nn.Embedding(V, D, **options)
        self.inner = nn.Linear(D, D)
        if not head_first:
            self.head = nn.Linear(D, V, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(ids))))


def ids() -> Tensor:
    return torch.randint(V, IDS)


def low_rank_copy(model: nn.Module, **options: Any) -> Any:
    return lod.decompose(copy.deepcopy(model), **options)


def low_rank_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, LowRank)]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def shared(ranks: Any = None, **options: Any) -> Any:
    return lod.decompose(Language(**options), tied="share", ranks=ranks)


# -- embeddings --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("padding", [None, 3, -1])
def test_look_up_equals_torch_for_any_shape_of_ids(
    shape: tuple[int, ...], padding: int | None
) -> None:
    dense = nn.Embedding(V, D, padding_idx=padding)
    x = torch.randint(V, shape)
    layer = low_rank_copy(dense)
    assert isinstance(layer, LowRankEmbedding)
    torch.testing.assert_close(layer(x), dense(x), **CLOSE)
    torch.testing.assert_close(layer(x.int()), dense(x.int()), **CLOSE)
    options = ("num_embeddings", "embedding_dim", "padding_idx")
    assert [getattr(layer, o) for o in options] == [getattr(dense, o) for o in options]


def test_arguments_can_be_given_by_the_names_of_torch() -> None:
    dense, x = nn.Embedding(V, D), ids()
    torch.testing.assert_close(low_rank_copy(dense)(input=x), dense(input=x), **CLOSE)


@pytest.mark.parametrize("bad", [torch.tensor([V]), torch.tensor([-1])], ids=["above", "below"])
def test_ids_out_of_range_are_refused_as_by_torch(bad: Tensor) -> None:
    with pytest.raises(IndexError):
        low_rank_copy(nn.Embedding(V, D))(bad)


def test_gradients_are_those_of_torch_through_the_product() -> None:
    dense, x = nn.Embedding(V, D, padding_idx=2), ids()
    x[0, 0] = 2
    layer, target = low_rank_copy(dense), torch.randn(*IDS, D)
    for model in (dense, layer):
        (model(x) * target).sum().backward()
    gradient = dense.weight.grad
    torch.testing.assert_close(layer.u.grad, gradient @ layer.v.mT, **CLOSE)
    torch.testing.assert_close(layer.v.grad, layer.u.mT @ gradient, **CLOSE)


def test_the_padding_row_is_zero_and_stays_so_in_training() -> None:
    layer = low_rank_copy(nn.Embedding(V, D, padding_idx=2))
    x = torch.full((4,), 2)
    optimizer = optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(3):
        both = torch.cat([x, torch.arange(V)])
        layer(both).square().sum().backward()
        assert not layer.u.grad[2].any()
        optimizer.step()
        optimizer.zero_grad()
    assert not layer(x).any()
    for rank in (1, 4, None):
        plain = lod.extract(layer, rank)
        (table,) = [m for m in plain.modules() if isinstance(m, nn.Embedding)]
        assert table.padding_idx == 2 and not plain(x).any()


def test_a_padding_row_that_was_trained_is_kept() -> None:
    dense = nn.Embedding(V, D, padding_idx=2)
    nn.init.normal_(dense.weight)
    layer = low_rank_copy(dense)
    torch.testing.assert_close(layer(torch.tensor(2)), dense.weight[2], **CLOSE)


@pytest.mark.parametrize(
    "option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
@pytest.mark.parametrize("tied", ["keep", "share"])
@pytest.mark.parametrize("with_head", [True, False])
def test_options_that_need_dense_rows_are_left_alone_with_the_reason(
    option: dict[str, Any], tied: Any, with_head: bool
) -> None:
    model = Language(tied=with_head, **option)
    embedding = model.embedding
    plan = lod.survey(model, tied=tied)
    lod.decompose(model, tied=tied)
    assert model.embedding is embedding
    ((name, value),) = option.items()
    if not with_head or tied == "share":
        assert plan.left_alone["embedding"] == f"{name}={value} acts on rows of a dense weight"
    if with_head:
        assert model.head.weight is embedding.weight


def test_a_summary_counts_the_product_of_an_embedding_and_not_its_look_up() -> None:
    model = low_rank_copy(Language(tied=False), ranks={"embedding": 2})
    cost = lod.summary(model, torch.zeros(1, 4, dtype=torch.int64))
    row = next(row for row in cost.layers if row.name == "embedding")
    assert (row.params, row.dense_params) == (2 * (V + D), V * D)
    assert (row.macs, row.dense_macs) == (4 * 2 * D, 0)


# -- tied: left alone by default ---------------------------------------------------------------


def test_tied_layers_are_left_alone_by_default() -> None:
    model = Language()
    assert lod.decompose(model) is model
    assert low_rank_names(model) == ["inner"]
    assert model.head.weight is model.embedding.weight
    why = "its weight is tied (embedding.weight = head.weight)"
    assert lod.survey(model).left_alone == {"embedding": why, "head": why}
    plain = lod.extract(model)
    assert plain.head.weight is plain.embedding.weight


def test_tied_layers_stay_tied_in_a_file(tmp_path: Path) -> None:
    model = lod.decompose(Language())
    lod.save(model, tmp_path / "model.safetensors")
    x = ids()
    for options in ({}, {"tied": "share"}, None):
        target = Language()
        if options is not None:
            lod.decompose(target, **options)
        loaded = lod.load(tmp_path / "model.safetensors", into=target)
        assert loaded.head.weight is loaded.embedding.weight
        torch.testing.assert_close(loaded(x), model(x), **CLOSE)


@pytest.mark.parametrize("value", ["untie", "", None, True, "Share"])
def test_unknown_values_of_tied_are_refused(
    value: Any, snapshot: Callable[[nn.Module], Any]
) -> None:
    model = Language()
    before = snapshot(model)
    for call in (lod.decompose, lod.survey):
        with pytest.raises(OptionError, match=r"tied=.*'keep' or 'share'"):
            call(model, tied=value)
    before.assert_unchanged(model)


# -- tied: one factor pair ---------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("head_first", [True, False])
@pytest.mark.parametrize("padding", [None, 2])
def test_sharing_keeps_the_outputs_and_counts_the_factors_once(
    bias: bool, head_first: bool, padding: int | None
) -> None:
    dense, x = Language(bias=bias, head_first=head_first, padding_idx=padding), ids()
    model = low_rank_copy(dense, tied="share", ranks={"embedding": 4})
    assert type(model.embedding) is LowRankEmbedding and type(model.head) is SharedHead
    assert model.head.embedding is model.embedding
    inner = D * D + D * D + D
    assert count(model) == 4 * (V + D) + inner + V * bias
    assert lod.ranks(model) == {"embedding": 4, "inner": D}
    torch.testing.assert_close(low_rank_copy(dense, tied="share")(x), dense(x), **CLOSE)


@pytest.mark.parametrize("padding", [None, 2])
def test_gradients_are_those_of_the_tied_model_through_the_product(padding: int | None) -> None:
    dense, x = Language(padding_idx=padding), ids()
    x[0, :2] = 2
    model = low_rank_copy(dense, tied="share")
    for each in (dense, model):
        F.cross_entropy(each(x).flatten(0, 1), x.flatten()).backward()
    gradient, factors = dense.embedding.weight.grad, model.embedding
    torch.testing.assert_close(factors.u.grad, gradient @ factors.v.mT, **CLOSE)
    torch.testing.assert_close(factors.v.grad, factors.u.mT @ gradient, **CLOSE)
    torch.testing.assert_close(model.head.bias.grad, dense.head.bias.grad, **CLOSE)


def test_a_smaller_rank_acts_on_both() -> None:
    model, x = shared(), ids()
    with torch.no_grad():
        weight = model.embedding.u[:, :2] @ model.embedding.v[:2]
        hidden = torch.tanh(model.inner(weight[x]))
        expected = F.linear(hidden, weight, model.head.bias)
    with lod.at_ranks(model, {"embedding": 2}):
        torch.testing.assert_close(model(x), expected, **CLOSE)
        torch.testing.assert_close(model.head.weight, weight, **CLOSE)
    torch.testing.assert_close(lod.extract(model, {"embedding": 2})(x), expected, **CLOSE)


def test_the_survey_says_who_shares_with_whom() -> None:
    model = Language()
    plan = lod.survey(model, tied="share", ranks={"embedding": 3})
    assert plan.ranks == {"embedding": 3, "inner": D}
    assert plan.left_alone == {"head": "shares the factors of embedding"}
    lod.decompose(model, tied="share", ranks={"embedding": 3})
    done = lod.survey(model)
    assert done.ranks == plan.ranks
    assert done.left_alone == {"head": "uses the factors of its embedding"}
    with pytest.raises(LayerError, match=r"'head'.*shares the factors"):
        lod.decompose(Language(), tied="share", ranks={"head": 3})


@pytest.mark.parametrize(
    "choice",
    [{"skip": "embedding"}, {"only": "inner"}, {"skip": lambda n, _: n == "embedding"}],
    ids=["skip", "only", "predicate"],
)
def test_leaving_out_the_embedding_cancels_the_sharing(choice: dict[str, Any]) -> None:
    model = lod.decompose(Language(), tied="share", **choice)
    assert low_rank_names(model) == ["inner"]
    assert type(model.head) is nn.Linear and model.head.weight is model.embedding.weight


@pytest.mark.parametrize("skip", ["head", ["head"], "h*"], ids=str)
def test_skipping_the_head_cancels_the_sharing_too(skip: Any) -> None:
    plan = lod.survey(Language(), tied="share", skip=skip)
    assert set(plan.left_alone) == {"embedding", "head"}
    model = lod.decompose(Language(), tied="share", skip=skip)
    assert low_rank_names(model) == ["inner"]
    assert type(model.head) is nn.Linear and model.head.weight is model.embedding.weight


class TwoHeads(Language):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(D, V)
        self.second.weight = self.embedding.weight


class TwoTables(Language):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Embedding(V, D)
        self.second.weight = self.embedding.weight


class Transposed(Language):
    """The head multiplies by the table itself, which is a view of the same memory."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.head = nn.Linear(V, D)
        self.head.weight = nn.Parameter(self.embedding.weight.detach().mT)


class Part(Language):
    """The head knows only the first tokens: its weight is the first rows of the table."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.head = nn.Linear(D, 10)
        self.head.weight = nn.Parameter(self.embedding.weight.detach()[:10])


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnHead(Language):
    def __init__(self) -> None:
        super().__init__(tied=False)
        self.head = Doubled(D, V)
        self.head.weight = self.embedding.weight


class ReplacedHead(Language):
    def __init__(self) -> None:
        super().__init__()
        self.head.forward = lambda x: x


class HookedTable(Language):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.weight.register_hook(lambda grad: 2 * grad)


class HeldTable(Language):
    def __init__(self) -> None:
        super().__init__()
        self.tables = [self.embedding]


NOT_SHARED = [
    TwoHeads, TwoTables, Transposed, Part, OwnHead, ReplacedHead, HookedTable, HeldTable,
]  # fmt: skip


@pytest.mark.parametrize("make", NOT_SHARED)
def test_what_is_no_plain_pair_is_left_alone(make: Callable[[], Language]) -> None:
    model = make()
    embedding, head = model.embedding, model.head
    plan = lod.survey(model, tied="share")
    assert {"embedding", "head"} <= set(plan.left_alone)
    lod.decompose(model, tied="share")
    assert model.embedding is embedding and model.head is head
    assert low_rank_names(model) == ["inner"]


def test_an_embedding_that_is_not_tied_is_not_shared() -> None:
    model = lod.decompose(Language(tied=False), tied="share")
    assert low_rank_names(model) == ["embedding", "inner", "head"]
    assert type(model.head) is LowRankLinear


def test_a_table_that_no_rank_makes_smaller_is_left_alone_with_its_head() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(V, 1), "head": nn.Linear(1, V)})
    model["head"].weight = model["embedding"].weight
    model["inner"] = nn.Linear(D, D)
    lod.decompose(model, tied="share")
    assert low_rank_names(model) == ["inner"]
    assert model["head"].weight is model["embedding"].weight


def test_hooks_mode_and_bias_of_the_head_are_kept() -> None:
    model, calls = Language().eval(), []
    model.head.register_forward_hook(lambda *_: calls.append("post"))
    bias = model.head.bias
    lod.decompose(model, tied="share")
    assert model.head.bias is bias and not model.head.training
    model(ids())
    lod.extract(model)(ids())
    assert calls == ["post"]
    lod.fuse(model)
    assert type(model.head) is nn.Linear
    model(ids())
    assert calls == ["post"] * 2


class SharedBias(Language):
    """The bias of the head is a parameter of the model too, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = self.head.bias


def test_a_bias_that_the_head_shares_stays_shared() -> None:
    model = lod.decompose(SharedBias(), tied="share")
    assert model.head.bias is model.bias
    plain = lod.extract(model)
    assert plain.head.bias is plain.bias and plain.bias is not model.bias
    factored = lod.extract(model, {"embedding": 2})
    assert factored.head[1].bias is factored.bias
    lod.fuse(model)
    assert type(model.head) is nn.Linear and model.head.bias is model.bias


# -- shared: extract, fuse, cost ---------------------------------------------------------------


@pytest.mark.parametrize("head_first", [True, False])
def test_extract_shares_the_table_or_its_larger_factor(head_first: bool) -> None:
    model, x = shared(head_first=head_first), ids()
    plain = lod.extract(model)
    assert type(plain.embedding) is nn.Embedding and type(plain.head) is nn.Linear
    assert plain.head.weight is plain.embedding.weight
    assert count(plain) == count(Language())
    torch.testing.assert_close(plain(x), model(x), **CLOSE)
    factored = lod.extract(model, {"embedding": 2})
    look_up, multiply = factored.embedding
    first, last = factored.head
    assert look_up.weight is last.weight
    torch.testing.assert_close(first.weight, multiply.weight.mT, rtol=0, atol=0)
    assert not [m for m in factored.modules() if isinstance(m, LowRank | SharedHead)]
    assert count(factored) == 2 * V + 2 * (2 * D) + V + D * D + D
    with lod.at_ranks(model, {"embedding": 2}):
        torch.testing.assert_close(factored(x), model(x), **CLOSE)


@pytest.mark.parametrize("head_first", [True, False])
def test_fuse_gives_the_tied_dense_pair_where_that_is_cheaper(head_first: bool) -> None:
    x = ids()
    model = shared(ranks=5, head_first=head_first)  # 120 < 5 · 26
    expected = model(x)
    lod.fuse(model)
    assert type(model.embedding) is nn.Embedding and type(model.head) is nn.Linear
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(model(x), expected, **CLOSE)
    model = shared(ranks=4, head_first=head_first)  # 4 · 26 < 120
    expected = model(x)
    lod.fuse(model)
    assert type(model.head) is SharedHead and model.head.embedding is model.embedding
    torch.testing.assert_close(model(x), expected, **CLOSE)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 6])
def test_fuse_by_macs_never_adds_macs(rank: int) -> None:
    model, x = shared(ranks=rank), torch.zeros(1, 7, dtype=torch.int64)
    before = lod.summary(model, x).macs
    assert lod.summary(lod.fuse(model, by="macs"), x).macs <= before


@pytest.mark.parametrize("head_first", [True, False])
def test_a_summary_counts_the_shared_factors_once(head_first: bool) -> None:
    positions, rank = 7, 3
    model = lod.decompose(
        Language(head_first=head_first), tied="share", ranks={"embedding": rank}, skip="inner"
    )
    cost = lod.summary(model, torch.zeros(1, positions, dtype=torch.int64))
    rows = {row.kind: row for row in cost.layers}
    table, head = rows["Embedding"], rows["SharedHead"]
    assert (table.params, table.dense_params) == (rank * (V + D), V * D)
    assert (head.params, head.dense_params) == (V, V)  # its bias
    assert (table.macs, table.dense_macs) == (positions * rank * D, 0)
    assert (head.macs, head.dense_macs) == (positions * rank * (V + D), positions * V * D)
    inner = positions * D * D
    assert cost.params == count(model) == rank * (V + D) + V + D * D + D
    assert cost.dense_params == count(Language()) == V * D + V + D * D + D
    assert cost.macs == table.macs + head.macs + inner
    assert cost.dense_macs == positions * V * D + inner


def test_the_ledger_draws_a_shared_head_with_its_embedding() -> None:
    rank = 4
    model = lod.decompose(Language(), tied="share", ranks=rank, skip="inner")
    x = ids()
    train = lod.LoD(model, optim.SGD(model.parameters(), lr=0.1), example=x)
    with train.step():
        model(x).sum().backward()
    train.optimizer.step()
    train.end_epoch()
    positions, mean = x.numel(), (rank + 1) / 2  # the one layer, drawn uniformly from 1..rank
    expected = positions * (mean * D + mean * (V + D) + D * D)
    (epoch,) = train.ledger.epochs
    assert epoch.macs == pytest.approx(expected)
    assert epoch.params == count(model)
    assert train.ledger.dense_params == count(Language())
    assert train.ledger.dense_macs == positions * (V * D + D * D)


# -- shared: training and files ----------------------------------------------------------------


@pytest.mark.parametrize("into", ["untied", "kept"])
@pytest.mark.parametrize("head_first", [True, False])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_file_loads_into_fresh_and_decomposed_models(
    tmp_path: Path, into: str, head_first: bool, rank: int
) -> None:
    model = shared(ranks={"embedding": rank}, head_first=head_first)
    lod.save(model, tmp_path / "model.safetensors")
    target = Language(tied=into != "untied", head_first=head_first)
    if into == "kept":
        lod.decompose(target)
    loaded = lod.load(tmp_path / "model.safetensors", into=target)
    assert type(loaded.head) is SharedHead and loaded.head.embedding is loaded.embedding
    assert loaded.embedding.rank == rank and count(loaded) == count(model)
    x = ids()
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)


def test_hooks_of_the_head_survive_loading(tmp_path: Path) -> None:
    lod.save(shared(ranks=2), tmp_path / "shared.safetensors")
    lod.save(lod.decompose(Language()), tmp_path / "kept.safetensors")
    model, calls = Language(), []
    model.head.register_forward_hook(lambda *_: calls.append("post"))
    for i, name in enumerate(("shared", "kept", "shared")):
        lod.load(tmp_path / f"{name}.safetensors", into=model)
        model(ids())
        assert len(calls) == i + 1


def test_a_head_without_its_embedding_is_not_extracted() -> None:
    model = shared()
    part = nn.Sequential(model.inner, model.head)
    with pytest.raises(LayerError, match="Use the model that contains both"):
        lod.extract(part)


def test_autocast_leaves_look_ups_as_they_are() -> None:
    dense = nn.Sequential(nn.Embedding(50, 16))
    model = lod.decompose(copy.deepcopy(dense))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(ids()).dtype == dense(ids()).dtype == torch.float32


def test_a_head_without_its_embedding_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"head shares the factors.*contains both"):
        part = nn.ModuleDict({"head": shared().head, "other": lod.decompose(nn.Linear(4, 4))})
        lod.save(part, tmp_path / "part.safetensors")
    assert not list(tmp_path.iterdir())
