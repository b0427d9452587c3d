"""A stage cache belongs to one call, and gives back what that call has finished."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maestro_lod.errors import CheckpointError, OptionError
from maestro_lod.files.digests import compute_digest
from maestro_lod.files.stage_cache import StageCache


def test_a_finished_stage_is_not_computed_again(tmp_path: Path) -> None:
    made = list[int]()

    def compute() -> dict[str, Any]:
        made.append(1)
        return {"tensor": torch.arange(3), "count": 2, "none": None}

    for _ in range(2):
        found = StageCache(tmp_path, {"a": 1}).get_or_compute("stage", compute)
        assert torch.equal(found["tensor"], torch.arange(3)) and found["count"] == 2
    assert len(made) == 1


def test_without_a_directory_nothing_is_kept() -> None:
    cache = StageCache()
    assert [cache.get_or_compute("stage", lambda n=n: n) for n in (1, 2)] == [1, 2]  # type: ignore[misc]
    cache.save("stage", 3)
    assert cache.load("stage") is None and not cache.is_on
    with cache.answers("search") as answers:
        assert [answers.answer({"n": 1}, lambda n=n: n) for n in (1.0, 2.0)] == [1.0, 2.0]  # type: ignore[misc]


def test_nothing_is_written_before_there_is_work_to_keep(tmp_path: Path) -> None:
    cache = StageCache(tmp_path / "new", {"a": 1})
    assert cache.load("stage") is None
    cache.remove("stage")
    assert not (tmp_path / "new").exists()
    cache.save("stage", 1)
    assert {file.name for file in (tmp_path / "new").iterdir()} == {"of.json", "stage.safetensors"}


@pytest.mark.parametrize("other", [{"a": 2}, {"a": "1"}, {}, {"a": 1, "b": None}, {"a": None}])
def test_another_call_is_refused_in_one_line(other: dict[str, Any], tmp_path: Path) -> None:
    StageCache(tmp_path, {"a": 1, "b": torch.ones(2)}).save("stage", 1)
    with pytest.raises(OptionError, match=r"another call: [ab] is .*, not ") as refused:
        StageCache(tmp_path, other)
    assert "\n" not in str(refused.value)


def test_stages_may_have_any_name(tmp_path: Path) -> None:
    cache = StageCache(tmp_path, {})
    names = ["layer/0.u at rank 3", "..", "a%2Fb", "a/b", "ü"]
    for number, name in enumerate(names):
        cache.save(name, number)
    assert [cache.load(name) for name in names] == [*range(len(names))]
    assert all(file.parent == tmp_path for file in tmp_path.rglob("*"))


def test_a_damaged_stage_is_refused(tmp_path: Path) -> None:
    cache = StageCache(tmp_path, {})
    cache.save("stage", torch.arange(1000))
    file = tmp_path / "stage.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError):
        cache.load("stage")


def test_a_file_of_the_older_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "of.json").write_text('{"batches": 16, "max_params": 0.5, "sequential": true}')
    with pytest.raises(OptionError, match="another call"):
        StageCache(tmp_path, {"max_params": 0.5, "correct": True})


# -- digests ---------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.floats(allow_nan=False),
        st.text(max_size=3),
        st.lists(st.integers(0, 3), max_size=3).map(torch.tensor),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


def described(value: Any) -> str:
    """Return a text that differs if values differ, in type too."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {described(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(described, value)) + "]"
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {value.tolist()}"
    return repr(value)


@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES)
def test_digests_are_equal_if_and_only_if_values_are(one: Any, other: Any) -> None:
    assert (compute_digest(one) == compute_digest(other)) == (described(one) == described(other))


def net(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(dropout))


def test_models_differ_by_kinds_parameters_and_buffers() -> None:
    same, others = compute_digest(net()), [net(), net(), net()]
    assert compute_digest(net().eval()) == same
    with torch.no_grad():
        others[0][0].bias[0] += 1
        others[1][1].running_mean[0] += 1
    others[2][2] = nn.ReLU()
    assert len({same, *map(compute_digest, others)}) == 4


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def scaled(output: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return scale * output.sum()


def test_functions_and_objects_differ_by_what_they_are() -> None:
    half, twice = functools.partial(scaled, scale=0.5), functools.partial(scaled, scale=2.0)
    values = [scaled, half, twice, Holder(1), Holder(2), Holder(torch.ones(1)), torch.float32]
    assert len({compute_digest(value) for value in values}) == len(values)
    assert compute_digest(Holder(torch.ones(1))) == compute_digest(Holder(torch.ones(1)))
    assert compute_digest(torch.ones(2).numpy()) != compute_digest(torch.zeros(2).numpy())
    around = Holder(1)
    around.value = [around]
    assert compute_digest(around)


@pytest.mark.slow
def test_a_digest_is_the_same_in_every_process() -> None:
    code = (
        "import torch; from torch import nn; from maestro_lod.files.digests import compute_digest; "
        "torch.manual_seed(0); model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), "
        "nn.Dropout(0.1)); print(compute_digest([model, {'loss': nn.functional.mse_loss}, 0.1]))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.strip() == compute_digest([net(), {"loss": nn.functional.mse_loss}, 0.1])
