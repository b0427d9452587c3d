"""Stacked experts over low-rank stacks are the original ones in all they compute."""

from __future__ import annotations

import copy
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.deploy.export import open_runner
from maestro_lod.layers import Experts, LowRankStack, SortedExperts, Stack, StackedProduct
from maestro_lod.layers.experts import ROUTED, apply_stacked
from maestro_lod.model.checkpoint import save_plain
from maestro_lod.model.inputs import ModelInputs
from maestro_lod.pretrained.compression import compress

hf = pytest.importorskip("transformers")

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MOE = BASE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = MOE | {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": BASE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": MOE | {"shared_expert_intermediate_size": 24},
    "Qwen3Moe": MOE | {"head_dim": 8},
    "Olmoe": MOE,
    "DeepseekV2": LATENT | {"n_shared_experts": 1, "topk_method": "greedy"},
    "DeepseekV3": LATENT | {"n_shared_experts": 1},
    "GptOss": BASE | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 8},
    "Jamba": BASE | {
        "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4,
        "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False,
    },
}  # fmt: skip
COMPRESSED: dict[str, dict[str, Any]] = {
    **{name: options for name, options in FAMILIES.items() if name != "Qwen2Moe"},
    "Llama4": BASE | {
        "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1,
        "head_dim": 8, "interleave_moe_layer_step": 1, "attention_chunk_size": 32,
    },
    "GraniteMoe": BASE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Ernie4_5_Moe": MOE | {
        "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "head_dim": 8,
    },
    "MiniMax": BASE | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "block_size": 8,
        "layer_types": ["full_attention", "linear_attention"],
    },
    "AriaText": BASE | {
        "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "head_dim": 8,
    },
}  # fmt: skip
IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]


def model_of(family: str, **options: Any) -> Any:
    """Build a tiny model with weights and biases so large that every expert counts."""
    kind = "Llama4Text" if family == "Llama4" else family
    config = getattr(hf, f"{kind}Config")(**((FAMILIES | COMPRESSED)[family] | options))
    model = getattr(hf, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith("bias"):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def tokens(length: int = 12) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 64, (2, length)), "use_cache": False}


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    return model.eval()(**inputs).logits


def assert_same(one: Tensor, other: Tensor) -> None:
    """Compare outputs of whole models: relative to their scale, as rounding errors are."""
    assert float((one - other).abs().max() / other.abs().max()) < 1e-4


def stacks(model: nn.Module) -> dict[str, LowRankStack]:
    return {n: m for n, m in model.named_modules() if isinstance(m, LowRankStack)}


def share(model: nn.Module) -> float:
    """Return the share of matrix weights that decompose makes low-rank."""
    whole = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    rows = lod.survey(model).layers
    return sum(torch.Size(row.shape).numel() for row in rows if row.rank is not None) / whole


# -- what is computed --------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_the_original(family: str, implementation: str) -> None:
    model = model_of(family)
    model.set_experts_implementation(implementation)
    for length in (1, 12):  # few rows are gathered, many are split among the experts
        inputs = tokens(length)
        expected = logits(model, inputs)
        low_rank = lod.decompose(copy.deepcopy(model))
        assert stacks(low_rank)
        assert_same(logits(low_rank, inputs), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_original(family: str) -> None:
    model, inputs = model_of(family), tokens()
    model.set_experts_implementation("eager")
    low_rank = lod.decompose(copy.deepcopy(model), only="*.experts")
    for each in (model, low_rank):
        each(**inputs, labels=inputs["input_ids"]).loss.backward()
    expected = dict(model.named_parameters())
    for name, parameter in low_rank.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name].grad, **CLOSE)
        else:
            assert parameter.grad is not None, name


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "DeepseekV3"])
def test_nearly_all_matrix_weights_are_decomposed(family: str) -> None:
    assert share(model_of(family)) >= 0.9


def test_llama_4_sorts_its_rows_beforehand() -> None:
    config = hf.Llama4TextConfig(
        **BASE, intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1, head_dim=8
    )
    dense = hf.models.llama4.modeling_llama4.Llama4TextExperts(config)
    for parameter in dense.parameters():
        nn.init.normal_(parameter, std=0.2)
    rows = torch.randn(4 * 6, 32)
    opened = lod.decompose(copy.deepcopy(dense))
    assert isinstance(opened, SortedExperts)
    torch.testing.assert_close(opened(rows), dense(rows), **CLOSE)
    assert lod.summary(opened, rows).dense_macs == lod.summary(dense, rows).macs == 24 * 3 * 32 * 48


