"""True sensitivities of |x|^p for a batch of rows at once, each step of which certifies a lower and an upper bound.

1/σᵢ = min ‖z‖ₚ^p over z = Qy with ⟨qᵢ, y⟩ = 1. Any such z certifies σᵢ ≥ |zᵢ|^p/‖z‖ₚ^p; any a with Qᵀa = qᵢ certifies
σᵢ ≤ ‖a‖^p in the dual norm, since zᵢ = ⟨a, z⟩. Q is K in the coordinates in which QᵀΩQ = I for the Lewis weights
Ω = W^(1−2/p): there the norm ‖y‖ is within a factor d^|1/2−1/p| of ‖Qy‖ₚ, and nothing is ill-conditioned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from levattention._shapes import Float64, Int64
from levattention.gram import CPU_TILE
from levattention.scorers.lewis import LewisFit

Done = Callable[[Tensor, Tensor], Tensor]
"""(lower, upper) -> which rows need no more work."""

NEWTON_STEPS = 200
INTERIOR_STEPS = 60
SEARCH_STEPS = 7

# The floor under |z| starts anew after so many halvings: rows held at zero too early would never be let go.
FLOOR_CYCLE = 20

# How far towards the boundary of the box an interior step may go.
FRACTION = 0.995


@dataclass(frozen=True)
class Dual:
    """One element of a batch of keys, ready for the minimisation of ‖Qy‖ₚ.

    Attributes:
        basis: Q.
        omega: the diagonal of Ω.
        distortion: β^(1/p), with ‖y‖ ≤ β^(1/p)·‖Qy‖ₚ.
        p: the power.
    """

    basis: Float64[Tensor, "n r"]
    omega: Float64[Tensor, " n"]
    distortion: float
    p: float

    @classmethod
    def of(cls, keys: Tensor, fit: LewisFit, p: float) -> Dual:
        """From keys (n, d) and their Lewis weights."""
        columns = fit.whitener.any(0)
        live = fit.log_weights.isfinite()
        omega = torch.where(live, ((1 - 2 / p) * fit.log_weights).exp(), 0.0)
        basis = keys.double() @ fit.whitener[:, columns]
        return cls(basis, omega, float((fit.log_distortion(p) / p).exp()), p)

    def gram(self, weights: Float64[Tensor, "b n"]) -> Float64[Tensor, "b r r"]:
        """Qᵀdiag(weights)Q for each right-hand side, as one product with the pairwise products of columns."""
        n, r = self.basis.shape
        first, second = torch.triu_indices(r, r, device=self.basis.device)
        packed = self.basis.new_zeros(len(weights), len(first))
        step = max(64, 8 * CPU_TILE // len(first))
        for start in range(0, n, step):
            rows = self.basis[start : start + step]
            packed.addmm_(weights[:, start : start + step], rows[:, first] * rows[:, second])
        full = self.basis.new_empty(len(weights), r, r)
        full[:, first, second] = packed
        full[:, second, first] = packed
        return full

    def solve(self, weights: Tensor, right: Tensor) -> Float64[Tensor, "b r"]:
        """(Qᵀdiag(weights)Q)⁻¹·right. A singular system gives a useless step, never a wrong bound."""
        solution, _ = torch.linalg.solve_ex(self.gram(weights), right)
        return solution.nan_to_num_(0.0, 0.0, 0.0)

    def lower(self, z: Float64[Tensor, "b n"], rows: Tensor) -> Float64[Tensor, " b"]:
        """|zᵢ|^p/‖z‖ₚ^p."""
        share = power(z / z.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny), self.p)
        return share.gather(-1, rows.unsqueeze(-1)).squeeze(-1) / share.sum(-1).clamp(min=1.0)

    def upper(self, a: Float64[Tensor, "b n"], rows: Tensor) -> Float64[Tensor, " b"]:
        """(‖a‖ + β^(1/p)·‖qᵢ − Qᵀa‖)^p: what a fails the constraint by is paid for, so the bound holds in any case."""
        target = self.basis[rows]
        a = a + self.omega * ((target - a @ self.basis) @ self.basis.mT)
        missed = (target - a @ self.basis).norm(dim=-1)
        largest = a.abs().amax(-1)
        norm = largest
        if self.p > 1:
            scaled = a / largest.clamp(min=torch.finfo(a.dtype).tiny).unsqueeze(-1)
            norm = largest * power(scaled, self.p / (self.p - 1)).sum(-1).pow(1 - 1 / self.p)
        return (norm + self.distortion * missed).pow(self.p).clamp(max=1.0)


@dataclass
class Bounds:
    """The best certified bounds so far, (n,) each."""

    lower: Float64[Tensor, " n"]
    upper: Float64[Tensor, " n"]

    def take(self, rows: Tensor, lower: Tensor, upper: Tensor) -> None:
        """Keep what is sharper."""
        self.lower[rows] = torch.maximum(self.lower[rows], lower)
        self.upper[rows] = torch.minimum(self.upper[rows], upper)

    def open(self, rows: Tensor, done: Done) -> Tensor:
        """Which of the rows still need work."""
        return ~done(self.lower[rows], self.upper[rows])


def tighten(dual: Dual, rows: Int64[Tensor, " m"], bounds: Bounds, done: Done) -> None:
    """Sharpen the bounds of these rows until `done`, or until the iteration gives out.

    The cascade: one bound of either side at the Lewis weights for all of them, then iterations for the rest.
    """
    step = max(1, CPU_TILE // len(dual.basis))
    for batch in rows.split(step):
        z = dual.basis[batch] @ dual.basis.mT
        bounds.take(batch, dual.lower(z, batch), dual.upper(dual.omega * z, batch))
        left = bounds.open(batch, done)
        if left.any():
            (interior if dual.p == 1 else newton)(dual, batch[left], z[left], bounds, done)


def newton(dual: Dual, rows: Tensor, z: Tensor, bounds: Bounds, done: Done) -> None:
    """Reweighted least squares with an exact line search, from z: the step is Newton's up to its length.

    Weights |z|^(p−2) vanish (p > 2) or blow up (p < 2) where z does: a falling share of the Lewis weights is added, or
    |z| held above a falling floor.
    """
    p = dual.p
    base = dual.omega / dual.omega.max()
    z = z / z.gather(-1, rows.unsqueeze(-1))
    for step in range(NEWTON_STEPS):
        size = z.abs()
        if p > 2:
            top = size.amax(-1, keepdim=True)
            weights = power(size / top, p - 2) + max(1e-3 * 0.1**step, 1e-10) * base
        else:
            weights = size.clamp(min=0.5 ** (step % FLOOR_CYCLE) * size.mean(-1, keepdim=True)).pow(p - 2)
        target = dual.basis[rows]
        direction = dual.solve(weights, target)
        reached = direction @ dual.basis.mT
        bounds.take(rows, dual.lower(z, rows), dual.upper(weights * reached, rows))
        scale = (direction * target).sum(-1, keepdim=True)
        move = torch.where(scale > 0, reached / torch.where(scale > 0, scale, 1.0) - z, 0.0)
        z = z + line_search(z, move, p) * move
        bounds.take(rows, dual.lower(z, rows), torch.ones_like(scale[:, 0]))
        left = bounds.open(rows, done)
        if not left.any():
            return
        rows, z = rows[left], z[left]


def line_search(z: Tensor, move: Tensor, p: float) -> Float64[Tensor, "b 1"]:
    """t ≥ 0 that makes ‖z + t·move‖ₚ least: a root of its slope, by false position with halved ends."""

    def slope(t: Tensor) -> Tensor:
        at = z + t * move
        exact = (power(at, p - 1) * at.sign() * move).sum(-1, keepdim=True)
        return exact if p < 2 else exact.sign() * power(exact, 1 / (p - 1))

    low = torch.zeros_like(z[:, :1])
    high = torch.full_like(low, 1.0)
    slope_low, slope_high = slope(low), slope(high)
    for _ in range(3):
        short = slope_high < 0
        if not short.any():
            break
        low, slope_low = torch.where(short, high, low), torch.where(short, slope_high, slope_low)
        high = torch.where(short, 2 * high, high)
        slope_high = torch.where(short, slope(high), slope_high)
    for _ in range(SEARCH_STEPS):
        rise = slope_high - slope_low
        middle = torch.where(rise > 0, high - slope_high * (high - low) / torch.where(rise > 0, rise, 1.0), low)
        slope_middle = slope(middle)
        below = slope_middle < 0
        slope_low, slope_high = (
            torch.where(below, slope_middle, slope_low / 2),
            torch.where(below, slope_high / 2, slope_middle),
        )
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return middle.clamp(min=0.0)


def interior(dual: Dual, rows: Tensor, z: Tensor, bounds: Bounds, done: Done) -> None:
    """Mehrotra's predictor–corrector for p = 1: max λ with Qᵀa = λqᵢ, −1 ≤ a ≤ 1, whose dual is min ‖Qy‖₁.

    u and v are the multipliers of a ≤ 1 and a ≥ −1: Qy = u − v, ⟨qᵢ, y⟩ = 1, and u(1−a) = v(1+a) = μ on the central
    path. The start is feasible for both problems.
    """
    target = dual.basis[rows]
    a = dual.omega * z
    height = 0.9 / a.abs().amax(-1, keepdim=True)
    a = a * height
    y = target / target.square().sum(-1, keepdim=True)
    z = y @ dual.basis.mT
    spread = z.abs().mean(-1, keepdim=True)
    u, v = z.clamp(min=0.0) + spread, (-z).clamp(min=0.0) + spread
    n = z.shape[-1]
    for _ in range(INTERIOR_STEPS):
        system = CentralPath(dual, target, a, height, y, u, v)
        up, down = system.up, system.down
        gap = (u * up + v * down).sum(-1, keepdim=True)
        da, _, _, du, dv = system.step(-u * up, -v * down)
        box, sign = box_length(a, da), torch.minimum(positive_length(u, du), positive_length(v, dv))
        after = ((u + sign * du) * (up - box * da) + (v + sign * dv) * (down + box * da)).sum(-1, keepdim=True)
        centre = (after / gap).clamp(min=0.0) ** 3 * gap / (2 * n)
        da, d_height, dy, du, dv = system.step(centre - u * up + da * du, centre - v * down - da * dv)
        box = FRACTION * box_length(a, da)
        sign = FRACTION * torch.minimum(positive_length(u, du), positive_length(v, dv))
        moved = (a + box * da, height + box * d_height, y + sign * dy, u + sign * du, v + sign * dv)
        sound = torch.cat(moved, -1).isfinite().all(-1)
        a, height, y, u, v = moved
        reached = y @ dual.basis.mT
        upper = dual.upper((a / height).nan_to_num(), rows)
        bounds.take(rows[sound], dual.lower(reached, rows)[sound], upper[sound])
        left = bounds.open(rows, done) & sound
        if not left.any():
            return
        rows, target = rows[left], target[left]
        a, height, y, u, v = a[left], height[left], y[left], u[left], v[left]


class CentralPath:
    """The equations of the central path, linearised at a point; one factor serves predictor and corrector."""

    def __init__(self, dual: Dual, target: Tensor, a: Tensor, height: Tensor, y: Tensor, u: Tensor, v: Tensor) -> None:
        self.dual, self.target, self.u, self.v = dual, target, u, v
        self.up, self.down = 1 - a, 1 + a
        self.curvature = 1 / (u / self.up + v / self.down)
        self.gram = dual.gram(self.curvature)
        self.short = height * target - a @ dual.basis
        self.split = u - v - y @ dual.basis.mT
        self.off = 1 - (y * target).sum(-1, keepdim=True)
        self.ray, _ = torch.linalg.solve_ex(self.gram, target)

    def step(self, to_u: Tensor, to_v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Moves of (a, λ, y, u, v) that change u(1−a) by to_u, v(1+a) by to_v, and meet the linear constraints."""
        basis, target = self.dual.basis, self.target
        pull = self.split + to_u / self.up - to_v / self.down
        plain, _ = torch.linalg.solve_ex(self.gram, self.short + (self.curvature * pull) @ basis)
        met = (self.off - (plain * target).sum(-1, keepdim=True)) / (self.ray * target).sum(-1, keepdim=True)
        dy = plain + self.ray * met
        da = self.curvature * (dy @ basis.mT - pull)
        return da, met, dy, (to_u + self.u * da) / self.up, (to_v - self.v * da) / self.down


def box_length(a: Tensor, move: Tensor) -> Float64[Tensor, "b 1"]:
    """The largest t ≤ 1 with −1 ≤ a + t·move ≤ 1."""
    room = torch.where(move > 0, 1 - a, 1 + a)
    return (room / move.abs().clamp(min=1e-300)).amin(-1, keepdim=True).clamp(max=1.0)


def positive_length(u: Tensor, move: Tensor) -> Float64[Tensor, "b 1"]:
    """The largest t ≤ 1 with u + t·move ≥ 0."""
    return torch.where(move < 0, -u / move, 1.0).amin(-1, keepdim=True).clamp(max=1.0)


def power(x: Tensor, exponent: float) -> Tensor:
    """|x|^exponent."""
    return x.abs().pow(exponent)
