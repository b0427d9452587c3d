"""The mapping name -> rank: resolved strictly, applied for a while, always restored."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import json
import pickle
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import maestro_lod as lod
from maestro_lod.errors import LayerError, MaestroError, RankError
from maestro_lod.layers.ranks import (
    activated,
    low_rank_layers,
    matches,
    require_low_rank,
    resolve,
    resolve_for,
)

# name -> (stored rank, full rank)
LAYERS = {"stem": (6, 8), "body.0.fc": (10, 10), "body.1.fc": (4, 10), "head": (0, 5)}


def model_of_three() -> nn.Sequential:
    return lod.decompose(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 4)))


def active(model: nn.Module) -> list[int]:
    return [layer.active_rank for layer in low_rank_layers(model).values()]


# -- resolve -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_ranks", "expected"),
    [
        (3, {"stem": 3, "body.0.fc": 3, "body.1.fc": 3, "head": 0}),
        (99, {"stem": 6, "body.0.fc": 10, "body.1.fc": 4, "head": 0}),
        (0, dict.fromkeys(LAYERS, 0)),
        (0.5, {"stem": 4, "body.0.fc": 5, "body.1.fc": 4, "head": 0}),  # of the full rank
        (1e-9, {"stem": 1, "body.0.fc": 1, "body.1.fc": 1, "head": 0}),
        ({}, {}),
        ({"stem": 6}, {"stem": 6}),
        ({"head": 0}, {"head": 0}),
        ({"body": 7}, {"body.0.fc": 7, "body.1.fc": 4}),  # a module that contains layers
        ({"body.*": 0.2}, {"body.0.fc": 2, "body.1.fc": 2}),
        ({"*.fc": 3, "body.1.fc": 1}, {"body.0.fc": 3, "body.1.fc": 1}),
        ({"body.1.fc": 1, "*.fc": 3}, {"body.0.fc": 3, "body.1.fc": 1}),
        ({"*": 1, "body": 2}, {"stem": 1, "body.0.fc": 2, "body.1.fc": 2, "head": 0}),  # later wins
        (np.int64(2), {"stem": 2, "body.0.fc": 2, "body.1.fc": 2, "head": 0}),
        ({"stem": np.float32(0.25)}, {"stem": 2}),
    ],
    ids=str,
)
def test_ranks_resolve_to_one_number_per_layer(given_ranks: Any, expected: dict[str, int]) -> None:
    resolved = resolve(given_ranks, LAYERS)
    assert resolved == expected
    assert all(type(rank) is int for rank in resolved.values())


@pytest.mark.parametrize(
    ("given_ranks", "error", "words"),
    [
        ({"stme": 1}, LayerError, ["'stme'", "Did you mean 'stem'", "stem, body.0.fc"]),
        ({"body.2.fc": 1}, LayerError, ["'body.2.fc'", "Did you mean 'body."]),
        ({"zzz*": 1}, LayerError, ["'zzz*'", "Layers: stem"]),
        ({"": 1}, LayerError, ["''"]),
        ({"stem": 7}, RankError, ["rank 7 for stem", "6", "full rank 8"]),
        ({"stem": -1}, RankError, ["rank -1 for stem", "0 to 6"]),
        ({"body*": -1}, RankError, ["rank -1", "body.0.fc"]),
        (-1, RankError, ["rank -1", "every layer"]),
        (1.0, RankError, ["rank 1.0", "(0, 1)"]),
        (0.0, RankError, ["rank 0.0", "(0, 1)"]),
        (-0.5, RankError, ["rank -0.5", "(0, 1)"]),
        (float("nan"), RankError, ["rank nan"]),
        (float("inf"), RankError, ["rank inf"]),
        ({"stem": True}, RankError, ["rank True for stem"]),
        ({"stem": "2"}, RankError, ["rank '2' for stem"]),
        ({"stem": 2 + 0j}, RankError, ["for stem"]),
        ([1, 2, 3, 4], RankError, ["[1, 2, 3, 4]"]),
    ],
    ids=str,
)
def test_ranks_that_make_no_sense_are_refused_by_name(
    given_ranks: Any, error: type[MaestroError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        resolve(given_ranks, LAYERS)
    for word in words:
        assert word in str(caught.value)


@given(st.integers(1, 4096), st.floats(1e-6, 1, exclude_max=True))
def test_a_share_is_the_nearest_rank_and_never_none_at_all(full: int, share: float) -> None:
    rank = resolve(share, {"it": (full, full)})["it"]
    assert 1 <= rank <= full
    assert rank == 1 or abs(rank - share * full) <= 0.5


@given(st.integers(0, 4096), st.integers(0, 4096))
def test_whole_ranks_are_kept_exactly(full: int, rank: int) -> None:
    assert resolve(rank, {"it": (full, full)})["it"] == min(rank, full)


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("layer1.0.conv", "layer1.0.conv", True),
        ("layer1.0.conv", "layer1", True),
        ("layer1.0.conv", "layer1.*", True),
        ("layer1.0.conv", "*conv", True),
        ("layer1.0.conv", "layer?.0", True),
        ("layer1.0.conv", "layer[12]", True),
        ("layer10.0.conv", "layer1", False),  # not a prefix of letters
        ("layer1.0.conv", "conv", False),
        ("layer1.0.conv", "0", False),
        ("layer1.0.Conv", "*.conv", False),  # case counts
        ("", "*", True),  # the model itself
        ("", "x", False),
    ],
)
def test_patterns_name_a_layer_or_what_contains_it(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected


def test_resolving_for_a_model_keeps_the_stored_rank_of_layers_that_are_not_named() -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), ranks=3)
    assert resolve_for(model, None) == {"0": 3, "1": 3}
    assert resolve_for(model, {"1": 2}) == {"0": 3, "1": 2}
    assert resolve_for(model, 0.5) == {"0": 3, "1": 2}


# -- reading ranks -----------------------------------------------------------------------------


def test_ranks_reads_the_shapes_and_lists_tied_layers_once() -> None:
    inner = nn.Linear(6, 6)
    model = lod.decompose(nn.Sequential(inner, nn.ReLU(), inner, nn.Linear(6, 4)), ranks={"0": 2})
    assert lod.ranks(model) == {"0": 2, "3": 4}
    model[0].resize(1)
    assert lod.ranks(model) == {"0": 1, "3": 4}


def test_a_dense_model_has_no_ranks_and_cannot_be_run_at_some() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert lod.ranks(model) == {}
    for use in (lambda: require_low_rank(model), lambda: lod.at_ranks(model, 1).__enter__()):
        with pytest.raises(LayerError, match=r"Sequential has no low-rank layer.*decompose"):
            use()


# -- at_ranks ----------------------------------------------------------------------------------


def test_at_ranks_applies_and_restores() -> None:
    model, x = model_of_three(), torch.randn(5, 8)
    full = model(x)
    with lod.at_ranks(model, {"0": 2, "2": 0}) as inside:
        assert inside is model
        assert active(model) == [2, 6, 0]
        assert lod.ranks(model) == {"0": 6, "1": 6, "2": 4}
        torch.testing.assert_close(model(x), model[2].bias.expand(5, 4))
    assert active(model) == [6, 6, 4]
    assert torch.equal(model(x), full)


def test_at_ranks_nests() -> None:
    model = model_of_three()
    with lod.at_ranks(model, 3):
        with lod.at_ranks(model, {"1": 5}):  # more than outside, still no more than stored
            assert active(model) == [3, 5, 3]
            with lod.at_ranks(model, {"0": 0}):
                assert active(model) == [0, 5, 3]
            assert active(model) == [3, 5, 3]
        assert active(model) == [3, 3, 3]
    assert active(model) == [6, 6, 4]


def test_an_exception_restores_what_was_active() -> None:
    model = model_of_three()
    with lod.at_ranks(model, 3):
        with pytest.raises(ZeroDivisionError), lod.at_ranks(model, 1):
            raise ZeroDivisionError
        assert active(model) == [3, 3, 3]
    assert active(model) == [6, 6, 4]


@pytest.mark.parametrize(
    ("given_ranks", "words"),
    [
        ({"0": 1, "4": 1}, "'4'.*0, 1, 2"),
        ({"0": 1, "2": 5}, "rank 5 for 2.* 4"),
        ({"0": 1, "1": -1}, "rank -1 for 1"),
        ({"0": 1, "1": 1.5}, r"rank 1\.5 for 1"),
    ],
)
def test_refused_ranks_activate_nothing(given_ranks: dict[str, float], words: str) -> None:
    model = model_of_three()
    with pytest.raises(MaestroError, match=words), lod.at_ranks(model, given_ranks):
        pass
    assert active(model) == [6, 6, 4]


def test_the_nearest_name_is_offered() -> None:
    model = lod.decompose(nn.ModuleDict({"encoder": nn.Linear(4, 4), "head": nn.Linear(4, 4)}))
    said = pytest.raises(LayerError, match=r"'encodr'.*Did you mean 'encoder'\?")
    with said, lod.at_ranks(model, {"encodr": 1}):
        pass


def test_a_bare_layer_is_named_by_the_empty_string_or_by_one_value() -> None:
    layer = lod.decompose(nn.Linear(6, 5))
    for given_ranks in (2, {"": 2}, {"*": 2}):
        with lod.at_ranks(layer, given_ranks):
            assert layer.active_rank == 2
    with pytest.raises(RankError, match="the model itself"), lod.at_ranks(layer, {"": 9}):
        pass


def test_tied_layers_are_activated_together() -> None:
    inner = nn.Linear(6, 6)
    model = lod.decompose(nn.Sequential(inner, inner))
    with lod.at_ranks(model, {"0": 2}):
        assert model[1].active_rank == 2


def test_leaving_after_a_resize_keeps_the_active_rank_within_the_stored_one() -> None:
    model = model_of_three()
    with lod.at_ranks(model, 4), lod.at_ranks(model, 2):
        model[0].resize(3)
    assert active(model) == [3, 6, 4]
    with activated({model[0]: 2}):
        model[0].resize(1)
        assert model[0].active_rank == 1
    assert model[0].active_rank == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_forwards_see_the_same_ranks_when_backward_is_covered(reentrant: bool) -> None:
    model, x = model_of_three(), torch.randn(5, 8, requires_grad=True)
    with lod.at_ranks(model, 2):
        expected = torch.autograd.grad(model(x).square().sum(), model[0].u)[0]
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(model[0].u.grad, expected)


def many_checkpoints(model: nn.Module, x: Tensor, depth: int) -> Tensor:
    """Run a model inside of checkpoints; from 60 on torch goes back in another thread."""
    if depth == 0:
        return model(x)
    return checkpoint(many_checkpoints, model, x, depth - 1, use_reentrant=True)


@pytest.mark.parametrize("depth", [1, 62])
def test_a_backward_in_threads_of_torch_sees_the_same_ranks(depth: int) -> None:
    model, x = lod.decompose(nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    threads = set()
    model.register_forward_hook(lambda *_: threads.add(threading.get_ident()))
    with lod.at_ranks(model, 2):
        expected = torch.autograd.grad(model(x).square().sum(), model.u)[0]
        many_checkpoints(model, x, depth).square().sum().backward()
    assert (len(threads) > 1) == (depth > 60)
    torch.testing.assert_close(model.u.grad, expected)


# -- several threads and tasks -----------------------------------------------------------------


def answers_from_threads() -> dict[str, int]:
    """Ask one model for changing sizes from eight threads; count the answers of a wrong one."""
    model, x = model_of_three(), torch.randn(2, 8)
    answers = []
    with torch.no_grad():
        for rank in range(7):
            with lod.at_ranks(model, rank):
                answers.append(model(x))
    lod.set_ranks(model, 5)  # for those who do not ask

    def wrong(seed: int) -> int:
        sizes, count = random.Random(seed), 0
        with torch.no_grad():
            for _ in range(1250):
                rank = sizes.randrange(8)
                with contextlib.nullcontext() if rank == 7 else lod.at_ranks(model, rank):
                    answer = model(x)
                count += not torch.equal(answer, answers[5 if rank == 7 else rank])
        return count

    with ThreadPoolExecutor(8) as threads:
        found = sum(threads.map(wrong, range(8)))
    assert active(model) == [5, 5, 4]
    return {"answers": 8 * 1250, "of a wrong size": found}


def test_ten_thousand_answers_from_eight_threads_have_the_size_that_was_asked_for() -> None:
    assert answers_from_threads() == {"answers": 10_000, "of a wrong size": 0}


def test_tasks_of_asyncio_have_sizes_of_their_own() -> None:
    model = model_of_three()

    async def ranks_at(rank: int) -> list[list[int]]:
        seen = []
        with lod.at_ranks(model, rank):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(active(model))
        return [*seen, active(model)]

    async def both() -> list[list[list[int]]]:
        return await asyncio.gather(ranks_at(1), ranks_at(3))

    for rank, seen in zip((1, 3), asyncio.run(both()), strict=True):
        assert seen == [[rank] * 3] * 3 + [[6, 6, 4]]


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def test_a_new_thread_begins_outside_of_the_block_unless_it_is_handed_the_context() -> None:
    model = model_of_three()
    with lod.at_ranks(model, 2):
        assert in_a_thread(lambda: active(model)) == [6, 6, 4]
        context = contextvars.copy_context()
        assert in_a_thread(lambda: context.run(active, model)) == [2, 2, 2]
        # nn.DataParallel hands copies of the layers to its threads
        replica = model[0]._replicate_for_data_parallel()
        replica.u, replica.v = model[0].u, model[0].v
        assert in_a_thread(lambda: replica.active_rank) == 2


def test_copies_keep_what_was_set_and_not_what_a_block_asks_for() -> None:
    model = model_of_three()
    lod.set_ranks(model, 4)
    with lod.at_ranks(model, 2):
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert active(copied) == [4, 4, 4]
            assert copied[0]._limit == 4  # which compiled code reads
        assert active(model) == [2, 2, 2]
        assert model[0]._limit == 2


def test_compiled_code_refuses_sizes_of_two_threads() -> None:
    model = model_of_three()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(2, 8))
    with lod.at_ranks(model, 2):
        for use in (lambda: lod.at_ranks(model, 3).__enter__(), lambda: lod.set_ranks(model, 3)):
            with pytest.raises(RankError, match=r"one size at a time.*extract"):
                in_a_thread(use)
        with lod.at_ranks(model, 3):
            assert model[0]._limit == 3
        assert [layer._limit for layer in model] == [2, 2, 2]
    assert in_a_thread(lambda: lod.set_ranks(model, 3)) is None
    assert active(model) == [3, 3, 3]
    torch._dynamo.reset()


def test_set_ranks_stays_until_it_is_set_again(snapshot):
    model = lod.decompose(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)))
    x, before = torch.randn(3, 8), snapshot(model)
    full = model(x)
    with lod.at_ranks(model, {"0": 2, "1": 3}):
        small = model(x)
    lod.set_ranks(model, {"0": 2, "1": 3})
    assert torch.equal(model(x), small)
    lod.set_ranks(model, {"1": 3})  # what is not named uses all its ranks
    assert [m.active_rank for m in model] == [6, 3]
    lod.set_ranks(model, None)
    assert torch.equal(model(x), full)
    before.assert_unchanged(model)


@pytest.mark.parametrize("given", [{"2": 1}, {"0": 7}, {"0": -1}, 1.5, {"0": True}])
def test_set_ranks_refuses_all_or_nothing(given):
    model = lod.decompose(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)))
    lod.set_ranks(model, {"0": 2})
    with pytest.raises(lod.MaestroError):
        lod.set_ranks(model, {"1": 1, **given} if isinstance(given, dict) else given)
    assert [m.active_rank for m in model] == [2, 4]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answers_from_threads()) + "\n")


def test_a_module_with_attributes_of_a_low_rank_layer_is_not_one() -> None:
    class Lookalike(nn.Module):
        rank = full_rank = active_rank = 3

    assert lod.ranks(nn.Sequential(lod.decompose(nn.Linear(6, 6)), Lookalike())) == {"0": 6}


class Winding(nn.Module):
    """Calls its layers in another order than it lists them, one twice and one only at times."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.twice, self.rare = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, rarely: bool = False) -> Tensor:
        x = self.twice(self.twice(x))
        return self.last(self.rare(x) if rarely else x)


@pytest.mark.parametrize("rarely", [False, True])
def test_each_layer_runs_at_its_own_rank_whatever_the_order_of_calls(rarely: bool) -> None:
    model, x, ranks = (
        lod.decompose(Winding()),
        torch.randn(3, 6),
        {"last": 1, "twice": 2, "rare": 3},
    )
    with lod.at_ranks(model, ranks):
        output = model(x, rarely)
    torch.testing.assert_close(output, lod.extract(model, ranks)(x, rarely))
