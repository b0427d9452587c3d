"""Layers that other code takes for dense are left alone, each with the reason."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.deploy.export import open_runner
from maestro_lod.layers import LowRank
from maestro_lod.model.checkpoint import save_plain
from maestro_lod.model.inputs import ModelInputs
from maestro_lod.pretrained.compression import compress

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
D = 6


def low_rank_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, LowRank)]


class TwoLayers(nn.Module):
    """One layer that the code below reads in some way, and one that it only calls."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(D, D)
        self.called = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self.read(x))


class ReadsInForward(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.called(F.linear(x, self.read.weight, self.read.bias))


class ReadsInMethod(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.called(self._fused(x))

    def _fused(self, x: Tensor) -> Tensor:
        return x @ self.read.weight.t() + self.read.bias


class ReadsDtype(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.called(self.read(x.to(self.read.weight.dtype)))


class InheritsTheReading(ReadsInForward):
    """The code that reads is in a base class."""

    extra = 1


class OverridesTheReading(ReadsInForward):
    """The code that reads is never run."""

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self.read(x))


class ReadsInProperty(TwoLayers):
    @property
    def table(self) -> Tensor:
        return self.read.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.called(F.linear(x, self.table, self.read.bias))


class ReadsOnlyToSetUp(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        nn.init.xavier_uniform_(self.read.weight)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.read.weight)

    def _init_weights(self) -> None:
        nn.init.zeros_(self.read.weight)

    def tie_weights(self) -> None:
        self.called.weight = self.read.weight


class ReadsWhereNobodyCalls(TwoLayers):
    """As fused paths that another forward would take."""

    def fused(self, x: Tensor) -> Tensor:
        return F.linear(x, self.read.weight)


class CallsTheReading(ReadsInForward):
    """The code that reads is called by super()."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class ReadsByAnotherName(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        if (layer := self.read) is not None:
            x = x.to(layer.weight.dtype)
        return self.called(self.read(x))


READERS: dict[str, tuple[type[TwoLayers], bool]] = {
    "called by super": (CallsTheReading, True),
    "another name": (ReadsByAnotherName, True),
    "forward": (ReadsInForward, True),
    "another method": (ReadsInMethod, True),
    "its dtype": (ReadsDtype, True),
    "inherited forward": (InheritsTheReading, True),
    "overridden forward": (OverridesTheReading, False),
    "property": (ReadsInProperty, True),
    "initialization": (ReadsOnlyToSetUp, False),
    "a helper that nobody calls": (ReadsWhereNobodyCalls, False),
    "nobody": (TwoLayers, False),
}


@pytest.mark.parametrize(("make", "left"), READERS.values(), ids=READERS.keys())
def test_a_layer_whose_weight_other_code_reads_is_left_alone(
    make: type[TwoLayers], left: bool
) -> None:
    model, x = make(), torch.randn(3, D)
    expected = model(x)
    reasons = lod.survey(model).left_alone
    lod.decompose(model)
    assert low_rank_names(model) == (["called"] if left else ["read", "called"])
    assert list(reasons) == (["read"] if left else [])
    if left:
        assert "reads its weight" in reasons["read"]
        owner = next(c for c in make.__mro__ if {"forward", "table"} & vars(c).keys())
        assert make.__name__ in reasons["read"] or owner.__name__ in reasons["read"]
    torch.testing.assert_close(model(x), expected, **CLOSE)


class Blocks(nn.Module):
    """A stack of blocks whose first layers are read in some way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TwoLayers(), TwoLayers()])
        self.last = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def dtype_of_last(self) -> torch.dtype:
        return self.last[0].weight.dtype


class ReadsByIndex(Blocks):
    """As Z-Image's embedding of time steps does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.last[0].weight.dtype))


class ReadsByVariableIndex(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.blocks)):
            x = x.to(self.blocks[i].read.weight.dtype)
        return super().forward(x)


class ReadsInLoop(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for _, block in enumerate(self.blocks[1:]):
            x = x.to(block.read.weight.dtype)
        return super().forward(x)


class ReadsInComprehension(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.read.weight.sum() for block in self.blocks)


class CallsMethodOfChild(nn.Module):
    """As open_clip's models do: the child's own forward reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Blocks()])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x.to(self.inner[0].dtype_of_last()))


BLOCKS: dict[str, tuple[type[nn.Module], list[str]]] = {
    "by index": (ReadsByIndex, ["last.0"]),
    "by variable index": (ReadsByVariableIndex, ["blocks.0.read", "blocks.1.read"]),
    "in a loop": (ReadsInLoop, ["blocks.0.read", "blocks.1.read"]),
    "in a comprehension": (ReadsInComprehension, ["blocks.0.read", "blocks.1.read"]),
    "in a method that a parent calls": (CallsMethodOfChild, ["inner.0.last.0"]),
    "by nobody": (Blocks, []),
}


