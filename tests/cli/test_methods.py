"""The seam of methods: a third one needs no change anywhere, and old runs go on."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.optim import Optimizer

import maestro_lod as lod
from maestro_lod.cli.recipe import checked, dumped, load_recipe
from maestro_lod.cli.registry import METHODS, register
from maestro_lod.cli.run import Run
from maestro_lod.cli.setup import Setup
from maestro_lod.errors import CheckpointError, OptionError
from maestro_lod.files.state import load_state, save_state
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.cost import Cost, count_params
from maestro_lod.train.budget import Budget
from maestro_lod.train.dense import Dense, DenseSettings
from maestro_lod.train.fit import Watch, fit
from maestro_lod.train.lod_settings import LoDSettings
from maestro_lod.train.method import RunPlan, Settings, setting
from maestro_lod.train.progress import EpochRecord, MethodRecord
from tests.support.runs import assert_same_end, stopped

# -- found by name -------------------------------------------------------------------------------

IMPORTED = """
import sys
from maestro_lod.cli import main
main._load("train")
from maestro_lod.cli.recipe import load_recipe
print(load_recipe("digits", sys.argv[1:]).method)
print(*sorted(m for m in sys.modules if m.startswith("maestro_lod.baselines.")))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "method", "imported"),
    [
        ([], "lod", []),
        (["penalty=1e-3", "epochs=2"], "lod", []),
        (["method=dense"], "dense", []),
        (["method=svd"], "svd", ["maestro_lod.baselines.svd"]),
    ],
)
def test_a_recipe_imports_no_method_but_its_own(
    changes: list[str], method: str, imported: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *changes], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[0] == method
    found = done.stdout.splitlines()[1].split()
    assert [name for name in found if name.rpartition(".")[2] in METHODS] == imported


# -- a method of one's own -----------------------------------------------------------------------


@dataclass(frozen=True)
class PruningSettings(Settings):
    """Zero the smallest weights after each epoch."""

    keep: float = setting(0.5, "share of the weights that stay", least=0.0)

    def make(
        self, model: nn.Module, optimizer: Optimizer, *, example: Any, seed: int, dense: Cost
    ) -> Pruning:
        return Pruning(self.keep)


