"""Recurrent layers over weights that are modules of their own.

torch's recurrent kernels take dense weights, so the factors are multiplied out once per call, for
the whole sequence: training finds the ranks and files hold only the factors, but a step is not
cheaper than a dense one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from maestro_lod.layers.lowrank import LowRank, empty_like_weight

if TYPE_CHECKING:
    from typing_extensions import Self


class Matrix(nn.Module):
    """A dense weight matrix that another module multiplies by."""

    bias = None

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class LowRankMatrix(LowRank):
    """A weight matrix u·v that another module multiplies by; it has no forward of its own."""

    kind = "Matrix"

    @classmethod
    def like(cls, dense: nn.Module, rank: int | None = None) -> Self:
        assert isinstance(dense, Matrix)
        m, n = dense.weight.shape
        rank = min(m, n) if rank is None else rank
        layer = cls(
            empty_like_weight(dense, m, rank),
            empty_like_weight(dense, rank, n),
            None,
            trainable=dense.weight.requires_grad,
        )
        return layer.train(dense.training)

    @property
    def has_factored_form(self) -> bool:
        return False  # torch's recurrent kernels take dense weights

    def dense_is_cheaper(self, rank: int | None = None, *, by: str = "params") -> bool:
        return by != "params" or super().dense_is_cheaper(rank)

    def executed_macs(self, positions: int, rank: int) -> int:
        return (positions + rank) * self.dense_weights

    def dense(self, rank: int | None = None) -> nn.Module:
        u, v = self.truncated(rank)
        return Matrix(nn.Parameter(u @ v, self.trainable[0])).train(self.training)

    def extra_repr(self) -> str:
        return f"{self.u.shape[0]}, {self.v.shape[1]}, {self._repr_rank()}"


class Recurrent(nn.Module):
    """`nn.LSTM`, `nn.GRU` or `nn.RNN` whose weights are matrices of any kind, by torch's names."""

    handed_over: tuple[str, ...] = ()
    """The names of what a user had put on torch's layer."""

    def __init__(self, dense: nn.RNNBase) -> None:
        """Take the options and parameters of `dense`; its weights become `Matrix` modules."""
        super().__init__()
        for name, parameter in dense.named_parameters():
            if parameter.ndim == 2:
                self.add_module(name, Matrix(parameter))
            else:
                self.register_parameter(name, parameter)
        # torch's own layer, without memory of its own, does the work on weights it is handed;
        # a tuple keeps its parameters out of this module's
        self._engine = (_without_memory(dense),)
        self.train(dense.training)

    def __getattr__(self, name: str) -> Any:
        """Answer for torch's options (`hidden_size`, `batch_first`, …) too."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            engine = self.__dict__.get("_engine")
            if engine is None or name.startswith("_") or name == "all_weights":
                raise  # what has no memory must not be seen
            return getattr(engine[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Pass on what users set between calls."""
        if name in ("batch_first", "dropout"):
            setattr(self._engine[0], name, value)
        else:
            super().__setattr__(name, value)

    def positions_of(self, x: Tensor | PackedSequence) -> int:
        """Count the steps of all sequences: each weight is applied at each of them."""
        return x.data.numel() // x.data.shape[-1]

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        positions = self.positions_of(input)
        values: dict[str, Tensor] = dict(self._parameters.items())  # type: ignore[arg-type]
        for name, matrix in self._modules.items():
            assert matrix is not None
            values[name] = matrix.weight  # type: ignore[assignment]
            if isinstance(matrix, LowRank):
                matrix.positions = positions
        engine = self._engine[0].train(self.training)
        return torch.func.functional_call(engine, values, (input, hx))

    def closed(self, parts: Mapping[str, nn.Module]) -> nn.RNNBase | None:
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


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def _without_memory(dense: nn.RNNBase) -> nn.RNNBase:
    kind: Any = type(dense)
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
