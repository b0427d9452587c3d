"""The runs of `same_losses.py`: each trains something tiny and keeps its losses, ranks and files.

They are executed by two versions of the library. What differs between their interfaces is in the
section "Either interface" and nowhere else; all other calls are the same for both.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import runpy
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import maestro_lod as lod

Batches = list[tuple[Any, Tensor]]
EPOCHS = 5

# -- Either interface ------------------------------------------------------------------------------


def plain_kernels() -> None:
    """Switch off the products and convolutions by private operators that older versions have."""
    for module, name, value in (
        ("products", "_faster_here", lambda: False),
        ("few_channels", "_HERE", False),
    ):
        try:
            found = importlib.import_module(f"maestro_lod.layers.{module}")
        except ModuleNotFoundError:
            continue
        if not hasattr(found, name):
            raise SystemExit(f"maestro_lod.layers.{module} has no {name}: its operators may be on.")
        setattr(found, name, value)


def one_of(*places: str) -> Any:
    """Return the first of several `module:name` below `maestro_lod` that exists."""
    for place in places:
        module, _, name = place.rpartition(":")
        try:
            found: Any = importlib.import_module(f"maestro_lod.{module}".rstrip("."))
            return getattr(found, name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise LookupError(f"none of these exists: {', '.join(places)}")


def compress(model: nn.Module, batches: Batches, *, correct: bool, steps: int) -> None:
    """Cut a model to seven tenths."""
    function = one_of(
        ":compress", "pretrained.compress:compress", "pretrained.compression:compress"
    )
    scores = "own_scores", "scores_loss"
    homes = "", "sizes.outputs", "pretrained.outputs"
    loss, soft_loss = (one_of(*(f"{home}:{name}" for home in homes)) for name in scores)
    known = inspect.signature(function).parameters
    options = {
        next(name for name in names if name in known): value
        for names, value in (
            (("sequential", "correction", "correct"), correct),
            (("healing", "distill_steps"), steps),
        )
    }
    function(model, batches, max_params=0.7, loss=loss, soft_loss=soft_loss, **options)


def distill(model: nn.Module, batches: Batches, teacher: nn.Module, **options: Any) -> None:
    """Train a cut model by its original."""
    function = one_of(":distill", "pretrained.distillation:heal", "pretrained.healing:heal")
    if "held_out" in inspect.signature(function).parameters:
        options["held_out"] = batches[:1]  # not taken from what is trained on
    function(model, data=batches, teacher=teacher, soft_loss=distance, **options)


def states() -> tuple[Callable[..., Any], Callable[..., Any], type]:
    """Return what saves a training state, what loads one, and the place in a run."""
    homes = "", "files.state", "state"
    return (
        one_of(*(f"{home}:save_state" for home in homes)),
        one_of(*(f"{home}:load_state" for home in homes)),
        one_of(":Progress", "train.progress:Progress"),
    )


# -- What is kept of a run -------------------------------------------------------------------------


class Record:
    """What one run has done: losses of every step, ranks after every change, files with tensors."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.losses: list[list[float]] = []
        """Of every optimizer step, those of its passes."""
        self.ranks: list[list[Any]] = []
        """[steps done, {layer: rank}] at first and whenever they have changed."""
        self.said: dict[str, Any] = {}
        """Anything else that has to be equal."""
        self.model: nn.Module | None = None
        self.stop_after: int | None = None
        self._passes: list[float] = []

    def loss(self, value: Tensor) -> Tensor:
        """Note the loss of a pass; evaluations do not count."""
        if value.requires_grad:
            self._passes.append(value.item())
        return value

    def step(self, *_: Any) -> None:
        """Note that an optimizer has made a step."""
        self.losses.append(self._passes)
        self._passes = []
        self.note_ranks()
        if len(self.losses) == self.stop_after:
            os.kill(os.getpid(), signal.SIGINT)

    def note_ranks(self) -> None:
        if self.model is None:
            return
        layers = {n: m for n, m in self.model.named_modules() if hasattr(m, "u") and m.rank >= 0}
        ranks = {name: layer.rank for name, layer in layers.items()}
        if not self.ranks or self.ranks[-1][1] != ranks:
            self.ranks.append([len(self.losses), ranks])

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to be compared."""
        alone = {key: value.detach().clone().contiguous() for key, value in tensors.items()}
        save_file(alone, self.directory / f"{name}.safetensors")

    def keep_file(self, path: Path, name: str | None = None) -> None:
        """Keep a file whose tensors are to be compared."""
        shutil.copyfile(path, self.directory / (name or path.name))

    def keep_model(self, model: nn.Module, *, extracted: bool = True) -> None:
        """Keep the elastic file of a low-rank model, and the plain model that comes out of it."""
        self.note_ranks()
        lod.save(model, self.directory / "elastic.safetensors")
        if extracted:
            small = lod.extract(model, {name: 0.5 for name in lod.ranks(model)})
            self.keep("extracted", small.state_dict())
            self.said["modules"] = [type(module).__name__ for module in small.modules()]

    def forget(self, steps: int) -> None:
        """Leave out the first steps, as if the run had been resumed after them."""
        self.losses = self.losses[steps:]
        before = [ranks for step, ranks in self.ranks if step <= steps + 1]
        after = [[step - steps, ranks] for step, ranks in self.ranks if step > steps + 1]
        self.ranks = [[1, before[-1]], *after]

    def write(self) -> None:
        text = json.dumps({"losses": self.losses, "ranks": self.ranks, "said": self.said})
        (self.directory / "record.json").write_text(text)


NOW = Record(Path())
"""The record of the run that is going on; one at a time."""


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy and note it; recipes name this function too."""
    return NOW.loss(F.cross_entropy(output, target))


