"""KᵀK in fp64: the one mergeable summary behind every score of the form kᵀM⁺k.

Products of two fp16, bf16 or fp32 numbers are exact in fp64, so the Gram resolves everything above the input's own
rounding. Its relative error grows like 1e-15·κ², where κ is the condition number of the keys; beyond κ = 1e3 a
triangular factor from QR (error about 1e-16·κ) takes over, and `Factor.ill_conditioned` says where that is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from levattention import kernels
from levattention._shapes import Bool, Float, Float64, Int64
from levattention.checks import require_same_device
from levattention.csr import csr_gram, csr_rows, is_csr

Advance = Callable[[int], None]
"""Told how many rows were just read; what a progress bar listens to."""

FP64_EPS = torch.finfo(torch.float64).eps

# λ_min/λ_max below which the Gram no longer holds nine digits of a score (κ > 1e3).
GRAM_LIMIT = 1e-6

# Elements of one tile. On the CPU a tile and its product stay in the cache; on a GPU launches must be few.
CPU_TILE = 1 << 18
GPU_TILE = 1 << 26


@dataclass(frozen=True)
class Factor:
    """P with τ(k) = ‖kP‖², that is PPᵀ = G⁺, and what was found on the way.

    Attributes:
        whitener: P. Columns of the numerical null space are zero.
        rank: the numerical rank r of the keys.
        condition: κ of the keys on their row space.
        ill_conditioned: where a Gram does not hold nine digits and a triangular factor is due.
    """

    whitener: Float64[Tensor, "*batch d d"]
    rank: Int64[Tensor, "*batch"]
    condition: Float64[Tensor, "*batch"]
    ill_conditioned: Bool[Tensor, "*batch"]

    def leverage(self, rows: Tensor, advance: Advance | None = None) -> Float64[Tensor, "*batch n"]:
        """τ of every row, (*batch, n, d) -> (*batch, n), tile by tile."""
        return quadratic_forms(rows, self.whitener, advance).clamp_(max=1.0)


class Gram:
    """Σ wᵢ kᵢkᵢᵀ over the rows seen so far, batched over leading dimensions.

    Updates and merges only add, so blocks, streams, machines and Lewis iterations share it.

    Example:
        >>> keys = torch.eye(3).repeat(4, 1)
        >>> Gram.of(keys).leverage(keys)[:3].tolist()
        [0.25, 0.25, 0.25]
    """

    def __init__(self, d: int, *, batch: tuple[int, ...] = (), device: torch.device | str | None = None) -> None:
        self.matrix = torch.zeros((*batch, d, d), dtype=torch.float64, device=device)
        self.count = 0
        self.input_eps = 0.0

    @classmethod
    def of(
        cls,
        keys: Tensor,
        weights: Tensor | None = None,
        advance: Advance | None = None,
        *,
        basis: Tensor | None = None,
    ) -> Gram:
        """The Gram of the whole of `keys`, read once."""
        gram = cls(keys.shape[-1], batch=tuple(keys.shape[:-2]), device=keys.device)
        return gram.update(keys, weights, advance, basis=basis)

    def update(
        self,
        rows: Tensor,
        weights: Tensor | None = None,
        advance: Advance | None = None,
        *,
        basis: Tensor | None = None,
    ) -> Gram:
        """This Gram, with rows (*batch, m, d) added; weights (*batch, m) multiply the outer products.

        With a basis B, (*batch, d, d), the rows kB are added instead of k: a whitener keeps ill-conditioned keys from
        costing the Gram its digits.
        """
        expected = self.matrix.shape[:-2]
        if rows.shape[-1] != self.matrix.shape[-1] or rows.shape[:-2] != expected:
            raise ValueError(f"rows: expected shape {(*expected, 'm', self.matrix.shape[-1])}, got {tuple(rows.shape)}")
        require_same_device([("rows", rows), ("the Gram", self.matrix)])
        if weights is None and basis is None and kernels.preferred(rows):
            self.matrix += kernels.gram(rows, precise=True)
            if advance is not None:
                advance(rows.numel() // rows.shape[-1])
            return self._counted(rows)
        flat, matrix = heads_first(rows), heads_first(self.matrix)
        scale = None if weights is None else weights.reshape(-1, rows.shape[-2]).double()
        frame = None if basis is None else heads_first(basis)
        for heads, span in tiles(flat, advance):
            if is_csr(rows) and frame is None:
                matrix[0] += csr_gram(csr_rows(rows, span), None if scale is None else scale[0, span])
                continue
            block = flat[heads, span].double() if frame is None else project(flat, heads, span, frame)
            weighted = block if scale is None else block * scale[heads, span].unsqueeze(-1)
            matrix[heads].baddbmm_(weighted.mT, block)
        return self._counted(rows)

    def _counted(self, rows: Tensor) -> Gram:
        """This Gram, once the products of `rows` are in the matrix."""
        self.count += rows.shape[-2]
        self.input_eps = max(self.input_eps, torch.finfo(rows.dtype).eps)
        return self

    def merge(self, other: Gram) -> Gram:
        """This Gram, with all rows of the other added."""
        if other.matrix.shape != self.matrix.shape:
            raise ValueError(
                f"merge: expected a Gram of shape {tuple(self.matrix.shape)}, got {tuple(other.matrix.shape)}"
            )
        self.matrix += other.matrix.to(self.matrix.device)
        self.count += other.count
        self.input_eps = max(self.input_eps, other.input_eps)
        return self

    def factor(self, rtol: float | Literal["exact"] | None = None) -> Factor:
        """The whitener by eigendecomposition. One straight route: no data-dependent branch."""
        d = self.matrix.shape[-1]
        values, vectors = torch.linalg.eigh((self.matrix + self.matrix.mT) / 2)
        top = values[..., -1:].clamp(min=0.0)
        keep = values > top * max(resolve_rtol(rtol, self.input_eps, d) ** 2, d * FP64_EPS)
        lowest = torch.where(keep, values, top).amin(-1)
        return Factor(
            whitener=vectors * inverse_where(keep, values.clamp(min=0.0).sqrt()).unsqueeze(-2),
            rank=keep.sum(-1),
            condition=safe_ratio(top.squeeze(-1), lowest).sqrt(),
            ill_conditioned=(lowest < GRAM_LIMIT * top.squeeze(-1)) | ~keep.all(-1),
        )

    def rank(self, rtol: float | Literal["exact"] | None = None) -> Int64[Tensor, "*batch"]:
        """The numerical rank of the rows seen so far."""
        return self.factor(rtol).rank

    def leverage(self, rows: Tensor, rtol: float | Literal["exact"] | None = None) -> Float64[Tensor, "*batch n"]:
        """τ = kᵀG⁺k of each row against all rows seen so far."""
        return self.factor(rtol).leverage(rows)


def quadratic_forms(rows: Tensor, whitener: Tensor, advance: Advance | None = None) -> Float64[Tensor, "*batch n"]:
    """‖kP‖² of every row, (*batch, n, d) and (*batch, d, r) -> (*batch, n), tile by tile."""
    flat, frame = heads_first(rows), heads_first(whitener)
    forms = torch.empty((len(frame), rows.shape[-2]), dtype=torch.float64, device=rows.device)
    for heads, span in tiles(flat, advance):
        forms[heads, span] = project(flat, heads, span, frame).square_().sum(-1)
    return forms.reshape(rows.shape[:-1])


def total_square(keys: Tensor) -> Float64[Tensor, "*batch"]:
    """‖K‖²_F of every batch element, tile by tile."""
    if is_csr(keys):
        return keys.values().double().square().sum()
    flat = heads_first(keys)
    total = torch.zeros(len(flat), dtype=torch.float64, device=keys.device)
    for heads, span in tiles(flat):
        total[heads] += flat[heads, span].double().square().sum((-2, -1))
    return total.reshape(keys.shape[:-2])


def project(flat: Tensor, heads: slice, span: slice, frame: Tensor) -> Float64[Tensor, "h m r"]:
    """One tile of KP, dense in fp64."""
    if is_csr(flat):
        return (csr_rows(flat, span) @ frame[0]).unsqueeze(0)
    return flat[heads, span].double() @ frame[heads]


def triangle(keys: Float[Tensor, "n d"], advance: Advance | None = None) -> Float64[Tensor, "r d"]:
    """R with RᵀR = KᵀK, by QR of [R; block] over blocks of rows in order: error κ·u, not κ²·u."""
    n, d = keys.shape
    step = max(4 * d, CPU_TILE // d)

    def blocks() -> Iterator[Tensor]:
        for start in range(0, n, step):
            span = slice(start, min(start + step, n))
            yield csr_rows(keys, span).to_dense() if is_csr(keys) else keys[span].double()
            if advance is not None:
                advance(span.stop - span.start)

    return triangle_of_blocks(blocks(), d)


def triangle_of_blocks(blocks: Iterable[Tensor], d: int) -> Float64[Tensor, "r d"]:
    """R of the rows of all fp64 blocks (m, d), read once and in order."""
    upper: Tensor | None = None
    for block in blocks:
        upper = torch.linalg.qr(block if upper is None else torch.cat([upper, block]), mode="r").R
    return torch.zeros((0, d), dtype=torch.float64) if upper is None else upper


def factor_of_triangle(
    upper: Float64[Tensor, "r d"], input_eps: float, rtol: float | Literal["exact"] | None = None
) -> Factor:
    """The whitener of the keys whose triangular factor this is; the rank comes from R's singular values."""
    d = upper.shape[-1]
    _, singular, right = torch.linalg.svd(upper, full_matrices=False)
    keep = singular > singular[:1] * resolve_rtol(rtol, input_eps, d)
    whitener = torch.zeros((d, d), dtype=torch.float64, device=upper.device)
    whitener[:, : len(singular)] = right.mT * inverse_where(keep, singular)
    lowest = torch.where(keep, singular, singular[:1]).amin(-1)
    return Factor(whitener, keep.sum(-1), safe_ratio(singular[0], lowest), torch.zeros_like(lowest, dtype=torch.bool))


