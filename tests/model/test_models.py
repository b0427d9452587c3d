"""The models of the paper: exact counts, and a Transformer that does what it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import maestro_lod as lod
from maestro_lod.baselines.models import VGG19, Transformer, resnet18, transformer_small
from maestro_lod.baselines.models.transformer import (
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    HeadedAttention,
    sinusoids,
)
from maestro_lod.cli.registry import MODELS
from maestro_lod.errors import OptionError
from maestro_lod.layers import lowrank
from maestro_lod.layers.ranks import low_rank_layers

# parameters and MACs of one image, or of one source and one target token
COUNTS = {
    "lenet": (44_426, 281_640),
    "mlp": (1_863_690, 1_861_632),
    "resnet18": (11_173_962, 555_422_720),
    "resnet18_small": (701_466, 8_762_624),
    "resnet50": (25_557_032, 4_089_184_256),
    "vgg19": (20_035_018, 398_136_320),
    "vgg19_small": (1_255_546, 6_305_024),
    "transformer": (53_853_184, 48_914_944),
    "transformer_small": (3_821_824, 2_594_944),
}
IMAGES = {"lenet": (1, 28), "mlp": (1, 28), "resnet50": (3, 224)}  # channels, pixels; or CIFAR's
START, STOP, PADDING = 2, 3, 0
GUIDE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def example_for(name: str, tokens: int = 1) -> Tensor | tuple[Tensor, Tensor]:
    if name.startswith("transformer"):
        ids = torch.ones(1, tokens, dtype=torch.int64)
        return ids, ids
    channels, pixels = IMAGES.get(name, (3, 32))
    return torch.empty(1, channels, pixels, pixels)


def tiny(**options: Any) -> Transformer:
    """A Transformer for tests; in double precision, so that nothing is left to rounding."""
    sizes = {"vocabulary": 14, "width": 12, "heads": 3, "hidden": 20, "layers": 2}
    return Transformer(**(sizes | options)).double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(4, 14, shape)


# -- counts ------------------------------------------------------------------------------------


def test_every_model_has_a_known_count() -> None:
    assert MODELS.keys() == COUNTS.keys()


@pytest.mark.parametrize("name", COUNTS)
def test_models_have_the_known_counts(name: str) -> None:
    with torch.device("meta"):
        result = lod.summary(MODELS[name](), example_for(name))
    assert (result.params, result.macs) == COUNTS[name]


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_documented(name: str) -> None:
    row = next(line for line in GUIDE.splitlines() if line.startswith(f"| `{name}` |"))
    for count in COUNTS[name]:
        assert f"{count:,}" in (MODELS[name].__doc__ or "")
        assert f"| {count:,} |" in row


def test_the_code_of_the_guide_runs() -> None:
    found: dict[str, Any] = {}
    exec(GUIDE.partition("```python\n")[2].partition("```")[0], found)
    assert found["logits"].shape == (3, 12, 9521)
    assert found["ids"].shape[0] == 3 and found["ids"].shape[1] <= 60


@pytest.mark.parametrize(
    ("name", "params"), [("transformer", 48_978_432), ("transformer_small", 2_603_136)]
)
def test_a_tied_output_saves_one_matrix_and_no_macs(name: str, params: int) -> None:
    with torch.device("meta"):
        result = lod.summary(MODELS[name](tie_output=True), example_for(name))
    assert (result.params, result.macs) == (params, COUNTS[name][1])


def test_siblings_have_the_same_layers() -> None:
    with torch.device("meta"):
        for large, small in (("resnet18", "resnet18_small"), ("vgg19", "vgg19_small")):
            layers = [lod.survey(MODELS[name]()).ranks for name in (large, small)]
            assert layers[0].keys() == layers[1].keys()
            assert sum(layers[1].values()) < sum(layers[0].values()) / 3
        few, many = (lod.survey(MODELS[n]()).ranks for n in ("transformer_small", "transformer"))
        assert few.keys() < many.keys()


@pytest.mark.parametrize("build", [resnet18, VGG19])
def test_width_is_that_of_the_first_stage(build: Callable[..., nn.Module]) -> None:
    with torch.device("meta"):
        widths = [m.out_channels for m in build(width=5).modules() if isinstance(m, nn.Conv2d)]
    assert widths[0] == 5 and max(widths) == 8 * 5


# -- the Transformer's row in the paper --------------------------------------------------------


@pytest.fixture(scope="module")
def paper_transformer() -> nn.Module:
    """The paper's Transformer, decomposed; only its shapes count, so the factors are left zero."""

    def zeros(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        groups, m, n = matrices.shape
        return matrices.new_zeros(groups, m, rank), matrices.new_zeros(groups, rank, n)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowrank, "svd_factors", zeros)
        return lod.decompose(Transformer(), skip="embedding")


