"""One file holds every size, reads only what is asked for, and never half of anything."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import pickle
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.errors import CheckpointError, LayerError, MaestroError, OptionError, RankError
from maestro_lod.files import tensor_file as tensor_files
from maestro_lod.files.state import load_state, save_state
from maestro_lod.model import checkpoint
from maestro_lod.model.frontier import Frontier

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 12, 3, stride=2, groups=2),
        nn.ConvTranspose2d(12, 4, 2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


X = (2, 3, 8, 8)
LAYERS = ["0", "2", "3", "5"]


def trained_net(**options: Any) -> nn.Module:
    """A decomposed model whose weights and statistics are not those of a fresh one."""
    model = lod.decompose(net(), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model(torch.randn(X))
    return model.eval()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file and where its data starts."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


def rewrite(path: Path, metadata: dict[str, str | None], **tensors: Tensor | None) -> None:
    """Change entries of a file's metadata and its tensors; None removes one.

    Without digests, as in files from before there were any: what is wrong has to show by itself.
    """
    found, _ = header(path)
    all_metadata = {**found["__metadata__"], "digest": None, "crc32": None, **metadata}
    all_tensors = {**load_file(path), **tensors}
    save_file(
        {key: value for key, value in all_tensors.items() if value is not None},
        path,
        metadata={key: value for key, value in all_metadata.items() if value is not None},
    )


# -- roundtrips --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "into",
    [
        net,
        lambda: lod.decompose(net()),
        lambda: lod.decompose(net(), ranks=1),
        lambda: lod.decompose(net(), ranks={"0": 0, "5": 7}),
        lambda: lod.decompose(net(), only=["2", "5"]),
    ],
    ids=["dense", "decomposed", "shrunk further", "shrunk otherwise", "half decomposed"],
)
def test_a_file_loads_into_any_form_of_its_model(into: Callable[[], nn.Module], path: Path) -> None:
    model, x = trained_net(ranks={"0": 4, "2": 3, "5": 2}), torch.randn(X)
    lod.save(model, path)
    other = into().eval()
    assert lod.load(path, into=other) is other
    assert lod.ranks(other) == lod.ranks(model)
    assert torch.equal(other(x), model(x))
    assert torch.equal(other[1].running_mean, model[1].running_mean)
    assert other[1].num_batches_tracked == 1


def test_layers_that_the_file_holds_dense_become_dense(path: Path) -> None:
    model, x = trained_net(skip=["0", "5"]), torch.randn(X)
    lod.save(model, path)
    other = lod.decompose(net()).eval()
    lod.load(path, into=other)
    assert type(other[0]) is nn.Conv2d and type(other[5]) is nn.Linear
    torch.testing.assert_close(other(x), model(x), **CLOSE)


def test_saving_changes_nothing(path: Path, snapshot: Callable[[nn.Module], Any]) -> None:
    model = trained_net()
    before = snapshot(model)
    with lod.at_ranks(model, 1):
        lod.save(model, path)
    before.assert_unchanged(model)
    assert lod.ranks(lod.load(path, into=net())) == lod.ranks(model), "only a part was saved"


def test_a_loaded_model_trains_with_the_hooks_and_freezing_of_its_target(path: Path) -> None:
    lod.save(trained_net(), path)
    into, calls = net(), []
    into[5].register_forward_hook(lambda *_: calls.append("hook"))
    into[0].weight.requires_grad_(False)
    lod.load(path, into=into)
    into(torch.randn(X)).sum().backward()
    assert calls == ["hook"]
    assert into[0].u.grad is None and into[5].u.grad is not None


def test_the_dtype_is_that_of_the_target(path: Path) -> None:
    model = trained_net()
    lod.save(model, path)
    loaded = lod.load(path, into=net().double())
    assert {p.dtype for p in loaded.parameters()} == {torch.float64}
    torch.testing.assert_close(loaded[5].u, model[5].u.double(), rtol=0, atol=0)


def test_an_optimizer_of_a_decomposed_target_goes_on(path: Path) -> None:
    lod.save(trained_net(ranks=2), path)
    into = lod.decompose(net())
    optimizer = torch.optim.SGD(into.parameters(), lr=0.1)
    lod.load(path, into=into)
    before = into[5].u.detach().clone()
    into(torch.randn(X)).sum().backward()
    optimizer.step()
    assert not torch.equal(into[5].u, before)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.ModuleList([self.a])  # a tied module
        self.embedding = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight  # a tied parameter

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b[0](self.a(self.embedding(x))))


@pytest.mark.parametrize("rank", [6, 3, 0])
@pytest.mark.parametrize("partial", [None, 2])
def test_tied_weights_are_stored_once_and_stay_tied(
    rank: int, partial: int | None, path: Path
) -> None:
    model, x = lod.decompose(Tied(), ranks={"*": rank}), torch.arange(9)
    lod.save(model, path)
    if rank:
        assert set(load_file(path)) == {"a.u", "a.v", "a.bias", "embedding.weight"}
    with lod.at_ranks(model, 6 if partial is None else partial):
        expected = model(x)
    loaded = lod.load(path, into=Tied(), ranks=partial)
    assert loaded.a is loaded.b[0] and loaded.head.weight is loaded.embedding.weight
    torch.testing.assert_close(loaded(x), expected, **CLOSE)


def test_the_file_is_plain_safetensors_in_rank_order(path: Path) -> None:
    model = trained_net(ranks={"5": 4})
    lod.save(model, path)
    tensors = load_file(path)
    assert tensors["5.u"].shape == (4, 10) and tensors["5.v"].shape == (4, 64)
    assert tensors["3.u"].shape == (12, 4, 2, 2)
    assert torch.equal(tensors["5.u"].t(), model[5].u)
    found, _ = header(path)
    assert found["__metadata__"]["format"] == "maestro-lod"
    assert json.loads(found["__metadata__"]["ranks"]) == lod.ranks(model)
    assert all(isinstance(value, str) for value in found["__metadata__"].values())


def test_neither_saving_nor_loading_pickles(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    for module, names in (
        (pickle, ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")),
        (torch, ("save", "load")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    lod.save(trained_net(), path)
    loaded = lod.load(path, into=net(), ranks=2)
    assert lod.ranks(loaded) == dict.fromkeys(LAYERS, 2)


# -- partial ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [0, 1, 3, 0.5, {"0": 2}, {"5": 0, "2": 4}, {"?": 2}], ids=str)
@pytest.mark.parametrize("into", [net, lambda: lod.decompose(net())], ids=["dense", "low-rank"])
def test_a_partial_load_equals_at_ranks(
    ranks: Any, into: Callable[[], nn.Module], path: Path
) -> None:
    model, x = trained_net(), torch.randn(X)
    lod.save(model, path)
    with lod.at_ranks(model, ranks):
        expected = model(x)
        wanted = {name: model.get_submodule(name).active_rank for name in LAYERS}
    loaded = lod.load(path, into=into().eval(), ranks=ranks)
    assert lod.ranks(loaded) == wanted
    torch.testing.assert_close(loaded(x), expected, **CLOSE)


def test_a_partial_load_is_as_small_in_memory_as_its_ranks(path: Path) -> None:
    lod.save(trained_net(), path)
    loaded = lod.load(path, into=net(), ranks=2)
    for name in LAYERS:
        layer = loaded.get_submodule(name)
        for factor in (layer.u, layer.v):
            size = factor.numel() * factor.element_size()
            assert factor.untyped_storage().nbytes() == size, name


def test_bytes_behind_the_wanted_ranks_are_not_looked_at(path: Path) -> None:
    """Beyond the block that holds the last of them: a sixteenth more, or a page."""

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 200), nn.Linear(200, 256))

    lod.save(lod.decompose(wide()), path)
    expected = lod.load(path, into=wide(), ranks=100)
    found, start = header(path)
    data = bytearray(path.read_bytes())
    for key in ("0.u", "0.v", "1.u", "1.v"):
        begin, end = found[key]["data_offsets"]
        looked_at = (end - begin) // found[key]["shape"][0] * 100 * 17 // 16 + 4096
        data[start + begin + looked_at : start + end] = b"\xff" * (end - begin - looked_at)  # NaN
    path.write_bytes(data)
    damaged = lod.load(path, into=wide(), ranks=100)
    for key, tensor in expected.state_dict().items():
        assert torch.equal(damaged.state_dict()[key], tensor), key
    with pytest.raises(CheckpointError, match="differ from their digests"):
        lod.load(path, into=wide())
    unproven = lod.load(path, into=wide(), verify=False)
    assert unproven[0].u.isnan().any(), "the damage was not where it should be"


def bytes_read_by(action: Callable[[], object]) -> int:
    """Count what the process asks the system to read, headers and all."""

    def so_far() -> int:
        fields = Path("/proc/self/io").read_text().split()
        return int(fields[fields.index("rchar:") + 1])

    before = so_far()
    looking = so_far() - before
    before = so_far()
    action()
    return so_far() - before - looking


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts bytes read")
@pytest.mark.parametrize("share", [0.9, 0.5, 0.25, 0.1, 0.02])
def test_a_partial_load_reads_little_more_than_the_bytes_of_what_it_returns(
    share: float, path: Path
) -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 96, 5), nn.Flatten(), nn.Linear(1536, 512))

    lod.save(lod.decompose(wide()), path)
    into = wide()
    read = bytes_read_by(lambda: lod.load(path, into=into, ranks=share))
    submodel = sum(p.numel() * p.element_size() for p in into.parameters())
    assert submodel <= read <= 1.1 * submodel + 2048  # the header's part shows in tiny models
    assert read < 1.1 * path.stat().st_size * share + 50_000


@pytest.mark.parametrize(
    ("ranks", "error", "words"),
    [
        ({"9": 1}, LayerError, "'9'"),
        ({"5": 5}, RankError, r"rank 5 for 5 .* 4 \(full rank 10\)"),
        ({"5": -1}, RankError, "rank -1 for 5"),
        (1.5, RankError, r"1\.5"),
    ],
)
def test_ranks_that_the_file_does_not_have_are_refused(
    ranks: Any,
    error: type[MaestroError],
    words: str,
    path: Path,
    snapshot: Callable[[nn.Module], Any],
) -> None:
    lod.save(trained_net(ranks={"5": 4}), path)
    into = net()
    before = snapshot(into)
    with pytest.raises(error, match=words):
        lod.load(path, into=into, ranks=ranks)
    before.assert_unchanged(into)


# -- damaged and foreign files -----------------------------------------------------------------


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 8)


def pickled(path: Path) -> None:
    torch.save(net().state_dict(), path)


def missing(path: Path) -> None:
    path.unlink()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (cut_short, "damaged"),
    "truncated header": (cut_in_the_header, "damaged"),
    "empty": (empty, "damaged"),
    "noise": (noise, "damaged"),
    "pickle": (pickled, "damaged"),
    "missing": (missing, "does not exist"),
    "folder": (a_folder, "model.safetensors"),
    "foreign": (lambda p: save_file(net().state_dict(), p), "not written by maestro_lod's save"),
    "foreign metadata": (
        lambda p: save_file(net().state_dict(), p, metadata={"format": "pt"}),
        "not written by maestro_lod's save",
    ),
    "newer version": (lambda p: rewrite(p, {"version": "2"}), "version 2.*Update"),
    "broken version": (lambda p: rewrite(p, {"version": "two"}), "damaged"),
    "no version": (lambda p: rewrite(p, {"version": None}), "damaged"),
    "no ranks": (lambda p: rewrite(p, {"ranks": None}), "damaged"),
    "broken ranks": (lambda p: rewrite(p, {"ranks": "{"}), "damaged"),
    "ranks of another type": (lambda p: rewrite(p, {"ranks": "[1, 2]"}), "damaged"),
    "rank of another type": (lambda p: rewrite(p, {"ranks": '{"5": "4"}'}), "damaged|another"),
    "broken aliases": (lambda p: rewrite(p, {"aliases": '{"5.u": "nowhere"}'}), "damaged|another"),
    "head of no embedding": (lambda p: rewrite(p, {"heads": '{"5": "zzz"}'}), "damaged"),
    "heads of another type": (lambda p: rewrite(p, {"heads": "[1]"}), "damaged"),
    "missing factor": (lambda p: rewrite(p, {}, **{"5.v": None}), r"another model.*5\.v"),
    "missing buffer": (
        lambda p: rewrite(p, {}, **{"1.running_mean": None}),
        r"another model.*1\.running_mean",
    ),
    "extra tensor": (lambda p: rewrite(p, {}, extra=torch.zeros(1)), "another model.*extra"),
    "unknown type": (
        lambda p: rewrite(p, {}, **{"1.bias": torch.ones(8).to(torch.float8_e8m0fnu)}),
        r"1\.bias in .* is of an unknown type: F8_E8M0",
    ),
    "factors that do not fit": (
        lambda p: rewrite(p, {}, **{"5.v": torch.zeros(3, 64)}),
        r"damaged .*5\.v has shape \(3, 64\), not rank 10",
    ),
    "factor of too few dimensions": (
        lambda p: rewrite(p, {}, **{"5.u": torch.zeros(10)}),
        "damaged|another model",
    ),
    "scalar factor": (
        lambda p: rewrite(p, {}, **{"5.u": torch.zeros(())}),
        "damaged|another model",
    ),
    "unknown low-rank layer": (
        lambda p: rewrite(p, {"ranks": '{"0": 8, "2": 6, "3": 12, "5": 10, "8": 2}'}),
        "another model.*'8'.*has none",
    ),
    "low-rank norm": (
        lambda p: rewrite(p, {"ranks": '{"0": 8, "1": 2, "2": 6, "3": 12, "5": 10}'}),
        "another model.*'1'.*BatchNorm2d",
    ),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("into", [net, lambda: lod.decompose(net(), ranks=3)], ids=["dense", "low"])
def test_a_damaged_or_foreign_file_is_refused_and_changes_nothing(
    damage: Callable[[Path], None],
    words: str,
    into: Callable[[], nn.Module],
    path: Path,
    snapshot: Callable[[nn.Module], Any],
) -> None:
    lod.save(trained_net(), path)
    damage(path)
    model = into()
    before = snapshot(model)
    with pytest.raises(CheckpointError, match=f"(?s){words}") as caught:
        lod.load(path, into=model)
    assert path.name in str(caught.value)
    before.assert_unchanged(model)


OTHER_MODELS: dict[str, Callable[[], nn.Module]] = {
    "other names": LeNet,
    "one layer less": lambda: net()[:-1],
    "one layer more": lambda: net().append(nn.Linear(10, 10)),
    "wider": lambda: nn.Sequential(*net()[:-1], nn.Linear(64, 11)),
    "other input": lambda: nn.Sequential(*net()[:-1], nn.Linear(65, 10)),
    "other kind": lambda: nn.Sequential(*net()[:-1], nn.Conv1d(64, 10, 1)),
    "no bias": lambda: nn.Sequential(*net()[:-1], nn.Linear(64, 10, bias=False)),
    "other kernel": lambda: nn.Sequential(nn.Conv2d(3, 8, 5, bias=False), *net()[1:]),
    "no norm": lambda: nn.Sequential(net()[0], nn.Identity(), *net()[2:]),
    "lower full rank": lambda: nn.Sequential(*net()[:-1], nn.Linear(3, 10)),
}


@pytest.mark.parametrize("build", OTHER_MODELS.values(), ids=OTHER_MODELS.keys())
@pytest.mark.parametrize("decomposed", [False, True])
def test_a_file_of_another_model_is_refused_and_changes_nothing(
    build: Callable[[], nn.Module],
    decomposed: bool,
    path: Path,
    snapshot: Callable[[nn.Module], Any],
) -> None:
    lod.save(trained_net(), path)
    model = build()
    if decomposed:
        lod.decompose(model)
    before = snapshot(model)
    with pytest.raises(CheckpointError, match="is of another model"):
        lod.load(path, into=model)
    before.assert_unchanged(model)


def test_a_model_without_memory_is_not_said_to_be_loaded(path: Path) -> None:
    model, x = trained_net(), torch.randn(X)
    lod.save(model, path)
    with torch.device("meta"):
        into = net()
    try:
        loaded = lod.load(path, into=into)
    except MaestroError as error:
        assert "meta" in str(error)
    else:
        assert torch.equal(loaded.eval()(x), model(x))


# -- writing -----------------------------------------------------------------------------------


def test_a_failing_write_leaves_the_old_file_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lod.save(trained_net(), path)
    before = path.read_bytes()

    def half_written(tensors: Any, name: Any, metadata: Any = None) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(tensor_files, "save_file", half_written)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*disk full"):
        lod.save(trained_net(), path)
    assert path.read_bytes() == before
    assert files(path.parent) == [path.name]


def test_an_interrupted_write_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lod.save(trained_net(), path)
    assert files(path.parent) == []


def test_a_write_replaces_the_old_file_as_a_whole(path: Path) -> None:
    lod.save(trained_net(), path)
    reader = path.open("rb")
    old = path.read_bytes()
    lod.save(trained_net(ranks=2), path)
    with reader:
        assert reader.read() == old, "a reader of the old file saw the new one"
    assert path.read_bytes() != old
    assert files(path.parent) == [path.name]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        lod.save(trained_net(), tmp_path / "nowhere" / "model.safetensors")


def test_paths_may_be_text(path: Path) -> None:
    model = trained_net()
    lod.save(model, str(path))
    assert lod.ranks(lod.load(str(path), into=net())) == lod.ranks(model)


def test_a_dense_model_is_not_saved(path: Path) -> None:
    with pytest.raises(LayerError, match=r"no low-rank layer.*decompose"):
        lod.save(net(), path)
    assert files(path.parent) == []


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"step": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_state_that_is_no_tensor_is_refused_by_name(path: Path) -> None:
    model = lod.decompose(nn.Sequential(nn.Linear(4, 4), WithExtraState(4, 4)))
    with pytest.raises(CheckpointError, match=r"1\._extra_state.*dict"):
        lod.save(model, path)
    assert files(path.parent) == []


def test_buffers_that_overlap_in_memory_are_saved(path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4))
        model.register_buffer("whole", torch.arange(6.0))
        model.register_buffer("part", model.whole[2:4])
        return model

    model = lod.decompose(build())
    lod.save(model, path)
    loaded = lod.load(path, into=build())
    assert loaded.part.tolist() == [2, 3] and loaded.whole.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_inside_of_a_layer_may_be_named_like_a_factor(path: Path) -> None:
    """A plain parameter named u is stored as it is, not taken for a factor."""
    model = nn.Module()
    model.fc = nn.Linear(4, 3)
    model.other = nn.Module()
    model.other.u = nn.Parameter(torch.arange(6.0).view(2, 3))
    lod.save(lod.decompose(model), path)
    into = copy.deepcopy(model)
    into.other.u.data.zero_()
    lod.load(path, into=into, ranks=1)
    assert torch.equal(into.other.u, model.other.u)


# -- training state ----------------------------------------------------------------------------

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in dtype, shape and every bit, NaN and the sign of zero included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    plain = [torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for t in (one, other)]
    return torch.equal(*(t.view(-1).view(torch.uint8) for t in plain))


def assert_returned(value: Any, found: Any) -> None:
    """The same through all levels, types of keys and numbers included; tuples became lists."""
    if isinstance(value, Tensor):
        assert same_bits(value, found)
    elif isinstance(value, dict):
        keys = [(type(key), key) for key in value]
        assert type(found) is dict and [(type(key), key) for key in found] == keys
        for key in value:
            assert_returned(value[key], found[key])
    elif isinstance(value, list | tuple):
        assert type(found) is list and len(found) == len(value)
        for one, other in zip(value, found, strict=True):
            assert_returned(one, other)
    else:
        assert type(found) is type(value)
        assert repr(found) == repr(value)  # tells -0.0 from 0.0 and takes NaN for NaN


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor of any dtype, from random bits, in any memory layout."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    size = math.prod(shape) * dtype.itemsize
    bits = torch.randint(256, (size,), generator=torch.Generator().manual_seed(size))
    bits = bits % 2 if dtype == torch.bool else bits
    tensor = bits.to(torch.uint8).view(dtype).view(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[::2]
    if draw(st.booleans()):
        tensor = tensor.expand(2, *tensor.shape)
    return tensor


KEYS = st.text(max_size=4) | st.integers() | st.none() | st.booleans()
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
STATES = st.recursive(
    SCALARS | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(STATES)
def test_a_state_returns_bit_for_bit(state: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_state(state, Path(folder) / "state")
        assert_returned(state, load_state(str(Path(folder) / "state")))


@pytest.mark.parametrize(
    "value",
    [
        math.inf, -math.inf, math.nan, 1e-320, 0.1, -0.0, 2**80, -(2**80), True, None, "", "λ\n\0",
        {}, [], (), {0: {1: {}}}, {"tensor": "0", "mapping": [[1, 2]], "order": [0]},
        {None: 1, 1: 2, "1": 3, 0.5: 4}, [[], {}, [None]], torch.zeros(()), torch.zeros(0, 3),
        torch.tensor([math.nan, -0.0, 1e-45, math.inf]), nn.Parameter(torch.ones(2)),
    ],
    ids=repr,
)  # fmt: skip
def test_awkward_values_return(value: Any, path: Path) -> None:
    for state in (value, {"in": [value]}):
        save_state(state, path)
        assert_returned(state, load_state(path))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 3, 2)], ids=str)
def test_the_memory_layout_returns(order: tuple[int, ...], path: Path) -> None:
    """Fused optimizers take the state of a weight to lie in memory as the weight does."""
    tensor = torch.randn(2, 3, 4, 5).permute(order)
    save_state(tensor, path)
    found = load_state(path)
    assert same_bits(tensor, found) and found.stride() == tensor.stride()


def test_tensors_that_share_memory_return_whole_and_apart(path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    state = {"whole": whole, "again": whole, "row": whole[1], "column": whole[:, 2], "t": whole.t()}
    save_state(state, path)
    found = load_state(path)
    assert_returned(state, found)
    found["whole"].zero_()
    assert torch.equal(found["again"], whole) and torch.equal(found["row"], whole[1])


def test_tensors_return_without_their_graph_and_are_not_changed(path: Path) -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    product, strided = weight @ weight, torch.randn(4, 4)[::2, ::2]
    before = strided.clone()
    save_state([weight, product, strided], path)
    assert weight.requires_grad and product.grad_fn is not None
    assert torch.equal(strided, before) and strided.stride() == (8, 2)
    assert not any(tensor.requires_grad for tensor in load_state(path))


def test_a_loaded_state_does_not_hang_on_its_file(path: Path) -> None:
    save_state(torch.ones(1000), path)
    found = load_state(path)
    save_state(torch.zeros(1000), path)
    path.write_bytes(b"")
    assert found.sum() == 1000


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
def test_states_of_optimizers_and_models_return(name: str, path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = net()
        kinds: dict[str, Any] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adam": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
            "adagrad": lambda p: torch.optim.Adagrad(p, lr=torch.tensor(0.1)),
        }
        return model, kinds[name](model.parameters())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(X)).square().mean().backward()
        optimizer.step()

    first, second = build(), build()
    train(*first)
    save_state([part.state_dict() for part in first], path)
    for part, state in zip(second, load_state(path), strict=True):
        part.load_state_dict(state)
    for parts in (first, second):
        train(*parts)
    for key, value in first[0].state_dict().items():
        assert same_bits(value, second[0].state_dict()[key]), key


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1, 2}, "a set cannot be saved without pickle"),
        (b"bytes", "a bytes cannot"),
        (torch.float32, r"a dtype .*torch\.float32"),
        (1j, "a complex cannot"),
        (object(), "a object cannot"),
        (lambda: 0, "a function cannot"),
        ({(1, 2): 3}, r"a tuple .*\(1, 2\)"),
        ({frozenset(): 3}, "a frozenset cannot"),
        (torch.eye(3).to_sparse(), "a torch.sparse_coo tensor cannot"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_stored_is_refused_and_leaves_the_old_file(
    value: Any, words: str, path: Path
) -> None:
    save_state({"old": 1}, path)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=words) as caught:
        save_state({"good": torch.ones(2), "bad": [value]}, path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert files(path.parent) == [path.name]


def test_a_failing_write_of_a_state_leaves_the_old_file_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state({"old": torch.ones(3)}, path)
    before = path.read_bytes()

    def half_written(tensors: Any, name: Any, metadata: Any = None) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(tensor_files, "save_file", half_written)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*disk full"):
        save_state({"new": torch.zeros(3)}, path)
    assert path.read_bytes() == before
    assert files(path.parent) == [path.name]


def test_neither_saving_nor_loading_a_state_pickles(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    for module, names in (
        (pickle, ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")),
        (torch, ("save", "load")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    save_state({"a": [torch.ones(2), 1]}, path)
    assert torch.equal(load_state(path)["a"][0], torch.ones(2))


def described(text: str | None) -> Callable[[Path], None]:
    """Change what the header says about the state."""
    return lambda path: rewrite(path, {"state": text})


STATE_DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (cut_short, "damaged"),
    "truncated header": (cut_in_the_header, "damaged"),
    "empty": (empty, "damaged"),
    "noise": (noise, "damaged"),
    "pickle": (pickled, "damaged"),
    "missing": (missing, "does not exist"),
    "folder": (a_folder, "damaged"),
    "foreign": (
        lambda p: save_file(net().state_dict(), p),
        r"not written by save_state\. Choose",
    ),
    "foreign metadata": (
        lambda p: save_file(net().state_dict(), p, metadata={"format": "pt"}),
        r"not written by save_state\. Choose",
    ),
    "a model": (
        lambda p: lod.save(trained_net(), p),
        r"not written by save_state\. Choose",
    ),
    "another version": (
        lambda p: rewrite(p, {"format": "maestro-lod training state 9"}),
        r"not written by save_state\. Choose",
    ),
    "no description": (described(None), "damaged"),
    "no JSON": (described("{"), "damaged"),
    "unknown thing": (described('{"other": 1}'), "damaged"),
    "no pairs": (described('{"mapping": [1, 2]}'), "damaged"),
    "uneven pairs": (described('{"mapping": [[1, 2, 3]]}'), "damaged"),
    "a list as key": (described('{"mapping": [[[1], 2]]}'), "damaged"),
    "no tensor of this name": (described('{"tensor": "7", "order": [0]}'), "damaged"),
    "a name that is no text": (described('{"tensor": 0, "order": [0]}'), "damaged"),
    "no order": (described('{"tensor": "0"}'), "damaged"),
    "an order of other length": (described('{"tensor": "0", "order": [1, 0, 2, 3]}'), "damaged"),
    "an order that is none": (described('{"tensor": "0", "order": [null, "a"]}'), "damaged"),
}


@pytest.mark.parametrize(("damage", "words"), STATE_DAMAGE.values(), ids=STATE_DAMAGE)
def test_a_damaged_or_foreign_state_is_refused(
    damage: Callable[[Path], None], words: str, path: Path
) -> None:
    save_state({"weight": torch.randn(9, 9), "more": [torch.ones(3)]}, path)
    damage(path)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_state(path)
    assert path.name in str(caught.value)


def test_a_state_cut_anywhere_is_refused(path: Path) -> None:
    save_state({"a": torch.arange(5), "b": [1.5, "text"]}, path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            load_state(path)


def test_a_state_is_not_taken_for_a_model(path: Path) -> None:
    save_state(trained_net().state_dict(), path)
    with pytest.raises(CheckpointError, match=r"not written by maestro_lod's save"):
        lod.load(path, into=net())


# -- a size by what it may cost ----------------------------------------------------------------


def elastic(path: Path) -> tuple[nn.Module, Frontier]:
    """Save a small model with its frontier."""
    model = lod.decompose(nn.Sequential(nn.Linear(24, 20), nn.ReLU(), nn.Linear(20, 8)))
    x, y = torch.randn(64, 24), torch.randint(8, (64,))
    sizes = lod.frontier(model, lambda m: nn.functional.cross_entropy(m(x), y))
    lod.save(model, path, frontier=sizes)
    return model, sizes


def blank() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 20), nn.ReLU(), nn.Linear(20, 8))


@pytest.mark.parametrize("limits", [{"max_params": 0.5}, {"max_macs": 0.4}, {"max_bytes": 0.9}])
def test_a_file_with_a_frontier_is_loaded_by_what_it_may_cost(
    path: Path, limits: dict[str, Any]
) -> None:
    model, sizes = elastic(path)
    loaded = lod.load(path, into=blank(), **limits)
    assert lod.ranks(loaded) == sizes.pick(**limits)
    x = torch.randn(5, 24)
    with lod.at_ranks(model, sizes.pick(**limits)):
        torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_params": 1}, OptionError, "max_params=1: the nearest"),
        ({"max_prams": 0.5}, OptionError, "'max_prams'. Did you mean 'max_params'"),
        ({"max_params": 0.5, "ranks": 2}, OptionError, "Give one of them"),
        ({"min_accuracy": 0.5}, OptionError, "has no accuracy"),
        ({"max_params": -1}, OptionError, "above 0"),
    ],
)
def test_a_size_that_cannot_be_chosen_is_refused(
    path: Path,
    options: dict[str, Any],
    error: type[MaestroError],
    words: str,
    snapshot: Callable[[nn.Module], Any],
) -> None:
    elastic(path)
    into = blank()
    before = snapshot(into)
    with pytest.raises(error, match=words):
        lod.load(path, into=into, **options)
    before.assert_unchanged(into)


def test_a_file_without_a_frontier_says_how_to_get_one(path: Path) -> None:
    model, _ = elastic(path)
    lod.save(model, path)
    with pytest.raises(CheckpointError, match="no frontier"):
        lod.load(path, into=blank(), max_params=0.5)


def test_a_read_may_give_less_than_it_was_asked_for() -> None:
    """The system gives at most 2 GiB at once, and less where it likes."""

    class Sips(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:3])

    content = bytes(range(10))
    assert tensor_files._read(Sips(content), 10) == content
    with pytest.raises(OSError, match="ends too early"):
        tensor_files._read(Sips(content), 11)


FLOAT8 = [name for name in vars(torch) if name.startswith("float8_")]


@pytest.mark.parametrize("name", FLOAT8)
def test_what_can_be_saved_can_be_loaded(name: str, path: Path) -> None:
    dtype = getattr(torch, name)
    saved, loaded = lod.decompose(net()), net()
    saved.register_buffer("scale", torch.tensor([1.0, 2.0]).to(dtype))
    loaded.register_buffer("scale", torch.ones(2).to(dtype))
    try:
        lod.save(saved, path)
    except CheckpointError as error:
        assert f"scale is of torch.{name}" in str(error)
        assert not path.exists()
    else:
        lod.load(path, into=loaded)
        assert torch.equal(loaded.scale.float(), saved.scale.float())


def test_a_model_without_memory_cannot_be_saved(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"0\.u is on the meta device"):
        lod.save(lod.decompose(net()).to("meta"), path)
    assert not path.exists()


def test_compiled_models_are_saved_and_loaded_by_their_own_names(path: Path) -> None:
    model = trained_net().eval()
    compiled = torch.compile(model, backend="eager")
    lod.save(compiled, path)
    x = torch.randn(X)
    torch.testing.assert_close(lod.load(path, into=net()).eval()(x), model(x), **CLOSE)
    again = torch.compile(net(), backend="eager")
    assert lod.load(path, into=again, ranks=2) is again
    assert lod.ranks(again) == dict.fromkeys(lod.ranks(model), 2)


class Upsampling(nn.Module):
    """A layer whose output size only the dense form can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x, output_size=[8, 8])


