"""Lightning's callback: the same weights as a loop by hand, resume, best checkpoints, errors."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from maestro_lod import Elastic, at_ranks, decompose, ranks, scores_loss
from maestro_lod.errors import LayerError, OptionError, TrainingError
from maestro_lod.layers import LowRank
from maestro_lod.train.dense import Dense
from tests.support import trainers as task

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    from torchmetrics.classification import MulticlassAccuracy

from maestro_lod.integrations.lightning import LoDCallback

# what Lightning itself warns of: its own deprecations, few workers, no GPU
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


class Module(lightning.LightningModule):
    def __init__(self, case: task.Case = task.SGD) -> None:
        super().__init__()
        self.case, self.net = case, case.network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("minus_rank", -float(sum(ranks(self).values())))

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.case.optimizer_of(self)
        return [optimizer], [{"scheduler": task.decay(optimizer), "interval": "step"}]


def module(case: task.Case = task.SGD) -> Module:
    return decompose(Module(case))


def loader(kind: type[DataLoader] = DataLoader, case: task.Case = task.SGD) -> DataLoader:
    return kind(TensorDataset(*case.samples()), batch_size=task.BATCH)


class ResumableLoader(DataLoader):
    """One that says where it is, as Lightning asks of those to be resumed within an epoch."""

    done = 0

    def __iter__(self) -> Any:
        first = self.done % len(self)
        for i, batch in enumerate(super().__iter__()):
            if i >= first:
                self.done = i + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def trainer(*callbacks: Any, epochs: int = task.EPOCHS, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "accumulate_grad_batches": task.ACCUMULATED,
        "gradient_clip_val": task.CLIP,
        "max_epochs": epochs,
    }
    return lightning.Trainer(callbacks=list(callbacks), **(defaults | options))


def precision_of(case: task.Case) -> str:
    return "64-true" if case.dtype == torch.float64 else "bf16-mixed" if case.bf16 else "32-true"


@pytest.mark.parametrize("case", task.IN_TRAINERS)
def test_the_same_weights_as_by_hand(case: task.Case) -> None:
    hand = task.by_hand(case)
    model, callback = module(case), LoDCallback(**case.options)
    trainer(callback, precision=precision_of(case)).fit(model, loader(case=case))
    task.assert_same_weights(model, hand.model)
    assert sum(ranks(model).values()) < 20
    assert (
        callback.lod.state_dict()["ledger"]["epochs"][-1]["params"]
        == (hand.state_dict()["ledger"]["epochs"][-1]["params"])
    )


def test_validation_sees_all_ranks_after_the_shrink_and_does_not_disturb() -> None:
    seen = []

    class Watched(Module):
        def validation_step(self, batch: Any, index: int) -> None:
            layers = [m for m in self.modules() if isinstance(m, LowRank)]
            assert all(m.active_rank == m.rank for m in layers)
            seen.append(sum(m.rank for m in layers))

    model, callback = decompose(Watched()), LoDCallback(**task.OPTIONS)
    trainer(callback, num_sanity_val_steps=0).fit(
        model, loader(), DataLoader(TensorDataset(*task.SGD.samples()), batch_size=36)
    )
    task.assert_same_weights(model, task.by_hand().model)
    shrunk = [sum(of_layers.values()) for of_layers in callback.lod.history[1:]]
    assert seen == [*shrunk, sum(ranks(model).values())]


@pytest.mark.parametrize(
    "every",
    [
        "2 batches",
        pytest.param("epoch", marks=pytest.mark.slow),
        pytest.param("validation", marks=pytest.mark.slow),
        pytest.param("5 batches", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(
    every: str, tmp_path: Path
) -> None:
    keep: dict[str, Any] = {"dirpath": tmp_path, "save_top_k": -1, "filename": "{step}"}
    if every.endswith("batches"):
        keep["every_n_train_steps"] = 2 if every[0] == "2" else 3
    validation = loader() if every == "validation" else None
    trainer(LoDCallback(**task.OPTIONS), ModelCheckpoint(**keep), epochs=2).fit(
        module(), loader(ResumableLoader), validation
    )
    for file in sorted(tmp_path.iterdir()):
        model = module()
        data = loader(ResumableLoader)
        trainer(LoDCallback(**task.OPTIONS)).fit(model, data, validation, ckpt_path=file)
        task.assert_same_weights(model, task.by_hand().model)
    assert len(list(tmp_path.iterdir())) > 1


def test_the_best_checkpoint_has_larger_ranks_and_is_loaded(tmp_path: Path) -> None:
    best = ModelCheckpoint(dirpath=tmp_path, monitor="minus_rank", mode="min")
    model = module()
    stop = EarlyStopping(monitor="minus_rank", mode="min", patience=2)
    run = trainer(LoDCallback(**task.OPTIONS), best, stop, epochs=9)
    run.fit(model, loader(), loader())
    assert run.current_epoch == 3  # the third epoch in which the rank only fell
    small = sum(ranks(model).values())
    (metrics,) = run.validate(model, loader(), ckpt_path="best", verbose=False)
    assert -metrics["minus_rank"] == sum(ranks(model).values()) > small


def test_evaluation_and_prediction_at_chosen_ranks() -> None:
    model, x = module(), task.SGD.samples()[0]
    run = trainer(LoDCallback(**task.OPTIONS), epochs=1)
    run.fit(model, loader())
    whole = torch.cat(run.predict(model, loader()))
    torch.testing.assert_close(whole, model(x).detach())
    with at_ranks(model, 2):
        (at_two,) = run.validate(model, loader(), verbose=False)
        predicted = torch.cat(run.predict(model, loader()))
        torch.testing.assert_close(predicted, model(x).detach())
    assert (predicted - whole).abs().max() > 1e-3
    (full,) = run.validate(model, loader(), verbose=False)
    assert full["loss"] != at_two["loss"]


def test_ranks_and_cost_reach_the_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    callback = LoDCallback(**task.OPTIONS)
    trainer(callback, logger=logger, epochs=2, log_every_n_steps=1).fit(module(), loader())
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    totals = [float(row["lod/total_rank"]) for row in rows if row.get("lod/total_rank")]
    expected = [sum(of_layers.values()) for of_layers in callback.lod.history]
    assert totals == [expected[1], sum(ranks(callback.lod.model).values())]
    assert float(rows[-1]["lod/relative_params"]) < 1.5
    assert float(rows[-1]["lod/training_relative_macs"]) > 0
    assert float(rows[-1]["lod/rank/net.0"]) == ranks(callback.lod.model)["net.0"]


# -- every size ------------------------------------------------------------------------------------


def elastic(**options: Any) -> LoDCallback:
    return LoDCallback(method=Elastic, **(task.ELASTIC | options))


@pytest.mark.parametrize("case", [c for c in task.IN_TRAINERS if c.id != "proximal"])
def test_elastic_gives_the_same_weights_as_by_hand(case: task.Case) -> None:
    hand = task.elastic_by_hand(case)
    model, callback = module(case), elastic()
    trainer(callback, precision=precision_of(case)).fit(model, loader(case=case))
    assert callback.lod.whole_epochs == 3 and callback.lod.rungs.ranks == [
        {f"net.{name}": rank for name, rank in ranks.items()} for ranks in hand.rungs.ranks
    ]
    task.assert_same_weights(model, hand.model)
    assert "training_step" not in vars(model)


class Shuffled(Module):
    """Counts in metrics, logs, augments at random and has a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))
        self.accuracy = MulticlassAccuracy(3)
        self.steps = 0

    def training_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        x, y = batch
        output = self.net(x + 0.01 * torch.randn_like(x))
        loss = F.cross_entropy(output, y)
        self.steps += 1
        self.accuracy(output, y)
        self.log("accuracy", self.accuracy, on_epoch=True, on_step=False)
        return {"loss": loss}

    def on_train_epoch_end(self) -> None:
        assert self.accuracy.update_count == 5


