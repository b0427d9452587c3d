"""Calibrated factors are exact at full rank, best on the data at any, and nothing else changes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

import maestro_lod as lod
from maestro_lod.errors import DataError, LayerError, OptionError
from maestro_lod.layers.ranks import low_rank_layers
from maestro_lod.sizes import calibration
from maestro_lod.sizes.calibration import calibrate
from maestro_lod.sizes.outputs import own_scores, own_values
from tests.support.kinds import KINDS, Kind, Tied

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
UNKNOWN = ("Bilinear",)  # a kind of a user that does not say what its rows are
ONE_OUTPUT = [kind for kind in KINDS if len(kind.layers) == 1 and kind.name != "Bilinear"]


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        given = model(*inputs)
    return given[0] if isinstance(given, tuple) else given


def batches(kind: Kind, count: int = 3) -> list[tuple[tuple[Tensor, ...], None]]:
    return [(kind.inputs(seed=seed), None) for seed in range(count)]


def calibrated(kind: Kind, count: int = 3) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind.name in UNKNOWN else "error")
        model = kind.dense()
        found = calibrate(model, batches(kind, count), tied=kind.tied)
        return lod.decompose(model, tied=kind.tied, calibration=found)


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # by torch: not with oneDNN
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_outputs_are_the_same_at_full_rank(kind, snapshot):
    dense, inputs = kind.dense(), kind.inputs(seed=9)
    before, expected = snapshot(dense), outputs(dense, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind.name in UNKNOWN else "error")
        found = calibrate(dense, batches(kind), tied=kind.tied)
    before.assert_unchanged(dense)
    model = lod.decompose(dense, tied=kind.tied, calibration=found)
    torch.testing.assert_close(outputs(model, inputs), expected, **CLOSE)
    assert set(lod.ranks(model)) == set(kind.layers)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_layer_whose_inputs_can_be_seen_is(kind):
    unseen = {"Bilinear": ["layer"]}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = calibrate(kind.dense(), batches(kind), tied=kind.tied)
    assert found.unseen == unseen.get(kind.name, [])
    assert sum("calibration sample" in str(w.message) for w in told) == (kind.name in unseen)


@pytest.mark.parametrize("kind", ONE_OUTPUT, ids=str)
def test_at_each_rank_outputs_on_the_data_are_closer_than_by_the_weights(kind):
    dense, plain = kind.dense(), lod.decompose(kind.dense(), tied=kind.tied)
    model, inputs = calibrated(kind, 1), kind.inputs(seed=0)
    expected, closer = outputs(dense, inputs), 0
    full = next(iter(low_rank_layers(model).values())).full_rank
    transposed = "Transpose" in kind.name  # overlapping outputs are added: less than a promise
    for rank in range(1, full):
        errors = []
        for each in (model, plain):
            with lod.at_ranks(each, rank):
                errors.append(float((outputs(each, inputs) - expected).norm()))
        if kind.tied == "keep" and not transposed:
            assert errors[0] <= errors[1] + 1e-4, rank
        closer += errors[0] < errors[1]
    assert closer > full / 2


@pytest.mark.parametrize("kind", ONE_OUTPUT[:7], ids=str)
def test_what_a_rank_leaves_out_is_what_its_energy_says(kind):
    """For linear layers and convolutions by patches: groups, strides and padding modes too."""
    dense, inputs = kind.dense(torch.float64), kind.inputs(torch.float64, seed=0)
    found = calibrate(dense, [(inputs, None)])
    energies = found.energies("layer", dense.layer)
    model = lod.decompose(copy.deepcopy(dense), calibration=found)
    expected = outputs(dense, inputs)
    for rank in range(1, len(energies)):
        with lod.at_ranks(model, rank):
            error = (outputs(model, inputs) - expected).square().sum()
        torch.testing.assert_close(error, energies[rank:].sum(), rtol=1e-3, atol=1e-4)


def test_a_linear_map_gets_the_closed_form_of_the_theorem():
    """The first k ranks map the data to its best approximation of rank k, for every k at once."""
    torch.manual_seed(1)
    x = torch.randn(300, 25) @ torch.randn(25, 25)
    dense = nn.Linear(25, 84, bias=False)
    y = (x @ dense.weight.detach().T).double()
    left, scale, right = torch.linalg.svd(y, full_matrices=False)
    model = lod.decompose(dense, calibration=calibrate(dense, [x[:100], x[100:]]))
    for k in (1, 5, 12, 24):
        best = left[:, :k] * scale[:k] @ right[:k]
        with lod.at_ranks(model, k), torch.no_grad():
            torch.testing.assert_close(
                model(x).double(), best, rtol=1e-3, atol=2e-3 * y.abs().max()
            )


def test_moments_are_those_of_all_batches_in_any_number_of_passes():
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 9))
    x = torch.randn(20, 8)
    at_once = calibrate(model, iter([x]))
    in_parts = calibrate(model, [x[:5], {"input": x[5:]}], memory=1)
    for name, seen in at_once.moments.items():
        torch.testing.assert_close(in_parts.moments[name].inputs, seen.inputs, **CLOSE)
        assert in_parts.moments[name].count == seen.count == 20
    torch.testing.assert_close(at_once.moments["0"].inputs[0].float(), x.T @ x, **CLOSE)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_says_how_much_outputs_count(frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).requires_grad_(not frozen)
    x, y = torch.randn(30, 8), torch.randint(4, (30,))
    found = calibrate(model, [(x, y)], loss=F.cross_entropy)
    scores = model(x).detach().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(scores, y), scores)
    torch.testing.assert_close(
        found.moments["2"].outputs[0].float(), expected.T @ expected, **CLOSE
    )
    assert found.has_gradients
    assert all(parameter.grad is None for parameter in model.parameters())
    low_rank = lod.decompose(copy.deepcopy(model), calibration=found)
    torch.testing.assert_close(low_rank(x), model(x), **CLOSE)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", [k for k in KINDS if k.name != "Bilinear"], ids=str)
def test_a_loss_reaches_every_kind_of_layer(kind):
    def loss(output: object, _: None) -> Tensor:
        return own_values(output[0] if isinstance(output, tuple) else output)

    dense, inputs = kind.dense(), kind.inputs(seed=9)
    found = calibrate(dense, batches(kind), tied=kind.tied, loss=loss)
    assert found.has_gradients
    expected = outputs(dense, inputs)
    model = lod.decompose(dense, tied=kind.tied, calibration=found)
    torch.testing.assert_close(outputs(model, inputs), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_transposed_convolutions_are_those_of_their_patches(stride):
    layer = nn.ConvTranspose2d(3, 4, 3, stride, 1, output_padding=stride - 1, groups=1, bias=False)
    x, drawn = torch.randn(2, 3, 5, 5), torch.randn(2, 4, 5 * stride, 5 * stride)
    found = calibrate(layer, [(x, drawn)], loss=lambda output, target: (output * target).sum())
    unfolded = F.unfold(drawn, 3, padding=1, stride=stride)
    rows = unfolded.transpose(1, 2).flatten(0, 1).double()
    torch.testing.assert_close(found.moments[""].outputs[0], rows.T @ rows, rtol=1e-4, atol=1e-3)


def test_energies_estimate_what_the_loss_changes_by():
    torch.manual_seed(0)
    model, x = nn.Linear(12, 9, bias=False), torch.randn(4000, 12) * torch.linspace(0.1, 2, 12)
    drawn = torch.randn(4000, 9) * torch.linspace(2, 0.1, 9)  # independent of the inputs
    found = calibrate(model, [(x, drawn)], loss=lambda output, target: (output * target).sum())
    low_rank = lod.decompose(copy.deepcopy(model), calibration=found)
    for rank in (2, 5, 8):
        with lod.at_ranks(low_rank, rank), torch.no_grad():
            changes = ((low_rank(x) - model(x)) * drawn).sum(1).square().sum()
        estimate = found.energies("", model)[rank:].sum()
        torch.testing.assert_close(changes.double(), estimate, rtol=0.2, atol=0)


@pytest.mark.parametrize(
    ("memory", "killed_after"), [(2**31, 1), (2**31, 3), (1, 3), (1, 4), (1, 5)]
)
def test_a_killed_calibration_goes_on_batch_by_batch(memory, killed_after, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "_SAVED_EVERY", 0.0)
    monkeypatch.setattr(calibration, "_LEAST_WORK", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
    data, calls = [torch.randn(5, 12) for _ in range(4)], []
    model.register_forward_hook(lambda *_: calls.append(1))
    expected = calibrate(model, data, loss=own_scores, memory=memory)
    count = len(calls)
    assert count == len(data) * (1 if memory > 1 else 2)  # a pass for each layer

    def loss(output: Tensor, target: object) -> Tensor:
        if len(calls) > most:
            raise KeyboardInterrupt
        return own_scores(output)

    calls.clear()
    most = killed_after
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, data, loss=loss, memory=memory, resume=tmp_path)
    calls.clear()
    most = count
    found = calibrate(model, data, loss=loss, memory=memory, resume=tmp_path)
    assert len(calls) == count - killed_after
    for name, moments in expected.moments.items():
        assert vars(found.moments[name]).keys() == vars(moments).keys()
        for what, value in vars(moments).items():
            assert torch.equal(
                torch.as_tensor(vars(found.moments[name])[what]), torch.as_tensor(value)
            )
    assert {file.name for file in tmp_path.iterdir()} == {"of.json", "calibration.safetensors"}
    for what, other in {
        "data": ([x + 1 for x in data], {"loss": loss}),
        "loss": (data, {"loss": own_scores}),
        "layers": (data, {"loss": loss, "skip": ["2"]}),
    }.items():
        with pytest.raises(OptionError, match=f"another call: {what} is"):
            calibrate(model, other[0], memory=memory, resume=tmp_path, **other[1])


def test_outputs_alone_can_say_how_much_layers_count():
    model, x = nn.Linear(8, 5), torch.randn(400, 8)
    values = calibrate(model, [x], loss=own_values).moments[""].outputs[0]
    torch.testing.assert_close(values / values.diagonal().mean(), torch.eye(5).double(), rtol=0,
                               atol=0.2)  # fmt: skip
    scores = calibrate(model, [x], loss=own_scores).moments[""].outputs[0] * 400
    probabilities = model(x).softmax(-1).detach().double()
    fisher = torch.diag(probabilities.mean(0)) - probabilities.T @ probabilities / 400
    torch.testing.assert_close(scores, fisher, rtol=0, atol=0.05)


def test_a_masked_encoder_is_seen_though_torch_has_a_fast_path_for_it():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    uses = model.use_nested_tensor
    x, mask = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    with torch.no_grad():
        found = calibrate(model, [{"src": x, "src_key_padding_mask": mask}])
        assert found.unseen == []
        assert model.use_nested_tensor == uses
        expected = torch.stack([model(x[:1])[0], F.pad(model(x[1:, :3])[0], (0, 0, 0, 2))])
        model = lod.decompose(model, calibration=found)
        given = model(x, src_key_padding_mask=mask)
    torch.testing.assert_close(given[~mask], expected[~mask], **CLOSE)


# -- data as it comes --------------------------------------------------------------------------


def test_one_sample_orders_its_direction_first():
    x = torch.randn(1, 12)
    dense = nn.Linear(12, 9, bias=False)
    model = lod.decompose(dense, calibration=calibrate(dense, [x]))
    with lod.at_ranks(model, 1), torch.no_grad():
        torch.testing.assert_close(model(x), dense(x), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.weight, dense.weight, **CLOSE)


def test_experts_that_no_token_reaches_are_split_by_their_weights():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    ids = torch.tensor([[1, 2]])  # at most two of four experts
    expected = model(input_ids=ids).logits
    with pytest.warns(UserWarning, match=r"gate_up_proj \([23] of 4\)"):
        found = calibrate(model, [{"input_ids": ids}])
    seen = found.moments["model.layers.0.mlp.experts.gate_up_proj"].inputs
    assert (seen.flatten(1).abs().sum(1) == 0).sum() >= 2
    low_rank = lod.decompose(copy.deepcopy(model), calibration=found)
    torch.testing.assert_close(low_rank(input_ids=ids).logits, expected, rtol=1e-3, atol=1e-4)
    ids = torch.arange(32).view(2, 16)  # reaches all of them
    again = calibrate(model, [{"input_ids": ids}], loss=lambda output, _: output.logits.sum())
    assert again.moments["model.layers.0.mlp.experts.down_proj"].has_gradients


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_layer_that_nothing_reaches_is_named_and_split_by_its_weights():
    model = Unused()
    with pytest.warns(UserWarning, match="reached unused"):
        found = calibrate(model, [torch.randn(4, 8)])
    plain = lod.decompose(copy.deepcopy(model)).unused
    torch.testing.assert_close(lod.decompose(model, calibration=found).unused.u, plain.u)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_batch_and_layer(bad, snapshot):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    before, x = snapshot(model), torch.randn(3, 6)
    with pytest.raises(DataError, match="batch 1 gives NaN or infinite values at layer 0"):
        calibrate(model, [x, x * bad])
    before.assert_unchanged(model)
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_calibrated_in_single(dtype):
    torch.manual_seed(0)
    dense, x = nn.Linear(32, 24, dtype=dtype), 30 * torch.randn(200, 32, dtype=dtype)
    found = calibrate(dense, [x])
    torch.testing.assert_close(found.moments[""].inputs[0].float(), x.float().T @ x.float())
    model = lod.decompose(copy.deepcopy(dense), calibration=found)
    assert model.u.dtype == dtype
    torch.testing.assert_close(model(x), dense(x), rtol=0.05, atol=0.5)


def test_a_tied_pair_is_ordered_by_both_of_its_uses():
    model, ids = Tied(), torch.randint(40, (8, 16))
    found = calibrate(model, [ids], tied="share")
    assert found.moments["embedding"].outputs is None  # rare words are scored as often as others
    hidden = torch.tanh(model.embedding(ids)).detach().flatten(0, 1).double()
    moment = hidden.T @ hidden
    expected = moment + moment.diagonal().mean() * torch.eye(16)
    torch.testing.assert_close(found.moments["embedding"].inputs[0], expected, rtol=1e-4, atol=1e-3)


def test_with_gradients_a_tied_pair_counts_by_what_both_uses_do_to_the_loss():
    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(40, (64, 16))
    found = calibrate(model, [ids], tied="share", loss=own_scores)
    assert found.has_gradients
    low_rank = lod.decompose(copy.deepcopy(model), tied="share", calibration=found)
    energies = found.energies("embedding", model.embedding)
    changes = {}
    with torch.no_grad():
        expected = model(ids).log_softmax(-1)
        for rank in (8, 15):
            with lod.at_ranks(low_rank, rank):
                given = low_rank(ids).log_softmax(-1)
            changes[rank] = float((expected.exp() * (expected - given)).sum(-1).mean())
    estimated = float(energies[8:].sum() / energies[15:].sum())
    assert 0.3 < changes[8] / changes[15] / estimated < 3


def test_tokens_that_are_frequent_come_first():
    dense = nn.Embedding(30, 8)
    found = calibrate(dense, [torch.tensor([[3, 3, 3, 3]])])
    model = lod.decompose(copy.deepcopy(dense), calibration=found)
    with lod.at_ranks(model, 1), torch.no_grad():
        torch.testing.assert_close(
            model(torch.tensor(3)), dense(torch.tensor(3)), rtol=1e-2, atol=1e-3
        )


@pytest.mark.parametrize(
    ("batches", "error", "says"),
    [
        ([], DataError, "no batch"),
        (["text"], OptionError, "a batch is a str"),
        ([(1, 2, 3)], OptionError, "a batch is a tuple"),
    ],
)
def test_data_that_cannot_be_used_is_refused(batches, error, says):
    with pytest.raises(error, match=says):
        calibrate(nn.Linear(8, 8), batches)


@pytest.mark.parametrize("targets", [True, False])
def test_packed_sequences_count_as_the_sequences_in_them(targets: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.GRU(5, 8))
    sequences = [torch.randn(length, 1, 5) for length in (6, 4, 1)]
    packed = pack_sequence([sequence[:, 0] for sequence in sequences])
    found = calibrate(model, [(packed, None) if targets else packed]).moments
    expected = calibrate(model, sequences).moments
    assert found.keys() == expected.keys() == {"0.weight_ih_l0", "0.weight_hh_l0"}
    for name, seen in found.items():
        assert seen.count == expected[name].count
        torch.testing.assert_close(seen.inputs, expected[name].inputs, rtol=1e-4, atol=1e-4)


def test_calibration_of_another_model_is_refused(snapshot):
    found = calibrate(nn.Sequential(nn.Linear(8, 8)), [torch.randn(4, 8)])
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = snapshot(model)
    with pytest.raises(LayerError, match="calibration has no layer 1"):
        lod.decompose(model, calibration=found)
    before.assert_unchanged(model)


def test_a_model_without_anything_to_calibrate_is_refused():
    with pytest.raises(LayerError, match="can be calibrated"):
        calibrate(nn.ReLU(), [torch.randn(2)])


RECURRENT = {
    "LSTM": lambda **options: nn.LSTM(5, 4, 2, **options),
    "LSTM with projections": lambda **options: nn.LSTM(5, 6, 2, proj_size=3, **options),
    "GRU": lambda **options: nn.GRU(5, 4, 2, **options),
    "RNN": lambda **options: nn.RNN(5, 4, 2, **options),
    "RNN with relu": lambda **options: nn.RNN(5, 4, 2, nonlinearity="relu", **options),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("build", RECURRENT.values(), ids=RECURRENT)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("shape", [(2, 6, 5), (6, 5)], ids=["batch", "one sequence"])
@pytest.mark.parametrize("started", [False, True])
def test_recurrent_layers_compute_the_same_while_they_are_calibrated(
    build, bidirectional, batch_first, shape, started
) -> None:
    layer, x = build(bidirectional=bidirectional, batch_first=batch_first), torch.randn(shape)
    inputs = (x, layer(x)[1]) if started else (x,)
    outputs = []

    def loss(output, _):
        outputs.append(output)
        return output[0].square().sum()

    moments = calibrate(layer, [(inputs, None)], loss=loss).moments
    torch.testing.assert_close(outputs[0], layer(*inputs))
    assert set(moments) == {name for name, p in layer.named_parameters() if p.ndim == 2}


def test_a_loss_weights_the_gates_of_a_recurrent_layer() -> None:
    torch.manual_seed(0)
    model, x, start = nn.RNN(3, 4, batch_first=True), torch.randn(2, 1, 3), torch.randn(1, 2, 4)
    calibrated = calibrate(model, [((x, start), None)], loss=lambda output, _: output[0].sum())
    assert calibrated.has_gradients
    slope = (1 - model(x, start)[0].square()).detach()[:, 0]  # of tanh
    for name in ("weight_ih_l0", "weight_hh_l0"):
        torch.testing.assert_close(
            calibrated.moments[name].outputs[0].float(), slope.T @ slope, rtol=1e-4, atol=1e-5
        )
