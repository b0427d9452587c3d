"""Exported files compute what the model does, or are not there."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod import load
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.deploy import export as module
from maestro_lod.deploy import verification
from maestro_lod.deploy.export import (
    INT8_TOLERANCE,
    TOLERANCE,
    Exported,
    export,
    open_runner,
)
from maestro_lod.errors import CheckpointError, LayerError, MaestroError, OptionError
from maestro_lod.layers import Attention
from maestro_lod.model.inputs import ModelInputs


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of timing: how long things take is not tested."""
    monkeypatch.setattr(module, "ROUNDS", 1)


# -- models ------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block with batch norm, as in a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + x)


class SmallResNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, 2, 1), Block(16), Block(16), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(16, 10),
        )  # fmt: skip
        for part in self.modules():
            if isinstance(part, nn.BatchNorm2d):  # as after training
                part.running_mean.normal_(0, 0.1)
                part.running_var.uniform_(0.5, 2.0)


class Encoder(nn.Module):
    """Token ids, a padding mask, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 7)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.encoder(self.embedding(ids), src_key_padding_mask=padding)
        return {"hidden": hidden, "logits": self.head(hidden)}


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 16)
        self.head = nn.Linear(16, 60)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


@dataclass(frozen=True)
class Case:
    dense: Callable[[], nn.Module]
    example: Any
    """What a user gives; its floats have no values that could be used."""
    inputs: Callable[[int], tuple[Any, ...]]
    """Real arguments, at a batch size."""


def ids(batch: int) -> Tensor:
    return torch.randint(50, (batch, 6))


def padding(batch: int) -> Tensor:
    return torch.arange(6).expand(batch, 6) > torch.arange(batch)[:, None] % 3 + 2


CASES = {
    "LeNet": Case(
        LeNet,
        torch.full((1, 1, 28, 28), float("nan")),
        lambda n: (torch.randn(n, 1, 28, 28),),
    ),
    "ResNet": Case(
        SmallResNet,
        torch.empty(2, 3, 16, 16, device="meta"),
        lambda n: (torch.randn(n, 3, 16, 16),),
    ),
    "Transformer": Case(
        Encoder, {"ids": ids(2), "padding": padding(2)}, lambda n: (ids(n), padding(n))
    ),
}


@dataclass(frozen=True)
class Made:
    case: Case
    small: nn.Module
    directory: Path

    def path(self, suffix: str) -> Path:
        return self.directory / f"model.{suffix}"


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A small plain model of each case, in training mode."""
    torch.manual_seed(0)
    case = CASES[request.param]
    small = lod.extract(lod.decompose(case.dense()), 0.25)
    return Made(case, small, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def line() -> nn.Module:
    """The quickest model to export."""
    return lod.extract(lod.decompose(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), ranks=2))


