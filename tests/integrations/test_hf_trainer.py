"""The Hugging Face Trainer's callback: as by hand, resume, best checkpoints, logs, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, SequentialSampler

from maestro_lod import Elastic, at_ranks, decompose, ranks
from maestro_lod.errors import LayerError, OptionError, TrainingError
from maestro_lod.layers import LowRank
from tests.support import trainers as task

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from accelerate import DistributedType  # noqa: E402

from maestro_lod.integrations.hf_trainer import LoDTrainerCallback  # noqa: E402


class Classifier(nn.Module):
    def __init__(self, case: task.Case = task.SGD) -> None:
        super().__init__()
        self.net = case.network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Samples(Dataset):
    def __init__(self, count: int = 36, case: task.Case = task.SGD) -> None:
        self.x, self.y = case.samples(count)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self.x[row], "labels": self.y[row]}


class InOrder(hf.Trainer):
    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def trainer(
    directory: Path,
    model: nn.Module | None = None,
    count: int = 36,
    case: task.Case = task.SGD,
    **options: Any,
) -> Any:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": task.BATCH,
        "gradient_accumulation_steps": task.ACCUMULATED,
        "max_grad_norm": task.CLIP,
        "num_train_epochs": task.EPOCHS,
        "bf16": case.bf16,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = hf.TrainingArguments(output_dir=str(directory), **(defaults | options))
    model = decompose(Classifier(case)) if model is None else model
    optimizer = case.optimizer_of(model)
    return InOrder(
        model, arguments, train_dataset=Samples(count, case), eval_dataset=Samples(),
        optimizers=(optimizer, task.decay(optimizer)),
    )  # fmt: skip


def trained(
    directory: Path, resume: Path | None = None, case: task.Case = task.SGD, **options: Any
) -> Any:
    known = (*task.OPTIONS, *task.ELASTIC, "method", "sizes")
    chosen = {key: options.pop(key) for key in known if key in options}
    run = trainer(directory, case=case, **options)
    of_case = {} if "method" in chosen else case.options
    run.add_callback(LoDTrainerCallback(run, **(of_case | chosen)))
    run.train(resume_from_checkpoint=resume)
    return run


def last_one_whole(i: int) -> float:
    """The Trainer divides by the batches that there are: the last one stands alone."""
    return 1.0 if i == 4 else 1 / task.ACCUMULATED


@pytest.mark.parametrize("case", task.IN_TRAINERS)
def test_the_same_weights_as_by_hand(case: task.Case, tmp_path: Path) -> None:
    hand = task.by_hand(case, last_one_whole)
    run = trained(tmp_path, case=case)
    task.assert_same_weights(run.model, hand.model)
    assert sum(ranks(run.model).values()) < 20


@pytest.mark.parametrize(
    "every",
    ["2", pytest.param("epoch", marks=pytest.mark.slow), pytest.param("3", marks=pytest.mark.slow)],
)
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(
    every: str, tmp_path: Path
) -> None:
    keep = {"save_strategy": "epoch"}
    if every != "epoch":
        keep = {"save_strategy": "steps", "save_steps": int(every)}
    trained(tmp_path, **keep)
    saved = sorted(tmp_path.glob("checkpoint-*"))
    assert len(saved) >= 4
    for checkpoint in saved[:2]:
        again = trained(tmp_path / "again", resume=checkpoint)
        task.assert_same_weights(again.model, task.by_hand(weight=last_one_whole).model)


def test_the_best_checkpoint_has_larger_ranks_and_is_loaded(tmp_path: Path) -> None:
    class Rank(hf.TrainerCallback):
        def on_evaluate(self, *_: Any, model: nn.Module, metrics: Any, **__: Any) -> None:
            metrics["eval_rank"] = sum(ranks(model).values())

    run = trainer(
        tmp_path, save_strategy="epoch", eval_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="rank", greater_is_better=True, num_train_epochs=9,
    )  # fmt: skip
    run.add_callback(LoDTrainerCallback(run, **task.OPTIONS))
    run.add_callback(Rank())
    run.add_callback(hf.EarlyStoppingCallback(early_stopping_patience=2))
    run.train()
    history = [entry["lod/total_rank"] for entry in run.state.log_history if "lod/params" in entry]
    assert run.state.epoch == 3.0
    assert history[0] > history[1] > history[2]
    assert sum(ranks(run.model).values()) == history[0]
    assert run.evaluate()["eval_loss"] > 0
    with pytest.raises(TrainingError, match="a state with other ranks was loaded"):
        run.train()  # the optimizer remembers the smaller model


def test_evaluation_and_prediction_at_chosen_ranks(tmp_path: Path) -> None:
    run = trained(tmp_path, num_train_epochs=1)
    whole = run.evaluate()["eval_loss"]
    with at_ranks(run.model, 2):
        assert run.evaluate()["eval_loss"] != whole
        at_two = run.predict(Samples()).predictions
        expected = run.model(*task.SGD.samples())["logits"]
    torch.testing.assert_close(torch.as_tensor(at_two), expected.detach())
    assert run.evaluate()["eval_loss"] == whole


def test_ranks_and_cost_reach_whatever_is_reported_to(tmp_path: Path) -> None:
    reported = []

    class Reporter(hf.TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            reported.append(dict(logs))

    run = trainer(tmp_path, num_train_epochs=2)
    run.add_callback(Reporter())
    callback = LoDTrainerCallback(run, **task.OPTIONS)
    run.add_callback(callback)
    run.train()
    ours = [logs for logs in reported if "lod/total_rank" in logs]
    assert [logs["lod/total_rank"] for logs in ours] == [
        sum(callback.lod.history[1].values()),
        sum(ranks(run.model).values()),
    ]
    assert ours[-1]["lod/rank/net.0"] == ranks(run.model)["net.0"]
    assert ours[-1]["lod/training_relative_params"] > 0


# -- every size ------------------------------------------------------------------------------------

ELASTIC = {"method": Elastic, **task.ELASTIC}


# in bfloat16 the model computes its loss before Accelerate makes its logits float32
@pytest.mark.parametrize(
    "case", [c for c in task.IN_TRAINERS if c.id in ("sgd", "adamw", "float64")]
)
def test_elastic_gives_the_same_weights_as_by_hand(case: task.Case, tmp_path: Path) -> None:
    hand = task.elastic_by_hand(case, last_one_whole)
    run = trained(tmp_path, case=case, **ELASTIC)
    task.assert_same_weights(run.model, hand.model)
    phases = [log["lod/consolidation"] for log in run.state.log_history if "lod/params" in log]
    assert phases == [0.0, 0.0, 0.0, 1.0]
    assert run.compute_loss.__func__ is hf.Trainer.compute_loss


@pytest.mark.parametrize("options", [{}, {"sizes": [0.6]}], ids=["all", "one"])
def test_elastic_goes_on_from_any_step(options: dict[str, Any], tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"method": Elastic, "seed": 3, **(options or {"smallest": 0.3})}
    expected = trained(tmp_path, save_strategy="steps", save_steps=1, **chosen)
    for step in (2, 9, 11):
        again = trained(tmp_path / "again", resume=tmp_path / f"checkpoint-{step}", **chosen)
        task.assert_same_weights(again.model, expected.model)


def test_elastic_trains_a_model_that_the_trainer_compiles(tmp_path: Path) -> None:
    eager = trained(tmp_path, **ELASTIC)
    compiled = trained(tmp_path, torch_compile=True, torch_compile_backend="eager", **ELASTIC)
    for mine, theirs in zip(compiled.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


class LossOfItems(Classifier):
    """Divides the sum of losses by the labels of all accumulated batches, as language models."""

    def forward(self, x: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.net(x)
        total = kwargs.get("num_items_in_batch", len(labels))
        return {"loss": F.cross_entropy(logits, labels, reduction="sum") / total, "logits": logits}


def test_elastic_weighs_both_losses_alike_where_batches_are_accumulated(tmp_path: Path) -> None:
    """The last step of an epoch has one batch of four samples, the others two of eight."""
    model = decompose(LossOfItems())
    run = trainer(tmp_path, model)
    run.add_callback(LoDTrainerCallback(run, **ELASTIC))
    run.train()
    hand = task.elastic_by_hand(weight=last_one_whole)
    for mine, theirs in zip(model.parameters(), hand.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_elastic_trains_a_language_model_with_dropout_and_goes_on(tmp_path: Path) -> None:
    config = hf.GPT2Config(vocab_size=50, n_positions=12, n_embd=32, n_layer=2, n_head=2)
    ids = torch.randint(1, 50, (64, 12), generator=torch.Generator().manual_seed(1))
    ids[:, 1::2] = (ids[:, ::2] + 1) % 50
    labels = ids.masked_fill(torch.arange(12) < 3, -100)
    data = [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]

    def run(resume: Path | None = None) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = decompose(hf.GPT2LMHeadModel(config))
        arguments = hf.TrainingArguments(
            str(tmp_path), num_train_epochs=7, per_device_train_batch_size=8, learning_rate=3e-3,
            gradient_accumulation_steps=2, use_cpu=True, report_to=[], save_strategy="epoch",
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        own = hf.Trainer(model, arguments, train_dataset=data)
        callback = LoDTrainerCallback(own, method=Elastic, smallest=0.2)
        own.add_callback(callback)
        own.train(resume_from_checkpoint=resume)
        return model, callback.lod

    model, train = run()
    assert train._plan is not None
    batches = [batch for _, batch in zip(range(4), train._plan.batches, strict=False)]
    now = train._losses_of_sizes(train._objective(batches))
    assert sum(now) < sum(train._began)
    for step in (8, 24):
        again, _ = run(tmp_path / f"checkpoint-{step}")
        task.assert_same_weights(again, model)


def test_elastic_takes_a_loss_of_the_trainers_own(tmp_path: Path) -> None:
    def doubled(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return 2 * F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    class Unlabeled(Classifier):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {"logits": self.net(x)}

    run = trainer(tmp_path, decompose(Unlabeled()))
    run.compute_loss_func = doubled
    run.add_callback(LoDTrainerCallback(run, **ELASTIC))
    run.train()
    assert run.state.log_history[-2]["lod/consolidation"] == 1.0


def test_the_trainer_is_left_as_it_was_and_an_error_leaves_all_ranks_active(tmp_path: Path) -> None:
    run = trained(tmp_path, num_train_epochs=1)
    assert run.training_step.__func__ is hf.Trainer.training_step
    run.model.forward = lambda **_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.train()
    layers = [m for m in run.model.modules() if isinstance(m, LowRank)]
    assert all(layer.active_rank == layer.rank for layer in layers)


def test_the_state_is_part_of_the_trainers_own_file(tmp_path: Path) -> None:
    trained(tmp_path, save_strategy="epoch", num_train_epochs=1)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["maestro_lod"]["lod"]["epoch"] == 1
    del state["stateful_callbacks"]["maestro_lod"]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(TrainingError, match="has no state of LoDTrainerCallback"):
        trained(tmp_path, resume=checkpoint)


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayerError, match=r"no low-rank layer. Call decompose\(model\) first"):
        LoDTrainerCallback(trainer(tmp_path, Classifier()))
    with pytest.raises(OptionError, match="Create the trainer first"):
        LoDTrainerCallback(task.SGD.network())  # type: ignore[arg-type]

    model = Classifier()
    early = trainer(tmp_path, model)  # makes an optimizer
    decompose(model)
    early.add_callback(LoDTrainerCallback(early))
    with pytest.raises(TrainingError, match="after decompose"):
        early.train()

    twice = trainer(tmp_path)
    twice.add_callback(LoDTrainerCallback(twice))
    twice.callback_handler.callbacks.append(LoDTrainerCallback(twice))
    with pytest.raises(OptionError, match="the trainer has 2 callbacks LoDTrainerCallback"):
        twice.train()

    scaled = trainer(tmp_path)
    scaled.add_callback(LoDTrainerCallback(scaled, **task.OPTIONS))
    scaled.accelerator.scaler = object()  # as float16 has one on a GPU
    with pytest.raises(OptionError, match="Use proximal=True, or bf16"):
        scaled.train()

    sharded = trainer(tmp_path)
    sharded.accelerator.state.distributed_type = DistributedType.FSDP  # as on a GPU
    with pytest.raises(OptionError, match=r"Accelerate's FSDP .* Use DDP"):
        LoDTrainerCallback(sharded)
