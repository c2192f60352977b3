"""Scores against the keys so far: the causal universal set, and the paper's one-pass rule to compare with.

Query t of a causal layer sees keys 1…t, so key j can be heavy for some query at or after j exactly if it is heavy
among K_1:j: adding keys only lowers its score. {j : τ_j(K_1:j) ≥ ε} is therefore the set of all keys that any causal
query can give weight ≥ ε.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from levattention._shapes import Float, Float64
from levattention.checks import require_eps, require_finite, require_keys
from levattention.gram import heads_first, resolve_rtol
from levattention.scorers.leverage import leverage_scores
from levattention.summary import Summary
from levattention.universal import UniversalSet, reaches, select_above

# Rows scored against one factorisation: the Cholesky factor of a block costs as much as the products around it.
_BLOCK = 256


def online_scores(keys: Tensor) -> Float64[Tensor, "*batch n"]:
    """τ_j(K_1:j), the leverage of each key among itself and the keys before it.

    Each is at least the final leverage. With X the block whitened by all keys before it and LLᵀ = I + XXᵀ, the score of
    row j is 1 − 1/L_jj²: one small Cholesky factor gives a whole block. A row with a part outside the span of those
    before it scores 1.

    Example:
        >>> online_scores(torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0], [2.0, 0.0]]))
        tensor([1.0000, 0.5000, 1.0000, 0.3333], dtype=torch.float64)
    """
    require_keys(keys)
    require_finite(keys)
    return torch.stack([_one_head(head) for head in heads_first(keys)]).reshape(keys.shape[:-1])


def online_universal_set(keys: Tensor, *, eps: float) -> UniversalSet:
    """The causal universal set {j : τ_j(K_1:j) ≥ ε}, for f(x) = x².

    No causal query, at any position, gives a key outside it a weight ≥ ε; and for each key inside, the query that
    comes right after it can.

    Args:
        keys: (*batch, n, d), in the order the queries see them.
        eps: threshold in (0, 1].

    Example:
        >>> u = online_universal_set(torch.eye(2).repeat(3, 1), eps=0.5)
        >>> sorted(u.index[u.valid].tolist())
        [0, 1, 2, 3]
    """
    eps = require_eps(eps)
    scores = online_scores(keys)
    return select_above(scores, eps, cap=1)


@dataclass(frozen=True)
class KeepForever:
    """What the paper's one-pass rule stores and finds.

    Attributes:
        stored: positions of the rows whose online score was at least ε when they came; none is ever dropped.
        index: those of them whose final leverage reaches ε.
    """

    stored: Tensor
    index: Tensor


def keep_forever(keys: Float[Tensor, "n d"], *, eps: float) -> KeepForever:
    """The paper's one-pass algorithm, as a reference: a row is stored if k_jᵀ(K_1:j−1ᵀK_1:j−1)⁻¹k_j ≥ ε.

    It finds the same U as `KeyStream`, but its memory grows with the log of the online condition number.
    """
    inclusive = online_scores(keys)
    # The rule leaves the row itself out of the Gram: o = τ/(1 − τ), without bound where the direction is new.
    exclusive = torch.where(inclusive < 1, inclusive / (1 - inclusive), torch.inf)
    stored = reaches(exclusive, require_eps(eps)).nonzero().squeeze(-1)
    final = leverage_scores(keys)[stored]
    return KeepForever(stored, stored[reaches(final, eps)])


def _one_head(keys: Float[Tensor, "n d"]) -> Float64[Tensor, " n"]:
    """Online scores of one head, block after block."""
    n, d = keys.shape
    scores = torch.empty(n, dtype=torch.float64, device=keys.device)
    summary = Summary(d, 1, keys.device)
    first = 0
    while first < n:
        block = keys[first : first + _BLOCK]
        found = _score_block(summary, block.double(), resolve_rtol(None, torch.finfo(keys.dtype).eps, d))
        scores[first : first + len(found)] = found
        summary.update(block[: len(found)].unsqueeze(0))
        first += len(found)
    return scores


def _score_block(summary: Summary, block: Float64[Tensor, "m d"], rtol: float) -> Float64[Tensor, " k"]:
    """Scores of the leading rows of the block: up to the first that leaves the span, or all that leave it at once."""
    basis, lengths = _span(summary, rtol)
    inside = block @ basis
    outside = block - inside @ basis.mT
    size = max(float(lengths.max()) if len(lengths) else 0.0, float(block.norm(dim=-1).max()))
    leaves = outside.norm(dim=-1) > rtol * size if basis.shape[1] < block.shape[1] else torch.zeros(len(block)).bool()
    if leaves[0]:
        room = block.shape[1] - basis.shape[1]
        return torch.ones(_independent(outside[:room], rtol * size), dtype=torch.float64, device=block.device)
    count = int(leaves.int().argmax()) if leaves.any() else len(block)
    white = inside[:count] / lengths
    lower = torch.linalg.cholesky(torch.eye(count, dtype=torch.float64, device=block.device) + white @ white.mT)
    return 1 - lower.diagonal().square().reciprocal()


def _span(summary: Summary, rtol: float) -> tuple[Tensor, Tensor]:
    """An orthonormal basis (d, r) of the rows so far, and their singular values."""
    if summary.gram.count == 0:
        empty = summary.gram.matrix.new_zeros
        return empty(summary.gram.matrix.shape[-1], 0), empty(0)
    if summary.upper is None:
        squares, basis = torch.linalg.eigh(summary.gram.matrix[0])
        return basis, squares.sqrt()
    _, singular, right = torch.linalg.svd(summary.upper[0])
    keep = singular > singular[0] * rtol
    return right[keep].mT, singular[keep]


def _independent(rows: Float64[Tensor, "m d"], tolerance: float) -> int:
    """How many leading rows each leave the span of those before them: |R_jj| of rowsᵀ = QR is how far row j does."""
    steps = torch.linalg.qr(rows.mT, mode="r").R.diagonal().abs()
    stays = steps <= tolerance
    return int(stays.int().argmax()) if stays.any() else len(steps)
