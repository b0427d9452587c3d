"""From a recipe to its parts: the right ones, the same ones each time, one's own ones too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import maestro_lod as lod
from maestro_lod.cli.data import Data
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.cli.recipe import Recipe, checked, load_recipe, recipe_names
from maestro_lod.cli.setup import (
    Setup,
    data_of,
    dense_model_of,
    loss_of,
    model_of,
    user_function_names,
)
from maestro_lod.cli.user_code import UserCodeError
from maestro_lod.errors import OptionError
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.dense import Dense
from maestro_lod.train.evaluate import CrossEntropy

SMALL = ["data.limit=40", "batch=8"]

PARTS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from maestro_lod.cli.data import Data

def model(width=8): return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
def sized(classes): return nn.Linear(4, classes)
def loss(output, target): return ((output - target) ** 2).mean()

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, a, b): return self.layer(a + b)

class NoLength:
    def __iter__(self): yield torch.ones(2, 4), torch.zeros(2)

class Stream(IterableDataset):
    def __iter__(self): yield torch.ones(4), 0

class Broken(list):
    def __iter__(self): raise KeyError("row 7")

def pairs(batch, n=3, form=None):
    x, y = torch.randn(n, batch, 4), torch.randint(0, 3, (n, batch))
    wrap = {None: lambda a: a, "tuple": lambda a: (a, a), "list": lambda a: [a, a],
            "mapping": lambda a: {"a": a, "b": a}}[form]
    return [(wrap(a), b) for a, b in zip(x, y)]

def mapping(batch, **options): return {"train": pairs(batch, **options)}
def loader(batch):
    rows = TensorDataset(torch.randn(20, 4), torch.randint(0, 3, (20,)))
    load = DataLoader(rows, batch_size=batch, shuffle=True)
    return {"train": load, "validation": load, "test": load}
def whole(batch):
    return Data(pairs(batch), None, None, torch.zeros(1, 4), 5, "mine")
def rows(batch): return {"train": DataLoader(TensorDataset(torch.ones(9, 4)), batch)}
def stream(batch): return {"train": DataLoader(Stream(), batch)}
def no_length(batch): return {"train": NoLength()}
def generator(batch): return {"train": [], "validation": iter(pairs(batch))}
def empty(batch): return {"train": []}
def empty_data(batch): return Data([], None, None, torch.zeros(1, 4), 5, "mine")
def unknown(batch): return {"train": pairs(batch), "tests": []}
def listed(batch): return pairs(batch)
def broken(batch): return {"train": Broken([1])}
def fails(): raise ZeroDivisionError("by my code")
def number(): return 3
number_in_module = 3
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of one's own in the working directory."""
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "syntax.py").write_text("def model(:\n")
    (tmp_path / "needs.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name in ("parts", "syntax", "needs"):
        sys.modules.pop(name, None)


def digits(*changes: str) -> Recipe:
    return load_recipe("digits", [*SMALL, *changes])


def own(model: Any = "parts:model", data: Any = "parts:mapping", **settings: Any) -> Recipe:
    return checked({"model": model, "data": data, "epochs": 1, "batch": 8} | settings, "here")


# -- built-in parts ------------------------------------------------------------------------------


def test_same_recipe_makes_the_same_parts() -> None:
    torch.manual_seed(5)
    one = Setup.of(digits("penalty=1e-4"))
    torch.manual_seed(6)
    other = Setup.of(digits("penalty=1e-4"))
    for (name, a), b in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert isinstance(one.method, lod.LoD) and isinstance(other.method, lod.LoD)
    assert [one.method.sampler.sample() for _ in range(9)] == [
        other.method.sampler.sample() for _ in range(9)
    ]
    assert not torch.equal(one.model.fc1.bias, Setup.of(digits("seed=1")).model.fc1.bias)


def test_settings_reach_the_training() -> None:
    train = Setup.of(
        digits("penalty=0.5", "threshold=0.25", "sampling=several", "proximal=true", "min_rank=2",
               "full_pass=true", "distill=true")
    ).method  # fmt: skip
    assert isinstance(train, lod.LoD)
    assert (train.penalty, train.threshold, train.min_rank) == (0.5, 0.25, 2)
    assert train.proximal and train.full_pass and train.distill
    assert train.sampler.strategy == "several"
    assert train.ledger.dense_macs == 281_640
    kept = Setup.of(digits("penalty=0.5", "shrink=false")).method
    assert isinstance(kept, lod.LoD) and kept.threshold is None


def test_decomposition_is_as_asked() -> None:
    recipe = digits("decompose={only: [fc*], skip: [fc3], ranks: {fc1: 7, fc2: 0.5}}")
    ranks = lod.ranks(model_of(recipe, data_of(recipe)))
    assert ranks == {"fc1": 7, "fc2": 42}
    dense = Setup.of(digits("method=dense"))
    assert isinstance(dense.method, Dense) and not low_rank_layers(dense.model)


def test_memory_layout_is_as_asked() -> None:
    setup = Setup.of(digits("channels_last=true", "method=dense"))
    assert setup.model.conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert not Setup.of(digits("method=dense")).model.conv2.weight.is_contiguous(
        memory_format=torch.channels_last
    )


def test_threads_are_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    Setup.of(digits("threads=3"))
    Setup.of(digits())
    assert asked == [3]


@pytest.mark.parametrize(
    ("change", "kind", "expected"),
    [
        ("optimizer={name: sgd, lr: 0.5, momentum: 0.1, nesterov: true}", torch.optim.SGD,
         {"lr": 0.5, "momentum": 0.1, "nesterov": True, "weight_decay": 0.0}),
        ("optimizer={name: adam, lr: 0.5, betas: [0.1, 0.2], eps: 0.3}", torch.optim.Adam,
         {"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.3}),
        ("optimizer={name: adamw, weight_decay: 0.25}", torch.optim.AdamW,
         {"lr": 1e-3, "weight_decay": 0.25}),
    ],
)  # fmt: skip
def test_optimizer_is_as_asked(change: str, kind: type, expected: dict[str, Any]) -> None:
    setup = Setup.of(digits(change))
    assert type(setup.optimizer) is kind
    (group,) = setup.optimizer.param_groups
    assert {key: group[key] for key in expected} == expected
    assert len(group["params"]) == len(list(setup.model.parameters()))


def test_biases_and_norms_can_be_left_out_of_the_decay() -> None:
    setup = Setup.of(digits("optimizer={name: sgd, weight_decay: 0.1, decay_norms: false}"))
    decayed, others = setup.optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim > 1 for p in decayed["params"])
    assert [p.ndim for p in others["params"]] == [1] * 5


def test_schedules_count_optimizer_steps() -> None:
    assert Setup.of(digits("schedule={name: constant}")).schedule is None
    recipe = digits("schedule={name: milestones, epochs: [1, 2], factor: 0.5}", "accumulate=2")
    falls = Setup.of(recipe).schedule  # 36 samples are 5 batches, 3 steps
    assert falls is not None
    assert [falls(step) for step in (0, 2, 3, 5, 6)] == [1, 1, 0.5, 0.5, 0.25]
    warms = Setup.of(digits("schedule={name: vaswani, warmup: 4}")).schedule
    assert warms is not None
    assert [warms(0), warms(3), warms(15)] == [0.25, 1, 0.5]


def test_loss_is_as_asked(parts: None) -> None:
    recipe = digits("label_smoothing=0.25", "reduction=sum")
    assert Setup.of(recipe).loss == loss_of(recipe) == CrossEntropy(0.25, "sum")
    mine = Setup.of(digits("loss=parts:loss")).loss
    assert mine is loss_of(digits("loss=parts:loss"))
    assert mine(torch.ones(2), torch.zeros(2)) == 1
    with pytest.raises(
        OptionError, match=r"loss 'cross-entropy' is unknown\. Did you mean 'cross_entropy'"
    ):
        Setup.of(digits("loss=cross-entropy"))


@pytest.mark.parametrize("name", recipe_names())
def test_models_of_all_recipes_can_be_decomposed(name: str) -> None:
    recipe = load_recipe(name)
    data = Data([], None, None, None, 10, "")
    with torch.device("meta"):  # no memory, no arithmetic
        model = dense_model_of(recipe, data)
    chosen = recipe.decompose
    options: dict[str, Any] = {"only": chosen.only, "skip": chosen.skip or None}
    survey = lod.survey(model, **options, ranks=chosen.ranks, tied=chosen.tied)
    assert len(survey.ranks) >= 3
    assert all(rank > 0 for rank in survey.ranks.values())


def test_model_is_sized_for_the_data() -> None:
    data = Data([], None, None, None, 7, "")
    model = dense_model_of(digits(), data)
    assert isinstance(model, LeNet) and model.fc3.out_features == 7
    model = dense_model_of(digits("model.options.classes=12"), data)
    assert isinstance(model, LeNet) and model.fc3.out_features == 12


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "meta"])
def test_devices_that_are_not_here_are_refused(device: str) -> None:
    with pytest.raises(OptionError, match=f"device='{device}' cannot be used here"):
        Setup.of(digits(f"device={device}"))


