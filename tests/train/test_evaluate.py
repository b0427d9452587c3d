"""Scores are means over all targets that count; recalibrated statistics are means over batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from maestro_lod import LoD, at_ranks, decompose, fit
from maestro_lod.errors import OptionError
from maestro_lod.model.inputs import ModelInputs, in_mode, on_device
from maestro_lod.train.evaluate import (
    IGNORED,
    CrossEntropy,
    Score,
    correct_predictions,
    evaluate,
    first_samples,
    recalibrate,
)


def class_batches(sizes: list[int], classes: int = 4, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, classes, generator=generator),
            torch.randint(classes, (size,), generator=generator),
        )
        for size in sizes
    ]


def text_batches(lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Scores of two sequences each, with some targets that do not count."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for length in lengths:
        x = torch.randn(2, length, 5, generator=generator)
        y = torch.randint(5, (2, length), generator=generator)
        y[1, length // 2 :] = IGNORED
        batches.append((x, y))
    return batches


# -- the loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_is_over_the_targets_that_count(smoothing: float, reduction: str) -> None:
    (x, y), (classes, labels) = text_batches([6])[0], class_batches([5])[0]
    loss = CrossEntropy(smoothing, reduction)
    options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    counts = y != IGNORED
    torch.testing.assert_close(loss(x, y), F.cross_entropy(x[counts], y[counts], **options))
    assert torch.equal(loss(classes, labels), F.cross_entropy(classes, labels, **options))


# -- evaluate ----------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 99))
def test_loss_and_accuracy_are_means_over_samples_however_they_are_batched(
    sizes: list[int], seed: int
) -> None:
    batches = class_batches(sizes, seed=seed)
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    means = evaluate(nn.Identity(), batches)
    assert means.keys() == {"loss", "accuracy"}
    assert means["loss"] == pytest.approx(F.cross_entropy(x, y).item(), rel=1e-5)
    assert means["accuracy"] == (x.argmax(1) == y).sum().item() / len(y)


@pytest.mark.parametrize("loss", [None, CrossEntropy(reduction="sum")], ids=["mean", "sum"])
def test_text_gets_its_perplexity_over_the_targets_that_count(loss: CrossEntropy | None) -> None:
    batches = text_batches([3, 8])
    x, y = (
        torch.cat([x.flatten(0, 1) for x, _ in batches]),
        torch.cat([y.flatten() for _, y in batches]),
    )
    x, y = x[y != IGNORED], y[y != IGNORED]
    assert len(y) == 3 + 1 + 8 + 4
    means = evaluate(nn.Identity(), batches, loss)
    assert means.keys() == {"loss", "accuracy", "perplexity"}
    assert means["loss"] == pytest.approx(F.cross_entropy(x, y).item(), rel=1e-5)
    assert means["accuracy"] == (x.argmax(1) == y).sum().item() / len(y)
    assert means["perplexity"] == pytest.approx(math.exp(means["loss"]))


def test_a_perplexity_beyond_all_numbers_is_not_an_error() -> None:
    x, y = torch.tensor([[[1e4, 0.0]]]), torch.tensor([[1]])
    assert math.isfinite(evaluate(nn.Identity(), [(x, y)])["perplexity"])


def test_ignored_labels_of_single_targets_do_not_count() -> None:
    x, y = class_batches([6])[0]
    y[[1, 4]] = IGNORED
    keep = y != IGNORED
    means = evaluate(nn.Identity(), [(x, y)])
    assert means == evaluate(nn.Identity(), [(x[keep], y[keep])])


def test_batches_in_which_nothing_counts_are_passed_over() -> None:
    (x, y), good = class_batches([3])[0], class_batches([5], seed=2)
    empty = x, torch.full_like(y, IGNORED)
    assert evaluate(nn.Identity(), [empty, *good, empty]) == evaluate(nn.Identity(), good)


NOTHING: dict[str, tuple[list[Any], Any]] = {
    "no batch": ([], None),
    "no sample": ([(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))], None),
    "no value": ([(torch.zeros(0, 3), torch.zeros(0, 3))], nn.MSELoss()),
}


@pytest.mark.parametrize(("batches", "loss"), NOTHING.values(), ids=NOTHING)
def test_nothing_to_evaluate_on_is_refused(batches: list[Any], loss: Any) -> None:
    with pytest.raises(OptionError, match="no batch with a target"):
        evaluate(nn.Identity(), batches, loss)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_regression_has_a_loss_alone(reduction: str) -> None:
    torch.manual_seed(3)
    batches = [(torch.randn(size), torch.randn(size)) for size in (4, 7, 1)]
    means = evaluate(nn.Identity(), batches, nn.MSELoss(reduction=reduction))
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    assert means.keys() == {"loss"}
    assert means["loss"] == pytest.approx(F.mse_loss(x, y).item(), rel=1e-5)


def test_classes_in_the_second_dimension_are_left_to_the_users_loss() -> None:
    """As torch's own loss has them, for images and sequences: no accuracy, and no error."""
    torch.manual_seed(3)
    x, y = torch.randn(4, 3, 6, 5), torch.randint(3, (4, 6, 5))
    assert evaluate(nn.Identity(), [(x, y)], F.cross_entropy) == {
        "loss": pytest.approx(F.cross_entropy(x, y).item())
    }


