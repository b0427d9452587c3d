"""One function takes a pretrained model to a limit, in place."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import maestro_lod as lod
from maestro_lod import compress
from maestro_lod.errors import DataError, LayerError, OptionError
from maestro_lod.model.cost import count_params
from maestro_lod.model.survey import Plan
from maestro_lod.pretrained.distillation import Distillation
from maestro_lod.sizes.outputs import own_scores, scores_loss, values_loss
from tests.support.kinds import Tied


def trained() -> tuple[nn.Module, list[torch.Tensor]]:
    """A stand-in for a pretrained model: its weights and its data have directions that matter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(),
                          nn.Linear(48, 10)).eval()  # fmt: skip
    data = [torch.randn(64, 24) * torch.logspace(0.5, -1, 24) for _ in range(6)]
    return model, data


def distance(model: nn.Module, teacher: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return float(values_loss(model(x), teacher(x)))


def test_the_limit_is_kept_by_what_is_deployed():
    teacher, data = trained()
    model = copy.deepcopy(teacher)
    done = compress(model, data, max_params=0.5)
    assert done.params <= 0.5 * done.dense_params
    assert done.dense_params == count_params(teacher)
    assert count_params(lod.extract(model)) <= done.params
    assert lod.ranks(model) == done.ranks
    assert f"{done.params:,} of" in str(done)


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("tied", [False, True], ids=["linear", "tied"])
def test_what_is_said_is_in_the_file_and_in_what_is_loaded(correct, tied, tmp_path):
    teacher, data = trained()
    if tied:
        torch.manual_seed(0)
        teacher, data = Tied(), [torch.randint(40, (8, 12)) for _ in range(3)]
    model = copy.deepcopy(teacher)
    done = compress(model, data, max_params=0.9, correct=correct, tied="share" if tied else "keep")
    file = tmp_path / "model.safetensors"
    lod.save(model, file)
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    loaded = lod.load(file, into=copy.deepcopy(teacher))
    assert file.stat().st_size - header == done.bytes <= 0.9 * done.dense_bytes
    assert count_params(loaded) == count_params(model) == done.params <= 0.9 * done.dense_params
    assert lod.ranks(loaded) == done.ranks
    share = done.bytes / done.dense_bytes
    assert f"{done.bytes:,} of {done.dense_bytes:,} bytes ({share:.2f}×)" in str(done)
    torch.testing.assert_close(loaded(data[0]), model(data[0]))


def test_a_layer_that_is_not_cut_keeps_its_weights_unless_it_is_corrected():
    teacher, data = trained()
    model = copy.deepcopy(teacher)
    done = compress(model, data, max_params=0.9, correct=False)
    kept = [name for name, layer in model.named_modules() if type(layer) is nn.Linear]
    assert kept
    for name in kept:
        assert torch.equal(model.get_submodule(name).weight, teacher.get_submodule(name).weight)
    assert not {*kept} & done.ranks.keys()


def test_a_limit_that_cuts_nothing_is_refused(snapshot):
    model, data = trained()
    before = snapshot(model)
    with pytest.raises(OptionError, match="no layer would be cut"):
        compress(model, data, max_params=1.0)
    before.assert_unchanged(model)


def test_each_part_brings_the_model_closer_to_the_original():
    teacher, data = trained()
    fresh = torch.randn(256, 24) * torch.logspace(0.5, -1, 24)
    found = {}
    for name, options in {
        "fast": {"correct": False},
        "distilled": {"correct": False, "distill_steps": 200},
        "corrected": {},
        "both": {"distill_steps": 100},
    }.items():
        model = copy.deepcopy(teacher)
        compress(model, data, max_params=0.4, **options)
        found[name] = distance(model, teacher, fresh)
    plain = lod.extract(lod.decompose(copy.deepcopy(teacher)), 0.25)
    assert count_params(plain) >= 0.4 * count_params(teacher)
    assert found["corrected"] < found["fast"] < distance(plain, teacher, fresh)
    assert found["distilled"] < found["fast"]
    assert (
        found["both"] <= 1.05 * found["corrected"]
    )  # on other data than what is kept is judged by


@pytest.mark.parametrize("seed", range(6))
def test_distillation_never_makes_a_compressed_model_worse(seed):
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 10)).eval()
    data = [torch.randn(64, 24) for _ in range(8)]
    plain, distilled = copy.deepcopy(teacher), copy.deepcopy(teacher)
    compress(plain, data, max_params=0.9)
    done = compress(distilled, data, max_params=0.9, distill_steps=60)
    distances = [distance(model, teacher, data[-1]) for model in (plain, distilled)]
    assert distances[1] <= distances[0]
    assert done.distilled is not None and done.distilled.before == pytest.approx(distances[0])