def test_each_row_meets_its_own_expert_either_way() -> None:
    stack, rows = torch.randn(3, 5, 4), torch.randn(8, 4)
    experts = torch.tensor([0, 0, 0, 2, 2, 2, 2, 2])  # one has none
    expected = torch.stack([F.linear(x, stack[e]) for x, e in zip(rows, experts, strict=True)])
    torch.testing.assert_close(apply_stacked(rows, experts, stack), expected)
    torch.testing.assert_close(apply_stacked(rows[:2], experts[:2], stack), expected[:2])


def test_every_family_is_spelled_as_transformers_does() -> None:
    known = 0
    for family, name in ROUTED.items():
        try:
            code = import_module(f"transformers.models.{family}.modeling_{family}")
        except ImportError:  # families come and go with the versions
            continue
        known += 1
        assert hasattr(code, f"{name}Experts"), family
    assert known > 20


# -- what it costs -----------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_macs_are_those_of_a_count_by_hand(family: str, implementation: str) -> None:
    model, inputs = model_of(family), tokens()
    model.set_experts_implementation(implementation)
    inner = 48 if family == "Mixtral" else 24
    positions, top_k, experts = inputs["input_ids"].numel(), 2, 4
    per_layer = 2 * 32 * 32 + 2 * 16 * 32 + 32 * experts + top_k * 3 * 32 * inner
    by_hand = positions * (2 * per_layer + 32 * 64)
    low_rank = lod.decompose(copy.deepcopy(model), ranks=0.25)
    assert lod.summary(model, inputs).macs == by_hand
    summary = lod.summary(low_rank, inputs)
    assert summary.dense_macs == by_hand
    gate_up = next(row for row in summary.layers if row.name.endswith("gate_up_proj"))
    assert gate_up.macs == positions * top_k * 8 * (32 + 2 * inner)
    assert gate_up.params == experts * 8 * (32 + 2 * inner)
    plain = lod.extract(low_rank)
    assert lod.summary(plain, inputs).macs == summary.fused_macs
    assert sum(p.numel() for p in plain.parameters()) == summary.fused_params


# -- its life ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "GptOss"])
def test_it_trains_shrinks_is_stored_and_deployed(family: str, tmp_path: Path) -> None:
    model, inputs = lod.decompose(model_of(family)), tokens()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    training = lod.LoD(model, optimizer, penalty=3.0, proximal=True, example=inputs)
    first = {name: layer.rank for name, layer in stacks(model).items()}
    losses = []
    for _ in range(3):
        for _ in range(4):
            with training.step():
                loss = model.train()(**inputs, labels=inputs["input_ids"]).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        training.end_epoch()
    assert losses[-1] < losses[0]
    assert any(layer.rank < first[name] for name, layer in stacks(model).items())

    path = tmp_path / "model.safetensors"
    lod.save(model, path)
    loaded = lod.load(path, into=model_of(family))
    assert lod.ranks(loaded) == lod.ranks(model)
    torch.testing.assert_close(logits(loaded, inputs), logits(model, inputs), rtol=0, atol=0)
    smaller = lod.load(path, into=model_of(family), ranks=2)
    small = lod.extract(model, ranks=2)
    assert_same(logits(smaller, inputs), logits(small, inputs))
    again = pickle.loads(pickle.dumps(small))
    torch.testing.assert_close(logits(again, inputs), logits(small, inputs), rtol=0, atol=0)
    assert not any(isinstance(m, LowRankStack) for m in small.modules())


@pytest.mark.parametrize("family", COMPRESSED)
@pytest.mark.filterwarnings("ignore:no calibration sample reached")
def test_it_is_compressed_extracted_saved_and_loaded(family: str, tmp_path: Path) -> None:
    model, inputs = model_of(family), tokens()
    dense = copy.deepcopy(model)
    done = compress(model, [tokens() for _ in range(3)], max_params=0.6)
    assert done.params <= 0.6 * done.dense_params
    assert stacks(model).keys() <= done.ranks.keys()
    assert {name.rpartition(".")[2] for name in stacks(model)} == {"gate_up_proj", "down_proj"}
    expected = logits(model, inputs)
    assert_same(logits(lod.extract(model), inputs), expected)
    lod.save(model, tmp_path / "model.safetensors")
    loaded = lod.load(tmp_path / "model.safetensors", into=dense)
    torch.testing.assert_close(logits(loaded, inputs), expected, rtol=0, atol=0)


