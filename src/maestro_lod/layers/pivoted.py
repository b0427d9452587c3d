"""Pivoted form: some rows of a matrix, and its other rows as combinations of them.

A matrix (m, n) of rank r has r independent rows. With them, r coefficients give each other row: the
product W·x is the kept rows times x, then the coefficients times that, in the order of all rows. In
the same way with columns: W·x is the kept columns times the sum of the kept inputs and of the
coefficients times the others. These are r·(m + n - r) numbers, fewer than two factors have, and
never more than the matrix.

The rows are chosen such that no coefficient is larger than 2. Such rows exist for every matrix,
also where its rank is lower than r. The file imports only torch, so that an extracted model needs
these classes alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LARGEST_COEFFICIENT = 2.0
INDEX_TYPE = torch.int32


class PivotedForm(nn.Module):
    """Base of pivoted layers."""

    @property
    def rank(self) -> int:
        """The number of kept rows, of each group."""
        raise NotImplementedError


class PivotedOutputs(PivotedForm):
    """A layer that computes the kept outputs, and from them the others.

    `order` has the place of each output, the kept ones coming first.
    """

    order: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        first: nn.Module,
        second: nn.Module,
        order: Tensor,
        bias: nn.Parameter | None = None,
        *,
        dim: int = -1,
    ) -> None:
        super().__init__()
        self.register_buffer("order", order.flatten().to(INDEX_TYPE))
        self.first, self.second = first, second
        self._dim = dim  # of the outputs, from the end
        self.register_parameter("bias", bias)

    @property
    def rank(self) -> int:
        weight: Tensor = self.second.weight  # type: ignore[assignment]
        return weight.shape[1]

    def forward(self, input: Tensor) -> Tensor:
        kept = self.first(input)
        both = torch.cat([kept, self.second(kept)], self._dim)
        output = both.index_select(self._dim, self.order)
        if self.bias is None:
            return output
        bias = self.bias.view(-1, *[1] * (-1 - self._dim)).to(output.dtype)
        return output.add_(bias)  # in its own memory: moving it is what this form costs

    def extra_repr(self) -> str:
        return f"rank={self.rank}, bias={self.bias is not None}"


class PivotedInputs(PivotedForm):
    """A layer that adds combinations of the other inputs to those that it keeps."""

    kept: Tensor
    others: Tensor

    def __init__(
        self, first: nn.Module, second: nn.Module, kept: Tensor, others: Tensor, *, dim: int = -1
    ) -> None:
        super().__init__()
        self.register_buffer("kept", kept.flatten().to(INDEX_TYPE))
        self.register_buffer("others", others.flatten().to(INDEX_TYPE))
        self.first, self.second = first, second
        self._dim = dim  # of the inputs, from the end

    @property
    def rank(self) -> int:
        return len(self.kept) // getattr(self.second, "groups", 1)

    def forward(self, input: Tensor) -> Tensor:
        kept = input.index_select(self._dim, self.kept)
        combined = kept + self.first(input.index_select(self._dim, self.others))
        output: Tensor = self.second(combined)
        return output

    def extra_repr(self) -> str:
        return f"rank={self.rank}"


@torch.no_grad()
def pivoted_matrices(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pivoted form of the products of (groups, m, r) and (groups, r, n) matrices.

    Returns:
        The kept rows (groups, r, n), the coefficients (groups, m - r, r), and the numbers of the
        rows (groups, m), the kept ones first. All is computed in float64 and rounded once.
    """
    groups, m, rank = left.shape
    if left.is_meta:
        all_rows = torch.arange(m, device=left.device).expand(groups, m)
        return left[:, :rank] @ right, left[:, rank:].contiguous(), all_rows
    wide = left.double()
    # an orthonormal basis of the columns: small, equal and missing columns do not matter then
    found = [_choose_rows(basis) for basis in torch.linalg.qr(wide).Q]
    rows, coefficients = (torch.stack(each) for each in zip(*found, strict=True))
    kept = wide.gather(1, rows[:, :rank, None].expand(-1, -1, rank)) @ right.double()
    return kept.to(left.dtype), coefficients.to(left.dtype), rows


def _choose_rows(basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of (m, r), the kept ones first, and the coefficients of the others.

    The pivots of an LU decomposition are the start. A coefficient c is the factor by which the
    volume of the kept rows grows if its row is exchanged, so that exchanges come to an end.
    """
    m, rank = basis.shape
    rows = list(range(m))
    for i, pivot in enumerate((torch.linalg.lu_factor_ex(basis).pivots - 1).tolist()):
        rows[i], rows[pivot] = rows[pivot], rows[i]
    while True:
        rows = sorted(rows[:rank]) + sorted(rows[rank:])
        at = torch.tensor(rows, device=basis.device)
        kept, others = basis[at[:rank]], basis[at[rank:]]
        coefficients = torch.linalg.solve_ex(kept, others, left=False).result
        if not _exchange_rows(rows, coefficients.clone()):
            return at, coefficients


def _exchange_rows(rows: list[int], coefficients: Tensor) -> bool:
    """Exchange rows, in place, until all coefficients are small; return whether one was not."""
    exchanged = False
    while coefficients.numel():
        rank = coefficients.shape[1]
        i, j = divmod(int(coefficients.abs().argmax()), rank)
        pivot = float(coefficients[i, j])
        if not abs(pivot) > LARGEST_COEFFICIENT:
            break
        column, row = coefficients[:, j].clone(), coefficients[i].clone()
        column[i] += 1
        row[j] -= 1
        coefficients.addr_(column, row, alpha=-1 / pivot)
        rows[j], rows[rank + i] = rows[rank + i], rows[j]
        exchanged = True
    return exchanged
