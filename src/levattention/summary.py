"""What is remembered of keys that are gone: their Gram, and their triangular factor where the Gram is not enough.

A Gram holds nine digits of a score while κ ≤ 1e3. The moment a block makes the keys ill-conditioned, the factor R of
all that came before is still exact enough to be taken from the Gram (it was well-conditioned until then), and from
there on R is carried by QR of [R; block], whose error grows like κ, not κ². When later rows heal the conditioning, the
Gram is right again and R is let go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from levattention._shapes import Bool, Float64
from levattention.gram import (
    FP64_EPS,
    GRAM_LIMIT,
    Factor,
    Gram,
    factor_of_triangle,
    project,
    resolve_rtol,
    tiles,
)

# How the two lower bounds on yᵀGy, the Gram so far and the noise floor, are mixed; see `Prune`.
_MIXES = (0.5, 0.9, 0.99, 0.999, 0.99999)

# κ beyond which a computed score may be off by more than the pruning slack.
_DEGENERATE = 1e8


@dataclass(frozen=True)
class Prune:
    """Upper bounds, from what has been seen so far, on the score a row can have in the end.

    While the keys are well-conditioned the bound is the leverage against the Gram so far, since added rows never
    raise a leverage score. In the end, directions v with σ_v under θ = rtol·σ_max count as noise. Truncation breaks
    monotonicity, so near the noise floor another bound is used: every direction y that survives the final truncation
    has yᵀGy ≥ max(yᵀG_now y, θ²‖y‖²) ≥ λ·yᵀG_now y + (1 − λ)·θ²‖y‖² for each λ in [0, 1], hence the final score is at
    most kᵀ(λG_now + (1 − λ)θ²I)⁻¹k. The smallest over a few λ is taken. A row with a real part in a new direction
    scores 1 or more, as it must.
    """

    basis: Float64[Tensor, "heads d d"]
    inverse: Float64[Tensor, "heads d mixes"]
    slack: Float64[Tensor, "heads 1"]
    largest: Float64[Tensor, "heads 1"]

    def bound(self, rows: Tensor) -> Float64[Tensor, "heads m"]:
        """Upper bounds on the final scores of rows (heads, m, d)."""
        bounds = torch.empty(rows.shape[:-1], dtype=torch.float64, device=rows.device)
        for heads, span in tiles(rows):
            squares = project(rows, heads, span, self.basis).square_()
            bounds[heads, span] = (squares @ self.inverse[heads]).amin(-1)
        return bounds

    def spares(self, rows: Tensor, eps: float) -> Bool[Tensor, "heads m"]:
        """Rows so short that ‖k‖² times the largest eigenvalue of the inverse stays under ε: no need to score them."""
        wide = rows if rows.dtype in _WIDE else rows.float()
        # What squares of tiny entries lose to underflow must not pass for a short row.
        lost = rows.shape[-1] * torch.finfo(wide.dtype).tiny
        # One part in a thousand covers the rounding of a norm taken in fp32.
        return (torch.linalg.vecdot(wide, wide).double() + lost) * self.largest < 0.999 * eps

    def dismisses(self, rows: Tensor, eps: float) -> Bool[Tensor, "heads m"]:
        """Rows whose score in fp32 stays under ε by more than it can be off; a quarter of the time of an fp64 score.

        With P the whitener, each entry of kP is a sum of d products: fp32 moves ‖kP‖ by at most (d + 2)·u·‖k‖·‖P‖_F.
        """
        found = torch.zeros(rows.shape[:-1], dtype=torch.bool, device=rows.device)
        # Elsewhere than on the CPU a product in fp32 may be one in TF32, and fp64 costs little.
        if rows.device.type != "cpu" or rows.dtype is torch.float64 or self.inverse.shape[-1] > 1:
            return found
        whitener = self.basis * self.inverse.mT.sqrt()
        size = whitener.flatten(1).norm(dim=-1)
        if not bool(((size > 1e-30) & (size < 1e30)).all()):
            return found
        single, d = torch.finfo(torch.float32), rows.shape[-1]
        narrow, off, lost = whitener.float(), (d + 2) * single.eps * size.unsqueeze(-1), math.sqrt(d * single.tiny)
        for heads, span in tiles(rows):
            block = rows[heads, span].float()
            scores, lengths = (torch.linalg.vecdot(v, v).double() for v in (block @ narrow[heads], block))
            most = (scores.sqrt() * 1.001 + off[heads] * (lengths.sqrt() * 1.001 + lost)).square()
            # What overflowed is not under ε, nor is NaN.
            found[heads, span] = most < 0.999 * eps * (1 - self.slack[heads])
        return found

    def keeps(self, scores: Tensor, eps: float) -> Bool[Tensor, "heads m"]:
        """Rows that may still reach ε in the end."""
        return scores >= eps * (1 - self.slack)


_WIDE = (torch.float32, torch.float64)


class Summary:
    """The Gram of the rows seen so far, and R where it is ill-conditioned; batched over heads.

    Attributes:
        gram: over (heads, d, d).
        upper: R, (heads, d, d), while some head is ill-conditioned; otherwise None.
    """

    def __init__(self, d: int, heads: int, device: torch.device | str | None = None) -> None:
        self.gram = Gram(d, batch=(heads,), device=device)
        self.upper: Tensor | None = None
        self._cached: tuple[int, Tensor, Tensor] | None = None

    def update(self, rows: Tensor) -> Summary:
        """This summary, with rows (heads, m, d) added."""
        before = self.gram.matrix.clone()
        self.gram.update(rows)
        if self._triangle_is_due():
            carried = self.upper if self.upper is not None else root(before)
            self.upper = torch.linalg.qr(torch.cat([carried, rows.double()], -2), mode="r").R
        else:
            self.upper = None
        return self

    def merge(self, other: Summary) -> Summary:
        """This summary, with all rows of the other added."""
        mine, theirs = self.triangle(), other.triangle().to(self.gram.matrix.device)
        self.gram.merge(other.gram)
        due = self._triangle_is_due()
        self.upper = torch.linalg.qr(torch.cat([mine, theirs], -2), mode="r").R if due else None
        return self

    def triangle(self) -> Tensor:
        """R with RᵀR = G."""
        return self.upper if self.upper is not None else root(self.gram.matrix)

    def factor(self) -> Factor:
        """The whitener that the offline routine would give for the same rows."""
        if self.upper is None:
            return self.gram.factor()
        parts = [factor_of_triangle(upper, self.gram.input_eps) for upper in self.upper]
        names = ("whitener", "rank", "condition", "ill_conditioned")
        return Factor(*(torch.stack([getattr(part, name) for part in parts]) for name in names))

    def prune(self) -> Prune:
        """The bound by which rows may be dropped for good."""
        if self.upper is None:
            return well_conditioned_bound(*self._spectrum())
        _, singular, right = torch.linalg.svd(self.upper)
        return noisy_bound(singular.square(), right.mT, self.gram.input_eps)

    def state(self) -> dict[str, Tensor]:
        """All that must be saved."""
        kept = {"gram": self.gram.matrix, "seen": torch.tensor([float(self.gram.count), self.gram.input_eps]).double()}
        return kept if self.upper is None else kept | {"upper": self.upper}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take up a saved state; where R is in it, the Gram may be missing."""
        self.upper = state.get("upper")
        self.gram.matrix = state["gram"] if self.upper is None or "gram" in state else self.upper.mT @ self.upper
        count, self.gram.input_eps = state["seen"].tolist()
        self.gram.count, self._cached = int(count), None

    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the Gram, computed once for each state."""
        if self._cached is None or self._cached[0] != self.gram.count:
            self._cached = (self.gram.count, *torch.linalg.eigh(self.gram.matrix))
        return self._cached[1:]

    def _triangle_is_due(self) -> bool:
        """Whether the Gram of some head holds fewer than nine digits."""
        squares, _ = self._spectrum()
        return bool((squares[..., 0] <= GRAM_LIMIT * squares[..., -1]).any())


def well_conditioned_bound(squares: Tensor, basis: Tensor) -> Prune:
    """The leverage against the rows so far."""
    inverse = squares.reciprocal().unsqueeze(-1)
    slack = torch.full_like(squares[..., :1], 1e-6)
    return Prune(basis, inverse, slack, inverse.amax(-2))


def noisy_bound(squares: Tensor, basis: Tensor, input_eps: float) -> Prune:
    """The smallest of the mixed bounds, and of the plain one where κ leaves it enough digits."""
    tiny = torch.finfo(torch.float64).tiny
    top, low = squares.amax(-1, keepdim=True), squares.amin(-1, keepdim=True)
    floor = top * resolve_rtol(None, input_eps, basis.shape[-1]) ** 2
    mixes = torch.tensor(_MIXES, dtype=torch.float64, device=squares.device)
    mixed = squares.unsqueeze(-1) * mixes + floor.unsqueeze(-1) * (1 - mixes)
    condition = (top / low.clamp(min=tiny)).sqrt()
    trusted = condition < _DEGENERATE
    plain = torch.where(trusted, squares, mixed[..., 0]).unsqueeze(-1)
    # Keys that are all zero so far say nothing: every row that is not zero must be kept.
    inverse = torch.cat([plain, mixed], -1).clamp(min=1e-300).reciprocal()
    reach = torch.where(trusted, condition, (top / floor.clamp(min=tiny)).sqrt())
    slack = (32 * FP64_EPS * reach).clamp(min=1e-6, max=0.5)
    return Prune(basis.contiguous(), inverse, slack, inverse.amax(-2).amin(-1, keepdim=True))


def root(matrix: Tensor) -> Tensor:
    """R with RᵀR = G, by eigendecomposition: also right where G is singular because few rows came yet."""
    squares, basis = torch.linalg.eigh(matrix)
    return squares.clamp(min=0.0).sqrt().unsqueeze(-1) * basis.mT