class Parts(nn.Module):
    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"sum": (a + b) * scale}


TARGETS: dict[str, Callable[[Tensor], Any]] = {
    "mapping": lambda y: {"sum": y},
    "tuple": lambda y: (y, "a name"),
    "list": lambda y: [y],
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("kind", ["tuple", "list", "mapping"])
def test_inputs_targets_and_outputs_of_any_structure(
    kind: str, target: Callable[[Tensor], Any]
) -> None:
    def loss(output: dict[str, Tensor], wanted: Any) -> Tensor:
        y = wanted["sum"] if isinstance(wanted, dict) else wanted[0]
        return F.l1_loss(output["sum"], y)

    batches, errors = [], []
    for size in (3, 8):
        a, b, y = torch.randn(size), torch.randn(size), torch.randn(size)
        inputs = {"tuple": (a, b, 2.0), "list": [a, b, 2.0]}.get(kind)
        batches.append((inputs or {"b": b, "a": a, "scale": 2.0}, target(y)))
        errors.append(((a + b) * 2 - y).abs())
    expected = torch.cat(errors).mean().item()
    assert evaluate(Parts(), batches, loss)["loss"] == pytest.approx(expected, rel=1e-5)


def test_without_any_tensor_in_the_targets_every_batch_counts_the_same() -> None:
    batches: list[Any] = [(torch.full((n,), float(n)), None) for n in (1, 2, 6)]
    assert evaluate(nn.Identity(), batches, lambda x, _: x.mean()) == {"loss": 3.0}


def test_evaluation_leaves_no_graph_no_mode_and_no_statistic_behind(
    snapshot: Callable[[nn.Module], Any],
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    model[2].eval()
    before = snapshot(model)
    seen: list[tuple[bool, bool]] = []
    model[0].register_forward_hook(
        lambda _, __, out: seen.append(
            (out.requires_grad, any(m.training for m in model.modules()))
        )
    )
    first = evaluate(model, class_batches([5, 3]))
    assert first == evaluate(model, class_batches([5, 3])), "something random was left on"
    assert seen == [(False, False)] * 4
    before.assert_unchanged(model)
    assert [module.training for module in model] == [True, True, False, True]


def test_modes_are_restored_after_an_exception() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout().eval())
    with pytest.raises(RuntimeError, match="shape"):
        evaluate(model, [(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))])
    assert [module.training for module in model] == [True, False] and model.training
    with pytest.raises(ZeroDivisionError), in_mode(model, training=True):
        assert model[1].training
        raise ZeroDivisionError
    assert not model[1].training


@pytest.mark.parametrize("amp", [False, True])
def test_amp_runs_matrix_products_in_bfloat16(amp: bool) -> None:
    model = nn.Linear(4, 4)
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    means = evaluate(model, class_batches([6]), amp=amp)
    assert seen == [torch.bfloat16 if amp else torch.float32]
    assert means["loss"] == pytest.approx(evaluate(model, class_batches([6]))["loss"], rel=0.05)


def test_the_submodel_that_is_active_is_evaluated() -> None:
    model = decompose(nn.Linear(4, 4))
    full = evaluate(model, class_batches([9]))
    with at_ranks(model, 1):
        assert evaluate(model, class_batches([9])) != full
    assert evaluate(model, class_batches([9])) == full


# -- scores ------------------------------------------------------------------------------------