@pytest.mark.slow
def test_the_full_rank_start_costs_what_the_paper_says(paper_transformer: nn.Module) -> None:
    result = lod.summary(paper_transformer, example_for("transformer", 28))
    assert sum(lod.ranks(paper_transformer).values()) == 49_664
    assert result.dense_macs == 28 * 48_914_944 == 1_369_618_432
    assert result.params / result.dense_params == pytest.approx(1.47, abs=0.005)
    assert result.macs / result.dense_macs == pytest.approx(1.52, abs=0.005)


@pytest.mark.parametrize("seed", range(3))
def test_parameters_follow_from_macs_at_any_ranks(paper_transformer: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in low_rank_layers(paper_transformer).values():
        layer.resize(int(torch.randint(layer.full_rank + 1, (), generator=generator)))
    result = lod.summary(paper_transformer, example_for("transformer", 28))
    embedding, norms_and_biases = 9521 * 512, 63_488
    assert result.params == embedding + result.macs // 28 + norms_and_biases
    assert result.fused_params == embedding + result.fused_macs // 28 + norms_and_biases


def test_layers_of_the_transformer_that_are_left_alone() -> None:
    with torch.device("meta"):
        assert lod.survey(Transformer()).left_alone == {}
        tied = lod.survey(Transformer(tie_output=True))
        assert tied.left_alone.keys() == {"embedding", "output"}
        assert sum(tied.ranks.values()) == 49_664 - 512
        shared = lod.survey(Transformer(tie_output=True), tied="share")
        assert shared.left_alone.keys() == {"output"}
        assert shared.ranks["embedding"] == 512


# -- shapes and options ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in COUNTS if not name.startswith("transformer")])
def test_image_models_give_one_logit_per_class(name: str) -> None:
    channels, pixels = IMAGES.get(name, (3, 32))
    x = torch.randn(2, channels, min(pixels, 64), min(pixels, 64))
    with torch.no_grad():
        logits = MODELS[name](classes=7).eval()(x)
    assert logits.shape == (2, 7) and logits.isfinite().all()


def test_the_transformer_gives_logits_for_every_target_token() -> None:
    logits = transformer_small(31)(torch.ones(3, 6).long(), torch.ones(3, 4).long())
    assert logits.shape == (3, 4, 31) and logits.isfinite().all()


@pytest.mark.parametrize(("width", "heads"), [(10, 3), (9, 3), (8, 0), (8, -2)])
def test_a_width_that_does_not_fit_the_heads_is_refused(width: int, heads: int) -> None:
    message = f"width={width} does not fit heads={heads}.*even and a multiple"
    with pytest.raises(OptionError, match=message):
        Transformer(20, width, heads)


@pytest.mark.parametrize("tie_output", [False, True])
def test_logits_begin_at_a_usual_scale(tie_output: bool) -> None:
    model = transformer_small(tie_output=tie_output).eval()
    with torch.no_grad():
        logits = model(tokens(4, 9), tokens(4, 9))
    assert 0.1 < logits.std() < 1.5
    loss = F.cross_entropy(logits.flatten(0, 1), torch.randint(9521, (36,)))
    assert loss < math.log(9521) + 1


# -- the Transformer against torch's own layers ------------------------------------------------


def put_attention(ours: HeadedAttention, theirs: nn.MultiheadAttention) -> None:
    parts = [ours.query.weight, ours.key.weight, ours.value.weight]
    theirs.in_proj_weight.copy_(torch.cat(parts))
    theirs.out_proj.weight.copy_(ours.output.weight)


def put_feed_forward(ours: FeedForward, theirs: nn.Module) -> None:
    theirs.linear1.load_state_dict(ours.up.state_dict())
    theirs.linear2.load_state_dict(ours.down.state_dict())


@torch.no_grad()
def test_layers_compute_what_those_of_torch_do() -> None:
    width, heads, hidden = 12, 3, 20
    ours = EncoderLayer(width, heads, hidden, 0.1), DecoderLayer(width, heads, hidden, 0.1)
    options: dict[str, Any] = {"batch_first": True, "layer_norm_eps": 1e-6}
    encoder = nn.TransformerEncoderLayer(width, heads, hidden, **options)
    decoder = nn.TransformerDecoderLayer(width, heads, hidden, **options)
    for mine, theirs in zip(ours, (encoder, decoder), strict=True):
        put_attention(mine.attention, theirs.self_attn)
        put_feed_forward(mine.feed_forward, theirs)
    put_attention(ours[1].cross_attention, decoder.multihead_attn)
    for module in (*ours, encoder, decoder):
        module.double().eval()
    source, target = torch.randn(4, 7, width).double(), torch.randn(4, 5, width).double()
    real = torch.arange(7) < torch.tensor([7, 3, 5, 1])[:, None]
    mask = real[:, None, None, :]

    encoded = ours[0](source, mask)
    expected = encoder(source, src_key_padding_mask=~real)
    torch.testing.assert_close(encoded[real], expected[real])

    decoded, _ = ours[1](target, ours[1].cross_attention.keys_values(encoded), mask)
    causal = nn.Transformer.generate_square_subsequent_mask(5).double()
    expected = decoder(
        target, encoded, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=~real
    )
    torch.testing.assert_close(decoded, expected)


@given(first=st.integers(0, 300), count=st.integers(1, 9), half=st.integers(1, 20))
def test_positions_are_sinusoids(first: int, count: int, half: int) -> None:
    codes = sinusoids(first, count, like=torch.empty(1, 2 * half))
    assert codes.shape == (count, 2 * half)
    for t in (0, count - 1):
        for i in (0, half - 1):
            angle = (first + t) / 10_000 ** (2 * i / (2 * half))
            expected = torch.tensor([math.sin(angle), math.cos(angle)])
            torch.testing.assert_close(codes[t, 2 * i : 2 * i + 2], expected, rtol=0, atol=1e-4)


# -- what a token may see ----------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("changed", range(6))
def test_a_target_token_changes_only_what_comes_after(changed: int) -> None:
    model, source, target = tiny(), tokens(2, 5), tokens(2, 6)
    other = target.clone()
    other[:, changed] = (target[:, changed] - 3) % 10 + 4
    before, after = model(source, target), model(source, other)
    torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=0)
    moved = (after[:, changed:] - before[:, changed:]).abs().amax(-1)
    assert (moved > 1e-6).all()


