"""What do tiers of ranks give in federated training, and how many bytes do they send?

    python benchmarks/federated.py [--rounds 30] [--seeds 3] [--data DIRECTORY]

MNIST over 20 clients whose labels are drawn from a Dirichlet distribution, in 4 tiers of 5. The
same LeNet, optimizer and rounds in every system; whoever is in it takes part in every
round, and trains the sizes up to its own in turn, drawn step by step. Results are kept per system
and seed, so that a stopped run can be resumed. Writes docs/federated.md's table too.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from interleaved import RESULTS, write
from torch import Tensor, nn
from torch.nn import functional as F

from maestro_lod import at_ranks, decompose
from maestro_lod.cli.data import load_data
from maestro_lod.cli.models.lenet import LeNet
from maestro_lod.integrations.federated import Update, aggregate, leading, receive

TIERS = (1 / 8, 1 / 4, 1 / 2, 1.0)
CLIENTS, TEST = 20, 10_000
PAGE = Path(__file__).parent.parent / "docs" / "federated.md"
START, END = "<!-- benchmarks/federated.py -->\n", "<!-- end -->"
Samples = tuple[Tensor, Tensor]


# -- data ------------------------------------------------------------------------------------------


def samples(directory: Path | None, limit: int) -> tuple[Samples, Samples]:
    """Return training and test images with their labels."""
    data = load_data("mnist", batch=limit, directory=directory, validation=0, limit=limit)
    whole = load_data("mnist", batch=TEST, directory=directory, validation=0)
    return next(iter(data.train)), next(iter(whole.test))


def dirichlet_parts(labels: Tensor, concentration: float, seed: int) -> list[Tensor]:
    """Return the rows of each client: of every class, shares drawn from a Dirichlet distribution.

    Drawn again until each client has samples of a batch.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        parts: list[list[Tensor]] = [[] for _ in range(CLIENTS)]
        for label in range(10):
            rows = (labels == label).nonzero().flatten()
            rows = rows[torch.randperm(len(rows), generator=generator)]
            shares = torch._standard_gamma(torch.full((CLIENTS,), concentration), generator)
            ends = (shares.cumsum(0) / shares.sum() * len(rows)).round().long()
            for part, own in zip(parts, rows.tensor_split(ends[:-1]), strict=True):
                part.append(own)
        joined = [torch.cat(part) for part in parts]
        if min(map(len, joined)) >= 32:
            return joined


# -- what a server and a client do, by ranks or by widths ------------------------------------------


class Ranks:
    """Clients hold the leading ranks of every layer."""

    def __init__(self) -> None:
        self.server = decompose(LeNet(), skip=["conv1", "fc3"])  # both are small already

    def client(self, share: float) -> nn.Module:
        model = copy.deepcopy(self.server)
        receive(model, leading(self.server, share))
        return model

    def state(self, share: float) -> dict[str, Tensor]:
        return leading(self.server, share)

    def at(self, model: nn.Module, share: float) -> Any:
        return nullcontext() if share == 1.0 else at_ranks(model, share)

    def aggregate(self, updates: list[Update]) -> None:
        aggregate(self.server, updates)


class NarrowLeNet(LeNet):
    """A LeNet of which only the first channels and units run."""

    share = 1.0

    def forward(self, x: Tensor) -> Tensor:
        used = narrowed(dict(self.named_parameters()), self.share)
        for name in ("conv1", "conv2"):
            x = F.conv2d(x, used[f"{name}.weight"], used[f"{name}.bias"])
            x = F.max_pool2d(F.relu(x), 2)
        x = x.flatten(1)
        for name in ("fc1", "fc2"):
            x = F.relu(F.linear(x, used[f"{name}.weight"], used[f"{name}.bias"]))
        return F.linear(x, used["fc3.weight"], used["fc3.bias"])