def test_a_score_adds_up() -> None:
    score = Score()
    assert score.means() == {}
    output, target = torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0])
    score.add(torch.tensor(0.5), output, target)
    assert score.means() == {"loss": 0.5, "accuracy": 0.5}
    score.add(torch.tensor(6.0), output[:1], target[:1], summed=True)
    assert score == Score(loss=7.0, correct=2.0, count=3, classified=3)
    assert score.means("train_") == {"train_loss": 7 / 3, "train_accuracy": 2 / 3}


def test_accuracy_is_over_what_was_classified() -> None:
    score = Score()
    score.add(torch.tensor(1.0), torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    score.add(torch.tensor(2.0), torch.zeros(3), torch.zeros(3))
    assert score.means() == {"loss": 7 / 4, "accuracy": 1.0}


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.zeros(3, 2), torch.zeros(3)),
        (torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, 4, 2), torch.zeros(3, 2, dtype=torch.int64)),
        (torch.zeros(()), torch.zeros((), dtype=torch.int64)),
        ([torch.zeros(3, 2)], torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, 2), [0, 1, 1]),
        (torch.zeros(3, 2), None),
    ],
    ids=["real", "no scores", "one score", "other shape", "scalar", "list", "numbers", "none"],
)
def test_targets_that_are_no_classes_have_no_hits(output: Any, target: Any) -> None:
    assert correct_predictions(output, target) is None


# -- devices and arguments ---------------------------------------------------------------------


def test_all_tensors_of_a_batch_are_moved() -> None:
    batch = {"a": torch.zeros(2), "b": [torch.zeros(1), "text", (torch.zeros(3), 5)], "c": None}
    moved = on_device(batch, torch.device("meta"))
    assert moved["a"].is_meta and moved["b"][0].is_meta and moved["b"][2][0].is_meta
    assert (moved["b"][1], moved["b"][2][1], moved["c"]) == ("text", 5, None)
    assert not batch["a"].is_meta


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, sequences: PackedSequence) -> Tensor:
        scores: Tensor = self.head(self.rnn(sequences)[1][-1])
        return scores


def test_packed_sequences_are_one_input() -> None:
    torch.manual_seed(0)
    packed = pack_padded_sequence(torch.randn(4, 6, 5), torch.tensor([6, 4, 3, 1]), True)
    assert isinstance(on_device(packed, torch.device("cpu")), PackedSequence)
    data = [(packed, torch.tensor([0, 1, 2, 0]))] * 4
    model = decompose(LastState())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    done = fit(model, data, optimizer=optimizer, method=LoD(model, optimizer), epochs=4)
    assert done.history[-1].train["loss"] < 0.7 * done.history[0].train["loss"]
    assert evaluate(model, data)["loss"] < 1.0


def test_a_model_is_called_with_a_tensor_arguments_or_keywords() -> None:
    a, b = torch.ones(2), torch.ones(2)
    for inputs in ((a, b), [a, b], {"b": b, "a": a}):
        assert ModelInputs.wrap(inputs).call(Parts())["sum"].tolist() == [2, 2]
    assert ModelInputs.wrap(a).call(nn.Identity()) is a


# -- recalibration -----------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(), nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, momentum=0.3), nn.Flatten(), nn.BatchNorm1d(4, momentum=None),
    )  # fmt: skip


def images(sizes: list[int]) -> list[tuple[Tensor, None]]:
    generator = torch.Generator().manual_seed(2)
    return [(2 + torch.randn(size, 2, 5, 5, generator=generator), None) for size in sizes]


NORMS = [1, 5, 7]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("decomposed", [True, False])
def test_statistics_are_plain_means_over_batches(training: bool, decomposed: bool) -> None:
    model = net()
    if decomposed:
        model = decompose(model, ranks=2)
    model(images([9])[0][0] * 7)  # statistics of something else
    model.train(training)
    model[5].eval()
    batches = images([4, 6, 5])
    means: dict[int, list[Tensor]] = {i: [] for i in NORMS}
    variances: dict[int, list[Tensor]] = {i: [] for i in NORMS}
    for x, _ in batches:
        with torch.no_grad():
            for i, layer in enumerate(model):
                if i in NORMS:
                    dims = [d for d in range(x.ndim) if d != 1]
                    means[i].append(x.mean(dims))
                    variances[i].append(x.var(dims))
                    x = F.batch_norm(x, None, None, layer.weight, layer.bias, training=True)
                elif not isinstance(layer, nn.Dropout):
                    x = layer(x)
    assert recalibrate(model, batches) == 3
    for i in NORMS:
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(model[i].running_mean, sum(means[i]) / 3, **close)
        torch.testing.assert_close(model[i].running_var, sum(variances[i]) / 3, **close)
        assert model[i].num_batches_tracked == 3
    assert [model[i].momentum for i in NORMS] == [0.1, 0.3, None]
    assert [module.training for module in model] == [training] * 5 + [False] + [training] * 2