def distance(output: Tensor, teacher: Tensor) -> Tensor:
    return NOW.loss(F.mse_loss(output, teacher))


# -- Models and data -------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolutions, a norm and matrices; all of its widths follow `width`."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.body = nn.Linear(8 * width, 2 * width)
        self.head = nn.Linear(2 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        x = torch.relu(self.second(x)).flatten(1)
        return self.head(torch.relu(self.body(x)))


def net(width: int = 12) -> nn.Module:
    return Net(width)


def _targets(x: Tensor, classes: int = 4) -> Tensor:
    """Return classes that can be learnt."""
    drawn = torch.Generator().manual_seed(11)
    flat = x.float().flatten(1)
    return (flat @ torch.randn(flat.shape[1], classes, generator=drawn)).argmax(1)


def values(*shape: int, count: int = 96, batch: int = 16) -> Batches:
    drawn = torch.Generator().manual_seed(7)
    x = torch.randn(count, *shape, generator=drawn)
    return [*zip(x.split(batch), _targets(x).split(batch), strict=True)]


def ids(most: int, length: int, count: int = 96, batch: int = 16) -> Batches:
    drawn = torch.Generator().manual_seed(7)
    x = torch.randint(most, (count, length), generator=drawn)
    return [*zip(x.split(batch), _targets(x).split(batch), strict=True)]


def images(batch: int = 16) -> dict[str, Batches]:
    """Return data as recipes want them."""
    all_of_it = values(1, 8, 8, count=128, batch=batch)
    return {"train": all_of_it[:-2], "validation": all_of_it[-2:-1], "test": all_of_it[-1:]}


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.body, self.head = kind(12, 16, batch_first=True, bidirectional=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(60, 24), nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.words(x).mean(1))))


def upsampling() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, 16, 3, padding=1, groups=2), nn.ReLU(), nn.ConvTranspose1d(16, 12, 4, 2),
        nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(48, 4),
    )  # fmt: skip


