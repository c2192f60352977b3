"""Leverage scores by sketching: a superset that loses no heavy key but with a stated probability, then exact scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from levattention._shapes import Bool, Float64
from levattention.checks import require_eps, require_finite, require_keys
from levattention.csr import csr_pick, is_csr
from levattention.gram import heads_first, quadratic_forms, resolve_rtol, total_square
from levattention.losses import Power
from levattention.scorers.leverage import factor_keys, leverage_scores
from levattention.sketches import CountSketch, Sketch, require_sketch
from levattention.tails import chi_square_quantile

# The share of the noise floor in the form that rows are scored by: it keeps that form regular, at 1 % more candidates.
FLOOR_SHARE = 0.01

# Rounding of the two routes may differ by this much, relatively; it only widens the superset.
ROUNDING = 1e-6


@dataclass(frozen=True)
class SketchedLeverage:
    """Leverage scores through ΠK: no key of {τ ≥ ε} is lost, except with probability at most `failure` a head.

    For a heavy key i let y be the query at which its leverage is attained. Ky does not depend on Π, so
    ‖ΠKy‖² ≤ (1+δ)‖Ky‖² but with probability `sketch.overshoot`, and then kᵢᵀ((ΠK)ᵀΠK)⁻¹kᵢ ≥ τᵢ/(1+δ). At most
    rank/ε keys are heavy, so d/ε times that probability covers them all. No subspace embedding is needed, and δ may
    exceed 1: a larger δ, or a smaller m, costs candidates and never a key. `decide` scores the candidates exactly.

    Directions that count as noise in exact scores are bounded by the noise floor, never inverted, so a rank-deficient
    ΠK loses nothing either.

    Attributes:
        sketch: a distribution of `levattention.sketches`.
        delta: δ > 0.
        failure: the probability that may be spent, for each head.
        seed: of the sketch.
        columns: where given, rows are scored through so many Gaussian columns on the right of the *whitened* keys,
            which pays for d ≥ 128; at least 48 are advised. Half of `failure` goes to them.

    Example:
        >>> from levattention.sketches import Gaussian
        >>> keys = torch.cat([torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)), 99 * torch.eye(3)])
        >>> (SketchedLeverage(Gaussian(128), delta=1.0).decide(keys, eps=0.5) >= 0.5).nonzero().squeeze(-1).tolist()
        [1000, 1001, 1002]
    """

    sketch: Sketch
    delta: float
    failure: float = 1e-6
    seed: int = 0
    columns: int | None = None

    certified: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_sketch(self.sketch)
        if not (math.isfinite(self.delta) and self.delta > 0):
            raise ValueError(f"delta: expected a finite number > 0, got {self.delta!r}")
        if not 0 < self.failure < 1:
            raise ValueError(f"failure: expected a probability in (0, 1), got {self.failure!r}")
        if self.columns is not None and (isinstance(self.columns, bool) or self.columns < 1):
            raise ValueError(f"columns: expected an integer >= 1, got {self.columns!r}")

    def __call__(self, keys: Tensor) -> Float64[Tensor, "*batch n"]:
        """Upper bounds on τ that hold for all n keys of a head at once, with probability 1 − failure."""
        require_keys(keys)
        return self._upper(keys, float(keys.shape[-2]))

    def candidates(self, keys: Tensor, eps: float) -> Bool[Tensor, "*batch n"]:
        """The superset: every key with τ ≥ ε, with probability 1 − failure a head, and some more."""
        eps = require_eps(eps)
        require_keys(keys)
        n, d = keys.shape[-2:]
        return self._upper(keys, min(n, d / eps)) >= eps * (1 - ROUNDING)

    def decide(self, keys: Tensor, eps: float) -> Float64[Tensor, "*batch n"]:
        """Exact τ of the candidates, 0 for all other keys.

        Raises:
            ValueError: bad keys, eps outside (0, 1], or a sketch that cannot promise `failure`.
        """
        chosen = self.candidates(keys, eps)
        factor, _ = factor_keys(keys)
        scores = torch.zeros(chosen.shape, dtype=torch.float64, device=keys.device)
        if is_csr(keys):
            place = chosen.nonzero().squeeze(-1)
            scores[place] = factor.leverage(csr_pick(keys, place)) if len(place) else scores[place]
            return scores
        heads = zip(heads_first(keys), heads_first(factor.whitener), strict=True)
        for exact, where, (rows, whitener) in zip(
            scores.view(-1, keys.shape[-2]), chosen.view(-1, keys.shape[-2]), heads, strict=True
        ):
            exact[where] = (rows[where].double() @ whitener).square().sum(-1).clamp(max=1.0)
        return scores

    def bound(self, d: int, n: int) -> float:
        """Σ of what `decide` gives: rank ≤ min(n, d)."""
        return Power(2).total_sensitivity(d, n)

    def spent(self, d: int, n: int, heavy: float) -> float:
        """The probability that one of `heavy` keys is lost."""
        return heavy * self.sketch.overshoot(n, self.delta) + (0.0 if self.columns is None else self.failure / 2)

    def _upper(self, keys: Tensor, heavy: float) -> Float64[Tensor, "*batch n"]:
        """The score of every key, each below τ with probability at most failure/heavy."""
        n, d = keys.shape[-2:]
        if isinstance(self.sketch, CountSketch):
            self.sketch.require(d, self.delta, self.failure)
        if self.spent(d, n, heavy) > self.failure:
            raise ValueError(
                f"sketch: {self.sketch} at delta = {self.delta:g} may lose one of {heavy:,.0f} keys with probability "
                f"{min(1.0, self.spent(d, n, heavy)):.2g}, more than failure = {self.failure:g}; raise delta or m"
            )
        generator = torch.Generator().manual_seed(self.seed)
        sketched = self.sketch.operator(n, generator) @ keys
        if not sketched.isfinite().all():
            require_finite(keys)
        upper = torch.linalg.qr(sketched, mode="r").R
        _, singular, right = torch.linalg.svd(upper, full_matrices=True)
        squares = torch.nn.functional.pad(singular.square(), (0, d - singular.shape[-1]))
        # ‖K‖²_F/d ≤ σ²_max, so this floor lies below the one at which exact scores cut.
        floor = resolve_rtol(None, torch.finfo(keys.dtype).eps, d) ** 2 * total_square(keys).unsqueeze(-1) / d
        form = (1 - FLOOR_SHARE) / (1 + self.delta) * squares + FLOOR_SHARE * floor
        # Keys that are all zero score zero, whatever they are multiplied by.
        frame = right.mT * form.clamp(min=torch.finfo(torch.float64).tiny).rsqrt().unsqueeze(-2)
        if self.columns is None:
            return quadratic_forms(keys, frame).clamp_(max=1.0)
        mixer = torch.randn(d, self.columns, dtype=torch.float64, generator=generator).to(keys.device)
        low = chi_square_quantile(self.columns, self.failure / (2 * heavy))
        return (quadratic_forms(keys, frame @ mixer) / low).clamp_(max=1.0)


@dataclass(frozen=True)
class RightSketch:
    """Baseline, not a way to select: leverage of KΩ, with the columns mixed *before* the Gram.

    τ(KΩ) ≤ τ(K), so heavy keys are lost; it certifies nothing. It is what some KV-cache compressors score by.

    Attributes:
        columns: columns of Ω.
        seed: of Ω.

    Example:
        >>> RightSketch(1)(torch.eye(2)).sum().item() <= 1 + 1e-9
        True
    """

    columns: int
    seed: int = 0

    certified: ClassVar[bool] = False

    def __call__(self, keys: Tensor) -> Float64[Tensor, "*batch n"]:
        """Leverage of the mixed keys."""
        require_keys(keys)
        generator = torch.Generator().manual_seed(self.seed)
        mixer = torch.randn(keys.shape[-1], self.columns, dtype=torch.float64, generator=generator).to(keys.device)
        mixed = keys.double() @ mixer
        return leverage_scores(mixed.to_dense() if is_csr(mixed) else mixed)