def test_distillation_that_makes_it_worse_is_undone_and_says_so(monkeypatch):
    teacher, data = trained()
    model, plain = copy.deepcopy(teacher), copy.deepcopy(teacher)
    compress(plain, data, max_params=0.4)
    with monkeypatch.context() as patched:
        harmful = partial(Distillation, lr=1.0)
        patched.setattr("maestro_lod.pretrained.compression.Distillation", harmful)
        done = compress(model, data, max_params=0.4, distill_steps=20)
    assert done.distilled is not None and not done.distilled.better
    assert "the weights from before are kept" in str(done)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_progress_tells_each_part_to_its_end():
    teacher, data = trained()
    told: list[tuple[int, int, str]] = []
    compress(teacher, data, max_params=0.5, distill_steps=3, loss=own_scores,
             soft_loss=scores_loss, on_progress=lambda *part: told.append(part))  # fmt: skip
    ends = {what: (done, of) for done, of, what in told}
    assert ends == {
        "calibrating": (6, 6), "decomposing": (3, 3), "measuring": (3, 3), "correcting": (1, 1),
        "distilling": (3, 3),
    }  # fmt: skip


def test_a_tied_pair_is_compressed_if_asked_to():
    ids = [torch.randint(40, (8, 12)) for _ in range(3)]
    with pytest.raises(lod.MaestroError):
        compress(Tied(), ids, max_params=0.5)
    model = Tied()
    done = compress(model, ids, max_params=0.7, tied="share")
    assert done.params <= 0.7 * done.dense_params
    assert model(ids[0]).shape == (8, 12, 40)


def test_one_sample_is_enough_to_compress_by():
    teacher, data = trained()
    model, sample = copy.deepcopy(teacher), data[0][:1]
    compress(model, [sample], max_params=0.4)
    plain = lod.extract(lod.decompose(copy.deepcopy(teacher)), 0.25)
    assert distance(model, teacher, sample) < 0.01 * distance(plain, teacher, sample)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half_and_is_distilled(dtype):
    teacher, data = trained()
    teacher, data = teacher.to(dtype), [x.to(dtype) for x in data]
    model = copy.deepcopy(teacher)
    compress(model, data, max_params=0.4, distill_steps=2)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert distance(model, teacher, data[0]) < 0.5


@pytest.mark.parametrize("correct", [False, True])
def test_weights_that_are_replaced_are_never_copied(correct, monkeypatch):
    model, data = trained()
    copied, deepcopy = [], nn.Parameter.__deepcopy__

    def noted(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        copied.append(parameter)
        return deepcopy(parameter, memo)

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", noted)
    compress(model, data, max_params=0.3, correct=correct)
    assert [p.ndim for p in copied] == ([1, 1, 1] if correct else [])  # biases


@pytest.mark.parametrize("count", [3, 30])
def test_the_number_of_plans_does_not_grow_with_the_layers(count, monkeypatch):
    made, plan = [], Plan.__init__
    monkeypatch.setattr(Plan, "__init__", lambda *a, **k: (made.append(a), plan(*a, **k))[1])
    compress(nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)]), [torch.randn(9, 8)],
             max_params=0.7)  # fmt: skip
    assert len(made) == 1


def test_several_sizes_are_nested_and_each_keeps_its_limit():
    teacher, data = trained()
    model = copy.deepcopy(teacher)
    done = compress(model, data, sizes=[0.4, 0.8, 0.6])
    assert len(done.frontier) == 3
    assert str(done).startswith(f"{done.params:,} of {done.dense_params:,} parameters")
    larger = lod.ranks(model)
    for share, point in zip((0.8, 0.6, 0.4), done.frontier, strict=True):
        assert point.ranks == done.frontier.pick(max_params=share)
        assert all(rank <= larger[name] for name, rank in point.ranks.items())
        assert (
            count_params(lod.extract(model, point.ranks)) <= point.params
        )  # in the smallest forms
        assert point.params <= share * done.dense_params
        larger = point.ranks
    losses = [point.loss for point in done.frontier]
    assert losses == sorted(losses)


def test_a_size_that_is_corrected_with_others_is_nearly_as_good_as_alone():
    teacher, data = trained()
    alone, both = copy.deepcopy(teacher), copy.deepcopy(teacher)
    compress(alone, data, max_params=0.4)
    sizes = compress(both, data, sizes=[0.7, 0.4]).frontier
    fresh = torch.randn(256, 24) * torch.logspace(0.5, -1, 24)
    small = lod.extract(both, sizes.pick(max_params=0.4))
    assert distance(small, teacher, fresh) <= 1.5 * distance(alone, teacher, fresh)


