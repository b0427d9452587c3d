"""Every method, as a run: it trains, stops anywhere, goes on bit for bit, and is deployed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import maestro_lod as lod
from maestro_lod.cli.recipe import load_recipe
from maestro_lod.cli.registry import METHODS
from maestro_lod.cli.run import Run
from maestro_lod.cli.setup import Setup
from maestro_lod.cli.trained import Trained
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.train.fit import fit
from maestro_lod.train.method import RunPlan
from tests.support.runs import assert_same_end, stopped

BATCHES = 6
SMALL = ("epochs=4", f"data.limit={BATCHES * 32 * 10 // 9}", "batch=32", "schedule=constant")

# the settings of a short run, and steps at which it is stopped: one in the middle of each stage
ROWS: dict[str, tuple[list[str], list[int]]] = {
    "lod": (["elastic=0.2"], [9, 26, 33]),
    "dense": ([], [9]),
    "narrow": (["size=0.3"], [9]),
    "svd": (["size=0.4", "finetune=0.5", "decompose.only=[fc1, fc2]"], [9, 12, 15]),
    "pufferfish": (["size=0.3", "optimizer.weight_decay=1e-3", "optimizer.decay_norms=false"],
                   [3, 6, 15]),
    "cuttlefish": (["epsilon=100", "window=2", "optimizer.weight_decay=1e-3"], [9, 12, 15]),
    "spectral": (["size=0.3", "optimizer.weight_decay=1e-3"], [9]),
    "imp": (["size=0.3", "prune=0.5", "rewind=0.3"], [1, 9, 12, 15]),
    "raregems": (["size=0.3", "search_share=0.5", "search_lr=0.1"], [3, 9, 12, 15]),
    "xnor": ([], [9]),
}  # fmt: skip


def small(name: str, *changes: str) -> Any:
    return load_recipe("digits", [f"method={name}", *SMALL, *ROWS[name][0], *changes])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One whole run of each method."""
    runs = {}
    for name in ROWS:
        runs[name] = Run.create(small(name), tmp_path_factory.mktemp("whole") / name)
        runs[name].train()
    return runs


def test_every_method_is_in_the_table() -> None:
    assert set(ROWS) == set(METHODS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"), [(name, steps) for name, (_, stops) in ROWS.items() for steps in stops]
)
def test_a_run_goes_on_bit_for_bit(
    name: str, steps: int, whole: dict[str, Run], tmp_path: Path
) -> None:
    run = stopped(small(name), tmp_path / "parts", steps)
    Run.open(run.directory).train()
    assert_same_end(whole[name].directory, run.directory)


@pytest.mark.parametrize(("name", "steps"), [("pufferfish", 9), ("imp", 15)])
def test_a_run_with_channels_last_goes_on_bit_for_bit(
    name: str, steps: int, tmp_path: Path
) -> None:
    recipe = small(name, "channels_last=true")
    Run.create(recipe, tmp_path / "whole").train()
    run = stopped(recipe, tmp_path / "parts", steps)
    Run.open(run.directory).train()
    assert_same_end(tmp_path / "whole", run.directory)


@pytest.mark.parametrize("name", ROWS)
def test_a_finished_run_says_its_size_and_cost(name: str, whole: dict[str, Run]) -> None:
    run = whole[name]
    result, last = run.result(), run.epochs()[-1]
    size, cost = result["size"], result["ledger"]
    assert result["summary"]["dense_params"] == 44_426
    assert result["summary"]["dense_macs"] == 281_640
    assert size["relative_params"] == last.relative_params == last.params / 44_426
    assert size["relative_macs"] == size["macs"] / 281_640
    assert cost["relative_macs"] > 0 and cost["relative_params"] > 0
    assert size["relative_bits"] == pytest.approx(size["bits"] / (32 * 44_426))
    changes = dict(change.split("=") for change in ROWS[name][0])
    if "size" in changes:
        assert 0.8 * float(changes["size"]) < size["relative_bits"] <= float(changes["size"])