def shuffled() -> DataLoader:
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(*task.SGD.samples(40))
    return DataLoader(data, batch_size=task.BATCH, shuffle=True, generator=generator)


@pytest.mark.parametrize("options", [{}, {"sizes": [0.6]}], ids=["all", "one"])
def test_elastic_goes_on_from_any_epoch_and_step(options: dict[str, Any], tmp_path: Path) -> None:
    """In either phase, with metrics and logs, and random numbers of its own."""
    chosen = {
        key: v for key, v in (task.ELASTIC | options).items() if not (options and key == "smallest")
    }

    def callback() -> LoDCallback:
        return LoDCallback(method=Elastic, **chosen)

    keep = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    expected = decompose(Module())
    trainer(callback(), keep).fit(expected, loader(ResumableLoader))
    files = sorted(
        tmp_path.iterdir(), key=lambda file: int(file.stem.partition("=")[2].split("-")[0])
    )
    assert len(files) == 12
    for file in (files[1], files[8], files[10]):
        model = module()
        again = callback()
        trainer(again).fit(model, loader(ResumableLoader), ckpt_path=file)
        assert again.lod.epoch == 4
        task.assert_same_weights(model, expected)
        for one, other in zip(model.buffers(), expected.buffers(), strict=True):
            assert torch.equal(one, other)


