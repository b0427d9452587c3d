"""Distillation brings a cut model back to its teacher, with or without the sizes below it."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import maestro_lod as lod
from maestro_lod import distill
from maestro_lod.errors import DataError, LayerError, MaestroError, OptionError
from maestro_lod.pretrained.distillation import hold_out
from maestro_lod.sizes.outputs import (
    own_outputs,
    scores_loss,
    soft_loss_for,
    values_loss,
)  # fmt: skip
from maestro_lod.train.evaluate import recalibrate


def teacher_and_data() -> tuple[nn.Module, list[Tensor], Tensor]:
    torch.manual_seed(0)
    scale = torch.logspace(0.5, -0.5, 20)
    model = nn.Sequential(nn.Linear(20, 40), nn.Dropout(0.5), nn.ReLU(), nn.Linear(40, 12)).eval()
    return model, [torch.randn(64, 20) * scale for _ in range(8)], torch.randn(256, 20) * scale


def cut(teacher: nn.Module, data: list[Tensor], ranks: int = 6) -> nn.Module:
    found = lod.calibrate(teacher, data)
    return lod.decompose(copy.deepcopy(teacher), ranks=ranks, calibration=found)


def error(model: nn.Module, teacher: nn.Module, x: Tensor, rank: int) -> float:
    with lod.at_ranks(model, rank), torch.no_grad():
        return float(values_loss(model.eval()(x), teacher(x)))


@pytest.mark.parametrize("sizes", ["only", "below", [{"0": 6}, {"0": 3, "3": 3}]])
def test_a_distilled_model_is_closer_to_its_teacher(sizes, snapshot):
    teacher, data, fresh = teacher_and_data()
    model, before = cut(teacher, data), snapshot(teacher)
    first = error(model, teacher, fresh, 6)
    done = distill(model, teacher, data, steps=150, lr=5e-3, sizes=sizes)
    assert error(model, teacher, fresh, 6) < 0.8 * first
    assert len(done.losses) == 150 and done.better
    assert lod.ranks(model) == {"0": 6, "3": 6}
    before.assert_unchanged(teacher)


def test_sizes_below_stay_good_only_if_they_are_trained_along():
    teacher, data, fresh = teacher_and_data()
    small = {}
    for sizes in ("only", "below"):
        model = cut(teacher, data, 6)
        before = error(model, teacher, fresh, 3)
        assert distill(model, teacher, data, steps=200, lr=5e-3, sizes=sizes).better
        small[sizes] = error(model, teacher, fresh, 3) / before
    assert small["below"] < small["only"]
    assert small["below"] < 1.05


def test_scores_are_distilled_by_their_probabilities():
    teacher, data, fresh = teacher_and_data()
    model = cut(teacher, data, 3)
    with torch.no_grad():
        before = scores_loss(model(fresh), teacher(fresh))
        least = scores_loss(teacher(fresh), teacher(fresh))
    distill(model, teacher, data, steps=150, lr=5e-3, sizes="only", soft_loss=scores_loss)
    with torch.no_grad():
        after = scores_loss(model(fresh), teacher(fresh))
    assert after - least < 0.8 * (before - least)


def test_what_transformers_calls_logits_is_compared_as_scores():
    scores = SimpleNamespace(logits=torch.randn(4, 5))
    hidden = SimpleNamespace(
        last_hidden_state=torch.randn(2, 3, 4), pooler_output=torch.randn(2, 4)
    )
    assert soft_loss_for(scores) is scores_loss
    assert soft_loss_for(hidden) is soft_loss_for(torch.randn(3)) is values_loss
    assert float(values_loss(hidden, hidden)) == 0.0
    assert own_outputs(scores).ndim == own_outputs(hidden).ndim == 0
    with pytest.raises(OptionError, match="2 tensors"):
        values_loss((torch.ones(1), torch.ones(2)), (torch.ones(1), torch.ones(2)))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("sizes", ["only", "below", [{"0": 6}, {"0": 3, "3": 3}]])
def test_a_killed_distillation_ends_as_if_it_had_not_been(sizes, tmp_path):
    teacher, data, fresh = teacher_and_data()
    whole, kept = cut(teacher, data), tmp_path / "unfinished"
    expected = distill(whole, teacher, data, steps=60, sizes=sizes)

    def kill(step: int, steps: int, note: str) -> None:
        if step == 57:
            raise Killed

    with pytest.raises(Killed):
        distill(cut(teacher, data), teacher, data, steps=60, sizes=sizes, resume=kept,
             on_progress=kill)  # fmt: skip
    model, steps = cut(teacher, data), list[int]()
    losses = distill(model, teacher, data, steps=60, sizes=sizes, resume=kept,
                  on_progress=lambda step, *_: steps.append(step))  # fmt: skip
    assert steps == list(range(51, 61))
    assert losses == expected
    torch.testing.assert_close(model(fresh), whole(fresh), rtol=0, atol=0)
    with pytest.raises(OptionError, match="unfinished work of another call: student is"):
        distill(cut(teacher, data, 7), teacher, data, steps=60, sizes=sizes, resume=kept)


OTHERS = {
    "data": {"data": lambda data: [data[0] + 1, *data[1:]]},
    "held out": {"data": lambda data: [*data[:-1], data[-1] + 1]},
    "order": {"data": lambda data: data[::-1]},
    "steps": {"steps": 61},
    "lr": {"lr": 1e-3},
    "sizes": {"sizes": "only"},
    "seed": {"seed": 1},
    "soft_loss": {"soft_loss": scores_loss},
    "teacher": {"teacher": lambda teacher: copy.deepcopy(teacher).requires_grad_(False).double()},
}


@pytest.mark.parametrize("what", OTHERS)
def test_unfinished_work_of_another_call_is_refused(what, tmp_path, snapshot):
    teacher, data, _ = teacher_and_data()

    def kill(step: int, steps: int, note: str) -> None:
        if step == 57:
            raise Killed

    with pytest.raises(Killed):
        distill(cut(teacher, data), teacher, data, steps=60, resume=tmp_path, on_progress=kill)
    options = {"steps": 60, "teacher": teacher, "data": data}
    for key, value in OTHERS[what].items():
        changed = key in ("data", "teacher")
        options[key] = value(options[key]) if changed else value  # type: ignore[operator]
    model = cut(teacher, data)
    before = snapshot(model)
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(OptionError, match=f"{what} is|with other data.*order") as refused:
        distill(model, resume=tmp_path, **options)
    assert "\n" not in str(refused.value)
    before.assert_unchanged(model)
    assert files == {file: file.read_bytes() for file in tmp_path.iterdir()}


def test_a_refused_call_leaves_no_directory(tmp_path):
    teacher, data, _ = teacher_and_data()
    with pytest.raises(OptionError, match="steps=0"):
        distill(cut(teacher, data), teacher, data, steps=0, resume=tmp_path / "unfinished")
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", ["only", "below", [{"0": 6}, {"0": 3, "3": 3}]])
def test_distillation_that_makes_it_worse_leaves_the_model_as_it_was(sizes, dtype, snapshot):
    teacher, data, _ = teacher_and_data()
    teacher, data = teacher.to(dtype), [x.to(dtype) for x in data]
    teacher.insert(1, nn.BatchNorm1d(40).to(dtype).eval())
    if not isinstance(sizes, str):  # the third layer is now the fourth
        sizes = [{"0": 6}, {"0": 3, "4": 3}]
    model = cut(teacher, data)
    before = snapshot(model)
    done = distill(model, teacher, data, steps=10, lr=3.0, sizes=sizes)
    assert not done.better and done.after > done.before
    assert "the weights from before are kept" in str(done)
    before.assert_unchanged(model)


def test_both_distances_are_of_the_same_batches_and_size():
    teacher, data, _ = teacher_and_data()
    held_out = [torch.cat(data[:2])]
    model = cut(teacher, data)
    first = error(model, teacher, held_out[0], 6)
    done = distill(model, teacher, data[2:], steps=100, lr=5e-3, held_out=held_out)
    assert (done.before, done.after) == (first, error(model, teacher, held_out[0], 6))
    assert done.better


def test_batches_that_are_measured_on_are_not_trained_on():
    split = hold_out([*range(20)])
    assert split == ([0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18], [19, 11, 3])
    assert hold_out([1]) == ([1], [1])


def test_hidden_states_are_compared_if_asked_to():
    teacher, data, fresh = teacher_and_data()
    distances = []
    for hidden in ((), ("2",)):
        model = cut(teacher, data, 4)
        distill(model, teacher, data, steps=150, lr=5e-3, sizes="only", hidden=hidden)
        with torch.no_grad():
            distances.append(float(values_loss(model.eval()[:3](fresh), teacher[:3](fresh))))
    assert distances[1] < 0.9 * distances[0]
    with pytest.raises(LayerError, match="hidden='9'"):
        distill(model, teacher, data, steps=1, hidden=["9"])


def test_norms_have_the_statistics_of_the_distilled_model():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    data = [torch.randn(32, 20) + 1 for _ in range(4)]
    recalibrate(teacher, [(x, None) for x in data])
    model = cut(teacher.eval(), data, 4)
    distill(model, teacher, data, steps=100, lr=5e-3, sizes="only", held_out=data)
    assert not any(module.training for module in model.modules())
    seen = torch.stack([model[0](x).mean(0) for x in data]).mean(0)
    torch.testing.assert_close(model[1].running_mean, seen)


def test_progress_and_seed():
    teacher, data, _ = teacher_and_data()
    told: list[tuple[int, int, str]] = []
    runs = [
        distill(cut(teacher, data), teacher, iter(data[:2]), steps=5,
             on_progress=lambda *step: told.append(step))
        for _ in range(2)
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert [step for step, *_ in told] == [1, 2, 3, 4, 5] * 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 0}, "steps=0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"sizes": "all"}, "sizes='all'"),
        ({"sizes": []}, "sizes=\\[\\]"),
        ({"sizes": [{"9": 3}]}, "'9'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, says):
    teacher, data, _ = teacher_and_data()
    with pytest.raises(MaestroError, match=says):
        distill(cut(teacher, data), teacher, data, **options)


def test_no_data_and_no_teacher_are_refused():
    teacher, data, _ = teacher_and_data()
    model = cut(teacher, data)
    with pytest.raises(DataError, match="to distill on has no batch"):
        distill(model, teacher, [])
    with pytest.raises(OptionError, match="the teacher is the student"):
        distill(model, model, data)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(5, 12), nn.Linear(12, 6)

    def forward(self, sequences: PackedSequence) -> Tensor:
        scores: Tensor = self.head(self.rnn(sequences)[1][-1])
        return scores


def test_packed_sequences_are_distilled() -> None:
    torch.manual_seed(0)
    teacher = Recurrent()
    data = [pack_sequence([torch.randn(n, 5) for n in (7, 4, 2)]) for _ in range(8)]
    found = lod.calibrate(teacher, data)
    model = lod.decompose(copy.deepcopy(teacher), ranks=0.5, calibration=found)
    losses = distill(model, teacher, data, steps=160, lr=2e-2, sizes="only").losses
    assert sum(losses[-8:]) < 0.5 * sum(losses[:8])
