"""Surgery keeps what a model computes, says what it does, and refuses without a trace."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import maestro_lod as lod
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.errors import LayerError, MaestroError, OptionError, RankError
from maestro_lod.layers import LowRank, LowRankConv, LowRankLinear
from maestro_lod.layers.pivoted import PivotedForm, PivotedInputs

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def small_net() -> nn.Sequential:
    """Every situation of a real network in small: convolutions, norm, depthwise, linear."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),  # depthwise: no rank can save anything
        nn.Conv2d(8, 12, 3, stride=2, groups=2),
        nn.ConvTranspose2d(12, 4, 2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


X = (2, 3, 8, 8)
NAMES = ["0", "4", "5", "7"]
FULL = {"0": 8, "4": 6, "5": 12, "7": 10}


def three_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 4))


class Named(nn.Module):
    """Dotted names, for patterns."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.body = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in "ab"])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).mean((2, 3))
        for block in self.body:
            x = block(x)
        return self.head(x)


NAMED = ["stem", "body.0.0", "body.0.1", "body.1.0", "body.1.1", "head"]


def low_rank_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, LowRank)]


def quietly(make: Callable[[], Any]) -> Any:
    """Call something that torch has deprecated but that users' models still contain."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


# -- decompose ---------------------------------------------------------------------------------


def test_decompose_works_in_place_and_keeps_outputs() -> None:
    model, x = small_net().eval(), torch.randn(X)
    expected = model(x)
    norm, bias = model[1], model[7].bias
    assert lod.decompose(model) is model
    assert low_rank_names(model) == NAMES
    assert lod.ranks(model) == FULL
    assert model[1] is norm and model[7].bias is bias
    assert not any(module.training for module in model.modules())
    torch.testing.assert_close(model(x), expected, **CLOSE)


def test_a_bare_layer_is_returned_decomposed(sample: tuple[nn.Module, Tensor]) -> None:
    dense, x = sample
    layer = lod.decompose(dense)
    assert isinstance(layer, LowRank)
    assert low_rank_names(layer) == [""]
    torch.testing.assert_close(layer(x), dense(x), **CLOSE)


def test_decomposing_twice_keeps_the_low_rank_layers() -> None:
    model = lod.decompose(small_net(), ranks=3)
    layers = {name: model.get_submodule(name) for name in NAMES}
    lod.decompose(model)
    assert low_rank_names(model) == NAMES
    assert all(model.get_submodule(name) is layer for name, layer in layers.items())
    assert lod.ranks(model) == dict.fromkeys(NAMES, 3)


def test_a_second_call_decomposes_what_the_first_left_dense() -> None:
    model = three_linears()
    lod.decompose(model, only="0", ranks=2)
    lod.decompose(model, only="2", ranks=3)
    assert lod.ranks(model) == {"0": 2, "2": 3}