def test_weights_buffers_and_gradients_stay_what_they_are() -> None:
    model = net()
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    weights = copy.deepcopy(dict(model.named_parameters()))
    graphs: list[bool] = []
    model[5].register_forward_hook(lambda _, __, out: graphs.append(out.requires_grad))
    recalibrate(model, images([4, 4]))
    assert graphs == [False, False]
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]) and parameter.grad is None
        assert parameter.requires_grad
    assert not any(buffer.requires_grad for buffer in model.buffers())


def test_the_same_data_gives_the_same_statistics_again() -> None:
    model = net()
    found = []
    for _ in range(2):
        recalibrate(model, images([4, 5]))
        found.append(copy.deepcopy(dict(model.named_buffers())))
        model(images([9])[0][0])
    for name, buffer in found[0].items():
        assert torch.equal(buffer, found[1][name]), name


def test_no_more_batches_than_asked_for_are_read() -> None:
    read: list[int] = []

    def batches() -> Any:
        for i, batch in enumerate(images([4] * 5)):
            read.append(i)
            yield batch

    model = net()
    assert recalibrate(model, batches(), 2) == 2
    assert read == [0, 1] and model[1].num_batches_tracked == 2


def test_inputs_may_be_arguments() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, *, x: Tensor) -> Tensor:
            return self.norm(x)

    model = Named()
    recalibrate(model, [({"x": torch.tensor([[1.0, 2, 3], [3, 4, 5]])}, None)])
    assert model.norm.running_mean.tolist() == [2, 3, 4]


@pytest.mark.parametrize("most", [0, 100])
def test_without_norms_or_batches_to_use_nothing_is_read(
    most: int, snapshot: Callable[[nn.Module], Any]
) -> None:
    def batches() -> Any:
        raise AssertionError("the data was read")
        yield

    without = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False))
    model = without if most else net()
    before = snapshot(model)
    assert recalibrate(model, batches(), most) == 0
    before.assert_unchanged(model)


class Broken(Exception):
    """Raised by data in the middle."""


def broken_data() -> Any:
    yield from images([4, 4])
    raise Broken


def wrong_shape() -> Any:
    yield from images([4])
    yield torch.zeros(2, 7, 5, 5), None


@pytest.mark.parametrize(
    ("batches", "error"),
    [(broken_data, Broken), (wrong_shape, RuntimeError), (list, OptionError)],
    ids=["data", "model", "no batch"],
)
def test_everything_is_restored_after_an_exception(
    batches: Callable[[], Any], error: type[Exception], snapshot: Callable[[nn.Module], Any]
) -> None:
    model = net()
    model(images([6])[0][0])
    model[5].eval()
    before = snapshot(model)
    with pytest.raises(error):
        recalibrate(model, batches())
    before.assert_unchanged(model)
    assert [model[i].momentum for i in NORMS] == [0.1, 0.3, None]
    assert [model[i].training for i in NORMS] == [True, False, True]
    assert torch.is_grad_enabled()


def test_recalibration_makes_a_submodel_usable() -> None:
    """The statistics are those of the ranks that are active."""
    model, batches = decompose(net()), images([8, 8])
    with at_ranks(model, {"0": 1}):
        recalibrate(model, batches)
        small = copy.deepcopy(dict(model.named_buffers()))
    recalibrate(model, batches)
    assert not torch.allclose(small["1.running_var"], model[1].running_var)


def test_first_samples_are_the_same_ones_and_leave_the_global_generator_as_it_was():
    inputs, targets = torch.arange(40.0).view(40, 1), torch.zeros(40, dtype=torch.int64)
    data = TensorDataset(inputs, targets)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again = first_samples(loader, 16), first_samples(loader, 16)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[0][0], again[0][0])
