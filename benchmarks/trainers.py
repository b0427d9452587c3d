"""Measure what the callbacks add to a training step, relative to LoD in a manual loop.

    python benchmarks/trainers.py [--rounds 600]

In each trainer one step is taken with the callback's events, and one with the same calls of LoD
made directly, in turns. The whole step is timed: forward, backward, optimizer; in time of
the processor, of which other processes on the machine take nothing.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from interleaved import Times, write
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod import LoD, decompose
from maestro_lod.cli.models.lenet import LeNet

Step = Callable[[], object]
PAGE = Path(__file__).parent.parent / "docs" / "trainers.md"
START, END = "<!-- benchmarks/trainers.py -->\n", "<!-- end -->"


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(128, 1, 28, 28), torch.randint(10, (128,))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = decompose(LeNet())
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def by_hand() -> Step:
    model, optimizer = made()
    train, (x, y) = LoD(model, optimizer, penalty=1e-5), batch()

    def step() -> None:
        with train.step():
            F.cross_entropy(model(x), y).backward()
        train.add_penalty_gradients()
        optimizer.step()
        optimizer.zero_grad()

    return step


def lightning() -> Step:
    """The events that Lightning sends, in its order, around the same step."""
    from maestro_lod.integrations.lightning import LoDCallback

    model, optimizer = made()
    callback, (x, y) = LoDCallback(penalty=1e-5), batch()
    trainer: Any = SimpleNamespace(is_last_batch=False)
    callback._driver.start(model, optimizer)
    module: Any = model

    def step() -> None:
        callback.on_train_batch_start(trainer, module, (x, y), 0)
        F.cross_entropy(model(x), y).backward()
        callback.on_after_backward(trainer, module)
        callback.on_before_optimizer_step(trainer, module, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        callback.on_train_batch_end(trainer, module, None, (x, y), 0)

    return step


def accelerate(ours: bool) -> Step:
    """A loop in Accelerate's idiom, with our object or with LoD's own calls."""
    from accelerate import Accelerator

    from maestro_lod.integrations.accelerate import AcceleratedLoD

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*made())
    x, y = batch()
    if ours:
        train = AcceleratedLoD(accelerator, model, optimizer, penalty=1e-5)

        def step() -> None:
            with train.accumulate():
                train.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

        return step
    plain = LoD(model, optimizer, penalty=1e-5)

    def step_by_hand() -> None:
        with accelerator.accumulate(model):
            with plain.step():
                accelerator.backward(F.cross_entropy(model(x), y))
            plain.add_penalty_gradients()
            optimizer.step()
            optimizer.zero_grad()

    return step_by_hand


def huggingface() -> Step:
    """What the callback puts around `training_step`, around the same step."""
    from maestro_lod.integrations.driver import Driver
    from maestro_lod.integrations.hf_trainer import LoDTrainerCallback

    model, optimizer = made()
    x, y = batch()
    callback: Any = object.__new__(LoDTrainerCallback)  # without the trainer that it asks for
    callback._driver = Driver(penalty=1e-5)
    callback._driver.start(model, optimizer)
    callback._trainer = SimpleNamespace(accelerator=SimpleNamespace(sync_gradients=True))

    def training_step(model: nn.Module, inputs: Any) -> Tensor:
        loss = F.cross_entropy(model(inputs[0]), inputs[1])
        loss.backward()
        return loss

    callback._untouched = training_step
    state, control = SimpleNamespace(epoch=0.5), SimpleNamespace()

    def step() -> None:
        callback._training_step(model, (x, y))
        optimizer.step()
        optimizer.zero_grad()
        callback.on_step_end(None, state, control)

    return step


def processor_seconds(variants: dict[str, Step], rounds: int) -> Times:
    """Time single steps, every round all variants in turning order."""
    times = Times({name: [] for name in variants})
    names = list(variants)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.process_time()
            variants[name]()
            times[name].append(time.process_time() - start)
    return times


def table(answer: dict[str, Any]) -> str:
    """Return the table of the page."""
    lines = ["| trainer | time of a step, × by hand |", "|---|---|"]
    lines += [f"| {name} | {ratio:.3f} |" for name, ratio in answer["over_by_hand"].items()]
    lines += ["", f"({answer['model']}, one thread, processor time; the first line is the noise.)"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=600)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    variants = {
        "by hand": by_hand(),
        "by hand again": by_hand(),
        "Lightning": lightning(),
        "Hugging Face Trainer": huggingface(),
        "Accelerate by hand": accelerate(ours=False),
        "Accelerate": accelerate(ours=True),
    }
    times = processor_seconds(variants, options.rounds)
    over = {
        "by hand again": times.ratio("by hand again", "by hand"),
        "Lightning": times.ratio("Lightning", "by hand"),
        "Hugging Face Trainer": times.ratio("Hugging Face Trainer", "by hand"),
        "Accelerate": times.ratio("Accelerate", "Accelerate by hand"),
    }
    for name, ratio in over.items():
        print(f"{name:22s} {ratio:.4f} × the same step by hand")
    answer = {"model": "LeNet, batch 128", "over_by_hand": over}
    write("trainers", answer)
    head, rest = PAGE.read_text().split(START)
    PAGE.write_text(head + START + table(answer) + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
