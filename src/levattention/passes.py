"""Two passes over keys that can be read again; a few more for weights that must be solved for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from levattention.checks import require_eps
from levattention.fold_weights import weights_for
from levattention.folds import A, Fold, Hits, Judge, SieveJudge, Total
from levattention.losses import Loss, Power
from levattention.universal import UniversalSet

Blocks = Callable[[], Iterable[Tensor]]
"""Yields the blocks (m, d) of the keys in order, each time it is called."""


def two_pass(
    blocks: Blocks,
    *,
    eps: float,
    loss: Loss = Power(2),  # noqa: B008 (frozen)
) -> UniversalSet:
    """The universal set of keys that can be read more than once, in O(d²) memory besides U itself.

    For x² two passes: the first sums the Gram (and carries R where it is ill-conditioned), the second scores blocks.
    Even p does the same on the lift. Other p, Huber and Tukey solve for their weights by repeated passes, each of which
    keeps one weighted d × d Gram.

    Args:
        blocks: a callable that yields the blocks (m, d) in order; it is called once for each pass.
        eps: threshold in (0, 1].
        loss: f.

    Raises:
        ValueError: no blocks, bad rows (named by position), or passes that differ.

    Example:
        >>> import torch
        >>> keys = torch.cat([torch.randn(5000, 3) * 0.01, torch.eye(3)])
        >>> u = two_pass(lambda: keys.split(700), eps=0.5)
        >>> sorted(u.index[u.valid].tolist())
        [5000, 5001, 5002]
    """
    eps = require_eps(eps)

    def fold(make: Callable[[], A]) -> A:
        seen = make()
        for block in blocks():
            seen.update(block)
        return seen

    return found_by(fold, judged_by(fold, loss, eps), eps)[0]


def judged_by(fold: Fold, loss: Loss, eps: float, *, online: bool = False) -> Judge:
    """What scores the rows that the fold reaches, after as many folds as the loss needs.

    With `online` one fold for every loss: weights are fixed as a stream fixes them, and depend on how rows are cut.

    Raises:
        ValueError: no rows, or bad ones.
    """
    summed = online or (isinstance(loss, Power) and loss.even)
    base = fold(lambda: Total(loss if summed else Power(2), eps))
    if base.count == 0:
        raise ValueError("blocks: expected at least one block, got none")
    if summed:
        return SieveJudge(base)
    weights = weights_for(loss, base, eps)
    weights.solve(fold)
    return weights


def found_by(fold: Fold, judge: Judge, eps: float, *, keep_rows: bool = False) -> tuple[UniversalSet, Hits]:
    """The set of the rows that the judge finds to reach ε, and what the last fold gathered."""
    hits = fold(lambda: Hits(judge, eps, keep_rows=keep_rows))
    return replace(hits.select(), rank=judge.rank, route=judge.route), hits
