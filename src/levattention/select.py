"""Which keys a head attends to, chosen without gradients, without a data-dependent branch and under a padding mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from levattention import kernels
from levattention.gram import Gram
from levattention.scorers import Leverage, Lewis, Random, Scorer
from levattention.universal import UniversalSet, capacity, fill_above, scores_for, select_top


# No __eq__, and so no __hash__ of the fields: torch 2.11's compiler hashes what it calls before it has any fields.
@dataclass(frozen=True, eq=False)
class Choice:
    """How keys are chosen: by which scores, and how many.

    Attributes:
        scorer: keys (*batch, n, d) -> scores (*batch, n).
        top_k: how many keys; None with eps.
        eps: the score that a key must reach; None with top_k.
    """

    scorer: Scorer
    top_k: int | None
    eps: float | None

    def keep(self, scores: Tensor, mask: Tensor, bound: float) -> UniversalSet:
        """The chosen among scored keys; those that are not in the mask are never chosen.

        Args:
            scores: (*batch, n).
            mask: (*batch, n).
            bound: what the scores sum to at most, which sizes the buffer for eps.
        """
        n = scores.shape[-1]
        if self.eps is not None:
            return fill_above(torch.where(mask, scores.double(), -1.0), self.eps, capacity(bound, self.eps, n))
        assert self.top_k is not None  # exactly one of the two
        # Scores that certify nothing may be negative.
        scores = torch.where(mask, scores.double(), -torch.inf)
        best = select_top(scores, min(self.top_k, n), certified=self.scorer.certified)
        valid = mask.gather(-1, best.index)
        return UniversalSet(best.index * valid, valid, torch.where(valid, best.scores, 0.0), best.eps.clamp(min=0.0))

    def __call__(self, keys: Tensor, mask: Tensor, *, certify: bool = True) -> UniversalSet:
        """The keys that all queries attend to. `keys` must be zero outside the mask.

        With `certify` the scores and ε hold in fp64 even where fp32 kernels made the ranking; without it the scores
        are the ranking's own, and ε is NaN there.
        """
        n, d = keys.shape[-2:]
        with torch.no_grad():
            if self.by_kernels(keys):
                return self._ranked(keys, mask, certify)
            if isinstance(self.scorer, Leverage):
                scores = Gram.of(keys).leverage(keys, self.scorer.rtol)
            else:
                scores = scored(self.scorer, keys, self.eps)
            return self.keep(scores, mask, score_total(self.scorer, d, n))

    def by_kernels(self, keys: Tensor) -> bool:
        """Whether the kernels rank these keys."""
        by_leverage = isinstance(self.scorer, Leverage) and self.scorer.rtol is None
        return by_leverage and self.top_k is not None and kernels.preferred(keys)

    def _ranked(self, keys: Tensor, mask: Tensor, certify: bool) -> UniversalSet:
        """The best by the kernels' ranking. What is certified is about this set, however rounding ordered the keys."""
        assert self.top_k is not None  # eps takes the certified route
        index, scores = kernels.ranked(keys, min(self.top_k, keys.shape[-2]), mask)
        scores = scores.double()
        eps = scores.new_full(mask.shape[:-1], torch.nan)
        if certify:
            scores = torch.where(mask, Gram.of(keys).leverage(keys), -1.0)
            index = index.gather(-1, scores.gather(-1, index).argsort(dim=-1, descending=True, stable=True))
            eps = scores.scatter(-1, index, 0.0).amax(-1).clamp(min=0.0)
        chosen = scores.gather(-1, index)
        valid = chosen >= 0
        return UniversalSet(index * valid, valid, torch.where(valid, chosen, 0.0), eps)


@torch.library.custom_op("levattention::lewis", mutates_args=(), schema="(Tensor keys, float p, float tol) -> Tensor")
def _lewis(keys: Tensor, p: float, tol: float) -> Tensor:
    return Lewis(p, tol)(keys)


@torch.library.custom_op("levattention::random", mutates_args=(), schema="(Tensor keys, int seed) -> Tensor")
def _random(keys: Tensor, seed: int) -> Tensor:
    return Random(seed)(keys).contiguous()


@_lewis.register_fake
def _(keys: Tensor, p: float, tol: float) -> Tensor:
    return keys.new_empty(keys.shape[:-1], dtype=torch.float64)


@_random.register_fake
def _(keys: Tensor, seed: int) -> Tensor:
    return keys.new_empty(keys.shape[:-1], dtype=torch.float64)


def scored(scorer: Scorer, keys: Tensor, eps: float | None) -> Tensor:
    """The scores of `scores_for`, as one operator where torch.compile could not look inside."""
    if torch.compiler.is_compiling():
        # How often Lewis weights are iterated depends on the keys.
        if isinstance(scorer, Lewis):
            return _lewis(keys, scorer.p, scorer.tol)
        # Compiled for CUDA, the 64-bit constants of the hash meet positions that were narrowed to 32 bits.
        if isinstance(scorer, Random):
            return _random(keys, scorer.seed)
    return scores_for(scorer, keys, eps)


def score_total(scorer: Scorer, d: int, n: int) -> float:
    """What a certified scorer's scores sum to at most; n for the others, which take no eps."""
    return scorer.bound(d, n) if scorer.certified else float(n)  # type: ignore[attr-defined]


def everything(mask: Tensor) -> UniversalSet:
    """Every visible key: what full attention sees."""
    index = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
    scores = mask.double()
    return UniversalSet(index * mask, mask, scores, torch.zeros_like(scores[..., 0]))


def nothing(mask: Tensor, count: int) -> UniversalSet:
    """A set of `count` empty slots, for a residual that keeps no key as it is."""
    valid = mask.new_zeros((*mask.shape[:-1], count))
    return UniversalSet(valid.long(), valid, valid.double(), valid.new_zeros(mask.shape[:-1], dtype=torch.float64))