class Experts(nn.Module):
    """A language model with experts, to classify."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralModel

        self.body = MixtralModel(
            MixtralConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=8,
                num_local_experts=3,
                num_experts_per_tok=2,
                max_position_embeddings=32,
            )
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x, use_cache=False).last_hidden_state.mean(1))


# -- Runs ------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-4),
    "adam": lambda p: torch.optim.Adam(p, 5e-3),
    "adamw": lambda p: torch.optim.AdamW(p, 5e-3, weight_decay=1e-2),
}
LAMBDA: dict[str, Any] = {"penalty": 2e-2, "threshold": 2e-2, "seed": 3}
PROXIMAL: dict[str, Any] = {"penalty": 0.1, "proximal": True, "seed": 3}


def trained(
    record: Record,
    build: Callable[[], nn.Module] = net,
    data: Batches | None = None,
    optimizer: str = "sgd",
    epochs: int = EPOCHS,
    warm_up: int = 0,
    extracted: bool = True,
    **how: Any,
) -> None:
    """Train a model by `fit`."""
    data = images()["train"] if data is None else data
    model = record.model = lod.decompose(build())
    record.note_ranks()
    by = OPTIMIZERS[optimizer](model.parameters())
    schedule = None
    if warm_up:
        schedule = LambdaLR(by, lambda step: min(1.0, (step + 1) / warm_up))
    lod.fit(
        model, data, optimizer=by, method=lod.LoD(model, by, example=data[0][0][:1], **how),
        loss=cross_entropy, epochs=epochs, validation=data[:1], schedule=schedule, seed=1,
    )  # fmt: skip
    record.keep_model(model, extracted=extracted)


def own_loop(record: Record, **how: Any) -> None:
    """Train in a loop of one's own, with the penalty in the loss."""
    data = images()["train"]
    model = record.model = lod.decompose(net())
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train = lod.LoD(model, optimizer, example=data[0][0][:1], **how)
    for epoch in range(EPOCHS):
        for x, y in data:
            with train.step():
                (cross_entropy(model(x), y) + train.penalty_loss()).backward()
            optimizer.step()
            optimizer.zero_grad()
        train.end_epoch(last=epoch + 1 == EPOCHS)
    record.keep_model(model)


def pretrained(record: Record) -> nn.Module:
    """Return a dense model that was trained for a moment."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for x, y in images()["train"] * 3:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def compressed(record: Record, *, correct: bool, steps: int) -> None:
    """Compress a model that was trained before."""
    model = pretrained(record)
    record.model = model
    compress(model, images()["train"], correct=correct, steps=steps)
    record.note_ranks()
    record.keep_model(model)


def distilled(record: Record, **options: Any) -> None:
    """Distill a model that was cut."""
    teacher, model = pretrained(record), net()
    model.load_state_dict(teacher.state_dict())
    record.model = lod.decompose(model, ranks=0.4)
    distill(model, images()["train"], teacher, steps=20, **options)
    record.keep_model(model)


def searched(record: Record) -> None:
    """Search the best size for every cost, and keep it in the file."""
    model = lod.decompose(pretrained(record))
    (x, y), *_ = images()["validation"]
    with torch.no_grad():
        found = lod.frontier(model, lambda m: F.cross_entropy(m(x), y), example=x[:1], until=0.3)
        lod.save(model, record.directory / "elastic.safetensors", frontier=found)
        small = lod.load(record.directory / "elastic.safetensors", into=net(), max_params=0.5)
        record.keep("chosen", {"output": small.eval()(x)})
    record.said["ranks"] = lod.ranks(small)


def _process(process: int, directory: str) -> None:
    """Train as one of two processes."""
    global NOW
    plain_kernels()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=process, world_size=2)
    NOW = record = Record(Path(directory))
    register_optimizer_step_post_hook(record.step)
    torch.manual_seed(0)
    model = record.model = lod.decompose(net())
    wrapped, optimizer = DistributedDataParallel(model), OPTIMIZERS["sgd"](model.parameters())
    train = lod.LoD(wrapped, optimizer, **LAMBDA)
    for _ in range(EPOCHS):
        for x, y in images()["train"]:
            x, y = (part.chunk(2)[process] for part in (x, y))
            with train.step():
                cross_entropy(wrapped(x), y).backward()
            train.add_penalty_gradients()
            optimizer.step()
            optimizer.zero_grad()
        train.end_epoch()
    record.note_ranks()
    if process == 0:
        lod.save(model, record.directory / "elastic.safetensors")
    done = {"losses": record.losses, "ranks": record.ranks}
    Path(f"{directory}/process-{process}.json").write_text(json.dumps(done))
    dist.barrier()
    dist.destroy_process_group()


def two_processes(record: Record) -> None:
    """Train in two processes by DistributedDataParallel."""
    mp.start_processes(_process, (str(record.directory),), nprocs=2, start_method="spawn")
    files = [record.directory / f"process-{process}.json" for process in range(2)]
    first, second = (json.loads(file.read_text()) for file in files)
    both = zip(first["losses"], second["losses"], strict=True)
    record.losses = [[*one, *other] for one, other in both]
    record.ranks, record.said["ranks of the other"] = first["ranks"], second["ranks"]


# -- Runs of the program ---------------------------------------------------------------------------

RECIPE = """
model: same_losses_runs:net
data: same_losses_runs:images
loss: same_losses_runs:cross_entropy
epochs: 6
batch: 16
optimizer: {name: sgd, lr: 0.05, momentum: 0.9}
recalibration: 2
"""
METHODS: dict[str, list[str]] = {
    "λ": ["penalty=0.02", "threshold=0.02"],
    "proximal": ["penalty=0.1", "proximal=true"],
}
RIVALS: dict[str, list[str]] = {
    "dense": [],
    "narrow": ["size=0.4"],
    "svd": ["size=0.4"],
    "pufferfish": ["size=0.5"],
    "cuttlefish": [],
    "spectral": [],
    "imp": ["size=0.4"],
    "raregems": ["size=0.4"],
    "xnor": [],
}


def program(*arguments: object, ends_with: int = 0) -> str:
    """Run `lod …` in this process and return what it said."""
    before, sys.argv = (sys.argv, sys.path[:]), ["lod", *map(str, arguments)]
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; the program may remove it
    log = NOW.directory / "log.txt"
    try:
        with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
            file.write(f"\n$ {' '.join(sys.argv)}\n")
            start = file.tell()
            runpy.run_module("maestro_lod", run_name="__main__")
        code: Any = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv, sys.path[:] = before
    said = log.read_text()[start:]
    if code != ends_with:
        raise RuntimeError(f"lod {arguments[0]} ended with {code}: {said[-2000:]}")
    return said


def train(out: Path, changes: list[str], ends_with: int = 0) -> None:
    recipe = NOW.directory / "toy.yaml"
    recipe.write_text(RECIPE)
    options = [part for change in changes for part in ("--set", change)]
    program("train", recipe, "--out", out, "--quiet", *options, ends_with=ends_with)


def keep_run(record: Record, directory: Path) -> None:
    """Keep what a run directory holds, times left out."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    epochs = [json.loads(line) for line in lines]
    record.said["epochs"] = [
        {
            key: value
            for key, value in epoch.items()
            # notes may be worded differently; older versions say λ = 0 where there is none
            if key not in ("seconds", "note") and (key, value) != ("penalty", 0.0)
        }
        for epoch in epochs
    ]
    if any(epoch.get("ranks") for epoch in epochs):
        record.ranks = [[epoch["step"], epoch.get("ranks")] for epoch in epochs]
    result = json.loads((directory / "result.json").read_text())
    record.said["test"], record.said["weights"] = result["test"], result["weights"]
    record.keep_file(directory / "model.safetensors")