def outputs(model: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    with torch.no_grad():
        out = model.eval()(*args)
    return list(out.values()) if isinstance(out, dict) else [out]


def assert_same(got: list[Any], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        scale = float(other.abs().max())
        assert float((torch.as_tensor(one).detach() - other).abs().max()) <= TOLERANCE * scale


def assert_nothing_of_this_machine(content: bytes) -> None:
    """Neither source lines nor paths."""
    assert b".py" not in content
    assert b"def forward" not in content


# -- files that other programs run -------------------------------------------------------------


def test_onnx_files_run_without_torch(made: Made) -> None:
    done = export(made.small, made.path("onnx"), example=made.case.example)
    assert all(m.training for m in made.small.modules())
    assert (done.format, done.quantize, done.batch) == ("onnx", None, None)
    assert done.difference <= TOLERANCE
    assert done.bytes == made.path("onnx").stat().st_size
    assert list(made.directory.glob("*onnx*")) == [made.path("onnx")]
    assert_nothing_of_this_machine(made.path("onnx").read_bytes())
    import onnxruntime

    session = onnxruntime.InferenceSession(made.path("onnx"), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape[0] == session.get_outputs()[0].shape[0] == "batch"
    assert session.get_outputs()[0].name in ("output", "output_0")
    for batch in (1, 5):
        args = made.case.inputs(batch)
        feed = {i.name: a.numpy() for i, a in zip(session.get_inputs(), args, strict=True)}
        assert_same(session.run(None, feed), outputs(made.small, args))
        made.small.train()


def test_pt2_files_run_in_torch_alone(made: Made) -> None:
    done = export(made.small, made.path("pt2"), example=made.case.example)
    assert (done.format, done.batch) == ("pt2", None)
    assert done.difference <= TOLERANCE
    with zipfile.ZipFile(made.path("pt2")) as archive:
        for entry in archive.infolist():
            assert_nothing_of_this_machine(archive.read(entry))
            if not entry.filename.endswith(".json"):
                data = entry.header_offset + 30 + len(entry.filename) + len(entry.extra)
                assert data % 64 == 0
    program = torch.export.load(made.path("pt2")).module()
    for batch in (1, 5):
        args = made.case.inputs(batch)
        call = ModelInputs(args, {})
        if isinstance(made.case.example, dict):
            call = ModelInputs((), dict(zip(made.case.example, args, strict=True)))
        with torch.no_grad():
            out = program(*call.args, **call.kwargs)
        got = list(out.values()) if isinstance(out, dict) else [out]
        assert_same(got, outputs(made.small, args))
        made.small.train()
        assert_same(open_runner(made.path("pt2"))(call), got)


def test_tensor_files_rebuild_the_model_bit_for_bit(made: Made) -> None:
    done = export(made.small, made.path("safetensors"), example=made.case.example)
    assert (done.difference, done.over_eager) == (0.0, 1.0)
    dense = made.case.dense()
    rebuilt = load(made.path("safetensors"), into=dense)
    assert rebuilt is dense
    assert str(rebuilt) == str(made.small)
    args = made.case.inputs(3)
    for one, other in zip(outputs(rebuilt, args), outputs(made.small, args), strict=True):
        assert torch.equal(one, other)
    made.small.train()


def test_files_are_as_large_as_their_weights(tmp_path: Path) -> None:
    layers = [nn.Sequential(nn.Linear(400, 400), nn.BatchNorm1d(400), nn.ReLU()) for _ in range(4)]
    small = lod.extract(lod.decompose(nn.Sequential(*layers)), 0.25)
    for suffix in ("onnx", "pt2", "safetensors"):
        done = export(small, tmp_path / f"model.{suffix}", example=torch.empty(1, 400))
        assert done.params == sum(p.numel() for p in small.parameters())
        assert done.weight_bytes == 4 * done.params
        assert done.size_ratio == done.bytes / done.weight_bytes
        assert 0.95 <= done.size_ratio <= 1.05, suffix


def test_a_shared_weight_is_stored_once(tmp_path: Path) -> None:
    small = lod.extract(lod.decompose(Tied(), tied="share"), 0.5)
    path = tmp_path / "tied.safetensors"
    done = export(small, path, example=torch.randint(60, (1, 4)))
    weights = [t for t in load_file(path).values() if t.is_floating_point()]  # no index of rows
    assert sum(t.numel() for t in weights) == done.params
    rebuilt = load(path, into=Tied())
    assert sum(p.numel() for p in rebuilt.parameters()) == done.params  # shared ones count once
    words = torch.randint(60, (2, 4))
    assert torch.equal(rebuilt(words), small(words))


def test_a_low_rank_model_is_extracted_first(
    tmp_path: Path, snapshot: Callable[[nn.Module], Any]
) -> None:
    model = lod.decompose(LeNet(), ranks=0.25)
    before, randomness = snapshot(model), torch.get_rng_state()
    done = export(model, tmp_path / "model.safetensors", example=torch.empty(1, 1, 28, 28))
    before.assert_unchanged(model)
    assert torch.equal(torch.get_rng_state(), randomness)
    assert model.training
    assert done.params == sum(p.numel() for p in lod.extract(model).parameters())
    x = torch.randn(2, 1, 28, 28)
    rebuilt = load(tmp_path / "model.safetensors", into=LeNet())
    torch.testing.assert_close(rebuilt(x), model(x), rtol=1e-4, atol=1e-5)


def test_several_inputs_constants_and_nested_outputs(tmp_path: Path) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 6)

        def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor, twice: bool = False) -> Any:
            y = self.line(x) * scale + shift
            return (y, {"twice": 2 * y if twice else y}, None)

    small = lod.extract(lod.decompose(Several(), ranks=1)).eval()
    fixed = ModelInputs(
        (torch.empty(2, 6), torch.empty(6)), {"shift": torch.empty(2, 6), "twice": True}
    )
    x, scale, shift = torch.randn(4, 6), torch.randn(6), torch.randn(4, 6)
    y, more, _ = small(x, scale, shift=shift, twice=True)
    for suffix in ("onnx", "pt2"):
        assert export(small, tmp_path / f"m.{suffix}", example=fixed).batch is None
        call = ModelInputs((x, scale), {"shift": shift, "twice": True})
        assert_same(
            open_runner(tmp_path / f"m.{suffix}")(call), [y.detach(), more["twice"].detach()]
        )


def test_a_model_with_a_fixed_batch_is_exported_for_that(tmp_path: Path) -> None:
    class Paired(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x).reshape(2, -1)[:, :12]

    small = lod.extract(lod.decompose(Paired(), ranks=1))
    with pytest.warns(UserWarning, match=r"Paired is exported for batch size 4 only: .*\(.+\)"):
        done = export(small, tmp_path / "paired.pt2", example=torch.empty(4, 6))
    assert done.batch == 4
    assert "batch size 4 only" in str(done)


def test_the_result_is_a_line_and_data(tmp_path: Path, line: nn.Module) -> None:
    done = export(line, tmp_path / "line.bin", example=torch.empty(2, 8), format="safetensors")
    assert isinstance(done, Exported)
    text = str(done)
    assert "\n" not in text
    for words in ("line.bin: safetensors, 40 params", "max difference 0.0e+00", "any batch size"):
        assert words in text
    data = json.loads(json.dumps(done.to_dict()))
    assert data["path"] == str(tmp_path / "line.bin")
    assert data["size_ratio"] == done.bytes / 160


# -- int8 --------------------------------------------------------------------------------------


def test_low_rank_and_int8_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 96))
    small = lod.extract(lod.decompose(dense), 0.25)
    path, example = tmp_path / "small.onnx", torch.empty(1, 3, 8, 8)
    done = export(small, path, example=example, quantize="int8")
    assert 0 < done.difference <= INT8_TOLERANCE
    assert done.size_ratio < 0.35  # a quarter, and the graph
    assert "onnx int8" in str(done)
    import onnx

    integers = {t.name for t in onnx.load(path).graph.initializer if t.data_type == 2}
    assert len([name for name in integers if name.endswith("_quantized")]) == 4
    # beyond its own bound it is garbage, and what was there before stays
    before = path.read_bytes()
    monkeypatch.setattr(module, "INT8_TOLERANCE", 1e-9)
    with pytest.raises(
        CheckpointError, match=r"small.onnx was not written: at batch size 1.*differ"
    ):
        export(small, path, example=example, quantize="int8")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("suffix", "quantize"), [("pt2", "int8"), ("onnx", "int4")])