def calls(work: Callable[[nn.Module], Any], model: nn.Module) -> int:
    """Count the calls of Python functions, steps of generators included."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # finalizers of other objects would be counted too
    sys.setprofile(seen)
    try:
        work(model)
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def test_twice_as_many_layers_are_twice_as_much_work() -> None:
    models = [nn.Sequential(*[nn.Linear(4, 4) for _ in range(n)]) for n in (3, 40, 80, 120)]
    surgery: list[Callable[[nn.Module], Any]] = [
        lod.survey,
        lambda m: lod.decompose(m, ranks=1),
        lod.extract,
        lod.fuse,
    ]
    for work in surgery:
        _, small, middle, large = [calls(work, model) for model in models]
        assert large - middle == pytest.approx(middle - small, rel=0.01)


def test_surgery_does_not_touch_global_randomness() -> None:
    model = small_net()
    state = torch.get_rng_state()
    lod.extract(lod.decompose(model), 0.5)
    lod.fuse(model)
    assert torch.equal(state, torch.get_rng_state())


# -- which layers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, NAMED),
        ({"only": "head"}, ["head"]),
        ({"only": ["head", "stem"]}, ["stem", "head"]),
        ({"only": "body"}, NAMED[1:5]),  # a module that contains layers
        ({"only": "body.1"}, NAMED[3:5]),
        ({"only": "body.*.0"}, ["body.0.0", "body.1.0"]),
        ({"only": "*.1"}, ["body.0.1", "body.1.0", "body.1.1"]),  # body.1, and what ends in .1
        ({"only": "body.[01].1"}, ["body.0.1", "body.1.1"]),
        ({"skip": ["head", "stem"]}, NAMED[1:5]),
        ({"skip": "body*"}, ["stem", "head"]),
        ({"skip": []}, NAMED),
        ({"only": "body", "skip": "body.0"}, NAMED[3:5]),
        ({"only": lambda name, module: isinstance(module, nn.Conv2d)}, ["stem"]),
        ({"skip": lambda name, module: name.endswith("0")}, NAMED[:1] + NAMED[2:3] + NAMED[4:]),
        ({"skip": lambda name, module: False}, NAMED),
        ({"only": ("head",)}, ["head"]),
        ({"only": (name for name in ["head"])}, ["head"]),
    ],
)
def test_patterns_and_predicates_choose_layers(
    options: dict[str, Any], expected: list[str]
) -> None:
    assert low_rank_names(lod.decompose(Named(), **options)) == expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (3, [3, 3, 3]),
        (5, [5, 5, 4]),  # one value for all is cut to what each layer can have
        ({"*": 0}, [0, 0, 0]),  # for all by a number it is refused
        (0.5, [3, 3, 2]),
        (0.01, [1, 1, 1]),  # a share keeps at least one rank
        (0.999, [6, 6, 4]),
        ({"0": 2, "1": 0.5}, [2, 3, 4]),
        ({"[01]": 2}, [2, 2, 4]),
        ({"*": 3, "1": 5}, [3, 5, 3]),  # an exact name wins over a pattern
        ({"1": 5, "*": 3}, [3, 5, 3]),
        ({}, [6, 6, 4]),
        (None, [6, 6, 4]),
    ],
    ids=str,
)
def test_ranks_come_as_numbers_ratios_mappings_and_patterns(
    ranks: lod.layers.ranks.Ranks | None, expected: list[int]
) -> None:
    model = lod.decompose(three_linears(), ranks=ranks)
    assert list(lod.ranks(model).values()) == expected
    assert [layer.v.shape[0] for layer in model] == expected


# -- bad input ---------------------------------------------------------------------------------


def with_weight(value: float) -> nn.Module:
    model = three_linears()
    with torch.no_grad():
        model[1].weight[2, 3] = value
    return model


BAD_CALLS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = {
    "no layer": (lambda: nn.Sequential(nn.ReLU()), {}, ["Sequential", "no weight matrix"]),
    "no usable layer": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4)),
        {},
        ["0: no rank saves anything (1×9 per group)"],
    ),
    "pattern": (
        three_linears,
        {"only": "fc"},
        ["only pattern 'fc' matches no layer", "0, 1, 2"],
    ),
    "near pattern": (Named, {"skip": ["head", "stme"]}, ["skip", "'stme'", "Did you mean 'stem'"]),
    "one of several patterns": (Named, {"only": ["head", "layer5.*"]}, ["'layer5.*'", "stem"]),
    "predicate": (three_linears, {"only": lambda *_: False}, ["not matched by only"]),
    "everything skipped": (three_linears, {"skip": "*"}, ["matched by skip (*)"]),
    "unknown layer": (Named, {"ranks": {"haed": 2}}, ["'haed'", "Did you mean 'head'"]),
    "rank pattern": (Named, {"ranks": {"layer5.*": 2}}, ["'layer5.*'", "stem, body.0.0"]),
    "rank of a skipped layer": (
        Named,
        {"skip": "head", "ranks": {"head": 2}},
        ["'head'", "stays dense", "matched by skip"],
    ),
    "negative rank": (three_linears, {"ranks": -1}, ["rank -1", "negative"]),
    "negative rank by name": (three_linears, {"ranks": {"1": -2}}, ["rank -2 for 1", "0 to 6"]),
    "rank above full": (three_linears, {"ranks": {"2": 5}}, ["rank 5 for 2", "4"]),
    "ratio of one": (three_linears, {"ranks": 1.0}, ["rank 1.0", "(0, 1)"]),
    "ratio of zero": (three_linears, {"ranks": {"0": 0.0}}, ["rank 0.0 for 0", "(0, 1)"]),
    "ratio above one": (three_linears, {"ranks": {"*": 1.5}}, ["rank 1.5", "(0, 1)"]),
    "NaN ratio": (three_linears, {"ranks": float("nan")}, ["rank nan", "(0, 1)"]),
    "bool": (three_linears, {"ranks": True}, ["rank True"]),
    "text": (three_linears, {"ranks": {"0": "3"}}, ["rank '3' for 0"]),
    "none": (three_linears, {"ranks": {"0": None}}, ["rank None for 0"]),
    "list of ranks": (three_linears, {"ranks": [3, 3, 3]}, ["[3, 3, 3]"]),
    "number as layer name": (three_linears, {"ranks": {0: 3}}, ["0"]),
    "number as pattern": (three_linears, {"only": [0]}, ["only", "0"]),
    "number for patterns": (three_linears, {"skip": 1}, ["skip", "1"]),
    "NaN weight": (lambda: with_weight(float("nan")), {}, ["1 has NaN or infinite", "skip"]),
    "infinite weight": (lambda: with_weight(-float("inf")), {}, ["1 has NaN or infinite", "skip"]),
    "meta device": (lambda: three_linears().to("meta"), {}, ["0 is on the meta device", "skip"]),
}


@pytest.mark.parametrize(("make", "options", "words"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_input_is_refused_by_name_and_changes_nothing(
    make: Callable[[], nn.Module],
    options: dict[str, Any],
    words: list[str],
    snapshot: Callable[[nn.Module], Any],
) -> None:
    model = make()
    before = snapshot(model)
    with pytest.raises(MaestroError) as caught:
        lod.decompose(model, **options)
    for word in words:
        assert word in str(caught.value)
    before.assert_unchanged(model)


def test_every_problem_is_collected_before_the_error() -> None:
    model = with_weight(float("nan"))
    with torch.no_grad():
        model[2].weight.fill_(float("inf"))
    with pytest.raises(LayerError, match=r"1 has NaN.*; 2 has NaN"):
        lod.decompose(model)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [({"nope": 3}, "'nope'"), ({"0": 3}, "'0'.*low-rank already"), (-1, "-1"), (1.5, "1.5")],
)
def test_bad_ranks_are_refused_on_a_decomposed_model_too(ranks: object, words: str) -> None:
    model = lod.decompose(three_linears())
    with pytest.raises(MaestroError, match=words):
        lod.decompose(model, ranks=ranks)


def test_a_quantized_model_is_refused() -> None:
    model = quietly(lambda: torch.ao.quantization.quantize_dynamic(three_linears(), {nn.Linear}))
    with pytest.raises(LayerError, match="0: quantized"):
        lod.decompose(model)


@pytest.mark.parametrize("function", [lod.extract, lod.fuse])
def test_a_dense_model_cannot_be_fused_or_extracted(
    function: Callable[[nn.Module], nn.Module],
) -> None:
    with pytest.raises(LayerError, match=r"no low-rank layer.*decompose"):
        function(three_linears())


@pytest.mark.parametrize("function", [lod.extract, lod.fuse])
@pytest.mark.parametrize("by", ["latency", None, 3])
def test_deciding_by_something_unknown_is_refused(
    function: Callable[..., nn.Module], by: Any, snapshot: Callable[[nn.Module], Any]
) -> None:
    model = lod.decompose(three_linears())
    before = snapshot(model)
    with pytest.raises(OptionError, match=rf"by={by!r}.*'params' or 'macs'.*by=lod.latency"):
        function(model, by=by)
    before.assert_unchanged(model)


def test_forms_are_as_a_mapping_says_and_it_has_to_say_all() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), ranks=2)
    x = torch.randn(3, 8)
    plain = lod.extract(model, by={"0": "dense", "1": "factored"})
    assert [type(layer) for layer in plain] == [nn.Linear, nn.Sequential]
    torch.testing.assert_close(plain(x), model(x))
    for forms in ({"0": "dense"}, {"0": "dense", "1": "small"}):
        with pytest.raises(OptionError, match="lacks a form for 1"):
            lod.extract(model, by=forms)


@pytest.mark.parametrize(
    ("ranks", "error", "words"),
    [
        ({"9": 1}, LayerError, "'9'"),
        ({"0": 4}, RankError, "rank 4 for 0 .* 3"),
        ({"0": -1}, RankError, "rank -1 for 0"),
        (-1, RankError, "rank -1"),
        (2.0, RankError, r"2\.0"),
    ],
)
def test_extract_refuses_ranks_that_are_not_there(
    ranks: Any, error: type[Exception], words: str, snapshot: Callable[[nn.Module], Any]
) -> None:
    model = lod.decompose(three_linears(), ranks=3)
    before = snapshot(model)
    with pytest.raises(error, match=words):
        lod.extract(model, ranks)
    before.assert_unchanged(model)


# -- what is left alone ------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def replaced_forward() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.forward = lambda x: x
    return layer


def hooked_weight() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.weight.register_hook(lambda grad: grad)
    return layer


def hooked_accumulation() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return layer


def extra_parameter() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.scale = nn.Parameter(torch.ones(6))
    return layer


def with_submodule() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.add_module("activation", nn.Tanh())
    return layer


def with_rank() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.rank, layer.trainable = 3, False  # of a process, say
    return layer


def with_state_hook() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.register_load_state_dict_pre_hook(lambda *_: None)
    return layer


def quantized_linear() -> nn.Module:
    return quietly(
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 6)), {nn.Linear})
    )[0]


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(6, 6), "weight", 0.5)


def lora_like() -> nn.Module:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "parametrized": (lora_like, "parametrized"),
    "new weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 6)), "parametrized"),
    "old weight norm": (lambda: quietly(lambda: weight_norm(nn.Linear(6, 6))), "hook"),
    "spectral norm": (lambda: spectral_norm(nn.Linear(6, 6)), "hook"),
    "pruned": (pruned, "hook"),
    "lazy": (lambda: nn.LazyLinear(6), "lazy"),
    "subclass": (lambda: Doubled(6, 6), "a subclass of Linear"),
    "quantized": (quantized_linear, "quantized"),
    "replaced forward": (replaced_forward, "forward was replaced"),
    "hook on the weight": (hooked_weight, "tensor hooks"),
    "hook on accumulation": (hooked_accumulation, "tensor hooks"),
    "further parameters": (extra_parameter, "further parameters (scale)"),
    "submodule": (with_submodule, "a submodule (activation)"),
    "our name": (with_rank, "would hide its attribute rank, trainable"),
    "hook of its state": (with_state_hook, "hooks of its state dict"),
    "one output": (lambda: nn.Linear(6, 1), "no rank saves anything (1×6)"),
    "complex": (lambda: nn.Linear(6, 6, dtype=torch.complex64), "complex64"),
    "depthwise": (
        lambda: nn.Conv1d(6, 6, 3, groups=6),
        "no rank saves anything (1×3 per group)",
    ),
    "embedding": (
        lambda: nn.Embedding(6, 6, max_norm=1.0),
        "max_norm=1.0 acts on rows of a dense weight",
    ),
    "bag": (lambda: nn.EmbeddingBag(6, 6), "EmbeddingBag is not a supported kind"),
}


@pytest.mark.parametrize(("make", "words"), LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_what_cannot_be_decomposed_is_left_alone_with_the_reason(
    make: Callable[[], nn.Module], words: str
) -> None:
    special = make()
    model = nn.ModuleDict({"plain": nn.Linear(6, 6), "special": special})
    expected = lod.survey(model).left_alone
    lod.decompose(model)
    assert model["special"] is special
    assert low_rank_names(model) == ["plain"]
    assert words in lod.survey(model).left_alone["special"]
    assert lod.survey(model).left_alone == expected
    with pytest.raises(LayerError, match=r"'special'.*stays dense"):
        lod.decompose(nn.ModuleDict({"special": make()}), ranks={"special": 2})


RUNNABLE = [
    "parametrized", "new weight norm", "old weight norm", "spectral norm", "pruned", "subclass",
    "quantized", "further parameters", "hook on the weight",
]  # fmt: skip


@pytest.mark.parametrize("kind", RUNNABLE)
@pytest.mark.parametrize("after_forward", [False, True], ids=["fresh", "after a forward"])
def test_models_with_layers_left_alone_can_be_extracted(kind: str, after_forward: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), LEFT_ALONE[kind][0]()).eval()
    lod.decompose(model)
    x = torch.randn(3, 6)
    if after_forward:
        model(x)
    plain = lod.extract(model)
    torch.testing.assert_close(plain(x), model(x), **CLOSE)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("old weight norm", "weight_g"),
        ("spectral norm", "weight_orig"),
        ("pruned", "weight_orig"),
        ("new weight norm", "parametrizations.weight.original0"),
    ],
)
def test_hooks_that_compute_weights_go_on_working_in_the_extract(kind: str, name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), LEFT_ALONE[kind][0]()).eval()
    plain = lod.extract(lod.decompose(model))
    x = torch.randn(3, 6)
    before = plain(x).detach()
    parameter = plain[1].get_parameter(name)
    with torch.no_grad():
        parameter.copy_(torch.randn_like(parameter))
    assert not torch.allclose(plain(x), before)
    plain(x).sum().backward()
    assert parameter.grad is not None and parameter.grad.any()


# -- ties and other references -----------------------------------------------------------------


class Tied(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), self.a])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.a(x)))


def test_tied_modules_stay_tied_through_decompose_fuse_and_extract() -> None:
    model, x = Tied(), torch.randn(3, 6)
    expected = model(x)
    lod.decompose(model)
    assert isinstance(model.a, LowRank) and model.a is model.blocks[1]
    torch.testing.assert_close(model(x), expected, **CLOSE)
    plain = lod.extract(model)
    assert plain.a is plain.blocks[1] and plain.a is not model.a
    torch.testing.assert_close(plain(x), expected, **CLOSE)
    factored = lod.extract(model, {"a": 2})
    assert type(factored.a) is nn.Sequential and factored.a is factored.blocks[1]
    lod.fuse(model)
    assert type(model.a) is nn.Linear and model.a is model.blocks[1]
    torch.testing.assert_close(model(x), expected, **CLOSE)


class TiedParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_parameters_are_left_alone_with_the_names_of_both() -> None:
    model = lod.decompose(TiedParameters())
    assert low_rank_names(model) == ["inner"]
    assert model.head.weight is model.embedding.weight
    reason = lod.survey(model).left_alone["head"]
    assert reason == "its weight is tied (embedding.weight = head.weight)"


@pytest.mark.parametrize("share", ["parameter", "memory", "transposed view"])
def test_weights_that_share_memory_count_as_tied(share: str) -> None:
    model = three_linears()
    if share == "parameter":
        model[1].weight = model[0].weight
    elif share == "memory":
        model[1].weight = nn.Parameter(model[0].weight.data[:, :6])
    else:
        model[1].weight = nn.Parameter(model[0].weight.data.t()[:6])
    lod.decompose(model)
    assert low_rank_names(model) == ["2"]
    assert "tied (0.weight = 1.weight)" in lod.survey(model).left_alone["0"]


def test_tied_parameters_of_a_meta_model_are_seen() -> None:
    with torch.device("meta"):
        model = TiedParameters()
    assert set(lod.survey(model).left_alone) == {"embedding", "head"}


def test_a_shared_bias_stays_shared() -> None:
    model = three_linears()
    model[1].bias = model[0].bias
    lod.decompose(model)
    assert model[0].bias is model[1].bias
    plain = lod.extract(model, {"0": 1})
    assert plain[0][1].bias is plain[1].bias and plain[1].bias is not model[1].bias
    lod.fuse(model)
    assert model[0].bias is model[1].bias
    model[0].bias.data.add_(1.0)


def loop(layer: nn.Module) -> list[Any]:
    held: list[Any] = [layer]
    held.append(held)
    return held


class Holder(nn.Module):
    """Holds one of its layers a second time, where torch does not see it."""

    def __init__(self, hold: Callable[[nn.Module, nn.Module], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.free = nn.Linear(6, 6)
        hold(self, self.inner)


HOLDS: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "list": lambda model, layer: setattr(model, "extra", [layer]),
    "tuple": lambda model, layer: setattr(model, "extra", (layer, layer)),
    "dict": lambda model, layer: setattr(model, "extra", {"it": layer}),
    "nested list": lambda model, layer: setattr(model, "extra", [[layer]]),
    "dict of lists": lambda model, layer: setattr(model, "extra", {"it": [layer]}),
    "plain attribute": lambda model, layer: object.__setattr__(model, "extra", layer),
    "its parameters": lambda model, layer: setattr(model, "extra", list(layer.parameters())),
    "its weight": lambda model, layer: setattr(model, "extra", {"w": (layer.weight, 1)}),
    "a container of itself": lambda model, layer: model.__dict__.update(extra=loop(layer)),
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS.keys())
def test_a_layer_that_is_also_held_elsewhere_is_left_alone(
    hold: Callable[[nn.Module, nn.Module], None],
) -> None:
    model = lod.decompose(Holder(hold))
    assert low_rank_names(model) == ["free"]
    assert "extra" in lod.survey(model).left_alone["inner"]


# -- hooks and attributes ----------------------------------------------------------------------


def hook_everything(layer: nn.Module, calls: list[str]) -> list[Any]:
    """Register every kind of hook that a forward and backward runs."""
    return [
        layer.register_forward_pre_hook(lambda m, args: calls.append("pre")),
        layer.register_forward_pre_hook(
            lambda m, args, kwargs: calls.append("pre with kwargs"), with_kwargs=True
        ),
        layer.register_forward_hook(lambda m, args, output: calls.append("post")),
        layer.register_forward_hook(
            lambda m, args, kwargs, output: calls.append("post with kwargs"), with_kwargs=True
        ),
        layer.register_full_backward_pre_hook(lambda m, grad: calls.append("backward pre")),
        layer.register_full_backward_hook(lambda m, inputs, outputs: calls.append("backward")),
    ]


ALL_CALLS = ["pre", "pre with kwargs", "post", "post with kwargs", "backward pre", "backward"]


def run(model: nn.Module, calls: list[str]) -> list[str]:
    calls.clear()
    model(torch.randn(3, 8, requires_grad=True)).sum().backward()
    return list(calls)


def test_hooks_are_kept_by_decompose_and_fuse_and_left_out_by_extract() -> None:
    model, calls = three_linears(), []
    handles = hook_everything(model[0], calls)
    lod.decompose(model)
    assert run(model, calls) == ALL_CALLS
    assert run(lod.extract(model), calls) == []
    assert run(model, calls) == ALL_CALLS, "extract took the hooks from the model"
    lod.fuse(model)
    assert type(model[0]) is nn.Linear
    assert run(model, calls) == ALL_CALLS
    for handle in handles:  # the handles that the user got still work
        handle.remove()
    assert run(model, calls) == []


def test_hooks_of_the_model_itself_are_left_out_of_the_extract() -> None:
    model, calls = three_linears(), []
    model.register_forward_hook(lambda *_: calls.append("outer"))
    model.register_state_dict_post_hook(lambda *_: None)
    model.register_load_state_dict_post_hook(lambda *_: None)
    model.register_load_state_dict_pre_hook(lambda *_: None)
    lod.decompose(model)
    assert run(model, calls) == ["outer"]
    plain = lod.extract(model)
    assert run(plain, calls) == []
    pickle.dumps(plain)  # local functions cannot be pickled, so none is left


def test_a_hook_that_changes_the_output_still_does() -> None:
    model = three_linears()
    model[0].register_forward_hook(lambda m, args, output: 2 * output)
    x = torch.randn(3, 8)
    expected = model(x)
    torch.testing.assert_close(lod.decompose(model)(x), expected, **CLOSE)


# -- fuse and extract --------------------------------------------------------------------------


def test_extract_of_decompose_is_the_model_itself() -> None:
    model, x = small_net().eval(), torch.randn(X)
    plain = lod.extract(lod.decompose(copy.deepcopy(model)))
    assert [type(m) for m in plain] == [type(m) for m in model]
    assert str(plain) == str(model)
    torch.testing.assert_close(plain(x), model(x), **CLOSE)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(plain.state_dict()[name], tensor, **CLOSE)


@pytest.mark.parametrize("ranks", [None, 0, 1, 2, 5, 0.5, {"0": 0, "7": 3}, {"?": 4}], ids=str)
def test_extract_equals_at_ranks(ranks: Any) -> None:
    model, x = lod.decompose(small_net()).eval(), torch.randn(X)
    with lod.at_ranks(model, {} if ranks is None else ranks):
        expected = model(x)
    torch.testing.assert_close(lod.extract(model, ranks)(x), expected, **CLOSE)


@pytest.mark.parametrize("rank", [0, 1, 3, None])
def test_fuse_and_extract_keep_the_outputs_of_every_kind(
    sample: tuple[nn.Module, Tensor], rank: int | None
) -> None:
    dense, x = sample
    layer = lod.decompose(dense)
    with lod.at_ranks(layer, {} if rank is None else {"": rank}):
        expected = layer(x)
    torch.testing.assert_close(
        lod.extract(layer, None if rank is None else rank)(x), expected, **CLOSE
    )
    stored = lod.decompose(copy.deepcopy(dense), ranks=None if rank is None else {"": rank})
    cheaper = stored.rank > stored.break_even
    fused = lod.fuse(stored)
    assert (fused is not stored) is cheaper
    torch.testing.assert_close(fused(x), expected, **CLOSE)


@pytest.mark.parametrize("by", ["params", "macs"])
def test_fuse_makes_dense_what_is_cheaper_dense_and_nothing_else(by: str) -> None:
    model = lod.decompose(small_net(), ranks={"0": 4, "4": 6, "5": 2, "7": 10}).eval()
    x = torch.randn(X)
    expected = model(x)
    kept = model[5]
    assert lod.fuse(model, by=by) is model
    kinds = [type(model.get_submodule(name)) for name in NAMES]
    # 8·27 < 4·35? no. 2 groups of 6×36 at rank 6: 216 < 252. 16×12 at rank 2: no. 640 < 740.
    assert kinds == [LowRankConv, nn.Conv2d, type(kept), nn.Linear]
    assert model[5] is kept
    torch.testing.assert_close(model(x), expected, **CLOSE)


class Fixed:
    """A measurement that names the layers that are better dense, and notes what it was asked."""

    def __init__(self, *dense: str) -> None:
        self.dense = dense
        self.asked: dict[str, int] = {}

    def choose(self, name: str, rank: int) -> str:
        self.asked[name] = rank
        return "dense" if name in self.dense else "factored"


@pytest.mark.parametrize("dense", [(), ("0",), ("4", "7"), NAMES])
def test_fuse_and_extract_do_what_a_measurement_says(dense: tuple[str, ...]) -> None:
    model, x = lod.decompose(small_net()).eval(), torch.randn(X)
    chosen = {"0": 8, "4": 3, "5": 12, "7": 1}  # some above break-even, some below
    by = Fixed(*dense)
    plain = lod.extract(model, {"4": 3, "7": 1}, by=by)
    assert by.asked == chosen
    pairs = [name for name in NAMES if isinstance(plain.get_submodule(name), nn.Sequential)]
    assert pairs == [name for name in NAMES if name not in dense]
    with lod.at_ranks(model, chosen):
        torch.testing.assert_close(plain(x), model(x), **CLOSE)
    expected = model(x)
    fused = lod.fuse(model, by=by)
    assert by.asked == FULL
    assert low_rank_names(fused) == pairs
    torch.testing.assert_close(fused(x), expected, **CLOSE)


@pytest.mark.parametrize("by", ["params", "macs", Fixed()])
def test_what_has_no_factored_form_becomes_dense_whatever_is_said(by: Any) -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose1d(8, 8, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x, output_size=[21])

    model, x = lod.decompose(Up(), ranks=2).eval(), torch.randn(2, 8, 9)
    expected = model(x)
    plain = lod.extract(model, by=by)
    assert type(plain.up) is nn.ConvTranspose1d
    torch.testing.assert_close(plain(x), expected, **CLOSE)


def test_extract_by_macs_makes_look_ups_dense() -> None:
    model = lod.decompose(nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16)), ranks=2)
    kinds = {by: [type(m) for m in lod.extract(model, by=by)] for by in ("params", "macs")}
    assert kinds == {
        "params": [nn.Sequential, nn.Sequential],
        "macs": [nn.Embedding, PivotedInputs],
    }


def test_fuse_leaves_a_tie_factored() -> None:
    model = lod.decompose(nn.Linear(12, 12), ranks=6)  # 144 = 6 · 24
    assert lod.fuse(model) is model


def test_extract_leaves_the_model_untouched_and_shares_no_memory(
    snapshot: Callable[[nn.Module], Any],
) -> None:
    model = lod.decompose(small_net(), ranks=0.5)
    before = snapshot(model)
    plain = lod.extract(model)
    with torch.no_grad():
        for tensor in (*plain.parameters(), *plain.buffers()):
            tensor.fill_(7)
    before.assert_unchanged(model)


def test_extract_is_made_of_torch_modules_alone_and_trains() -> None:
    model = lod.decompose(small_net(), ranks=0.5)
    plain = lod.extract(model, {"0": 0})
    for module in plain.modules():
        if not isinstance(module, PivotedForm):
            assert type(module).__module__.startswith("torch.nn.modules"), type(module)
        assert not any("maestro" in str(value) for value in vars(module).values())
    assert plain.training is model.training is True
    plain(torch.randn(X)).sum().backward()
    assert all(p.grad is not None for p in plain.parameters())


def test_extract_ignores_what_is_active_for_the_moment() -> None:
    model = lod.decompose(three_linears())
    with lod.at_ranks(model, 1):
        plain = lod.extract(model)
    x = torch.randn(3, 8)
    torch.testing.assert_close(plain(x), model(x), **CLOSE)


RUN_ALONE = """
import sys
sys.modules["maestro_lod"] = None  # any import of it fails
import torch
path = sys.argv[1]
plain, x, expected = torch.load(path, weights_only=False)
assert not [name for name in sys.modules if name.startswith("maestro_lod.")]
torch.testing.assert_close(plain(x), expected)
"""


@pytest.mark.slow
def test_the_extract_runs_and_unpickles_without_this_library(tmp_path: Path) -> None:
    model = lod.decompose(
        nn.Sequential(small_net(), nn.Unflatten(1, (5, 2)), nn.ConvTranspose1d(5, 6, 3, 2)),
        ranks={"0.0": 2, "0.4": 0, "0.5": 3},
    )
    plain, x = lod.extract(model).eval(), torch.randn(X)
    torch.save((plain, x, plain(x).detach()), tmp_path / "plain.pt")
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALONE, str(tmp_path / "plain.pt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- survey ------------------------------------------------------------------------------------


SURVEY_BEFORE = """\
layer  kind             weight    rank  saves up to
───────────────────────────────────────────────────────────────────────────────────────────
0      Conv2d           8×3×3×3    8/8            6  can be decomposed
3      Conv2d           8×1×3×3                      no rank saves anything (1×9 per group)
4      Conv2d           12×4×3×3                     matched by skip (4)
5      ConvTranspose2d  12×4×2×2  6/12            6  can be decomposed
7      Linear           10×64     5/10            8  can be decomposed"""

SURVEY_AFTER = """\
layer  kind             weight    rank  saves up to
─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
0      Conv2d           8×3×3×3    8/8            6  low-rank
3      Conv2d           8×1×3×3                      no rank saves anything (1×9 per group)
4      Conv2d           12×4×3×3   6/6            5  can be decomposed; hardly faster, as \
groups of few channels are slow
5      ConvTranspose2d  12×4×2×2  6/12            6  low-rank
7      Linear           10×64     5/10            8  low-rank"""


def test_a_survey_prints_what_will_be_and_what_was_done(
    snapshot: Callable[[nn.Module], Any],
) -> None:
    model = small_net()
    before = snapshot(model)
    choice: dict[str, Any] = {"skip": "4", "ranks": {"5": 0.5, "7": 5}}
    assert str(lod.survey(model, **choice)) == SURVEY_BEFORE
    before.assert_unchanged(model)
    lod.decompose(model, **choice)
    assert str(lod.survey(model)) == SURVEY_AFTER


def test_a_survey_is_data() -> None:
    plan = lod.survey(small_net(), skip="4", ranks={"5": 0.5, "7": 5})
    assert plan.ranks == {"0": 8, "5": 6, "7": 5}
    assert plan.left_alone == {
        "3": "no rank saves anything (1×9 per group)",
        "4": "matched by skip (4)",
    }
    rows = {row["name"]: row for row in json.loads(json.dumps(plan.to_dict()))["layers"]}
    assert rows["5"] == {
        "name": "5", "kind": "ConvTranspose2d", "shape": [12, 4, 2, 2], "full_rank": 12, "rank": 6,
        "low_rank": False, "left_alone": "", "break_even": 6, "slow": "",
    }  # fmt: skip
    with pytest.raises(AttributeError):
        plan.layers = ()


@pytest.mark.parametrize(
    "options",
    [{}, {"skip": "0"}, {"only": ["5", "7"]}, {"ranks": 2}, {"ranks": {"7": 0.3}, "skip": "5"}],
    ids=str,
)
def test_decompose_does_what_the_survey_says(options: dict[str, Any]) -> None:
    model = small_net()
    plan = lod.survey(model, **options)
    assert lod.ranks(lod.decompose(model, **options)) == plan.ranks


def test_a_survey_says_what_is_not_faster_at_any_rank() -> None:
    model = nn.ModuleDict(
        {
            "read": nn.LSTM(8, 16),
            "words": nn.Embedding(50, 8),
            "whole": nn.Conv2d(8, 8, 3),
            "groups": nn.Conv2d(16, 16, 3, groups=2),
        }
    )
    found = {row.name: row.slow for row in lod.survey(model).layers}
    assert found.pop("whole") == ""
    assert all(found.values()), found
    assert {row.name: row.slow for row in lod.survey(lod.decompose(model)).layers} == {
        **found, "whole": ""
    }  # fmt: skip


def test_a_survey_of_a_bare_layer_names_the_model_itself() -> None:
    text = str(lod.survey(nn.Linear(4, 4)))
    assert "(the model itself)  Linear  4×4      4/4            2  can be decomposed" in text


def test_a_survey_lists_a_layer_that_is_left_alone_once() -> None:
    model = nn.Sequential(nn.Linear(6, 6), quantized_linear(), lora_like())
    assert [row.name for row in lod.survey(model).layers] == ["0", "1", "2"]


# -- other models ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("grad", [True, False])
def test_transformer_encoders_work_unchanged(mode: str, grad: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).train(mode == "train")
    x, padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [4], [3]])
    seen = ~padding

    def outputs() -> Tensor:
        with torch.set_grad_enabled(grad):
            return quietly(lambda: model(x, src_key_padding_mask=padding))[seen]

    expected = outputs()
    lod.decompose(model)
    parts = (
        "self_attn.q",
        "self_attn.k",
        "self_attn.v",
        "self_attn.out_proj",
        "linear1",
        "linear2",
    )
    assert low_rank_names(model) == [f"layers.{i}.{part}" for i in (0, 1) for part in parts]
    torch.testing.assert_close(outputs(), expected, **CLOSE)
    with lod.at_ranks(model, 2):
        truncated = outputs()
    assert not torch.allclose(truncated, expected, **CLOSE)


def test_half_precision_models_decompose() -> None:
    model = lod.decompose(LeNet().to(torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert isinstance(model.fc1, LowRankLinear)
    assert model(torch.randn(2, 1, 28, 28, dtype=torch.bfloat16)).isfinite().all()


def test_fuse_is_refused_while_fewer_ranks_run(snapshot: Callable[[nn.Module], Any]) -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    lod.set_ranks(model, {"1": 3})
    before = snapshot(model)
    with pytest.raises(MaestroError, match=r"fuse uses the stored ranks, but 1 run"):
        lod.fuse(model)
    before.assert_unchanged(model)
    lod.set_ranks(model, None)
    lod.fuse(model)


class Scaled(nn.Module):
    """Reads something that it has put on a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.fc.gain = [0.5]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.fc.gain[0]