def recipe_run(record: Record, changes: list[str]) -> None:
    """Train by a recipe, with functions of one's own."""
    train(record.directory / "run", changes)
    keep_run(record, record.directory / "run")


RUNS: dict[str, Callable[[Record], None]] = {
    "λ, sgd": lambda r: trained(r, **LAMBDA),
    "λ, adam": lambda r: trained(r, optimizer="adam", **LAMBDA),
    "λ, adamw": lambda r: trained(r, optimizer="adamw", **LAMBDA),
    "λ, own loop": lambda r: own_loop(r, **LAMBDA),
    "λ, warm-up": lambda r: trained(r, warm_up=12, **LAMBDA),
    "λ, several ranks a step": lambda r: trained(r, sampling="several", **LAMBDA),
    "λ, distilled": lambda r: trained(r, full_pass=True, distill=True, **LAMBDA),
    "proximal, sgd": lambda r: trained(r, **PROXIMAL),
    "proximal, adamw": lambda r: trained(r, optimizer="adamw", **(PROXIMAL | {"penalty": 2.0})),
    "recurrent (LSTM)": lambda r: trained(
        r, Recurrent, values(5, 12), "adam", **(PROXIMAL | {"penalty": 2.0})
    ),
    "recurrent (GRU)": lambda r: trained(
        r, lambda: Recurrent(nn.GRU), values(5, 12), "adam", **LAMBDA
    ),
    "attention": lambda r: trained(r, Attending, values(5, 16), "adam", **LAMBDA),
    "transposed convolution": lambda r: trained(r, upsampling, values(4, 9), "adam", **LAMBDA),
    "embedding": lambda r: trained(r, Words, ids(60, 6), "adam", **LAMBDA),
    "experts": lambda r: trained(r, Experts, ids(32, 6), "adam", epochs=3, **LAMBDA),
    "compress": lambda r: compressed(r, correct=False, steps=0),
    "compress, corrected": lambda r: compressed(r, correct=True, steps=0),
    "compress, corrected, distilled": lambda r: compressed(r, correct=True, steps=20),
    "distilled alone": lambda r: distilled(r, sizes="only"),
    "frontier": searched,
    **{f"recipe: {k}": lambda r, c=v: recipe_run(r, c) for k, v in METHODS.items()},
    **{
        f"recipe: {k}": lambda r, c=[f"method={k}", *v]: recipe_run(r, c) for k, v in RIVALS.items()
    },
    "two processes, λ": two_processes,
}

