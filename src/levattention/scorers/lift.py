"""Even p by the symmetric lift: |x|^p is a square in φ(K), so leverage scores of φ(K) bound the sensitivities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.checks import require_keys
from levattention.features import MAX_COLUMNS, TensorPower, gigabytes
from levattention.gram import (
    CPU_TILE,
    FP64_EPS,
    Gram,
    factor_of_triangle,
    heads_first,
    project,
    triangle_of_blocks,
)
from levattention.losses import Power
from levattention.scorers.leverage import factor_keys
from levattention.scorers.lewis import Lewis

# Columns (a Gram of 128 MiB) and multiplications (n·D², half a minute on one core) up to which the lift is worth its
# cost as a matter of course.
AUTO_COLUMNS = 1 << 12
AUTO_WORK = 1 << 38


@dataclass(frozen=True)
class Lift:
    """τ of the lifted keys, which is at least the sensitivity of |x|^p for even p.

    The sensitivity is a supremum over queries y^⊗(p/2), the leverage of φ(K) one over all tensors. The keys are
    whitened before they are lifted: a condition number κ of K would otherwise enter as κ^(p/2).

    Attributes:
        p: an even integer.

    Example:
        >>> Lift(4)(torch.tensor([[1.0], [1.0]]))
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    p: float

    certified: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not Power(self.p).even:
            raise ValueError(f"p: the lift needs an even integer, got {self.p!r}")

    @property
    def lift(self) -> TensorPower:
        """φ, with ⟨φ(x), φ(y)⟩² = ⟨x, y⟩^p."""
        return TensorPower(int(self.p) // 2)

    def __call__(self, keys: Tensor) -> Float64[Tensor, "*batch n"]:
        """A bound in [0, 1] for every key.

        Raises:
            ValueError: bad keys, or a lift that cannot fit; the message has its size.
        """
        require_keys(keys)
        factor, _ = factor_keys(keys)
        whiteners, ranks = heads_first(factor.whitener), factor.rank.reshape(-1).tolist()
        wide = self.lift.width(max(ranks))
        if wide > MAX_COLUMNS:
            raise ValueError(
                f"p: lifting rank {max(ranks)} to p = {self.p} takes {wide:,} columns, a Gram of "
                f"{gigabytes(8 * wide * wide)}; at most {MAX_COLUMNS:,} columns are formed"
            )
        flat = heads_first(keys)
        scores = torch.zeros((len(whiteners), keys.shape[-2]), dtype=torch.float64, device=keys.device)
        for i, rank in enumerate(ranks):
            if rank:
                white = whiteners[i : i + 1, :, whiteners[i].any(0)] * keys.shape[-2] ** 0.5
                scores[i] = self.element(flat if flat.ndim == 2 else flat[i : i + 1], white)
        return scores.reshape(keys.shape[:-1])

    def element(self, flat: Tensor, white: Tensor) -> Float64[Tensor, " n"]:
        """The bound for one batch element, given what maps its rows to √n times an orthonormal basis."""
        n, wide = flat.shape[-2], self.lift.width(white.shape[-1])
        gram = Gram(wide, device=flat.device)
        for _, block in lifted(flat, white, self.lift):
            gram.update(block)
        factor = gram.factor("exact")
        if factor.ill_conditioned:
            upper = triangle_of_blocks((block for _, block in lifted(flat, white, self.lift)), wide)
            factor = factor_of_triangle(upper, 0.0, "exact")
        scores = torch.empty(n, dtype=torch.float64, device=flat.device)
        for span, block in lifted(flat, white, self.lift):
            scores[span] = factor.leverage(block)
        # Directions below the rank cut carry at most this part of √σ, since ‖Φ y^⊗k‖² = ‖z‖ₚ^p ≥ n for unit y.
        lost = wide * FP64_EPS * (gram.matrix.trace() / n).sqrt()
        return (scores.sqrt() + lost).square().clamp(max=1.0)

    def bound(self, d: int, n: int) -> float:
        """Σ τ ≤ the number of columns, up to the rank cut."""
        return min(float(n), self.lift.width(d) * (1 + 1e-6))


@dataclass(frozen=True)
class PowerBound:
    """The smaller, key by key, of the Lewis and the lifted bound on the sensitivities of |x|^p.

    Neither bound dominates the other. The lift is taken where p is even and it pays: fewer columns than keys (it says
    nothing otherwise), at most AUTO_COLUMNS of them and AUTO_WORK multiplications.

    Attributes:
        p: the power, at least 1.

    Example:
        >>> PowerBound(4)(torch.eye(2).repeat(5, 1)).max().item() <= 0.4
        True
    """

    p: float

    certified: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Power(self.p)

    def __call__(self, keys: Tensor) -> Float64[Tensor, "*batch n"]:
        """A bound in [0, 1] for every key."""
        scores = Lewis(self.p)(keys)
        return torch.minimum(scores, Lift(self.p)(keys)) if self.lifts(keys) else scores

    def lifts(self, keys: Tensor) -> bool:
        """Whether the lift is taken for these keys."""
        n, d = keys.shape[-2:]
        if not Power(self.p).even:
            return False
        wide = Lift(self.p).lift.width(d)
        heads = keys.numel() // (n * d)
        return wide <= min(n, AUTO_COLUMNS) and heads * n * wide * wide <= AUTO_WORK

    def bound(self, d: int, n: int) -> float:
        """Ψ, up to the tolerance of the Lewis weights."""
        return Lewis(self.p).bound(d, n)


def lifted(flat: Tensor, white: Tensor, lift: TensorPower) -> Iterator[tuple[slice, Float64[Tensor, "m wide"]]]:
    """φ of one batch element in the coordinates `white`, block by block."""
    for span in spans(flat, lift.width(white.shape[-1])):
        yield span, lift(project(flat, slice(0, 1), span, white)[0])


def spans(flat: Tensor, wide: int) -> Iterator[slice]:
    """Spans of rows whose features fill a tile, or of twice as many rows as columns: a QR of fewer is all overhead."""
    n, step = flat.shape[-2], max(2 * wide, CPU_TILE // wide)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
