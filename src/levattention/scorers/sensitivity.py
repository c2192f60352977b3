"""True sensitivities with certificates, and the smallest universal set they give."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.checks import require_eps, require_keys
from levattention.csr import is_csr
from levattention.errors import ConvergenceError
from levattention.losses import Loss, Power
from levattention.scorers.leverage import leverage_scores
from levattention.scorers.lewis import LewisFit, fit_lewis
from levattention.scorers.lift import Lift, PowerBound
from levattention.scorers.lp import Bounds, Done, Dual, tighten

# The relative gap at which "does it reach ε?" counts as a tie, and the key is kept.
TIE = 1e-9

# How near the Lewis weights' fixed point the minimisation starts; its certificates need no more.
LEWIS_TOL = 1e-3

# Losses other than |x|^p are solved elsewhere; their modules are needed only when asked for.
SOLVERS = {
    "Huber": ("robust", "robust_sensitivities"),
    "Tukey": ("robust", "robust_sensitivities"),
    "Softmax": ("softmax", "softmax_sensitivities"),
}


class Sensitivities(NamedTuple):
    """Certified bounds: lower ≤ σ ≤ upper for every key.

    Attributes:
        lower: attained by a query.
        upper: reached by no query.
    """

    lower: Float64[Tensor, "*batch n"]
    upper: Float64[Tensor, "*batch n"]


def sensitivities(keys: Tensor, loss: Loss, *, gap: float = 1e-3) -> Sensitivities:
    """Certified lower and upper bounds on σᵢ = sup_y f(⟨kᵢ, y⟩)/Σⱼ f(⟨kⱼ, y⟩), each (*batch, n) in fp64.

    For f = |x|^p every key is a convex problem in d variables: the cost is some ten passes over the keys *for each
    key*, so this is for thousands of keys rather than millions. p = 2 is exact at the cost of leverage scores.

    Args:
        keys: (*batch, n, d).
        loss: f.
        gap: the largest (upper − lower)/upper that comes back, in (0, 1).

    Raises:
        ValueError: bad keys, a gap outside (0, 1), or a loss without a solver.
        ConvergenceError: the gap was not reached for some key.

    Example:
        >>> lower, upper = sensitivities(torch.eye(2).repeat(4, 1), Power(1))
        >>> round(lower[0].item(), 3), round(upper[0].item(), 3)
        (0.25, 0.25)
    """
    require_keys(keys)
    if not 0 < gap < 1:
        raise ValueError(f"gap: expected a number in (0, 1), got {gap!r}")
    if not isinstance(loss, Power):
        return _elsewhere(keys, loss, gap)
    if loss.p == 2:
        exact = leverage_scores(keys)
        return Sensitivities(exact, exact.clone())

    def done(lower: Tensor, upper: Tensor) -> Tensor:
        return upper - lower <= gap * upper

    found = _solve(keys, loss.p, done)
    worst = (found.upper - found.lower) / found.upper.clamp(min=torch.finfo(torch.float64).tiny)
    if float(worst.max()) > gap:
        raise ConvergenceError(
            f"sensitivities for p = {loss.p}: {int((worst > gap).sum())} keys kept a relative gap of up to "
            f"{float(worst.max()):.2g}, more than {gap:g}"
        )
    return found


@dataclass(frozen=True)
class Sensitivity:
    """Certified upper bounds on the true sensitivities, as sharp as asked for.

    `universal_set(keys, eps=ε, scorer=Sensitivity(loss))` is the smallest universal set: a key is kept only if some
    query gives it ε (or comes within a relative 1e-9 of it), and work goes only into keys whose bounds leave that open.

    Attributes:
        loss: f.
        gap: (upper − lower)/upper for the scores; see `sensitivities`.

    Example:
        >>> Sensitivity(Power(4)).decide(torch.eye(2).repeat(4, 1), 0.5).max().item() < 0.5
        True
    """

    loss: Loss
    gap: float = 1e-3

    certified: ClassVar[bool] = True

    def __call__(self, keys: Tensor) -> Float64[Tensor, "*batch n"]:
        """Upper bounds within the gap of the true sensitivities."""
        return sensitivities(keys, self.loss, gap=self.gap).upper

    def decide(self, keys: Tensor, eps: float) -> Float64[Tensor, "*batch n"]:
        """Upper bounds that are below ε for every key that no query gives ε; loose where that is clear anyway."""
        require_keys(keys)
        eps = require_eps(eps)
        if not isinstance(self.loss, Power) or self.loss.p == 2:
            return self(keys)

        def done(lower: Tensor, upper: Tensor) -> Tensor:
            return (lower >= eps) | (upper < eps * (1 - TIE)) | (upper - lower <= TIE * upper)

        return _solve(keys, self.loss.p, done).upper

    def bound(self, d: int, n: int) -> float:
        """Ψ, up to the gap."""
        return min(float(n), self.loss.total_sensitivity(d, n) / (1 - self.gap))


def _elsewhere(keys: Tensor, loss: Loss, gap: float) -> Sensitivities:
    """The bounds of a loss whose solver is a module of its own."""
    module, name = SOLVERS.get(type(loss).__name__, (None, ""))
    if module is None:
        raise ValueError(f"loss: no solver for {loss!r}")
    solver = getattr(importlib.import_module(f"levattention.scorers.{module}"), name)
    return Sensitivities(*solver(keys, loss, gap=gap))


def _solve(keys: Tensor, p: float, done: Done) -> Sensitivities:
    """Bounds for every batch element. Keys that the bounds of `PowerBound` settle are not worked on."""
    dense = keys.to_dense() if is_csr(keys) else keys
    fit = fit_lewis(dense, p, LEWIS_TOL, fallback=False)
    upper = fit.sensitivity_bound(p)
    if PowerBound(p).lifts(dense):
        upper = torch.minimum(upper, Lift(p)(dense))
    lower = torch.zeros_like(upper)
    for place in itertools.product(*map(range, keys.shape[:-2])):
        element = LewisFit(fit.log_weights[place], fit.log_powers[place], fit.residual, fit.steps, fit.whitener[place])
        bounds = Bounds(lower[place], upper[place])
        rows = (~done(bounds.lower, bounds.upper)).nonzero().squeeze(-1)
        if len(rows):
            tighten(Dual.of(dense[place], element, p), rows, bounds, done)
    # Where both are σ itself, rounding may leave them an ulp the wrong way round.
    return Sensitivities(torch.minimum(lower, upper), upper)
