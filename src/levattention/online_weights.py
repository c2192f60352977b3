"""Sieves for losses other than x²: the lift for even p, and weights fixed as rows arrive for all the rest.

Weights that bound a sensitivity need only hold on one side, and adding rows to the weighted Gram keeps them on that
side. So each block solves for its own weights against all that came before, and no older weight is ever touched again:
the state is one weighted Gram, which adds.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod

import torch
from torch import Tensor

from levattention._shapes import Bool, Float64
from levattention.features import MAX_COLUMNS, TensorPower, gigabytes
from levattention.gram import FP64_EPS, Gram
from levattention.losses import Huber, Loss, Power, Tukey
from levattention.scorers.robust import relative_loss
from levattention.sieves import Sieve, Squares
from levattention.summary import Summary

# How closely, in the log, the weights of a block are solved, and what that leaves open when a row is dropped.
TOL = 1e-6
SLACK = 1e-4
STEPS = 200


class Lifted(Squares):
    """|x|^p for even p: x² on the symmetric lift of the keys, in coordinates in which the keys are nearly orthonormal.

    A condition number κ of the keys would enter as κ^(p/2), so rows pass through an invertible map A before they are
    lifted, which changes no leverage score. When the keys so far are no longer well-conditioned under A, or two states
    with different maps meet, the lifted Gram is moved to a better map by the congruence φ(xC) = φ(x)·Φ(C).

    Attributes:
        base: the keys themselves under x², which say what A should be and what their numerical rank is.
        map: A, (heads, d, d).
    """

    def __init__(self, p: float, d: int, heads: int, device: torch.device) -> None:
        self.lift = TensorPower(int(p) // 2)
        wide = self.lift.width(d)
        if wide > MAX_COLUMNS:
            raise ValueError(
                f"loss: lifting {d} columns to p = {p} takes {wide:,} columns, a Gram of {gigabytes(8 * wide * wide)}; "
                f"at most {MAX_COLUMNS:,} columns are formed"
            )
        super().__init__(wide, heads, device)
        self.base = Summary(d, heads, device)
        self.map = torch.eye(d, dtype=torch.float64, device=device).repeat(heads, 1, 1)
        self._final: tuple[Tensor, Squares] | None = None

    def update(self, rows: Tensor) -> None:
        """Lift the rows and add them."""
        self.base.update(rows)
        self._remap()
        self._final = None
        super().update(self._lifted(rows))

    def merge(self, other: Sieve) -> None:
        """Add the other's summary, in this one's coordinates."""
        if isinstance(other, Lifted) and other.base.gram.count:
            self.base.merge(other.base)
            self._remap()
            self._final = None
            there = other.map.to(self.map.device)
            super().merge(_moved(other.summary, self.lift.k, torch.linalg.solve(there, self.map)))
        elif not isinstance(other, Lifted):
            super().merge(other)

    def spares(self, rows: Tensor, eps: float) -> Bool[Tensor, "heads m"]:
        """None: the lift of a row costs more than its score."""
        return Sieve.spares(self, rows, eps)

    def dismisses(self, rows: Tensor, eps: float) -> Bool[Tensor, "heads m"]:
        """None, likewise."""
        return Sieve.dismisses(self, rows, eps)

    def survivors(self, rows: Tensor, eps: float) -> Bool[Tensor, "heads m"]:
        """Rows whose lifted bound still reaches ε."""
        return super().survivors(self._lifted(rows), eps)

    def scores(self, rows: Tensor, eps: float) -> Float64[Tensor, "heads m"]:
        """Leverage scores of the lifted rows."""
        frame, squares = self._settled()
        return squares.scores(self.lift(rows.double() @ frame), eps)

    def rank(self) -> Tensor:
        """Numerical rank of the lifted keys of each head."""
        return self._settled()[1].summary.factor().rank

    def state(self) -> dict[str, Tensor]:
        """The summary, that of the keys themselves, and the map."""
        base = {f"base.{name}": tensor for name, tensor in self.base.state().items()}
        return super().state() | base | {"map": self.map}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take up a saved state."""
        self.map, self._final = state["map"], None
        self.base.restore({n.removeprefix("base."): t for n, t in state.items() if n.startswith("base.")})
        super().restore({n: t for n, t in state.items() if not n.startswith("base.")})

    def _lifted(self, rows: Tensor) -> Tensor:
        return self.lift(rows.double() @ self.map)

    def _remap(self) -> None:
        """Another map, where the keys so far are too long in one direction and too short in another under this one."""
        upper = self.base.triangle()
        singular = torch.linalg.svdvals(upper @ self.map)
        top = singular[..., :1]
        seen = singular > top * singular.shape[-1] * FP64_EPS
        if bool((seen & (singular * STRETCHED < top)).any()) or self.summary.gram.count == 0:
            better = balancing_map(upper, self.base.gram.count)
            if self.summary.gram.count:
                change = torch.linalg.solve(self.map, better)
                self.summary = _moved(self.summary, self.lift.k, change).summary
                self._prune = None
            self.map = better

    def _settled(self) -> tuple[Tensor, Squares]:
        """(what maps rows before they are lifted, the summary to score against), after directions that are noise.

        The offline lift leaves directions out that are rounding of the input's own dtype. Doing so only lowers scores
        (it takes queries away), hence no row that was dropped on the way is missed.
        """
        if self._final is None:
            factor = self.base.factor()
            if bool((factor.rank == self.map.shape[-1]).all()):
                self._final = self.map, _same(self.summary)
            else:
                frame = factor.whitener * math.sqrt(max(1, self.base.gram.count))
                self._final = frame, _moved(self.summary, self.lift.k, torch.linalg.solve(self.map, frame))
        return self._final