@pytest.mark.parametrize("name", ROWS)
def test_a_finished_run_is_read_back_deployed_and_reported(
    name: str, whole: dict[str, Run]
) -> None:
    run = Run.open(whole[name].directory)
    trained = Trained.of(run)
    plain, _ = run.trained()
    result = run.result()
    assert trained.test(plain) == result["test"]
    if low_rank_layers(plain):
        plain = lod.extract(plain)
        assert sum(p.numel() for p in plain.parameters()) == result["size"]["params"]
    assert trained.test(plain)["accuracy"] == pytest.approx(result["test"]["accuracy"], abs=0.01)
    assert not low_rank_layers(plain)
    assert "Parameters" in (run.directory / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_method_sees_the_same_batches(name: str) -> None:
    """The same samples in the same order, epoch by epoch, and each once in a step."""

    def seen_by(name: str) -> list[Any]:
        setup = Setup.of(small(name))
        seen: list[Any] = []
        taught = setup.loss

        def loss(output: Any, target: Any) -> Any:
            if torch.is_grad_enabled():
                seen.append(target.tolist())
            return taught(output, target)

        fit(
            setup.model, setup.data.train, optimizer=setup.optimizer, epochs=4, loss=loss,
            method=setup.method, schedule=setup.schedule, seed=0,
        )  # fmt: skip
        return seen

    seen = seen_by(name)
    if name == "lod":
        seen = seen[: 4 * BATCHES]  # its whole phase; the other one sees all of them again
    assert len(seen) == 4 * BATCHES and seen == seen_by("dense")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "narrow",
            ["size=1e-4"],
            "size=0.0001 cannot be reached by a narrower model: the smallest",
        ),
        ("narrow", ["size=1.5"], "size=1.5 must be a share of the dense model between 0 and 1"),
        ("narrow", ["size=true"], "size=true must be a share of the dense model"),
        ("pufferfish", ["size=0.01"], "size=0.01 cannot be reached: with rank 1 in every layer"),
        ("pufferfish", ["decompose.ranks=0.5"], "size determines the ranks"),
        ("pufferfish", ["warmup=1"], "warmup=1 leaves no epoch"),
        ("svd", ["size=0.01"], "size=0.01 cannot be reached: with rank 1 in every layer"),
        ("svd", ["size="], "size=null must be a share of the dense model"),
        ("svd", ["finetune=1.0"], "finetune=1 leaves no epoch"),
        ("svd", ["search=clever"], 'search="clever" is unknown'),
        ("dense", ["size=0.3"], "method=dense does not use size"),
        ("cuttlefish", ["size=0.3"], "method=cuttlefish does not use size"),
        ("cuttlefish", ["decompose.ranks=0.3"], "decompose.ranks is not used by cuttlefish"),
        ("cuttlefish", ["least_rank=3"], "least_rank=3 must be a share, at most 1"),
        ("spectral", ["size=0.01"], "size=0.01 cannot be reached: with rank 1 in every layer"),
        ("spectral", ["decompose.ranks=3"], "decompose.ranks is not used by spectral"),
        ("spectral", ["decompose.only=[fc1]"], "Set keep_ends=false"),
        ("imp", ["size=1e-3"], "size=0.001 cannot be reached: biases, norms and embeddings"),
        ("imp", ["size="], "size=null must be a share of the dense model"),
        ("imp", ["prune=1"], "prune=1 must be between 0 and 1"),
        ("imp", ["rewind=1"], "rewind=1 must be below 1"),
        ("raregems", ["size=1e-3"], "size=0.001 cannot be reached"),
        ("raregems", ["size="], "size=null must be a share of the dense model"),
        ("raregems", ["search_share=1"], "search_share=1 must be a share of the run"),
        ("xnor", ["real=[fc9]"], "real='fc9' matches no layer. Did you mean 'fc"),
        ("xnor", ["real=['*']"], "has no layer between the first and the last one"),
        ("xnor", ["size=0.3"], "method=xnor does not use size"),
    ],
)
def test_what_cannot_be_is_one_clear_error(name: str, changes: list[str], message: str) -> None:
    with pytest.raises(lod.MaestroError) as error:
        Setup.of(small(name, *changes))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", METHODS)
def test_a_size_is_given_to_all_methods_alike(name: str) -> None:
    settings = METHODS[name]
    try:
        given = settings.at_size(0.5)
    except lod.MaestroError as error:
        assert "chooses the size itself" in str(error)
        assert name in ("dense", "cuttlefish", "xnor")
        return
    assert given == ({"budget": {"params": 0.5}} if name == "lod" else {"size": 0.5})


LEARNING = ["epochs=6", "data.limit=1200", "schedule=constant"]
ENOUGH: dict[str, list[str]] = {
    "lod": ["budget.params=0.5"],
    "narrow": ["size=0.5"],
    "svd": ["size=0.5", "decompose.only=[fc1, fc2]"],
    "cuttlefish": ["epsilon=3"],
    "spectral": ["size=0.5", "epochs=8"],
    "imp": ["size=0.5", "prune=0.5", "rewind=0.1"],
}
"""What a method needs to learn digits within seconds."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROWS if name != "dense"])
def test_every_method_learns(name: str, tmp_path: Path) -> None:
    recipe = load_recipe("digits", [f"method={name}", *LEARNING, *ENOUGH.get(name, [])])
    run = Run.create(recipe, tmp_path / "run")
    assert run.train()["test"]["accuracy"] > 0.9
    assert run.result()["size"]["relative_bits"] < 0.7


def test_a_method_refuses_another_model() -> None:
    setup = Setup.of(small("pufferfish"))
    other = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    with pytest.raises(lod.MaestroError, match="created for a model or optimizer other"):
        fit(other, setup.data.train, optimizer=setup.optimizer, epochs=1, method=setup.method)


def test_a_wrapped_model_is_refused() -> None:
    setup = Setup.of(small("narrow"))
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(setup.model)
        with pytest.raises(
            lod.MaestroError, match="Narrow does not support DistributedDataParallel"
        ):
            setup.method.start(wrapped, setup.optimizer, RunPlan(2, 3))
        del wrapped
    finally:
        torch.distributed.destroy_process_group()


def test_more_epochs_go_on_in_the_last_stage(tmp_path: Path) -> None:
    run = stopped(small("pufferfish"), tmp_path / "run", 9)
    config = (run.directory / "config.yaml").read_text().replace("epochs: 4", "epochs: 6")
    (run.directory / "config.yaml").write_text(config)
    again = Run.open(run.directory)
    again.train()
    phases = [record.phase for record in again.epochs()]
    assert phases == ["low-rank"] * 6
    trained = again.result()["summary"]["params"] / again.result()["summary"]["dense_params"]
    assert math.isclose(again.result()["ledger"]["relative_params"], (1 + 5 * trained) / 6)
