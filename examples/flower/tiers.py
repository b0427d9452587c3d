"""Flower apps: a server and clients of four sizes that train one elastic model.

`simulate.py` runs them in Flower's simulation engine, `processes.py` as processes.
"""

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.integrations.flower import RankTiers, model_reply, receive_model, tier_reply

TIERS = (1 / 8, 1 / 4, 1 / 2, 1.0)
server = ServerApp()
client = ClientApp()


def network() -> nn.Module:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    return lod.decompose(dense, skip=["2"])  # four classes need four ranks


def samples(part: int) -> tuple[Tensor, Tensor]:
    """Return one part of the data; the target is the largest of four inputs."""
    x = torch.randn(400, 32, generator=torch.Generator().manual_seed(part + 1))
    return x, x[:, :4].argmax(1)


def part_and_tier(context: Context) -> tuple[int, float]:
    """Return the configured part and tier; the simulation engine configures only the part."""
    part = int(context.node_config["partition-id"])
    return part, float(context.node_config.get("tier", TIERS[part % 4]))


@client.query()
def tell_tier(message: Message, context: Context) -> Message:
    return tier_reply(message, part_and_tier(context)[1])


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    model, (x, y) = network(), samples(part_and_tier(context)[0])
    receive_model(model, message)  # takes the ranks that were sent
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = lod.LoD(model, optimizer, threshold=None)  # orders ranks and removes none
    for rows in torch.arange(len(y)).split(20):
        with run.step():
            F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model_reply(message, model, examples=len(y), ranks=sum(lod.ranks(model).values()))


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = RankTiers(network(), fraction_evaluate=0.0, min_available_nodes=4, min_train_nodes=4)
    strategy.start(grid, strategy.arrays(), num_rounds=int(context.run_config.get("rounds", 3)))
    x, y = samples(100)
    for tier in TIERS:
        with lod.at_ranks(strategy.model, tier if tier < 1 else lod.ranks(strategy.model)):
            right = (strategy.model(x).argmax(1) == y).float().mean()
        print(f"tier {tier:5.3f}: accuracy {right:.3f}", flush=True)
    file = str(context.run_config.get("file", "model.safetensors"))
    lod.save(strategy.model, file)
    print(f"clients of {sorted(strategy.tiers.values())} wrote {file}", flush=True)