@pytest.mark.parametrize(("make", "left"), BLOCKS.values(), ids=BLOCKS.keys())
def test_layers_whose_weights_are_read_through_containers_and_children_are_left_alone(
    make: type[nn.Module], left: list[str], tmp_path: Path
) -> None:
    model, x = make(), torch.randn(3, D)
    assert list(lod.survey(model).left_alone) == left
    expected = make()
    expected.load_state_dict(model.state_dict())
    compress(model, [torch.randn(64, D)], max_params=0.9)
    assert not {*left} & {*low_rank_names(model)}
    low_rank = model(x)
    plain = lod.extract(model)
    torch.testing.assert_close(plain(x), low_rank, **CLOSE)
    lod.save(model, tmp_path / "model.safetensors")
    loaded = lod.load(tmp_path / "model.safetensors", into=expected)
    torch.testing.assert_close(loaded(x), low_rank, **CLOSE)
    lod.export(plain, tmp_path / "model.pt2", example=x)
    (answer,) = open_runner(tmp_path / "model.pt2")(ModelInputs((x,), {}))
    torch.testing.assert_close(answer, low_rank, **CLOSE)


def test_only_the_layer_that_is_read_is_left_alone_among_nested_ones() -> None:
    model = nn.Sequential(ReadsInForward(), TwoLayers())
    lod.decompose(model)
    assert low_rank_names(model) == ["0.called", "1.read", "1.called"]


def test_a_layer_that_is_read_under_one_of_its_names_is_left_alone_under_all() -> None:
    model = nn.ModuleDict({"reader": ReadsInForward()})
    model["alias"] = model["reader"].read
    lod.decompose(model)
    assert model["alias"] is model["reader"].read
    assert low_rank_names(model) == ["reader.called"]


class ReadsRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(D, D)
        self.fc = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0]) + self.rnn.weight_hh_l0.square().mean()


class ReadsAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, 2)
        self.fc = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q = F.linear(x, self.attn.in_proj_weight[:D], self.attn.in_proj_bias[:D])
        return self.fc(q)


class ReadsOutput(ReadsAttention):
    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.attn(x, x, x)
        return self.fc(x) + self.attn.out_proj.weight.norm()


@pytest.mark.parametrize("make", [ReadsRecurrent, ReadsAttention, ReadsOutput])
def test_layers_with_several_weights_that_are_read_are_left_alone(
    make: Callable[[], nn.Module],
) -> None:
    model, x = make(), torch.randn(4, 2, D)
    expected = model(x)
    lod.decompose(model)
    torch.testing.assert_close(model(x), expected, **CLOSE)
    assert low_rank_names(model) == ["fc"]
    (reason,) = lod.survey(model).left_alone.values()
    assert f"{make.__name__} reads its weight" in reason


# -- adapters ----------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A wrapper that adds a trained part to a frozen layer, and can merge it into the layer."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base_layer.out_features, bias=False)})

    def delta(self) -> Tensor:
        return self.lora_B["default"].weight @ self.lora_A["default"].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class DirectAdapter(Adapter):
    def merge(self) -> None:
        self.base_layer.weight.data += self.delta()


class IndirectAdapter(Adapter):
    """Like PEFT's: it reaches its layer through a method."""

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    @property
    def weight(self) -> Tensor:
        return self.get_base_layer().weight

    def merge(self) -> None:
        base_layer = self.get_base_layer()
        base_layer.weight.data += self.delta()


@pytest.mark.parametrize("make", [DirectAdapter, IndirectAdapter])
def test_layers_wrapped_by_an_adapter_are_left_alone(make: type[Adapter]) -> None:
    model = nn.ModuleDict({"wrapped": make(nn.Linear(12, 12)), "free": nn.Linear(12, 12)})
    reasons = lod.survey(model).left_alone
    assert make.__name__ in reasons["wrapped.base_layer"]
    lod.decompose(model)
    assert type(model["wrapped"].base_layer) is nn.Linear
    assert "free" in low_rank_names(model)
    x = torch.randn(3, 12)
    expected = model["wrapped"](x)
    model["wrapped"].merge()  # would be lost on a weight that is composed anew at each reading
    torch.testing.assert_close(model["wrapped"].base_layer(x), expected, **CLOSE)


class Tree(nn.Module):
    """A model with a first stage that happens to be called as PEFT calls what it adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Sequential(nn.Linear(12, 12), nn.ReLU())
        self.level = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.level(self.base_layer(x))


def test_a_part_that_happens_to_be_called_base_layer_is_no_adapter() -> None:
    assert low_rank_names(lod.decompose(Tree())) == ["base_layer.0", "level"]


# -- layers handed to others -------------------------------------------------------------------


class ReadsArgument(nn.Module):
    """An output head that is handed the embedding whose weight it uses, as Perceiver's is."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor, table: nn.Embedding) -> Tensor:
        return x @ table.weight.t() + self.bias