@pytest.mark.parametrize("sizes", [[], None])
def test_no_size_is_refused(sizes):
    model, data = trained()
    with pytest.raises(OptionError, match="sizes="):
        compress(model, data, sizes=sizes)


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "killed_in",
    ["calibrating", "decomposing", "measuring", "correcting", "distilling", "distilled"],
)
def test_a_killed_compression_ends_as_if_it_had_not_been(killed_in, tmp_path):
    original, data = trained()
    whole = copy.deepcopy(original)
    options = {"max_params": 0.5, "distill_steps": 4}
    expected = compress(whole, data, **options)

    def kill(done: int, of: int, what: str) -> None:
        if what == killed_in and done == max(1, of - 1):
            raise Killed

    interrupted, kept = copy.deepcopy(original), tmp_path / "kept"
    if killed_in == "distilled":
        compress(interrupted, data, resume=kept, **options)
    else:
        with pytest.raises(Killed):
            compress(interrupted, data, resume=kept, on_progress=kill, **options)
    told: set[str] = set()
    model = copy.deepcopy(original)
    found = compress(
        model, data, resume=kept, on_progress=lambda done, total, note: told.add(note), **options
    )
    assert found == expected
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=0, atol=0)
    parts = ["calibrating", "measuring", "decomposing", "correcting", "distilling", "distilled"]
    again = {"calibrating", "measuring", "distilling"} & set(parts[parts.index(killed_in) :])
    if killed_in == "decomposing":
        again.add("measuring")
    # layers are exchanged and blocks run again, with the factors and weights that were kept
    assert told == {"decomposing", "correcting", *again}
    with pytest.raises(OptionError, match="unfinished work of another call"):
        compress(copy.deepcopy(original), data, max_params=0.4, resume=kept)


OTHERS = {
    "max_params": lambda model, data: (model, data, {"max_params": 0.4}),
    "correct": lambda model, data: (model, data, {"correct": False}),
    "distill_steps": lambda model, data: (model, data, {"distill_steps": 3}),
    "tied": lambda model, data: (model, data, {"tied": "share"}),
    "loss": lambda model, data: (model, data, {"loss": own_scores}),
    "soft_loss": lambda model, data: (model, data, {"soft_loss": scores_loss}),
    "data": lambda model, data: (model, [*data[:-1], data[-1] + 1], {}),
    "data in another order": lambda model, data: (model, data[::-1], {}),
    "model": lambda model, data: (nn.Sequential(*model[:-1], nn.Linear(48, 10)), data, {}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_unfinished_work_of_another_call_is_refused(what, tmp_path, snapshot):
    model, data = trained()

    def kill(done: int, total: int, note: str) -> None:
        if note == "correcting":
            raise Killed

    with pytest.raises(Killed):
        compress(copy.deepcopy(model), data, max_params=0.5, resume=tmp_path, on_progress=kill)
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    model, data, options = OTHERS[what](model, data)
    before = snapshot(model)
    says = f"unfinished work of another call: {what.partition(' ')[0]} is .*, not "
    with pytest.raises(OptionError, match=says) as refused:
        compress(model, data, **{"max_params": 0.5, **options}, resume=tmp_path)
    assert "\n" not in str(refused.value)
    before.assert_unchanged(model)
    assert files == {file: file.read_bytes() for file in tmp_path.iterdir()}


@pytest.mark.parametrize("stage", ["calibrating", "measuring", "correcting", "distilling"])
def test_a_failure_in_any_stage_leaves_the_model_as_it_was(stage, snapshot):
    model = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.Linear(16, 24),
                          nn.TransformerEncoderLayer(24, 2, 24, dropout=0.0))  # fmt: skip
    before, bias = snapshot(model), model[0].bias

    def fail(done: int, of: int, what: str) -> None:
        if what == stage and done == of:
            raise Killed

    data = [torch.randn(64, 24) for _ in range(3)]
    with pytest.raises(Killed):
        compress(model, data, max_params=0.5, distill_steps=2, on_progress=fail)
    before.assert_unchanged(model)
    assert model.training
    compress(model, data, max_params=0.5, distill_steps=2)
    assert model[0].bias is bias
    assert "3.self_attn.q" in lod.ranks(model)


def test_what_cannot_be_compressed_is_left_as_it_was(snapshot):
    model, data = trained()
    before = snapshot(model)
    with pytest.raises(OptionError, match="cannot be reached"):
        compress(model, data, max_params=0.01)
    before.assert_unchanged(model)
    with torch.no_grad():
        model[4].weight[0, 0] = torch.nan
    before = snapshot(model)
    with pytest.raises(LayerError, match="4 has NaN"):
        compress(model, data, max_params=0.5)
    before.assert_unchanged(model)
    with pytest.raises(
        LayerError, match="a single layer, which cannot be replaced in place: Linear"
    ):
        compress(nn.Linear(24, 24), data, max_params=0.5)


def test_nonsense_is_refused_before_anything_changes(snapshot):
    model, data = trained()
    before = snapshot(model)
    with pytest.raises(DataError, match="no batch"):
        compress(model, [], max_params=0.5)
    with pytest.raises(OptionError, match="max_params"):
        compress(model, data, max_params=-1)
    with pytest.raises(OptionError, match="distill_steps=-1"):
        compress(model, data, max_params=0.5, distill_steps=-1)
    before.assert_unchanged(model)
