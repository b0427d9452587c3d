"""Federated training by tiers of ranks, in Flower: a strategy, and what its clients call.

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

Whoever starts a client says what it can hold; the server asks each once. Which ranks are sent and
how they are averaged is `maestro_lod.integrations.federated`, which needs no Flower.
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
    """Sends each client the leading ranks that its tier allows; averages ranks over who holds them.

    `model` is the server's, a low-rank one, trained in place. Options are those of FedAvg.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        require_low_rank(model)
        super().__init__(arrayrecord_key=_ARRAYS, **options)
        self.model = unwrapped(model)
        self.tiers: dict[int, float] = {}
        """The share of the full rank that each client holds, as it said."""

    def arrays(self) -> ArrayRecord:
        """Return the whole model as Flower has it, to start from."""
        return ArrayRecord(dict(leading(self.model, None)))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose clients as FedAvg does, and send each its own ranks."""
        chosen = super().configure_train(server_round, arrays, config, grid)
        return self._by_tier(list(chosen), grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The same for evaluation: each client has the model of its tier."""
        chosen = super().configure_evaluate(server_round, arrays, config, grid)
        return self._by_tier(list(chosen), grid)

    def _by_tier(self, messages: list[Message], grid: Grid) -> list[Message]:
        self._ask([message.metadata.dst_node_id for message in messages], grid)
        # clients of one tier get one and the same record
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
        """Learn the tiers of clients that were not asked yet."""
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
                f"clients {silent} did not say what they hold. Answer queries by "
                "tier_reply(message, share) in the ClientApp."
            )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average what came back into the model; clients that failed are left out."""
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
    """Answer the server's question: the share of the full rank that this client can hold."""
    record = ConfigRecord({"share": _require_share(share)})
    return Message(RecordDict({_TIER: record}), reply_to=message)


def receive_model(model: nn.Module, message: Message) -> None:
    """Load what the server sent into a client's low-rank model, in place."""
    receive(model, message.content[_ARRAYS].to_torch_state_dict())


def model_reply(message: Message, model: nn.Module, *, examples: int, **metrics: float) -> Message:
    """Send a trained model back; `examples` says how much it counts."""
    state = ArrayRecord(dict(unwrapped(model).state_dict()))
    numbers = MetricRecord({"num-examples": examples, **metrics})
    return Message(RecordDict({_ARRAYS: state, _METRICS: numbers}), reply_to=message)


def _require_share(share: Any) -> float:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise OptionError(f"tier {share!r} is no share of the full rank in (0, 1].")
    return float(share)