@torch.no_grad()
def test_every_source_token_and_its_place_matter() -> None:
    model, source, target = tiny(), torch.tensor([[4, 5, 6, 7]]), tokens(1, 3)
    before = model(source, target)
    for other in ([9, 5, 6, 7], [4, 5, 6, 9], [5, 4, 6, 7], [4, 5, 7, 6], [4, 5, 6, PADDING]):
        moved = (model(torch.tensor([other]), target) - before).abs().amax(-1)
        assert (moved > 1e-6).all(), other


@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
    more=st.integers(0, 3),
    padding=st.sampled_from([0, 13]),
)
@torch.no_grad()
def test_padding_changes_nothing(lengths: list[tuple[int, int]], more: int, padding: int) -> None:
    torch.manual_seed(0)
    model = tiny(padding=padding)
    pairs = [(torch.randint(4, 13, (s,)), torch.randint(4, 13, (t,))) for s, t in lengths]
    columns = [nn.utils.rnn.pad_sequence(list(c), True, padding) for c in zip(*pairs, strict=True)]
    source, target = (F.pad(c, (0, more), value=padding) for c in columns)
    together = model(source, target)
    for logits, (s, t) in zip(together, pairs, strict=True):
        torch.testing.assert_close(logits[: len(t)], model(s[None], t[None])[0])


