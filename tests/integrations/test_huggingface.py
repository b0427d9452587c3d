"""Models of transformers, from tiny random configs: what is done to each, and that all works."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maestro_lod as lod
from maestro_lod.errors import CheckpointError, LayerError, MaestroError
from maestro_lod.layers import Experts, LowRank, LowRankTransposedLinear, SharedHead
from maestro_lod.layers.pivoted import PivotedInputs

hf = pytest.importorskip("transformers")
from maestro_lod.integrations import huggingface  # noqa: E402

# DeBERTa's code is scripted when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

Inputs = dict[str, Any]
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def tokens(length: int = 10) -> Tensor:
    return torch.randint(3, 64, (2, length))


def text() -> Inputs:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def classified_text() -> Inputs:
    return {"input_ids": tokens(), "labels": torch.tensor([0, 1])}


def image() -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


@dataclass(frozen=True)
class Zoo:
    """One architecture: how to build it, what it takes, and what of it is left alone."""

    kind: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[], Inputs] = text
    left_alone: dict[str, int] = field(default_factory=dict)
    """Reason, without names and numbers -> how many layers."""
    names: tuple[str, ...] = ()
    """Some of these layers."""
    generates: bool = False

    def __call__(self) -> Any:
        """Build the model with weights so large that every layer counts."""
        model = getattr(hf, self.kind)(getattr(hf, self.config)(**self.options)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(std=max(weight[0].numel(), 2) ** -0.5)
        return model


IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BLOCKS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
BERT = BLOCKS | {"vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0}
LLAMA = BLOCKS | IDS | {"vocab_size": 64, "max_position_embeddings": 32, "num_key_value_heads": 2}
BLOOM = IDS | {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
VIT = BLOCKS | {"image_size": 32, "patch_size": 8}
SEQ2SEQ = IDS | {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "decoder_start_token_id": 3, "forced_eos_token_id": None,
}  # fmt: skip

TIED = "its weight is tied"
EMBEDDING = "a subclass of Embedding, whose forward may differ"
NO_RANK = "no rank saves anything"

ZOO = {
    "gpt2": Zoo(
        "GPT2LMHeadModel", "GPT2Config",
        IDS | {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
        left_alone={TIED: 2}, names=("transformer.wte", "lm_head"), generates=True,
    ),
    "gpt-neox": Zoo(
        "GPTNeoXForCausalLM", "GPTNeoXConfig",
        BLOCKS | IDS | {"vocab_size": 64, "max_position_embeddings": 32}, generates=True,
    ),
    "llama": Zoo("LlamaForCausalLM", "LlamaConfig", LLAMA, generates=True),
    "mistral": Zoo(
        "MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 4}, generates=True
    ),
    "qwen2": Zoo(
        "Qwen2ForCausalLM", "Qwen2Config", LLAMA | {"tie_word_embeddings": True},
        left_alone={TIED: 2}, names=("model.embed_tokens", "lm_head"), generates=True,
    ),
    "qwen3": Zoo("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {"head_dim": 8}, generates=True),
    "gemma": Zoo(
        "GemmaForCausalLM", "GemmaConfig", LLAMA | {"head_dim": 8, "num_key_value_heads": 1},
        left_alone={EMBEDDING: 1, TIED: 1}, names=("model.embed_tokens", "lm_head"),
        generates=True,
    ),
    "phi": Zoo("PhiForCausalLM", "PhiConfig", LLAMA, generates=True),
    "opt": Zoo(
        "OPTForCausalLM", "OPTConfig",
        IDS | {
            "vocab_size": 64, "hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32,
        },
        left_alone={TIED: 2, EMBEDDING: 1}, names=("model.decoder.embed_positions",),
        generates=True,
    ),
    "bloom": Zoo(
        "BloomForCausalLM", "BloomConfig", BLOOM,
        left_alone={
            TIED: 2, "the code of BloomAttention reads its weight": 2,
            "the code of BloomMLP reads its weight": 2,
        },
        names=("transformer.h.0.self_attention.dense", "transformer.h.1.mlp.dense_4h_to_h"),
        generates=True,
    ),
    "falcon": Zoo(
        "FalconForCausalLM", "FalconConfig",
        IDS | {
            "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        },
        left_alone={TIED: 2}, generates=True,
    ),
    "mixtral": Zoo(
        "MixtralForCausalLM", "MixtralConfig", LLAMA | {"num_local_experts": 4},
        left_alone={"MixtralTopKRouter is not a supported kind": 2},
        names=("model.layers.1.mlp.gate",), generates=True,
    ),
    "mamba": Zoo(  # its kernels take the weights of its children
        "MambaForCausalLM", "MambaConfig",
        IDS | {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
        left_alone={
            TIED: 2, "MambaMixer is not a supported kind": 2,
            "the code of MambaMixer reads its weight": 8,
        },
        names=("backbone.layers.0.mixer.conv1d", "backbone.layers.1.mixer.dt_proj"),
        generates=True,
    ),
    "bert": Zoo(
        "BertForMaskedLM", "BertConfig", BERT, left_alone={TIED: 2},
        names=("bert.embeddings.word_embeddings", "cls.predictions.decoder"),
    ),
    "roberta": Zoo(
        "RobertaForSequenceClassification", "RobertaConfig", BERT, classified_text
    ),
    "distilbert": Zoo(
        "DistilBertForSequenceClassification", "DistilBertConfig",
        {
            "vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4,
            "max_position_embeddings": 32,
        },
        classified_text,
    ),
    "albert": Zoo(
        "AlbertForMaskedLM", "AlbertConfig", BERT | {"embedding_size": 16}, left_alone={TIED: 2}
    ),
    "electra": Zoo(
        "ElectraForPreTraining", "ElectraConfig", BERT | {"embedding_size": 16},
        lambda: {"input_ids": tokens(), "labels": torch.randint(0, 2, (2, 10))},
        left_alone={NO_RANK: 1}, names=("discriminator_predictions.dense_prediction",),
    ),
    "deberta-v2": Zoo(
        "DebertaV2ForSequenceClassification", "DebertaV2Config",
        BERT | {
            "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True, "norm_rel_ebd": "layer_norm",
        },
        classified_text, left_alone={"the code of DebertaV2Encoder reads its weight": 1},
        names=("deberta.encoder.rel_embeddings",),
    ),
    "t5": Zoo(
        "T5ForConditionalGeneration", "T5Config",
        {
            "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
            "num_heads": 4, "decoder_start_token_id": 0,
        },
        left_alone={
            TIED: 4, "the code of T5Attention reads its weight": 2,
            "the code of T5DenseActDense reads its weight": 4,
        },
        names=("shared", "decoder.embed_tokens", "encoder.block.0.layer.1.DenseReluDense.wo"),
        generates=True,
    ),
    "bart": Zoo(
        "BartForConditionalGeneration", "BartConfig", SEQ2SEQ | {"max_position_embeddings": 32},
        left_alone={EMBEDDING: 5, TIED: 1}, names=("model.shared", "lm_head"), generates=True,
    ),
    "whisper": Zoo(
        "WhisperForConditionalGeneration", "WhisperConfig",
        SEQ2SEQ | {
            "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
            "suppress_tokens": None, "begin_suppress_tokens": None,
        },
        lambda: {"input_features": torch.randn(2, 8, 32), "labels": tokens()},
        left_alone={TIED: 2, EMBEDDING: 1}, names=("proj_out", "model.decoder.embed_positions"),
        generates=True,
    ),
    "vit": Zoo(
        "ViTForImageClassification", "ViTConfig", VIT, image,
        left_alone={
            "ViTEmbeddings is not a supported kind": 1, "the code of ViTModel reads its weight": 1,
        },
        names=("vit.embeddings", "vit.embeddings.patch_embeddings.projection"),
    ),
    "dinov2": Zoo(
        "Dinov2ForImageClassification", "Dinov2Config", VIT | {"mlp_ratio": 2}, image,
        left_alone={
            "Dinov2Embeddings is not a supported kind": 1,
            "the code of Dinov2PatchEmbeddings reads its weight": 1,
        },
    ),
    "swin": Zoo(
        "SwinForImageClassification", "SwinConfig",
        {
            "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2],
            "num_heads": [2, 4], "window_size": 4, "mlp_ratio": 2.0,
        },
        image, left_alone={"SwinRelativePositionBias is not a supported kind": 4},
    ),
    "convnext": Zoo(
        "ConvNextForImageClassification", "ConvNextConfig",
        {
            "num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1], "image_size": 32,
            "layer_scale_init_value": 0.5,
        },
        image, left_alone={NO_RANK: 2}, names=("convnext.encoder.stages.0.layers.0.dwconv",),
    ),
    "resnet": Zoo(
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}, image,
    ),
    "mobilenet-v2": Zoo(
        "MobileNetV2ForImageClassification", "MobileNetV2Config",
        {"image_size": 32, "depth_multiplier": 0.25}, image, left_alone={NO_RANK: 17},
        names=("mobilenet_v2.layer.0.conv_3x3.convolution",),
    ),
    "segformer": Zoo(
        "SegformerForSemanticSegmentation", "SegformerConfig",
        {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "strides": [2, 2],
            "hidden_sizes": [16, 32], "patch_sizes": [3, 3], "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
        },
        lambda: image() | {"labels": torch.randint(0, 2, (2, 32, 32))}, left_alone={NO_RANK: 2},
    ),
    "clip": Zoo(
        "CLIPModel", "CLIPConfig",
        {
            "text_config": BERT | {"bos_token_id": 1, "eos_token_id": 2}, "vision_config": VIT,
            "projection_dim": 16,
        },
        lambda: {
            "input_ids": tokens(), "pixel_values": image()["pixel_values"],
            "return_loss": True,
        },
        left_alone={
            "the code of CLIPTextEmbeddings reads its weight": 1,
            "the code of CLIPVisionEmbeddings reads its weight": 2,
        },
        names=("text_model.embeddings.position_embedding",),
    ),
    "wav2vec2": Zoo(
        "Wav2Vec2ForCTC", "Wav2Vec2Config",
        BLOCKS | {
            "vocab_size": 16, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "layerdrop": 0.0,
            "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
            "feat_extract_norm": "layer",
        },
        lambda: {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 16, (2, 5))},
        left_alone={"parametrized": 1}, names=("wav2vec2.encoder.pos_conv_embed.conv",),
    ),
}  # fmt: skip


@pytest.fixture(params=ZOO.values(), ids=ZOO.keys())
def zoo(request: pytest.FixtureRequest) -> Zoo:
    return request.param


def tensors(outputs: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """List all floating outputs of a model, however deep they are."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            yield name, outputs
    elif isinstance(outputs, Mapping | list | tuple):
        items = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
        for key, value in items:
            yield from tensors(value, f"{name}.{key}")