def test_how_a_layer_is_called_is_known_after_loading(path: Path) -> None:
    model, x = lod.decompose(Upsampling(), ranks=1), torch.randn(1, 8, 3, 3)
    expected = model(x)
    lod.save(model, path)
    for into in (Upsampling(), lod.decompose(Upsampling())):
        plain = lod.extract(lod.load(path, into=into))
        torch.testing.assert_close(plain(x), expected, rtol=1e-4, atol=1e-5)


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained_net()
    lod.save(model, path)
    restructure = checkpoint.restructure

    def replaced_meanwhile(*arguments: Any, **options: Any) -> nn.Module:
        lod.save(trained_net(ranks=2), path)
        return restructure(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "restructure", replaced_meanwhile)
        loaded = lod.load(path, into=net())
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    assert set(lod.ranks(lod.load(path, into=net())).values()) == {2}


class Versioned(nn.Module):
    """Loads only what says of which version it is, as torchvision's MNASNet does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        if local_metadata.get("version") != 2:
            raise ValueError("version is missing")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_models_that_ask_for_the_version_of_their_state_are_loaded(tmp_path: Path) -> None:
    model, x = lod.decompose(Versioned()), torch.randn(3, 8)
    lod.save(model, tmp_path / "model.safetensors")
    loaded = lod.load(tmp_path / "model.safetensors", into=Versioned())
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)
