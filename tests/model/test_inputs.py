"""Inputs of a model: whatever a user gives becomes one call, with one way to move and draw it."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from maestro_lod.errors import OptionError
from maestro_lod.model.inputs import ModelInputs, drawn, on_device, tensors_in

CPU, META = torch.device("cpu"), torch.device("meta")


class Arguments(nn.Module):
    """Returns what it is called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


A, B = torch.ones(2, 3), torch.arange(2)
PACKED = pack_sequence([torch.randn(n, 4) for n in (3, 1)])


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (A, (A,), {}),
        ((A, B), (A, B), {}),
        ([A, B], (A, B), {}),
        ({"x": A}, (), {"x": A}),
        (UserDict({"x": A}), (), {"x": A}),
        (PACKED, (PACKED,), {}),
        ("text", ("text",), {}),
        (ModelInputs((A,), {"b": B}), (A,), {"b": B}),
    ],
)
def test_what_users_give_is_one_call(inputs: Any, args: Any, kwargs: Any) -> None:
    found = ModelInputs.wrap(inputs).call(Arguments())
    assert len(found[0]) == len(args) and all(a is b for a, b in zip(found[0], args, strict=True))
    assert found[1].keys() == kwargs.keys() and all(found[1][key] is kwargs[key] for key in kwargs)


@pytest.mark.parametrize("example", [[A], "text", 3, None])
def test_an_example_is_a_tensor_a_tuple_or_a_mapping(example: Any) -> None:
    with pytest.raises(OptionError, match=f"example is a {type(example).__name__}. Give a tensor"):
        ModelInputs.from_example(example)


def nested(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def more(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        )

    return st.recursive(leaf, more, max_leaves=6)


LEAVES = st.one_of(
    st.builds(lambda n: torch.full((n, 2), float(n)), st.integers(1, 4)),
    st.just("text"),
    st.integers(0, 3),
)


@settings(max_examples=50, deadline=None)
@given(nested(LEAVES))
def test_each_tensor_is_changed_and_nothing_else(inputs: Any) -> None:
    call = ModelInputs.wrap(inputs)
    changed = call.map_tensors(lambda tensor: tensor + 1)
    assert len(changed.tensors) == len(call.tensors)
    for one, other in zip(call.tensors, changed.tensors, strict=True):
        assert torch.equal(one + 1, other)
    assert all(tensor.is_meta for tensor in call.on_meta().tensors)
    assert all(tensor.is_meta for tensor in call.to(META).tensors)
    assert len(call.to(META).tensors) == len(call.tensors)


def test_of_packed_sequences_only_the_data_changes() -> None:
    call = ModelInputs.wrap((PACKED, A))
    changed = call.map_tensors(torch.neg).args[0]
    assert isinstance(changed, PackedSequence) and call.is_packed
    assert torch.equal(changed.data, -PACKED.data)
    assert torch.equal(changed.batch_sizes, PACKED.batch_sizes)
    assert isinstance(call.to(CPU).args[0], PackedSequence)
    assert not ModelInputs.wrap(A).is_packed


def test_a_mapping_that_is_no_dict_is_moved_too() -> None:
    moved = on_device({"nested": UserDict({"x": A})}, META)
    assert moved["nested"]["x"].is_meta


def test_the_batch_size_is_the_leading_dimension_of_the_first_tensor() -> None:
    assert ModelInputs.wrap(("text", A, torch.ones(5))).batch_size == 2
    for inputs in ("text", torch.tensor(1.0)):
        with pytest.raises(OptionError, match="no tensor with a batch dimension"):
            _ = ModelInputs.wrap(inputs).batch_size


def test_whole_numbers_without_values_cannot_be_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(OptionError, match=r"int64 values on the meta device.*example with values"):
        drawn(B.to("meta"), CPU, generator)
    again = torch.Generator().manual_seed(0)
    assert torch.equal(drawn(A, CPU, generator), drawn(A, CPU, again))


@pytest.mark.parametrize("wrapped", [lambda x: x, lambda x: (x,), lambda x: {"input": x}])
def test_a_norm_that_sees_one_sample_is_explained(wrapped: Callable[[Tensor], Any]) -> None:
    with pytest.raises(OptionError, match=r"batch of one sample.*drop_last"):
        ModelInputs.wrap(wrapped(torch.ones(1, 4))).call(nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="expected 2D or 3D"):
        ModelInputs.wrap(wrapped(torch.ones(4))).call(nn.BatchNorm1d(4))


def test_tensors_are_found_in_any_nesting() -> None:
    found = tensors_in({"a": [A, ("text", B)], "c": None})
    assert len(found) == 2 and found[0] is A and found[1] is B