def test_an_exported_size_loads_into_the_dense_model(tmp_path: Path) -> None:
    model, inputs = lod.decompose(model_of("GptOss")), tokens()
    ranks = {name: 3 if "gate_up" in name else 32 for name in stacks(model)}
    small = lod.extract(model, ranks)
    kinds = [type(m) for m in small.modules() if isinstance(m, Stack | StackedProduct)]
    assert kinds == [StackedProduct, Stack] * 2  # of the second, dense is smaller
    save_plain(small, tmp_path / "small.safetensors")
    loaded = lod.load(tmp_path / "small.safetensors", into=model_of("GptOss"))
    torch.testing.assert_close(logits(loaded, inputs), logits(small, inputs), rtol=0, atol=0)


def test_at_full_rank_the_original_comes_back() -> None:
    model, inputs = model_of("GptOss"), tokens()
    kind = type(model.model.layers[0].mlp.experts)
    low_rank = lod.decompose(copy.deepcopy(model))
    experts = low_rank.model.layers[0].mlp.experts
    assert isinstance(experts, Experts)
    assert experts.num_experts == 4  # code of a model may ask
    for plain in (lod.extract(low_rank), lod.fuse(low_rank)):
        assert type(plain.model.layers[0].mlp.experts) is kind
        assert plain.state_dict().keys() == model.state_dict().keys()
        assert_same(logits(plain, inputs), logits(model, inputs))


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_a_second_call_decomposes_the_other_stack(family: str) -> None:
    model, inputs = model_of(family), tokens()
    expected = logits(model, inputs)
    for stack in ("gate_up_proj", "down_proj"):
        only = f"*.experts.{stack}"
        lod.decompose(model, only=only, calibration=lod.calibrate(model, [inputs], only=only))
        assert f"model.layers.1.mlp.experts.{stack}" in lod.ranks(model)
    assert len(stacks(model)) == 4
    assert_same(logits(model, inputs), expected)


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_it_is_exported_as_one_graph_that_fits_any_batch_and_choice_of_experts(
    suffix: str, tmp_path: Path
) -> None:
    model = lod.extract(lod.decompose(model_of("Mixtral"), ranks=4))
    experts = model.model.layers[0].mlp.experts

    def call(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(rows, 32), torch.randint(0, 4, (rows, 2)), torch.rand(rows, 2)

    path = tmp_path / f"experts.{suffix}"
    assert lod.export(experts, path, example=call(2)).batch is None
    for rows in (1, 3, 12):
        inputs = call(rows)
        (answer,) = open_runner(path)(ModelInputs(inputs, {}))
        torch.testing.assert_close(answer, experts(*inputs), **CLOSE)


class _Scores(nn.Module):
    """A causal language model as a function of token ids alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return scores


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
@pytest.mark.filterwarnings("ignore:no calibration sample reached")
def test_a_whole_model_is_compressed_and_exported_for_any_batch(
    suffix: str, tmp_path: Path
) -> None:
    model = _Scores(model_of("Mixtral"))
    compress(model, [torch.randint(64, (2, 8)) for _ in range(4)], max_params=0.6)
    path = tmp_path / f"model.{suffix}"
    assert lod.export(lod.extract(model), path, example=torch.randint(64, (2, 8))).batch is None
    for rows in (1, 3):
        ids = torch.randint(64, (rows, 8))
        (answer,) = open_runner(path)(ModelInputs((ids,), {}))
        torch.testing.assert_close(answer, model(ids), **CLOSE)


# -- what is left alone ------------------------------------------------------------------------


def test_experts_that_are_not_as_expected_are_left_alone() -> None:
    model = model_of("Mixtral")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    first.act_fn = nn.PReLU()
    second._is_expert_parallel = True
    reasons = lod.survey(model).left_alone
    assert reasons["model.layers.0.mlp.experts"] == "its act_fn has weights of its own"
    assert reasons["model.layers.1.mlp.experts"] == "its experts are split over devices"