def test_other_quantization_is_refused(
    suffix: str, quantize: Any, tmp_path: Path, line: nn.Module
) -> None:
    with pytest.raises(OptionError, match=rf"quantize='{quantize}'.*{suffix}.*'int8'"):
        export(line, tmp_path / f"m.{suffix}", example=torch.empty(1, 8), quantize=quantize)


# -- what fails leaves nothing behind ----------------------------------------------------------


def broken(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a function that opens a file with changed outputs."""
    true = module._open_runner

    def open_runner(path: Path, format: str) -> Any:
        runner = true(path, format)
        return lambda call: [change(t) for t in runner(call)]

    return open_runner


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t + 3e-4 * t.abs().max(),
            r"differ by 3\.\de-04 of the largest, more than 1e-04",
        ),
        (lambda t: t * float("nan"), "differ by inf"),
        (lambda t: t[:1], r"outputs of shapes \[\(1, 8\)\] instead of \[\(2, 8\)\]"),
    ],
)
@pytest.mark.parametrize("existing", [False, True])
def test_a_file_that_differs_is_never_there(
    change: Any, words: str, existing: bool, tmp_path: Path, line: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "model.pt2"
    if existing:
        path.write_text("what was there")
    monkeypatch.setattr(module, "_open_runner", broken(change))
    with pytest.raises(CheckpointError, match=rf"model.pt2 was not written: at batch.*{words}"):
        export(line, path, example=torch.empty(2, 8))
    assert [p.name for p in tmp_path.iterdir()] == (["model.pt2"] if existing else [])
    assert not existing or path.read_text() == "what was there"
    assert line.training


def test_both_batch_sizes_are_verified(
    tmp_path: Path, line: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    for example, wrong in ((torch.empty(4, 8), 1), (torch.empty(1, 8), 3)):
        change = lambda t, wrong=wrong: t + (len(t) == wrong)  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(module, "_open_runner", broken(change))
            with pytest.raises(CheckpointError, match=f"at batch size {wrong} the file"):
                export(line, tmp_path / "model.pt2", example=example)
    assert not list(tmp_path.iterdir())


def test_damaged_tensors_are_noticed(
    tmp_path: Path, line: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = module.plain_state

    def damaged(path: Path) -> dict[str, Tensor]:
        return {key: value + (key == "0.1.bias") for key, value in true(path).items()}

    monkeypatch.setattr(module, "plain_state", damaged)
    with pytest.raises(CheckpointError, match=r"model.safetensors was not written"):
        export(line, tmp_path / "model.safetensors", example=torch.empty(2, 8))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_a_model_that_cannot_be_traced_is_refused_in_one_line(suffix: str, tmp_path: Path) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x) if x.sum() > 0 else x

    small = lod.extract(lod.decompose(Branching(), ranks=1))
    with pytest.raises(LayerError, match=rf"Branching cannot be exported as {suffix} \(") as error:
        export(small, tmp_path / f"m.{suffix}", example=torch.empty(2, 6))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_values_that_are_not_finite_must_agree() -> None:
    inf, nan = float("inf"), float("nan")
    expected = torch.tensor([1.0, -inf, nan, 4.0])
    assert verification._difference(expected, expected) == 0.0
    assert verification._difference(expected, torch.tensor([1.0, -inf, nan, 3.0])) == 0.25
    for other in ([1.0, inf, nan, 4.0], [1.0, -inf, 0.0, 4.0], [nan, -inf, nan, 4.0]):
        assert verification._difference(expected, torch.tensor(other)) == inf
    assert verification._difference(torch.zeros(3), torch.tensor([0.0, 0.5, 0.0])) == 0.5
    assert verification._difference(torch.empty(0), torch.empty(0)) == 0.0


def test_half_precision_is_held_to_what_it_can_do(tmp_path: Path) -> None:
    small = lod.extract(lod.decompose(nn.Linear(16, 16), ranks=2)).to(torch.bfloat16)
    example = torch.empty(1, 16, dtype=torch.bfloat16)
    assert export(small, tmp_path / "half.pt2", example=example).weight_bytes == 2 * 80
    assert verification.output_tolerance(small) == 8 * torch.finfo(torch.bfloat16).eps
    assert verification.output_tolerance(small.double()) == TOLERANCE


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("m.onx", {}, OptionError, r"format 'onx' is not known. Did you mean 'onnx'\?.*pt2"),
        ("m.onnx", {"format": "safetensor"}, OptionError, "Did you mean 'safetensors'"),
        ("m", {}, OptionError, r"m without a suffix.*onnx, pt2, pte, safetensors"),
        ("nowhere/m.pt2", {}, CheckpointError, r"cannot write .*nowhere/m\.pt2 \(No such file"),
        ("m.pt2", {"example": torch.empty(2, 9)}, LayerError, "does not run on this example"),
        ("m.pt2", {"example": [1]}, OptionError, "example is a list"),
        ("m.pt2", {"example": (3,)}, OptionError, "no tensor with a batch"),
    ],
)
def test_bad_input_is_refused(
    name: str, options: dict[str, Any], error: type[MaestroError], words: str, tmp_path: Path,
    line: nn.Module,
) -> None:  # fmt: skip
    with pytest.raises(error, match=words) as caught:
        export(line, tmp_path / name, **({"example": torch.empty(2, 8)} | options))
    assert "\n" not in str(caught.value).partition(":")[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_without_its_packages_onnx_names_the_extra(
    package: str, tmp_path: Path, line: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "maestro_lod.deploy.onnx_file", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OptionError, match=rf"ONNX files need {package}.*pip install.*\[export\]"):
        export(line, tmp_path / "m.onnx", example=torch.empty(1, 8))


def test_tensors_alone_do_not_run(tmp_path: Path, line: nn.Module) -> None:
    path = tmp_path / "m.safetensors"
    export(line, path, example=torch.empty(1, 8))
    with pytest.raises(OptionError, match=r"cannot be run. Use load"):
        open_runner(path)


def test_extra_state_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None: ...

    with pytest.raises(CheckpointError, match="_extra_state is extra state of type dict"):
        export(Extra(4, 4), tmp_path / "m.safetensors", example=torch.empty(1, 4))
    assert not list(tmp_path.iterdir())


# -- rebuilding --------------------------------------------------------------------------------


def own_pair() -> nn.Module:
    """A pair of layers that is the user's own, beside one that `extract` makes."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(8, 3, bias=False), nn.Linear(3, 8)), nn.Linear(8, 8)
    )


