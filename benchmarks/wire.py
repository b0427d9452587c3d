"""What goes over the wire per step as ranks go, and how long does a shrink take?

    python benchmarks/wire.py [--only bytes|time]

Two processes on this machine, gloo. Bytes are what each process hands to the process group: DDP's
buckets, seen by a communication hook; FSDP2's parts and gradients, seen at the collective calls.
Every epoch takes a fifth of the ranks of every layer. Writes results/wire.json and shrink.json, and
from both the table and the picture of docs/distributed.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from interleaved import RESULTS, write
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from maestro_lod import LoD, decompose
from maestro_lod.baselines.models import resnet18
from maestro_lod.distributed.shards import zero_behind_
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.model.plot import svg

WORLD, EPOCHS, KEPT = 2, 8, 0.8
DOCS = Path(__file__).resolve().parents[1] / "docs"
START, END = "<!-- benchmarks/wire.py -->\n", "<!-- end -->"


def transformer() -> nn.Module:
    """Six layers of width 256, as text models have them."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), Classes(256))


class Classes(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x.mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (resnet18, (8, 3, 32, 32)),
    "transformer, 6 layers": (transformer, (8, 64, 256)),
}


# -- what one process does -----------------------------------------------------------------------


def sharded(model: nn.Module) -> nn.Module:
    """Shard block by block, as is usual."""
    for module in model.modules():
        if type(module).__name__ in ("BasicBlock", "TransformerEncoderLayer"):
            fully_shard(module)
    return fully_shard(model)


@contextmanager
def counted(model: nn.Module, sent: dict[str, int]) -> Iterator[None]:
    """Count the bytes that this process hands to the process group, by what they are for."""
    if isinstance(model, DistributedDataParallel):

        def hook(_, bucket):
            sent["gradients"] = sent.get("gradients", 0) + bucket.buffer().nbytes
            done = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True).get_future()
            return done.then(lambda result: result.value()[0])

        model.register_comm_hook(None, hook)
        yield
        return
    kinds = {"all_gather_single": "weights", "reduce_scatter_single": "gradients"}
    real = {name: getattr(dist, name) for name in kinds}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            whole = max(t.nbytes for t in tensors)  # of one that is scattered or gathered
            sent[kinds[name]] = sent.get(kinds[name], 0) + whole
            return real[name](*args, **kwargs)

        return call

    try:
        for name in kinds:
            setattr(dist, name, counting(name))
        yield
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def prepared(name: str, how: str) -> tuple[nn.Module, nn.Module, LoD, Callable[[], None]]:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    inner = decompose(build())
    model = DistributedDataParallel(inner) if how == "DDP" else sharded(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-4)
    train = LoD(model, optimizer, threshold=1e-6)
    x, y = torch.randn(shape), torch.randint(10, shape[:1])

    def step() -> None:
        with train.step():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return inner, model, train, step


@torch.no_grad()
def make_useless(model: nn.Module) -> None:
    for layer in low_rank_layers(model).values():
        for factor, dim in zip(layer.stored_factors(), (1, 0), strict=True):
            zero_behind_(factor, dim, max(1, int(KEPT * layer.rank)))


def bytes_per_step(name: str, how: str) -> list[dict[str, int]]:
    inner, model, train, step = prepared(name, how)
    rows = []
    sent: dict[str, int] = {}
    with counted(model, sent):
        for _ in range(EPOCHS):
            sent.clear()
            step()
            stored = sum(p.numel() for p in inner.parameters())
            if not sent:
                raise SystemExit(f"{how} sent nothing that was seen: this torch calls others")
            rows.append({"stored_bytes": 4 * stored, **sent, "sent": sum(sent.values())})
            make_useless(inner)
            train.end_epoch()
    return rows


def shrink_seconds(name: str, how: str) -> dict[str, Any]:
    inner, _, train, step = prepared(name, how)
    step()
    steps, shrinks = [], []
    for _ in range(5):
        dist.barrier()
        for _ in range(2):
            began = time.perf_counter()
            step()
            steps.append(time.perf_counter() - began)
        make_useless(inner)
        dist.barrier()
        began = time.perf_counter()
        train.end_epoch()
        shrinks.append(time.perf_counter() - began)
    step_s, shrink_s = statistics.median(steps), statistics.median(shrinks)
    return {
        "step": step_s,
        "shrink": shrink_s,
        "steps_per_shrink": shrink_s / step_s,
        "factors": 2 * len(low_rank_layers(inner)),
    }


# -- both processes --------------------------------------------------------------------------------


def _work(process: int, store: str, function: Any, arguments: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, WORLD), rank=process, world_size=WORLD
    )
    answer = function(*arguments)
    if process == 0:
        results.put(answer)
    dist.barrier()
    dist.destroy_process_group()


def in_both(function: Callable[..., Any], *arguments: Any) -> Any:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        works = [
            context.Process(
                target=_work, args=(i, str(Path(folder, "store")), function, arguments, results)
            )
            for i in range(WORLD)
        ]
        for work in works:
            work.start()
        answer = results.get(timeout=3600)
        for work in works:
            work.join()
    return answer


# -- what the page says ----------------------------------------------------------------------------


def kept(question: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((RESULTS / f"{question}.json").read_text())["answer"]
    return answer


def picture() -> str:
    curves = {
        name: [(row["stored_bytes"] / 1e6, row["sent"] / 1e6) for row in rows]
        for name, rows in kept("wire")["per_epoch"].items()
    }
    return svg(curves, title="Bytes per step and process", across="MB stored", up="MB handed over")


def table() -> str:
    """Return the table of the page."""
    lines = [
        "| model | MB stored, at first and last | bytes per step over bytes stored "
        "| a shrink, × a step |",
        "|---|---|---|---|",
    ]
    times = kept("shrink")["median_seconds"]
    for name, rows in kept("wire")["per_epoch"].items():
        stored = [row["stored_bytes"] / 1e6 for row in rows]
        shares = [row["sent"] / row["stored_bytes"] for row in rows]
        lines.append(
            f"| {name} | {stored[0]:.1f} → {stored[-1]:.1f} | {min(shares):.3f} to "
            f"{max(shares):.3f} | {times[name]['steps_per_shrink']:.2f} |"
        )
    note = f"({WORLD} processes, gloo; {EPOCHS} epochs, each of which takes a fifth of the ranks.)"
    return "\n".join([*lines, "", note, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["bytes", "time"])
    only = parser.parse_args().only
    systems = [(name, how) for name in MODELS for how in ("DDP", "FSDP2")]
    if only != "time":
        found = {f"{n}, {how}": in_both(bytes_per_step, n, how) for n, how in systems}
        write("wire", {"processes": WORLD, "per_epoch": found})
    if only != "bytes":
        times = {f"{n}, {how}": in_both(shrink_seconds, n, how) for n, how in systems}
        write("shrink", {"processes": WORLD, "median_seconds": times})
    (DOCS / "images" / "wire.svg").write_text(picture(), encoding="utf-8")
    page = DOCS / "distributed.md"
    head, rest = page.read_text(encoding="utf-8").split(START)
    page.write_text(head + START + table() + END + rest.split(END, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
