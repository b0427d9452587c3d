"""The program in several processes, by torchrun or its launcher: one run, the first writes it."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from maestro_lod.distributed.collectives import sum_over, told_by
from maestro_lod.errors import MaestroError, OptionError, TrainingError

T = TypeVar("T")
_torch: Any = dist  # which does not say that it exports all that it documents

_PROGRAM = Path(__file__).parents[1] / "__main__.py"
_WAIT = timedelta(minutes=30)  # for the first process, which tests and writes the model alone


def processes() -> int:
    """Return in how many processes torchrun has started the program."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def is_first() -> bool:
    """Say whether this is the process that speaks and writes."""
    return processes() == 1 or os.environ["RANK"] == "0"


def restarted() -> bool:
    """Say whether torchrun has started the program again, after one of its processes ended."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def launch(arguments: Sequence[str], count: int, restarts: int) -> int:
    """Run the program in processes on this machine, by torchrun's launcher; return the exit code.

    If one of them ends, it starts all again, so many times.
    """
    if "LOCAL_RANK" in os.environ:
        raise OptionError(
            f"torchrun has started {processes()} processes already: leave --nproc and "
            "--max-restarts to it."
        )
    config = LaunchConfig(  # as torchrun --standalone
        1, 1, count, max_restarts=restarts,
        run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    )  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // count)))
    try:
        # by its path: -m would search the working directory for modules first
        elastic_launch(config, sys.executable)(str(_PROGRAM), *arguments)
    except ChildFailedError as error:  # each has said what was wrong
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    return 0


@contextmanager
def together(device: str) -> Iterator[None]:
    """Make this process one of those that torchrun has started; alone, do nothing."""
    if processes() == 1:
        yield
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, process, world = next(_torch.rendezvous("env://", timeout=_WAIT))
    # torchrun keeps its store when it starts processes again: the addresses of those that have
    # ended are still in it, and would be waited for
    attempt = _torch.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=attempt, rank=process, world_size=world, timeout=_WAIT
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def by_the_first(action: Callable[[], T]) -> T:
    """Let the first process do something; all return what it returned, or fail alike."""
    if processes() == 1:
        return action()
    done, problem = None, None
    if is_first():
        try:
            done = action()
        except MaestroError as error:
            problem = error
    said, why = told_by(0, (done, str(problem or "")), dist.group.WORLD)
    if problem is not None:
        raise problem
    if why:
        raise TrainingError(f"the first process has ended: {why}")
    return said  # type: ignore[return-value]


def any_says(yes: bool) -> bool:
    """Say whether any process does."""
    return yes if processes() == 1 else bool(sum_over(torch.tensor(float(yes)), None))


def wrapped(model: nn.Module) -> nn.Module:
    """Return a model as several processes train it."""
    if processes() == 1:
        return model
    # layers that a forward leaves out would otherwise stall the others
    return DistributedDataParallel(model, find_unused_parameters=True)


def require_named(directory: object) -> None:
    """Refuse several processes that would each look for a free directory."""
    if processes() > 1 and directory is None:
        raise OptionError("several processes share one run: say where it is, with --out DIR.")
