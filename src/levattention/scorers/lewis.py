"""ℓp Lewis weights, and the bounds on the sensitivities of |x|^p that any weights give, converged or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.checks import require_keys
from levattention.errors import ConvergenceError
from levattention.gram import GRAM_LIMIT, Factor, Gram, quadratic_forms
from levattention.losses import Power
from levattention.scorers.leverage import factor_keys, leverage_scores

# The iteration contracts by |p−2|/(p+2) near its fixed point, so this many steps reach any tolerance for p up to 40
# if it converges at all.
STEPS = 400
AVERAGED = 60
DIVERGED = 100.0

# Relative error of r² that a Gram inside GRAM_LIMIT can have.
FORM_ERROR = 1e-9


@dataclass(frozen=True)
class LewisFit:
    """Weights w and the forms r² they give, in logarithms; −inf for rows of zeros.

    Attributes:
        log_weights: x = log w.
        log_powers: t = log r^p = (p/2)·log kᵀ(KᵀW^(1−2/p)K)⁺k. The fixed point is t = x.
        residual: max |t − x|.
        steps: iterations taken.
        whitener: P with r² = ‖kP‖².
    """

    log_weights: Float64[Tensor, "*batch n"]
    log_powers: Float64[Tensor, "*batch n"]
    residual: float
    steps: int
    whitener: Float64[Tensor, "*batch d d"]

    def log_distortion(self, p: float) -> Float64[Tensor, "*batch 1"]:
        """log β, with B^p ≤ β·‖Ky‖ₚ^p for B² = yᵀKᵀW^(1−2/p)Ky and every y, for any w > 0.

        β = (Σw)^(p/2−1) for p ≥ 2, and β = c^((2−p)/p) with c = max(1, max r^p/w) for p < 2.

        With z = Ky, |zᵢ| ≤ rᵢB by Cauchy–Schwarz. For p > 2 Hölder gives B² ≤ (Σw)^(1−2/p)·‖z‖ₚ². For p < 2,
        wⱼ^(1−2/p)zⱼ² = |zⱼ|^p·(|zⱼ|wⱼ^(−1/p))^(2−p) and |zⱼ|wⱼ^(−1/p) ≤ c^(1/p)B, so that
        B² ≤ c^((2−p)/p)·B^(2−p)·‖z‖ₚ^p.
        """
        if p >= 2:
            return (p / 2 - 1) * self.log_weights.logsumexp(-1, keepdim=True)
        excess = torch.where(self.log_weights.isfinite(), self.log_powers - self.log_weights, 0.0)
        return (2 - p) / p * excess.amax(-1, keepdim=True).clamp(min=0.0)

    def sensitivity_bound(self, p: float) -> Float64[Tensor, "*batch n"]:
        """σᵢ ≤ β·rᵢ^p."""
        # Rows of zeros stay at −inf even where every row is one and β is no number.
        bound = self.log_powers + self.log_distortion(p) + p / 2 * FORM_ERROR
        return torch.where(self.log_powers.isfinite(), bound, -math.inf).clamp(max=0.0).exp()


@dataclass(frozen=True)
class Lewis:
    """Upper bounds on the sensitivities of |x|^p from Lewis weights (Section 3, first theorem, of the paper).

    At the fixed point the bound is rank^(p/2−1)·wᵢ for p ≥ 2 and wᵢ for p ≤ 2. It holds wherever the iteration stops.

    Attributes:
        p: the power, at least 1.
        tol: how near the fixed point to go, in log w.

    Example:
        >>> Lewis(4)(torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 1.0]])).tolist()[2]
        1.0
    """

    p: float
    tol: float = 1e-4

    certified: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Power(self.p)

    def __call__(self, keys: Tensor) -> Float64[Tensor, "*batch n"]:
        """A bound in [0, 1] for every key."""
        return fit_lewis(keys, self.p, self.tol, fallback=False).sensitivity_bound(self.p)

    def bound(self, d: int, n: int) -> float:
        """Ψ, up to the tolerance: Σw ≤ rank·e^(2·tol/p), and each rᵢ^p ≤ wᵢ·e^tol."""
        return min(float(n), Power(self.p).total_sensitivity(d, n) * math.exp(2 * self.tol + self.p * FORM_ERROR))


def lewis_weights(keys: Tensor, p: float, *, tol: float = 1e-6) -> Float64[Tensor, "*batch n"]:
    """ℓp Lewis weights w in fp64: wᵢ^(2/p) = kᵢᵀ(KᵀW^(1−2/p)K)⁺kᵢ, summing to rank(K); 0 for rows of zeros.

    At p = 2 they are the leverage scores. Keys are read block by block, twice an iteration.

    Args:
        keys: (*batch, n, d), or a two-dimensional `torch.sparse_csr` tensor.
        p: at least 1.
        tol: largest |log w − log r^p| at the weights that come back.

    Raises:
        ValueError: bad keys, p < 1, or tol ≤ 0.
        ConvergenceError: the tolerance was not reached, by the damped iteration nor from averaged weights.

    Example:
        >>> lewis_weights(torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 1.0]]), 1)
        tensor([0.4286, 0.5714, 1.0000], dtype=torch.float64)
    """
    require_keys(keys)
    Power(p)
    if not tol > 0:
        raise ValueError(f"tol: expected a positive number, got {tol!r}")
    if p == 2:
        return leverage_scores(keys)
    fit = fit_lewis(keys, p, tol)
    if fit.residual > tol:
        raise ConvergenceError(
            f"Lewis weights for p = {p}: residual {fit.residual:.2g} after {fit.steps} steps, tolerance {tol:g}"
        )
    return fit.log_weights.exp()


class _Forms:
    """t(x) = (p/2)·log r²(x), the map whose fixed point is x = log w."""

    def __init__(self, keys: Tensor, p: float) -> None:
        self.keys, self.p, self.steps = keys, p, 0
        self.plain, _ = factor_keys(keys)
        hard = (self.plain.rank < keys.shape[-1]) | (self.plain.condition > GRAM_LIMIT**-0.5)
        self.basis = self.plain.whitener if bool(hard.any()) else None
        self.start = quadratic_forms(keys, self.plain.whitener).log()
        self.live = self.start.isfinite()
        self.whitener = self.plain.whitener

    def __call__(self, x: Tensor) -> Tensor:
        """t at x; −inf for rows of zeros."""
        weights = torch.where(self.live, ((1 - 2 / self.p) * x).exp(), 0.0)
        factor = self.weighted(weights)
        if self.basis is None and bool(factor.ill_conditioned.any()):
            self.basis = self.plain.whitener
            factor = self.weighted(weights)
        self.whitener = factor.whitener if self.basis is None else self.basis @ factor.whitener
        self.steps += 1
        return (self.p / 2) * quadratic_forms(self.keys, self.whitener).log()

    def weighted(self, weights: Tensor) -> Factor:
        """The whitener of W^(1/2−1/p)K in the basis, which has cut off the noise: nothing more is to be dropped."""
        return Gram.of(self.keys, weights, basis=self.basis).factor("exact")


def fit_lewis(keys: Tensor, p: float, tol: float, *, fallback: bool = True) -> LewisFit:
    """Weights as near the fixed point as the iteration comes; the fit with the smallest residual.

    x ← (1−θ)x + θt(x) with θ = 4/(p+2), from the leverage scores. Where that does not converge, averaged weights, which
    provably approach the fixed point from one side, are a new start for shorter steps.
    """
    forms = _Forms(require_keys(keys), p)
    theta = 4 / (p + 2)
    best = _descend(forms, forms.start, theta, tol)
    if fallback and best.residual > tol:
        averaged = _average(forms)
        for shorter in (theta, theta / 2, theta / 8):
            best = min(best, _descend(forms, averaged, shorter, tol), key=lambda fit: fit.residual)
            if best.residual <= tol:
                break
    return best


def _descend(forms: _Forms, x: Tensor, theta: float, tol: float) -> LewisFit:
    """The damped iteration from x, until the residual is below tol, has blown up, or STEPS are spent."""
    best: LewisFit | None = None
    for _ in range(STEPS):
        t = forms(x)
        difference = torch.where(forms.live, t - x, 0.0)
        residual = float(difference.abs().max())
        if best is None or residual < best.residual:
            best = LewisFit(x, t, residual, forms.steps, forms.whitener)
        # Far above its own best it is on its way to overflow.
        if residual <= tol or not residual <= DIVERGED * best.residual:
            break
        x = torch.where(forms.live, x + theta * difference, -math.inf)
    assert best is not None  # STEPS is at least one
    return best


def _average(forms: _Forms) -> Tensor:
    """log of the mean of v₁ … v_T, where v ← leverage of V^(1/2−1/p)K, from equal v.

    For p ≥ 2 the leverage of the weighted keys is log-convex in log v, so the mean w has leverage/w ≤ (n/rank)^(1/T):
    one-sided weights, whatever the keys.
    """
    v = torch.where(forms.live, 0.0, -math.inf).double()
    total = torch.full_like(v, -math.inf)
    for _ in range(AVERAGED):
        power = forms(v)
        v = torch.where(forms.live, (1 - 2 / forms.p) * v + (2 / forms.p) * power, -math.inf)
        total = torch.logaddexp(total, v)
    return total - math.log(AVERAGED)
