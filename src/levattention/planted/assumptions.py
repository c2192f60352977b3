"""Whether keys have a stand-out set: δ1, δ2 and ρ as measured, in blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from levattention._shapes import Float, Int64
from levattention.checks import require_finite, require_keys
from levattention.gram import CPU_TILE, Advance
from levattention.universal import SLACK, reaches

# Stand-out keys that one block of products has as columns.
COLUMNS = 1024


@dataclass(frozen=True)
class Assumptions:
    """What was measured of keys K and a stand-out set S, and what follows from it.

    Attributes:
        n: how many keys.
        size: |S|.
        delta1: max |⟨Kⱼ, Kₗ⟩| / min(‖Kⱼ‖², ‖Kₗ‖²) over pairs within S.
        delta2: the same over pairs of a key in S and a key outside.
    """

    n: int
    size: int
    delta1: float
    delta2: float

    @property
    def rho(self) -> float:
        """ρ = 1/(1 + δ1²|S| + δ2²n), the floor of a stand-out key's self-attention (Lemma S-attention)."""
        return 1.0 / (1.0 + self.delta1**2 * self.size + self.delta2**2 * self.n)

    @property
    def holds(self) -> bool:
        """Whether δ2 ≤ δ1 ≤ ¼."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the assumptions do not hold, a sentence each; empty where they do."""
        found = []
        if not at_most(self.delta1, 0.25):
            found.append(
                f"δ1 = {self.delta1:.4g} is more than 1/4: a relevant key needs weight ≥ 4δ1 = {4 * self.delta1:.4g}, "
                "and weights sum to at most 1, so no query can have one"
            )
        if not at_most(self.delta2, self.delta1):
            found.append(
                f"δ2 = {self.delta2:.4g} is more than δ1 = {self.delta1:.4g}: keys outside S are closer to S than the "
                "keys of S are to each other (`relaxed` takes δ2 for both)"
            )
        return tuple(found)

    @property
    def relaxed(self) -> Assumptions:
        """The same with δ1 raised to δ2 where it is smaller: both are upper bounds, so that S still qualifies."""
        return replace(self, delta1=max(self.delta1, self.delta2))

    @property
    def max_relevant(self) -> int:
        """The largest |S(q)| that leaves room for weights ≥ 4δ1 summing to at most 1: ⌊1/(4δ1)⌋."""
        return most_relevant(self.delta1) if self.delta1 > 0 else self.size


def at_most(value: float, limit: float) -> bool:
    """value ≤ limit, under the one comparison rule."""
    return bool(reaches(torch.tensor(limit, dtype=torch.float64), value))


def most_relevant(delta1: float) -> int:
    """⌊1/(4δ1)⌋ for δ1 > 0, ties kept under the one comparison rule."""
    return math.floor(1.0 / (4.0 * delta1 * (1.0 - SLACK)))


def check(keys: Tensor, standout: Tensor, *, advance: Advance | None = None) -> Assumptions:
    """δ1 and δ2 of the keys and the stand-out set, and with them ρ, whether the model holds, and the largest |S(q)|.

    δ1 and δ2 are the raw maxima of |⟨Kⱼ, Kₗ⟩| / min(‖Kⱼ‖², ‖Kₗ‖²), equations (delta1) and (delta2) of the paper.
    The products are formed in fp64, in blocks of bounded size; nothing of n × n or n × |S| is ever held. A pair with
    a zero key outside S meets its bound for every δ and counts as 0.

    Args:
        keys: (n, d).
        standout: positions of S, int64, each once.
        advance: told how many rows were just read, for a progress bar.

    Raises:
        ValueError: keys that are empty, batched or not finite; positions that are no integers, repeated or out of
            range; a stand-out key that is zero.

    Example:
        >>> found = check(torch.tensor([[1.0, 0.1, 0.0], [0.1, 1.0, 0.0], [0.0, 0.0, 2.0]]), torch.tensor([0, 1]))
        >>> round(found.delta1, 3), found.delta2, found.holds, found.max_relevant
        (0.198, 0.0, True, 1)
    """
    flat = require_matrix(keys)
    require_finite(flat)
    positions = require_positions(standout, flat)
    chosen = flat[positions].double()
    squares = chosen.square().sum(-1)
    if not squares.all():
        raise ValueError(f"standout: key {int(positions[squares == 0][0])} is zero, so no query can point at it")
    inside = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    inside[positions] = True
    delta1 = delta2 = 0.0
    step = max(64, CPU_TILE // min(len(positions), COLUMNS))
    for start in range(0, len(flat), step):
        span = slice(start, start + step)
        block = flat[span].double()
        rows = torch.arange(start, start + len(block), device=flat.device)
        for first in range(0, len(positions), COLUMNS):
            some = slice(first, first + COLUMNS)
            ratios = correlations(block, chosen[some], squares[some])
            ratios.masked_fill_(rows.unsqueeze(-1) == positions[some], 0.0)
            highest = ratios.amax(-1)
            delta1 = max(delta1, float(torch.where(inside[span], highest, 0.0).max()))
            delta2 = max(delta2, float(torch.where(inside[span], 0.0, highest).max()))
        if advance is not None:
            advance(len(block))
    return Assumptions(len(flat), len(positions), delta1, delta2)


def correlations(
    rows: Float[Tensor, "m d"], chosen: Float[Tensor, "c d"], squares: Float[Tensor, " c"]
) -> Float[Tensor, "m c"]:
    """|⟨kⱼ, kₗ⟩| / min(‖kⱼ‖², ‖kₗ‖²); 0 where the product is 0."""
    products = (rows @ chosen.mT).abs_()
    smaller = torch.minimum(rows.square().sum(-1, keepdim=True), squares)
    return torch.where(products > 0, products / smaller, 0.0)


def require_matrix(keys: Any) -> Tensor:
    """The keys, once they are known to be one matrix (n, d)."""
    require_keys(keys)
    if keys.ndim != 2:
        raise ValueError(f"keys: the planted model is of one matrix (n, d), got shape {tuple(keys.shape)}")
    return keys


def require_positions(standout: Any, keys: Tensor, name: str = "standout") -> Int64[Tensor, " s"]:
    """Positions in the keys, int64, at least one, each once."""
    positions = torch.as_tensor(standout, device=keys.device)
    if positions.ndim != 1 or positions.is_floating_point() or positions.dtype == torch.bool or not len(positions):
        raise ValueError(
            f"{name}: expected a list of integer positions, got {positions.dtype} of shape {tuple(positions.shape)}"
        )
    positions = positions.long()
    if int(positions.min()) < 0 or int(positions.max()) >= len(keys):
        raise ValueError(f"{name}: expected positions in [0, {len(keys)}), got {positions.tolist()[:8]}")
    if len(positions.unique()) < len(positions):
        raise ValueError(f"{name}: expected each position once, got {positions.tolist()[:8]}")
    return positions
