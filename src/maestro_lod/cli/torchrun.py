"""Training in several processes started by torchrun; the main process writes the run."""

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

from maestro_lod.distributed.collectives import broadcast_object, sum_over
from maestro_lod.errors import MaestroError, OptionError, TrainingError

T = TypeVar("T")
_torch: Any = dist  # its stubs do not export all documented names

_PROGRAM = Path(__file__).parents[1] / "__main__.py"
_WAIT = timedelta(minutes=30)  # while the main process alone tests and writes the model


def processes() -> int:
    """Return the number of processes that torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def is_main_process() -> bool:
    """Return True in the process that prints and writes files."""
    return processes() == 1 or os.environ["RANK"] == "0"


def restarted() -> bool:
    """Return True if torchrun has restarted the program after a process ended."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def launch(arguments: Sequence[str], count: int, restarts: int) -> int:
    """Run the program in several processes on this machine by torchrun's launcher.

    Args:
        arguments: The command line of each process.
        count: The number of processes.
        restarts: How often all processes are restarted after one of them ends.

    Returns:
        The exit code.

    Raises:
        OptionError: If torchrun has started this process already.
    """
    if "LOCAL_RANK" in os.environ:
        raise OptionError(
            f"torchrun has started {processes()} processes already. Leave out --nproc and "
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
    except ChildFailedError as error:  # each process has printed its error
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    return 0


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the process group that torchrun has started; do nothing in a single process."""
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


def run_in_main_process(action: Callable[[], T]) -> T:
    """Run an action in the main process; all processes return its result or raise its error."""
    if processes() == 1:
        return action()
    result, problem = None, None
    if is_main_process():
        try:
            result = action()
        except MaestroError as error:
            problem = error
    result, reason = broadcast_object(0, (result, str(problem or "")), dist.group.WORLD)
    if problem is not None:
        raise problem
    if reason:
        raise TrainingError(f"the first process has ended: {reason}")
    return result  # type: ignore[return-value]


def any_process(condition: bool) -> bool:
    """Return True if the condition holds in any process."""
    if processes() == 1:
        return condition
    return bool(sum_over(torch.tensor(float(condition)), None))


def wrapped(model: nn.Module) -> nn.Module:
    """Wrap a model in DistributedDataParallel if there are several processes."""
    if processes() == 1:
        return model
    # layers that a forward leaves out would otherwise stall the others
    return DistributedDataParallel(model, find_unused_parameters=True)


def require_named(directory: object) -> None:
    """Raise OptionError if several processes would each choose a directory."""
    if processes() > 1 and directory is None:
        raise OptionError(
            "several processes share one run, so its directory must be named. Give --out DIR."
        )