def test_wrong_options_of_built_in_parts_are_refused() -> None:
    with pytest.raises(
        OptionError, match=r"model 'lenett' is unknown\. Did you mean 'lenet'\? .*own as"
    ):
        Setup.of(digits("model=lenett"))
    with pytest.raises(OptionError, match=r"takes no 'clases'\. Did you mean 'classes'\?"):
        Setup.of(digits("model.options.clases=3"))
    with pytest.raises(
        OptionError, match=r"model 'lenet' failed: TypeError: .*must be tuple of int"
    ):
        Setup.of(digits("model.options.classes=many"))
    with pytest.raises(
        OptionError, match=r"data\.options contains batch, limit, which every dataset has"
    ):
        Setup.of(digits("data.options={limit: 3, batch: 3}"))


@pytest.mark.parametrize(
    "goal", ["penalty=0", "budget.params=10%", "budget.macs=9", "method=dense"]
)
def test_a_model_that_does_not_fit_the_data_is_found(
    goal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = {"flat": lambda width=5: nn.Linear(width, width)}
    monkeypatch.setattr("maestro_lod.cli.setup.MODELS", flat)
    with pytest.raises(
        OptionError, match=r"model 'flat' cannot run on data 'digits' \(input 1×1×28×28\): Run"
    ):
        Setup.of(digits("model=flat", goal))


# -- one's own -----------------------------------------------------------------------------------


def test_own_names() -> None:
    assert user_function_names(load_recipe("digits")) == []
    recipe = load_recipe("digits", ["model=a.b:c", "data=d:e", "loss=f:g"])
    assert user_function_names(recipe) == ["a.b:c", "d:e", "f:g"]


def test_own_parts_with_options(parts: None) -> None:
    setup = Setup.of(
        own(
            model={"name": "parts:model", "options": {"width": 16}},
            data={"name": "parts:mapping", "options": {"n": 5}},
        )
    )
    assert lod.ranks(setup.model) == {"0": 4, "2": 3}
    assert len(setup.data.train) == 5
    assert (setup.data.validation, setup.data.test) == (None, None)
    assert setup.data.example.shape == (1, 4)
    assert setup.data.note == "parts:mapping"


def test_own_data_are_drawn_with_the_seed_of_the_recipe(parts: None) -> None:
    def first(**settings: Any) -> torch.Tensor:
        batch: torch.Tensor = next(iter(data_of(own(**settings)).train))[0]
        return batch

    assert torch.equal(first(), first())
    assert not torch.equal(first(), first(seed=1))


def test_own_data_of_every_form(parts: None) -> None:
    setup = Setup.of(own(data="parts:loader"))
    assert len(setup.data.train) == 3
    assert setup.data.validation is setup.data.test is setup.data.train
    for form, kind in (("tuple", tuple), ("list", tuple), ("mapping", dict)):
        data = {"name": "parts:mapping", "options": {"form": form}}
        example = Setup.of(own(model="parts:Pair", data=data)).data.example
        assert type(example) is kind and len(example) == 2


def test_own_data_can_say_all_there_is(parts: None) -> None:
    setup = Setup.of(own(model="parts:sized", data="parts:whole", method="dense"))
    assert (setup.data.classes, setup.data.note) == (5, "mine")
    assert setup.model.out_features == 5


def test_own_module_may_be_in_a_package(parts: None, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "net.py").write_text("from parts import model as build\n")
    assert lod.ranks(Setup.of(own(model="deep.er.net:build")).model) == {"0": 4, "2": 3}
    for name in ("deep", "deep.er", "deep.er.net"):
        sys.modules.pop(name)


WRONG: dict[str, tuple[Callable[[], Recipe], str]] = {
    "no module": (lambda: own("nowhere:model"), "cannot import 'nowhere' \\(No module named"),
    "missing package": (lambda: own("needs:model"), "cannot import 'needs' .*that_is_not_there"),
    "no function": (lambda: own("parts:modle"), "no function 'modle'. Did you mean 'model'?"),
    "not callable": (lambda: own("parts:number_in_module"), "no function 'number_in_module'"),
    "no name": (lambda: own("parts:"), "must be written as package.module:function"),
    "no path": (lambda: own(":model"), "must be written as package.module:function"),
    "relative": (lambda: own(".parts:model"), "must be written as package.module:function"),
    "no model": (lambda: own("parts:number"), "returned an int. Return a torch.nn.Module"),
    "no signature": (lambda: own("builtins:dict"), "cannot be called: no signature"),
    "wrong option": (
        lambda: own({"name": "parts:model", "options": {"widht": 3}}),
        "takes no 'widht'. Did you mean 'width'\\? It takes: width",
    ),
    "missing option": (lambda: own("parts:sized"), "missing a required argument: 'classes'"),
    "no batch": (lambda: own(data="parts:number"), "data 'parts:number' takes no 'batch'"),
    "list": (lambda: own(data="parts:listed"), "returned a list. Return a Data, or a mapping"),
    "splits": (lambda: own(data="parts:unknown"), "returned unknown splits: tests"),
    "generator": (lambda: own(data="parts:generator"), "'validation' is a list_iterator, used up"),
    "empty": (lambda: own(data="parts:empty"), "'train' has no batch"),
    "empty data": (lambda: own(data="parts:empty_data"), "'train' has no batch"),
    "no pairs": (lambda: own(data="parts:rows"), "'train' yields a list. Yield pairs"),
    "no length": (lambda: own(data="parts:no_length"), "'train' has no length"),
    "stream": (lambda: own(data="parts:stream"), "'train' has no length"),
    "directory": (
        lambda: own(data={"name": "parts:mapping", "directory": "x"}),
        "data.directory is for built-in data. .*set data.options.directory",
    ),
    "limit": (
        lambda: own(data={"name": "parts:mapping", "limit": 3}), "data.limit is for built-in data",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_own_parts_that_cannot_be_used_are_refused(parts: None, case: str) -> None:
    recipe, message = WRONG[case]
    with pytest.raises(OptionError, match=message):
        Setup.of(recipe())


def test_what_own_code_raises_is_kept(parts: None) -> None:
    with pytest.raises(
        UserCodeError, match=r"model 'parts:fails' failed: ZeroDiv.*: by my"
    ) as error:
        Setup.of(own("parts:fails"))
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(UserCodeError, match="model 'syntax:model' cannot be imported: SyntaxError"):
        Setup.of(own("syntax:model"))
    with pytest.raises(UserCodeError, match=r"'train' yields no batch: KeyError: 'row 7'"):
        Setup.of(own(data="parts:broken"))
    with pytest.raises(UserCodeError, match=r"model 'lenet' cannot run on data 'parts:mapping'"):
        Setup.of(own("lenet"))


def test_rehearsal_changes_nothing(parts: None) -> None:
    setup = Setup.of(own())
    assert setup.model.training
    assert all(p.grad is None for p in setup.model.parameters())
