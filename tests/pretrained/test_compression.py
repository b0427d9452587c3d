"""One function takes a pretrained model to a limit, in place."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import maestro_lod as lod
from maestro_lod.errors import DataError, LayerError, OptionError
from maestro_lod.model.cost import count_params
from maestro_lod.model.survey import Plan
from maestro_lod.pretrained.compression import compress
from maestro_lod.pretrained.distillation import heal
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
    assert count_params(lod.extract(model)) == done.params
    assert lod.ranks(model) == done.ranks
    assert f"{done.params:,} of" in str(done)


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("tied", [False, True], ids=["linear", "tied"])
def test_what_is_said_is_in_the_file_and_in_what_is_loaded(sequential, tied, tmp_path):
    teacher, data = trained()
    if tied:
        torch.manual_seed(0)
        teacher, data = Tied(), [torch.randint(40, (8, 12)) for _ in range(3)]
    model = copy.deepcopy(teacher)
    done = compress(
        model, data, max_params=0.9, sequential=sequential, tied="share" if tied else "keep"
    )
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


def test_a_layer_that_is_not_cut_keeps_its_weights_unless_it_is_fitted():
    teacher, data = trained()
    model = copy.deepcopy(teacher)
    done = compress(model, data, max_params=0.9, sequential=False)
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
        "fast": {"sequential": False},
        "healed": {"sequential": False, "healing": 200},
        "corrected": {},
        "both": {"healing": 100},
    }.items():
        model = copy.deepcopy(teacher)
        compress(model, data, max_params=0.4, **options)
        found[name] = distance(model, teacher, fresh)
    plain = lod.extract(lod.decompose(copy.deepcopy(teacher)), 0.25)
    assert count_params(plain) >= 0.4 * count_params(teacher)
    assert found["corrected"] < found["fast"] < distance(plain, teacher, fresh)
    assert found["healed"] < found["fast"]
    assert found["both"] <= found["corrected"]


@pytest.mark.parametrize("seed", range(6))
def test_healing_never_makes_what_was_compressed_worse(seed):
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 10)).eval()
    data = [torch.randn(64, 24) for _ in range(8)]
    plain, healed = copy.deepcopy(teacher), copy.deepcopy(teacher)
    compress(plain, data, max_params=0.9)
    done = compress(healed, data, max_params=0.9, healing=60)
    distances = [distance(model, teacher, data[-1]) for model in (plain, healed)]
    assert distances[1] <= distances[0]
    assert done.healed is not None and done.healed.before == pytest.approx(distances[0])


def test_healing_that_makes_it_worse_is_undone_and_says_so(monkeypatch):
    teacher, data = trained()
    model = copy.deepcopy(teacher)
    plain = copy.deepcopy(teacher)
    compress(plain, data, max_params=0.4)
    with monkeypatch.context() as patched:
        patched.setattr("maestro_lod.pretrained.compression.heal", partial(heal, lr=1.0))
        done = compress(model, data, max_params=0.4, healing=20)
    assert done.healed is not None and not done.healed.better
    assert "the weights from before are kept" in str(done)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_progress_tells_each_part_to_its_end():
    teacher, data = trained()
    told: list[tuple[str, int, int]] = []
    compress(teacher, data, max_params=0.5, healing=3, progress=lambda *part: told.append(part),
             loss=own_scores, soft_loss=scores_loss)  # fmt: skip
    ends = {what: (done, of) for what, done, of in told}
    assert ends == {
        "calibrating": (6, 6), "decomposing": (3, 3), "correcting": (3, 3), "healing": (3, 3)
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
def test_half_precision_stays_half_and_is_healed(dtype):
    teacher, data = trained()
    teacher, data = teacher.to(dtype), [x.to(dtype) for x in data]
    model = copy.deepcopy(teacher)
    compress(model, data, max_params=0.4, healing=2)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert distance(model, teacher, data[0]) < 0.5


@pytest.mark.parametrize("sequential", [False, True])
def test_weights_that_are_replaced_are_never_copied(sequential, monkeypatch):
    model, data = trained()
    copied, deepcopy = [], nn.Parameter.__deepcopy__

    def noted(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        copied.append(parameter)
        return deepcopy(parameter, memo)

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", noted)
    compress(model, data, max_params=0.5, sequential=sequential)
    assert [p.ndim for p in copied] == ([1, 1, 1] if sequential else [])  # biases


@pytest.mark.parametrize("count", [3, 30])
def test_the_number_of_plans_does_not_grow_with_the_layers(count, monkeypatch):
    made, plan = [], Plan.__init__
    monkeypatch.setattr(Plan, "__init__", lambda *a, **k: (made.append(a), plan(*a, **k))[1])
    compress(nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)]), [torch.randn(9, 8)],
             max_params=0.7)  # fmt: skip
    assert len(made) == 2  # one to calibrate, one to cut


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "killed_in", ["calibrating", "decomposing", "correcting", "healing", "healed"]
)
def test_a_killed_compression_ends_as_if_it_had_not_been(killed_in, tmp_path):
    original, data = trained()
    whole = copy.deepcopy(original)
    options = {"max_params": 0.5, "healing": 4}
    expected = compress(whole, data, **options)

    def kill(what: str, done: int, of: int) -> None:
        if what == killed_in and done == max(1, of - 1):
            raise Killed

    interrupted, kept = copy.deepcopy(original), tmp_path / "kept"
    if killed_in == "healed":
        compress(interrupted, data, keep=kept, **options)
    else:
        with pytest.raises(Killed):
            compress(interrupted, data, keep=kept, progress=kill, **options)
    told: set[str] = set()
    model = copy.deepcopy(original)
    found = compress(model, data, keep=kept, progress=lambda what, *_: told.add(what), **options)
    assert found == expected
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=0, atol=0)
    parts = ["calibrating", "decomposing", "correcting", "healing", "healed"]
    again = {"calibrating", "correcting", "healing"} & set(parts[parts.index(killed_in) :])
    assert told == {"decomposing", *again}  # layers are exchanged anew, by factors that were kept
    with pytest.raises(OptionError, match=r"another call: .*max_params is 0\.4, not 0\.5"):
        compress(copy.deepcopy(original), data, max_params=0.4, keep=kept)


@pytest.mark.parametrize("what", ["model", "batches"])
def test_unfinished_work_on_another_model_or_other_data_is_not_continued(what, tmp_path):
    model, data = trained()
    compress(copy.deepcopy(model), data, max_params=0.5, keep=tmp_path)
    if what == "model":
        model[0].weight.data[0, 0] += 1e-3
    else:
        data[-1][0, 0] += 1e-3
    with pytest.raises(OptionError, match=f"another call: {what} is "):
        compress(model, data, max_params=0.5, keep=tmp_path)


@pytest.mark.parametrize("stage", ["calibrating", "decomposing", "correcting", "healing"])
def test_a_failure_in_any_stage_leaves_the_model_as_it_was(stage, snapshot):
    model = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.Linear(16, 24),
                          nn.TransformerEncoderLayer(24, 2, 24, dropout=0.0))  # fmt: skip
    before, bias = snapshot(model), model[0].bias

    def fail(what: str, done: int, of: int) -> None:
        if what == stage and done == of:
            raise Killed

    data = [torch.randn(64, 24) for _ in range(3)]
    with pytest.raises(Killed):
        compress(model, data, max_params=0.5, healing=2, progress=fail)
    before.assert_unchanged(model)
    assert model.training
    compress(model, data, max_params=0.5, healing=2)
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
    with pytest.raises(LayerError, match="bare Linear"):
        compress(nn.Linear(24, 24), data, max_params=0.5)


def test_nonsense_is_refused_before_anything_changes(snapshot):
    model, data = trained()
    before = snapshot(model)
    with pytest.raises(DataError, match="no batch"):
        compress(model, [], max_params=0.5)
    with pytest.raises(OptionError, match="max_params"):
        compress(model, data, max_params=-1)
    with pytest.raises(OptionError, match="healing"):
        compress(model, data, max_params=0.5, healing=-1)
    before.assert_unchanged(model)
