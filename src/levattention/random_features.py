"""Positive random features: softmax, approximately, as a generalised attention problem."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from levattention._shapes import Float64


class RandomFeatures:
    """φ with ⟨φ(q), φ(k)⟩² ≈ exp(scale·⟨q, k⟩), for use as key_map and query_map with f(x) = x².

    The generalised attention problem squares the inner product, so the features stand for exp(scale·⟨q, k⟩/2):
    with x' = x·√(scale/2), φ(x) = exp(Ωx' − ‖x'‖²/2)/√D. The inner product is an unbiased estimate of that square
    root; the variance of a feature is exp(2⟨q',k'⟩)·(exp‖q'+k'‖² − 1), so long queries and keys defeat it: see
    docs/softmax.md. With D ≥ n features the leverage of every key is 1 and nothing is selected.

    Args:
        d: width of the rows that will be mapped.
        features: D, width of what comes back.
        generator: source of Ω. One object serves as key_map and query_map, since both must share Ω.
        scale: what multiplies ⟨q, k⟩ in softmax; 1/√d by default.
        orthogonal: rows of Ω orthogonal within blocks of d, each with the length of a Gaussian row. The estimate
            stays unbiased and its variance falls.

    Raises:
        ValueError: a width below 1, a scale that is not positive; when called, rows of another width or with
            entries that are not finite, or so long that exp overflows.

    Example:
        >>> phi = RandomFeatures(4, 256, generator=torch.Generator().manual_seed(0))
        >>> phi(torch.zeros(3, 4)).shape
        torch.Size([3, 256])
    """

    def __init__(
        self,
        d: int,
        features: int,
        *,
        generator: torch.Generator,
        scale: float | None = None,
        orthogonal: bool = False,
    ) -> None:
        if d < 1 or features < 1:
            raise ValueError(f"expected widths of at least 1, got d = {d} and features = {features}")
        scale = d**-0.5 if scale is None else scale
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale: expected a finite number > 0, got {scale!r}")
        self.d, self.features, self.scale = d, features, scale
        draw = _orthogonal if orthogonal else _gaussian
        self.directions = draw(features, d, generator)

    def __call__(self, rows: Tensor) -> Float64[Tensor, "*batch n D"]:
        """φ of every row, (*batch, n, d) -> (*batch, n, D), in fp64."""
        if rows.ndim < 2 or rows.shape[-1] != self.d:
            raise ValueError(f"rows: expected shape (*batch, n, {self.d}), got {tuple(rows.shape)}")
        small = rows.double() * math.sqrt(self.scale / 2)
        exponent = small @ self.directions.to(rows.device).mT - small.square().sum(-1, keepdim=True) / 2
        values = exponent.exp() / math.sqrt(self.features)
        if not values.isfinite().all():
            raise ValueError(
                f"rows: exp({float(exponent.max()):.3g}) is not finite; the rows are too long or not finite"
            )
        return values

    def __repr__(self) -> str:
        return f"RandomFeatures(d={self.d}, features={self.features}, scale={self.scale:g})"


def _gaussian(features: int, d: int, generator: torch.Generator) -> Tensor:
    return torch.randn(features, d, generator=generator, dtype=torch.float64, device=generator.device)


def _orthogonal(features: int, d: int, generator: torch.Generator) -> Tensor:
    """Blocks of at most d orthogonal rows; each row alone is a standard Gaussian vector."""
    blocks = math.ceil(features / d)
    frame, triangle = torch.linalg.qr(_gaussian(blocks * d, d, generator).reshape(blocks, d, d))
    # The signs of R's diagonal make the frame uniformly distributed.
    rows = (frame * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.reshape(blocks * d, d)[:features]
    return rows * _gaussian(features, d, generator).norm(dim=-1, keepdim=True)