def sharing() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].bias = model[0].bias
    return model


def transposed() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(Conv1D(12, 12), Conv1D(12, 12), Conv1D(12, 12))


REBUILT = {
    "a pair of the user's own": (own_pair, {"only": ["1"], "ranks": 2}, (2, 8)),
    "a shared bias": (sharing, {"ranks": 2}, (2, 6)),
    "foreign layers": (transposed, {"skip": ["2"], "ranks": {"0": 2}}, (2, 12)),
    "a single layer": (lambda: nn.Linear(8, 8), {"ranks": 2}, (2, 8)),
    "transposed, groups": (
        lambda: nn.Sequential(nn.ConvTranspose2d(6, 4, 3, 2, groups=2), nn.Conv2d(4, 8, 3)),
        {"ranks": 1},
        (2, 6, 5, 5),
    ),
}


@pytest.mark.parametrize("kind", REBUILT)
def test_rebuilding_gives_the_same_model(kind: str, tmp_path: Path) -> None:
    build, options, shape = REBUILT[kind]
    small = lod.extract(lod.decompose(build(), **options))
    path = tmp_path / "m.safetensors"
    export(small, path, example=torch.empty(shape))
    rebuilt = load(path, into=build())
    assert str(rebuilt) == str(small)
    x = torch.randn(shape)
    assert torch.equal(rebuilt(x), small(x))
    assert len(list(rebuilt.parameters())) == len(list(small.parameters()))