@torch.no_grad()
def test_a_source_of_padding_alone_gives_numbers() -> None:
    source = torch.tensor([[4, 5, 6], [PADDING] * 3])
    assert tiny()(source, tokens(2, 4)).isfinite().all()


# -- the tied output ---------------------------------------------------------------------------


@torch.no_grad()
def test_a_tied_output_is_the_embedding_scaled_down() -> None:
    tied, untied = tiny(tie_output=True), tiny()
    assert tied.output.weight is tied.embedding.weight
    assert untied.output.weight is not untied.embedding.weight
    untied.load_state_dict(tied.state_dict())
    source, target = tokens(2, 5), tokens(2, 4)
    torch.testing.assert_close(tied(source, target), untied(source, target) * 12**-0.5)


# -- low rank ----------------------------------------------------------------------------------

DECOMPOSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "everything": ({}, {}),
    "embedding skipped": ({}, {"skip": "embedding"}),
    "tied output": ({"tie_output": True}, {}),
    "tied output shared": ({"tie_output": True}, {"tied": "share"}),
}


@torch.no_grad()
@pytest.mark.parametrize(("options", "how"), DECOMPOSED.values(), ids=DECOMPOSED.keys())
def test_a_decomposed_transformer_computes_the_same(
    options: dict[str, Any], how: dict[str, Any]
) -> None:
    model, source, target = tiny(**options), tokens(3, 5), tokens(3, 4)
    before = model(source, target)
    lod.decompose(model, **how)
    torch.testing.assert_close(model(source, target), before)
    with lod.at_ranks(model, 0.4):
        small = model(source, target)
    assert not torch.allclose(small, before, atol=1e-3)
    torch.testing.assert_close(lod.extract(model, ranks=0.4)(source, target), small)


@torch.no_grad()
@pytest.mark.parametrize(("options", "how"), DECOMPOSED.values(), ids=DECOMPOSED.keys())
def test_a_saved_transformer_loads_at_any_size(
    options: dict[str, Any], how: dict[str, Any], tmp_path: Path
) -> None:
    model, source, target = lod.decompose(tiny(**options), **how), tokens(3, 5), tokens(3, 4)
    lod.save(model, tmp_path / "model.safetensors")
    loaded = lod.load(tmp_path / "model.safetensors", into=tiny(**options), ranks=3)
    with lod.at_ranks(model, 3):
        torch.testing.assert_close(loaded(source, target), model(source, target))


