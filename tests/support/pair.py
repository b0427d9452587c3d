"""Two processes that stay for many tests and train together, by gloo over a file store."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

WAIT = 300  # seconds: far more than any call needs, so that a loaded machine is no failure


def join_group(directory: Path, process: int, world: int, seconds: float = WAIT) -> None:
    """Make this process one of a group, with no port that others could want."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=process, world_size=world, timeout=timedelta(seconds=seconds)
    )


def _work(process: int, world: int, directory: Path, calls: Connection) -> None:
    join_group(directory, process, world)
    while (call := calls.recv()) is not None:
        function, arguments = call
        try:
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # which torch.compile asks for itself where DDP splits its graph
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
                calls.send((function(*arguments), None))
        except BaseException:
            calls.send((None, traceback.format_exc()))
    dist.destroy_process_group()


class Pair:
    """Calls a function in both processes at once and returns what each returned."""

    def __init__(self, directory: Path, world: int = 2) -> None:
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(world)]
        self._ends = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_work, args=(i, world, directory, theirs), daemon=True)
            for i, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for end in self._ends:
            end.send((function, arguments))
        answers = []
        for process, end in enumerate(self._ends):
            if not end.poll(WAIT):
                raise AssertionError(f"process {process} does not answer")
            try:
                answers.append(end.recv())
            except EOFError:
                answers.append((None, "it has ended without an answer"))
        if errors := [f"process {i}:\n{e}" for i, (_, e) in enumerate(answers) if e is not None]:
            raise AssertionError("\n".join(errors))
        return [value for value, _ in answers]

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(BrokenPipeError):  # of one that has ended
                end.send(None)
        for process in self._processes:
            process.join(30)
            process.kill()
