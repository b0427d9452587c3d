"""Recurrent layers over weights that are separate modules.

torch's recurrent kernels need dense weights. In training, factors are multiplied once per call, for
the whole sequence: training finds the ranks, but a step is not cheaper than a dense one. A deployed
layer multiplies them at its first call, and again only if they change: it has the parameters and
the file of the factors, and the time of a dense layer. The file imports only torch, so that an
extracted model needs these classes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from maestro_lod.layers.pivoted import INDEX_TYPE, PivotedForm

OnProduct: TypeAlias = Callable[[str, Tensor, Tensor], None]
"""Called with the name of a weight, the rows (positions, n) it multiplies, and the products."""


class Matrix(nn.Module):
    """A dense weight matrix that another module multiplies by."""

    bias = None

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Product(nn.Module):
    """A weight matrix u·v that another module multiplies by."""

    bias = None

    def __init__(self, u: nn.Parameter, v: nn.Parameter) -> None:
        super().__init__()
        self.u, self.v = u, v  # (m, r), (r, n)

    @property
    def weight(self) -> Tensor:
        """The matrix, computed at every access."""
        return self.u @ self.v


class PivotedProduct(PivotedForm):
    """A weight matrix in pivoted form that another module multiplies by."""

    order: Tensor
    bias = None

    def __init__(self, kept: nn.Parameter, others: nn.Parameter, order: Tensor) -> None:
        super().__init__()
        self.register_buffer("order", order.to(INDEX_TYPE))
        self.kept, self.others = kept, others  # (r, n), (m - r, r)

    @property
    def rank(self) -> int:
        return self.others.shape[1]

    @property
    def weight(self) -> Tensor:
        """The matrix, computed at every access."""
        both = torch.cat([self.kept, self.others @ self.kept])
        return both.index_select(0, self.order)


class Recurrent(nn.Module):
    """`nn.LSTM`, `nn.GRU` or `nn.RNN` over matrices of any kind, with torch's names."""

    user_attributes: tuple[str, ...] = ()
    """The names of attributes that a user added to torch's layer."""
    applies_parts = True

    @staticmethod
    def blocker(dense: nn.RNNBase) -> str:
        """Return why this layer cannot be unpacked, '' if it can."""
        names = [name for names in dense._all_weights for name in names]
        return _computed_weights(dense, names)

    def __init__(self, dense: nn.RNNBase) -> None:
        """Copy the options and parameters of `dense`; its weights become `Matrix` modules."""
        super().__init__()
        for name, parameter in dense.named_parameters():
            if parameter.ndim == 2:
                self.add_module(name, Matrix(parameter))
            else:
                self.register_parameter(name, parameter)
        # torch's layer without its tensors computes with the weights of each call; a tuple keeps
        # its parameters out of this module's
        self._engine = (_without_memory(dense),)
        self._ready: tuple[Any, nn.RNNBase] | None = None  # with the versions of its weights
        self.train(dense.training)

    def __getattr__(self, name: str) -> Any:
        """Return options of torch's layer (`hidden_size`, `batch_first`, …) too."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            engine = self.__dict__.get("_engine")
            if engine is None or name.startswith("_") or name == "all_weights":
                raise  # its weights are empty
            return getattr(engine[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the options of torch's layer that users change between calls."""
        if name in ("batch_first", "dropout"):
            setattr(self._engine[0], name, value)
        else:
            super().__setattr__(name, value)

    def count_positions(self, *inputs: Any) -> int:
        """Count the steps of all sequences, at each of which every weight is applied."""
        x: Tensor = inputs[0].data  # of a packed sequence, or the tensor itself
        return x.numel() // x.shape[-1]

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        positions = self.count_positions(input)
        for matrix in self._modules.values():
            if hasattr(matrix, "note_positions"):
                matrix.note_positions(positions)  # type: ignore[union-attr, operator]
        if self._can_keep_weights():
            return self._with_weights().train(self.training)(input, hx)
        engine = self._engine[0].train(self.training)
        return torch.func.functional_call(engine, dict(self._weights()), (input, hx))

    def observed(
        self, on_product: OnProduct, input: Tensor | PackedSequence, hx: Any = None
    ) -> Any:
        """Compute step by step, without dropout, and report what each weight multiplies.

        torch's kernels return neither all hidden states nor gates; this way each product of a
        weight is a tensor with a gradient. Returns the output, or None for packed sequences.
        """
        return _Unrolled(self._engine[0], dict(self._weights()), on_product)(input, hx)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters of torch's layer, with products of factors."""
        yield from self._parameters.items()  # type: ignore[misc]
        for name, matrix in self._modules.items():
            yield name, matrix.weight  # type: ignore[union-attr, misc]

    def _can_keep_weights(self) -> bool:
        """Return whether this is a deployed layer in a call without gradients."""
        return (
            not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
            and all(
                type(matrix) in (Matrix, Product, PivotedProduct)
                for matrix in self._modules.values()
            )
        )

    def _with_weights(self) -> nn.RNNBase:
        """Return torch's layer with the current weights, cached until they change."""
        versions = [
            (p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.parameters()
        ]
        if self._ready is None or self._ready[0] != versions:
            ready = _without_memory(self._engine[0])
            for name, weight in self._weights():
                setattr(ready, name, nn.Parameter(weight.detach(), requires_grad=False))
            self._ready = versions, ready
        return self._ready[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None}  # copies and files contain only the factors

    def repacked(self, parts: Mapping[str, nn.Module]) -> nn.RNNBase | None:
        """Return torch's own layer over these weights, None unless all are dense."""
        plain = _without_memory(self._engine[0])
        for name, matrix in parts.items():
            if not isinstance(matrix, Matrix):
                return None
            setattr(plain, name, _copied(matrix.weight))
        for name, parameter in self._parameters.items():
            assert parameter is not None
            setattr(plain, name, _copied(parameter))
        return plain.train(self.training)

    def extra_repr(self) -> str:
        return str(self._engine[0])


class _Unrolled:
    """A recurrent layer computed step by step over (steps, sequences, …), for calibration; slow."""

    def __init__(
        self, layer: nn.RNNBase, weights: Mapping[str, Tensor], on_product: OnProduct
    ) -> None:
        self._layer, self._weights, self._on_product = layer, weights, on_product

    def __call__(self, inputs: Tensor | PackedSequence, hidden: Any) -> Any:
        layer, single = self._layer, False
        packed = isinstance(inputs, PackedSequence)
        if isinstance(inputs, PackedSequence):
            x, lengths = pad_packed_sequence(inputs)
        else:
            single = inputs.ndim == 2
            x = inputs.unsqueeze(1) if single else inputs
            x = x.transpose(0, 1) if layer.batch_first and not single else x
            lengths = torch.full((x.shape[1],), len(x))
        alive = torch.arange(len(x))[:, None].to(x.device) < lengths.to(x.device)
        ends: list[tuple[Tensor, ...]] = []
        for number in range(layer.num_layers):
            outputs = []
            for suffix in ("", "_reverse")[: 2 if layer.bidirectional else 1]:
                start = self._start(hidden, len(ends), x, single)
                output, end = self._direction(x, start, f"l{number}{suffix}", alive)
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

    def _start(self, hidden: Any, index: int, x: Tensor, single: bool) -> tuple[Tensor, ...]:
        """Return the initial states of one direction of one layer."""
        if hidden is not None:
            states = hidden if isinstance(hidden, tuple) else (hidden,)
            return tuple(s[index][None] if single else s[index] for s in states)
        zeros = x.new_zeros(x.shape[1], self._layer.proj_size or self._layer.hidden_size)
        if isinstance(self._layer, nn.LSTM):
            return zeros, x.new_zeros(x.shape[1], self._layer.hidden_size)
        return (zeros,)

    def _product(self, kind: str, where: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply rows by a weight, and report those that are not padding."""
        name = f"weight_{kind}_{where}"
        product = F.linear(rows, self._weights[name])
        self._on_product(name, rows.detach()[counts], product)
        bias = self._weights.get(f"bias_{kind}_{where}")
        return product if bias is None else product + bias

    def _direction(
        self, x: Tensor, states: tuple[Tensor, ...], where: str, alive: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run one direction of one layer; return its outputs and its last states.

        `alive` (steps, sequences) is True where a sequence has not ended.
        """
        from_input = self._product("ih", where, x, alive)
        steps = range(len(x))
        outputs: dict[int, Tensor] = {}
        for step in reversed(steps) if where.endswith("_reverse") else steps:
            running = alive[step]
            gates = self._product("hh", where, states[0], running)
            new = self._step(from_input[step], gates, states, where, running)
            states = tuple(
                torch.where(running[:, None], now, before)
                for now, before in zip(new, states, strict=True)
            )
            outputs[step] = states[0]
        return torch.stack([outputs[step] for step in steps]), states

    def _step(
        self, i: Tensor, h: Tensor, states: tuple[Tensor, ...], where: str, alive: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the next states from the products of inputs and hidden states."""
        if isinstance(self._layer, nn.LSTM):
            into, forget, cell, out = (i + h).chunk(4, -1)
            memory = forget.sigmoid() * states[1] + into.sigmoid() * cell.tanh()
            output = out.sigmoid() * memory.tanh()
            if self._layer.proj_size:
                output = self._product("hr", where, output, alive)
            return output, memory
        if isinstance(self._layer, nn.GRU):
            (reset, update, new), (reset_h, update_h, new_h) = i.chunk(3, -1), h.chunk(3, -1)
            keep = (update + update_h).sigmoid()
            fresh = (new + (reset + reset_h).sigmoid() * new_h).tanh()
            return ((1 - keep) * fresh + keep * states[0],)
        act = torch.tanh if self._layer.nonlinearity == "tanh" else torch.relu
        return (act(i + h),)


def _computed_weights(dense: nn.Module, names: list[str]) -> str:
    if any(dense._parameters.get(name) is None for name in names):
        return "its weights are computed (weight norm, spectral norm, pruning, parametrized)"
    return ""


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def _without_memory(dense: nn.RNNBase) -> nn.RNNBase:
    kind: Any = next(kind for kind in (nn.LSTM, nn.GRU, nn.RNN) if isinstance(dense, kind))
    options: dict[str, Any] = {"nonlinearity": dense.nonlinearity} if kind is nn.RNN else {}
    if kind is nn.LSTM:
        options["proj_size"] = dense.proj_size
    dtype = next(dense.parameters()).dtype
    empty: nn.RNNBase = kind(
        dense.input_size, dense.hidden_size, dense.num_layers, bias=dense.bias,
        batch_first=dense.batch_first, dropout=dense.dropout, bidirectional=dense.bidirectional,
        device="meta", dtype=dtype, **options,
    )  # fmt: skip
    return empty
