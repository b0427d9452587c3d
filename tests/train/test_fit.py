"""The training loop: what one would write by hand, resumable everywhere, never silently idle."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from maestro_lod import Elastic, LoD, at_ranks, decompose, extract, ranks
from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.files.state import load_state, save_state
from maestro_lod.layers import LowRank, composed_once
from maestro_lod.model.cost import count_params
from maestro_lod.train import fit as fit_module
from maestro_lod.train.evaluate import CrossEntropy, Score, evaluate, recalibrate
from maestro_lod.train.fit import FitOptions, Watch, fit
from maestro_lod.train.progress import Progress
from maestro_lod.train.schedule import milestones, vaswani

EPOCHS, PER_EPOCH = 3, 5


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, 6, 6, generator=generator)
    return x, (x.mean((1, 2, 3)) * 12).round().clamp(-1, 1).long() + 1


def shuffled() -> DataLoader[Any]:
    """Five batches, the last one smaller."""
    return DataLoader(TensorDataset(*samples(37)), batch_size=8, shuffle=True)


class Augmented:
    """Batches in random order with noise, all drawn from torch's generator between the steps."""

    def __init__(self) -> None:
        self.x, self.y = samples(37)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.randperm(len(self.y)).split(8):
            yield self.x[index] + 0.1 * torch.randn(len(index), 1, 1, 1), self.y[index]


def held_out() -> list[tuple[Tensor, Tensor]]:
    x, y = samples(20, seed=1)
    return list(zip(x.split(8), y.split(8), strict=True))


def net() -> nn.Sequential:
    """A small network with all that has a state or draws random numbers."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 3),
    )  # fmt: skip


def sgd(model: nn.Module, **options: Any) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, **options)


def adam(model: nn.Module, **options: Any) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.01, weight_decay=1e-3, **options)


def arguments(on_step: Any = None, on_epoch: Any = None, **given: Any) -> dict[str, Any]:
    """Put what `fit` takes together in objects where it belongs."""
    names = {"clip_norm", "accumulate", "amp", "recalibration"} & given.keys()
    options = FitOptions(**{name: given.pop(name) for name in names})
    hooks = {"step": on_step, "epoch": on_epoch}
    watch = Watch(**{name: hook for name, hook in hooks.items() if hook is not None})
    return {**given, "options": options, "watch": watch}


class Run:
    """Model, optimizer and LoD, freshly built, and their state as a file holds it."""

    def __init__(
        self,
        method: str = "lod",
        make: Callable[..., optim.Optimizer] = sgd,
        *,
        channels_last: bool = False,
        fused: bool = False,
        data: Callable[[], Iterable[Any]] = shuffled,
        lod: dict[str, Any] | None = None,
        elastic: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.model: nn.Module = net()
        if method == "lod":
            self.model = decompose(self.model)
        self.channels_last = channels_last
        self._order_weights()
        self.optimizer = make(self.model, fused=fused)
        self.lod: Any = None
        if elastic is not None:
            self.lod = Elastic(self.model, self.optimizer, **elastic)
        elif method == "lod":
            chosen = {"penalty": 0.05, "threshold": 0.6, "seed": 3} | (lod or {})
            self.lod = LoD(self.model, self.optimizer, **chosen)
        self.data, self.options = data(), options

    def _order_weights(self) -> None:
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)

    def fit(self, epochs: int = EPOCHS, **more: Any) -> Progress:
        self.progress = fit(
            self.model, self.data, optimizer=self.optimizer, method=self.lod, epochs=epochs,
            **arguments(**self.options | more),
        )  # fmt: skip
        return self.progress

    def state(self, progress: Progress) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lod": None if self.lod is None else self.lod.state_dict(),
            "progress": progress.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> Progress:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.lod is not None:
            self.lod.load_state_dict(state["lod"])
        return Progress.from_state(state["progress"])


def dicts(progress: Progress) -> list[dict[str, Any]]:
    return [record.to_dict() for record in progress.history]


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal bit for bit through nested states, seconds aside; a file turns tuples into lists."""
    if isinstance(ours, Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours.keys() - {"seconds"}:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}.{i}")
    else:
        assert type(ours) is type(theirs) and ours == theirs, where


# -- the loop by hand --------------------------------------------------------------------------


