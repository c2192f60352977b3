"""Keys, once -> candidates; then a query -> its relevant keys, at a cost that does not depend on n."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from levattention._shapes import Bool, Float, Float64, Int64
from levattention.checks import require_finite
from levattention.gram import Advance, Factor, inverse_where
from levattention.planted.assumptions import at_most, most_relevant, require_matrix
from levattention.planted.query import require_delta1
from levattention.scorers.leverage import factor_keys
from levattention.universal import UniversalSet, capacity, reaches, select_above

# Rows of the Gaussian sketch drawn at a time. Fixed, so that a seed gives the same sketch everywhere.
SKETCH_ROWS = 4096


@dataclass(frozen=True)
class JL:
    """The paper's sketch: row lengths of A = KKᵀ from those of K(KᵀB), with B an n × m Gaussian matrix.

    An estimate is the truth times χ²ₘ/m, exactly. S is lost only where an estimate exceeds 1/(1 − δ_JL) times the
    truth; with t = 1/(1 − δ_JL), Chernoff bounds that by exp(−(m/2)(t − 1 − ln t)) a key, and
    m = ⌈2 ln(|U|/failure)/(t − 1 − ln t)⌉ columns bound it over all keys of U ⊇ S by `failure`.

    Attributes:
        distortion: δ_JL, in (0, 1); the threshold becomes ρ(1 − δ_JL).
        failure: the probability, at most, that a stand-out key is lost.

    Example:
        >>> JL(distortion=0.5, failure=1e-6).columns(1000)
        136
    """

    distortion: float = 0.5
    failure: float = 1e-6

    def __post_init__(self) -> None:
        for name, value in (("distortion", self.distortion), ("failure", self.failure)):
            if not 0.0 < value < 1.0:
                raise ValueError(f"{name}: expected a number in (0, 1), got {value}")

    def columns(self, count: int) -> int:
        """m, for `count` keys that must all be estimated well."""
        stretch = 1.0 / (1.0 - self.distortion)
        return math.ceil(2 * math.log(max(1, count) / self.failure) / (stretch - 1 - math.log(stretch)))


@dataclass(frozen=True)
class Recovery:
    """What is kept of the keys to name the relevant keys of a query.

    Attributes:
        universal: U, the keys whose leverage reaches ρ.
        candidates: U′, positions in rising order; holds S where the assumptions do.
        self_scores: ‖Kᵢ‖⁴/Σⱼ⟨Kᵢ, Kⱼ⟩² of the candidates, or the sketch's estimate of it.
        rows: Kᵢ/‖Kᵢ‖² of the candidates.
        delta1: δ1.
        rho: ρ.
        columns: m of the sketch; None where the self-scores are exact.
        failure: the probability, at most, that U′ lacks a stand-out key; 0 where the self-scores are exact.
    """

    universal: UniversalSet
    candidates: Int64[Tensor, " c"]
    self_scores: Float64[Tensor, " c"]
    rows: Float64[Tensor, "c d"]
    delta1: float
    rho: float
    columns: int | None
    failure: float

    def scores(self, q: Tensor) -> Float64[Tensor, "*m c"]:
        """⟨q, Kᵢ⟩/‖Kᵢ‖² for each candidate: ≥ (11/4)δ1 on S(q), within ±(5/4)δ1 elsewhere (Theorem relevant-K).

        Args:
            q: (d,) or (m, d).
        """
        d = self.rows.shape[-1]
        if not isinstance(q, Tensor) or q.ndim not in (1, 2) or q.shape[-1] != d or not q.is_floating_point():
            came = f"{q.dtype} of shape {tuple(q.shape)}" if isinstance(q, Tensor) else type(q).__name__
            raise ValueError(f"q: expected a floating tensor ({d},) or (m, {d}), got {came}")
        require_finite(q.reshape(-1, d), "q")
        return q.double() @ self.rows.mT

    def relevant_keys(self, q: Tensor) -> Any:
        """S(q): the candidates with ⟨q, Kᵢ⟩ ≥ 2δ1‖Kᵢ‖², the middle of the theorem's gap.

        The paper's algorithm prints (11/4)‖Kᵢ‖² without δ1, which finds nothing. No key outside S(q) passes even if
        the candidates hold more than S.

        Args:
            q: (d,), which gives the positions as one int64 tensor in rising order; or (m, d), which gives a list.

        Raises:
            ValueError: a query of another shape, or not finite.

        Example:
            >>> found = recover(torch.eye(4), delta1=0.1, rho=0.9)
            >>> found.relevant_keys(torch.tensor([0.5, 0.0, 0.4, 0.01]))
            tensor([0, 2])
        """
        passing = reaches(self.scores(q), 2 * self.delta1)
        if passing.ndim == 1:
            return self.candidates[passing]
        return [self.candidates[row] for row in passing]

    def consistent(self, q: Tensor) -> Bool[Tensor, "*m"]:
        """Whether the query can come from the model: False is a proof that an assumption is broken.

        Under the model no candidate scores between (5/4)δ1 and (11/4)δ1 or under −(5/4)δ1, and no more than ⌊1/(4δ1)⌋
        score above. True proves nothing: what happens outside the candidates is not looked at.
        """
        scores = self.scores(q)
        low, high = 1.25 * self.delta1, 2.75 * self.delta1
        above = reaches(scores, high)
        below = reaches(torch.full_like(scores, low), scores.abs())
        return (above | below).all(-1) & (above.sum(-1) <= most_relevant(self.delta1))


def recover(
    keys: Tensor,
    *,
    delta1: float,
    rho: float,
    sketch: JL | None = None,
    generator: torch.Generator | None = None,
    advance: Advance | None = None,
) -> Recovery:
    """What names the relevant keys of any query: U, then U′ ⊆ U, then the rows of U′.

    U = {i : τᵢ ≥ ρ}. U′ = {i ∈ U : ‖Kᵢ‖⁴ ≥ ρ·Σⱼ⟨Kᵢ, Kⱼ⟩²}, where Σⱼ⟨Kᵢ, Kⱼ⟩² = KᵢᵀGKᵢ with G = KᵀK, so that no row
    of KKᵀ is formed. Lemma S-attention puts S into U′ wherever the assumptions hold with these δ1 and ρ.

    Args:
        keys: (n, d); not kept.
        delta1: δ1 of the model, in (0, ¼]; `check` measures it.
        rho: ρ = 1/(1 + δ1²|S| + δ2²n), in (0, 1].
        sketch: estimate the sums by the paper's sketch instead, at threshold ρ(1 − δ_JL).
        generator: source of the sketch; needed with `sketch`.
        advance: told how many rows were just read, for a progress bar.

    Raises:
        ValueError: keys that are empty, batched or not finite; delta1 outside (0, ¼]; rho outside (0, 1]; a sketch
            without a generator.

    Example:
        >>> keys = torch.cat([torch.eye(4), 0.01 * torch.randn(100, 4)])
        >>> recover(keys, delta1=0.1, rho=0.5).candidates
        tensor([0, 1, 2, 3])
    """
    flat = require_matrix(keys)
    delta1 = require_delta1(delta1)
    if not (rho > 0.0 and at_most(rho, 1.0)):
        raise ValueError(f"rho: expected a number in (0, 1], got {rho}")
    if sketch is not None and generator is None:
        raise ValueError("generator: a sketch is random; give the generator to draw it from")
    # The lemma is about the keys as stored: a direction that only S has must not pass for rounding noise.
    factor, route = factor_keys(flat, "exact", advance=advance)
    leverage = factor.leverage(flat, advance)
    n, d = flat.shape
    found = {"rank": factor.rank, "condition": factor.condition, "route": route}
    universal = select_above(leverage, rho, capacity(min(n, d), rho, n), **found)
    positions = universal.index[universal.valid].sort().values
    rows = flat[positions].double()
    lengths = rows.norm(dim=-1)
    units = rows / lengths.unsqueeze(-1)
    threshold, columns, failure = rho, None, 0.0
    if sketch is None:
        sums = (units @ unwhitener(factor).mT).square().sum(-1)
    else:
        assert generator is not None  # settled above
        threshold, failure = rho * (1 - sketch.distortion), sketch.failure
        columns = sketch.columns(len(positions))
        sums = (units @ gaussian_projection(flat, columns, generator)).square().sum(-1) / columns
    self_scores = lengths.square() / sums
    keep = reaches(self_scores, threshold)
    rows = units[keep] / lengths[keep].unsqueeze(-1)
    return Recovery(universal, positions[keep], self_scores[keep], rows, delta1, rho, columns, failure)


def unwhitener(factor: Factor) -> Float64[Tensor, "d d"]:
    """R with RᵀR = G, from the whitener P: its columns are v/σ, so the rows of R are σvᵀ.

    ‖Rk‖² keeps κ·u of accuracy where kᵀGk would keep κ²·u.
    """
    squares = factor.whitener.square().sum(-2)
    return factor.whitener.mT * inverse_where(squares > 0, squares).unsqueeze(-1)


def gaussian_projection(
    keys: Float[Tensor, "n d"], columns: int, generator: torch.Generator
) -> Float64[Tensor, "d columns"]:
    """KᵀB for an n × m standard Gaussian B, drawn and used a block at a time."""
    total = torch.zeros((keys.shape[-1], columns), dtype=torch.float64, device=keys.device)
    for start in range(0, len(keys), SKETCH_ROWS):
        block = keys[start : start + SKETCH_ROWS].double()
        gaussian = torch.randn(len(block), columns, generator=generator, dtype=torch.float64, device=generator.device)
        total += block.mT @ gaussian.to(keys.device)
    return total