# -- Files of the older version --------------------------------------------------------------------

STOPPED_AFTER = 20  # optimizer steps


@dataclass(frozen=True)
class Files:
    """Files that the older version makes, and what both versions do with copies of them.

    What the older one does may be something else that has to come to the same.
    """

    make: Callable[[Path], None]
    use: Callable[[Record, Path], None]
    by_the_older: Callable[[Record, Path], None] | None = None


def make_stopped(directory: Path, how: str, steps: int) -> None:
    """Train a run to a step, where it is interrupted."""
    NOW.stop_after = steps
    try:
        train(directory / "run", METHODS[how], ends_with=130)
    finally:
        NOW.stop_after = None


def resumed(record: Record, directory: Path) -> None:
    """Go on with a run that was stopped."""
    program("resume", directory / "run", "--trust", "--quiet")
    keep_run(record, directory / "run")


def undisturbed(record: Record, how: str, steps: int) -> None:
    """Train the same without a stop, and keep what comes after it."""
    train(record.directory / "whole", METHODS[how])
    keep_run(record, record.directory / "whole")
    record.losses = record.losses[steps:]


def of_run(how: str) -> Files:
    steps = STOPPED_AFTER
    return Files(
        lambda directory: make_stopped(directory, how, steps),
        resumed,
        lambda record, _: undisturbed(record, how, steps),
    )


def make_finished(directory: Path) -> None:
    """Train a run to its end, search its frontier, and deploy a size."""
    train(directory / "run", METHODS["λ"])
    program("frontier", directory / "run", "--trust", "--quiet")
    out = directory / "deployed"
    program("deploy", directory / "run", "--out", out, "--to", "safetensors",
            "--max-params", "50%", "--trust", "--quiet")  # fmt: skip


def used(record: Record, directory: Path) -> None:
    """Verify, report, sum up, search, load and deploy."""
    run, (x, _) = directory / "run", images()["test"][0]
    for done in ("run", "deployed"):
        program("verify", directory / done)
    program("report", run)
    program("summary", run, "--trust")
    program("frontier", run, "--trust", "--quiet")
    points = json.loads((run / "frontier.json").read_text())["points"]
    record.said["frontier"] = [{k: v for k, v in p.items() if k != "latency"} for p in points]
    program("deploy", run, "--out", directory / "again", "--to", "safetensors",
            "--max-params", "50%", "--trust", "--quiet")  # fmt: skip
    for done in ("deployed", "again"):
        (file,) = sorted((directory / done).rglob("*.safetensors"))
        record.keep_file(file, f"{done}.safetensors")
        record.keep(f"output of {done}", {"y": lod.load(file, into=net()).eval()(x)})
    loaded = lod.load(run / "model.safetensors", into=net(), ranks=0.5)
    record.keep("output at half the ranks", {"y": loaded.eval()(x)})


def make_elastic_file(directory: Path) -> None:
    model = lod.decompose(net())
    (x, y), *_ = images()["validation"]
    with torch.no_grad():
        found = lod.frontier(model, lambda m: F.cross_entropy(m(x), y), example=x[:1], until=0.3)
    lod.save(model, directory / "model.safetensors", frontier=found)


def load_elastic_file(record: Record, directory: Path) -> None:
    (x, _), *_ = images()["test"]
    options: list[dict[str, Any]] = [{}, {"ranks": 0.5}, {"max_params": 0.5}, {"max_macs": 0.5}]
    for number, chosen in enumerate(options):
        model = lod.load(directory / "model.safetensors", into=net(), **chosen).eval()
        record.said[f"ranks {chosen}"] = lod.ranks(model)
        record.keep(f"output {number}", {"y": model(x)})


