"""The literature's randomised bound for robust losses, kept as a reference to compare `Robust` with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from levattention._shapes import Bool, Float64
from levattention.gram import heads_first
from levattention.losses import Huber, Tukey
from levattention.scorers.leverage import Leverage
from levattention.scorers.robust import whitened


@dataclass(frozen=True)
class HashedReference:
    """Reference: sensitivity bounds by hashing (Musco, Musco, Woodruff and Yasuda), looser than `Robust`.

    For α = 1, 2, 4, … up to n, rows are hashed into 4α buckets and scored by their leverage within the bucket. If
    σᵢ ≥ 1/α, the other rows of i's bucket weigh less than row i, at the query that shows σᵢ, with probability at
    least 3/4 (Markov); f(x)/x² falls, so the same holds for the squares and the leverage of i is at least ½. A row
    that is never flagged at α has σᵢ < 1/α; with ⌈log₄(n·levels/failure)⌉ repetitions this fails for some row or
    level with probability at most `failure`. Nothing but that argument certifies the scores.

    Attributes:
        loss: `Huber` or `Tukey`. The algorithm is the same for both, and for any such f.
        seed: of the hashing.
        failure: probability that some score is below its sensitivity.

    Example:
        >>> HashedReference(Huber(), seed=0)(torch.eye(3, dtype=torch.float64)).tolist()
        [1.0, 1.0, 1.0]
    """

    loss: Huber | Tukey
    seed: int
    failure: float = 1e-3

    certified: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.failure < 1:
            raise ValueError(f"failure: expected a probability in (0, 1), got {self.failure!r}")

    def __call__(self, keys: Tensor) -> Float64[Tensor, "*batch n"]:
        """Scores 1/α, (*batch, n, d) -> (*batch, n)."""
        white = whitened(keys)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.stack([self._head(rows, generator) for rows in heads_first(white)]).reshape(keys.shape[:-1])

    def _head(self, white: Float64[Tensor, "n d"], generator: torch.Generator) -> Float64[Tensor, " n"]:
        n = len(white)
        levels = [2**power for power in range(math.ceil(math.log2(n)) + 1)]
        repeats = max(1, math.ceil(math.log(n * len(levels) / self.failure, 4)))
        scores = (white != 0).any(-1).double()
        for alpha in levels:
            flagged = torch.zeros(n, dtype=torch.bool, device=white.device)
            for _ in range(repeats):
                bucket = torch.randint(4 * alpha, (n,), generator=generator).to(white.device)
                flagged |= heavy_in_bucket(white, bucket)
            scores = torch.where(flagged, scores, scores.clamp(max=1 / alpha))
        return scores


def heavy_in_bucket(rows: Float64[Tensor, "n d"], bucket: Tensor) -> Bool[Tensor, " n"]:
    """Which rows have leverage at least ½ among the rows of their bucket."""
    order = bucket.argsort(stable=True)
    _, group, counts = bucket[order].unique_consecutive(return_inverse=True, return_counts=True)
    slot = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[group]
    padded = rows.new_zeros(len(counts), int(counts.max()), rows.shape[-1])
    padded[group, slot] = rows[order]
    # Buckets are short, so most are rank-deficient; the batched reference route takes them all at once.
    heavy = Leverage(rtol="exact", route="svd")(padded)[group, slot] >= 0.5 - 1e-9
    return torch.zeros_like(heavy).scatter(0, order, heavy)