def groups_of(data: Iterable[Any], size: int) -> Iterator[list[Any]]:
    batches, group = iter(data), []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def by_hand(
    run: Run,
    *,
    schedule: Callable[[int], float] = lambda step: 1.0,
    clip_norm: float | None = None,
    accumulate: int = 1,
    seed: int = 0,
    loss: Callable[..., Tensor] = F.cross_entropy,
) -> None:
    """Train for two epochs as one would without `fit`."""
    model, optimizer, train = run.model, run.optimizer, run.lod
    first_rate, step = optimizer.param_groups[0]["lr"], 0
    for epoch in range(2):
        torch.manual_seed(seed * 1_000_003 + epoch)
        model.train()
        for group in groups_of(run.data, accumulate):
            optimizer.param_groups[0]["lr"] = first_rate * schedule(step)
            if train is None:
                for x, y in group:
                    (loss(model(x), y) * (1 / len(group))).backward()
            elif len(group) == 1:
                ((x, y),) = group
                with train.step():
                    (loss(model(x), y) + train.penalty_loss()).backward()
            else:
                with composed_once(model, len(group)):
                    for x, y in group:
                        with train.step():
                            (loss(model(x), y) * (1 / len(group))).backward()
                        train.add_penalty_gradients(1 / len(group))
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        if train is not None:
            train.end_epoch()
        recalibrate(model, run.data)


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "seed": ({"seed": 5}, {"seed": 5}),
    "schedule": ({"schedule": vaswani(3)}, {"schedule": vaswani(3)}),
    "clip": ({"clip_norm": 0.1}, {"clip_norm": 0.1}),
    "accumulate 2": ({"accumulate": 2}, {"accumulate": 2}),
    "accumulate 3": ({"accumulate": 3, "clip_norm": 0.2}, {"accumulate": 3, "clip_norm": 0.2}),
    "accumulate all": ({"accumulate": 99}, {"accumulate": 99}),
    "smoothed": ({"loss": CrossEntropy(label_smoothing=0.1)}, {"loss": smoothed}),
    "summed": (
        {"loss": CrossEntropy(reduction="sum"), "schedule": lambda step: 0.1},
        {"loss": summed, "schedule": lambda step: 0.1},
    ),
    "own loss": ({"loss": smoothed}, {"loss": smoothed}),
}


