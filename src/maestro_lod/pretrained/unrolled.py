"""Recurrent layers step by step, so that one sees what each of their weights multiplies.

torch's kernels show neither hidden states nor gates. Here every product of a weight is a tensor of
its own, which can be differentiated by; slow, and only for calibration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

See: TypeAlias = Callable[[str, Tensor, Tensor], None]
"""Told the name of a weight, rows (positions, n) that it multiplies, and its products."""


def unrolled(layer: nn.RNNBase, inputs: Any, hidden: Any = None, *, see: See) -> Any:
    """Return what a recurrent layer does, without dropout, and tell what its weights see.

    Of packed sequences only what is seen counts: None is returned.
    """
    packed, single = isinstance(inputs, PackedSequence), False
    if packed:
        x, lengths = pad_packed_sequence(inputs)
    else:
        single = inputs.ndim == 2
        x = inputs.unsqueeze(1) if single else inputs
        x = x.transpose(0, 1) if layer.batch_first and not single else x
        lengths = torch.full((x.shape[1],), len(x))
    run = _Run(layer, torch.arange(len(x))[:, None].to(x.device) < lengths.to(x.device), see)
    ends: list[tuple[Tensor, ...]] = []
    for number in range(layer.num_layers):
        outputs = []
        for suffix in ("", "_reverse")[: 2 if layer.bidirectional else 1]:
            start = _start(layer, hidden, len(ends), x, single)
            output, end = run.direction(x, start, f"l{number}{suffix}")
            outputs.append(output)
            ends.append(end)
        x = torch.cat(outputs, -1)
    if packed:
        return None
    states = [torch.stack(parts) for parts in zip(*ends, strict=True)]
    if single:
        x, states = x.squeeze(1), [state.squeeze(1) for state in states]
    elif layer.batch_first:
        x = x.transpose(0, 1)
    return x, tuple(states) if isinstance(layer, nn.LSTM) else states[0]


def _start(
    layer: nn.RNNBase, hidden: Any, index: int, x: Tensor, single: bool
) -> tuple[Tensor, ...]:
    """Return the states that one direction of one layer begins with."""
    if hidden is not None:
        states = hidden if isinstance(hidden, tuple) else (hidden,)
        return tuple(s[index][None] if single else s[index] for s in states)
    zeros = x.new_zeros(x.shape[1], layer.proj_size or layer.hidden_size)
    if isinstance(layer, nn.LSTM):
        return zeros, x.new_zeros(x.shape[1], layer.hidden_size)
    return (zeros,)


class _Run:
    """One pass over sequences: (steps, sequences, …), of which some end early."""

    def __init__(self, layer: nn.RNNBase, alive: Tensor, see: See) -> None:
        self._layer, self._alive, self._see = layer, alive, see

    def _product(self, kind: str, where: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply rows by a weight, and tell of those that count."""
        product = F.linear(rows, getattr(self._layer, f"weight_{kind}_{where}"))
        self._see(f"weight_{kind}_{where}", rows.detach()[counts], product)
        bias = getattr(self._layer, f"bias_{kind}_{where}", None)
        return product if bias is None else product + bias

    def direction(
        self, x: Tensor, states: tuple[Tensor, ...], where: str
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run one direction of one layer; returns its outputs and the states at the end."""
        from_input = self._product("ih", where, x, self._alive)
        steps = range(len(x))
        outputs: dict[int, Tensor] = {}
        for step in reversed(steps) if where.endswith("_reverse") else steps:
            alive = self._alive[step]
            gates = self._product("hh", where, states[0], alive)
            new = self._step(from_input[step], gates, states, where, alive)
            states = tuple(
                torch.where(alive[:, None], now, before)
                for now, before in zip(new, states, strict=True)
            )
            outputs[step] = states[0]
        return torch.stack([outputs[step] for step in steps]), states

    def _step(
        self, i: Tensor, h: Tensor, states: tuple[Tensor, ...], where: str, alive: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the next states from what inputs and hidden states say."""
        if isinstance(self._layer, nn.LSTM):
            into, forget, cell, out = (i + h).chunk(4, -1)
            memory = forget.sigmoid() * states[1] + into.sigmoid() * cell.tanh()
            shown = out.sigmoid() * memory.tanh()
            if self._layer.proj_size:
                shown = self._product("hr", where, shown, alive)
            return shown, memory
        if isinstance(self._layer, nn.GRU):
            (reset, update, new), (reset_h, update_h, new_h) = i.chunk(3, -1), h.chunk(3, -1)
            keep = (update + update_h).sigmoid()
            fresh = (new + (reset + reset_h).sigmoid() * new_h).tanh()
            return ((1 - keep) * fresh + keep * states[0],)
        act = torch.tanh if self._layer.nonlinearity == "tanh" else torch.relu
        return (act(i + h),)