class CallsArgument(nn.Module):
    def forward(self, x: Tensor, table: nn.Embedding) -> Tensor:
        return x * table(torch.zeros((), dtype=torch.long))


class HandsOver(nn.Module):
    def __init__(self, head: nn.Module, *, by_name: bool) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"table": nn.Embedding(12, D)})
        self.parts = TwoLayers()
        self.parts.table = nn.Embedding(12, D)
        self.head, self.by_name = head, by_name

    def forward(self, ids: Tensor) -> Tensor:
        x = self.parts(self.parts.table(ids))
        if self.by_name:
            return self.head(x, table=self.parts.table)
        return self.head(x, self.parts.table)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("make", [ReadsArgument, CallsArgument])
def test_a_layer_handed_to_code_that_reads_its_weight_is_left_alone(
    make: Callable[[], nn.Module], by_name: bool
) -> None:
    model, ids = HandsOver(make(), by_name=by_name), torch.randint(0, 12, (3, 4))
    expected = model(ids)
    lod.decompose(model, skip="inner")
    read = make is ReadsArgument
    assert ("parts.table" in low_rank_names(model)) is not read
    if read:
        reason = lod.survey(model).left_alone["parts.table"]
        assert reason == "the code of ReadsArgument reads its weight"
    torch.testing.assert_close(model(ids), expected, **CLOSE)
    assert lod.extract(model, ranks=2)(ids).shape == expected.shape


# -- lazy layers and subclasses ----------------------------------------------------------------

LAZY: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.LazyLinear(D),
    "conv": lambda: nn.LazyConv1d(D, 3),
    "transposed conv": lambda: nn.LazyConvTranspose2d(D, 3),
}


@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY.keys())
def test_lazy_layers_are_left_alone_until_their_shape_is_known(
    make: Callable[[], nn.Module],
) -> None:
    model = nn.ModuleDict({"lazy": make(), "plain": nn.Linear(D, D)})
    reason = "lazy: its shape is not known before the first forward"
    assert lod.survey(model).left_alone == {"lazy": reason}
    lod.decompose(model)
    assert low_rank_names(model) == ["plain"]
    model["lazy"](torch.randn(2, D, 5, 5) if "Transpose" in str(model) else torch.randn(2, D, D))
    lod.decompose(model)
    assert low_rank_names(model) == ["lazy", "plain"]


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class OwnEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


class OwnConv(nn.Conv1d):
    def _conv_forward(self, *args: Any) -> Tensor:
        return super()._conv_forward(*args).relu()


class OwnLoading(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


class OwnMethod(nn.Linear):
    def merged(self) -> Tensor:
        return self.weight


class OwnGRU(nn.GRU):
    def forward(self, *args: Any) -> Any:
        return super().forward(*args)


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args: Any) -> Any:
        return super().forward(*args)


SUBCLASSES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "linear": (lambda: OwnLinear(D, D), "Linear, whose forward may differ"),
    "embedding": (lambda: OwnEmbedding(D, D), "Embedding, whose forward may differ"),
    "conv": (lambda: OwnConv(D, D, 3), "Conv1d, whose _conv_forward may matter"),
    "loading": (lambda: OwnLoading(D, D), "Linear, whose _load_from_state_dict may matter"),
    "method": (lambda: OwnMethod(D, D), "Linear, whose merged may matter"),
    "gru": (lambda: OwnGRU(D, D), "GRU, whose forward may differ"),
    "attention": (lambda: OwnAttention(D, 2), "MultiheadAttention, whose forward may differ"),
}


@pytest.mark.parametrize(("make", "reason"), SUBCLASSES.values(), ids=SUBCLASSES.keys())
def test_subclasses_that_may_do_something_else_are_left_alone(
    make: Callable[[], nn.Module], reason: str
) -> None:
    model = nn.ModuleDict({"own": make(), "plain": nn.Linear(D, D)})
    own = model["own"]
    assert lod.survey(model).left_alone["own"] == f"a subclass of {reason}"
    lod.decompose(model)
    assert model["own"] is own and low_rank_names(model) == ["plain"]
    assert not [m for m in own.modules() if isinstance(m, LowRank)]