@pytest.mark.parametrize(("options", "hand"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize(("method", "data"), [("lod", Augmented), ("dense", shuffled)])
def test_fit_is_the_loop_that_one_writes_by_hand_bit_for_bit(
    method: str,
    make: Any,
    data: Any,
    options: dict[str, Any],
    hand: dict[str, Any],
) -> None:
    ours, theirs = Run(method, make, data=data), Run(method, make, data=data)
    progress = ours.fit(2, **options)
    by_hand(theirs, **hand)
    assert_same(ours.model.state_dict(), theirs.model.state_dict())
    assert_same(ours.optimizer.state_dict()["state"], theirs.optimizer.state_dict()["state"])
    assert ours.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"]
    if ours.lod is not None and theirs.lod is not None:
        assert_same(ours.lod.state_dict(), theirs.lod.state_dict())
    assert progress.step == 2 * -(-PER_EPOCH // options.get("accumulate", 1))
    assert progress.epoch == len(progress.history) == 2 and progress.batch == 0


@pytest.mark.parametrize("distill", [False, True])
def test_the_full_pass_goes_through_fit(distill: bool) -> None:
    options = {"full_pass": True, "distill": distill, "sampling": "several"}
    ours, theirs = Run(lod=options), Run(lod=options)
    ours.fit(1)
    assert theirs.lod is not None
    torch.manual_seed(0)
    for x, y in theirs.data:
        theirs.lod.backward(lambda: theirs.model(x), lambda out: F.cross_entropy(out, y))  # noqa: B023
        theirs.optimizer.step()
        theirs.optimizer.zero_grad()
    theirs.lod.end_epoch()
    recalibrate(theirs.model, theirs.data)
    assert_same(ours.model.state_dict(), theirs.model.state_dict())


def test_each_parameter_group_has_its_own_share_of_the_schedule() -> None:
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[8].parameters()}]
    optimizer = optim.SGD(groups, lr=0.02)
    rates: list[tuple[float, float]] = []

    def note(_: Progress) -> None:
        rates.append(tuple(group["lr"] for group in optimizer.param_groups))

    schedule = milestones([1], PER_EPOCH, 0.25)
    progress = fit(
        model, shuffled(), optimizer=optimizer, epochs=2, schedule=schedule, watch=Watch(step=note)
    )
    assert rates == [(0.5, 0.02)] * 5 + [(0.125, 0.005)] * 5
    assert [record.lr for record in progress.history] == [0.5, 0.125]


def test_gradients_that_were_there_before_do_not_count() -> None:
    ours, theirs = Run("dense"), Run("dense")
    for parameter in ours.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    ours.fit(1)
    theirs.fit(1)
    assert_same(ours.model.state_dict(), theirs.model.state_dict())


def test_parameters_outside_the_optimizer_have_no_part_in_clipping() -> None:
    """Their gradients are never cleared, so that their norm would grow from step to step."""
    final = []
    for frozen in (True, False):
        model = net()
        model[0].weight.requires_grad_(not frozen)
        trained = [p for p in model.parameters() if p is not model[0].weight]
        optimizer = optim.SGD(trained, lr=0.1)
        fit(model, shuffled(), optimizer=optimizer, epochs=1, options=FitOptions(clip_norm=0.01))
        final.append(model.state_dict())
    assert_same(*final)


# -- autocast ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lod", "dense"])
@pytest.mark.parametrize("amp", [False, True])
def test_amp_computes_in_bfloat16_and_keeps_the_weights(method: str, amp: bool) -> None:
    run = Run(method)
    seen: set[tuple[bool, bool, torch.dtype]] = set()

    def note(module: nn.Module, _: Any, output: Tensor) -> None:
        calibrating = run.model[1].training and not run.model.training
        seen.add((run.model.training, calibrating, output.dtype))

    run.model[8].register_forward_hook(note)
    progress = run.fit(2, amp=amp, validation=held_out())
    dtype = torch.bfloat16 if amp else torch.float32
    assert seen == {(True, False, dtype), (False, True, dtype), (False, False, dtype)}
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert progress.history[1].train["loss"] < 1.5


# -- resume ------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised by a hook to end a run."""


CASES: dict[str, dict[str, Any]] = {
    "dense": {"method": "dense"},
    "dense fused Adam, channels last": {
        "method": "dense", "make": adam, "fused": True, "channels_last": True,
    },
    "LoD": {},
    "LoD, noise between steps": {"data": Augmented, "validation": held_out()},
    "LoD fused, channels last": {"fused": True, "channels_last": True, "validation": held_out()},
    "LoD fused Adam, channels last": {
        "make": adam, "fused": True, "channels_last": True,
        "lod": {"proximal": True, "penalty": 0.5},
    },
    "LoD, accumulation, schedule, clip": {
        "accumulate": 2, "schedule": vaswani(4), "clip_norm": 1.0, "data": Augmented,
    },
    "LoD, a layer that vanishes": {"lod": {"threshold": 1.0}},
    "LoD, several, full pass": {"lod": {"full_pass": True, "sampling": "several"}},
    "LoD, amp": {"amp": True},
    "one size": {"elastic": {"sizes": [0.5]}, "data": Augmented},
    "all sizes": {"elastic": {"smallest": 0.2}, "make": adam},
}  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted() -> Callable[[str], Run]:
    """A whole run of each case, made once."""
    done: dict[str, Run] = {}

    def run_of(case: str) -> Run:
        if case not in done:
            done[case] = Run(**CASES[case])
            done[case].fit()
        return done[case]

    return run_of


def interrupted(case: str, places: list[tuple[str, int]]) -> Run:
    """Stop at each place in turn, and go on with parts that are built anew from a file."""
    run, progress = Run(**CASES[case]), Progress()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.safetensors"
        for kind, number in places:

            def stop(now: Progress, kind: str = kind, number: int = number) -> None:
                if getattr(now, kind) == number:
                    save_state(run.state(now), file)  # noqa: B023
                    raise Stop

            with pytest.raises(Stop):
                run.fit(progress=progress, **{"on_epoch" if kind == "epoch" else "on_step": stop})
            torch.randn(number)  # whatever else a process does
            run = Run(**CASES[case])
            progress = run.restore(load_state(file))
            assert (progress.epoch, progress.step)[kind == "step"] == number
    run.fit(progress=progress)
    return run


def place() -> st.SearchStrategy[tuple[str, int]]:
    steps = st.tuples(st.just("step"), st.integers(1, 8))  # with accumulation there are nine
    return steps | st.tuples(st.just("epoch"), st.integers(1, EPOCHS - 1))


def in_steps(place: tuple[str, int], per_epoch: int) -> float:
    """Return when a place is reached; the end of an epoch comes after its last step."""
    kind, number = place
    return number if kind == "step" else number * per_epoch + 0.5


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=4)
@given(places=st.lists(place(), min_size=1, max_size=3, unique=True))
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    case: str, places: list[tuple[str, int]], uninterrupted: Callable[[str], Run]
) -> None:
    per_epoch = -(-PER_EPOCH // CASES[case].get("accumulate", 1))
    places = sorted(places, key=lambda where: in_steps(where, per_epoch))
    whole = uninterrupted(case)
    torch.manual_seed(99)
    resumed = interrupted(case, places)
    assert_same(whole.model.state_dict(), resumed.model.state_dict(), "model")
    assert_same(whole.optimizer.state_dict(), resumed.optimizer.state_dict(), "optimizer")
    if whole.lod is not None and resumed.lod is not None:
        assert_same(whole.lod.state_dict(), resumed.lod.state_dict(), "lod")
    assert_same(dicts(whole.progress), dicts(resumed.progress), "history")
    reached = [(run.progress.epoch, run.progress.step) for run in (whole, resumed)]
    assert reached[0] == reached[1] and reached[0][0] >= EPOCHS


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("LoD")])
def test_ranks_are_removed_in_the_runs_that_are_resumed(
    case: str, uninterrupted: Callable[[str], Run]
) -> None:
    history = uninterrupted(case).progress.history
    totals = [sum(ranks(decompose(net())).values()), *(record.total_rank for record in history)]
    assert totals[0] > totals[1] > totals[2] > totals[3]
    assert (0 in history[1].ranks.values()) == ("vanishes" in case)


