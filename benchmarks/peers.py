"""Compare training steps with the low-rank layers of other libraries that are installed.

    python benchmarks/peers.py [--rounds 9] [--threads 1]

Four linear layers of 512 units, batch 256, rank 64, SGD; CPU time relative to the dense model's
step. Ours has its penalty and its sampling. tensorly-torch holds the same two factors (CP of a
matrix), PEFT trains LoRA adapters next to the frozen weights, and torchao's `prototype.pat` keeps
dense weights and takes their singular values down by a proximal step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from interleaved import seconds, write
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod

WIDTH, DEPTH, BATCH, RANK, PENALTY = 512, 4, 256, 64, 64e-6
Step = Callable[[], None]


def network(linear: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [linear(), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def dense_network() -> nn.Sequential:
    return network(lambda: nn.Linear(WIDTH, WIDTH))


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def stepping(model: nn.Module, optimizer: Any) -> Step:
    x, y = batch()

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))


def ours() -> Step:
    model, (x, y) = lod.decompose(dense_network(), ranks=RANK), batch()
    optimizer = sgd(model.parameters())
    train = lod.LoD(model, optimizer, penalty=PENALTY)

    def step() -> None:
        train.backward(lambda: model(x), lambda output: F.cross_entropy(output, y))
        optimizer.step()
        optimizer.zero_grad()

    return step


def dense() -> Step:
    model = dense_network()
    return stepping(model, sgd(model.parameters()))


def tensorly_torch() -> Step:
    from tltorch import FactorizedLinear

    model = network(
        lambda: FactorizedLinear(
            (WIDTH,), (WIDTH,), bias=True, factorization="cp", rank=RANK,
            implementation="factorized",
        )
    )  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=WIDTH**-0.5)
    return stepping(model, sgd(model.parameters()))


def peft() -> Step:
    from peft import LoraConfig, get_peft_model

    names = [str(2 * i) for i in range(DEPTH)]
    model = get_peft_model(dense_network(), LoraConfig(r=RANK, target_modules=names))
    return stepping(model, sgd(p for p in model.parameters() if p.requires_grad))


def pat() -> Step:
    from torchao.prototype.pat import PruneOptimizer

    model = dense_network()
    low_rank = {"prox_type": "ProxNuclearNorm", "group_type": "SVDGrouper", "reg_lambda": PENALTY}
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], **low_rank},
        {"params": [p for p in model.parameters() if p.ndim == 1]},
    ]
    return stepping(model, PruneOptimizer(sgd(groups), reg_lambda=PENALTY))


PEERS: dict[str, Callable[[], Step]] = {
    "maestro-lod": ours,
    "tensorly-torch, CP": tensorly_torch,
    "PEFT, LoRA": peft,
    "torchao, prototype.pat": pat,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps, missing = {"dense": dense()}, {}
    for name, make in PEERS.items():
        try:
            steps[name] = make()
            steps[name]()
        except Exception as error:  # whatever another library does: it is said, not hidden
            steps.pop(name, None)
            missing[name] = f"{type(error).__name__}: {error}"[:200]
            print(f"{name}: {missing[name]}")
    times = seconds(steps, rounds=options.rounds, clock=time.process_time)
    answer: dict[str, Any] = {"dense_cpu_ms": 1e3 * times.median("dense"), "not_run": missing}
    for name in list(steps)[1:]:
        low, middle, high = times.quartiles(name, "dense")
        answer[name] = {"ratio": middle, "middle half": [low, high]}
        print(f"{name:24s} {middle:7.3f} × dense ({low:.3f} to {high:.3f})")
    write("peers", answer)


if __name__ == "__main__":
    main()