class Pruning:
    """Replaces every matrix by one whose smallest entries are zero, for good."""

    def __init__(self, keep: float) -> None:
        self.keep, self.epochs = keep, 0
        self.lasts: list[bool] = []

    def start(self, model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
        self.model, self.optimizer, self.plan = model, optimizer, plan

    def backward(
        self,
        forward: Callable[[], Any],
        loss: Callable[[Any], Tensor],
        *,
        weight: float = 1.0,
        soft_loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> None:
        (loss(forward()) * weight).backward()

    @torch.no_grad()
    def end_epoch(self, *, last: bool) -> None:
        self.epochs += 1
        self.lasts.append(last)
        for module in self.model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                old = module.weight
                least = old.abs().flatten().quantile(1 - self.keep)
                module.weight = new = nn.Parameter(old * (old.abs() >= least))
                for group in self.optimizer.param_groups:
                    group["params"][:] = [new if p is old else p for p in group["params"]]
                self.optimizer.state[new] = self.optimizer.state.pop(old)

    def record(self) -> MethodRecord:
        left = sum(int(p.count_nonzero()) for p in self.model.parameters())
        share = left / count_params(self.model)
        numbers = {"pruned": 1 - share, "prunings": self.epochs}
        return MethodRecord(params=left, relative_params=share, others=numbers)

    def training_cost(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


@pytest.fixture
def pruning() -> Iterator[None]:
    register("pruning", PruningSettings)
    yield
    METHODS.unregister("pruning")


SMALL = ("epochs=3", "data.limit=200", "batch=32")


@pytest.mark.parametrize("named", ["pruning", "test_methods:PruningSettings"])
def test_a_method_of_ones_own_runs_resumes_and_reports(
    named: str, pruning: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    recipe = load_recipe("digits", [f"method={named}", "keep=0.3", *SMALL])
    assert "penalty" not in yaml.safe_load(dumped(recipe)), "that of the recipe belongs to lod"
    result = Run.create(recipe, tmp_path / "whole").train()
    assert result["ledger"] is None
    run = stopped(recipe, tmp_path / "parts", steps=9)  # in the second epoch
    again = Run.open(run.directory)
    assert again.recipe == recipe
    again.train()
    assert_same_end(tmp_path / "whole", tmp_path / "parts")
    last = again.epochs()[-1]
    assert last.others["pruned"] == pytest.approx(0.7, abs=0.03)
    assert last.relative_params == pytest.approx(0.3, abs=0.03) and last.ranks == {}
    page = (tmp_path / "parts" / "report.html").read_text()
    assert last.others["prunings"] == 3
    assert "Prunings" in page and "Parameters relative to dense" in page
    model, _ = again.trained()
    assert float((model.fc1.weight == 0).float().mean()) == pytest.approx(0.7, abs=0.01)


def test_fit_tells_a_method_of_the_plan_and_the_last_epoch() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(3)]
    method, seen = Pruning(0.5), []
    progress = fit(
        model, batches, optimizer=optimizer, epochs=2, method=method,
        watch=Watch(epoch=lambda now: seen.append(now.history[-1].params)),
    )  # fmt: skip
    assert (method.plan, method.lasts) == (RunPlan(2, 3), [False, True])
    assert seen == [record.params for record in progress.history]
    assert int(model.weight.count_nonzero()) == 6


def test_a_name_is_given_once(pruning: None) -> None:
    register("pruning", PruningSettings)  # the same again
    with pytest.raises(OptionError, match="the name of a method is already in use: 'lod'"):
        register("lod", PruningSettings)


@pytest.mark.parametrize(
    ("changes", "narrower"),
    [
        (["budget.params=0.1"], True),
        (["budget.params=4400"], True),
        (["budget={macs: 0.2}"], True),
        (["budget.params=0.1", "narrow=false"], False),
        (["budget.params=0.3"], False),
        (["penalty=0.001"], False),
    ],
)
def test_a_small_budget_begins_narrower(changes: list[str], narrower: bool) -> None:
    recipe = load_recipe("digits", changes)
    setup = Setup.of(recipe)
    first = low_rank_layers(setup.model)["fc1"].matrix_shape[0]
    assert (first < 120) == narrower
    budget = recipe.settings.budget
    if budget is not None:  # shares are those of the whole width
        train = setup.method
        (limit,) = train._limits()
        assert limit / getattr(setup.dense, budget.kind) == pytest.approx(
            budget.value if budget.value < 1 else budget.value / setup.dense.params, rel=0.01
        )
        share = getattr(train.record(), f"relative_{budget.kind}")
        own = getattr(train.ledger, f"dense_{budget.kind}") / getattr(setup.dense, budget.kind)
        assert share == pytest.approx(own, rel=1e-6)
        assert (own < 0.6) == narrower


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["method=dense", "keep=0.1"], "method=dense does not use keep"),
        (["method=pruning", "penalty=1e-3"], "method=pruning does not use penalty"),
        (["keep=0.1"], "method=lod does not use keep"),
        (["method=pruning", "keep=-1"], "keep=-1 must be greater than or equal to 0"),
        (["method=pruning", "kep=1"], "no setting 'kep'. Did you mean 'keep'"),
        (["method=prune"], "method=\"prune\" is unknown. Did you mean 'pruning'"),
        (["method=test_methods:Pruning"], "is not a subclass of"),
        (["method=3"], "method=3 must be text"),
    ],
)
def test_settings_of_other_methods_are_refused_by_one_rule(
    changes: list[str], message: str, pruning: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(OptionError) as error:
        load_recipe("digits", changes)
    assert message in str(error.value)


def test_signatures_stay_small() -> None:
    assert len(inspect.signature(lod.LoD).parameters) <= 12
    assert len(inspect.signature(lod.fit).parameters) <= 12


def test_fit_knows_no_method_but_dense() -> None:
    source = Path(inspect.getsourcefile(fit)).read_text()
    imports = [line for line in source.splitlines() if line.startswith(("import", "from"))]
    assert not any("lod import LoD" in line or "train.lod" in line for line in imports)


# -- λ as one choice -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ([], Budget(params=0.25)),
        (["penalty=1e-4"], 1e-4),
        (["budget.params=0.2"], Budget(params=0.2)),
        (["budget={macs: 0.3}"], Budget(macs=0.3)),
        (["budget.params=5000"], Budget(params=5000)),
        (["penalty=0", "budget="], 0.0),
    ],
)
def test_what_is_asked_for_is_the_one_choice(changes: list[str], chosen: Any) -> None:
    settings = load_recipe("digits", changes).settings
    assert isinstance(settings, LoDSettings)
    assert (settings.penalty if settings.budget is None else settings.budget) == chosen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["pressure=64"], "pressure=64 is not supported any more. Set penalty"),
        (
            ["penalty=1e-3", "budget.params=0.2"],
            "budget cannot be combined with penalty or shrink=false",
        ),
        (
            ["budget.params=0.2", "shrink=false"],
            "budget cannot be combined with penalty or shrink=false",
        ),
        (["budget.params=0.2", "budget.macs=0.2"], "budget: a budget needs either params or macs"),
        (["budget.params=0.2", "budget.steps=3"], "budget.steps=3 is not supported any more"),
        (["elastic=0.1", "penalty=0.1"], "elastic cannot be combined with penalty or budget"),
        (["elastic=2"], "elastic=2.0 must be a share of the dense model between 0 and 1"),
        (["budget.params=-1"], "budget: a budget of params=-1"),
        (["budget.parms=0.2"], "no setting 'budget.parms'. Did you mean 'params'"),
        (["budget.params=true"], "budget.params=true must be a number"),
        (["budget=3"], "budget=3 must be a mapping of settings"),
    ],
)
def test_two_choices_at_once_are_one_clear_error(changes: list[str], message: str) -> None:
    with pytest.raises(OptionError) as error:
        load_recipe("lenet-mnist", changes)
    assert message in str(error.value) and "\n" not in str(error.value)


