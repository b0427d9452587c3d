"""Attention over low-rank projections is torch's own, option by option, and it shrinks."""

from __future__ import annotations

import ast
import copy
import itertools
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import maestro_lod as lod
from maestro_lod.layers import Attention, LowRank, LowRankLinear
from maestro_lod.layers import attention as attention_module
from maestro_lod.layers.pivoted import PivotedInputs

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
E, HEADS, L, S, N = 8, 2, 3, 4, 2
PARTS = ["q", "k", "v", "out_proj"]


def attention(**options: Any) -> nn.MultiheadAttention:
    """torch's layer, with biases that are not zero."""
    layer = nn.MultiheadAttention(E, HEADS, **options)
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return layer


def low_rank_copy(model: nn.Module, **options: Any) -> nn.Module:
    return lod.decompose(copy.deepcopy(model), **options)


def low_rank_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, LowRank)]


def causal_mask(length: int) -> Tensor:
    return torch.full((length, length), -math.inf).triu(1)


def quietly(call: Callable[[], Any]) -> Any:
    """Call what torch warns of: nested tensors, masks of different types."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


# -- every option ------------------------------------------------------------------------------

CONSTRUCTORS = [
    {"batch_first": first, "add_bias_kv": kv, "add_zero_attn": zero, "bias": bias} | sizes
    for first, kv, zero, bias in itertools.product((False, True), repeat=4)
    for sizes in ({}, {"kdim": 6, "vdim": 5})
]
WEIGHTS = [
    {"need_weights": False},
    {"need_weights": True, "average_attn_weights": True},
    {"need_weights": True, "average_attn_weights": False},
]
MASKS = [  # attn_mask and key_padding_mask; torch wants both bool or both float
    (None, None), (None, "bool"), (None, "float"),
    ("bool 2-D", None), ("bool 2-D", "bool"), ("bool 3-D", None), ("bool 3-D", "bool"),
    ("float 2-D", None), ("float 2-D", "float"), ("float 3-D", None), ("float 3-D", "float"),
    ("causal", None), ("causal", "float"),
]  # fmt: skip
CALLS = list(itertools.product(WEIGHTS, MASKS, (True, False)))


def attn_mask_of(kind: str | None, rows: int, source: int) -> Tensor | None:
    if kind is None:
        return None
    if kind == "causal":
        return causal_mask(L)
    mask = torch.randn((L, source) if "2-D" in kind else (rows * HEADS, L, source))
    if "bool" in kind:
        mask = mask > 0.5
        mask[..., 0] = False  # something is left to attend to
    return mask


def padding_of(kind: str | None, rows: int, source: int) -> Tensor | None:
    if kind == "float":
        return torch.randn(rows, source)
    return None if kind is None else (torch.arange(source) >= source - 1).expand(rows, -1)


def arguments(
    options: dict[str, Any], weights: dict[str, Any], masks: tuple[Any, Any], batched: bool
) -> tuple[list[Tensor], dict[str, Any]]:
    """Make the inputs and masks of one call."""
    source = L if masks[0] == "causal" else S
    rows = N if batched else 1

    def inputs(length: int, dim: int) -> Tensor:
        batch = (N, length, dim) if options["batch_first"] else (length, N, dim)
        return torch.randn(batch if batched else (length, dim), requires_grad=True)

    shapes = (L, E), (source, options.get("kdim", E)), (source, options.get("vdim", E))
    padding = padding_of(masks[1], rows, source)
    keywords = weights | {
        "attn_mask": attn_mask_of(masks[0], rows, source),
        "key_padding_mask": padding[0] if padding is not None and not batched else padding,
        "is_causal": masks[0] == "causal",
    }
    return [inputs(*shape) for shape in shapes], keywords


def results(
    layer: nn.Module, inputs: list[Tensor], keywords: dict[str, Any], wrt: list[Tensor]
) -> list[Tensor | None]:
    """Return outputs, attention weights and gradients, with random weights for each entry."""
    output, weights = layer(*inputs, **keywords)
    generator = torch.Generator().manual_seed(1)
    loss = (output * torch.randn(output.shape, generator=generator)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, generator=generator)).sum()
    return [output, weights, *torch.autograd.grad(loss, wrt)]


def assert_results_equal(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, **CLOSE)


def option_id(options: dict[str, Any]) -> str:
    return "-".join(key for key, value in options.items() if value) or "none"


@pytest.mark.parametrize("options", CONSTRUCTORS, ids=option_id)
def test_every_option_equals_torch_in_outputs_weights_and_gradients(
    options: dict[str, Any],
) -> None:
    dense = attention(**options)
    ours = low_rank_copy(dense)
    assert low_rank_names(ours) == PARTS
    compared = 0
    for call in CALLS:
        inputs, keywords = arguments(options, *call)
        expected = results(dense, inputs, keywords, inputs)
        assert_results_equal(results(ours, inputs, keywords, inputs), expected)
        compared += 1
    assert compared == len(CALLS)


def test_at_least_a_thousand_combinations_are_compared() -> None:
    assert len(CONSTRUCTORS) * len(CALLS) >= 1000


@pytest.mark.parametrize("options", CONSTRUCTORS[::5], ids=option_id)
def test_without_gradients_eval_mode_equals_the_fast_path_of_torch(options: dict[str, Any]) -> None:
    dense = attention(**options).eval()
    ours = low_rank_copy(dense)
    for call in CALLS:
        inputs, keywords = arguments(options, *call)
        with torch.no_grad():
            expected = quietly(lambda: dense(*inputs, **keywords))  # noqa: B023
            assert_results_equal(list(ours(*inputs, **keywords)), list(expected))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masks", [("float 2-D", "bool"), ("bool 3-D", "float")], ids=str)
def test_masks_of_different_types_equal_torch(masks: tuple[str, str], need_weights: bool) -> None:
    dense = attention(batch_first=True)
    inputs, keywords = arguments({"batch_first": True}, {"need_weights": need_weights}, masks, True)
    expected = quietly(lambda: results(dense, inputs, keywords, inputs))
    assert_results_equal(results(low_rank_copy(dense), inputs, keywords, inputs), expected)


@pytest.mark.parametrize("need_weights", [True, False])
def test_rows_that_are_masked_entirely_give_what_torch_gives(need_weights: bool) -> None:
    dense = attention(batch_first=True)
    x = torch.randn(N, L, E)
    padding = torch.tensor([[True] * L, [False] * L])
    expected, _ = dense(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    output, _ = low_rank_copy(dense)(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    torch.testing.assert_close(output, expected, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("options", CONSTRUCTORS[::3], ids=option_id)
@pytest.mark.parametrize("need_weights", [True, False])
def test_gradients_of_parameters_are_those_of_torch_through_the_product(
    options: dict[str, Any], need_weights: bool
) -> None:
    dense = attention(**options)
    ours = low_rank_copy(dense)
    inputs, keywords = arguments(
        options, {"need_weights": need_weights}, ("float 3-D", "float"), True
    )
    theirs = dict(dense.named_parameters())
    expected = dict(
        zip(theirs, results(dense, inputs, keywords, [*theirs.values()])[2:], strict=True)
    )
    mine = dict(ours.named_parameters())
    found = dict(zip(mine, results(ours, inputs, keywords, [*mine.values()])[2:], strict=True))
    if "in_proj_weight" in expected:
        of_weights = dict(zip("qkv", expected.pop("in_proj_weight").chunk(3), strict=True))
    else:
        of_weights = {part: expected.pop(f"{part}_proj_weight") for part in "qkv"}
    of_weights["out_proj"] = expected.pop("out_proj.weight")
    for part, gradient in of_weights.items():  # W = u·v: dL/du = G·vᵀ, dL/dv = uᵀ·G
        u, v = mine[f"{part}.u"], mine[f"{part}.v"]
        torch.testing.assert_close(found.pop(f"{part}.u"), gradient @ v.mT, **CLOSE)
        torch.testing.assert_close(found.pop(f"{part}.v"), u.mT @ gradient, **CLOSE)
    if "in_proj_bias" in expected:
        biases = torch.cat([found.pop(f"{part}.bias") for part in "qkv"])
        torch.testing.assert_close(biases, expected.pop("in_proj_bias"), **CLOSE)
    assert found.keys() == expected.keys()  # out_proj.bias, bias_k and bias_v are the same
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], **CLOSE)


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("batched", [True, False])
def test_dropout_draws_what_torch_draws_from_the_same_seed(
    weights: dict[str, Any], batched: bool
) -> None:
    options = {"batch_first": True, "dropout": 0.4}
    dense = attention(**options)
    ours = low_rank_copy(dense)
    inputs, keywords = arguments(options, weights, ("float 2-D", None), batched)
    outcomes = []
    for layer in (dense, ours, ours):
        torch.manual_seed(5)
        outcomes.append(results(layer, inputs, keywords, inputs))
    assert_results_equal(outcomes[1], outcomes[0])
    assert_results_equal(outcomes[2], outcomes[1])
    undropped = results(ours.eval(), inputs, keywords, inputs)
    assert not torch.allclose(undropped[0], outcomes[0][0])
    assert_results_equal(undropped, results(dense.eval(), inputs, keywords, inputs))


def test_attention_runs_under_autocast_with_masks() -> None:
    dense = attention(batch_first=True)
    ours = low_rank_copy(dense)
    for weights, masks in itertools.product(WEIGHTS, MASKS):
        inputs, keywords = arguments({"batch_first": True}, weights, masks, True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, _ = dense(*inputs, **keywords)
            output, _ = ours(*inputs, **keywords)
        assert output.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(output, expected, rtol=0.1, atol=0.1)


# -- bad input ---------------------------------------------------------------------------------

X = (N, L, E)
BAD_CALLS: dict[str, dict[str, Any]] = {
    "mask of another length": {"attn_mask": torch.zeros(L, L + 1)},
    "mask of another batch": {"attn_mask": torch.zeros(N * HEADS + 1, L, L)},
    "mask of one dimension": {"attn_mask": torch.zeros(L)},
    "mask of four dimensions": {"attn_mask": torch.zeros(N, HEADS, L, L)},
    "mask of whole numbers": {"attn_mask": torch.zeros(L, L, dtype=torch.int64)},
    "padding of another length": {"key_padding_mask": torch.zeros(N, L + 1)},
    "padding of another batch": {"key_padding_mask": torch.zeros(N + 1, L)},
    "padding of one dimension": {"key_padding_mask": torch.zeros(L)},
    "padding of whole numbers": {"key_padding_mask": torch.zeros(N, L, dtype=torch.int64)},
    "causal hint without a mask": {"is_causal": True},
    "query of four dimensions": {"query": torch.zeros(1, *X)},
    "query of another width": {"query": torch.zeros(N, L, E + 1)},
    "unbatched key": {"key": torch.zeros(L, E)},
    "key and value of different lengths": {"key": torch.zeros(N, L + 1, E)},
    "key and value of different batches": {"key": torch.zeros(N + 1, L, E)},
}


@pytest.mark.parametrize("changes", BAD_CALLS.values(), ids=BAD_CALLS.keys())
@pytest.mark.parametrize("need_weights", [True, False])
def test_wrong_masks_and_shapes_are_refused_as_by_torch(
    changes: dict[str, Any], need_weights: bool
) -> None:
    dense = attention(batch_first=True)
    keywords = {name: torch.randn(X) for name in ("query", "key", "value")} | changes
    for layer in (dense, low_rank_copy(dense)):
        with pytest.raises((AssertionError, RuntimeError)):
            layer(**keywords, need_weights=need_weights)


# -- inside torch's transformers ---------------------------------------------------------------

TOKENS, SEEN = torch.Size((3, 5)), torch.tensor([5, 4, 3])
PADDING = torch.arange(TOKENS[1]) >= SEEN[:, None]  # (batch, length), True where padded


def layer_options(**options: Any) -> dict[str, Any]:
    return {"dim_feedforward": 12, "dropout": 0.0} | options


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(E, HEADS, **layer_options(**options))


def encoder(**options: Any) -> nn.Module:
    return quietly(lambda: nn.TransformerEncoder(encoder_layer(**options), 2))


def decoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerDecoderLayer(E, HEADS, **layer_options(**options))


def decoder(**options: Any) -> nn.Module:
    return nn.TransformerDecoder(decoder_layer(**options), 2)


def transformer(**options: Any) -> nn.Module:
    return quietly(lambda: nn.Transformer(E, HEADS, 1, 1, **layer_options(**options)))


def in_eval_fast(model: nn.Module) -> bool:
    return bool(model.activation_relu_or_gelu)


MODELS: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "encoder layer": (encoder_layer, 1),
    "encoder": (encoder, 1),
    "decoder layer": (decoder_layer, 2),
    "decoder": (decoder, 2),
    "transformer": (transformer, 2),
}
MASK_OF = {"encoder layer": "src_mask", "encoder": "mask", "transformer": "src_mask"}
PADDING_OF = {
    "encoder layer": ["src_key_padding_mask"],
    "encoder": ["src_key_padding_mask"],
    "decoder layer": ["memory_key_padding_mask"],
    "decoder": ["memory_key_padding_mask"],
    "transformer": ["src_key_padding_mask", "memory_key_padding_mask"],
}
CAUSAL_OF = {"encoder layer": "is_causal", "encoder": "is_causal", "transformer": "src_is_causal"}


def transformer_calls(kind: str) -> list[dict[str, Any]]:
    """The calls with and without masks that a kind of model takes."""
    mask, causal = MASK_OF.get(kind, "tgt_mask"), CAUSAL_OF.get(kind, "tgt_is_causal")
    square = causal_mask(TOKENS[1])
    float_padding = torch.zeros(TOKENS).masked_fill(PADDING, -math.inf)
    return [
        {},
        dict.fromkeys(PADDING_OF[kind], PADDING),
        {mask: square},
        {mask: square, causal: True},
        {mask: square, causal: True} | dict.fromkeys(PADDING_OF[kind], float_padding),
    ]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformers_of_torch_work_unchanged(
    kind: str, mode: str, batch_first: bool, norm_first: bool
) -> None:
    make, inputs = MODELS[kind]
    dense = make(batch_first=batch_first, norm_first=norm_first).train(mode == "train")
    ours = low_rank_copy(dense)
    assert not [m for m in ours.modules() if isinstance(m, nn.MultiheadAttention)]
    shape = (*TOKENS, E) if batch_first else (TOKENS[1], TOKENS[0], E)
    seen = ~PADDING if batch_first else ~PADDING.mT  # padded outputs are torch's own business
    for keywords in transformer_calls(kind):
        xs = [torch.randn(shape, requires_grad=mode != "no_grad") for _ in range(inputs)]
        outcomes = []
        for model in (dense, ours):
            with torch.set_grad_enabled(mode != "no_grad"):
                output = quietly(lambda: model(*xs, **keywords))[seen]  # noqa: B023
            outcomes.append([output, *gradients_of(output, xs)])
        assert_results_equal(outcomes[1], outcomes[0])


def gradients_of(output: Tensor, xs: list[Tensor]) -> tuple[Tensor, ...]:
    if not output.requires_grad:
        return ()
    target = torch.linspace(-1, 1, output.numel()).view(output.shape)
    return torch.autograd.grad((output * target).sum(), xs)


@pytest.mark.parametrize("what", ["self_attn", "linear1", "linear2", "self_attn.k"])
def test_fast_paths_are_off_where_weights_are_low_rank_and_on_elsewhere(what: str) -> None:
    model = nn.ModuleDict({"cut": encoder(batch_first=True), "whole": encoder(batch_first=True)})
    model.eval()
    x = torch.randn(*TOKENS, E)

    def outputs(name: str) -> Tensor:
        with torch.no_grad():
            return quietly(lambda: model[name](x, src_key_padding_mask=PADDING))[~PADDING]

    expected = {name: outputs(name) for name in model}
    lod.decompose(model, only=f"cut.layers.0.{what}")
    for name in model:
        torch.testing.assert_close(outputs(name), expected[name], **CLOSE)
    assert not in_eval_fast(model["cut"].layers[0]), "would read dense weights"
    assert in_eval_fast(model["cut"].layers[1]), "nothing in it is low-rank"
    assert all(in_eval_fast(layer) for layer in model["whole"].layers)
    assert not model["cut"].use_nested_tensor and model["whole"].use_nested_tensor
    with lod.at_ranks(model, 1):  # the low-rank layers are really called
        assert not torch.allclose(outputs("cut"), expected["cut"], **CLOSE)


@pytest.mark.parametrize("rank", [2, None])
def test_an_extracted_encoder_runs_in_every_mode(rank: int | None) -> None:
    model = lod.decompose(encoder(batch_first=True)).eval()
    x = torch.randn(*TOKENS, E)

    def outputs(model: nn.Module) -> Tensor:
        return quietly(lambda: model(x, src_key_padding_mask=PADDING))[~PADDING]

    with lod.at_ranks(model, {} if rank is None else rank):
        expected = outputs(model)
    plain = lod.extract(model, rank)
    kind = nn.MultiheadAttention if rank is None else Attention
    assert all(type(layer.self_attn) is kind for layer in plain.layers)
    with torch.no_grad():
        torch.testing.assert_close(outputs(plain), expected, **CLOSE)
    torch.testing.assert_close(outputs(plain.train().eval()), expected, **CLOSE)


# -- parts -------------------------------------------------------------------------------------


def self_attended(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, x, x, need_weights=False)[0]


def inside(**options: Any) -> nn.ModuleDict:
    """A model that holds attention under a name."""
    return nn.ModuleDict({"attn": attention(batch_first=True, **options)})


@pytest.mark.parametrize("kept", [["q"], ["k", "v"], ["out_proj"], ["q", "k", "v"]], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"kdim": E, "vdim": E, "bias": False}], ids=str)
def test_parts_that_are_skipped_stay_dense_with_memory_of_their_own(
    kept: list[str], sizes: dict[str, Any]
) -> None:
    model, x = inside(**sizes), torch.randn(X)
    dense = model["attn"]
    expected = self_attended(dense, x)
    lod.decompose(model, skip=[f"attn.{part}" for part in kept])
    layer = model["attn"]
    assert type(layer) is Attention
    assert low_rank_names(model) == [f"attn.{part}" for part in PARTS if part not in kept]
    torch.testing.assert_close(self_attended(layer, x), expected, **CLOSE)
    sources = {p.untyped_storage().data_ptr() for p in dense.parameters()}
    for part in kept:
        linear = layer.get_submodule(part)
        assert type(linear) is nn.Linear
        for parameter in linear.parameters():
            assert parameter.untyped_storage().data_ptr() not in sources
            assert parameter.untyped_storage().nbytes() == parameter.numel() * 4
    assert lod.survey(model).left_alone == {}  # they can be decomposed later
    lod.decompose(model)
    assert low_rank_names(model) == [f"attn.{part}" for part in PARTS]
    torch.testing.assert_close(self_attended(layer, x), expected, **CLOSE)


def test_skipping_every_part_leaves_the_layer_as_it_is(
    snapshot: Callable[[nn.Module], Any],
) -> None:
    model = nn.ModuleDict({"attn": attention(), "fc": nn.Linear(E, E)})
    before = snapshot(model["attn"])
    lod.decompose(model, skip="attn")
    before.assert_unchanged(model["attn"])
    assert low_rank_names(model) == ["fc"]


def test_bare_attention_is_returned_decomposed() -> None:
    dense, x = attention(batch_first=True), torch.randn(X)
    layer = lod.decompose(dense)
    assert type(layer) is Attention
    torch.testing.assert_close(self_attended(layer, x), self_attended(dense, x), **CLOSE)


def test_mode_and_trainability_follow_the_dense_layer() -> None:
    model = inside().eval()
    model["attn"].in_proj_weight.requires_grad_(False)
    lod.decompose(model)
    layer = model["attn"]
    assert not any(module.training for module in layer.modules())
    frozen = {name for name, p in layer.named_parameters() if not p.requires_grad}
    assert frozen == {f"{part}.{factor}" for part in "qkv" for factor in "uv"}
    for plain in (lod.extract(model)["attn"], lod.fuse(model)["attn"]):
        assert type(plain) is nn.MultiheadAttention and not plain.training
        trains = {name for name, p in plain.named_parameters() if p.requires_grad}
        assert trains == {"in_proj_bias", "out_proj.weight", "out_proj.bias"}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.05)], ids=str
)
@pytest.mark.parametrize("need_weights", [True, False])
def test_other_precisions_equal_torch(
    dtype: torch.dtype, tolerance: float, need_weights: bool
) -> None:
    dense = attention(batch_first=True).to(dtype)
    ours = low_rank_copy(dense)
    assert {p.dtype for p in ours.parameters()} == {dtype}
    x, mask = torch.randn(X, dtype=dtype), torch.zeros(L, L, dtype=torch.bool).fill_diagonal_(True)
    expected, _ = dense(x, x, x, attn_mask=mask, need_weights=need_weights)
    output, _ = ours(x, x, x, attn_mask=mask, need_weights=need_weights)
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


# -- extract and fuse --------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [None, 0, 1, 3, 0.5, {"q": 1}, {"q": 0, "out_proj": 2}], ids=str)
@pytest.mark.parametrize("options", CONSTRUCTORS[::6], ids=option_id)
def test_extract_equals_at_ranks(options: dict[str, Any], ranks: Any) -> None:
    model = lod.decompose(attention(**options)).eval()
    inputs, keywords = arguments(options, {}, ("float 2-D", "float"), True)
    with lod.at_ranks(model, {} if ranks is None else ranks):
        expected = model(*inputs, **keywords)
    plain = lod.extract(model, ranks)
    assert_results_equal(list(plain(*inputs, **keywords)), list(expected))
    kind = nn.MultiheadAttention if ranks is None else Attention
    assert type(plain) is kind


def test_extract_is_torch_attention_where_dense_is_cheaper_else_ours_over_plain_layers() -> None:
    model = lod.decompose(inside(add_bias_kv=True))
    full = lod.extract(model)["attn"]
    assert type(full) is nn.MultiheadAttention
    assert str(full) == str(attention(batch_first=True, add_bias_kv=True))
    mixed = lod.extract(model, {"attn.k": 2, "attn.out_proj": 4})["attn"]
    kinds = {name: type(part) for name, part in mixed.named_children()}
    assert type(mixed) is Attention
    assert kinds == {
        "q": nn.Linear, "k": nn.Sequential, "v": nn.Linear, "out_proj": PivotedInputs,
    }  # fmt: skip
    assert not [m for m in mixed.modules() if isinstance(m, LowRank)]
    self_attended(mixed, torch.randn(X)).sum().backward()
    assert all(p.grad is not None for p in mixed.parameters())


@pytest.mark.parametrize("by", ["params", "macs"])
def test_fuse_closes_the_layer_once_every_part_is_dense(by: str) -> None:
    x = torch.randn(X)
    model = lod.decompose(inside(), ranks={"attn.q": 3})
    expected = self_attended(model["attn"], x)
    lod.fuse(model, by=by)
    assert low_rank_names(model) == ["attn.q"]
    assert type(model["attn"]) is Attention
    torch.testing.assert_close(self_attended(model["attn"], x), expected, **CLOSE)
    model = lod.decompose(inside(), ranks={"attn.q": 5})
    expected = self_attended(model["attn"], x)
    lod.fuse(model, by=by)
    assert type(model["attn"]) is nn.MultiheadAttention
    torch.testing.assert_close(self_attended(model["attn"], x), expected, **CLOSE)


def test_the_file_of_the_class_imports_torch_alone() -> None:
    tree = ast.parse(Path(attention_module.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").partition(".")[0])
    assert imported - sys.stdlib_module_names == {"torch"}


RUN_ALONE = """
import runpy, sys
sys.modules["maestro_lod"] = None  # any import of it fails
import torch
Attention = runpy.run_path(sys.argv[1])["Attention"]
dense = torch.nn.MultiheadAttention(8, 2)
x = torch.randn(3, 2, 8)
for ours, theirs in zip(Attention(dense)(x, x, x), dense(x, x, x)):
    torch.testing.assert_close(ours, theirs)
