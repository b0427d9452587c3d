"""What several test files share: fixed randomness, and one small layer of each kind."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor, nn

from tests.support.pair import Pair

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=25,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("repeatable")
_data = Path(__file__).resolve().parents[2] / "shared" / "data"
if _data.is_dir():  # real data, where it lies beside a checkout
    os.environ.setdefault("LOD_DATA", str(_data))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # under nohup, or behind & in a script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests of Ctrl-C need
torch.set_num_threads(1)  # tiny operations: more threads only wait for each other


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    both = Pair(tmp_path_factory.mktemp("pair"))
    yield both
    both.close()


@dataclass(frozen=True)
class Sample:
    """How to build one dense layer, and the shape of an input for it."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def __call__(self) -> tuple[nn.Module, Tensor]:
        return self.build(), torch.randn(self.shape)


SAMPLES = {
    "linear": Sample(lambda: nn.Linear(12, 9), (5, 12)),
    "linear without bias": Sample(lambda: nn.Linear(7, 11, bias=False), (2, 3, 7)),
    "conv1d": Sample(lambda: nn.Conv1d(4, 6, 3, stride=2), (2, 4, 11)),
    "conv2d": Sample(lambda: nn.Conv2d(4, 8, 3, 2, 1, padding_mode="reflect"), (2, 4, 9, 9)),
    "conv2d with groups": Sample(
        lambda: nn.Conv2d(6, 8, 3, padding="same", groups=2), (2, 6, 7, 7)
    ),
    "conv3d": Sample(lambda: nn.Conv3d(3, 5, 2, bias=False), (2, 3, 4, 4, 4)),
    "transposed 1d": Sample(lambda: nn.ConvTranspose1d(5, 4, 3, 2), (2, 5, 6)),
    "transposed 2d with groups": Sample(
        lambda: nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1, groups=2), (2, 6, 4, 4)
    ),
    "transposed 3d": Sample(lambda: nn.ConvTranspose3d(4, 3, 2, bias=False), (1, 4, 3, 3, 3)),
}


@pytest.fixture(params=SAMPLES.values(), ids=SAMPLES.keys())
def sample(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    """One dense layer of each kind, and an input for it."""
    dense, x = request.param()
    return dense, x


@dataclass(frozen=True)
class Snapshot:
    """All that a refused call must leave as it was: types and every tensor, bit for bit."""

    types: dict[str, type]
    ids: dict[str, int]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        modules = dict(model.named_modules(remove_duplicate=False))
        state = dict(model.named_parameters(remove_duplicate=False))
        state |= dict(model.named_buffers(remove_duplicate=False))
        return cls(
            types={name: type(module) for name, module in modules.items()},
            ids={name: id(thing) for name, thing in (modules | state).items()},
            tensors={name: copy.deepcopy(value.detach()) for name, value in state.items()},
        )

    def assert_unchanged(self, model: nn.Module) -> None:
        now = Snapshot.of(model)
        assert now.types == self.types
        assert now.ids == self.ids
        assert now.tensors.keys() == self.tensors.keys()
        for name, before in self.tensors.items():
            after = now.tensors[name]
            assert after.shape == before.shape, name
            if before.is_meta:
                assert after.is_meta, name
            else:
                torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def snapshot() -> Callable[[nn.Module], Snapshot]:
    """Take a snapshot of a model; `.assert_unchanged(model)` compares it later."""
    return Snapshot.of