@pytest.mark.parametrize("rank", [2, 8])
def test_what_a_user_put_on_a_layer_stays_with_it(rank: int) -> None:
    model = lod.decompose(Scaled(), ranks=rank)
    x = torch.randn(2, 8)
    expected = model(x)
    plain = lod.extract(model)
    torch.testing.assert_close(plain(x), expected)
    assert plain.fc.gain is not model.fc.gain
    torch.testing.assert_close(lod.fuse(model)(x), expected)


def test_compiled_models_have_the_names_that_users_know() -> None:
    x = torch.randn(2, 8)
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), backend="eager")
    expected = model(x)
    assert lod.decompose(model, only="0") is model
    assert lod.ranks(model) == {"0": 8}
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert [row.name for row in lod.survey(model).layers] == ["0", "1"]
    assert [row.name for row in lod.summary(model, x).layers] == ["0", "1"]
    assert type(lod.extract(model, {"0": 2})) is nn.Sequential
    with lod.at_ranks(model, ranks={"0": 2}):
        assert model.get_submodule("_orig_mod.0").active_rank == 2
    assert lod.fuse(model) is model
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [None, "model", nn.Linear])
def test_what_is_no_model_is_refused(wrong: Any) -> None:
    with pytest.raises(MaestroError, match=r"a model is an nn\.Module, not a"):
        lod.decompose(wrong)