def test_elastic_disturbs_neither_metrics_nor_random_numbers_nor_loaders() -> None:
    states = []

    class Watched(Shuffled):
        def on_train_batch_start(self, batch: Any, index: int) -> None:
            states.append((batch[0].clone(), torch.get_rng_state()))

    for callback in ([], [elastic()]):
        torch.manual_seed(6)
        model = decompose(Watched())
        torch.manual_seed(7)
        trainer(*callback).fit(model, shuffled())
        assert model.steps == 20
    half = len(states) // 2
    for (batch, state), (other, its) in zip(states[:half], states[half:], strict=True):
        assert torch.equal(batch, other) and torch.equal(state, its)


def test_elastic_says_which_phase_it_is_in_and_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    logger, model = CSVLogger(tmp_path), module()
    trainer(elastic(), logger=logger, log_every_n_steps=1).fit(model, loader())
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("lod/total_rank")]
    assert [float(row["lod/consolidation"]) for row in rows] == [0.0, 0.0, 0.0, 1.0]
    assert float(rows[0]["lod/relative_macs"]) == 1.0
    assert "training_step" not in vars(model)

    class Failing(Module):
        def training_step(self, batch: Any, index: int) -> Tensor:
            if self.current_epoch == 3 and self._trainer is not None:
                raise ValueError("the data is bad")
            return super().training_step(batch, index)

    model = decompose(Failing())
    with pytest.raises(ValueError, match="the data is bad"):
        trainer(elastic()).fit(model, loader())
    assert "training_step" not in vars(model)
    assert all(m.active_rank == m.rank for m in model.modules() if isinstance(m, LowRank))


@pytest.mark.filterwarnings("ignore:.*training_step.*:UserWarning:lightning")
def test_elastic_trains_a_compiled_part_of_a_module() -> None:
    class Net(Module):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

    eager, compiled = decompose(Net()), decompose(Net())
    compiled.net = torch.compile(compiled.net, backend="eager")
    for model in (eager, compiled):
        trainer(elastic()).fit(model, loader())
    for one, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(OptionError, match="Compile a part of it"):
        trainer(elastic()).fit(torch.compile(module(), backend="eager"), loader())


def test_elastic_asks_for_what_it_needs() -> None:
    class Own(Module):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(2 * self(batch[0]), batch[1])

    class Parts(Module):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.net[2:](self.net[:2](batch[0])), batch[1])

    with pytest.warns(UserWarning, match="Give soft_loss=lod.scores_loss"):
        trainer(elastic(), epochs=2).fit(decompose(Own()), loader())
    with pytest.warns(UserWarning, match="Compute the output by one call of the model"):
        trainer(elastic(), epochs=2).fit(decompose(Parts()), loader())
    trainer(elastic(soft_loss=scores_loss), epochs=2).fit(decompose(Own()), loader())
    with pytest.raises(OptionError, match="Set at least 2 epochs"):
        trainer(elastic(), epochs=1).fit(module(), loader())
    with pytest.raises(OptionError, match="Train on one DataLoader"):
        trainer(elastic()).fit(module(), [loader(), loader()])