# -- runs of the first version -------------------------------------------------------------------


def old_settings(recipe: Any, **changes: Any) -> dict[str, Any]:
    """The settings of a recipe as the first version wrote them: all, of every method."""
    defaults = checked({"model": "lenet", "data": "digits", "epochs": 1}, "here")
    gone = {"pressure": 0.0}
    return yaml.safe_load(dumped(defaults)) | yaml.safe_load(dumped(recipe)) | gone | changes


def old_checkpoint(path: Path) -> None:
    """Turn a checkpoint into what the first version wrote."""
    state = load_state(path)
    method = state.pop("method")
    state["lod"] = method or None
    for record in state["progress"]["history"]:
        record.setdefault("relative_macs", None)  # which said so where nothing is known
        record.setdefault("macs", None)
    save_state(state, path)


@pytest.mark.parametrize(
    "changes",
    [
        ["penalty=1e-3", "threshold=1e-3"],
        ["penalty=1e-2", "proximal=true"],
        ["method=dense"],
    ],
    ids=str,
)
def test_a_run_of_the_first_version_goes_on(changes: list[str], tmp_path: Path) -> None:
    recipe = load_recipe("digits", [*changes, *SMALL])
    Run.create(recipe, tmp_path / "whole").train()
    run = stopped(recipe, tmp_path / "old", steps=9)
    config = old_settings(recipe)
    if recipe.method == "dense":  # it wrote the settings of lod too, at their defaults
        assert {"penalty", "pressure", "budget", "shrink", "distill", "decompose"} <= {*config}
    (run.directory / "config.yaml").write_text(yaml.safe_dump(config))
    old_checkpoint(run.checkpoint)
    again = Run.open(run.directory)
    assert again.recipe == recipe
    again.train()
    assert_same_end(tmp_path / "whole", tmp_path / "old")