def test_a_name_with_brackets_is_a_pattern_for_itself() -> None:
    model = nn.Sequential()
    model.add_module("a[0]", nn.Linear(4, 4))
    model.add_module("b", nn.Linear(4, 4))
    assert lod.ranks(lod.decompose(model, only="a[0]")) == {"a[0]": 4}


class Counting(nn.Module):
    """Layers of every replaced kind, each with something of the user's that hooks work on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.embedding = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        for layer in self.marked():
            layer.register_buffer("calls", torch.zeros(()))
            layer.register_buffer("last", torch.zeros(()), persistent=False)
            layer.register_forward_hook(self.count)
            layer.label = ["mine"]

    @staticmethod
    def count(layer: nn.Module, *_: Any) -> None:
        layer.calls.add_(1)

    def marked(self) -> list[nn.Module]:
        return [self.linear, self.attention, self.recurrent, self.embedding, self.head]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.linear(self.embedding(ids))
        x = self.recurrent(self.attention(x, x, x)[0])[0]
        return self.head(x) * len(self.head.label) + 0 * self.head.in_features


@pytest.mark.parametrize("rank", [1, 6, 8])
def test_buffers_and_attributes_of_a_user_stay_with_layers_of_every_kind(
    rank: int, tmp_path: Path
) -> None:
    ids = torch.randint(12, (2, 3))
    model = lod.decompose(Counting(), tied="share", ranks=rank)
    expected = model(ids)
    assert [float(layer.calls) for layer in model.marked()] == [1.0] * 5
    assert {key for key in model.state_dict() if key.endswith("last")} == set()
    assert len([key for key in model.state_dict() if key.endswith("calls")]) == 5

    plain = lod.extract(model)
    torch.testing.assert_close(plain(ids), expected)
    assert [float(layer.calls) for layer in plain.marked()] == [1.0] * 5
    assert all(layer.label == ["mine"] for layer in plain.marked())

    lod.save(model, tmp_path / "model.safetensors")
    loaded = lod.load(tmp_path / "model.safetensors", into=Counting())
    torch.testing.assert_close(loaded(ids), expected)
    assert [float(layer.calls) for layer in loaded.marked()] == [2.0] * 5

    torch.testing.assert_close(lod.fuse(model)(ids), expected)
    assert [float(layer.calls) for layer in model.marked()] == [2.0] * 5
    assert all(layer.label == ["mine"] for layer in model.marked())


class Forwarding(nn.Module):
    """Answers for the model inside, as wrappers do, and has a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8))
        self.inner = torch.compile(inner, backend="eager")
        self.head = nn.Linear(8, 8)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def test_a_wrapper_that_answers_for_a_compiled_model_is_a_model_itself(tmp_path: Path) -> None:
    model, x = Forwarding(), torch.randn(2, 16)
    expected = model(x)
    assert "head" in lod.ranks(lod.decompose(model))
    torch.testing.assert_close(model(x), expected, **CLOSE)
    torch.testing.assert_close(lod.extract(model)(x), expected, **CLOSE)
    lod.save(model, tmp_path / "model.safetensors")
    loaded = lod.load(tmp_path / "model.safetensors", into=Forwarding())
    torch.testing.assert_close(loaded(x), expected, **CLOSE)