@pytest.mark.parametrize("case", ["LoD", "one size", "all sizes"])
@pytest.mark.parametrize("step", [*range(PER_EPOCH - 1, PER_EPOCH + 3), EPOCHS * PER_EPOCH])
def test_a_run_goes_on_around_the_end_of_an_epoch_and_of_a_phase(
    step: int, case: str, uninterrupted: Callable[[str], Run]
) -> None:
    resumed, whole = interrupted(case, [("step", step)]), uninterrupted(case)
    assert_same(whole.state(whole.progress), resumed.state(resumed.progress), "state")


def test_a_run_that_stopped_goes_on_in_the_same_process() -> None:
    whole, parts = Run(data=Augmented), Run(data=Augmented)
    whole.fit(2)

    def stop(progress: Progress) -> None:
        if progress.step in (2, 4, 5, 6, 9):
            raise Stop

    progress = Progress()
    for i in range(5):
        with pytest.raises(Stop):
            parts.fit(2, progress=progress, on_step=stop)
        if i == 0:  # its random states must not come back at the second stop
            progress = Progress.from_state(progress.state_dict())
    parts.fit(2, progress=progress)
    assert_same(whole.state(whole.progress), parts.state(progress))


def test_a_finished_run_is_left_as_it_is_and_can_go_on() -> None:
    whole, parts = Run(), Run()
    whole.fit(3)
    progress = parts.fit(2)
    before = copy.deepcopy(parts.state(progress))
    assert parts.fit(2, progress=progress) is progress
    assert_same(before, parts.state(progress))
    parts.fit(3, progress=progress)
    assert_same(whole.model.state_dict(), parts.model.state_dict())
    assert_same(dicts(whole.progress), dicts(progress))


def test_a_state_is_a_snapshot_that_a_file_returns(tmp_path: Path) -> None:
    run = Run()
    states: list[dict[str, Any]] = []
    run.fit(2, validation=held_out(), on_step=lambda progress: states.append(progress.state_dict()))
    assert [state["step"] for state in states] == list(range(1, 11))
    assert [state["batch"] for state in states] == [1, 2, 3, 4, 5] * 2
    assert [len(state["history"]) for state in states] == [0] * 5 + [1] * 5
    counts = [state["score"]["count"] for state in states]
    assert counts == [8, 16, 24, 32, 37] * 2
    for state in states:
        save_state(state, tmp_path / "progress")
        assert_same(load_state(tmp_path / "progress"), state)
        restored = Progress.from_state(load_state(tmp_path / "progress"))
        assert isinstance(restored.score, Score) and restored.seconds == state["seconds"]
        torch.set_rng_state(state["random"][0])
        assert_same(restored.state_dict(), state)


def test_random_states_of_accelerators_that_are_gone_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    run = Run("dense")
    run.fit(1, progress=Progress(batch=2, random=[torch.get_rng_state(), torch.zeros(16)]))
    assert run.progress.step == 3


def test_other_data_than_the_run_began_with_is_refused() -> None:
    run = Run("dense")
    run.data = held_out()[:2]
    with pytest.raises(TrainingError, match=r"has 2 batches, but 4 of epoch 3 are done"):
        run.fit(progress=Progress(epoch=2, batch=4))


