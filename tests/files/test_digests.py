"""Files prove what they hold: no bit of one can change unnoticed, and old files still load.

Run as a script, this file counts on as many damaged files as it is told: see `main`.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.cli import main as cli
from maestro_lod.deploy.manifest import write_manifest
from maestro_lod.errors import CheckpointError, MaestroError
from maestro_lod.files.state import load_state, save_state
from maestro_lod.files.tensor_file import opened_file
from maestro_lod.model import checkpoint
from maestro_lod.model.checkpoint import plain_state, save_plain, verify


class Tied(nn.Module):
    """An embedding and a head with one weight, a layer of few ranks, one without."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.hidden = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24))
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight


def model() -> nn.Module:
    torch.manual_seed(0)
    return lod.decompose(Tied(), tied="share", ranks={"hidden.0": 9})


def blank() -> nn.Module:
    torch.manual_seed(1)
    return Tied()


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))


def flattened(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from flattened(part)
    elif isinstance(value, list):
        yield len(value)
        for part in value:
            yield from flattened(part)
    elif isinstance(value, Tensor):
        yield str(value.dtype), tuple(value.shape), value.contiguous().flatten().tolist()
    else:
        yield value


def loaded_model(path: Path, **options: Any) -> Any:
    """Load a file as a user does, and return all there is to know about the result."""
    result = lod.load(path, into=blank(), **options)
    return [*flattened(dict(result.state_dict())), str(result)]


def loaded_plain(path: Path) -> Any:
    return [*flattened(dict(lod.load(path, into=plain()).state_dict()))]


def loaded_state(path: Path) -> Any:
    return [*flattened(load_state(path))]


STATE = {"model": {"a": torch.arange(300.0), "b": torch.ones(3, 4)}, "steps": [1, 2.5, "x", None]}

KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "elastic": (lambda path: lod.save(model(), path), loaded_model),
    "some ranks": (lambda path: lod.save(model(), path), lambda p: loaded_model(p, ranks=3)),
    "export": (lambda path: save_plain(plain(), path), loaded_plain),
    "export's state": (
        lambda path: save_plain(plain(), path),
        lambda path: [*flattened(plain_state(path))],
    ),
    "state": (lambda path: save_state(STATE, path), loaded_state),
}


# -- damage --------------------------------------------------------------------------------------


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def flip(data: bytes, draw: random.Random) -> bytes:
    bit = draw.randrange(8 * len(data))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flip_in_the_header(data: bytes, draw: random.Random) -> bytes:
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return flip(data[:end], draw) + data[end:]


def truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def lengthen(data: bytes, draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.randint(1, 64))


