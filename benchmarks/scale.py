"""What would a decoder of 7 billion parameters cost on 8 and 1,024 workers? Writes docs/scale.md.

    python benchmarks/scale.py

Shapes come from the model on the meta device, bytes from arithmetic on them, and the time of a
shrink per factor from results/shrink.json, which benchmarks/wire.py measures. Bandwidths are
assumptions, and said to be.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "scale.md"
LAYERS, WIDTH, HIDDEN, VOCABULARY = 32, 4096, 11008, 32000
SHARE = 0.25  # of the dense weights of each linear layer that its factors are to have at the end
WORKERS = (8, 1024)
BANDWIDTH = {8: 200e9, 1024: 25e9}  # bytes per second and worker: within a node, across nodes
SHRINKS = 20  # of a whole training
SGD_STEPS = 100_000  # the same


class Block(nn.Module):
    """The weights of one layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))


def decoder() -> nn.ModuleDict:
    with torch.device("meta"):
        return nn.ModuleDict(
            {
                "embedding": nn.Embedding(VOCABULARY, WIDTH),
                "blocks": nn.ModuleList(Block() for _ in range(LAYERS)),
                "norm": nn.RMSNorm(WIDTH),
                "head": nn.Linear(WIDTH, VOCABULARY, bias=False),
            }
        )


@dataclass(frozen=True)
class Sizes:
    """Scalars of a model in which the linear layers of all blocks have some rank."""

    dense: int
    """Of what stays dense."""
    factors: tuple[tuple[int, int, int], ...]
    """(out, in, rank) of every factored layer."""
    blocks: int = LAYERS

    @property
    def params(self) -> int:
        return self.dense + sum(r * (m + n) for m, n, r in self.factors)

    @property
    def ranks(self) -> int:
        return sum(r for _, _, r in self.factors)

    def padded(self, workers: int) -> int:
        """Scalars as FSDP2 stores and sends them: v in as many rows as workers, or multiples."""
        return self.dense + sum(
            r * m + math.ceil(r / workers) * workers * n for m, n, r in self.factors
        )

    def moved(self, workers: int) -> float:
        """Scalars of v that one worker gets from others in a shrink to these ranks, at most."""
        return sum(math.ceil(r / workers) * n for _, n, r in self.factors)


def sizes(share: float | None) -> Sizes:
    """Return the sizes at a share of each layer's weights; None is full rank."""
    model = decoder()
    linear = [m for m in model["blocks"].modules() if isinstance(m, nn.Linear)]
    shapes = [(m.out_features, m.in_features) for m in linear]
    factors = tuple(
        (m, n, min(m, n) if share is None else int(share * m * n / (m + n))) for m, n in shapes
    )
    return Sizes(_params(model) - sum(m * n for m, n in shapes), factors)


