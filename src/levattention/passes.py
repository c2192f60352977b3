"""Two passes over keys that can be read again; a few more for weights that must be solved for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.checks import require_eps, require_finite, require_keys
from levattention.gram import Gram
from levattention.losses import Huber, Loss, Power
from levattention.online_weights import sieve_for
from levattention.scorers.robust import relative_loss
from levattention.summary import Summary
from levattention.universal import UniversalSet, capacity, reaches, select_positions

Blocks = Callable[[], Iterable[Tensor]]
"""Yields the blocks (m, d) of the keys in order, each time it is called."""

# How near the fixed point, in the log, and how many passes at most; the bound holds wherever they end.
TOL = 1e-3
PASSES = 30


def two_pass(
    blocks: Blocks,
    *,
    eps: float,
    loss: Loss = Power(2),  # noqa: B008 (frozen)
) -> UniversalSet:
    """The universal set of keys that can be read more than once, in O(d²) memory besides U itself.

    For x² two passes: the first sums the Gram (and carries R where it is ill-conditioned), the second scores blocks.
    Even p does the same on the lift. Other p and Huber solve for their weights by repeated passes, each of which keeps
    one weighted d × d Gram; Tukey takes its weights in one pass as a stream does.

    Args:
        blocks: a callable that yields the blocks (m, d) in order; it is called once for each pass.
        eps: threshold in (0, 1].
        loss: f.

    Raises:
        ValueError: no blocks, bad rows (named by position), or passes that differ.

    Example:
        >>> keys = torch.cat([torch.randn(5000, 3) * 0.01, torch.eye(3)])
        >>> u = two_pass(lambda: keys.split(700), eps=0.5)
        >>> sorted(u.index[u.valid].tolist())
        [5000, 5001, 5002]
    """
    eps = require_eps(eps)
    judge: _Judge
    if isinstance(loss, Huber) or (isinstance(loss, Power) and not loss.even):
        judge = _Weighted(blocks, loss, eps)
    else:
        judge = _Summed(blocks, loss, eps)
    positions, scores, first = [], [], 0
    for block in blocks():
        found = judge(block)
        hit = reaches(found, eps).nonzero().squeeze(-1)
        positions.append(hit + first)
        scores.append(found[hit])
        first += len(block)
    if first != judge.count:
        raise ValueError(f"blocks: expected the same rows in every pass, got {judge.count} and then {first}")
    cap = capacity(judge.total, eps, first)
    return replace(
        select_positions(torch.cat(scores), torch.cat(positions), eps, cap), rank=judge.rank, route=judge.route
    )


@runtime_checkable
class _Judge(Protocol):
    """Scores a block of rows, once the earlier passes are done."""

    count: int
    total: float
    rank: Tensor
    route: str

    def __call__(self, block: Tensor) -> Float64[Tensor, " m"]:
        """Scores of the rows."""
        ...


class _Summed:
    """One pass into a stream's sieve."""

    def __init__(self, blocks: Blocks, loss: Loss, eps: float) -> None:
        self.eps, self.count, sieve = eps, 0, None
        for block in checked(blocks):
            if sieve is None:
                sieve = sieve_for(loss, block.shape[-1], 1, block.device, eps)
            sieve.update(block.unsqueeze(0))
            self.count += len(block)
        assert sieve is not None  # checked() yields at least one block
        self.sieve, self.total = sieve, sieve.total(self.count)
        self.rank, self.route = sieve.rank().squeeze(0), sieve.route

    def __call__(self, block: Tensor) -> Float64[Tensor, " m"]:
        """Scores of the rows."""
        return self.sieve.scores(block.unsqueeze(0), self.eps).squeeze(0)