def fitted(how: Mapping[str, Any], file: Path | None = None, *, save: bool = False) -> nn.Module:
    """Train a part of a run, from a state if there is one, and save the state it ends with."""
    save_state, load_state, place = states()
    torch.manual_seed(0)
    data = images()["train"]
    model = NOW.model = lod.decompose(net())
    optimizer = OPTIMIZERS["adam"](model.parameters())
    by, progress = lod.LoD(model, optimizer, example=data[0][0][:1], **how), place()
    if file is not None and not save:
        state = load_state(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        by.load_state_dict(state["method"])
        progress = place.from_state(state["progress"])
    given = _Stopping(data) if save else data
    try:
        lod.fit(model, given, optimizer=optimizer, method=by, loss=cross_entropy, epochs=6,
                progress=progress)  # fmt: skip
    except _Stopped:
        assert file is not None
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                 "method": by.state_dict(), "progress": progress.state_dict()}  # fmt: skip
        save_state(state, file)
    return model


class _Stopped(Exception):
    pass


class _Stopping(list[Any]):
    """Data that end training in the middle of an epoch."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if len(NOW.losses) == STOPPED_AFTER:
                raise _Stopped
            yield batch


def of_state(**how: Any) -> Files:
    def go_on(record: Record, directory: Path) -> None:
        record.keep_model(fitted(how, directory / "state.safetensors"))

    def whole(record: Record, directory: Path) -> None:
        record.keep_model(fitted(how))
        record.forget(STOPPED_AFTER)

    def stopped(directory: Path) -> None:
        fitted(how, directory / "state.safetensors", save=True)

    return Files(stopped, go_on, whole)


def make_compressed(directory: Path) -> None:
    """Compress a transformers directory and a model of one's own."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(directory / "bert")
    program("compress", directory / "bert", "--data", "same_losses_runs:bert_batches",
            "--max-params", "80%", "--out", directory / "small", "--quiet")  # fmt: skip
    recipe = directory / "toy.yaml"
    recipe.write_text(RECIPE)
    program("compress", recipe, "--max-params", "70%", "--out", directory / "own", "--quiet")


def bert_batches() -> list[dict[str, Tensor]]:
    return [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x, _ in ids(32, 6)]


def load_compressed(record: Record, directory: Path) -> None:
    loaded = one_of(
        "integrations.transformers:from_pretrained", "integrations.huggingface:from_pretrained"
    )(directory / "small")
    batch, ((x, _), *_) = bert_batches()[0], images()["test"]
    with torch.no_grad():
        record.keep("output", {"y": loaded.eval()(**batch).last_hidden_state})
        own = lod.load(directory / "own" / "model.safetensors", into=net())
        record.keep("output of own", {"y": own.eval()(x)})
    record.said["ranks"] = lod.ranks(loaded)


FILES: dict[str, Files] = {
    "files: λ run, stopped": of_run("λ"),
    "files: finished run, frontier, deployed": Files(make_finished, used),
    "files: elastic file": Files(make_elastic_file, load_elastic_file),
    "files: training state, λ": of_state(**LAMBDA),
    "files: compressed directory": Files(make_compressed, load_compressed),
}

# -- One version -----------------------------------------------------------------------------------


@contextmanager
def recording(directory: Path) -> Iterator[Record]:
    """Begin a record, and write it; what fails is kept instead."""
    global NOW
    directory.mkdir(parents=True, exist_ok=True)
    NOW = record = Record(directory)
    torch.manual_seed(0)
    try:
        yield record
        record.write()
    except (Exception, SystemExit, KeyboardInterrupt):
        (directory / "error.txt").write_text(traceback.format_exc())


def main(task: str, out: Path, files: Path, names: list[str]) -> None:
    """Do the runs of these names: `older` and `newer` say which of the two versions this is."""
    plain_kernels()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    register_optimizer_step_post_hook(lambda *_: NOW.step())
    for number, name in enumerate(names):
        if sys.stderr.isatty():
            print(f"\r\033[K{task}: {name}", end="", file=sys.stderr, flush=True)
        if name in RUNS:
            with recording(out / name) as record:
                RUNS[name](record)
            continue
        here, kind = files / str(number), FILES[name]
        if task == "older":
            with recording(out / name / "made"):
                here.mkdir(parents=True)
                kind.make(here)
        with recording(out / name) as record:
            copy = record.directory / "copy"
            shutil.copytree(here, copy)
            use = (kind.by_the_older if task == "older" else None) or kind.use
            use(record, copy)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


def tensors_of(directory: Path) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of all files that a record has kept."""
    return {path.name: load_file(path) for path in sorted(directory.glob("*.safetensors"))}
