"""Healing brings a cut model back to its teacher, with or without the sizes below it."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import maestro_lod as lod
from maestro_lod.errors import CheckpointError, DataError, LayerError, MaestroError, OptionError
from maestro_lod.pretrained.distillation import heal, hold_out
from maestro_lod.sizes.calibration import calibrate
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
    return lod.decompose(copy.deepcopy(teacher), ranks=ranks, calibration=calibrate(teacher, data))


def error(model: nn.Module, teacher: nn.Module, x: Tensor, rank: int) -> float:
    with lod.at_ranks(model, rank), torch.no_grad():
        return float(values_loss(model.eval()(x), teacher(x)))


@pytest.mark.parametrize("sizes", ["only", "below", [{"0": 6}, {"0": 3, "3": 3}]])
def test_a_healed_model_is_closer_to_its_teacher(sizes, snapshot):
    teacher, data, fresh = teacher_and_data()
    model, before = cut(teacher, data), snapshot(teacher)
    first = error(model, teacher, fresh, 6)
    healed = heal(model, data, teacher=teacher, steps=150, lr=5e-3, sizes=sizes)
    assert error(model, teacher, fresh, 6) < 0.8 * first
    assert len(healed.losses) == 150 and healed.better
    assert lod.ranks(model) == {"0": 6, "3": 6}
    before.assert_unchanged(teacher)


def test_sizes_below_stay_good_only_if_they_are_healed_along():
    teacher, data, fresh = teacher_and_data()
    small = {}
    for sizes in ("only", "below"):
        model = cut(teacher, data, 6)
        before = error(model, teacher, fresh, 3)
        assert heal(model, data, teacher=teacher, steps=200, lr=5e-3, sizes=sizes).better
        small[sizes] = error(model, teacher, fresh, 3) / before
    assert small["below"] < small["only"]
    assert small["below"] < 1.05


def test_scores_are_healed_by_their_probabilities():
    teacher, data, fresh = teacher_and_data()
    model = cut(teacher, data, 3)
    with torch.no_grad():
        before = scores_loss(model(fresh), teacher(fresh))
        least = scores_loss(teacher(fresh), teacher(fresh))
    heal(model, data, teacher=teacher, steps=150, lr=5e-3, sizes="only", soft_loss=scores_loss)
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
def test_a_killed_healing_ends_as_if_it_had_not_been(sizes, tmp_path):
    teacher, data, fresh = teacher_and_data()
    whole, kept = cut(teacher, data), tmp_path / "healing.safetensors"
    expected = heal(whole, data, teacher=teacher, steps=60, sizes=sizes)

    def kill(step: int, loss: float) -> None:
        if step == 57:
            raise Killed

    with pytest.raises(Killed):
        heal(cut(teacher, data), data, teacher=teacher, steps=60, sizes=sizes, checkpoint=kept,
             progress=kill)  # fmt: skip
    model, steps = cut(teacher, data), list[int]()
    losses = heal(model, data, teacher=teacher, steps=60, sizes=sizes, checkpoint=kept,
                  progress=lambda step, _: steps.append(step))  # fmt: skip
    assert steps == list(range(51, 61))
    assert losses == expected
    torch.testing.assert_close(model(fresh), whole(fresh), rtol=0, atol=0)
    again = {"steps": 60, "sizes": sizes, "checkpoint": kept}
    other_teacher, other_data = copy.deepcopy(teacher), [data[0] + 1, *data[1:]]
    other_teacher[0].weight.data[0, 0] += 1e-3
    for model, taught_by, batches, change in (
        (cut(teacher, data, 7), teacher, data, {}),
        (cut(teacher, data), other_teacher, data, {}),
        (cut(teacher, data), teacher, other_data, {}),
        (cut(teacher, data), teacher, data, {"lr": 1e-3}),
        (cut(teacher, data), teacher, data, {"steps": 61}),
    ):
        with pytest.raises(CheckpointError, match="another healing"):
            heal(model, batches, teacher=taught_by, **again | change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", ["only", "below", [{"0": 6}, {"0": 3, "3": 3}]])
def test_healing_that_makes_it_worse_leaves_the_model_as_it_was(sizes, dtype, snapshot):
    teacher, data, _ = teacher_and_data()
    teacher, data = teacher.to(dtype), [x.to(dtype) for x in data]
    teacher.insert(1, nn.BatchNorm1d(40).to(dtype).eval())
    if not isinstance(sizes, str):  # the third layer is now the fourth
        sizes = [{"0": 6}, {"0": 3, "4": 3}]
    model = cut(teacher, data)
    before = snapshot(model)
    healed = heal(model, data, teacher=teacher, steps=10, lr=3.0, sizes=sizes)
    assert not healed.better and healed.after > healed.before
    assert "the weights from before are kept" in str(healed)
    before.assert_unchanged(model)


def test_both_distances_are_of_the_same_batches_and_size():
    teacher, data, _ = teacher_and_data()
    held_out = [torch.cat(data[:2])]
    model = cut(teacher, data)
    first = error(model, teacher, held_out[0], 6)
    healed = heal(model, data[2:], teacher=teacher, steps=100, lr=5e-3, held_out=held_out)
    assert (healed.before, healed.after) == (first, error(model, teacher, held_out[0], 6))
    assert healed.better


def test_batches_that_are_measured_on_are_not_trained_on():
    seen = hold_out([*range(20)])
    assert seen == ([0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18], [19, 11, 3])
    assert hold_out([1]) == ([1], [1])


def test_hidden_states_are_compared_if_asked_to():
    teacher, data, fresh = teacher_and_data()
    distances = []
    for hidden in ((), ("2",)):
        model = cut(teacher, data, 4)
        heal(model, data, teacher=teacher, steps=150, lr=5e-3, sizes="only", hidden=hidden)
        with torch.no_grad():
            distances.append(float(values_loss(model.eval()[:3](fresh), teacher[:3](fresh))))
    assert distances[1] < 0.9 * distances[0]
    with pytest.raises(LayerError, match="hidden='9'"):
        heal(model, data, teacher=teacher, steps=1, hidden=["9"])


def test_norms_have_the_statistics_of_the_healed_model():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    data = [torch.randn(32, 20) + 1 for _ in range(4)]
    recalibrate(teacher, [(x, None) for x in data])
    model = cut(teacher.eval(), data, 4)
    heal(model, data, teacher=teacher, steps=100, lr=5e-3, sizes="only", held_out=data)
    assert not any(module.training for module in model.modules())
    seen = torch.stack([model[0](x).mean(0) for x in data]).mean(0)
    torch.testing.assert_close(model[1].running_mean, seen)


def test_progress_and_seed():
    teacher, data, _ = teacher_and_data()
    told: list[tuple[int, float]] = []
    runs = [
        heal(cut(teacher, data), iter(data[:2]), teacher=teacher, steps=5,
             progress=lambda *step: told.append(step))
        for _ in range(2)
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert [step for step, _ in told] == [1, 2, 3, 4, 5] * 2


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
        heal(cut(teacher, data), data, teacher=teacher, **options)


def test_no_data_and_no_teacher_are_refused():
    teacher, data, _ = teacher_and_data()
    model = cut(teacher, data)
    with pytest.raises(DataError, match="nothing to heal on"):
        heal(model, [], teacher=teacher)
    with pytest.raises(OptionError, match="the model itself"):
        heal(model, data, teacher=model)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(5, 12), nn.Linear(12, 6)

    def forward(self, sequences: PackedSequence) -> Tensor:
        scores: Tensor = self.head(self.rnn(sequences)[1][-1])
        return scores


def test_packed_sequences_heal() -> None:
    torch.manual_seed(0)
    teacher = Recurrent()
    data = [pack_sequence([torch.randn(n, 5) for n in (7, 4, 2)]) for _ in range(8)]
    model = lod.decompose(copy.deepcopy(teacher), ranks=0.5, calibration=calibrate(teacher, data))
    losses = heal(model, data, teacher=teacher, steps=160, lr=2e-2, sizes="only").losses
    assert sum(losses[-8:]) < 0.5 * sum(losses[:8])