def test_a_batch_that_is_skipped_and_steps_that_end_early() -> None:
    class Skipping(Module):
        def training_step(self, batch: Any, index: int) -> Tensor | None:
            return None if index == 1 else super().training_step(batch, index)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*training_step.*returned.*None")
        model = decompose(Skipping())
        trainer(LoDCallback(**task.OPTIONS), epochs=-1, max_steps=4).fit(model, loader())
    assert all(m.active_rank == m.rank for m in model.modules() if isinstance(m, LowRank))


def test_an_error_in_a_step_leaves_all_ranks_active() -> None:
    class Failing(Module):
        def training_step(self, batch: Any, index: int) -> Tensor:
            raise ValueError("the data is bad")

    model = decompose(Failing())
    with pytest.raises(ValueError, match="the data is bad"):
        trainer(LoDCallback(**task.OPTIONS)).fit(model, loader())
    assert all(m.active_rank == m.rank for m in model.modules() if isinstance(m, LowRank))


def test_wrong_use_is_refused() -> None:
    with pytest.raises(LayerError, match=r"no low-rank layer. Call decompose\(model\) first"):
        trainer(LoDCallback()).fit(Module(), loader())

    class Early(Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = self.case.optimizer_of(self)

        def configure_optimizers(self) -> optim.Optimizer:
            return self.made

    with pytest.raises(TrainingError, match="after decompose"):
        trainer(LoDCallback()).fit(decompose(Early()), loader())

    class Another(LoDCallback):
        @property
        def state_key(self) -> str:
            return "another"

    with pytest.raises(OptionError, match="the trainer has 2 callbacks LoDCallback"):
        trainer(LoDCallback(), Another()).fit(module(), loader())
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `LoDCallback`"):
        trainer(LoDCallback(), LoDCallback())  # Lightning's own

    class Manual(Module):
        automatic_optimization = False

    with pytest.raises(OptionError, match="automatic_optimization=False"):
        plain = trainer(LoDCallback(), gradient_clip_val=None, accumulate_grad_batches=1)
        plain.fit(decompose(Manual()), loader())

    flat = trainer(LoDCallback())
    flat._accelerator_connector.strategy = FSDPStrategy()  # which Lightning gives to GPUs only
    with pytest.raises(OptionError, match="FSDPStrategy flattens parameters"):
        flat.callbacks[0].setup(flat, module(), "fit")
    flat._accelerator_connector.strategy = ModelParallelStrategy()
    flat.callbacks[0].setup(flat, module(), "fit")
    flat.ckpt_path = "some.ckpt"
    with pytest.raises(OptionError, match="cannot load shards"):
        flat.callbacks[0].setup(flat, module(), "fit")

    class Two(Module):
        def configure_optimizers(self) -> Any:
            return [self.case.optimizer_of(part) for part in (self.net[:2], self.net[2:])]

    with pytest.raises((OptionError, RuntimeError), match="optimizers"):
        trainer(LoDCallback()).fit(decompose(Two()), loader())


def test_options_are_checked_at_once() -> None:
    with pytest.raises(OptionError, match=r"no option 'penatly'. Did you mean 'penalty'"):
        LoDCallback(penatly=1e-3)
    with pytest.raises(OptionError, match="full_pass needs two passes"):
        LoDCallback(full_pass=True)
    with pytest.raises(OptionError, match="Choose LoD or Elastic"):
        LoDCallback(method=Dense)
    with pytest.raises(OptionError, match="Elastic has no option 'penalty'"):
        LoDCallback(method=Elastic, penalty=1e-3)
    with pytest.raises(TrainingError, match="does not exist before training"):
        _ = LoDCallback().lod
