"""Federated training by tiers of ranks in Flower: a strategy, and functions for its clients.

    @server.main()
    def main(grid, context):
        strategy = RankTiers(lod.decompose(Net()))
        strategy.start(grid, strategy.arrays(), num_rounds=10)
        lod.save(strategy.model, "model.safetensors")

    @client.query()
    def tell_tier(message, context):
        return tier_reply(message, context.node_config["tier"])

    @client.train()
    def train(message, context):
        model = lod.decompose(Net())
        receive_model(model, message)
        …
        return model_reply(message, model, examples=len(data))

Each client is configured with a tier, for which the server queries it once. The choice of ranks and
their average are in `maestro_lod.integrations.federated`, which does not need Flower.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import nn

from maestro_lod.errors import OptionError, TrainingError
from maestro_lod.integrations.federated import aggregate, leading, receive
from maestro_lod.layers.ranks import require_low_rank, unwrapped

_ARRAYS, _METRICS, _TIER = "arrays", "metrics", "tier"


class RankTiers(FedAvg):
    """Strategy that sends each client its first ranks, and averages each rank over its clients.

    Args:
        model: The server's low-rank model, which is trained in place.
        **options: Options of FedAvg.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        require_low_rank(model)
        super().__init__(arrayrecord_key=_ARRAYS, **options)
        self.model = unwrapped(model)
        self.tiers: dict[int, float] = {}
        """The share of the full rank of each client that has answered."""

    def arrays(self) -> ArrayRecord:
        """Return the whole model as Flower's arrays, for `start`."""
        return ArrayRecord(dict(leading(self.model, None)))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose clients as FedAvg does, and send each the ranks of its tier."""
        chosen = super().configure_train(server_round, arrays, config, grid)
        return self._by_tier(list(chosen), grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose clients for evaluation, and send each the ranks of its tier."""
        chosen = super().configure_evaluate(server_round, arrays, config, grid)
        return self._by_tier(list(chosen), grid)

    def _by_tier(self, messages: list[Message], grid: Grid) -> list[Message]:
        self._ask([message.metadata.dst_node_id for message in messages], grid)
        # clients of one tier share a record
        records = {
            share: ArrayRecord(dict(leading(self.model, share)))
            for share in sorted(set(self.tiers.values()))
        }
        return [
            Message(
                RecordDict(
                    {**message.content, _ARRAYS: records[self.tiers[message.metadata.dst_node_id]]}
                ),
                dst_node_id=message.metadata.dst_node_id,
                message_type=message.metadata.message_type,
            )
            for message in messages
        ]

    def _ask(self, nodes: list[int], grid: Grid) -> None:
        """Query the tiers of clients that have not answered yet."""
        new = [node for node in nodes if node not in self.tiers]
        questions = [
            Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in new
        ]
        for reply in grid.send_and_receive(questions) if questions else ():
            if not reply.has_error():
                share = reply.content[_TIER]["share"]
                self.tiers[reply.metadata.src_node_id] = _require_share(share)
        if silent := [node for node in new if node not in self.tiers]:
            raise TrainingError(
                f"these clients did not answer the query for their tier: {silent}. Return "
                "tier_reply(message, share) from the ClientApp's query function."
            )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the replies into the model; failed clients are left out."""
        contents = [reply.content for reply in replies if not reply.has_error()]
        if not contents:
            return None, None
        aggregate(
            self.model,
            [
                (content[_ARRAYS].to_torch_state_dict(), content[_METRICS][self.weighted_by_key])
                for content in contents
            ],
        )
        return self.arrays(), self.train_metrics_aggr_fn(contents, self.weighted_by_key)


def tier_reply(message: Message, share: float) -> Message:
    """Return the answer to the server's query for this client's tier.

    Args:
        message: The query.
        share: The share of the full rank that this client can train, in (0, 1].

    Returns:
        The reply to the query.

    Raises:
        OptionError: The share is not in (0, 1].
    """
    record = ConfigRecord({"share": _require_share(share)})
    return Message(RecordDict({_TIER: record}), reply_to=message)


def receive_model(model: nn.Module, message: Message) -> None:
    """Load the arrays of a message from the server into a client's low-rank model, in place.

    Args:
        model: The client's low-rank model.
        message: The server's message.

    Raises:
        LayerError: The arrays belong to another model.
        TrainingError: The model cannot hold their values.
    """
    receive(model, message.content[_ARRAYS].to_torch_state_dict())


def model_reply(message: Message, model: nn.Module, *, examples: int, **metrics: float) -> Message:
    """Return the reply with a trained model.

    Args:
        message: The server's message.
        model: The trained model.
        examples: The number of samples, which is the weight of the model in the average.
        **metrics: Further numbers for the server.

    Returns:
        The reply to the message.
    """
    state = ArrayRecord(dict(unwrapped(model).state_dict()))
    numbers = MetricRecord({"num-examples": examples, **metrics})
    return Message(RecordDict({_ARRAYS: state, _METRICS: numbers}), reply_to=message)


def _require_share(share: Any) -> float:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise OptionError(
            f"tier {share!r} is not a share of the full rank. Give a number in (0, 1]."
        )
    return float(share)
