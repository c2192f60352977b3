"""Softmax sensitivities for queries in a ball: certified, by projected ascent on a concave function.

log σᵢ = max over ‖q‖ ≤ R of L(q) = ⟨q, kᵢ⟩ − log Σⱼ exp⟨q, kⱼ⟩. L is concave with gradient g = kᵢ − Σⱼ pⱼkⱼ, so at
every point L(q) ≤ log σᵢ ≤ L(q) + R‖g‖ − ⟨g, q⟩: an iterate certifies both sides, converged or not. There is no bound
on how many keys can reach ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.checks import require_eps, require_finite, require_keys
from levattention.errors import ConvergenceError
from levattention.gram import heads_first
from levattention.losses import Softmax

# Scores ⟨q, k⟩ held at once: queries of one block times keys.
BLOCK = 1 << 22
STEPS = 2000


@dataclass(frozen=True)
class SoftmaxBall:
    """Upper bounds on the largest softmax weight that a query with ‖q‖ ≤ radius can give each key.

    Attributes:
        radius: R.
        scale: what multiplies ⟨q, k⟩, as in `Softmax`: 1/√d for keys as a transformer holds them.
        gap: upper bounds are at most 1 + gap times the truth, unless the steps run out; they hold in any case.

    Example:
        >>> keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> [round(score, 2) for score in SoftmaxBall(radius=20.0, gap=1e-3)(keys).tolist()]
        [1.0, 1.0, 1.0]
    """

    radius: float
    scale: float = 1.0
    gap: float = 0.05

    certified: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Softmax(self.radius, self.scale)
        _require_gap(self.gap)

    def __call__(self, keys: Tensor) -> Float64[Tensor, "*batch n"]:
        """Certified scores of every key, (*batch, n, d) -> (*batch, n)."""
        return _bounds(keys, self.loss, self.gap)[1]

    def decide(self, keys: Tensor, eps: float) -> Float64[Tensor, "*batch n"]:
        """Certified scores that settle the threshold ε; a key is left alone as soon as either bound settles it."""
        return _bounds(keys, self.loss, 1e-6, require_eps(eps))[1]

    @property
    def loss(self) -> Softmax:
        """The loss that these scores bound."""
        return Softmax(self.radius, self.scale)

    def bound(self, d: int, n: int) -> float:
        """n: no smaller bound exists."""
        return self.loss.total_sensitivity(d, n)


def softmax_sensitivities(
    keys: Tensor, loss: Softmax, *, gap: float = 1e-2
) -> tuple[Float64[Tensor, "*batch n"], Float64[Tensor, "*batch n"]]:
    """(lower, upper) on the largest softmax weight of each key over ‖q‖ ≤ R, with upper ≤ (1 + gap)·lower.

    Raises:
        ValueError: bad keys, a loss that is not `Softmax`, or gap ≤ 0.
        ConvergenceError: the gap was not reached for some key; the message says how far it came.

    Example:
        >>> lower, upper = softmax_sensitivities(torch.tensor([[1.0], [-1.0]]), Softmax(1.0), gap=1e-6)
        >>> round(lower[0].item(), 4), round(1 / (1 + math.exp(-2)), 4)
        (0.8808, 0.8808)
    """
    if not isinstance(loss, Softmax):
        raise ValueError(f"loss: expected Softmax, got {loss!r}")
    _require_gap(gap)
    lower, upper = _bounds(keys, loss, gap)
    worst = float((upper / lower).max()) - 1
    if worst > gap * (1 + 1e-6):
        raise ConvergenceError(f"softmax sensitivities: gap {worst:.2e} after {STEPS} steps, asked for {gap:.2e}")
    return lower, upper


def _require_gap(gap: float) -> None:
    if not gap > 0:
        raise ValueError(f"gap: expected a number > 0, got {gap!r}")


def _bounds(keys: Tensor, loss: Softmax, gap: float, eps: float | None = None) -> tuple[Tensor, Tensor]:
    """(lower, upper) of every key, head by head and block by block."""
    require_keys(keys)
    require_finite(keys)
    # A shift of all keys changes no weight; centred keys are the better conditioned problem.
    scaled = heads_first(keys).double() * loss.scale
    centred = scaled - scaled.mean(-2, keepdim=True)
    block = max(1, BLOCK // keys.shape[-2])
    lower, upper = torch.stack(
        [
            torch.cat([ascend(rows, part, loss.radius, gap, eps) for part in _positions(rows).split(block)], dim=-1)
            for rows in centred
        ],
        dim=1,
    ).exp()
    return lower.reshape(keys.shape[:-1]), upper.clamp(max=1.0).reshape(keys.shape[:-1])


def _positions(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)


def ascend(
    keys: Float64[Tensor, "n d"], index: Tensor, radius: float, gap: float, eps: float | None = None
) -> Float64[Tensor, "2 m"]:
    """Lower and upper bounds on log σᵢ for the keys in `index`, by projected ascent with spectral steps.

    A step from q goes to the projection of q + g/ℓ, and is taken if L rises as much as curvature ℓ promises;
    otherwise ℓ grows. After a step ℓ is the curvature just met (Barzilai and Borwein). Keys leave once
    upper − lower ≤ log(1 + gap), or once a bound has passed log ε.
    """
    target = keys[index]
    # At q = 0 both bounds are known without an iteration.
    lower = torch.full_like(target[:, 0], -math.log(len(keys)))
    upper = lower + radius * target.norm(dim=-1)
    active = _open(lower, upper, gap, eps).nonzero().squeeze(-1)
    query = project(torch.nn.functional.normalize(target[active], dim=-1) * radius, radius)
    value, gradient = objective(keys, target[active], query)
    curvature = torch.full_like(value, float(torch.linalg.matrix_norm(keys, 2)) ** 2 / len(keys)).clamp(min=1e-300)
    for _ in range(STEPS):
        slack = radius * gradient.norm(dim=-1) - torch.linalg.vecdot(gradient, query)
        lower[active] = torch.maximum(lower[active], value)
        upper[active] = torch.minimum(upper[active], value + slack)
        still = _open(lower[active], upper[active], gap, eps)
        active, query, value, gradient, curvature = (
            part[still] for part in (active, query, value, gradient, curvature)
        )
        if not len(active):
            break
        trial = project(query + gradient / curvature.unsqueeze(-1), radius)
        new_value, new_gradient = objective(keys, target[active], trial)
        step = trial - query
        length = torch.linalg.vecdot(step, step)
        promised = torch.linalg.vecdot(gradient, step) - curvature / 2 * length
        taken = new_value >= value + promised - 1e-14 * value.abs()
        met = torch.linalg.vecdot(gradient - new_gradient, step) / length.clamp(min=1e-300)
        curvature = torch.where(taken, met.clamp(min=curvature * 0.05, max=curvature * 20), curvature * 3)
        query = torch.where(taken.unsqueeze(-1), trial, query)
        gradient = torch.where(taken.unsqueeze(-1), new_gradient, gradient)
        value = torch.where(taken, new_value, value)
    return torch.stack([lower, upper])


def _open(lower: Tensor, upper: Tensor, gap: float, eps: float | None) -> Tensor:
    """Which keys are not settled."""
    wide = upper - lower > math.log1p(gap)
    return wide if eps is None else wide & (lower < math.log(eps)) & (upper >= math.log(eps) - 2e-9)


def objective(keys: Tensor, target: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """L(q) and its gradient kᵢ − Σⱼ pⱼkⱼ, for a block of queries."""
    logits = query @ keys.mT
    total = logits.logsumexp(-1)
    share = (logits - total.unsqueeze(-1)).exp_()
    return torch.linalg.vecdot(query, target) - total, target - share @ keys


def project(query: Tensor, radius: float) -> Tensor:
    """The nearest point of the ball."""
    return query * (radius / query.norm(dim=-1, keepdim=True).clamp(min=1e-300)).clamp(max=1.0)
