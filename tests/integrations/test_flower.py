"""Flower's strategy, on a grid that calls clients directly: the same as averaging without it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from maestro_lod import decompose, ranks
from maestro_lod.errors import LayerError, OptionError, TrainingError
from maestro_lod.integrations.federated import aggregate, leading, receive

pytest.importorskip(
    "flwr", reason="pip install 'maestro-lod[federated]' in an environment of its own"
)
from flwr.app import Error, Message, MessageType

from maestro_lod.integrations.flower import RankTiers, model_reply, receive_model, tier_reply


@pytest.fixture(autouse=True)
def _inside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages belong to a run and a node, as Flower's processes know them."""
    from flwr.supercore.task_identity import TaskIdentity

    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)


SHARES = {11: 0.25, 12: 0.5, 13: 1.0}


def network() -> nn.Module:
    torch.manual_seed(0)
    return decompose(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8)))


def local_training(model: nn.Module, node: int) -> int:
    """Change the model as a client would; return how many samples it has."""
    generator = torch.Generator().manual_seed(node)
    x = torch.randn(node, 12, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    F.mse_loss(model(x), torch.ones(node, 8)).backward()
    optimizer.step()
    return node


class DirectGrid:
    """Hands messages to a function for each client, and notes the bytes that it gets."""

    def __init__(self, failing: int | None = None, silent: bool = False) -> None:
        self.failing, self.silent = failing, silent
        self.sent: dict[int, int] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(SHARES)

    def send_and_receive(self, messages: Iterable[Message], **_: Any) -> list[Message]:
        return [self._client(message) for message in messages]

    def _client(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if message.metadata.message_type == MessageType.QUERY:
            if self.silent:
                return Message(Error(code=1), reply_to=message)
            return tier_reply(message, SHARES[node])
        self.sent[node] = message.content["arrays"].count_bytes()
        if node == self.failing:
            return Message(Error(code=1), reply_to=message)
        model = network()
        receive_model(model, message)
        examples = local_training(model, node)
        return model_reply(message, model, examples=examples, ranks=sum(ranks(model).values()))


def strategy() -> RankTiers:
    return RankTiers(network(), fraction_evaluate=0.0, min_available_nodes=3, min_train_nodes=3)


def by_hand(model: nn.Module, nodes: Iterable[int], rounds: int) -> nn.Module:
    for _ in range(rounds):
        updates = []
        for node in nodes:
            client = network()
            receive(client, leading(model, SHARES[node]))
            examples = local_training(client, node)
            updates.append((client.state_dict(), examples))
        aggregate(model, updates)
    return model


@pytest.mark.parametrize("failing", [None, 12])
def test_rounds_are_those_without_flower(failing: int | None) -> None:
    ours, grid = strategy(), DirectGrid(failing)
    result = ours.start(grid, ours.arrays(), num_rounds=3)
    expected = by_hand(network(), [n for n in SHARES if n != failing], 3).state_dict()
    final = result.arrays.to_torch_state_dict()
    for key, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-7)
        assert torch.equal(final[key], value)
    assert ours.tiers == SHARES
    assert result.train_metrics_clientapp[1]["ranks"] > 0


def test_bytes_follow_the_tier() -> None:
    ours, grid = strategy(), DirectGrid()
    ours.start(grid, ours.arrays(), num_rounds=1)
    whole = strategy().model

    def scalars(node: int) -> int:
        return sum(value.numel() for value in leading(whole, SHARES[node]).values())

    for less, more in ((11, 12), (12, 13)):  # beside the same headers for all
        assert grid.sent[more] - grid.sent[less] == 4 * (scalars(more) - scalars(less)) > 0


def test_wrong_use_is_refused() -> None:
    with pytest.raises(LayerError, match="no low-rank layer"):
        RankTiers(nn.Linear(4, 4))
    with pytest.raises(TrainingError, match="did not answer the query"):
        ours = strategy()
        ours.start(DirectGrid(silent=True), ours.arrays(), num_rounds=1)
    with pytest.raises(OptionError, match=r"tier 1.5 is no share"):
        tier_reply(None, 1.5)
