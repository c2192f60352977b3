"""Sparse keys: rows, Grams and products of a two-dimensional `torch.sparse_csr` tensor, at O(nnz·d) a pass.

No dense n × d tensor is made: products are formed over spans of rows, whose size `gram.tiles` bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_csr(keys: Tensor) -> bool:
    """Whether the keys are stored as compressed sparse rows."""
    return keys.layout is torch.sparse_csr


def csr_rows(keys: Tensor, span: slice) -> Tensor:
    """Rows span of the keys, as fp64 compressed sparse rows."""
    crow = keys.crow_indices()[span.start : span.stop + 1]
    first, last = int(crow[0]), int(crow[-1])
    columns, values = keys.col_indices()[first:last], keys.values()[first:last].double()
    shape = (len(crow) - 1, keys.shape[-1])
    return torch.sparse_csr_tensor(crow - first, columns, values, shape, check_invariants=False)


def csr_gram(block: Tensor, weights: Tensor | None) -> Tensor:
    """Σ wᵢkᵢkᵢᵀ of the rows of the block: Σ nnz(kᵢ)² ≤ nnz·d multiplications."""
    rows = block.to_sparse_coo()
    weighted = rows
    if weights is not None:
        where = rows.indices()
        weighted = torch.sparse_coo_tensor(
            where, rows.values() * weights[where[0]], rows.shape, is_coalesced=True, check_invariants=False
        )
    return torch.sparse.mm(weighted.t(), rows).to_dense()


def csr_pick(keys: Tensor, index: Tensor) -> Tensor:
    """The rows at these positions, dense, (c, d)."""
    return keys.to_sparse_coo().index_select(0, index).to_dense()
