"""Recipes: what is accepted means what it says, and what is refused says why in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from maestro_lod.cli.data import DATA
from maestro_lod.cli.recipe import (
    SGD,
    Adam,
    Constant,
    Milestones,
    Recipe,
    checked,
    dumped,
    load_recipe,
    recipe_names,
)
from maestro_lod.cli.registry import METHODS, MODELS
from maestro_lod.cli.settings_list import all_settings
from maestro_lod.errors import OptionError
from maestro_lod.train.dense import DenseSettings

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipes.md"
MINIMAL = {"model": "lenet", "data": "digits", "epochs": 2}


# -- those that come with the library ------------------------------------------------------------


def test_recipes_of_the_paper_are_there() -> None:
    assert {
        "digits", "lenet-mnist", "resnet18-cifar10", "resnet50-imagenet", "transformer-multi30k",
        "vgg19-cifar10",
    } <= {*recipe_names()}  # fmt: skip
    assert recipe_names() == sorted(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid_and_described(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.recipe == name
    assert recipe.description
    assert recipe.model.name in MODELS
    assert recipe.data.name in DATA
    as_in_the_paper = "as in the paper" in recipe.description
    assert (recipe.penalty > 0) == as_in_the_paper  # whose λ they keep
    sized = recipe.budget is not None or recipe.settings.elastic > 0  # the others train for sizes
    assert sized != as_in_the_paper


def test_a_penalty_takes_the_place_of_a_recipes_budget_and_the_other_way_round() -> None:
    for penalty in ("0", "1e-3"):
        recipe = load_recipe("digits", [f"penalty={penalty}"])
        assert (recipe.budget, recipe.penalty) == (None, float(penalty))
    recipe = load_recipe("lenet-mnist", ["budget.params=25%"])
    assert (recipe.budget.params, recipe.penalty) == (0.25, 0.0)


def test_a_limit_takes_the_place_of_a_recipes_limit_of_another_kind() -> None:
    budget = load_recipe("digits", ["budget.macs=50%"]).budget
    assert (budget.params, budget.macs) == (None, 0.5)
    budget = load_recipe("digits", ["budget.params=300k", "budget.macs=null"]).budget
    assert (budget.params, budget.macs) == (300_000, None)
    assert load_recipe("digits", ["budget.macs=null"]).budget.params == 0.25
    with pytest.raises(OptionError, match=r"budget: a budget needs either params or macs"):
        load_recipe("digits", ["budget.params=0.2", "budget.macs=0.5"])


def test_settings_of_the_paper() -> None:
    lenet = load_recipe("lenet-mnist")
    assert (lenet.epochs, lenet.batch, lenet.penalty) == (20, 64, 128e-5)
    assert lenet.optimizer == SGD(lr=0.01, momentum=0.9)
    for name, penalty in (("resnet18-cifar10", 64e-6), ("vgg19-cifar10", 32e-6)):
        recipe = load_recipe(name)
        assert (recipe.epochs, recipe.batch, recipe.penalty) == (300, 128, penalty)
        assert recipe.schedule == Milestones(name="milestones", epochs=[150, 250], factor=0.1)
    assert load_recipe("resnet50-imagenet").decompose.only == ["layer4"]
    transformer = load_recipe("transformer-multi30k")
    assert (transformer.reduction, transformer.label_smoothing, transformer.penalty) == (
        "sum", 0.1, 1.28,
    )  # fmt: skip


# -- reading and changing ------------------------------------------------------------------------


def test_names_stand_for_mappings_and_the_rest_has_defaults() -> None:
    recipe = checked(MINIMAL, "here")
    assert recipe == checked(
        {
            "model": {"name": "lenet"},
            "data": {"name": "digits", "options": {}},
            "epochs": 2,
            "optimizer": "sgd",
            "schedule": {"name": "constant"},
            "loss": "cross_entropy",
        },
        "here",
    )
    assert recipe.optimizer == SGD() and recipe.schedule == Constant()


def test_a_file_is_named_by_its_stem(tmp_path: Path) -> None:
    for suffix in ("yaml", "yml"):
        path = tmp_path / f"mine.{suffix}"
        path.write_text(yaml.safe_dump(MINIMAL))
        assert load_recipe(str(path)).recipe == "mine"
    path.write_text(yaml.safe_dump(MINIMAL | {"recipe": "other"}))
    assert load_recipe(str(path)).recipe == "other"


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ("epochs=3", "epochs", 3),
        (" epochs = 3 ", "epochs", 3),
        ("penalty=128e-5", "penalty", 128e-5),
        ("penalty=0", "penalty", 0.0),
        ("full_pass=true", "full_pass", True),
        ("clip_norm=null", "clip_norm", None),
        ("clip_norm=", "clip_norm", None),
        ("description=a = b", "description", "a = b"),
        ("model=mine.parts:build", "model.name", "mine.parts:build"),
        ("model.options.classes=7", "model.options", {"classes": 7}),
        ("data.limit=50", "data.limit", 50),
        ("data.directory=/a/b", "data.directory", Path("/a/b")),
        ("optimizer.lr=0.5", "optimizer.lr", 0.5),
        ("optimizer.momentum=0.5", "optimizer.lr", 0.02),
        ("decompose.only=[fc1, conv*]", "decompose.only", ["fc1", "conv*"]),
        ("decompose.ranks=0.5", "decompose.ranks", 0.5),
        ("decompose.ranks=4", "decompose.ranks", 4),
        ("decompose.ranks={fc1: 4, conv1: 0.5}", "decompose.ranks", {"fc1": 4, "conv1": 0.5}),
    ],
)
def test_changes(change: str, key: str, value: Any) -> None:
    found: Any = load_recipe("digits", [change])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_later_changes_win() -> None:
    assert load_recipe("digits", ["epochs=3", "epochs=4"]).epochs == 4


@pytest.mark.parametrize("name", ["optimizer=adam", "optimizer.name=adam"])
def test_a_name_may_come_after_its_settings(name: str) -> None:
    changes = ["optimizer.lr=0.5", name, "data.limit=7", "data=mnist"]
    recipe = load_recipe("digits", changes)
    assert recipe.optimizer == Adam(name="adam", lr=0.5)
    assert (recipe.data.name, recipe.data.limit) == ("mnist", 7)


def test_another_name_begins_with_its_own_defaults() -> None:
    for change in ("optimizer=adam", "optimizer.name=adam", "optimizer={name: adam}"):
        assert load_recipe("digits", [change]).optimizer == Adam(name="adam")
    changes = ["optimizer.name=adamw", "optimizer.lr=0.1"]
    assert load_recipe("digits", changes).optimizer == Adam(name="adamw", lr=0.1)
    assert load_recipe("digits", ["optimizer.name=sgd"]).optimizer.lr == 0.02  # nothing new
    changes = ["schedule=milestones", "schedule.epochs=[2]"]
    assert load_recipe("digits", changes).schedule == Milestones(name="milestones", epochs=[2])


def test_settings_of_a_section_that_the_file_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"decompose": None}))
    recipe = load_recipe(str(path), ["optimizer.lr=0.5", "decompose.skip=[fc3]"])
    assert recipe.optimizer == SGD(lr=0.5)
    assert recipe.decompose.skip == ["fc3"]


def test_dense_training_drops_what_the_recipe_says_for_low_rank(tmp_path: Path) -> None:
    dense = load_recipe("resnet50-imagenet", ["method=dense"])
    assert dense.method == "dense"
    assert not {"penalty", "decompose"} & {*yaml.safe_load(dumped(dense))}
    assert dense.optimizer == load_recipe("resnet50-imagenet").optimizer
    path = tmp_path / "mine.yaml"
    path.write_text(dumped(load_recipe("digits")))
    assert load_recipe(str(path), ["method=dense"]).settings == DenseSettings()
    path.write_text(dumped(dense))
    assert load_recipe(str(path)) == dense.model_copy()


# -- round trip ----------------------------------------------------------------------------------

CHANGES = {
    "epochs": st.integers(1, 1000),
    "seed": st.integers(0, 2**63 - 1),
    "penalty": st.floats(0, 10),
    "threshold": st.floats(0, 1, width=32),
    "description": st.text(max_size=20),
    "shrink": st.booleans(),
    "sampling": st.sampled_from(["pairs", "several"]),
    "clip_norm": st.none() | st.floats(1e-9, 1e9),
    "optimizer": st.sampled_from(["sgd", "adam"]) | st.fixed_dictionaries(
        {"name": st.just("adamw"), "betas": st.tuples(*[st.floats(0, 0.99)] * 2)}
    ),
    "decompose": st.fixed_dictionaries(
        {"ranks": st.none() | st.integers(1, 99) | st.dictionaries(st.text(), st.integers(0, 9))}
    ),
    "data": st.fixed_dictionaries(
        {"name": st.text(min_size=1), "options": st.dictionaries(st.text(), st.integers())}
    ),
}  # fmt: skip


@given(st.fixed_dictionaries({}, optional=CHANGES))
@example({"description": "\x85\u2028"})
def test_what_is_written_reads_back_the_same(changes: dict[str, Any]) -> None:
    recipe = checked(MINIMAL | changes, "here")
    assert checked(yaml.safe_load(dumped(recipe)), "there") == recipe


def test_written_recipes_are_readable() -> None:
    assert "λ 128e-5" in dumped(load_recipe("lenet-mnist"))


@pytest.mark.parametrize("name", recipe_names())
def test_written_recipes_load_from_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dumped(load_recipe(name)), encoding="utf-8")
    assert load_recipe(str(tmp_path / "config.yaml")) == load_recipe(name)


# -- refused -------------------------------------------------------------------------------------

REFUSED = {
    "epochs=x": 'epochs="x" must be a whole number.',
    "epochs=1.5": "epochs=1.5 must be a whole number.",
    "epochs=true": "epochs=true must be a whole number.",
    "epochs=": "epochs=null must be a whole number.",
    "epochs=0": "epochs=0 must be greater than or equal to 1.",
    "epochs.x=1": "'epochs' is one value and has no settings of its own.",
    "batch=-3": "batch=-3 must be greater than or equal to 1.",
    "seed=9223372036854775808": "must be less than 9223372036854775808.",
    "threads=5000": "threads=5000 must be less than or equal to 1024.",
    "penalty=abc": 'penalty="abc" must be a number.',
    "penalty=true": "penalty=true must be a number, not true or false.",
    "penalty=-1": "penalty=-1 must be greater than or equal to 0.",
    "penalty=.inf": "penalty=Infinity must be a finite number.",
    "shrink=1": "shrink=1 must be true or false.",
    "description=3": "description=3 must be text.",
    "method=Lod": "method=\"Lod\" is unknown. Did you mean 'lod'? Known: lod, dense, narrow,",
    "sampling=pair": "sampling=\"pair\" is unknown. Did you mean 'pairs'? Known: pairs, several.",
    "optimizer=adamm": "optimizer.name=\"adamm\" is unknown. Did you mean 'adam'? Known: sgd,",
    "optimizer=5": "optimizer=5 must be a name or a mapping of settings.",
    "optimizer.lrr=1": "there is no setting 'optimizer.lrr'. Did you mean 'lr'? Known: name, lr,",
    "optimizer.betas=[0.9, 0.99]": "there is no setting 'optimizer.betas'.",
    "optimizer={name: adam, betas: [1, 0]}": "optimizer.betas.0=1 must be less than 1.",
    "optimizer={name: sgd, momentum: 0, nesterov: true}": "optimizer: nesterov needs a momentum",
    "schedule=milestones": "'schedule.epochs' is missing.",
    "schedule={epochs: [3]}": "there is no setting 'schedule.epochs'. Known: name.",
    "model=3": "model=3 must be a mapping of settings.",
    "model={}": "'model.name' is missing.",
    "model.options=3": "model.options=3 must be a mapping.",
    "data.limt=3": "there is no setting 'data.limt'. Did you mean 'limit'?",
    "data.directory=3": "data.directory=3 must be a path.",
    "data.validation=1": "data.validation=1 must be less than 1.",
    "decompose=3": "decompose=3 must be a mapping of settings.",
    "decompose.only=fc1": 'decompose.only="fc1" must be a list.',
    "decompose.only=[1]": "decompose.only.0=1 must be text.",
    "decompose.ranks=0": "decompose.ranks=0 must be 1 or more",
    "decompose.ranks=true": "decompose.ranks=true must be a rank, or a share of the full rank",
    "decompose.ranks=1.5": "decompose.ranks=1.5 must be a rank, or a share of the full rank",
    "decompose.ranks={fc1: a}": "decompose.ranks: must be a rank, or a share of the full rank",
    "loss.options={}": "there is no setting 'loss.options'. Known: name.",
    "distill=true": "distill needs the full pass as its teacher. Set full_pass=true.",
    "epochs": "'epochs' is not a setting. Write key=value, such as budget.params=25%.",
    "=3": "'=3' is not a setting",
    ".=3": "'.=3' is not a setting",
    "epochs=[1": "the value in 'epochs=[1' is not valid YAML.",
    "description=2024-13-45": "the value in 'description=2024-13-45' is not valid YAML.",
}


@pytest.mark.parametrize("change", REFUSED)
def test_wrong_settings_are_refused_in_a_line(change: str) -> None:
    with pytest.raises(OptionError) as error:
        load_recipe("digits", [change])
    message = str(error.value)
    assert REFUSED[change] in message
    assert "\n" not in message and "pydantic" not in message


@pytest.mark.parametrize("key", Recipe.model_fields)
def test_a_slip_in_any_key_is_answered_with_the_key(key: str) -> None:
    with pytest.raises(OptionError, match=f"there is no setting '{key}x'. Did you mean '{key}'"):
        load_recipe("digits", [f"{key}x=1"])


def test_a_slip_comes_before_what_is_missing_for_it() -> None:
    with pytest.raises(OptionError, match=r"no setting 'epoch'\. .*\(and 1 more\)$"):
        checked({"model": "lenet", "data": "digits", "epoch": 3}, "here")


def test_several_faults_are_counted() -> None:
    with pytest.raises(OptionError, match=r"^here: .* \(and 2 more\)$"):
        checked({"model": "lenet", "epochs": 0, "batch": 0, "data": "digits", "seed": -1}, "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["method=dense", "penalty=1e-3"], "method=dense does not use penalty"),
        (["method=dense", "decompose.only=[fc1]"], "method=dense does not use decompose"),
        (["method=dense", "full_pass=true"], "method=dense does not use full_pass"),
        (["method=imp", "epochs=1"], "method=imp trains in stages, so it needs at least 2 epochs"),
        (
            ["method=raregems", "epochs=1"],
            "method=raregems trains in stages, so it needs at least 2",
        ),
        (["loss=mine:loss", "reduction=sum"], "reduction apply to loss=cross_entropy only"),
        (["loss=mine:loss", "label_smoothing=0.1"], "apply to loss=cross_entropy only"),
    ],
)
def test_contradictions_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load_recipe("digits", changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "contains no settings"),
        (b"- a\n- b\n", "Write a mapping of keys to values."),
        (b"1: 2\n", "contains no settings"),
        (b"a: [1\nb: 2", "is not valid YAML: while parsing a flow sequence"),
        (b"a: 2024-13-45", "is not valid YAML: month must be in"),
        (
            b"a: !!python/object:os.system {}",
            "is not valid YAML: could not determine a constructor",
        ),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"model: lenet\ndata: digits\n", "'epochs' is missing."),
    ],
)
def test_files_without_settings_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(OptionError) as error:
        load_recipe(str(tmp_path / "mine.yaml"))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_recipes_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no recipe 'digit'\. Did you mean 'digits'\?"):
        load_recipe("digit")
    with pytest.raises(OptionError, match=r"a\.yaml cannot be read \(No such file"):
        load_recipe(str(tmp_path / "a.yaml"))
    (tmp_path / "d.yaml").mkdir()
    with pytest.raises(OptionError, match=r"d\.yaml cannot be read \(Is a directory"):
        load_recipe(str(tmp_path / "d.yaml"))


# -- the list of settings ------------------------------------------------------------------------


def keys_of(settings: Any, prefix: str = "") -> set[str]:
    """The dotted keys of nested settings; options and ranks are values."""
    found = set()
    for key, value in settings.items():
        if isinstance(value, dict) and key not in ("options", "ranks"):
            found |= keys_of(value, f"{prefix}{key}.")
        else:
            found.add(prefix + key)
    return found


def test_list_of_settings_is_what_recipes_have() -> None:
    written = set()
    for optimizer in ("sgd", "adam"):
        for schedule in (
            {"name": "constant"},
            {"name": "milestones", "epochs": [1]},
            {"name": "vaswani", "warmup": 1},
            {"name": "cosine"},
        ):
            recipe = checked(MINIMAL | {"optimizer": optimizer, "schedule": schedule}, "here")
            written |= keys_of(yaml.safe_load(dumped(recipe)))
    budget = checked(MINIMAL | {"budget": {"params": 0.2}}, "here")
    written |= keys_of(yaml.safe_load(dumped(budget)))
    for method in METHODS:
        written |= keys_of(yaml.safe_load(dumped(checked(MINIMAL | {"method": method}, "here"))))
    written -= {"budget"}
    listed = [setting.key for setting in all_settings()]
    assert len(listed) == len(set(listed))
    assert set(listed) == written
    assert all(setting.meaning and setting.values for setting in all_settings())


def test_documented_settings_are_those_of_the_program() -> None:
    lines = ["| setting | values | default | meaning |", "|---|---|---|---|"]
    for setting in all_settings():
        default = f"`{setting.default}`" if setting.default else ""
        lines.append(f"| `{setting.key}` | {setting.values} | {default} | {setting.meaning} |")
    text = DOCUMENT.read_text(encoding="utf-8")
    shown = text.partition("<!-- settings -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown.splitlines() == lines


def test_documented_recipe_is_valid(tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    recipe = text.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "mine.yaml").write_text(recipe, encoding="utf-8")
    assert load_recipe(str(tmp_path / "mine.yaml")).model.name == "parts:model"


# -- files that are odd --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: 1\nepochs: 2\n", "the key 'epochs' is there twice"),
        ("optimizer: {lr: 0.1, lr: 0.2}\n", "the key 'lr' is there twice"),
        ("a: " + "[" * 5000, "is not valid YAML"),
        ("epochs: " + "9" * 6000, "is not valid YAML"),
        ("{model: lenet, data: digits, epochs: 1:30}", 'epochs="1:30" must be a whole number'),
    ],
    ids=["twice", "twice inside", "deep", "digits", "sexagesimal"],
)
def test_odd_yaml_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(OptionError) as error:
        load_recipe(str(tmp_path / "odd.yaml"))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(OptionError, match="is not a regular file"):
        load_recipe(str(tmp_path / "pipe.yaml"))