class FixedConv(nn.Conv3d):
    """As torchvision's video models have them: only made in another way."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, (1, 3, 3), padding=(0, 1, 1), bias=False)
        self.width = width

    @staticmethod
    def downsampling(stride: int) -> tuple[int, int, int]:
        return 1, stride, stride


class NamedLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)

    def extra_repr(self) -> str:
        return "of this model"


class SmallGRU(nn.GRU):
    def __init__(self) -> None:
        super().__init__(D, D)


class SmallAttention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(D, 2)


HARMLESS: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], Callable[[], Any]]] = {
    "conv": (lambda: FixedConv(D), nn.Conv3d, lambda: (torch.randn(2, D, 3, 5, 5),)),
    "linear": (NamedLinear, nn.Linear, lambda: (torch.randn(3, D),)),
    "gru": (SmallGRU, nn.GRU, lambda: (torch.randn(4, 2, D),)),
    "attention": (SmallAttention, nn.MultiheadAttention, lambda: (torch.randn(4, 2, D),) * 3),
}


@pytest.mark.parametrize(("make", "base", "inputs"), HARMLESS.values(), ids=HARMLESS.keys())
def test_subclasses_that_only_are_made_differently_are_decomposed(
    make: Callable[[], nn.Module], base: type[nn.Module], inputs: Callable[[], Any], tmp_path: Path
) -> None:
    def outputs(model: nn.ModuleDict) -> Tensor:
        found = model["own"](*given)
        return found[0] if isinstance(found, tuple) else found

    model, given = nn.ModuleDict({"own": make()}), inputs()
    expected = outputs(model)
    assert not lod.survey(model).left_alone
    lod.decompose(model)
    torch.testing.assert_close(outputs(model), expected, **CLOSE)
    lod.save(model, tmp_path / "model.safetensors")
    loaded = lod.load(tmp_path / "model.safetensors", into=nn.ModuleDict({"own": make()}))
    torch.testing.assert_close(outputs(loaded), outputs(model), rtol=0, atol=0)
    plain = lod.extract(model)
    assert type(plain["own"]) is base
    torch.testing.assert_close(outputs(plain), expected, **CLOSE)
    save_plain(plain, tmp_path / "plain.safetensors")
    if base not in (nn.GRU, nn.MultiheadAttention):  # these keep their own type, or its base
        again = lod.load(tmp_path / "plain.safetensors", into=nn.ModuleDict({"own": make()}))
        torch.testing.assert_close(outputs(again), outputs(plain), rtol=0, atol=0)


class GeometricLinear(nn.Module):
    """A linear layer as torch_geometric has it, which is not torch's."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = nn.parameter.UninitializedParameter()
        if in_channels > 0:
            self.weight = nn.Parameter(torch.randn(out_channels, in_channels))
        self.bias = nn.Parameter(torch.randn(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def test_linear_layers_of_torch_geometric_are_decomposed() -> None:
    linear = type("Linear", (GeometricLinear,), {"__module__": "torch_geometric.nn.dense.linear"})
    model, x = nn.Sequential(linear(8, 12)), torch.randn(3, 8)
    expected = model(x)
    lod.decompose(model)
    assert low_rank_names(model) == ["0"] and model[0].in_channels == 8
    torch.testing.assert_close(model(x), expected, **CLOSE)
    small = lod.extract(model, ranks=2)
    assert [type(layer) for layer in small[0]] == [nn.Linear, nn.Linear]
    assert small[0].in_channels == 8
    lazy = nn.Sequential(linear(-1, 12))
    assert lod.survey(lazy).left_alone["0"].startswith("lazy")


class HeldElsewhere(TwoLayers):
    """Calls a layer through something that torch does not look into."""

    def __init__(self, hold: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.held = hold(self.read)


HOLDERS: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda layer: [layer],
    "partial": lambda layer: functools.partial(layer),
    "argument": lambda layer: functools.partial(map, layer),
    "bound method": lambda layer: layer.forward,
    "namespace": lambda layer: types.SimpleNamespace(layer=layer),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_layer_that_is_held_elsewhere_too_is_left_alone(hold: Callable[[nn.Module], Any]) -> None:
    model = HeldElsewhere(hold)
    assert "also held by held" in lod.survey(model).left_alone["read"]
    assert low_rank_names(lod.decompose(model)) == ["called"]


def test_only_whole_words_say_that_a_method_does_not_run() -> None:
    class Properties(TwoLayers):
        def properties(self) -> Tensor:  # contains "tie"
            return self.read.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.called(x @ self.properties())

    model, x = Properties(), torch.randn(3, D)
    expected = model(x)
    assert low_rank_names(lod.decompose(model)) == ["called"]
    torch.testing.assert_close(model(x), expected, **CLOSE)


def test_a_dtype_that_cannot_be_factored_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).to(torch.float8_e4m3fn))
    assert "float8" in lod.survey(model).left_alone["1"]
    assert low_rank_names(lod.decompose(model)) == ["0"]