def resolve_rtol(rtol: float | Literal["exact"] | None, input_eps: float, d: int) -> float:
    """The singular value, relative to the largest, at or below which a direction counts as rounding noise.

    By default four roundings of the input's own dtype; "exact" takes the keys as stored, to the letter.
    """
    floor = d * FP64_EPS
    if rtol is None:
        return max(4 * input_eps, floor)
    if rtol == "exact":
        return floor
    if isinstance(rtol, str) or not 0.0 <= rtol < 1.0:
        raise ValueError(f"rtol: expected None, 'exact' or a number in [0, 1), got {rtol!r}")
    return max(float(rtol), floor)


def inverse_where(keep: Tensor, values: Tensor) -> Tensor:
    """1/values where kept, 0 elsewhere."""
    return torch.where(keep, values, 1.0).reciprocal() * keep


def safe_ratio(top: Tensor, low: Tensor) -> Tensor:
    """top/low, and 1 where both are zero (keys that are all zero)."""
    return torch.where(low > 0, top / torch.where(low > 0, low, 1.0), 1.0)


def heads_first(keys: Tensor) -> Tensor:
    """(*batch, n, d) as (batch, n, d), a view wherever the strides allow one; sparse keys have no batch and stay."""
    if is_csr(keys):
        return keys
    return keys.reshape(math.prod(keys.shape[:-2]), *keys.shape[-2:])


def tiles(flat: Tensor, advance: Advance | None = None) -> Iterator[tuple[slice, slice]]:
    """Slices (heads, rows) that cover a (batch, n, d) tensor in fixed order, each of bounded size."""
    n, d = flat.shape[-2:]
    batch = flat.shape[0] if flat.ndim > 2 else 1
    budget = max(1, (CPU_TILE if flat.device.type == "cpu" else GPU_TILE) // d)
    rows = max(64, min(n, budget))
    heads = max(1, budget // max(n, 1))
    for first in range(0, batch, heads):
        group = slice(first, min(first + heads, batch))
        for start in range(0, n, rows):
            span = slice(start, min(start + rows, n))
            yield group, span
            if advance is not None:
                advance((group.stop - group.start) * (span.stop - span.start))
