"""The universal set of a growing prefix, which is what makes causal attention linear in the length."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from levattention import kernels
from levattention.gram import Gram
from levattention.scorers import Leverage, Norm, Random
from levattention.select import Choice, score_total, scored
from levattention.slots import gather_rows
from levattention.universal import UniversalSet


@dataclass
class RunningSet:
    """The set of a prefix that grows chunk by chunk: S ← choice(S ∪ chunk), linear in the length.

    Leverage is taken against the Gram of the whole prefix. Adding rows never raises a score, so with eps the set is
    exactly that of the prefix, and with top_k no key left out scores more than the largest score ever dropped.
    Scores that do not depend on other keys (norm, random) are computed once. Any other scorer sees the rows of
    S ∪ chunk alone: a sensitivity within a sub-collection bounds the one within the prefix from above.

    Attributes:
        keys: (*batch, n, d), zero outside the mask.
        mask: (*batch, n).
        choice: how keys are chosen.
        chosen: the set of the keys read so far; None before the first.
    """

    keys: Tensor
    mask: Tensor
    choice: Choice
    chosen: UniversalSet | None = None
    _gram: Gram | None = field(default=None, repr=False)
    _fixed: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        scorer = self.choice.scorer
        if isinstance(scorer, Leverage):
            self._gram = Gram(self.keys.shape[-1], batch=tuple(self.keys.shape[:-2]), device=self.keys.device)
        elif isinstance(scorer, Norm | Random):
            with torch.no_grad():
                self._fixed = scorer(self.keys)

    def read(self, start: int, stop: int) -> UniversalSet:
        """The set once the keys [start, stop), which follow those read before, are in."""
        fresh = torch.arange(start, stop, device=self.keys.device).expand(*self.mask.shape[:-1], stop - start)
        index, usable = fresh, self.mask[..., start:stop]
        if self.chosen is not None:
            old, held = self._by_position(self.chosen)
            index, usable = torch.cat([old, fresh], -1), torch.cat([held, usable], -1)
        with torch.no_grad():
            scores, bound = self._scores(index, usable, start, stop)
        kept = self.choice.keep(scores, usable, bound)
        eps = kept.eps if self.chosen is None else torch.maximum(kept.eps, self.chosen.eps)
        self.chosen = UniversalSet(index.gather(-1, kept.index) * kept.valid, kept.valid, kept.scores, eps)
        return self.chosen

    def _by_position(self, chosen: UniversalSet) -> tuple[Tensor, Tensor]:
        """The set in the order of positions, empty slots last, so that equal scores go to the earlier key."""
        n = self.keys.shape[-2]
        index = torch.where(chosen.valid, chosen.index, n).sort(-1).values
        return index.clamp(max=n - 1), index < n

    def _scores(self, index: Tensor, usable: Tensor, start: int, stop: int) -> tuple[Tensor, float]:
        """Scores of the candidates, and a bound on their sum."""
        scorer, d = self.choice.scorer, self.keys.shape[-1]
        if self._fixed is not None:
            return self._fixed.gather(-1, index), float(stop)
        rows = gather_rows(self.keys, index) * usable.unsqueeze(-1).to(self.keys.dtype)
        if self._gram is not None and isinstance(scorer, Leverage):
            self._gram.update(self.keys[..., start:stop, :])
            return self._gram.leverage(rows, scorer.rtol), score_total(scorer, d, stop)
        return scored(scorer, rows, None), score_total(scorer, d, rows.shape[-2])


def sets_at_once(
    keys: Tensor, mask: Tensor | None, choice: Choice | None, fixed: UniversalSet | None, chunk: int, first: int
) -> tuple[Tensor, Tensor] | None:
    """What `RunningSet` would choose before each chunk of the keys from `first` on, by the kernels.

    Index and valid, (*batch, chunks, c), or (*batch, 1, c) for a fixed set; None where the kernels cannot choose.
    """
    if fixed is not None:
        return fixed.index.unsqueeze(-2), fixed.valid.unsqueeze(-2)
    assert choice is not None  # the one or the other
    if choice.top_k is None or choice.top_k > kernels.MAX_SET or not choice.by_kernels(keys):
        return None
    index, valid = kernels.running_top_k(keys, choice.top_k, chunk=chunk, first=first, mask=mask)
    return index, valid


def stack_sets(sets: list[UniversalSet | None], keys: Tensor) -> UniversalSet:
    """The sets of successive chunks as one, (*batch, chunks, c); a chunk that has none gets empty slots and ε = 0."""
    width = max(0 if kept is None else kept.index.shape[-1] for kept in sets)
    batch = keys.shape[:-2]
    none = torch.zeros((*batch, 0), dtype=torch.int64, device=keys.device)
    empty = UniversalSet(none, none.bool(), none.double(), none.new_zeros(batch, dtype=torch.float64))
    held = [kept or empty for kept in sets]

    def padded(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, width - rows.shape[-1]))

    return UniversalSet(
        torch.stack([padded(kept.index) for kept in held], -2),
        torch.stack([padded(kept.valid) for kept in held], -2),
        torch.stack([padded(kept.scores) for kept in held], -2),
        torch.stack([kept.eps for kept in held], -1),
    )