def test_a_finished_run_for_a_budget_of_an_older_version_opens(tmp_path: Path) -> None:
    """Such a budget may have been applied after a number of steps."""
    run = Run.create(load_recipe("digits", ["budget.params=0.4", *SMALL]), tmp_path / "run")
    run.train()
    config, result = run.directory / "config.yaml", run.directory / "result.json"
    settings = yaml.safe_load(config.read_text())
    settings["budget"]["steps"] = 9
    config.write_text(yaml.safe_dump(settings))
    about = json.loads(result.read_text())
    about["settings"]["budget"]["steps"] = 9
    result.write_text(json.dumps(about))
    again = Run.open(run.directory)
    assert again.recipe == run.recipe
    model, _ = again.trained()
    assert lod.ranks(model) == run.epochs()[-1].ranks


@pytest.mark.parametrize(
    ("changes", "state", "name"),
    [
        (["budget.params=0.4"], {"budget": {"kind": "params"}}, "BudgetTraining"),
        (["elastic=0.3"], {"sampler": {"strategy": "elastic"}}, "ElasticTraining"),
    ],
)
def test_an_unfinished_run_of_a_method_that_is_gone_says_so(
    changes: list[str], state: dict[str, Any], name: str, tmp_path: Path
) -> None:
    run = stopped(load_recipe("digits", [*changes, *SMALL]), tmp_path / "run", steps=3)
    saved = load_state(run.checkpoint)
    saved["method"] = state
    save_state(saved, run.checkpoint)
    with pytest.raises(CheckpointError, match=f"saved by {name}.*or train again") as error:
        Run.open(run.directory).train()
    assert "\n" not in str(error.value)


# -- the record ----------------------------------------------------------------------------------


def test_a_record_reads_back_what_it_wrote() -> None:
    record = EpochRecord(
        epoch=3, step=30, seconds=1.5, lr=0.1, train={"loss": 0.5, "accuracy": 0.75},
        validation={"loss": 0.6, "perplexity": 2.0}, params=100, macs=50, relative_params=0.5,
        relative_macs=0.25, ranks={"fc": 4}, penalty=1e-3, budget=0.2, phase="landed",
        others={"pruned": 0.5},
    )  # fmt: skip
    flat = json.loads(json.dumps(record.to_dict()))
    assert EpochRecord.from_dict(flat) == record
    assert flat["train_accuracy"] == 0.75 and flat["total_rank"] == 4
    assert set(record.numbers()) == set(flat) - {"ranks", "phase"}


def test_a_record_of_a_dense_epoch_says_nothing_of_ranks() -> None:
    record = EpochRecord(epoch=1, params=10, relative_params=1.0)
    assert record.total_rank is None
    assert record.to_dict() == {"epoch": 1, "params": 10, "relative_params": 1.0, "ranks": {}}


def test_what_is_no_number_in_a_file_is_left_out() -> None:
    flat = {
        "epoch": 2, "step": "x", "macs": None, "penalty": True, "phase": 3, "ranks": [1],
        "train_loss": None, "remark": "hello", "ratio": 0.5,
    }  # fmt: skip
    assert EpochRecord.from_dict(flat) == EpochRecord(epoch=2, others={"ratio": 0.5})
    assert EpochRecord.from_dict({"epoch": 1, "ranks": {"a": 3, "b": "x"}}).ranks == {"a": 3}


def test_dense_is_a_method_without_settings_or_state() -> None:
    cost = Cost(6, 4, 24)
    method = DenseSettings().make(nn.Linear(2, 2), None, example=None, seed=0, dense=cost)  # type: ignore[arg-type]
    assert isinstance(method, Dense) and method.state_dict() == {}
    assert set(method.training_cost().values()) == {1.0}