def test_attention_is_opened_where_the_file_says_so(tmp_path: Path) -> None:
    model = lod.decompose(Encoder(), only=["encoder.layers.0", "embedding"], ranks=4)
    small = lod.extract(model)
    path = tmp_path / "m.safetensors"
    export(small, path, example=(ids(2), padding(2)))
    seen: list[Any] = []
    dense = Encoder()
    dense.encoder.layers[0].linear1.register_forward_hook(lambda *args: seen.append(args))
    rebuilt = load(path, into=dense)
    first, second = rebuilt.encoder.layers
    assert (type(first.self_attn), type(second.self_attn)) == (Attention, nn.MultiheadAttention)
    args = (ids(3), padding(3))
    assert_same(outputs(rebuilt, args), outputs(small, args))
    assert len(seen) == 1  # hooks stay where they were


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    small = lod.extract(lod.decompose(SmallResNet()), 0.25)
    export(small, path, example=torch.empty(1, 3, 8, 8))
    return path


def changed(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = SmallResNet()
        change(model)
        return model

    return build


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (LeNet, r"of another model: LeNet does not have its 0\.0, "),
        (lambda: lod.decompose(SmallResNet()), "SmallResNet is decomposed"),
        (lambda: SmallResNet().half(), r"as torch.float32, the model as torch.float16.*model\.to"),
        (lambda: SmallResNet().to("meta"), "meta device"),
        (changed(lambda m: m.append(nn.Linear(10, 10))), "6 is a Linear in the model and missing"),
        (changed(lambda m: m.pop(5)), r"SmallResNet does not have its 5\.0, 5\.1"),
        (changed(lambda m: m.insert(0, nn.Identity())), "of another model"),
        (
            changed(lambda m: setattr(m[1], "bn1", nn.GroupNorm(2, 16))),
            r"1\.bn1 is a GroupNorm in the model and a BatchNorm2d in",
        ),
        (
            changed(lambda m: setattr(m[1], "conv1", nn.Conv2d(16, 16, 5, bias=False))),
            r"of another model.*size mismatch for 1\.conv1\.0\.weight",
        ),
        (
            changed(lambda m: setattr(m[2].bn1, "weight", m[1].bn1.weight)),
            r"1\.bn1\.weight and 2\.bn1\.weight are tied in the model, but not in the file",
        ),
    ],
)  # fmt: skip
def test_another_model_is_refused_and_left_alone(
    build: Callable[[], nn.Module], words: str, written: Path,
    snapshot: Callable[[nn.Module], Any],
) -> None:  # fmt: skip
    model = build()
    before = snapshot(model)
    with pytest.raises(CheckpointError, match=f"(?s){words}"):
        load(written, into=model)
    before.assert_unchanged(model)