# -- randomness --------------------------------------------------------------------------------


def test_what_happens_between_epochs_does_not_change_the_training() -> None:
    plain, busy = Run("dense", data=Augmented), Run("dense", data=Augmented)
    plain.fit(3)
    loader = DataLoader(TensorDataset(*samples(9)), batch_size=4, shuffle=True)
    busy.fit(3, validation=loader, on_epoch=lambda progress: torch.manual_seed(progress.epoch))
    for ours, theirs in zip(plain.model.parameters(), busy.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_seed_decides() -> None:
    def trained(seed: int) -> Tensor:
        run = Run("dense")
        run.fit(1, seed=seed)
        return run.model[0].weight

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))
    assert not torch.equal(trained(2**62), trained(2**62 + 1))  # a clock's nanoseconds will do


def test_epochs_differ() -> None:
    seen: list[list[int]] = []

    class Noting(Augmented):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for index in torch.randperm(37).split(8):
                seen.append(index.tolist())
                yield self.x[index], self.y[index]

    run = Run("dense", data=Noting)
    run.fit(2, recalibration=0)
    assert len(seen) == 10 and seen[:5] != seen[5:]


# -- what is refused ---------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"epochs": -1}, r"epochs=-1"),
    ({"epochs": 1.5}, r"epochs=1\.5"),
    ({"epochs": True}, r"epochs=True"),
    ({"accumulate": 0}, r"accumulate=0.*at least 1"),
    ({"accumulate": -2}, r"accumulate=-2"),
    ({"accumulate": 0.5}, r"accumulate=0\.5"),
    ({"clip_norm": 0.0}, r"clip_norm=0.*None"),
    ({"clip_norm": -0.5}, r"clip_norm=-0\.5"),
    ({"clip_norm": float("nan")}, r"clip_norm=nan"),
    ({"clip_norm": float("inf")}, r"clip_norm=inf"),
    ({"recalibration": -1}, r"recalibration=-1"),
    ({"recalibration": 2.5}, r"recalibration=2\.5"),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=str)
def test_options_that_make_no_sense_are_refused(
    options: dict[str, Any], words: str, snapshot: Callable[[nn.Module], Any]
) -> None:
    run = Run()
    before, groups = snapshot(run.model), set(run.optimizer.param_groups[0])
    with pytest.raises(OptionError, match=words):
        run.fit(**options)
    before.assert_unchanged(run.model)
    assert set(run.optimizer.param_groups[0]) == groups


def test_a_low_rank_model_without_lod_is_refused(snapshot: Callable[[nn.Module], Any]) -> None:
    run = Run()
    before = snapshot(run.model)
    with pytest.raises(OptionError, match=r"Sequential is low-rank.*method=LoD"):
        fit(run.model, run.data, optimizer=run.optimizer, epochs=1)
    before.assert_unchanged(run.model)


def test_lod_of_another_model_or_optimizer_is_refused() -> None:
    run, other = Run(), Run()
    for model, optimizer, lod in (
        (run.model, run.optimizer, other.lod),
        (run.model, other.optimizer, run.lod),
        (other.model, run.optimizer, run.lod),
        (net(), run.optimizer, run.lod),
    ):
        with pytest.raises(OptionError, match="another model or optimizer"):
            fit(model, run.data, optimizer=optimizer, method=lod, epochs=1)


@pytest.mark.parametrize("method", ["lod", "dense"])
def test_data_without_a_batch_is_refused(method: str) -> None:
    run = Run(method, data=list)
    with pytest.raises(TrainingError, match="no batch"):
        run.fit()
    assert run.lod is None or run.lod.epoch == 0


def test_data_that_can_be_iterated_once_is_refused_when_it_ends() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
    once = (batch for batch in held_out())
    with pytest.raises(TrainingError, match="no batch"):
        fit(model, once, optimizer=sgd(model), epochs=2)


