"""Keys with a planted stand-out set: the paper's block Gaussian, and a near-orthogonal set that allows more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from levattention._shapes import Float, Float64, Int64
from levattention.checks import FLOATS
from levattention.planted.assumptions import Assumptions, at_most, check
from levattention.planted.query import Queries, queries

# Rows drawn at a time. Fixed, so that a seed gives the same keys everywhere.
ROWS = 4096


@dataclass(frozen=True)
class Planted:
    """Keys, and the set planted in them.

    Attributes:
        keys: K.
        standout: positions of S, sorted.
        subspace: an orthonormal basis of V, which holds nearly all of a stand-out key and little of any other.
    """

    keys: Float[Tensor, "n d"]
    standout: Int64[Tensor, " s"]
    subspace: Float64[Tensor, "k d"]

    @cached_property
    def assumptions(self) -> Assumptions:
        """δ1, δ2 and ρ as measured, found once."""
        return check(self.keys, self.standout)

    def queries(
        self,
        relevant: Sequence[Any],
        *,
        delta1: float | None = None,
        weights: Sequence[Any] | None = None,
        noise: float | Tensor = 1.0,
        generator: torch.Generator | None = None,
    ) -> Queries:
        """Queries with these relevant sets; see `planted.queries`.

        Args:
            relevant: S(q) for each query.
            delta1: by default as measured; a larger one asks for heavier weights and allows more noise.
            weights: w for each query; drawn where left out.
            noise: how much of the allowed noise to use, or the z themselves.
            generator: source of the weights and the noise.

        Raises:
            ValueError: the assumptions do not hold at this δ1, or the choice breaks a bound.
        """
        return queries(
            self.keys,
            self.standout,
            relevant,
            delta1=self.require_model(delta1),
            weights=weights,
            noise=noise,
            generator=generator,
        )

    def random_queries(self, count: int, generator: torch.Generator, *, noise: float = 1.0) -> Queries:
        """`count` queries with random weights and noise, their relevant sets of every size up to the largest possible.

        Raises:
            ValueError: the assumptions do not hold.
        """
        self.require_model()
        size = len(self.standout)
        most = min(size, self.assumptions.max_relevant)
        sizes = torch.randint(1, most + 1, (count,), generator=generator, device=generator.device).tolist()
        device = self.standout.device
        sets = [
            self.standout[torch.randperm(size, generator=generator, device=generator.device)[:r].to(device)]
            for r in sizes
        ]
        return self.queries(sets, noise=noise, generator=generator)

    def require_model(self, delta1: float | None = None) -> float:
        """δ1, as measured or as given, once the assumptions are known to hold with it."""
        measured = self.assumptions
        if delta1 is not None and not at_most(measured.delta1, delta1):
            raise ValueError(f"delta1: expected at least the measured {measured.delta1:.4g}, got {delta1:.4g}")
        taken = measured if delta1 is None else replace(measured, delta1=delta1)
        if not taken.holds:
            raise ValueError("the model's assumptions do not hold: " + "; ".join(taken.problems))
        return taken.delta1


def generate(
    n: int,
    d: int,
    k: int,
    eps0: float,
    eps1: float,
    generator: torch.Generator,
    *,
    rotate: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Planted:
    """Block Gaussian keys: ε0·n stand-out rows near a k-dimensional V, the rest near its complement.

    With coordinates in V first, a stand-out row is N(0, 1/k) in V and N(0, ε1/(d−k)) outside; any other row is
    N(0, ε1/k) in V and N(0, 1/(d−k)) outside. The stand-out rows are at random places. Whether the assumptions hold
    is for `check` to say: δ1 comes out near √(2 ln(|S|²/2)/k), not near the 4/k of the paper, so a query with one
    relevant key needs k of about 32 ln(|S|²/2).

    Args:
        n: how many keys.
        d: their dimension.
        k: dimension of V, at most d/4.
        eps0: share of stand-out keys; |S| = ⌊ε0·n⌋ must be at least 1.
        eps1: squared length that a key has on the wrong side.
        generator: source of all randomness; the keys live on its device.
        rotate: turn the whole by a random rotation, so that V is along no axes.
        dtype: of the keys.

    Raises:
        ValueError: k > d/4, ε0·n < 1, or a value out of range.

    Example:
        >>> model = generate(1000, 64, 16, 0.01, 1e-4, torch.Generator().manual_seed(0))
        >>> model.keys.shape, len(model.standout), model.assumptions.holds
        (torch.Size([1000, 64]), 10, False)
    """
    size = require_setting(n, d, k, eps0, eps1)
    scale = spread(k, d, 1.0, eps1)

    def standing_out() -> Tensor:
        return normal(size, d, generator) * scale.to(generator.device)

    return assemble(n, d, k, size, eps1, standing_out, generator, rotate, dtype)


def near_orthogonal(
    n: int,
    d: int,
    k: int,
    eps0: float,
    eps1: float,
    generator: torch.Generator,
    *,
    noise: float = 0.02,
    rotate: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Planted:
    """Keys whose stand-out rows are nearly orthonormal in V, so that a query can have several relevant keys.

    A stand-out row is one of ⌊ε0·n⌋ orthonormal vectors of V, plus Gaussian noise of expected length `noise` within
    V and √ε1 outside; all else is as in `generate`. δ1 comes out near noise·√(2/k)·√(2 ln(|S|²/2)).

    Args:
        n: how many keys.
        d: their dimension.
        k: dimension of V, at most d/4.
        eps0: share of stand-out keys; 1 ≤ ⌊ε0·n⌋ ≤ k.
        eps1: squared length that a key has on the wrong side. δ2 ≤ δ1 asks for ε1 well under noise².
        generator: source of all randomness; the keys live on its device.
        noise: length of the perturbation within V.
        rotate: turn the whole by a random rotation, so that V is along no axes.
        dtype: of the keys.

    Raises:
        ValueError: k > d/4, ε0·n < 1, ε0·n > k, or a value out of range.

    Example:
        >>> model = near_orthogonal(1000, 64, 16, 0.016, 1e-5, torch.Generator().manual_seed(0))
        >>> model.assumptions.holds, model.assumptions.max_relevant >= 8
        (True, True)
    """
    size = require_setting(n, d, k, eps0, eps1)
    if size > k:
        raise ValueError(f"eps0: expected ε0·n ≤ k = {k}, got {size}: V holds no more orthonormal keys than k")
    if not 0.0 <= noise < 1.0:
        raise ValueError(f"noise: expected a length in [0, 1), got {noise}")
    scale = spread(k, d, noise**2, eps1)

    def standing_out() -> Tensor:
        rows = normal(size, d, generator) * scale.to(generator.device)
        rows[:, :k] += rotation(k, generator)[:size]
        return rows

    return assemble(n, d, k, size, eps1, standing_out, generator, rotate, dtype)


def require_setting(n: int, d: int, k: int, eps0: float, eps1: float) -> int:
    """|S| = ⌊ε0·n⌋, once the setting is known to be possible."""
    for name, value in (("n", n), ("d", d), ("k", k)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected a positive integer, got {value!r}")
    if 4 * k > d:
        raise ValueError(f"k: expected k ≤ d/4 = {d / 4:g}, got {k}: keys outside S need room outside V")
    if not 0.0 < eps0 <= 1.0:
        raise ValueError(f"eps0: expected a share in (0, 1], got {eps0}")
    if not 0.0 <= eps1 < math.inf:
        raise ValueError(f"eps1: expected a finite number ≥ 0, got {eps1}")
    # 0.29 · 100 is 28.999… in floating point.
    size = math.floor(eps0 * n + 1e-9)
    if size < 1:
        raise ValueError(f"eps0: expected ε0·n ≥ 1, got {eps0:g} · {n} = {eps0 * n:.3g}: no key would stand out")
    return size


def spread(k: int, d: int, inside: float, outside: float) -> Float64[Tensor, " d"]:
    """Standard deviations of the coordinates, for expected squared lengths inside and outside V."""
    return torch.cat(
        [
            torch.full((k,), math.sqrt(inside / k), dtype=torch.float64),
            torch.full((d - k,), math.sqrt(outside / (d - k)), dtype=torch.float64),
        ]
    )


def normal(rows: int, columns: int, generator: torch.Generator) -> Float64[Tensor, "rows columns"]:
    """Standard normal numbers in fp64."""
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64, device=generator.device)


def rotation(d: int, generator: torch.Generator) -> Float64[Tensor, "d d"]:
    """A uniformly random orthogonal matrix."""
    q, r = torch.linalg.qr(normal(d, d, generator))
    # QR leaves signs open; fixing those of R makes Q uniform.
    return q * r.diagonal().sign()


def assemble(
    n: int,
    d: int,
    k: int,
    size: int,
    eps1: float,
    standing_out: Callable[[], Tensor],
    generator: torch.Generator,
    rotate: bool,
    dtype: torch.dtype,
) -> Planted:
    """The model: stand-out rows at random places among rows near the complement of V, all turned if asked."""
    if dtype not in FLOATS:
        raise ValueError(f"dtype: expected fp16, bf16, fp32 or fp64, got {dtype}")
    device = generator.device
    standout = torch.randperm(n, generator=generator, device=device)[:size].sort().values
    special = standing_out()
    turn = rotation(d, generator) if rotate else torch.eye(d, dtype=torch.float64, device=device)
    scale = spread(k, d, eps1, 1.0).to(device)
    keys = torch.empty((n, d), dtype=dtype, device=device)
    for start in range(0, n, ROWS):
        block = normal(min(ROWS, n - start), d, generator) * scale
        keys[start : start + ROWS] = (block @ turn if rotate else block).to(dtype)
    keys[standout] = (special @ turn if rotate else special).to(dtype)
    return Planted(keys, standout, turn[:k])