def rewritten(path: Path, **changes: str) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **changes}
    for name in ("digest", "crc32"):  # as in files from before there were any
        del metadata[name]
    save_file(load_file(path), path, metadata=metadata)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "damaged or not a safetensors"),
        (lambda path: path.write_text("hello"), "damaged or not a safetensors"),
        (lambda path: save_file({"a": torch.ones(1)}, path), "not written by .*save or export"),
        (lambda path: rewritten(path, version="9"), "version 9, this library reads up to 1"),
        (lambda path: rewritten(path, version="x"), "header of .* is damaged"),
        (lambda path: rewritten(path, config="{"), "header of .* is damaged"),
        (lambda path: rewritten(path, config="[]"), "header of .* is damaged"),
        (
            lambda path: rewritten(
                path, config='{"layers": {}, "factored": {"5": 0}, "aliases": {}}'
            ),
            "damaged .*not a whole number above zero",
        ),
        (
            lambda path: rewritten(
                path,
                config='{"layers": {}, "factored": {}, "pivoted": {"5": 0}, "aliases": {}}',
            ),
            "damaged .*not a whole number above zero",
        ),
        (
            lambda path: rewritten(
                path, config='{"layers": {}, "factored": {}, "aliases": {"a": "b"}}'
            ),
            "header of .* is damaged",
        ),
    ],
)
def test_damaged_and_foreign_files_are_refused(
    spoil: Callable[[Path], Any], words: str, written: Path,
    snapshot: Callable[[nn.Module], Any],
) -> None:  # fmt: skip
    spoil(written)
    model = SmallResNet()
    before = snapshot(model)
    with pytest.raises(CheckpointError, match=words):
        load(written, into=model)
    before.assert_unchanged(model)


def test_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "deploy.md", "exec"), names)
    assert str(names["same"]) == str(names["small"])
    assert capsys.readouterr().out.count("max difference") == 4
    for other in text.split("```python\n")[2:]:
        if "pte" not in other.partition("```")[0] or find_spec("executorch") is not None:
            exec(compile(other.partition("```")[0], "deploy.md", "exec"), names)


def test_buffers_of_a_user_are_rebuilt(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].register_buffer("calls", torch.tensor(1.0))
        return model

    model = lod.decompose(build(), ranks={"0": 2})
    model[0].calls.add_(4)
    lod.export(model, tmp_path / "model.safetensors", example=torch.ones(2, 8))
    rebuilt = lod.load(tmp_path / "model.safetensors", into=build())
    assert float(rebuilt[0].calls) == 5.0
    assert type(rebuilt[0]) is nn.Sequential
