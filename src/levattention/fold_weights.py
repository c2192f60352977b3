"""Weights that need several folds: general |x|^p, Huber and Tukey. The fixed point does not depend on how rows are cut.

Nothing is kept for a row: its weight is worked out again from the whiteners of the Grams so far, so that a fold only
ever adds up one weighted Gram and a few numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.errors import ConvergenceError
from levattention.folds import Fold, State, Total
from levattention.losses import Huber, Loss, Power, Tukey
from levattention.scorers.robust import relative_loss
from levattention.summary import Summary

# How near the fixed point, in the log, and how many folds at most; the bound holds wherever they end.
TOL = 1e-3
FOLDS = 30

# Tukey's map does not contract, and a row that leaves the span of the rest loses only a factor ε in each fold until it
# is under this weight and dropped: so it has more folds. After each round of dropping the worst it has a few more.
DEAD = math.log(1e-22)
PATIENCE, MORE, LIMIT = 80, 8, 400


class Weights(ABC):
    """The weights of rows as a function of the whiteners found so far, and the scores that they certify.

    Attributes:
        frame: (d, r), coordinates in which KᵀK is the identity.
        history: whitener of the weighted Gram of each fold.
        excess: by how much, in the log, the weights of the last Gram miss their inequality.
        mass: their sum.
    """

    def __init__(self, base: Total, eps: float) -> None:
        sieve = base.sieve
        assert sieve is not None  # made only after rows have come
        summary: Summary = sieve.summary  # type: ignore[attr-defined]
        factor = summary.factor()
        self.eps, self.count, self.total = eps, base.count, float(base.count)
        self.rank, self.route = factor.rank[0], "repeated passes"
        self.frame = factor.whitener[0][:, (factor.whitener[0] != 0).any(0)]
        self.history: list[Tensor] = []
        self.excess = self.mass = 0.0

    @abstractmethod
    def log_weights(self, white: Float64[Tensor, "m r"], steps: int) -> Float64[Tensor, " m"]:
        """log w of each row that went into the Gram of fold `steps`; −inf for rows without weight."""

    @abstractmethod
    def target(self, stretch: Float64[Tensor, " m"]) -> Float64[Tensor, " m"]:
        """The log weight that r² asks for."""

    @abstractmethod
    def bound(self, white: Float64[Tensor, "m r"]) -> Float64[Tensor, " m"]:
        """Upper bounds on the sensitivities."""

    def multiplier(self, x: Tensor) -> Tensor:
        """What multiplies kkᵀ in the Gram."""
        return x.exp()

    def miss(self, x: Tensor, target: Tensor) -> Tensor:
        """By how much, in the log, a weight misses its inequality: it must not exceed what r² asks for."""
        return x - target

    def stretch(self, white: Float64[Tensor, "m r"], step: int) -> Float64[Tensor, " m"]:
        """r² against the Gram of one fold."""
        return (white @ self.history[step]).square().sum(-1)

    def __call__(self, rows: Tensor) -> Float64[Tensor, " m"]:
        """Certified upper bounds on the sensitivities of rows (m, d)."""
        return self.bound(rows.double() @ self.frame).clamp(max=1.0)

    def solve(self, fold: Fold) -> None:
        """Fold until the weights rest."""
        for last in range(FOLDS + 1):
            step = fold(lambda: Step(self))
            if last and (step.moved <= TOL or last == FOLDS):
                self.excess = step.excess
                return
            self.take(step)

    def take(self, step: Step) -> None:
        """Go on from the Gram that a fold added up."""
        self.history.append(step.summary.factor().whitener[0])
        self.mass = step.mass


class LewisWeights(Weights):
    """|x|^p: σ ≤ r^p·(Σw)^(p/2−1) for p > 2 and any w; for p < 2, σ ≤ r^p·c^((2−p)/p) where r^p ≤ c·w."""

    def __init__(self, base: Total, eps: float, p: float) -> None:
        super().__init__(base, eps)
        self.p = p

    def log_weights(self, white: Float64[Tensor, "m r"], steps: int) -> Float64[Tensor, " m"]:
        """Damped steps in the log, all of them anew."""
        x, theta = white.square().sum(-1).log(), 4 / (self.p + 2)
        for step in range(steps):
            x = torch.where(x.isfinite(), x + theta * (self.target(self.stretch(white, step)) - x), x)
        return x

    def target(self, stretch: Float64[Tensor, " m"]) -> Float64[Tensor, " m"]:
        """log r^p."""
        return self.p / 2 * stretch.log()

    def multiplier(self, x: Tensor) -> Tensor:
        """w^(1−2/p)."""
        return ((1 - 2 / self.p) * x).exp()

    def miss(self, x: Tensor, target: Tensor) -> Tensor:
        """The other way round: Lewis weights must not fall short."""
        return target - x

    def bound(self, white: Float64[Tensor, "m r"]) -> Float64[Tensor, " m"]:
        """See the class."""
        p = self.p
        factor = self.mass ** (p / 2 - 1) if p > 2 else math.exp((2 - p) / p * self.excess)
        return self.stretch(white, -1).pow(p / 2) * factor


class HuberWeights(Weights):
    """Huber at the one scale s = c²/ε that settles ε; see docs/robust.md."""

    def __init__(self, base: Total, eps: float, loss: Huber) -> None:
        super().__init__(base, eps)
        self.loss = Huber(1.0, smooth=loss.smooth)

    def log_weights(self, white: Float64[Tensor, "m r"], steps: int) -> Float64[Tensor, " m"]:
        """What the last Gram asks for; 0 to begin with."""
        x = self.target(self.stretch(white, steps - 1)) if steps else torch.zeros(len(white)).to(white)
        return torch.where((white != 0).any(-1), x, -math.inf)

    def target(self, stretch: Float64[Tensor, " m"]) -> Float64[Tensor, " m"]:
        """log f(√s·r)/(s·r²)."""
        return relative_loss(self.loss, self.loss.linear**2 / self.eps, stretch).log()

    def bound(self, white: Float64[Tensor, "m r"]) -> Float64[Tensor, " m"]:
        """max(r², c·r/√s), after repair."""
        stretch = self.stretch(white, -1) * math.exp(2 * max(0.0, self.excess))
        return torch.maximum(stretch, (stretch * self.eps).sqrt())


class TukeyWeights(Weights):
    """Tukey at one level α just under ε: where w·r² ≤ α for every row with a weight, σ ≤ max(r², α) for those.

    Rows may lose their weight for good, which only raises r² of the others; they score 1. That happens to rows whose
    weight falls towards zero because they leave the span of the rest, and, where the folds run out, to the rows that
    still break the inequality, worst first.
    """

    def __init__(self, base: Total, eps: float) -> None:
        super().__init__(base, eps)
        self.level = math.log(eps) - 2 * TOL
        # (fold, by how much a row must have missed in it to be dropped).
        self.drops: list[tuple[int, float]] = []

    def log_weights(self, white: Float64[Tensor, "m r"], steps: int) -> Float64[Tensor, " m"]:
        """min(1, α/r²) by the last Gram; 0 to begin with."""
        x = self._plain(white, steps)
        return torch.where((white != 0).any(-1) & ~self.dropped(white, steps), x, -math.inf)

    def target(self, stretch: Float64[Tensor, " m"]) -> Float64[Tensor, " m"]:
        """log min(1, α/r²)."""
        return (self.level - stretch.clamp(min=1e-300).log()).clamp(max=0.0)

    def bound(self, white: Float64[Tensor, "m r"]) -> Float64[Tensor, " m"]:
        """r² itself decides, since the level lies under ε by more than the weights miss."""
        return torch.where(self.dropped(white, len(self.history)), 1.0, self.stretch(white, -1))

    def dropped(self, white: Float64[Tensor, "m r"], steps: int) -> Tensor:
        """Which rows lost their weight by then."""
        gone = torch.zeros(len(white), dtype=torch.bool, device=white.device)
        for step, limit in self.drops:
            if step <= steps:
                x = self._plain(white, step)
                gone |= (x < DEAD) | (self._plain(white, step - 1) - x > limit)
        return gone & (white != 0).any(-1)

    def solve(self, fold: Fold) -> None:
        """Fold until no row that has a weight misses the inequality; the last Gram is then the one that was tested.

        Raises:
            ConvergenceError: rows kept missing it.
        """
        for done in range(LIMIT):
            step = fold(lambda: Step(self))
            if done and step.lowest < DEAD:
                # Drop them, and build this Gram again without.
                self.drops.append((done, math.inf))
                step = fold(lambda: Step(self))
            elif done and step.moved <= TOL:
                return
            elif done >= PATIENCE and (done - PATIENCE) % MORE == 0:
                self.drops.append((done, step.moved / 2))
                step = fold(lambda: Step(self))
            self.take(step)
        raise ConvergenceError(f"Tukey weights at ε = {self.eps:g}: rows still miss their bound after {LIMIT} folds")

    def _plain(self, white: Float64[Tensor, "m r"], steps: int) -> Float64[Tensor, " m"]:
        if steps == 0:
            return torch.zeros(len(white), dtype=torch.float64, device=white.device)
        return self.target(self.stretch(white, steps - 1))


class Step:
    """One fold: the Gram under the weights so far, and how those differ from what the Gram before was built with."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.summary = Summary(weights.frame.shape[-1], 1, weights.frame.device)
        self.moved = self.mass = 0.0
        self.excess, self.lowest = -math.inf, math.inf

    def update(self, rows: Tensor) -> None:
        """Weigh the rows and add them."""
        if rows.ndim == 2 and len(rows) == 0:
            return
        weights, steps = self.weights, len(self.weights.history)
        white = rows.double() @ weights.frame
        x = weights.log_weights(white, steps)
        live = x.isfinite()
        if steps and live.any():
            before, target = weights.log_weights(white, steps - 1)[live], weights.target(weights.stretch(white, -1))
            self.moved = max(self.moved, float((x[live] - before).abs().max()))
            self.excess = max(self.excess, float(weights.miss(before, target[live]).max()))
            self.lowest = min(self.lowest, float(x[live].min()))
        scale = torch.where(live, weights.multiplier(x), 0.0).sqrt()
        self.summary.update((white * scale.unsqueeze(-1)).unsqueeze(0))
        self.mass += float(x.exp().sum())

    def merge(self, other: Step) -> None:
        """Add the other's Gram and mass; the larger miss stays."""
        if other.summary.gram.count:
            self.summary.merge(other.summary)
        self.moved, self.mass = max(self.moved, other.moved), self.mass + other.mass
        self.excess, self.lowest = max(self.excess, other.excess), min(self.lowest, other.lowest)

    def state(self) -> State:
        """The Gram and the numbers beside it."""
        numbers = {"moved": self.moved, "mass": self.mass, "excess": self.excess, "lowest": self.lowest}
        return self.summary.state(), numbers

    def restore(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        """Take up a Gram and its numbers."""
        self.summary.restore(tensors)
        self.__dict__.update(config)


def weights_for(loss: Loss, base: Total, eps: float) -> Weights:
    """The weights of a loss; `base` has seen all rows under x²."""
    if isinstance(loss, Power):
        return LewisWeights(base, eps, loss.p)
    if isinstance(loss, Huber):
        return HuberWeights(base, eps, loss)
    if isinstance(loss, Tukey):
        return TukeyWeights(base, eps)
    raise ValueError(f"loss: expected Power, Huber or Tukey, got {loss!r}")