def _params(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def memory(sized: int, workers: int) -> float:
    """Bytes per worker: weights, gradients, two moments in float32; two blocks gathered in bf16."""
    return 16 * sized / workers + 2 * 2 * sized / LAYERS


def step_bytes(sized: int, workers: int) -> float:
    """Bytes that a worker gets per step: weights twice in bf16, gradients once in float32."""
    return (2 * 2 + 4) * sized * (workers - 1) / workers


def penalty_bytes(of: Sizes) -> int:
    """Bytes that a worker gets for the penalty: an all-reduce of a float32 per rank and factor."""
    return 2 * 4 * 2 * of.ranks


def seconds_per_factor() -> float:
    """Return the measured time of a shrink per factor, without communication."""
    found = json.loads((RESULTS / "shrink.json").read_text())["answer"]["median_seconds"]
    measured = found["transformer, 6 layers, FSDP2"]
    return measured["shrink"] / measured["factors"]


def shrink_seconds(of: Sizes, workers: int) -> tuple[float, float]:
    """Seconds of one shrink to these ranks: for what is sent, and for all factors in turn."""
    sent = 12 * of.moved(workers) / BANDWIDTH[workers]  # a weight and two moments each
    return sent, 2 * len(of.factors) * seconds_per_factor()


def page() -> str:
    full, small, dense = sizes(None), sizes(SHARE), _params(decoder())
    lines = [
        "# Estimate for a decoder of 7 billion parameters",
        "",
        "This page is an estimate: `benchmarks/scale.py` computes it from layer shapes and one",
        "measured constant. Nothing was run at this size. `tests/docs/test_scale.py` compares the",
        "page with the computation.",
        "",
        f"The model has {LAYERS} layers of width {WIDTH:,} and {HIDDEN:,} and a vocabulary of",
        f"{VOCABULARY:,}: {dense:,} parameters. Embedding, head and norms stay dense; all linear",
        f"layers are factored. At full rank it has {full.params:,} scalars",
        f"({full.params / dense:.2f}×). At the end, with {SHARE:.0%} of each layer's weights, it",
        f"has {small.params:,} ({small.params / dense:.2f}×). Training uses FSDP2 and AdamW with",
        "float32 weights that are sent as bf16. Activations are not counted.",
        "",
        "| per worker | workers | dense | full rank | at the end |",
        "|---|---:|---:|---:|---:|",
    ]
    for title, cost, unit in (("memory, GB", memory, 1e9), ("bytes per step, GB", step_bytes, 1e9)):
        for w in WORKERS:
            cells = [cost(n, w) / unit for n in (dense, full.padded(w), small.padded(w))]
            shown = " | ".join(f"{value:.2f}" for value in cells)
            lines.append(f"| {title} | {w:,} | {shown} |")
    lines.append(
        "| penalty per step, MB | any | 0.00 | "
        f"{penalty_bytes(full) / 1e6:.2f} | {penalty_bytes(small) / 1e6:.2f} |"
    )
    lines += ["", *_shrinks(full, small), "", *_breaks(small), ""]
    return "\n".join(lines)


def _shrinks(full: Sizes, small: Sizes) -> list[str]:
    per_factor = seconds_per_factor()
    lines = [
        "## Cost of a shrink",
        "",
        "`u` is cut locally. Remaining rows of `v` move to their new owners together with both",
        "moments: 12 bytes per scalar. The work per factor was measured: "
        f"{1e3 * per_factor:.1f} ms",
        "(two processes, gloo, CPU; benchmarks/results/shrink.json). Bandwidths are assumed.",
        "",
        "| workers | GB/s assumed | MB moved, at most | s sending | s for all factors "
        f"| {SHRINKS} shrinks, s |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for w in WORKERS:
        sent, work = shrink_seconds(small, w)
        moved = 12 * small.moved(w) / 1e6
        lines.append(
            f"| {w:,} | {BANDWIDTH[w] / 1e9:g} | {moved:,.1f} | {sent:.4f} | {work:.1f} "
            f"| {SHRINKS * (sent + work):.0f} |"
        )
    step = step_bytes(full.padded(1024), 1024) / BANDWIDTH[1024]
    lost = SHRINKS * sum(shrink_seconds(small, 1024)) / (SGD_STEPS * step)
    lines += [
        "",
        f"On 1,024 workers, a step of the full-rank model sends data for {step:.1f} s at this",
        f"bandwidth. {SHRINKS} shrinks in {SGD_STEPS:,} steps therefore take at most {lost:.4%} of",
        "the time.",
    ]
    return lines


def _breaks(small: Sizes) -> list[str]:
    least, most = min(r for *_, r in small.factors), max(r for *_, r in small.factors)
    waste = small.padded(1024) / small.params
    return [
        "## Limits",
        "",
        f"1. **Fewer ranks than workers.** At the end, layers have {least} to {most} ranks. FSDP2",
        "   shards `v` into at least one row per worker and pads the rest. On 1,024 workers, it",
        f"   stores and sends {waste:.2f}× the necessary data. Further shrinking saves nothing.",
        "   Shard `v` across its ranks (`fully_shard(…, shard_placement_fn=across_ranks(model))`):",
        "   there is no padding, and no row moves at a shrink. Or shard within nodes and replicate",
        "   over nodes.",
        "2. **Full rank at the start** needs more memory and bandwidth than the dense model: see",
        "   the table. Start with fewer ranks: `decompose(model, ranks=0.5)`.",
        "3. **Agreement.** The ranks of all layers are exchanged between all workers at the first",
        "   step of an epoch, every 64 steps and at its end. This takes a few kilobytes each time,",
        "   some megabytes on 1,024 workers, and grows with their number.",
    ]


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