# Singular values of the mapped keys may lie this far apart before they are mapped anew: their power p/2 is
# what the lifted Gram has to resolve.
STRETCHED = 10.0


def balancing_map(upper: Float64[Tensor, "heads d d"], count: int) -> Float64[Tensor, "heads d d"]:
    """An invertible A with (RA)ᵀRA = n·I on the row space of R; directions yet unseen get the largest scale."""
    _, singular, right = torch.linalg.svd(upper)
    top = singular[..., :1]
    seen = singular > top * singular.shape[-1] * FP64_EPS
    scale = torch.where(seen, singular, torch.where(top > 0, top, 1.0))
    # Contiguous, so that a map read from a file multiplies to the same bits.
    return (right.mT * (math.sqrt(count) / scale).unsqueeze(-2)).contiguous()


def _same(summary: Summary) -> Squares:
    """A sieve around a summary."""
    squares = Squares(summary.gram.matrix.shape[-1], len(summary.gram.matrix), summary.gram.matrix.device)
    squares.summary = summary
    return squares


def _moved(summary: Summary, k: int, change: Float64[Tensor, "heads d d"]) -> Squares:
    """The lifted summary for rows multiplied by `change` before they are lifted."""
    upper = summary.triangle() @ torch.stack([symmetric_power(one, k) for one in change])
    moved = _same(Summary(upper.shape[-1], len(change), change.device))
    moved.summary.restore(summary.state() | {"gram": upper.mT @ upper, "upper": upper})
    return moved


def symmetric_power(matrix: Float64[Tensor, "d d"], k: int) -> Float64[Tensor, "wide wide"]:
    """Φ(C) with φ(xC) = φ(x)·Φ(C) for the symmetric k-th power φ.

    Φ(C)_αβ = (n_α/n_β)·Σ ∏ⱼ C[αⱼ, tⱼ] over the distinct orderings t of β, with n_α = √(k!/α!).
    """
    d = matrix.shape[0]
    index = torch.combinations(torch.arange(d, device=matrix.device), r=k, with_replacement=True)
    total = torch.zeros(len(index), len(index), dtype=torch.float64, device=matrix.device)
    for order in itertools.permutations(range(k)):
        term = torch.ones_like(total)
        for j, t in enumerate(order):
            term *= matrix[index[:, j]][:, index[:, t]]
        total += term
    # Summing over all orderings counts each distinct one β! times; n_β² = k!/β!.
    norms = TensorPower(k)(torch.ones(1, d, dtype=torch.float64, device=matrix.device))[0]
    return total * norms.unsqueeze(-1) * norms / math.factorial(k)