# -- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tie_output", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
def test_every_parameter_gets_a_gradient(decomposed: bool, tie_output: bool) -> None:
    model = tiny(tie_output=tie_output).train()
    if decomposed:
        lod.decompose(model, skip=None if tie_output else "embedding")
    logits = model(tokens(5, 6), tokens(5, 7))
    F.cross_entropy(logits.flatten(0, 1), tokens(35)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("name", ["resnet18_small", "vgg19_small"])
def test_small_siblings_take_a_step_in_either_memory_layout(name: str) -> None:
    losses = []
    x, y = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = lod.decompose(MODELS[name](), ranks=0.25).to(memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            loss = F.cross_entropy(model(x.contiguous(memory_format=layout)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_dropout_acts_in_training_alone() -> None:
    model, source, target = tiny(dropout=0.5), tokens(2, 5), tokens(2, 4)
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    assert not torch.allclose(model(source, target), model(source, target))
    without = tiny(dropout=0.0).train()
    assert torch.equal(without(source, target), without(source, target))


def test_a_transformer_learns_to_turn_sentences_around() -> None:
    model = lod.decompose(Transformer(12, 32, 4, 64, 1, dropout=0.0), skip="embedding")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train = lod.LoD(model, optimizer, penalty=1e-6, proximal=True, seed=0)
    end = torch.full((64, 1), STOP)
    for _ in range(250):
        source = torch.randint(4, 12, (64, 4))
        target = torch.cat((end - 1, source.flip(1), end), 1)
        with train.step():
            logits = model(source, target[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    train.end_epoch()
    source = torch.randint(4, 12, (200, 4))
    made = model.eval().translate(source, START, STOP, 9)
    expected = torch.cat((source.flip(1), torch.full((200, 1), STOP)), 1)
    right = (made[:, :5] == expected).all(1).double().mean()
    assert right > 0.95


# -- translation -------------------------------------------------------------------------------


@torch.no_grad()
def step_by_step(model: nn.Module, sentence: Tensor, stop: int, longest: int) -> list[int]:
    """Translate one sentence without padding and without remembering anything."""
    made: list[int] = []
    while len(made) < longest and stop not in made:
        logits = model(sentence[None], torch.tensor([[START, *made]]))
        made.append(int(logits[0, -1].argmax()))
    return made


def a_good_stop(ids: Tensor) -> int:
    """Return the token that ends these sentences at the most different places."""
    rows = ids.tolist()
    return max(range(14), key=lambda token: len({r.index(token) for r in rows if token in r}))


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "dense": lambda model: model,
    "decomposed": lod.decompose,
    "at ranks": lod.decompose,
    "extracted": lambda model: lod.extract(lod.decompose(model), ranks=0.5),
}


@pytest.mark.parametrize("tie_output", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_translation_is_what_one_would_do_step_by_step(form: str, tie_output: bool) -> None:
    lengths = torch.arange(20) % 6 + 1
    source = tokens(20, 6).where(torch.arange(6) < lengths[:, None], PADDING)
    model = FORMS[form](tiny(tie_output=tie_output))
    with lod.at_ranks(model, 0.5) if form == "at ranks" else nullcontext():
        stop = a_good_stop(model.translate(source, START, -1, 10))
        made = model.translate(source, START, stop, 10)
        sentences = zip(source, lengths, strict=True)
        expected = [step_by_step(model, ids[:length], stop, 10) for ids, length in sentences]
    padded = [ids + [PADDING] * (made.shape[1] - len(ids)) for ids in expected]
    assert made.tolist() == padded
    assert len({len(ids) for ids in expected}) > 1  # they did end at different places


def test_what_follows_the_end_is_padding() -> None:
    model, source = tiny(padding=1), tokens(30, 5)
    stop = a_good_stop(model.translate(source, START, -1, 10))
    made = model.translate(source, START, stop, 10)
    ended = (made == stop).cumsum(1) > 0
    after = F.pad(ended[:, :-1], (1, 0))
    assert after.any() and (made[after] == 1).all()


class Scripted(nn.Module):
    """An output layer that says one token, and after so many calls another."""

    def __init__(self, first: int, calls: int, then: int) -> None:
        super().__init__()
        self.first, self.calls, self.then = first, calls, then

    def forward(self, x: Tensor) -> Tensor:
        self.calls -= 1
        token = self.first if self.calls >= 0 else self.then
        return F.one_hot(torch.full(x.shape[:-1], token), 14).double()


def test_translation_ends_when_all_sentences_do() -> None:
    model = tiny()
    model.output = Scripted(7, 3, STOP)
    made = model.translate(tokens(2, 5), START, STOP, 100)
    assert made.tolist() == [[7, 7, 7, STOP]] * 2
    assert model.output.calls == -1


def test_translation_ends_after_the_longest() -> None:
    model = tiny()
    model.output = Scripted(7, 100, STOP)
    assert model.translate(tokens(2, 5), START, STOP, 6).tolist() == [[7] * 6] * 2
    assert model.translate(tokens(2, 5), START, STOP, 0).shape == (2, 0)


def test_no_sentence_is_translated_to_none() -> None:
    made = tiny().translate(tokens(0, 5), START, STOP, 6)
    assert made.shape[0] == 0 and made.dtype == torch.int64


def test_translation_keeps_no_graph() -> None:
    model = tiny()
    model.output = nn.Sequential(model.output, nn.Identity())
    seen: list[bool] = []
    model.output[1].register_forward_hook(lambda _, __, out: seen.append(out.requires_grad))
    model.translate(tokens(2, 5), START, STOP, 3)
    assert seen and not any(seen)
