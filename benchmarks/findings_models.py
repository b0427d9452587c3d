"""Findings 11 to 13: models that were decomposed by half, not counted, or refused without need."""

from __future__ import annotations

from typing import Any

import torch
from probes import expect, probe, works
from torch import Tensor, nn
from torch.nn import functional as F


def left_dense(model: nn.Module) -> float:
    """Decompose a model and return the share of its matrix weights that stay as they are."""
    from maestro_lod import decompose

    before = {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1}
    decompose(model)
    left = sum(before.get(name, 0) for name, _ in model.named_parameters())
    return left / sum(before.values())


def nothing_left_dense(model: nn.Module, least: float = 0.0) -> None:
    share = left_dense(model)
    expect(share <= least, f"{100 * share:.0f} % of the matrix weights stay dense")


def macs_are(model: nn.Module, example: Any, by_hand: int) -> None:
    from maestro_lod import summary

    found: list[Any] = []
    works(lambda: found.append(summary(model, example)))
    expect(found[0].macs == by_hand, f"{found[0].macs} MACs are counted of {by_hand}")


# -- 11: experts -----------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
PER_TOKEN = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 32 * 4 + 2 * 3 * 32 * 48) + 32 * 64


def mixtral() -> nn.Module:
    import transformers

    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    model: nn.Module = transformers.MixtralForCausalLM(config).eval()
    return model


@probe(
    11,
    "the experts of Mixtral stay dense",
    "layers/test_experts.py::test_nearly_all_matrix_weights_are_decomposed",
)
def _() -> None:
    nothing_left_dense(mixtral(), least=0.1)


@probe(
    11,
    "the experts of Qwen-MoE stay dense",
    "layers/test_experts.py::test_nearly_all_matrix_weights_are_decomposed",
)
def _() -> None:
    import transformers

    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = transformers.Qwen2MoeConfig(**SIZES, **options, shared_expert_intermediate_size=24)
    nothing_left_dense(transformers.Qwen2MoeForCausalLM(config), least=0.1)


# -- 12: MACs --------------------------------------------------------------------------------------


@probe(
    12,
    "MACs of Mixtral cannot be counted, or are too few",
    "layers/test_experts.py::test_macs_are_those_of_a_count_by_hand",
)
def _() -> None:
    ids = torch.randint(3, 64, (2, 12))
    macs_are(mixtral(), {"input_ids": ids, "use_cache": False}, ids.numel() * PER_TOKEN)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.stack)


@probe(
    12,
    "products with stacked weights are not counted",
    "model/test_cost.py::test_batched_products_with_weights_count_and_those_of_activations_do_not",
)
def _() -> None:
    macs_are(Stacked(), torch.empty(3, 7, 4), 3 * 7 * 4 * 5)


class Differentiating(nn.Module):
    """Asks for gradients in its forward, and changes a view of what needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y: Tensor = self.fc(x)
            for part in y.split(3, dim=-1):
                part.add_(1.0)
            return y


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else x


@probe(
    12,
    "models that ask for gradients in their forward are not counted",
    "model/test_cost.py::test_models_that_need_values_are_counted_on_the_example_itself",
)
def _() -> None:
    macs_are(Differentiating(), torch.ones(2, 6), 2 * 36)


@probe(
    12,
    "models whose control flow reads values are not counted",
    "model/test_cost.py::test_models_that_need_values_are_counted_on_the_example_itself",
)
def _() -> None:
    macs_are(ReadsValues(), torch.ones(2, 6), 2 * 36)


# -- 13: refused without need ----------------------------------------------------------------------


class Tree(nn.Module):
    """Has a part that happens to be called as PEFT calls what it wraps, as timm's DLA has."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Sequential(nn.Linear(12, 12), nn.ReLU())
        self.level = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.level(self.base_layer(x))
        return y


@probe(
    13,
    "a part called `base_layer` is taken for PEFT's",
    "model/test_survey.py::test_a_part_that_happens_to_be_called_base_layer_is_no_adapter",
)
def _() -> None:
    works(lambda: nothing_left_dense(Tree()))


class Versioned(nn.Module):
    """Loads only what says of which version it is, as torchvision's MNASNet does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def _load_from_state_dict(self, state: Any, prefix: str, about: Any, *rest: Any) -> None:
        if about.get("version") != 2:
            raise ValueError("version is missing")
        super()._load_from_state_dict(state, prefix, about, *rest)


@probe(
    13,
    "models that ask for the version of their state are not loaded",
    "model/test_checkpoint.py::test_models_that_ask_for_the_version_of_their_state_are_loaded",
)
def _() -> None:
    from maestro_lod import decompose, load, save

    save(decompose(Versioned()), "model.safetensors")
    works(lambda: load("model.safetensors", into=Versioned()))


class ReadsArgument(nn.Module):
    """Uses the weight of an embedding that it is handed, as Perceiver's output does."""

    def forward(self, x: Tensor, table: nn.Embedding) -> Tensor:
        return x @ table.weight.t()


class HandsOver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), ReadsArgument()

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.table(ids), self.table)
        return y


@probe(
    13,
    "an embedding that is handed to a layer breaks what `extract` returns",
    "model/test_survey.py::test_a_layer_handed_to_code_that_reads_its_weight_is_left_alone",
)
def _() -> None:
    from maestro_lod import decompose, extract

    model = nn.ModuleDict({"inner": HandsOver(), "other": nn.Linear(8, 8)})
    works(lambda: extract(decompose(model), ranks=2)["inner"](torch.arange(4)))


class FixedConv(nn.Conv3d):
    """Only made in another way, as torchvision's video models have them."""

    def __init__(self) -> None:
        super().__init__(12, 12, (1, 3, 3), padding=(0, 1, 1), bias=False)


@probe(
    13,
    "subclasses that inherit `forward` stay dense",
    "model/test_survey.py::test_subclasses_that_only_are_made_differently_are_decomposed",
)
def _() -> None:
    nothing_left_dense(nn.Sequential(FixedConv(), nn.Conv3d(12, 12, 1)))


class NeverRead(nn.Module):
    """Has a helper that reads a weight, and that the forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def fused(self, x: Tensor) -> Tensor:
        return F.linear(x, self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(x)
        return y


@probe(
    13,
    "a helper that nobody calls keeps a layer dense",
    "model/test_survey.py::test_a_layer_whose_weight_other_code_reads_is_left_alone",
)
def _() -> None:
    nothing_left_dense(nn.Sequential(NeverRead(), nn.Linear(8, 8)))


class ForeignLinear(nn.Module):
    """A linear layer as torch_geometric has it."""

    def __init__(self) -> None:
        super().__init__()
        self.in_channels = self.out_channels = 8
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@probe(
    13,
    "linear layers of torch_geometric stay dense",
    "model/test_survey.py::test_linear_layers_of_torch_geometric_are_decomposed",
)
def _() -> None:
    place = {"__module__": "torch_geometric.nn.dense.linear"}
    linear = type("Linear", (ForeignLinear,), place)
    nothing_left_dense(nn.Sequential(linear(), nn.Linear(8, 8)))