class Remembering(nn.Module):
    """Keeps activations in a list, as models whose features are looked at do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.seen: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.seen = {"hidden": [hidden]}
        return self.second(hidden)


def test_models_that_keep_activations_can_be_copied(tmp_path: Path) -> None:
    model, x = lod.decompose(Remembering()), torch.randn(2, 8)
    expected = model(x)
    torch.testing.assert_close(lod.extract(model)(x), expected, **CLOSE)
    assert lod.summary(model, x).params
    lod.save(model, tmp_path / "model.safetensors")
    torch.testing.assert_close(lod.load(tmp_path / "model.safetensors", into=model)(x), expected)


def test_a_model_that_cannot_be_copied_is_refused_by_name() -> None:
    model = lod.decompose(Remembering())
    model.lock = threading.Lock()
    with pytest.raises(LayerError, match=r"Remembering cannot be deep-copied.*lock.*__deepcopy__"):
        lod.extract(model)


def test_a_layer_that_was_compiled_by_itself_is_not_fused() -> None:
    model = lod.decompose(three_linears())
    model[1] = torch.compile(model[1], backend="eager")
    with pytest.raises(LayerError, match="1 was compiled separately"):
        lod.fuse(model)
    model = lod.decompose(nn.Sequential(nn.MultiheadAttention(8, 2)))
    model[0] = torch.compile(model[0], backend="eager")
    with pytest.raises(LayerError, match="0 was compiled separately"):
        lod.fuse(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_parts_are_parts_like_others() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    model, x = nn.Sequential(nn.Linear(8, 8), scripted), torch.randn(2, 8)
    expected = model(x)
    assert lod.ranks(lod.decompose(model)) == {"0": 8}
    torch.testing.assert_close(lod.fuse(model)(x), expected, **CLOSE)
    with pytest.raises(MaestroError):
        lod.decompose(scripted)


def test_ranks_for_layers_that_are_low_rank_already_are_refused() -> None:
    model = lod.decompose(three_linears())
    for ranks in (2, {"*": 2}):
        with pytest.raises(LayerError, match=r"ranks=.*low-rank already, at another rank.*set_r"):
            lod.decompose(model, ranks=ranks)
    assert lod.survey(model, ranks=2).ranks == {"0": 6, "1": 6, "2": 4}
    assert lod.ranks(lod.decompose(model, ranks=6)) == {"0": 6, "1": 6, "2": 4}
    model = lod.decompose(three_linears(), only="0")
    with pytest.raises(LayerError, match=r"ranks=\{'0\*': 2\} names only layers that are low-rank"):
        lod.decompose(model, ranks={"0*": 2, "1": 3})
    assert lod.ranks(lod.decompose(model, ranks=2)) == {"0": 6, "1": 2, "2": 2}


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 6), lambda: nn.Embedding(9, 6)])
def test_a_layer_that_has_lost_all_ranks_is_not_frozen_by_that(make: Any) -> None:
    model = lod.decompose(nn.Sequential(make()), ranks={"0": 0})
    assert not model[0].u.requires_grad  # optimizers cannot take empty parameters
    assert all(p.requires_grad for p in lod.extract(model).parameters())
    assert all(p.requires_grad for p in model[0].dense().parameters())
    model.add_module("other", nn.Linear(6, 6))
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in lod.extract(model).parameters())


def test_models_that_were_made_in_inference_mode_can_change_their_ranks() -> None:
    with torch.inference_mode():
        model = lod.decompose(three_linears())
    lod.set_ranks(model, 2)
    assert model[0].active_rank == 2


def test_a_tied_weight_that_is_also_in_a_list_is_left_alone_for_that_reason() -> None:
    model = TiedHead()
    model.no_decay = [model.embedding.weight]
    reasons = lod.survey(model, tied="share").left_alone
    assert "also in no_decay" in reasons["embedding"]
    del model.no_decay
    assert lod.ranks(lod.decompose(model, tied="share")) == {"embedding": 8}


def test_a_list_of_biases_is_in_nobodys_way() -> None:
    """Biases stay the Parameters that they were, so what holds them stays right."""
    model = three_linears()
    model.no_decay = [layer.bias for layer in model]
    assert lod.ranks(lod.decompose(model)).keys() == {"0", "1", "2"}
    assert all(kept is layer.bias for kept, layer in zip(model.no_decay, model, strict=True))


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight


class Logging(nn.Module):
    """Layers that keep what they saw, in a list that the model reads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.linear = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)
        self.log: list[int] = []
        self.shared = torch.zeros(())
        for layer in (self.attention, self.linear):
            layer.log = self.log
            layer.register_buffer("shared", self.shared)
            layer.register_forward_hook(self.note)

    @staticmethod
    def note(layer: nn.Module, _: Any, output: Any) -> None:
        layer.last = output[0]
        layer.log.append(1)

    def forward(self, x: Tensor) -> Tensor:
        self.attention.log.append(2)
        return self.linear(self.attention(x, x, x)[0])


@pytest.mark.parametrize("rank", [1, 8])
def test_what_layers_share_is_shared_in_the_extract(rank: int) -> None:
    model, x = Logging(), torch.randn(3, 1, 8)
    model(x)
    lod.decompose(model, ranks=rank)
    model(x)
    plain = lod.extract(model)
    torch.testing.assert_close(plain(x), model(x), **CLOSE)
    assert plain.log is plain.attention.log is plain.linear.log
    assert plain.log is not model.log
    assert plain.attention.shared is plain.linear.shared is plain.shared
    assert not plain.linear.last.requires_grad
    model.linear.lock = threading.Lock()
    lod.extract(model)  # put there after decompose: not what the dense layer had


def test_a_layer_that_cannot_be_copied_is_refused_too() -> None:
    model = Logging()
    model.linear.lock = threading.Lock()
    lod.decompose(model)
    with pytest.raises(LayerError, match=r"Logging cannot be deep-copied.*lock"):
        lod.extract(model)