"""


def test_the_file_of_the_class_runs_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALONE, attention_module.__file__],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- cost, training, files ---------------------------------------------------------------------


@pytest.mark.parametrize("into", ["dense", "other parts"])
@pytest.mark.parametrize("kept", [(), ("attn.k",)], ids=["all parts", "some parts"])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 5, "add_bias_kv": True}], ids=str)
def test_a_file_loads_into_dense_and_decomposed_models(
    tmp_path: Path, into: str, kept: tuple[str, ...], sizes: dict[str, Any]
) -> None:
    model = lod.decompose(inside(**sizes), skip=kept, ranks=3)
    lod.save(model, tmp_path / "model.safetensors")
    target: nn.Module = inside(**sizes)
    if into != "dense":
        choice = {"skip": "attn.v"} if into == "other parts" else {}
        lod.decompose(target, ranks=2 if into == "smaller" else None, **choice)
    loaded = lod.load(tmp_path / "model.safetensors", into=target)
    assert lod.ranks(loaded) == lod.ranks(model)
    inputs, keywords = arguments({"batch_first": True} | sizes, {}, (None, None), True)
    expected = results(model["attn"], inputs, keywords, inputs)
    assert_results_equal(results(loaded["attn"], inputs, keywords, inputs), expected)
    nbytes = [(p.untyped_storage().nbytes(), p.numel() * 4) for p in loaded.parameters()]
    assert all(stored == used for stored, used in nbytes), "parts hold the packed weight"


def test_a_refused_file_changes_nothing(
    tmp_path: Path, snapshot: Callable[[nn.Module], Any]
) -> None:
    lod.save(lod.decompose(inside(kdim=6)), tmp_path / "model.safetensors")
    for target in (inside(), lod.decompose(inside(), skip="attn.k")):
        before = snapshot(target)
        with pytest.raises(lod.MaestroError, match="another model"):
            lod.load(tmp_path / "model.safetensors", into=target)
        before.assert_unchanged(target)


# -- what is left alone ------------------------------------------------------------------------


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


def tied() -> nn.Module:
    model = nn.ModuleDict({"attn": attention(), "other": attention()})
    model["other"].in_proj_weight = model["attn"].in_proj_weight
    return model


def replaced_forward() -> nn.Module:
    model = inside()
    model["attn"].forward = lambda *args: args[0]
    return model


def only_attn(layer: nn.Module) -> nn.Module:
    return nn.ModuleDict({"attn": layer})


def with_linear_out() -> nn.Module:
    model = inside()
    model["attn"].out_proj = nn.Linear(E, E)
    return model


def hooked() -> nn.Module:
    model = inside()
    model["attn"].in_proj_weight.register_hook(lambda grad: grad)
    return model


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied": (tied, "tied (attn.in_proj_weight = other.in_proj_weight)"),
    "subclass": (
        lambda: only_attn(OwnAttention(E, HEADS)),
        "a subclass of MultiheadAttention, whose forward may differ",
    ),
    "replaced forward": (replaced_forward, "forward was replaced"),
    "parametrized": (
        lambda: only_attn(parametrizations.weight_norm(attention(), "in_proj_weight")),
        "parametrized",
    ),
    "parametrized out_proj": (
        lambda: _with_parametrized_out(),
        "its out_proj is a ParametrizedNonDynamicallyQuantizableLinear",
    ),
    "pruned": (
        lambda: only_attn(prune.l1_unstructured(attention(), "in_proj_weight", 0.5)),
        "its weights are computed",
    ),
    "own out_proj": (with_linear_out, "its out_proj is a Linear"),
    "hook on a weight": (hooked, "tensor hooks"),
}


def _with_parametrized_out() -> nn.Module:
    model = inside()
    parametrizations.orthogonal(model["attn"].out_proj)
    return model


@pytest.mark.parametrize(("make", "words"), LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_attention_that_must_not_be_opened_is_left_alone_with_the_reason(
    make: Callable[[], nn.Module], words: str
) -> None:
    model = make()
    model["fc"] = nn.Linear(E, E)
    layer = model["attn"]
    reasons = lod.survey(model).left_alone
    assert words in reasons["attn"]
    lod.decompose(model)
    assert model["attn"] is layer
    assert low_rank_names(model) == ["fc"] and isinstance(model["fc"], LowRankLinear)
    assert lod.survey(model).left_alone == reasons


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["in_proj_weight", "out_proj.weight"])
def test_weights_that_are_not_finite_are_refused_by_part(
    value: float, where: str, snapshot: Callable[[nn.Module], Any]
) -> None:
    model = inside()
    with torch.no_grad():
        model["attn"].get_parameter(where)[0, 0] = value
    before = snapshot(model)
    part = "attn.q" if where == "in_proj_weight" else "attn.out_proj"
    with pytest.raises(lod.MaestroError, match=f"{part} has NaN or infinite"):
        lod.decompose(model)
    before.assert_unchanged(model)