class Weighted(Sieve):
    """A weighted Gram Σ ωⱼkⱼkⱼᵀ, to which each block adds with weights solved against all that came before."""

    def __init__(self, d: int, heads: int, device: torch.device, eps: float) -> None:
        self.width, self.eps = d, eps
        self.summary = Summary(d, heads, device)
        # What the bound needs besides the Gram, for each head; see the subclasses.
        self.extra = torch.zeros(heads, dtype=torch.float64, device=device)

    @property
    def route(self) -> str:
        """Online weights."""
        return "online weights"

    @abstractmethod
    def solve(self, white: Float64[Tensor, "m r"], before: Float64[Tensor, "r r"]) -> tuple[Tensor, float]:
        """(ω of each row of a block, what the block adds to `extra`), given the Gram of what came before."""

    @abstractmethod
    def bound(self, stretch: Float64[Tensor, "heads m"]) -> Float64[Tensor, "heads m"]:
        """Upper bounds on the sensitivities of rows with these r² = kᵀ(Σ ωkkᵀ)⁺k."""

    @abstractmethod
    def combine(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """`extra` of two states together."""

    def update(self, rows: Tensor) -> None:
        """Solve for the weights of the rows and add them."""
        wide = rows.double()
        before = self.summary.triangle()
        weights = torch.zeros(wide.shape[:2], dtype=torch.float64, device=wide.device)
        for head in range(len(wide)):
            live = (wide[head] != 0).any(-1)
            if not live.any():
                continue
            frame = common_frame(before[head], wide[head])
            earlier = before[head] @ frame
            solved, extra = self.solve(wide[head][live] @ frame, earlier.mT @ earlier)
            weights[head, live] = solved
            self.extra[head] = self.combine(self.extra[head], torch.as_tensor(extra).to(self.extra))
        self.summary.update(wide * weights.sqrt().unsqueeze(-1))

    def merge(self, other: Sieve) -> None:
        """Add the other's weighted Gram: neither's weights leave their side."""
        if type(other) is not type(self):
            raise ValueError(f"merge: expected the state of a stream with the same loss, got {type(other).__name__}")
        assert isinstance(other, Weighted)
        self.summary.merge(other.summary)
        self.extra = self.combine(self.extra, other.extra.to(self.extra))

    def survivors(self, rows: Tensor, eps: float) -> Bool[Tensor, "heads m"]:
        """Rows whose bound still reaches ε."""
        return self.scores(rows, eps) >= eps * (1 - SLACK)

    def scores(self, rows: Tensor, eps: float) -> Float64[Tensor, "heads m"]:
        """Certified upper bounds on the sensitivities, given everything seen."""
        _, singular, right = torch.linalg.svd(self.summary.triangle())
        # A direction without weight yet would divide by rounding noise: at the noise floor it scores 1 or more.
        floor = singular[..., :1] * rows.shape[-1] * FP64_EPS
        inverse = torch.maximum(singular, floor).square().clamp(min=1e-300).reciprocal()
        stretch = ((rows.double() @ right.mT).square() @ inverse.unsqueeze(-1)).squeeze(-1)
        return self.bound(stretch).clamp(max=1.0)

    def total(self, n: int) -> float:
        """No better bound than n: the weights of a stream may sum to more than offline ones."""
        return float(n)

    def rank(self) -> Tensor:
        """Numerical rank of each head."""
        return self.summary.factor().rank

    def state(self) -> dict[str, Tensor]:
        """The weighted Gram and the numbers beside it."""
        return self.summary.state() | {"extra": self.extra}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take up a saved state."""
        self.summary.restore(state)
        self.extra = state["extra"]


class LewisWeights(Weighted):
    """|x|^p: ω = w^(1−2/p), with r^p ≤ c·w for p < 2 and any w for p > 2.

    `extra` is Σw for p > 2, where σ ≤ r^p·(Σw)^(p/2−1), and log c for p < 2, where σ ≤ r^p·c^((2−p)/p).
    """

    def __init__(self, p: float, d: int, heads: int, device: torch.device, eps: float) -> None:
        super().__init__(d, heads, device, eps)
        self.p = p

    def solve(self, white: Float64[Tensor, "m r"], before: Float64[Tensor, "r r"]) -> tuple[Tensor, float]:
        """The damped log-domain iteration on the rows of the block alone."""
        p, theta = self.p, 4 / (self.p + 2)
        x = stretch_of(white, torch.ones(len(white)).to(white), before).log()
        for _ in range(STEPS):
            t = (p / 2) * stretch_of(white, ((1 - 2 / p) * x).exp(), before).log()
            if float((t - x).abs().max()) <= TOL:
                break
            x = x + theta * (t - x)
        # Any weights serve, wherever the steps ended: what they leave open enters the bound.
        extra = float(x.exp().sum()) if p > 2 else max(0.0, float((t - x).max()))
        return ((1 - 2 / p) * x).exp(), extra

    def bound(self, stretch: Float64[Tensor, "heads m"]) -> Float64[Tensor, "heads m"]:
        """See the class."""
        p = self.p
        if p > 2:
            return stretch.pow(p / 2) * self.extra.unsqueeze(-1).pow(p / 2 - 1)
        return stretch.pow(p / 2) * ((2 - p) / p * self.extra.unsqueeze(-1)).exp()

    def combine(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """Σw adds; c is the larger."""
        return mine + theirs if self.p > 2 else torch.maximum(mine, theirs)


class HuberWeights(Weighted):
    """Huber at the one scale s = c²/ε that settles ε: w ≤ f(√s·r)/(s·r²), σ ≤ max(r², c·r/√s); see docs/robust.md.

    `extra` is log a, by how much the weights may exceed that: (w/a², a²r²) obeys it.
    """

    def __init__(self, loss: Huber, d: int, heads: int, device: torch.device, eps: float) -> None:
        super().__init__(d, heads, device, eps)
        self.loss = Huber(1.0, smooth=loss.smooth)

    def solve(self, white: Float64[Tensor, "m r"], before: Float64[Tensor, "r r"]) -> tuple[Tensor, float]:
        """The map halves distances in the log, so few steps do."""
        scale = self.loss.linear**2 / self.eps
        weights = torch.ones(len(white)).to(white)
        for _ in range(STEPS):
            target = relative_loss(self.loss, scale, stretch_of(white, weights, before))
            apart = (weights / target).log()
            if float(apart.abs().max()) <= TOL:
                break
            weights = target
        return weights, max(0.0, float(apart.max()))

    def bound(self, stretch: Float64[Tensor, "heads m"]) -> Float64[Tensor, "heads m"]:
        """See the class."""
        stretch = stretch * (2 * self.extra).exp().unsqueeze(-1)
        # c·r/√s with s = c²/ε.
        return torch.maximum(stretch, (stretch * self.eps).sqrt())

    def combine(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """The larger excess."""
        return torch.maximum(mine, theirs)


class TukeyWeights(Weighted):
    """Tukey at one level α just under ε: where w·r² ≤ α for every row, σ ≤ max(r², α).

    A row that breaks the inequality is left out of the Gram, which is always safe: the others must obey it without.
    """

    def solve(self, white: Float64[Tensor, "m r"], before: Float64[Tensor, "r r"]) -> tuple[Tensor, float]:
        """Fall from w = 1 by w ← min(1, α/r²); leave out what still breaks the inequality at the end."""
        level = self.eps * (1 - 10 * SLACK)
        weights = torch.ones(len(white)).to(white)
        while True:
            for _ in range(STEPS):
                stretch = stretch_of(white, weights, before)
                aim = torch.where(weights > 0, (level / stretch).clamp(max=1.0), 0.0)
                if float((weights - aim).abs().max()) <= SLACK * level:
                    break
                weights = aim
            over = (weights > 0) & (weights * stretch > level * (1 + SLACK))
            if not over.any():
                return weights, 0.0
            weights = torch.where(over, 0.0, weights)

    def bound(self, stretch: Float64[Tensor, "heads m"]) -> Float64[Tensor, "heads m"]:
        """r² itself decides: the level lies under ε."""
        return stretch

    def combine(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """Nothing to remember."""
        return mine


def common_frame(before: Float64[Tensor, "d d"], rows: Float64[Tensor, "m d"]) -> Float64[Tensor, "d r"]:
    """Coordinates in which earlier and new rows together have the identity for a Gram, so that none is lost."""
    _, singular, right = torch.linalg.svd(torch.linalg.qr(torch.cat([before, rows]), mode="r").R, full_matrices=False)
    keep = singular > singular[0] * rows.shape[-1] * FP64_EPS
    return right[keep].mT / singular[keep]


def stretch_of(white: Float64[Tensor, "m r"], weights: Tensor, before: Float64[Tensor, "r r"]) -> Float64[Tensor, " m"]:
    """r² of each row against what came before and the block itself under these weights."""
    gram = Gram(white.shape[-1], device=white.device).update(white, weights)
    gram.matrix += before
    squares, basis = torch.linalg.eigh(gram.matrix)
    inverse = squares.clamp(min=float(squares[-1]) * FP64_EPS * len(squares)).reciprocal()
    return (white @ basis).square() @ inverse


def online_sieve(loss: Loss, d: int, heads: int, device: torch.device, eps: float) -> Sieve:
    """The sieve of a loss other than x²."""
    if isinstance(loss, Power):
        return Lifted(loss.p, d, heads, device) if loss.even else LewisWeights(loss.p, d, heads, device, eps)
    if isinstance(loss, Huber):
        return HuberWeights(loss, d, heads, device, eps)
    if isinstance(loss, Tukey):
        return TukeyWeights(d, heads, device, eps)
    raise ValueError(f"loss: expected Power, Huber or Tukey, got {loss!r}")


def sieve_for(loss: Loss, d: int, heads: int, device: torch.device, eps: float) -> Sieve:
    """The sieve of a loss, for the threshold ε."""
    return Squares(d, heads, device) if loss == Power(2) else online_sieve(loss, d, heads, device, eps)