def swap_blocks(data: bytes, draw: random.Random) -> bytes:
    size = 2 ** draw.randint(3, 9)
    one, other = (draw.randrange(len(data) // size) * size for _ in range(2))
    changed = bytearray(data)
    changed[one : one + size], changed[other : other + size] = (
        data[other : other + size], data[one : one + size],
    )  # fmt: skip
    return bytes(changed)


def zero_a_block(data: bytes, draw: random.Random) -> bytes:
    size = 2 ** draw.randint(3, 9)
    begin = draw.randrange(len(data))
    return data[:begin] + bytes(len(data[begin : begin + size])) + data[begin + size :]


def claim_fewer_ranks(data: bytes, draw: random.Random) -> bytes:
    header, rest = parts(data)
    texts = header["__metadata__"]
    if "ranks" not in texts:
        return edit_a_text(data, draw)
    ranks = json.loads(texts["ranks"])
    name = draw.choice([*ranks])
    ranks[name] = draw.randrange(ranks[name])
    texts["ranks"] = json.dumps(ranks)
    return joined(header, rest)


def cut_ranks_off(data: bytes, draw: random.Random) -> bytes:
    """Let the header claim fewer ranks, and factors of so many rows, with bytes to match."""
    header, rest = parts(data)
    key = draw.choice([key for key, told in header.items() if told.get("shape")])
    told = header[key]
    begin, end = told["data_offsets"]
    kept = draw.randrange(told["shape"][0])
    removed = (end - begin) // told["shape"][0] * (told["shape"][0] - kept)
    told["shape"][0] = kept
    for other in header.values():
        if "data_offsets" in other:
            at = other["data_offsets"]
            other["data_offsets"] = [place - removed * (place >= end) for place in at]
    return joined(header, rest[: end - removed] + rest[end:])


def edit_a_text(data: bytes, draw: random.Random) -> bytes:
    """Change what the header says about ranks, heads, aliases or the state, as valid JSON."""
    header, rest = parts(data)
    texts = header["__metadata__"]
    name = draw.choice([n for n in texts if n not in ("digest", "crc32", "format", "version")])
    told = json.loads(texts[name])
    if isinstance(told, dict) and told and draw.random() < 0.5:
        del told[draw.choice([*told])]
    elif isinstance(told, dict):
        told["hidden.1"] = draw.choice(["embedding", "embedding.u", 3])
    else:
        told.append("hidden.1")
    texts[name] = json.dumps(told)
    return joined(header, rest)


def exchange_tensors(data: bytes, draw: random.Random) -> bytes:
    """Give two tensors of the same shape each other's place, or one another name."""
    header, rest = parts(data)
    keys = [key for key in header if key != "__metadata__"]
    draw.shuffle(keys)
    one, other = keys[:2]
    if header[one]["shape"] == header[other]["shape"]:
        header[one], header[other] = header[other], header[one]
    else:
        header[f"{one}x"] = header.pop(one)
    return joined(header, rest)


def forget_a_digest(data: bytes, draw: random.Random) -> bytes:
    header, rest = parts(data)
    del header["__metadata__"][draw.choice(["digest", "crc32"])]
    return flip(joined(header, rest), draw)


def new_digests(data: bytes, draw: random.Random) -> bytes:
    """Put other digests in, with a header that does not know of them."""
    header, rest = parts(data)
    texts = header["__metadata__"]
    texts["crc32"] = draw.randbytes(len(texts["crc32"]) // 2).hex()
    return joined(header, rest)


DAMAGES = [
    truncate, lengthen, swap_blocks, zero_a_block, claim_fewer_ranks, cut_ranks_off, edit_a_text,
    exchange_tensors, forget_a_digest, new_digests,
]  # fmt: skip


def tried(
    kind: str, damages: list[Callable[[bytes, random.Random], bytes]], times: int, seed: int
) -> Counter[str]:
    """Damage a file again and again; count how its loading ends: refused, the same, or silent."""
    write, load = KINDS[kind]
    draw = random.Random(f"{kind} {seed}")
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.safetensors"
        write(path)
        data, expected = path.read_bytes(), load(path)
        for number in range(times):
            damaged = damages[number % len(damages)](data, draw)
            path.write_bytes(damaged)
            try:
                same = load(path) == expected
                ends["same" if same else "silently something else"] += 1
            except MaestroError:
                ends["refused"] += 1
    return +ends


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_loads_as_something_else(kind: str) -> None:
    ends = tried(kind, [flip, flip_in_the_header], 120, seed=0)
    if kind == "some ranks":  # what it does not read it cannot know
        assert ends.keys() <= {"refused", "same"} and ends["refused"] >= 60
    else:
        assert ends == {"refused": 120}


@pytest.mark.parametrize("kind", KINDS)
def test_no_damaged_file_loads_as_something_else(kind: str) -> None:
    ends = tried(kind, DAMAGES, 120, seed=0)
    assert ends["silently something else"] == 0
    assert ends["refused"] >= 100  # two blocks of zeros may have been swapped


def main() -> None:
    """Print as JSON how so many flipped bits and damaged files ended, by kind of file."""
    bits, files = int(sys.argv[1]), int(sys.argv[2])
    ends = {
        what: {kind: tried(kind, damages, times // len(KINDS), seed=1) for kind in KINDS}
        for what, damages, times in (
            ("flipped bits", [flip, flip_in_the_header], bits),
            ("damaged files", DAMAGES, files),
        )
    }
    print(json.dumps(ends))  # noqa: T201


# -- what a digest covers ------------------------------------------------------------------------


def test_digests_are_a_small_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_state([torch.zeros(512, 1536), torch.zeros(2**21), torch.zeros(3)], path)
    header, data = parts(path.read_bytes())
    assert len(header["__metadata__"]["crc32"]) < len(data) / 3000


def test_some_ranks_are_verified_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    lod.save(lod.decompose(nn.Linear(256, 256)), path)
    data = path.read_bytes()
    header, rest = parts(data)
    begin, end = header["v"]["data_offsets"]
    start = len(data) - len(rest)
    for at, noticed in ((begin, True), (begin + 99 * 1024, True), (end - 1, False)):
        damaged = bytearray(data)
        damaged[start + at] ^= 1
        path.write_bytes(damaged)
        if noticed:
            with pytest.raises(CheckpointError, match="the bytes of v differ from"):
                lod.load(path, into=nn.Linear(256, 256), ranks=100)
        else:
            lod.load(path, into=nn.Linear(256, 256), ranks=100)
        with pytest.raises(CheckpointError, match="the bytes of v differ from"):
            verify(path)
        lod.load(path, into=nn.Linear(256, 256), verify=False)


def test_large_tensors_are_verified_too(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    value = torch.arange(2**21)
    save_state(value, path)
    assert torch.equal(load_state(path), value)
    data = bytearray(path.read_bytes())
    for at in (-1, -(2**20), -(2**24) + 5):
        data[at] ^= 4
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="the bytes of 0 differ from"):
            load_state(path)
        assert not torch.equal(load_state(path, verify=False), value)
        data[at] ^= 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_gives_the_same_bytes(kind: str, tmp_path: Path) -> None:
    write, _ = KINDS[kind]
    for name in ("one", "other"):
        write(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_the_order_of_tensors_does_not_matter(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2), "a": torch.zeros(3, dtype=torch.int64), "c": torch.ones(1)}
    for name, keys in (("one", "abc"), ("other", "cba")):
        checkpoint.write_tensors({key: tensors[key] for key in keys}, {}, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_any_reader_of_safetensors_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    saved = plain()
    save_plain(saved, path)
    found = load_file(path)
    assert found.keys() == saved.state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in saved.state_dict().items())


# -- old files -----------------------------------------------------------------------------------

OLD = Path(__file__).parents[1] / "support/files"


def test_files_from_before_digests_load(tmp_path: Path) -> None:
    """Files as the library wrote them before there were digests."""
    into = lod.load(OLD / "old_model.safetensors", into=nn.Sequential(nn.Linear(6, 5)))
    stored = load_file(OLD / "old_model.safetensors")
    assert lod.ranks(into) == {"0": 4}
    assert torch.equal(into[0].u, stored["0.u"].t()) and torch.equal(into[0].v, stored["0.v"])
    assert torch.equal(
        load_state(OLD / "old_state.safetensors")["a"][0], torch.arange(6.0).view(3, 2)
    )
    assert not verify(OLD / "old_model.safetensors")
    with opened_file(OLD / "old_state.safetensors") as file:
        assert not file.proven
    lod.save(into, tmp_path / "new.safetensors")
    assert verify(tmp_path / "new.safetensors")


def test_files_whose_blocks_have_a_sha256_are_verified(tmp_path: Path) -> None:
    """A file as the library wrote it before blocks had a CRC-32."""
    path = tmp_path / "model.safetensors"
    data = (OLD / "sha256_model.safetensors").read_bytes()
    path.write_bytes(data)
    assert verify(path)
    torch.manual_seed(0)
    expected = lod.decompose(nn.Sequential(nn.Linear(64, 40))).state_dict()
    found = lod.load(path, into=nn.Sequential(nn.Linear(64, 40))).state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    draw = random.Random(0)
    for damage in (flip, flip_in_the_header, swap_blocks, truncate):
        path.write_bytes(damage(data, draw))
        with pytest.raises(CheckpointError):
            verify(path)


# -- lod verify ----------------------------------------------------------------------------------


def verified(*arguments: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_verify_says_of_each_file_whether_it_is_as_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_state(STATE, tmp_path / "checkpoint.safetensors")
    (tmp_path / "old.safetensors").write_bytes((OLD / "old_model.safetensors").read_bytes())
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    assert verified(tmp_path) == 0
    assert [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "as written", "readable",
        "complete; written before digests were stored, so not verifiable", "readable",
    ]  # fmt: skip
    assert verified(tmp_path / "checkpoint.safetensors") == 0

    data = bytearray((tmp_path / "checkpoint.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "checkpoint.safetensors").write_bytes(data)
    (tmp_path / "metrics.jsonl").write_text('{}\n{"a":')
    capsys.readouterr()
    assert verified(tmp_path) == 1
    told = capsys.readouterr()
    assert told.out.count("DAMAGED") == 2 and len(told.out.splitlines()) == 4
    assert "2 of 4 files" in told.err
    assert verified(tmp_path / "checkpoint.safetensors") == 1


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as `lod deploy` writes it, with a file in every format."""
    out = tmp_path_factory.mktemp("deployed") / "phone"
    formats, example = ["onnx", "pt2", "safetensors"], torch.empty(2, 20)
    lod.deploy_size(lod.decompose(plain(), ranks=2), None, out, example=example, formats=formats)
    return out


@pytest.fixture
def phone(deployed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(deployed, tmp_path / "phone"))


def test_deployed_files_are_verified(phone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(phone) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(f"{phone}/") for line in told] == [
        "deploy.json: readable", "model.onnx: as written", "model.pt2: as written",
        "model.safetensors: as written",
    ]  # fmt: skip
    assert verified(phone / "model.onnx") == 0


def flip_one_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": flip_one_bit,
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\n"),
    "empty": lambda file: file.write_bytes(b""),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["model.onnx", "model.pt2", "model.safetensors"])
def test_a_damaged_deployed_file_is_named_in_one_line(
    phone: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGE[damage](phone / name)
    assert verified(phone) == 1
    told = capsys.readouterr()
    assert [line for line in told.out.splitlines() if "DAMAGED" in line] == [
        line for line in told.out.splitlines() if line.startswith(f"{phone / name}: ")
    ]
    assert "1 of 4 files" in told.err and len(told.err.splitlines()) == 1
    if damage != "missing":
        assert verified(phone / name) == 1


@pytest.mark.parametrize("name", ["other.onnx", "model.onnx.data", "other.safetensors"])
def test_a_file_that_was_put_beside_deployed_ones_is_named(
    phone: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(phone / "model.safetensors", phone / name)
    assert verified(phone) == 1
    assert f"{phone / name}: DAMAGED. deploy.json does not list it" in capsys.readouterr().out


def test_data_that_an_onnx_file_keeps_in_another_file_is_verified(phone: Path) -> None:
    import onnx

    (phone / "deploy.json").unlink()
    onnx.save(
        onnx.load(phone / "model.onnx"), phone / "model.onnx", save_as_external_data=True,
        location="weights.bin", size_threshold=0,
    )  # fmt: skip
    write_manifest(phone, {})
    assert verified(phone) == 0
    flip_one_bit(phone / "weights.bin")
    assert verified(phone) == 1


def test_deployed_files_without_digests_are_reported(
    phone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((phone / "deploy.json").read_text())
    del record["sha256"]
    (phone / "deploy.json").write_text(json.dumps(record))  # as older versions wrote it
    assert verified(phone) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in told] == [
        "readable", *["not verifiable: no digest was stored when it was written"] * 2, "as written",
    ]  # fmt: skip
    (phone / "deploy.json").unlink()
    assert verified(phone / "model.onnx") == 0


@pytest.mark.parametrize(
    "digests",
    [3, [], {"../out": "0"}, {"/etc/hosts": "0"}, {"": "0"}, {"model.onnx": 3}, {".": ""}],
)
def test_digests_that_are_none_are_refused(
    phone: Path, digests: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (phone / "deploy.json").write_text(json.dumps({"sha256": digests}))
    assert verified(phone) == 1
    told = capsys.readouterr()
    assert f"{phone / 'deploy.json'}: DAMAGED. " in told.out
    assert len(told.out.splitlines()) == 4  # one per file


def test_verify_refuses_what_it_cannot_look_at(tmp_path: Path) -> None:
    assert verified(tmp_path) == 2
    assert verified(tmp_path / "nowhere") == 2


if __name__ == "__main__":
    main()
