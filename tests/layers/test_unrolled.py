"""A recurrent layer that is run step by step computes the same and shows what weights see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from maestro_lod.layers import Recurrent
from maestro_lod.sizes.calibration import calibrate

LAYERS = {
    "LSTM": lambda **o: nn.LSTM(5, 4, 2, **o),
    "LSTM with projections": lambda **o: nn.LSTM(5, 6, 2, proj_size=3, **o),
    "GRU": lambda **o: nn.GRU(5, 4, 2, **o),
    "RNN": lambda **o: nn.RNN(5, 4, 2, **o),
    "RNN with relu": lambda **o: nn.RNN(5, 4, 2, nonlinearity="relu", **o),
}
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")


def run(layer: nn.RNNBase, *inputs) -> tuple[object, dict[str, Tensor]]:
    seen: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        output = Recurrent(layer).shown(
            lambda name, rows, _: seen.setdefault(name, []).append(
                rows.reshape(-1, rows.shape[-1])
            ),
            *inputs,
        )
    return output, {name: torch.cat(rows) for name, rows in seen.items()}


@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    ("batch_first", "shape"), [(True, (2, 6, 5)), (False, (6, 2, 5)), (True, (6, 5))]
)
def test_outputs_and_states_are_torchs_own(build, bidirectional, batch_first, shape):
    layer = build(bidirectional=bidirectional, batch_first=batch_first)
    x = torch.randn(shape)
    with torch.no_grad():
        expected = layer(x)
        output, seen = run(layer, x)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(run(layer, x, expected[1])[0], layer(x, expected[1]))
    assert set(seen) == {name for name, p in layer.named_parameters() if p.ndim == 2}


@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS.keys())
def test_packed_sequences_show_what_they_show_one_by_one(build):
    layer, parts = build(bidirectional=True), [torch.randn(4, 5), torch.randn(2, 5)]
    output, seen = run(layer, pack_sequence(parts))
    alone = [run(layer, part[:, None])[1] for part in parts]
    assert output is None
    for name, rows in seen.items():
        moments = [one[name].T @ one[name] for one in alone]
        torch.testing.assert_close(rows.T @ rows, moments[0] + moments[1])


def test_a_loss_says_how_much_the_gates_count():
    torch.manual_seed(0)
    model, x, start = nn.RNN(3, 4, batch_first=True), torch.randn(2, 1, 3), torch.randn(1, 2, 4)
    found = calibrate(model, [((x, start), None)], loss=lambda output, _: output[0].sum())
    assert found.has_gradients
    slope = (1 - model(x, start)[0].square()).detach()[:, 0]  # of tanh
    for name in ("weight_ih_l0", "weight_hh_l0"):
        torch.testing.assert_close(
            found.moments[name].outputs[0].float(), slope.T @ slope, rtol=1e-4, atol=1e-5
        )