@torch.no_grad()
def run(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    torch.manual_seed(0)  # ViT and others sample even in eval mode where a mask is wanted
    return dict(tensors(model.eval()(**inputs, return_dict=True)))


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two outputs relative to the scale of the output."""
    assert one.keys() == other.keys()
    return max(
        float((one[key] - other[key]).abs().max() / one[key].abs().max().clamp(min=1e-6))
        for key in one
    )


def generated(model: Any, inputs: Inputs) -> list[list[int]]:
    known = {key: value for key, value in inputs.items() if key != "labels"}
    return model.eval().generate(**known, **GREEDY).tolist()


def median_importance(model: nn.Module) -> float:
    return torch.cat(list(lod.importance(model).values())).median().item()


def reasons(model: nn.Module) -> dict[str, int]:
    """Count the reasons for leaving layers alone, without names and numbers."""
    return Counter(re.sub(r" \(.*", "", why) for why in lod.survey(model).left_alone.values())


def test_the_zoo_is_large_enough() -> None:
    assert len(ZOO) >= 22


def test_what_is_left_alone_and_why(zoo: Zoo) -> None:
    model = zoo()
    assert reasons(model) == zoo.left_alone
    assert set(zoo.names) <= lod.survey(model).left_alone.keys()
    before = lod.survey(model)
    lod.decompose(model)
    after = lod.survey(model)
    assert after.left_alone == before.left_alone
    assert after.ranks == before.ranks == lod.ranks(model)


def test_decomposing_keeps_outputs_and_generated_tokens(zoo: Zoo) -> None:
    model, inputs = zoo(), zoo.inputs()
    outputs = run(model, inputs)
    written = generated(model, inputs) if zoo.generates else None
    lod.decompose(model)
    assert distance(outputs, run(model, inputs)) < 1e-4
    if zoo.generates:
        assert generated(model, inputs) == written
    with lod.at_ranks(model, 1):  # the low-rank layers are what makes the outputs
        assert distance(outputs, run(model, inputs)) > 1e-2


def test_training_shrinking_saving_and_extracting(zoo: Zoo, tmp_path: Path) -> None:
    model, inputs = lod.decompose(zoo()).train(), zoo.inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train = lod.LoD(model, optimizer, penalty=1e-4)
    before = lod.ranks(model)
    for _ in range(2):
        with train.step():
            loss = model(**inputs).loss + train.penalty_loss()
            loss.backward()
        idle = [n for n, m in model.named_modules() if isinstance(m, LowRank) and m.u.grad is None]
        assert idle in ([], ["model.encoder.embed_positions"])  # Whisper's is frozen
        optimizer.step()
        optimizer.zero_grad()
        # the second step runs on what this leaves, with optimizer state that was cut
        lod.shrink(model, optimizer, threshold=median_importance(model), min_rank=1)
    after = lod.ranks(model)
    assert sum(after.values()) < sum(before.values())
    outputs = run(model, inputs)

    lod.save(model, tmp_path / "model.safetensors")
    torch.manual_seed(1)
    loaded = lod.load(tmp_path / "model.safetensors", into=zoo())
    assert lod.ranks(loaded) == after
    assert distance(outputs, run(loaded, inputs)) == 0.0

    plain = lod.extract(model)
    files = {type(m).__module__ for m in plain.modules()}
    own = {Experts.__module__, PivotedInputs.__module__}  # which import torch alone
    assert {name for name in files if name.startswith("maestro_lod")} <= own
    assert distance(outputs, run(plain, inputs)) < 1e-4
    if zoo.generates:
        assert generated(plain, inputs) == generated(model, inputs)


def test_costs_are_counted(zoo: Zoo) -> None:
    model, inputs = zoo(), zoo.inputs()
    dense = lod.summary(model, inputs)
    low_rank = lod.summary(lod.decompose(model), inputs)
    assert low_rank.dense_macs == dense.dense_macs == dense.macs > 0
    assert low_rank.dense_params == dense.params == zoo().num_parameters()
    assert low_rank.params == model.num_parameters()


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit"])
def test_an_extracted_model_still_gives_hidden_states(name: str) -> None:
    # transformers collects them by hooks, which it installs once, at the first request
    model, inputs = lod.decompose(ZOO[name]()), ZOO[name].inputs()
    wanted = inputs | {"output_hidden_states": True}
    outputs = run(model, wanted)
    assert any("hidden_states.0" in key for key in outputs)
    assert distance(outputs, run(lod.extract(model), wanted)) < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "bart", "whisper", "vit", "clip"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    model, inputs = lod.decompose(ZOO[name]()), ZOO[name].inputs()

    def gradients() -> list[Tensor | None]:
        torch.manual_seed(0)  # for dropout
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = lod.LoD(model.train(), optimizer, seed=3)
        model.zero_grad()
        with train.step():
            model(**inputs).loss.backward()
        return [p.grad for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    for one, other in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(one, other)


def test_grouped_queries_keep_their_shapes() -> None:
    model = lod.decompose(ZOO["llama"]())
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (32, 32)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (16, 32)


def test_conv1d_is_a_transposed_linear_layer() -> None:
    model = ZOO["gpt2"]()
    weight = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    layer = lod.decompose(model).transformer.h[0].attn.c_attn
    assert isinstance(layer, LowRankTransposedLinear)
    assert layer.weight.shape == weight.shape == (32, 96)
    torch.testing.assert_close(layer.weight, weight, rtol=1e-4, atol=1e-5)


def test_experts_as_lists_of_linears_are_decomposed_one_by_one() -> None:
    config = hf.SwitchTransformersConfig(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, num_experts=3,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0,
    )  # fmt: skip
    model = hf.SwitchTransformersForConditionalGeneration(config).eval()
    inputs = text()
    outputs = run(model, inputs)
    lod.decompose(model)
    experts = [name for name in lod.ranks(model) if re.search(r"experts\.expert_\d\.wi", name)]
    assert len(experts) >= 3
    assert distance(outputs, run(model, inputs)) < 1e-4


# -- tied heads ------------------------------------------------------------------------------------


def test_a_tied_head_stays_tied_by_default() -> None:
    model = lod.decompose(ZOO["gpt2"]())
    model.tie_weights()
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "bert", "opt", "whisper"])
def test_a_shared_head_survives_all_of_it(name: str, tmp_path: Path) -> None:
    model, inputs = ZOO[name](), ZOO[name].inputs()
    outputs, params = run(model, inputs), model.num_parameters()
    written = generated(model, inputs) if ZOO[name].generates else None
    lod.decompose(model, tied="share")
    (head,) = (m for m in model.modules() if isinstance(m, SharedHead))
    assert model.get_output_embeddings() is head
    assert head.embedding.u is model.get_input_embeddings().u
    assert distance(outputs, run(model, inputs)) < 1e-4
    if written:
        assert generated(model, inputs) == written

    lod.shrink(model, threshold=median_importance(model), min_rank=1)
    outputs = run(model, inputs)
    huggingface.save_pretrained(model, tmp_path)
    loaded = huggingface.from_pretrained(tmp_path)
    loaded.tie_weights()  # has nothing to do, and does nothing
    assert distance(outputs, run(loaded, inputs)) == 0.0
    assert loaded.num_parameters() == model.num_parameters() < params
    huggingface.save_pretrained(loaded, tmp_path)
    assert huggingface.from_pretrained(tmp_path).num_parameters() == model.num_parameters()
    plain = lod.extract(model)
    assert distance(outputs, run(plain, inputs)) < 1e-4
    if written:
        assert generated(loaded, inputs) == generated(plain, inputs) == generated(model, inputs)


def test_saving_leaves_the_config_of_the_model_alone(tmp_path: Path) -> None:
    model = lod.decompose(ZOO["gpt2"](), tied="share")
    before = model.config.to_dict()
    huggingface.save_pretrained(model, tmp_path)
    assert model.config.to_dict() == before


# -- directories -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5", "vit", "clip", "wav2vec2"])
def test_a_directory_gives_back_the_model(name: str, tmp_path: Path) -> None:
    model, inputs = lod.decompose(ZOO[name](), ranks=0.5), ZOO[name].inputs()
    huggingface.save_pretrained(model.train(), tmp_path / "new" / "directory")
    loaded = huggingface.from_pretrained(tmp_path / "new" / "directory")
    assert type(loaded) is type(model)
    assert not loaded.training
    assert lod.ranks(loaded) == lod.ranks(model)
    assert distance(run(model, inputs), run(loaded, inputs)) == 0.0
    if ZOO[name].generates:
        assert loaded.generation_config.to_dict() == model.generation_config.to_dict()
    files = {"config.json", "model.safetensors"}
    files |= {"modeling_maestro_lod.py"} if name != "mixtral" else set()
    files |= {"generation_config.json"} if ZOO[name].generates else set()
    assert {path.name for path in (tmp_path / "new" / "directory").iterdir()} == files


def test_a_smaller_model_is_read_from_the_same_directory(tmp_path: Path) -> None:
    model, inputs = lod.decompose(ZOO["llama"]()), text()
    huggingface.save_pretrained(model, tmp_path)
    small = huggingface.from_pretrained(tmp_path, ranks=3)
    assert set(lod.ranks(small).values()) == {3}
    with lod.at_ranks(model, 3):
        assert distance(run(model, inputs), run(small, inputs)) < 1e-5


def test_bfloat16_is_kept_unless_another_dtype_is_wanted(tmp_path: Path) -> None:
    config = hf.LlamaConfig(**LLAMA)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    inputs = text()
    outputs = run(model, inputs)
    lod.decompose(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert distance(outputs, run(model, inputs)) < 0.05  # eight bits of mantissa
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train = lod.LoD(model.train(), optimizer, penalty=1e-4)
    with train.step():
        (model(**inputs).loss + train.penalty_loss()).backward()
    optimizer.step()
    huggingface.save_pretrained(model, tmp_path)
    loaded = huggingface.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert distance(run(model, inputs), run(loaded, inputs)) == 0.0
    assert huggingface.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_a_refused_save_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lod.decompose(ZOO["llama"]())
    huggingface.save_pretrained(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(*_: Any) -> None:
        raise CheckpointError("the disk is full.")

    monkeypatch.setattr(huggingface, "write_tensors", full_disk)
    model.config.vocab_size = 7
    with pytest.raises(CheckpointError, match="full"):
        huggingface.save_pretrained(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayerError, match="Sequential is not a transformers model"):
        huggingface.save_pretrained(lod.decompose(nn.Sequential(nn.Linear(8, 8))), tmp_path / "a")
    with pytest.raises(LayerError, match="no low-rank layer"):
        huggingface.save_pretrained(ZOO["llama"](), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write"):
        huggingface.save_pretrained(lod.decompose(ZOO["llama"]()), tmp_path / "file")


def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match) as caught:
            huggingface.from_pretrained(tmp_path)
        assert isinstance(caught.value, MaestroError)
        assert "\n" not in str(caught.value)

    refused("has no config.json")
    huggingface.save_pretrained(lod.decompose(ZOO["llama"]()), tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())

    def write(change: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(good | change))

    write({"architectures": ["NoSuchModel"]})
    refused("names the architecture 'NoSuchModel'")
    write({"architectures": ["LlamaConfig"]})
    refused("names the architecture 'LlamaConfig'")
    write({"architectures": None})
    refused("names the architecture 'none'")
    write({"model_type": "no-such-type"})
    refused("config.json cannot be read")
    (tmp_path / "config.json").write_text("{")
    refused("config.json is damaged")
    write({})
    (tmp_path / "model.safetensors").unlink()
    refused("has no model.safetensors")
