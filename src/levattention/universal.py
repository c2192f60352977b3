"""Scores -> the universal set: the one place where a score is compared with ε and where keys are ranked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from levattention._shapes import Bool, Float64, Int64
from levattention.checks import require_count, require_eps, require_finite, require_keys, require_one_of_eps_and_k
from levattention.csr import csr_pick, is_csr
from levattention.features import KeyMap, map_keys
from levattention.gram import Advance
from levattention.losses import Huber, Loss, Power, Softmax, Tukey
from levattention.scorers import Leverage, PowerBound, Robust, Scorer, SoftmaxBall

# A score this much under ε, relatively, still counts as reaching it, so that rounding loses no key that ties with ε.
SLACK = 1e-9


@dataclass(frozen=True)
class UniversalSet:
    """The keys that can matter, best first, in a buffer of static shape.

    Attributes:
        index: positions of the keys, int64; 0 in slots that are not valid.
        valid: which slots hold a key.
        scores: fp64; 0 in slots that are not valid.
        eps: the weight that no key outside can reach, for any query. NaN where the scorer certifies nothing;
            0 where every key was taken.
        rank: numerical rank of the keys, where the scorer found it.
        condition: condition number of the keys, likewise.
        route: how the scores were found, likewise.
    """

    index: Int64[Tensor, "*batch c"]
    valid: Bool[Tensor, "*batch c"]
    scores: Float64[Tensor, "*batch c"]
    eps: Float64[Tensor, "*batch"]
    rank: Tensor | None = None
    condition: Tensor | None = None
    route: str | None = None

    @property
    def size(self) -> Int64[Tensor, "*batch"]:
        """|U| of each batch element."""
        return self.valid.sum(-1)

    def mask(self, n: int) -> Bool[Tensor, "*batch n"]:
        """Which of n keys are in the set."""
        # Invalid slots all point at key 0, so they must be added, not written.
        hits = torch.zeros((*self.index.shape[:-1], n), dtype=torch.int32, device=self.index.device)
        return hits.scatter_add_(-1, self.index, self.valid.int()) > 0

    def rows(self, keys: Tensor) -> Tensor:
        """The keys of the set, (*batch, c, d); zero rows in slots that are not valid."""
        if is_csr(keys):
            return csr_pick(keys, self.index) * self.valid.unsqueeze(-1).to(keys.dtype)
        picked = keys.gather(-2, self.index.unsqueeze(-1).expand(*self.index.shape, keys.shape[-1]))
        return picked * self.valid.unsqueeze(-1).to(keys.dtype)


def reaches(scores: Tensor, eps: float | Tensor) -> Tensor:
    """The comparison rule: τ ≥ ε(1 − 1e-9)."""
    return scores >= eps * (1 - SLACK)


def capacity(total: float, eps: float, n: int) -> int:
    """How many keys can reach ε when the scores sum to at most `total`; ties at ε fit."""
    return max(1, min(n, math.floor(total / (eps * (1 - SLACK)) + 1e-6)))


def best_first(scores: Float64[Tensor, "*batch n"], count: int) -> Int64[Tensor, "*batch count"]:
    """Positions of the `count` largest scores in falling order; equal scores in order of position.

    topk leaves the order of ties open, so the cut is made here: all keys above the last value, then as many of
    those equal to it as fit, the first ones first. No branch depends on data.
    """
    n = scores.shape[-1]
    last = scores.topk(count, dim=-1).values[..., -1:]
    above, equal = scores > last, scores == last
    room = count - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))
    slot = torch.where(taken, taken.cumsum(-1, dtype=torch.int32) - 1, count).long()
    index = slot.new_zeros((*scores.shape[:-1], count + 1))
    index.scatter_(-1, slot, torch.arange(n, device=scores.device).expand_as(slot))
    index = index[..., :count]
    order = scores.gather(-1, index).argsort(dim=-1, descending=True, stable=True)
    return index.gather(-1, order)


def select_top(scores: Float64[Tensor, "*batch n"], k: int, *, certified: bool = True, **found: Any) -> UniversalSet:
    """The k best keys; the certified ε is the largest score left out."""
    n = scores.shape[-1]
    index = best_first(scores, min(n, k + 1))
    ranked = scores.gather(-1, index)
    eps = ranked[..., k] if k < n else torch.zeros_like(ranked[..., 0])
    if not certified:
        eps = torch.full_like(eps, math.nan)
    index, ranked = index[..., :k], ranked[..., :k]
    return UniversalSet(index, torch.ones_like(index, dtype=torch.bool), ranked, eps, **found)


def select_above(scores: Float64[Tensor, "*batch n"], eps: float, cap: int, **found: Any) -> UniversalSet:
    """Every key whose score reaches ε. `cap` is the expected size of the buffer; it grows rather than truncate."""
    passing = int(reaches(scores, eps).sum(-1).max())
    return fill_above(scores, eps, max(cap, passing), **found)


def fill_above(scores: Float64[Tensor, "*batch n"], eps: float, cap: int, **found: Any) -> UniversalSet:
    """Every key whose score reaches ε, in a buffer of exactly `cap` slots: no branch depends on data."""
    index = best_first(scores, cap)
    ranked = scores.gather(-1, index)
    valid = reaches(ranked, eps)
    threshold = torch.full(scores.shape[:-1], eps, dtype=torch.float64, device=scores.device)
    return UniversalSet(index * valid, valid, ranked * valid, threshold, **found)


def select_positions(scores: Float64[Tensor, "*batch m"], positions: Tensor, eps: float, cap: int) -> UniversalSet:
    """The set of those positions (*batch, m) whose score reaches ε; `cap` as in `select_above`."""
    if scores.shape[-1] == 0:
        scores, positions = (values.new_zeros((*values.shape[:-1], 1)) for values in (scores, positions))
    slots = select_above(scores, eps, min(scores.shape[-1], cap))
    return replace(slots, index=positions.gather(-1, slots.index) * slots.valid)


def universal_set(
    keys: Tensor,
    *,
    eps: float | None = None,
    k: int | None = None,
    loss: Loss = Power(2),  # noqa: B008 (frozen)
    scorer: Scorer | None = None,
    key_map: KeyMap | None = None,
    advance: Advance | None = None,
) -> UniversalSet:
    """The universal set U: every key that can receive attention weight ≥ ε from some query.

    With eps, U = {i : score ≥ ε} and |U| ≤ Ψ/ε (Theorem thm:main-intro of the paper). With k, the k best keys,
    and `eps` of the result is the largest score left out: no query gives any key outside more than that.

    Args:
        keys: (*batch, n, d); heads are batch.
        eps: threshold in (0, 1]. Exactly one of eps and k.
        k: how many keys, 1 ≤ k ≤ n.
        loss: f.
        scorer: what scores the keys; by default the exact or certified one for the loss.
        key_map: φ of the generalised attention problem; the set is that of φ(K), so that under x² |U| ≤ D/ε, where D is
            the width of φ(K) (Theorem thm:main).
        advance: told how many rows were just read, for a progress bar (leverage reads the keys two or three times).

    Raises:
        ValueError: keys that are empty, not floating or not finite; eps outside (0, 1]; k outside [1, n]; both or
            neither of eps and k; eps with a scorer that certifies nothing; a key_map that returns another number of
            rows, or no floats.

    Example:
        >>> keys = torch.cat([torch.randn(1000, 4) * 0.01, torch.eye(4)])
        >>> u = universal_set(keys, eps=0.5)
        >>> sorted(u.index[u.valid].tolist())
        [1000, 1001, 1002, 1003]
    """
    require_keys(keys)
    require_one_of_eps_and_k(eps, k)
    keys = map_keys(key_map, keys)
    n, d = keys.shape[-2:]
    if scorer is None:
        scorer = default_scorer(loss)
    if k is not None:
        require_count(k, n)
    else:
        eps = require_eps(eps)
        if not scorer.certified:
            raise ValueError(f"eps: {type(scorer).__name__} scores certify no threshold; give k instead")
    if isinstance(scorer, Leverage):
        report = scorer.report(keys, advance)
        scores, found = report.scores, {"rank": report.rank, "condition": report.condition, "route": report.route}
    else:
        if not scorer.certified:
            require_finite(keys)
        scores, found = scores_for(scorer, keys, eps), {}
    if k is not None:
        return select_top(scores, k, certified=scorer.certified, **found)
    assert eps is not None  # settled above
    return select_above(scores, eps, capacity(scorer.bound(d, n), eps, n), **found)  # type: ignore[attr-defined]


def scores_for(scorer: Scorer, keys: Tensor, eps: float | None) -> Float64[Tensor, "*batch n"]:
    """The scores, or where only ε is to be settled and the scorer can do that alone, what settles it.

    `scorer.bound` is about the latter: only these are sure to fit the buffer it sizes.
    """
    decide = getattr(scorer, "decide", None) if eps is not None else None
    return scorer(keys) if decide is None else decide(keys, eps)


def default_scorer(loss: Loss) -> Scorer:
    """The scorer that certifies a threshold for this loss."""
    if loss == Power(2):
        return Leverage()
    if isinstance(loss, Power):
        return PowerBound(loss.p)
    if isinstance(loss, Huber | Tukey):
        return Robust(loss)
    if isinstance(loss, Softmax):
        return SoftmaxBall(loss.radius, loss.scale)
    raise ValueError(f"loss: expected Power, Huber, Tukey or Softmax, got {loss!r}; give a scorer with other losses")