class _Weighted:
    """Weights by repeated passes. Nothing is kept for a row: its weight is worked out again from the Grams so far."""

    def __init__(self, blocks: Blocks, loss: Power | Huber, eps: float) -> None:
        self.loss, self.eps, self.count, summary = loss, eps, 0, None
        for block in checked(blocks):
            summary = summary or Summary(block.shape[-1], 1, block.device)
            summary.update(block.unsqueeze(0))
            self.count += len(block)
        assert summary is not None  # checked() yields at least one block
        factor = summary.factor()
        frame = factor.whitener[0]
        self.rank, self.route = factor.rank[0], "repeated passes"
        self.frame = frame[:, (frame != 0).any(0)]
        self.history: list[Tensor] = []
        self.total = float(self.count)
        self.weight_sum = self.excess = 0.0
        for _ in range(PASSES):
            if self._pass(blocks) <= TOL:
                break
        self._measure(blocks)

    def __call__(self, block: Tensor) -> Float64[Tensor, " m"]:
        """Certified upper bounds on the sensitivities of the rows."""
        stretch = self._stretch(block, self.history[-1])
        if isinstance(self.loss, Huber):
            stretch = stretch * math.exp(2 * self.excess)
            return torch.maximum(stretch, (stretch * self.eps).sqrt()).clamp(max=1.0)
        p = self.loss.p
        factor = self.weight_sum ** (p / 2 - 1) if p > 2 else math.exp((2 - p) / p * self.excess)
        return (stretch.pow(p / 2) * factor).clamp(max=1.0)

    def _pass(self, blocks: Blocks) -> float:
        """One more weighted Gram; how far, in the log, it moved the weights."""
        gram = Gram(self.frame.shape[-1], device=self.frame.device)
        moved, self.weight_sum = 0.0, 0.0
        for block in blocks():
            rows = block.double() @ self.frame
            x = self._log_weights(block, self.history)
            if self.history:
                before = self._log_weights(block, self.history[:-1])
                moved = max(moved, float(torch.where(x.isfinite(), x - before, 0.0).abs().max()))
            gram.update(rows, torch.where(x.isfinite(), self._multiplier(x), 0.0))
            self.weight_sum += float(x.exp().sum())
        self.history.append(gram.factor("exact").whitener)
        return moved if len(self.history) > 1 else math.inf

    def _measure(self, blocks: Blocks) -> None:
        """By how much the weights of the last Gram miss the one-sided inequality."""
        for block in blocks():
            x, stretch = self._log_weights(block, self.history[:-1]), self._stretch(block, self.history[-1])
            # Huber's weights must not exceed what r² asks for, Lewis weights must not fall short of it.
            over = (x - self._target(stretch)) * (1 if isinstance(self.loss, Huber) else -1)
            self.excess = max(self.excess, float(torch.where(x.isfinite(), over, 0.0).max()))

    def _log_weights(self, block: Tensor, history: list[Tensor]) -> Float64[Tensor, " m"]:
        """log w of each row after as many steps as there are Grams in the history; −inf for rows of zeros."""
        start = (block.double() @ self.frame).square().sum(-1).log()
        if isinstance(self.loss, Huber):
            if not history:
                return torch.where(start.isfinite(), 0.0, -math.inf).double()
            return torch.where(start.isfinite(), self._target(self._stretch(block, history[-1])), -math.inf)
        x, theta = start, 4 / (self.loss.p + 2)
        for whitener in history:
            x = torch.where(x.isfinite(), x + theta * (self._target(self._stretch(block, whitener)) - x), x)
        return x

    def _stretch(self, block: Tensor, whitener: Tensor) -> Float64[Tensor, " m"]:
        """r² against one weighted Gram."""
        return (block.double() @ self.frame @ whitener).square().sum(-1)

    def _target(self, stretch: Tensor) -> Tensor:
        """The log weight that r² asks for."""
        if isinstance(self.loss, Huber):
            unit = Huber(1.0, smooth=self.loss.smooth)
            return relative_loss(unit, unit.linear**2 / self.eps, stretch).log()
        return self.loss.p / 2 * stretch.log()

    def _multiplier(self, x: Tensor) -> Tensor:
        """What multiplies kkᵀ in the Gram."""
        return x.exp() if isinstance(self.loss, Huber) else ((1 - 2 / self.loss.p) * x).exp()


def checked(blocks: Blocks) -> Iterator[Tensor]:
    """The blocks of a first pass, each known to be finite.

    Raises:
        ValueError: no block, or a bad row, named by its position.
    """
    count = 0
    for block in blocks():
        require_keys(block, "block")
        # A sum is cheaper than a test of every entry, and no bad entry leaves it finite.
        if not block.sum(dtype=torch.float64).isfinite():
            require_finite(block, f"block at position {count}")
        yield block
        count += len(block)
    if count == 0:
        raise ValueError("blocks: expected at least one block, got none")
