"""What does decomposing a decoder of a billion parameters take, in time and in memory?

    python benchmarks/decoder.py [--layers 22] [--threads 1] [--by-blocks]

Random weights in bfloat16, all linear layers and the embedding at full rank, which is the longest
way. CPU seconds, peak memory of the process in addition to the model's before and after, and the
distance of factors from their weights. A call of `decompose` changes all layers or, if it fails,
none, so it holds dense weights and factors; by blocks, a call for each, it does for one block only.
Needs Linux.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.layers.ranks import low_rank_layers

WIDTH, HIDDEN, VOCABULARY = 2048, 5632, 32000
CHECKED = 8  # of the layers, which are compared with their weights


class Block(nn.Module):
    """The weights of one layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)


def decoder(layers: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(VOCABULARY, WIDTH),
            "blocks": nn.ModuleList(Block() for _ in range(layers)),
            "head": nn.Linear(WIDTH, VOCABULARY, bias=False),
        }
    )


def size(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def relative_error(layer: lod.layers.LowRank, weight: Tensor) -> float:
    """Return how far the first rows of a layer's product are from what they were."""
    product = layer.u[: len(weight)].float() @ layer.v.float()
    return float((product - weight).norm() / weight.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--by-blocks", action="store_true", help="A call of decompose for each.")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = decoder(options.layers)
    params, before = sum(p.numel() for p in model.parameters()), size(model)
    beginnings = {  # the first rows are enough to see an error
        name: module.weight[:16].detach().clone()
        for name, module in list(model.named_modules())
        if isinstance(module, nn.Linear)
    }
    wall, cpu = time.perf_counter(), time.process_time()
    parts = ["embedding", "head", *(f"blocks.{i}" for i in range(options.layers))]
    for part in parts if options.by_blocks else [None]:
        model = lod.decompose(model, only=part)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    from interleaved import write  # not before: it makes the process keep memory that is freed
    from svd import memory

    layers = low_rank_layers(model)
    names = list(beginnings)[:: max(1, len(beginnings) // CHECKED)]
    with torch.no_grad():
        errors = [relative_error(layers[n], beginnings[n].float()) for n in names]
    answer = {
        "params": params,
        "layers": len(layers),
        "cpu_seconds": round(cpu),
        "wall_seconds": round(wall),
        "dense_gib": before / 2**30,
        "factors_gib": size(model) / 2**30,
        "peak_gib": memory("VmHWM") / 2**30,
        "largest_relative_error": max(errors),
    }
    print(answer)
    write("decoder_by_blocks" if options.by_blocks else "decoder", answer)


if __name__ == "__main__":
    main()