@pytest.mark.parametrize("method", ["lod", "dense"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused_with_weights_unchanged(
    method: str, value: float
) -> None:
    run = Run(method)

    def broken(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * value

    before = copy.deepcopy(dict(run.model.named_parameters()))
    progress = Progress()
    with pytest.raises(TrainingError, match=rf"the loss is .*{value}.*learning rate"):
        run.fit(loss=broken, progress=progress)
    assert_same(before, dict(run.model.named_parameters()))
    assert (progress.step, progress.batch, progress.epoch) == (0, 0, 0)
    assert all(m.active_rank == m.rank for m in run.model.modules() if isinstance(m, LowRank))


def test_a_step_that_failed_halfway_leaves_no_trace_in_the_next() -> None:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return nn.Sequential(nn.Flatten(), nn.Linear(72, 3))

    good = held_out()
    bad = [good[0], (good[1][0] * float("nan"), good[1][1]), good[2]]
    model, clean = build(), build()
    optimizer, progress, two = sgd(model), Progress(), FitOptions(accumulate=2)
    with pytest.raises(TrainingError, match="nan"):
        fit(model, bad, optimizer=optimizer, epochs=1, options=two, progress=progress)
    assert (progress.batch, progress.step) == (0, 0), "the batch before was not trained on"
    assert_same(model.state_dict(), clean.state_dict())
    fit(model, good, optimizer=optimizer, epochs=1, options=two, progress=progress)
    fit(clean, good, optimizer=sgd(clean), epochs=1, options=two)
    assert_same(model.state_dict(), clean.state_dict())


# -- hooks and modes ---------------------------------------------------------------------------


def test_a_hook_that_raises_leaves_a_whole_step_behind() -> None:
    run = Run()

    def stop(progress: Progress) -> None:
        if progress.step == 7:
            raise Stop

    progress = Progress()
    with pytest.raises(Stop):
        run.fit(progress=progress, on_step=stop)
    assert (progress.epoch, progress.batch, progress.step) == (1, 2, 7)
    assert len(progress.history) == 1 and progress.score.count == 16
    assert all(p.grad is None for p in run.model.parameters())
    assert all(m.active_rank == m.rank for m in run.model.modules() if isinstance(m, LowRank))
    assert run.lod is not None and run.lod.epoch == 1


def test_a_hook_that_raises_after_an_epoch_leaves_a_whole_epoch_behind() -> None:
    run, seen = Run(), []

    def stop(progress: Progress) -> None:
        seen.append((progress.epoch, progress.batch, progress.step, progress.score))
        raise Stop

    progress = Progress()
    with pytest.raises(Stop):
        run.fit(progress=progress, on_epoch=stop, validation=held_out())
    assert seen == [(1, 0, 5, Score())]
    assert progress.history[0].epoch == 1 and "loss" in progress.history[0].validation
    assert run.model.training and run.model[1].momentum == 0.1


def test_hooks_see_every_step_and_epoch_in_turn() -> None:
    run, seen = Run("dense"), []
    result = run.fit(
        2,
        accumulate=2,
        on_step=lambda p: seen.append((p.epoch, p.batch, p.step)),
        on_epoch=lambda p: seen.append((p.epoch, p.history[-1].step)),
    )
    assert seen == [
        (0, 2, 1),
        (0, 4, 2),
        (0, 5, 3),
        (1, 3),
        (1, 2, 4),
        (1, 4, 5),
        (1, 5, 6),
        (2, 6),
    ]
    assert result.epoch == 2


class Modes(nn.Module):
    """Notes in which modes it, a dropout and a norm are when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.fc = nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)
        self.seen: list[tuple[Tensor, bool, bool, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        modes = self.training, self.dropout.training, self.norm.training
        self.seen.append((x[0, 0], *modes, torch.is_grad_enabled()))
        return self.fc(self.dropout(self.norm(x)))


@pytest.mark.parametrize("method", ["lod", "dense"])
def test_validation_never_sees_training_mode(method: str) -> None:
    model = Modes().eval()
    train_data = [(torch.randn(6, 4), torch.arange(6) % 4) for _ in range(3)]
    validation = [(torch.randn(6, 4), torch.arange(6) % 4) for _ in range(2)]
    for i, (x, _) in enumerate(train_data + validation):
        x[0, 0] = i
    train = None
    if method == "lod":
        model = decompose(model)
    optimizer = sgd(model)
    if method == "lod":
        train = LoD(model, optimizer, example=torch.empty(1, 4))
    model.seen.clear()
    fit(
        model, train_data, optimizer=optimizer, method=train, epochs=2, validation=validation,
        options=FitOptions(recalibration=2),
    )  # fmt: skip
    epoch = [(float(i), True, True, True, True) for i in range(3)]
    epoch += [(float(i), False, False, True, False) for i in range(2)]
    epoch += [(float(i), False, False, False, False) for i in (3, 4)]
    assert [(x.item(), *modes) for x, *modes in model.seen] == epoch * 2
    assert model.training and model.dropout.training and model.norm.training


# -- the record --------------------------------------------------------------------------------


def test_the_record_of_a_low_rank_epoch() -> None:
    run = Run(schedule=lambda step: 0.9**step)
    cut: list[dict[str, int]] = []
    progress = run.fit(2, validation=held_out(), on_epoch=lambda _: cut.append(ranks(run.model)))
    assert run.lod is not None
    last = progress.history[1]
    assert set(last.to_dict()) == {
        "epoch", "step", "seconds", "lr", "train_loss", "train_accuracy", "validation_loss",
        "validation_accuracy", "ranks", "total_rank", "penalty", "params", "macs",
        "relative_params", "relative_macs", "bits", "relative_bits",
    }  # fmt: skip
    assert (last.epoch, last.step, last.penalty) == (2, 10, 0.05)
    assert last.lr == 0.05 * 0.9**9
    assert [record.ranks for record in progress.history] == cut
    assert last.total_rank == sum(cut[1].values()) < sum(run.lod.history[0].values())
    assert last.params == count_params(extract(run.model))
    assert last.relative_params == last.params / count_params(net())
    assert last.relative_macs == last.macs / run.lod.ledger.dense_macs
    reached = evaluate(run.model, held_out())
    assert reached["loss"] == last.validation["loss"]
    assert reached["accuracy"] == last.validation["accuracy"]


def test_the_record_of_a_dense_epoch() -> None:
    run = Run("dense")
    (record,) = run.fit(1).history
    assert set(record.to_dict()) == {
        "epoch", "step", "seconds", "lr", "train_loss", "train_accuracy", "ranks", "params",
        "relative_params", "bits", "relative_bits",
    }  # fmt: skip
    assert record.params == count_params(net()) and record.relative_params == 1.0
    assert record.ranks == {} and record.lr == 0.05


@pytest.mark.parametrize("loss", [CrossEntropy(), CrossEntropy(reduction="sum")], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_training_score_is_the_mean_over_samples_at_the_drawn_ranks(
    loss: CrossEntropy, accumulate: int
) -> None:
    run, sampled = Run(loss=loss), Run()
    assert sampled.lod is not None
    sampled.model.train()
    run.optimizer.param_groups[0]["lr"] = 0.0
    (record,) = run.fit(1, accumulate=accumulate).history
    torch.manual_seed(0)
    total = hits = 0.0
    for group in groups_of(sampled.data, accumulate):
        for x, y in group:
            with at_ranks(sampled.model, sampled.lod.sampler.sample()), torch.no_grad():
                output = sampled.model(x)
            total += F.cross_entropy(output, y).item() * len(y)
            hits += (output.argmax(1) == y).sum().item()
    assert record.train["loss"] == pytest.approx(total / 37, rel=1e-5)
    assert record.train["accuracy"] == hits / 37


def test_smoothing_is_for_training_and_an_own_loss_for_both() -> None:
    def evaluated(**options: Any) -> dict[str, Any]:
        run = Run("dense")
        (record,) = run.fit(1, validation=held_out(), **options).history
        plain = evaluate(run.model, held_out())["loss"]
        other = evaluate(run.model, held_out(), smoothed)["loss"]
        assert plain != other
        return {plain: "plain", other: "smoothed"}[record.validation["loss"]]

    assert evaluated() == "plain"
    assert evaluated(loss=CrossEntropy(label_smoothing=0.1)) == "plain"
    assert evaluated(loss=smoothed) == "smoothed"


def test_seconds_are_those_of_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    class Slow(list[Any]):
        def __init__(self, batches: Iterable[Any], duration: float) -> None:
            super().__init__(batches)
            self.duration = duration

        def __iter__(self) -> Iterator[Any]:
            nonlocal clock
            for batch in super().__iter__():
                clock += self.duration
                yield batch

    def hook(_: Progress) -> None:
        nonlocal clock
        clock += 1000.0

    monkeypatch.setattr(fit_module.time, "perf_counter", lambda: clock)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
    options = {"optimizer": sgd(model), "watch": Watch(hook, hook)}
    validation = Slow(held_out(), 100.0)
    progress = fit(model, Slow(held_out(), 1.0), epochs=2, validation=validation, **options)
    assert [record.seconds for record in progress.history] == [3.0, 3.0]
    resumed = Progress(epoch=2, batch=1, seconds=50.0)
    fit(model, Slow(held_out(), 1.0), epochs=3, progress=resumed, **options)
    assert resumed.history[0].seconds == 52.0


# -- models of all sorts -----------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor, shift: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.b(self.a(x) + shift).squeeze(1) * scale


class Sequences(nn.Module):
    """A model like those of transformers: it computes a loss if labels are among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> Any:
        logits = scale * self.head(self.hidden(x).relu())
        loss = None if labels is None else F.cross_entropy(logits, labels)
        from transformers.modeling_outputs import SequenceClassifierOutput

        return SequenceClassifierOutput(loss=loss, logits=logits)


def mappings() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(5)
    x, y = torch.randn(24, 12, generator=draw), torch.randint(3, (24,), generator=draw)
    return [{"x": x[i : i + 8], "labels": y[i : i + 8]} for i in range(0, 24, 8)]


@pytest.mark.parametrize("way", ["plain", "lod", "budget", "elastic", "own loss", "pairs"])
def test_batches_that_are_mappings_train_on_the_loss_of_the_output(way: str) -> None:
    trains = way in ("lod", "budget", "elastic")
    model = decompose(Sequences()) if trains else Sequences()
    optimizer, options = optim.SGD(model.parameters(), lr=0.1), dict[str, Any]()
    ways: dict[str, Callable[[], Any]] = {
        "lod": lambda: LoD(model, optimizer, penalty=1e-4, proximal=True),
        "budget": lambda: Elastic(model, optimizer, sizes=[0.6]),
        "elastic": lambda: Elastic(model, optimizer, smallest=0.3),
    }
    if trains:
        options["method"] = ways[way]()
    if way == "own loss":
        options["loss"] = lambda output, target: F.cross_entropy(output.logits, target)
    batches: list[Any] = mappings()
    if way == "pairs":
        batches = [({"x": batch["x"], "labels": batch["labels"]}, None) for batch in batches]
    before = evaluate(model, mappings())["loss"]
    done = fit(model, batches, optimizer=optimizer, epochs=8, validation=mappings(), **options)
    assert done.history[-1].validation["loss"] < before
    assert done.history[-1].validation["loss"] == pytest.approx(evaluate(model, mappings())["loss"])
    if way == "own loss":  # the same steps as on the output's own
        other = Sequences()
        fit(other, batches, optimizer=optim.SGD(other.parameters(), lr=0.1), epochs=8)
        assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_mapping_without_labels_needs_a_loss_of_its_own() -> None:
    model = Sequences()
    batches = [{"x": batch["x"]} for batch in mappings()]
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=r"no target\. Give pairs .* mappings with 'labels'"):
        fit(model, batches, optimizer=optimizer, epochs=1)
    with pytest.raises(OptionError, match="no target"):
        evaluate(model, batches)
    fit(
        model, batches, optimizer=optimizer, epochs=1,
        loss=lambda output, target: output.logits.square().mean(),
    )  # fmt: skip
    with pytest.raises(OptionError, match="a batch is a str"):
        fit(model, ["text"], optimizer=optimizer, epochs=1)


@pytest.mark.parametrize("kind", ["tuple", "list", "mapping"])
def test_inputs_are_arguments_and_losses_are_the_users(kind: str) -> None:
    torch.manual_seed(3)
    batches = []
    for _ in range(4):
        x, shift = torch.randn(7, 5), torch.randn(7, 6)
        inputs: Any = {"x": x, "shift": shift, "scale": 2.0}
        if kind != "mapping":
            inputs = {"tuple": (x, shift), "list": [x, shift]}[kind]
        batches.append((inputs, x.sum(1)))
    model = decompose(Two())
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    train = LoD(model, optimizer)
    progress = fit(
        model, batches, optimizer=optimizer, method=train, epochs=30, loss=nn.MSELoss(),
        validation=batches,
    )  # fmt: skip
    first, last = progress.history[0], progress.history[-1]
    assert last.validation["loss"] < 0.2 * first.validation["loss"]
    assert "accuracy" not in {*last.train, *last.validation}
    assert last.macs is not None  # the ledger looked at the first batch


def test_a_compiled_model_is_trained() -> None:
    model = decompose(nn.Sequential(nn.Flatten(), nn.Linear(72, 3)))
    compiled, optimizer = torch.compile(model, backend="eager"), sgd(model)
    train = LoD(compiled, optimizer, example=samples(1)[0])
    progress = fit(compiled, held_out()[:2], optimizer=optimizer, method=train, epochs=1)
    assert progress.history[0].ranks == {"1": 3}
    assert progress.history[0].macs == 72 * 3
    with pytest.raises(OptionError, match="low-rank"):
        fit(compiled, held_out(), optimizer=optimizer, epochs=1)