def narrowed(state: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return the first units of every hidden layer; inputs and classes stay whole."""
    kept = {}
    before, positions = 1, 1  # channels of the image
    for name in ("conv1", "conv2", "fc1", "fc2", "fc3"):
        weight = state[f"{name}.weight"]
        units = len(weight) if name == "fc3" else max(1, round(share * len(weight)))
        positions = 16 if name == "fc1" else 1  # a channel is a 4 × 4 image there
        kept[f"{name}.weight"] = weight[:units, : before * positions]
        kept[f"{name}.bias"] = state[f"{name}.bias"][:units]
        before = units
    return kept


class Widths:
    """Clients hold the first units of every hidden layer, as in FjORD."""

    def __init__(self) -> None:
        self.server = NarrowLeNet()

    def client(self, share: float) -> nn.Module:
        return copy.deepcopy(self.server)

    def state(self, share: float) -> dict[str, Tensor]:
        return narrowed(dict(self.server.named_parameters()), share)

    def at(self, model: nn.Module, share: float) -> Any:
        return _Width(model, share)

    @torch.no_grad()
    def aggregate(self, updates: list[Update]) -> None:
        """Average each scalar over the clients that hold it."""
        for key, own in self.server.named_parameters():
            total, weights = torch.zeros_like(own), torch.zeros_like(own)
            for state, weight in updates:
                held = tuple(slice(size) for size in state[key].shape)
                total[held] += weight * state[key]
                weights[held] += weight
            own.copy_(torch.where(weights > 0, total / weights.clamp(min=1), own))


class _Width:
    def __init__(self, model: nn.Module, share: float) -> None:
        self.model, self.share = model, share

    def __enter__(self) -> None:
        self.model.share = self.share

    def __exit__(self, *_: object) -> None:
        self.model.share = 1.0


# -- one federated training ------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """Who takes part, and how large the model of each tier's clients is."""

    method: Callable[[], Ranks | Widths]
    size: Callable[[float], float | None]
    """The share that a client of a tier holds; None if it does not take part."""


SYSTEMS = {
    "ranks by tier": System(Ranks, lambda tier: tier),
    "ranks, everybody at the smallest": System(Ranks, lambda tier: TIERS[0]),
    "ranks, only the largest clients": System(Ranks, lambda tier: tier if tier == 1 else None),
    "ranks, as if all were largest": System(Ranks, lambda tier: 1.0),
    "widths by tier (FjORD)": System(Widths, lambda tier: tier),
}


def local_training(
    method: Ranks | Widths, share: float, own: Samples, lr: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """Train one client for one epoch of its samples and return what it sends back."""
    model = method.client(share)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    sizes = [tier for tier in TIERS if tier <= share]
    for rows in torch.randperm(len(own[1]), generator=generator).split(32):
        drawn = sizes[int(torch.randint(len(sizes), (), generator=generator))]
        with method.at(model, drawn):
            F.cross_entropy(model(own[0][rows]), own[1][rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(method, Widths):
        return {k: v.detach() for k, v in narrowed(dict(model.named_parameters()), share).items()}
    return model.state_dict()


@torch.no_grad()
def accuracy(method: Ranks | Widths, share: float, test: Samples) -> float:
    with method.at(method.server, share):
        right = [method.server(x).argmax(1) == y for x, y in _batches(test)]
    return torch.cat(right).float().mean().item()


def _batches(test: Samples) -> Iterator[Samples]:
    yield from zip(test[0].split(1000), test[1].split(1000), strict=True)


def run(system: System, data: tuple[Samples, Samples], seed: int, options: Any) -> dict[str, Any]:
    """Train one system; return accuracy and size at each tier, and bytes per round."""
    (x, y), test = data
    torch.manual_seed(seed)
    method = system.method()
    parts = dirichlet_parts(y, options.concentration, seed)
    generator = torch.Generator().manual_seed(seed)
    tier_of = [TIERS[i % len(TIERS)] for i in range(CLIENTS)]
    sizes = {c: size for c in range(CLIENTS) if (size := system.size(tier_of[c])) is not None}
    sent = 0
    for number in range(options.rounds):
        lr = options.lr * (1 - number / options.rounds)
        updates: list[Update] = []
        sent = 0
        for client, share in sizes.items():
            own = x[parts[client]], y[parts[client]]
            state = local_training(method, share, own, lr, generator)
            sent += sum(value.numel() * value.element_size() for value in state.values())
            updates.append((state, len(parts[client])))
        method.aggregate(updates)
    largest = max(sizes.values())
    at = {str(tier): min(tier, largest) for tier in TIERS}
    return {
        "accuracy": {tier: accuracy(method, share, test) for tier, share in at.items()},
        "parameters": {
            tier: sum(v.numel() for v in method.state(share).values()) for tier, share in at.items()
        },
        "bytes_sent_back_per_round": sent,
        "clients": len(sizes),
    }


def table(answer: dict[str, Any]) -> str:
    """Return the table of the page: accuracy and parameters at each tier, bytes per round."""
    names = ["1/8", "1/4", "1/2", "1"]
    lines = [f"| system | {' | '.join(f'at {n}' for n in names)} | KB back per round |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for name, seeds in answer["systems"].items():
        results = list(seeds.values())
        cells = []
        for tier in map(str, TIERS):
            values = [100 * result["accuracy"][tier] for result in results]
            params = results[0]["parameters"][tier]
            cells.append(f"{statistics.mean(values):.1f} ± {_deviation(values):.1f} ({params:,})")
        sent = results[0]["bytes_sent_back_per_round"] / 1000
        lines.append(f"| {name} | {' | '.join(cells)} | {sent:,.0f} |")
    seeds = len(next(iter(answer["systems"].values())))
    lines += [
        "",
        f"(Test accuracy in %, mean ± standard deviation of {seeds} seeds, and parameters",
    ]
    lines += [f"of the model at each tier's size; {answer['rounds']} rounds.)", "", gain(answer)]
    return "\n".join(lines) + "\n"


def gain(answer: dict[str, Any]) -> str:
    """Describe the gain of tiers over the smallest ranks for all clients, and its cost."""
    tiers, smallest = (
        list(answer["systems"][name].values())
        for name in ("ranks by tier", "ranks, everybody at the smallest")
    )
    seeds = list(zip(tiers, smallest, strict=True))
    gains = [
        100 * statistics.mean(a["accuracy"][tier] - b["accuracy"][tier] for a, b in seeds)
        for tier in map(str, TIERS)
    ]
    bytes_of = [each[0]["bytes_sent_back_per_round"] for each in (tiers, smallest)]
    return (
        f"Ranks by tier, relative to the smallest ranks for all clients: {min(gains):+.1f} to "
        f"{max(gains):+.1f} points, at {bytes_of[0] / bytes_of[1]:.1f} times the bytes."
    )


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=12_000)
    parser.add_argument("--concentration", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--data", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {k: v for k, v in vars(options).items() if k not in ("data", "seeds")}
    kept = RESULTS / "federated.json"
    answer: dict[str, Any] = json.loads(kept.read_text())["answer"] if kept.exists() else {}
    if any(answer.get(key) != value for key, value in settings.items()):
        answer = {**settings, "systems": {name: {} for name in SYSTEMS}}
    data = samples(options.data, options.samples)
    for seed in range(options.seeds):
        for name, system in SYSTEMS.items():
            if str(seed) not in answer["systems"][name]:
                answer["systems"][name][str(seed)] = run(system, data, seed, options)
                print(seed, name, answer["systems"][name][str(seed)]["accuracy"], flush=True)
                write("federated", answer)
    head, rest = PAGE.read_text().split(START)
    PAGE.write_text(head + START + table(answer) + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
