"""Certified scores for Huber and Tukey: leverage under weights that know how far each key can be stretched.

Both losses are τ²f₁(·/τ), so everything here works with τ = 1. Statements and proofs: docs/robust.md. In short, for
weights 0 < w ≤ 1 let rᵢ² = kᵢᵀ(Σⱼ wⱼkⱼkⱼᵀ)⁺kᵢ.

- Huber, scale s: where wⱼ ≤ f(√s·rⱼ)/(s·rⱼ²) for every j, σᵢ ≤ max(rᵢ², c·rᵢ/√s).
- Tukey, level α: where wⱼrⱼ² ≤ α for every j, σᵢ ≤ max(rᵢ², α).

A single scale, or level, settles one threshold ε; a grid of them, ratio 2, bounds every sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from levattention._shapes import Bool, Float64
from levattention.checks import require_eps, require_finite, require_keys
from levattention.errors import ConvergenceError
from levattention.gram import Gram, heads_first
from levattention.losses import Huber, Tukey
from levattention.scorers.leverage import factor_keys

# How closely, in the log, a fixed point is solved for one threshold, and for one scale of a grid.
FINE, COARSE = 1e-7, 1e-3

# Tukey's map does not contract: its levels are solved to this, in the log, and |U| ≤ e^(2·LEVEL_TOL)·d/ε.
LEVEL_TOL = 1e-3
LEVEL_STEPS = 400

# A weight below this belongs to a key that leaves the span of the others, up to rounding: it is dropped, which is
# always safe. Directions in which the rest then measures less than SPAN_RTOL of its largest are rounding.
DROPPED = 1e-22
SPAN_RTOL = 1e-13

# How far below their reference weights may fall before new coordinates are due.
STRAYED = 1e-5

# The search for witnesses: steps of reweighted least squares, and elements of one tile of it.
SEARCH_STEPS = 12
SEARCH_TILE = 1 << 22


@dataclass(frozen=True)
class Robust:
    """Upper bounds on the Huber or Tukey sensitivities, for every key, all queries and all their lengths.

    Called with keys it runs a grid of scales. `decide` runs the one scale that settles a threshold: with it
    |U| ≤ 4d/(3ε) for the smooth Huber, d/ε for the other two losses.

    Attributes:
        loss: `Huber` or `Tukey`; its threshold does not matter.
        rtol: which directions of the keys count as rounding, as in `leverage_scores`.

    Example:
        >>> keys = torch.cat([torch.eye(2).repeat(40, 1), torch.tensor([[0.0, 9.0]])])
        >>> scores = Robust(Tukey()).decide(keys, eps=0.2)
        >>> (scores >= 0.2).nonzero().tolist()
        [[80]]
    """

    loss: Huber | Tukey = Huber()  # noqa: RUF009 (frozen)
    rtol: float | Literal["exact"] | None = None

    certified: ClassVar[bool] = True

    def __call__(self, keys: Tensor) -> Float64[Tensor, "*batch n"]:
        """Certified scores of every key, (*batch, n, d) -> (*batch, n)."""
        white = whitened(keys, self.rtol)
        upper = huber_grid(white, _unit(self.loss)) if isinstance(self.loss, Huber) else tukey_grid(white)
        return upper.clamp(max=1.0)

    def decide(self, keys: Tensor, eps: float) -> Float64[Tensor, "*batch n"]:
        """Certified scores that settle the threshold ε, from one scale.

        No key whose score is below ε can reach it; those that are not number at most C·d/ε.

        Raises:
            ValueError: bad keys, or eps outside (0, 1].
        """
        eps = require_eps(eps)
        white = whitened(keys, self.rtol)
        if isinstance(self.loss, Huber):
            loss = _unit(self.loss)
            scale = loss.linear**2 / eps
            stretch = huber_weights(white, loss, scale, torch.ones(keys.shape[:-1]).to(white), FINE)[1]
            scores = torch.maximum(stretch, loss.linear * (stretch / scale).sqrt())
        else:
            # Strictly below ε, so that a key which the level settles does not tie with it.
            scores = tukey_level(white, eps * math.exp(-LEVEL_TOL) * (1 - 1e-5))[1]
        return scores.clamp(max=1.0)

    def bound(self, d: int, n: int) -> float:
        """ε times the size that {i : score ≥ ε} from `decide` has at most, whatever ε."""
        slack = 1 + 2e-5 + (math.exp(2 * LEVEL_TOL) - 1) * isinstance(self.loss, Tukey)
        return min(float(n), slack * self.loss.density * d)


def _unit(loss: Huber) -> Huber:
    return replace(loss, threshold=1.0)


def whitened(keys: Tensor, rtol: float | Literal["exact"] | None = None) -> Float64[Tensor, "*batch n d"]:
    """The keys in coordinates in which KᵀK is the identity (zero on the null space): f(Ky) ranges over the same."""
    require_keys(keys)
    require_finite(keys)
    return keys.double() @ factor_keys(keys, rtol)[0].whitener


def weighted_leverage(white: Tensor, weights: Tensor) -> Tensor:
    """wᵢrᵢ²: the leverage of the rows √wᵢkᵢ."""
    rows = white * weights.sqrt().unsqueeze(-1)
    return Gram.of(rows).factor("exact").leverage(rows)


def huber_weights(
    white: Float64[Tensor, "*batch n d"], loss: Huber, scale: float, start: Tensor, tol: float
) -> tuple[Float64[Tensor, "*batch n"], Float64[Tensor, "*batch n"]]:
    """(w, r²) with w ≤ f(√s·r)/(s·r²) for every key, at the fixed point up to tol in the log.

    The map halves distances in ‖log w‖∞, so log2(log s/tol) steps do. What tol leaves is repaired: with
    a = max wⱼ/φⱼ, w/a² and a²r² satisfy the inequality.

    Raises:
        ConvergenceError: the map did not contract, which only rounding could cause.
    """
    weights = start
    for _ in range(100):
        stretch = weighted_leverage(white, weights) / weights
        target = relative_loss(loss, scale, stretch)
        # The map's value is not used as w: (w, r²) must belong together for the repair.
        apart = (weights / target).log()
        if float(apart.abs().max()) <= tol:
            repair = apart.amax(-1, keepdim=True).clamp(min=0.0).mul(2).exp()
            return weights / repair, stretch * repair
        weights = target
    raise ConvergenceError(
        f"Huber weights at scale {scale:g}: still {float(apart.abs().max()):.1e} apart after 100 steps"
    )


def relative_loss(loss: Huber, scale: float, stretch: Tensor) -> Tensor:
    """φ = f(√s·r)/(s·r²), 1 at r = 0."""
    square = scale * stretch
    return torch.where(square <= 1, 1.0, loss(square.clamp(min=1.0).sqrt()) / square.clamp(min=1.0))


def huber_grid(white: Float64[Tensor, "*batch n d"], loss: Huber) -> Float64[Tensor, "*batch n"]:
    """Upper bounds from the scales s = 1, 2, 4, …, beyond 4n.

    A query with total loss t obeys, at every scale, |zᵢ| ≤ rᵢ·max(√t, t/√s), hence share ≤ f(rᵢ·max(√t, t/√s))/t,
    which falls in t up to s and rises from there. So on [s, 2s] the larger end bounds the share, and either of the
    two scales may be used; below the first scale r² does, beyond the last one c·r/√s.
    """
    scales = huber_scales(white, loss)
    scale, _, upper = next(scales)
    size = upper.sqrt()
    for scale, _, stretch in scales:
        low = scale / 2
        from_below = loss(size * 2 * low**0.5) / scale
        size = stretch.sqrt()
        from_above = loss(size * low**0.5) / low
        upper = torch.maximum(upper, torch.minimum(from_below, from_above))
    return torch.maximum(upper, loss.linear * size / scale**0.5)


def huber_scales(white: Tensor, loss: Huber) -> Iterator[tuple[float, Tensor, Tensor]]:
    """(s, w, r²) for s = 1, 2, 4, … until 4n is covered; each scale starts where the last one ended."""
    weights = torch.ones(white.shape[:-1], dtype=torch.float64, device=white.device)
    for power in range(math.ceil(math.log2(4 * white.shape[-2])) + 1):
        weights, stretch = huber_weights(white, loss, 2.0**power, weights, COARSE)
        yield 2.0**power, weights, stretch


def tukey_grid(white: Float64[Tensor, "*batch n d"]) -> Float64[Tensor, "*batch n"]:
    """Upper bounds from the levels α = 1/2, 1/4, … down to about d/n: the least over levels."""
    upper = (white != 0).any(-1).double()
    for level in tukey_levels(white):
        upper = torch.minimum(upper, tukey_level(white, level)[1])
    return upper


def tukey_levels(white: Tensor) -> list[float]:
    """1/2, 1/4, … while α ≥ 1.25·d/n. Below r/n no weights exist, since Σwr² = r, and close to it they are slow."""
    n, d = white.shape[-2:]
    return [2.0**-power for power in range(1, math.floor(math.log2(max(1.0, n / (1.25 * d)))) + 1)]


def tukey_level(
    white: Float64[Tensor, "*batch n d"], level: float
) -> tuple[Float64[Tensor, "*batch n"], Float64[Tensor, "*batch n"]]:
    """(w, max(r², α)): weights w ← min(1, α/r²) started at 1, and the bound on every sensitivity that they give.

    Weights fall to zero exactly for keys that leave the span of the rest; those are dropped from the problem, which
    can only raise the other sensitivities, and score 1. Where the steps run out, the keys that still break
    w·r² ≤ α are dropped too: the set is then safe all the same, but may exceed d/α.
    """
    live = (white != 0).any(-1)
    kept, log_weights = live, torch.zeros(live.shape, dtype=torch.float64, device=white.device)
    rows, base, budget = white, log_weights, LEVEL_STEPS
    while True:
        log_weights, leverage, spent = balance(rows, base, log_weights, kept, level, budget)
        budget -= spent
        stretch = (leverage.log() - log_weights).exp()
        over = kept & (stretch > level / DROPPED)
        if budget <= 0:
            # The worst offenders alone: without them the others may settle.
            worst = (leverage.amax(-1, keepdim=True) * level).sqrt()
            over = over | kept & (leverage >= worst) & (leverage > level * math.exp(LEVEL_TOL))
        if over.any():
            kept = kept & ~over
            rest = white * kept.unsqueeze(-1)
            white = rest @ factor_keys(rest, SPAN_RTOL)[0].whitener
            budget = max(budget, LEVEL_STEPS // 8)
        elif budget <= 0 or float(_aim_off(log_weights, leverage, kept, level).abs().max()) <= LEVEL_TOL:
            break
        # Weights far apart make an ill-conditioned Gram: go on in coordinates in which the present one is I.
        base = torch.where(kept, log_weights, 0.0)
        rows = white * (base / 2).exp().unsqueeze(-1)
        rows = rows @ factor_keys(rows, "exact")[0].whitener
    ceiling = leverage.amax(-1, keepdim=True).clamp(min=level)
    scores = torch.where(kept, torch.maximum(stretch, ceiling), live.double())
    return log_weights.exp(), scores


def balance(
    rows: Tensor, base: Tensor, log_weights: Tensor, kept: Bool[Tensor, "*batch n"], level: float, budget: int
) -> tuple[Float64[Tensor, "*batch n"], Float64[Tensor, "*batch n"], int]:
    """(log w, w·r², steps taken) nearer the fixed point w = min(1, α/r²).

    `rows` are the keys times √exp(base) in coordinates that suit them. Plain steps approach the fixed point only like
    1/steps in the worst case, so the last two are extrapolated (Varadhan and Roland's squared step); a jump that
    ends farther off is taken back. No step has to be trusted: the certificate is read off the result. Stops at the
    fixed point, where a key has to be dropped, where weights have left the coordinates' range, or when the budget
    is spent.
    """
    reach = torch.full_like(log_weights[..., :1], 4.0)
    first = plain = before = None
    for step in range(1, budget + 1):
        leverage = weighted_leverage(rows, (log_weights - base).exp() * kept)
        move = _aim_off(log_weights, leverage, kept, level)
        if step == budget or float(move.abs().max()) <= LEVEL_TOL:
            break
        if plain is not None and before is not None:
            good = move.norm(dim=-1, keepdim=True) <= before * 1.01
            reach = torch.where(good, reach * 2, reach / 2).clamp(1.0, 64.0)
            log_weights, plain = torch.where(good, log_weights + move, plain), None
            continue
        leaving = kept & (log_weights + move < math.log(DROPPED))
        strayed = kept & (log_weights < base + math.log(STRAYED))
        if (leaving | strayed).any():
            break
        if first is None:
            first, log_weights = move, log_weights + move
            continue
        turn, before, plain = move - first, move.norm(dim=-1, keepdim=True), log_weights + move
        stride = first.norm(dim=-1, keepdim=True) / turn.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        stride = torch.minimum(stride.clamp(min=1.0), reach)
        jump = log_weights - first + 2 * stride * first + stride.square() * turn
        # A jump may end at the edge of being dropped, never beyond: only the map itself drops a key.
        edge = (base + 2 * math.log(STRAYED)).clamp(min=math.log(DROPPED))
        first, log_weights = None, torch.where(kept, torch.maximum(jump, edge).clamp(max=0.0), log_weights)
    return log_weights, leverage, step


def _aim_off(log_weights: Tensor, leverage: Tensor, kept: Tensor, level: float) -> Tensor:
    """log min(1, α/r²) − log w: how far the map moves each weight."""
    aim = (log_weights + math.log(level) - leverage.clamp(min=1e-300).log()).clamp(max=0.0)
    return (aim - log_weights) * kept


def robust_sensitivities(
    keys: Tensor, loss: Huber | Tukey, *, gap: float = 0.1
) -> tuple[Float64[Tensor, "*batch n"], Float64[Tensor, "*batch n"]]:
    """(lower, upper) on the Huber or Tukey sensitivities, each certified, (*batch, n).

    The upper bound is that of `Robust`. The lower one is the share of a query that was found: for every key the
    best of (Σⱼ wⱼkⱼkⱼᵀ)⁺kᵢ over the grid's weights, improved by reweighted least squares until upper/lower ≤ 1 + gap
    or the steps run out. The gap is best effort: no exact solver is known for the non-convex Tukey loss.
    Work grows like n²d² a step; meant for some thousands of keys.

    Raises:
        ValueError: bad keys, a loss that is neither Huber nor Tukey, or gap ≤ 0.

    Example:
        >>> lower, upper = robust_sensitivities(torch.eye(2, dtype=torch.float64).repeat(4, 1), Huber())
        >>> bool((lower <= upper).all()), round(lower[0].item(), 3)
        (True, 0.25)
    """
    if not isinstance(loss, Huber | Tukey):
        raise ValueError(f"loss: expected Huber or Tukey, got {loss!r}")
    if not gap > 0:
        raise ValueError(f"gap: expected a number > 0, got {gap!r}")
    upper = Robust(loss)(keys)
    white = heads_first(whitened(keys))
    unit = replace(loss, threshold=1.0)
    pairs = zip(white, upper.reshape(len(white), -1), strict=True)
    lower = torch.stack([_found(rows, unit, most, gap) for rows, most in pairs])
    return torch.minimum(lower.reshape(upper.shape), upper), upper


def _found(white: Tensor, loss: Huber | Tukey, upper: Tensor, gap: float) -> Tensor:
    """The largest share found for each key of one head."""
    white = white[:, (white != 0).any(0)]
    if isinstance(loss, Huber):
        grid = [weights for _, weights, _ in huber_scales(white, loss)]
    else:
        grid = [torch.ones_like(upper), *(tukey_level(white, level)[0] for level in tukey_levels(white))]
    grams = [(white * weights.unsqueeze(-1)).mT @ white for weights in grid]
    best = torch.zeros_like(upper)
    nonzero = (white != 0).any(-1).nonzero().squeeze(-1)
    for index in nonzero.split(max(1, SEARCH_TILE // white.numel())):
        best[index] = _search(white, loss, grams, index, upper[index] / (1 + gap))
    return best


def _search(white: Tensor, loss: Huber | Tukey, grams: list[Tensor], index: Tensor, enough: Tensor) -> Tensor:
    """The largest share found for each key in `index`, looking no further once it is enough."""
    rows, own = white[index], index.unsqueeze(-1)
    # Tukey's best size of zᵢ is the threshold itself; Huber's lies somewhere between x² alone and |x| alone.
    sizes = [1.0] if isinstance(loss, Tukey) else [2.0**power for power in range(-2, len(grams) + 1)]
    best, at = torch.zeros_like(enough), torch.zeros(len(index), len(white)).to(white)

    def consider(queries: Tensor, sizes: Tensor) -> None:
        response = queries @ white.mT
        response = response / response.gather(-1, own)
        for size in sizes.unbind(-1):
            z = response * size.unsqueeze(-1)
            share = loss(size) / loss(z).sum(-1)
            better = share > best
            best[better], at[better] = share[better], z[better]

    for gram in grams:
        consider(torch.linalg.solve(gram, rows.mT).mT, torch.tensor(sizes).to(white).expand(len(index), -1))
    steps = torch.tensor([1.0] if isinstance(loss, Tukey) else [0.5, 0.8, 1.0, 1.25, 2.0]).to(white)
    for _ in range(SEARCH_STEPS):
        if (best >= enough).all():
            break
        # f is concave in z², so least squares under its slopes never lowers the share; the floor keeps it solvable.
        slopes = loss.slope(at).clamp(min=1e-9)
        grams_at = (white * slopes.unsqueeze(-1)).mT @ white
        queries = torch.linalg.solve(grams_at, rows.unsqueeze(-1)).squeeze(-1)
        consider(queries, at.gather(-1, own).abs() * steps)
    return best
