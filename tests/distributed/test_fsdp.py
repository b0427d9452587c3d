"""A model sharded over two processes: one process on the whole batch, through shrinks."""

from __future__ import annotations

import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from maestro_lod import (
    Elastic,
    LoD,
    MaestroError,
    RunPlan,
    decompose,
    load,
    ranks,
    save,
)
from maestro_lod.distributed.fsdp import across_ranks
from maestro_lod.distributed.shards import gathered, is_sharded
from maestro_lod.files import shard_files
from maestro_lod.files import tensor_file as tensors
from tests.distributed.test_ddp import OPTIMIZERS, batch, share, small_model
from tests.support.pair import Pair

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

EPOCHS, STEPS = 5, 3


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


class Checkpointed(nn.Module):
    """Runs a part again in the backward."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.part, x, use_reentrant=False)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for layer in (model[0], model[4]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)  # the last layer belongs to the root


def trained(name: str, dtype: torch.dtype = torch.float64, how: str = "") -> dict[str, Any]:
    model = small_model(dtype, zeros=how == "zeros")
    if how == "checkpointed":
        model[4] = Checkpointed(model[4])
    if dist.is_initialized():
        ways: dict[str, dict[str, Any]] = {
            "gathered": {"reshard_after_forward": False},
            "across": {"shard_placement_fn": across_ranks(model)},
        }
        model = sharded(model, **ways.get(how, {}))
    optimizer = OPTIMIZERS[name](model.parameters())
    if how == "zeros":  # factors need a lower rate than the dense weights before
        optimizer.param_groups[0]["lr"] = 0.02
    options: dict[str, Any] = {"penalty": 1e-3, "threshold": 1e-4}
    if how == "proximal":
        options |= {"penalty": 0.5, "proximal": True}
    train = LoD(model, optimizer, seed=5, **options)
    lost = []
    for epoch in range(EPOCHS):
        for step in range(STEPS):
            x, y = batch(100 * epoch + step, dtype)
            if dist.is_initialized():
                x, y = share(x), share(y)
            with train.step():
                loss = F.cross_entropy(model(x), y)
                if how in ("loss", "gathered"):
                    loss = loss + train.penalty_loss()
                loss.backward()
            if how not in ("loss", "gathered"):
                train.add_penalty_gradients()
            optimizer.step()
            optimizer.zero_grad()
        if how != "proximal":
            make_useless(model, epoch)
        lost.append(train.end_epoch())
    state = {key: whole(value).detach().clone() for key, value in model.state_dict().items()}
    moments = [
        whole(value).clone()
        for p in model.parameters()
        for key, value in optimizer.state[p].items()
        if key != "step"
    ]
    return {"state": state, "moments": moments, "lost": lost, "ranks": ranks(model)}


@torch.no_grad()
def make_useless(model: nn.Module, epoch: int) -> None:
    """Zero the last rank of one layer, wherever it is."""
    layer = [m for m in model.modules() if hasattr(m, "u")][epoch % 3]
    keep = torch.ones(layer.rank, dtype=layer.u.dtype)
    keep[-1] = 0.0
    for factor, shape in zip(layer.stored_factors(), ((1, -1), (-1, 1)), strict=True):
        scale = keep.view(*shape, *[1] * (factor.ndim - 2))
        if isinstance(factor, DTensor):
            full = whole(factor) * scale
            factor.copy_(distribute_tensor(full, factor.device_mesh, factor.placements))
        else:
            factor.mul_(scale)


def assert_same(results: list[dict[str, Any]], alone: dict[str, Any], within: float) -> None:
    for result in results:
        assert result["lost"] == alone["lost"] and result["ranks"] == alone["ranks"]
        for key, value in alone["state"].items():
            torch.testing.assert_close(result["state"][key], value, rtol=within, atol=within)
        for mine, theirs in zip(result["moments"], alone["moments"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=within, atol=within)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("sgd", ""),
        ("adamw", ""),
        ("adamw", "loss"),
        ("sgd", "gathered"),
        ("sgd", "checkpointed"),
        ("sgd", "zeros"),
        ("adamw", "across"),
    ],
)
def test_shards_train_what_one_process_does_on_the_whole_batch(pair, name, how):
    alone = trained(name, how=how)
    assert sum(map(bool, alone["lost"])) >= 4
    assert_same(pair(trained, name, torch.float64, how), alone, 1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_train_the_same_in_single_precision(pair, name):
    assert_same(pair(trained, name, torch.float32), trained(name, torch.float32), 1e-6)


def lower_precision() -> dict[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(small_model(torch.float32), mp_policy=policy)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train = LoD(model, optimizer, penalty=1e-3, threshold=1e-4)
    for epoch in range(3):
        x, y = batch(epoch, torch.float32)
        with train.step():
            (F.cross_entropy(model(share(x)), share(y)) + train.penalty_loss()).backward()
        kinds = {p.grad.dtype for p in model.parameters()}
        optimizer.step()
        optimizer.zero_grad()
        make_useless(model, epoch)
        train.end_epoch()
    return {
        "ranks": ranks(model),
        "kinds": kinds,
        "loss": float(F.cross_entropy(model(x), y).detach()),
    }


def test_mixed_precision_goes_on_after_shrinks(pair):
    full = ranks(small_model())
    first, second = pair(lower_precision)
    assert first["kinds"] == {torch.float32} and first["loss"] == second["loss"]
    assert all(first["ranks"][name] == rank - 1 for name, rank in full.items())


def without_a_layer() -> int:
    model = sharded(small_model())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train = LoD(model, optimizer, threshold=1e-4)
    for epoch in range(3):
        x, y = batch(epoch)
        with train.step():
            F.cross_entropy(model(share(x)), share(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for factor in model[4].stored_factors():
                factor.zero_()
        train.end_epoch()
    return ranks(model)["4"]


def test_a_sharded_layer_keeps_one_rank_of_zeros(pair):
    assert pair(without_a_layer) == [1, 1]


def message_of_other_seeds() -> str:
    model = sharded(small_model())
    train = LoD(model, OPTIMIZERS["sgd"](model.parameters()), seed=dist.get_rank())
    x, y = batch(0)
    with pytest.raises(MaestroError) as caught, train.step():
        F.cross_entropy(model(share(x)), share(y)).backward()
    return str(caught.value)


def test_shards_with_other_seeds_are_refused_at_the_first_step(pair):
    for message in pair(message_of_other_seeds):
        assert "do not agree on the ranks to sample" in message and "process 1" in message


def about_to_shrink() -> tuple[nn.Module, LoD]:
    """Train shards for a step, and make ranks of them useless."""
    model = sharded(small_model())
    train = LoD(model, OPTIMIZERS["sgd"](model.parameters()), threshold=1e-4)
    x, y = batch(0)
    with train.step():
        F.cross_entropy(model(share(x)), share(y)).backward()
    train.optimizer.step()
    make_useless(model, 0)
    return model, train


def killed_in_a_shrink() -> None:
    """Shrink shards; the second process is killed while rows of a factor move."""
    _, train = about_to_shrink()
    if dist.get_rank() == 1:
        dist.all_to_all_single = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    train.end_epoch()


@pytest.mark.slow
def test_a_process_that_is_killed_in_a_shrink_is_told_by_the_others(tmp_path):
    both = Pair(tmp_path)
    with pytest.raises(AssertionError) as caught:
        both(killed_in_a_shrink)
    both.close()
    told, rest = str(caught.value).split("process 1:")
    assert "TrainingError: another process of this training has ended" in told
    assert "it has ended without an answer" in rest


def message_for_tensor_parallel() -> str:
    model = small_model()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model[4].u = nn.Parameter(distribute_tensor(model[4].u.detach(), mesh))
    with pytest.raises(MaestroError) as caught:
        LoD(model, OPTIMIZERS["sgd"](model.parameters()))
    return str(caught.value)


def test_tensor_parallel_is_refused_when_lod_is_made(pair):
    for message in pair(message_for_tensor_parallel):
        assert "4.u" in message and "tensor parallel" in message and "fully_shard" in message


def test_proximal_steps_see_all_shards(pair):
    alone = trained("sgd", how="proximal")
    assert any(alone["lost"])
    assert_same(pair(trained, "sgd", torch.float64, "proximal"), alone, 1e-6)


def trained_at_every_size(name: str, options: dict[str, Any], how: str = "") -> dict[str, Any]:
    model = small_model()
    if dist.is_initialized():
        model = sharded(model, **({"shard_placement_fn": across_ranks(model)} if how else {}))
    optimizer = OPTIMIZERS[name](model.parameters())
    train = Elastic(model, optimizer, **options)
    batches = [batch(100 + i) for i in range(6)]
    train.start(model, optimizer, RunPlan(7, STEPS, batches=batches, loss=F.cross_entropy))
    for epoch in range(7):
        for step in range(STEPS):
            x, y = batch(10 * epoch + step)
            if dist.is_initialized():
                x, y = share(x), share(y)
            train.backward(
                lambda m=model, x=x: m(x),
                lambda out, y=y: F.cross_entropy(out, y),
                soft_loss=lambda out, teacher: F.cross_entropy(out, teacher.softmax(1)),
            )
            optimizer.step()
            optimizer.zero_grad()
        train.end_epoch(last=epoch == 6)
        if epoch == 5:  # in consolidation: a state that is loaded changes nothing
            train.load_state_dict(train.state_dict())
    assert train.teacher is not None and not any(map(is_sharded, train.teacher.parameters()))
    return {
        "state": {key: whole(value).detach().clone() for key, value in model.state_dict().items()},
        "rungs": train.rungs.ranks,
        "ranks": ranks(model),
        "macs": train.ledger.dense_macs,
    }


@pytest.mark.parametrize(
    ("name", "options", "how"),
    [
        ("sgd", {"smallest": 0.2}, ""),
        ("adamw", {"sizes": [0.6]}, ""),
        ("sgd", {"sizes": [0.7, 0.4]}, "across"),
    ],
)
def test_every_size_is_trained_in_shards_as_in_one_process(pair, name, options, how):
    alone = trained_at_every_size(name, options)
    for result in pair(trained_at_every_size, name, options, how):
        assert all(result[key] == alone[key] for key in ("rungs", "ranks", "macs"))
        for key, value in alone["state"].items():
            torch.testing.assert_close(result["state"][key], value, rtol=1e-6, atol=1e-7)


# -- files ---------------------------------------------------------------------------------------


def saved_and_loaded(directory: Path) -> dict[str, Any]:
    model, train = about_to_shrink()
    x, y = batch(0)
    train.end_epoch()
    save(model, directory / "shards.safetensors")
    again = load(directory / "shards.safetensors", into=sharded(small_model()))
    fewer = load(directory / "shards.safetensors", into=sharded(small_model()), ranks={"4": 3})
    with torch.no_grad():
        outputs = [part(x) for part in (model, again, fewer)]
    F.cross_entropy(fewer(share(x)), share(y)).backward()  # which goes on to train
    with pytest.raises(MaestroError, match="not a writable directory"):
        save(model, directory / "none" / "shards.safetensors")
    return {"outputs": outputs, "ranks": ranks(fewer)}


def test_a_file_from_shards_is_the_file_of_the_whole_model(pair, tmp_path):
    first, second = pair(saved_and_loaded, tmp_path)
    x, _ = batch(0)
    alone = load(tmp_path / "shards.safetensors", into=small_model())
    save(alone, tmp_path / "whole.safetensors")
    whole_file, of_shards = (tmp_path / f"{n}.safetensors" for n in ("whole", "shards"))
    assert whole_file.read_bytes() == of_shards.read_bytes()
    fewer = load(of_shards, into=small_model(), ranks={"4": 3})
    assert first["ranks"] == ranks(fewer)
    with torch.no_grad():
        expected = [alone(x), alone(x), fewer(x)]
    for outputs in (first["outputs"], second["outputs"]):
        for mine, theirs in zip(outputs, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def large_model() -> nn.Module:
    """A model whose tensors are far longer than what is proven at once."""
    torch.manual_seed(2)
    return decompose(nn.Sequential(nn.Linear(512, 384), nn.Tanh(), nn.Linear(384, 256)))


def sharded_whole(across: bool) -> nn.Module:
    model = large_model()
    return fully_shard(model, shard_placement_fn=across_ranks(model) if across else None)


def counted_load(path: Path, across: bool, ranks: Any) -> tuple[int, dict[str, Any]]:
    """Load into shards; return the bytes that this process has read, and the whole state."""
    model, read, fill = sharded_whole(across), [], tensors._fill

    def counted(left: memoryview, file: Any) -> None:
        read.append(len(left))
        fill(left, file)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tensors, "_fill", counted)
        load(path, into=model, ranks=ranks)
    return sum(read), {key: whole(value) for key, value in model.state_dict().items()}


@pytest.mark.parametrize("ranks", [None, 0.25], ids=["all ranks", "a quarter"])
@pytest.mark.parametrize("across", [False, True], ids=["along ranks", "across ranks"])
def test_each_process_reads_its_share_of_a_file(pair, tmp_path, across, ranks):
    path = tmp_path / "large.safetensors"
    save(large_model(), path)
    alone = load(path, into=large_model(), ranks=ranks)
    size = sum(value.nbytes for value in alone.state_dict().values())
    with path.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    for read, state in pair(counted_load, path, across, ranks):
        for key, value in alone.state_dict().items():
            assert torch.equal(state[key], value)
        # blocks are proven as a whole: a sixteenth at both ends
        assert size / 2 <= read - header <= size / 2 * (1 + 3 / 16)


def message_of_damage(path: Path) -> str:
    model = sharded_whole(across=False)
    before = {key: whole(value).clone() for key, value in model.state_dict().items()}
    with pytest.raises(MaestroError) as caught:
        load(path, into=model)
    assert all(torch.equal(whole(v), before[k]) for k, v in model.state_dict().items())
    return str(caught.value)


def test_damage_that_one_process_reads_is_an_error_in_all(pair, tmp_path):
    path = tmp_path / "large.safetensors"
    save(large_model(), path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of the last rank
    path.write_bytes(content)
    first, second = pair(message_of_damage, path)
    assert "process 1 cannot read its part" in first and "differ from their digests" in first
    assert "is damaged" in second


def most_at_a_time(directory: Path) -> int:
    """Save from shards; return how many whole tensors were there at a time, at most."""
    living: list[weakref.ref[torch.Tensor]] = []
    most = [0]

    def watched(value: torch.Tensor) -> torch.Tensor:
        found = gathered(value)
        living.append(weakref.ref(found))
        most[0] = max(most[0], sum(ref() is not None for ref in living))
        return found

    model = sharded_whole(across=False)
    with pytest.MonkeyPatch.context() as patched:
        for module in (tensors, shard_files):
            patched.setattr(module, "gathered", watched)
        save(model, directory / "large.safetensors")
    assert len(living) == len(model.state_dict())
    return most[0]


def test_no_process_holds_more_than_one_tensor_whole_while_it_saves(pair, tmp_path):
    assert pair(most_at_a_time, tmp_path) == [1, 1]
