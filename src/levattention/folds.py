"""What is added up over rows, wherever they are: the common part of many passes, many machines and task graphs.

An accumulator takes rows in, merges with one that saw the rows that follow, and travels as tensors. A fold makes one
wherever rows are, shows it the rows there, merges all of them in order, and gives the result back. Whoever can fold
can find U; how the rows are read and what lies between them is the fold's business alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.checks import require_finite_block, require_keys
from levattention.losses import Loss, from_config, to_config
from levattention.online_weights import sieve_for
from levattention.sieves import Sieve
from levattention.universal import UniversalSet, capacity, reaches, select_positions

State = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors, and what fits JSON."""


@runtime_checkable
class Accumulator(Protocol):
    """Adds up rows (m, d)."""

    def update(self, rows: Tensor) -> None:
        """Take in the rows that follow."""

    def merge(self, other: Any) -> None:
        """Take in what another saw, whose rows follow this one's."""

    def state(self) -> State:
        """All that must travel."""
        ...

    def restore(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        """Take up a state that arrived."""


A = TypeVar("A", bound=Accumulator)


@runtime_checkable
class Fold(Protocol):
    """Brings an accumulator to the rows; gives back the one that saw them all, the same wherever it is asked for."""

    def __call__(self, make: Callable[[], A]) -> A:
        """The merged accumulator."""
        ...


@runtime_checkable
class Judge(Protocol):
    """Scores rows, once it is known what they are scored against."""

    count: int
    total: float
    rank: Tensor
    route: str

    def __call__(self, rows: Tensor) -> Float64[Tensor, " m"]:
        """Scores of rows (m, d)."""
        ...


class Total:
    """A stream's sieve and the number of rows: after one fold, x² and its lift are judged by it."""

    def __init__(self, loss: Loss, eps: float) -> None:
        self.loss, self.eps, self.count = loss, eps, 0
        self.sieve: Sieve | None = None

    def update(self, rows: Tensor) -> None:
        """Check the rows and add them to the sieve.

        Raises:
            ValueError: bad rows, named by their position.
        """
        if rows.ndim == 2 and len(rows) == 0:
            return
        require_keys(rows, "block")
        if rows.ndim != 2:
            raise ValueError(f"block: expected shape (m, d), got {tuple(rows.shape)}")
        require_finite_block(rows, self.count)
        if self.sieve is None:
            self._start(rows.shape[-1], rows.device)
        assert self.sieve is not None
        if rows.shape[-1] != self.d:
            raise ValueError(f"block: expected {self.d} columns, got {rows.shape[-1]} at position {self.count}")
        self.sieve.update(rows.unsqueeze(0))
        self.count += len(rows)

    def merge(self, other: Total) -> None:
        """Add the other's sieve."""
        if other.sieve is None:
            return
        if self.sieve is None:
            self._start(other.d, other.device)
        assert self.sieve is not None
        if other.d != self.d:
            raise ValueError(f"keys: expected {self.d} columns everywhere, got {other.d}")
        self.sieve.merge(other.sieve)
        self.count += other.count

    def state(self) -> State:
        """The sieve's state."""
        config = {"loss": to_config(self.loss), "eps": self.eps, "count": self.count}
        if self.sieve is None:
            return {}, config
        return self.sieve.state(), config | {"d": self.d}

    def restore(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        """Take up a sieve's state."""
        self.loss, self.eps, self.count = from_config(config["loss"]), config["eps"], config["count"]
        if "d" in config:
            self._start(config["d"], next(iter(tensors.values())).device)
            assert self.sieve is not None
            self.sieve.restore(tensors)

    def _start(self, d: int, device: torch.device) -> None:
        self.d, self.device = d, device
        self.sieve = sieve_for(self.loss, d, 1, device, self.eps)


class SieveJudge:
    """Scores by the sieve that has seen all rows."""

    def __init__(self, total: Total) -> None:
        assert total.sieve is not None  # made only after rows have come
        self.sieve, self.eps, self.count = total.sieve, total.eps, total.count
        self.total, self.rank, self.route = self.sieve.total(self.count), self.sieve.rank().squeeze(0), self.sieve.route

    def __call__(self, rows: Tensor) -> Float64[Tensor, " m"]:
        """Scores of the rows."""
        return self.sieve.scores(rows.unsqueeze(0), self.eps).squeeze(0)


class Hits:
    """The rows whose score reaches ε, with their positions and scores."""

    def __init__(self, judge: Judge, eps: float, *, keep_rows: bool = True) -> None:
        self.judge, self.eps, self.keep_rows, self.count = judge, eps, keep_rows, 0
        self.positions: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.rows: list[Tensor] = []

    def update(self, rows: Tensor) -> None:
        """Score the rows and keep those that reach ε."""
        if rows.ndim == 2 and len(rows) == 0:
            return
        scores = self.judge(rows)
        hit = reaches(scores, self.eps).nonzero().squeeze(-1)
        self.positions.append(hit + self.count)
        self.scores.append(scores[hit])
        if self.keep_rows:
            self.rows.append(rows[hit])
        self.count += len(rows)

    def merge(self, other: Hits) -> None:
        """Append the other's."""
        self.positions += [positions + self.count for positions in other.positions]
        self.scores += other.scores
        self.rows += other.rows
        self.count += other.count

    def state(self) -> State:
        """Positions, scores and rows."""
        if not self.scores:
            return {}, {"count": self.count}
        tensors = {"positions": torch.cat(self.positions), "scores": torch.cat(self.scores)}
        return tensors | ({"rows": torch.cat(self.rows)} if self.rows else {}), {"count": self.count}

    def restore(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        """Take up positions, scores and rows."""
        self.count = config["count"]
        for name in ("positions", "scores", "rows"):
            setattr(self, name, [tensors[name]] if name in tensors else [])

    def select(self) -> UniversalSet:
        """The universal set.

        Raises:
            ValueError: other rows than the judge has seen.
        """
        if self.count != self.judge.count:
            raise ValueError(
                f"blocks: expected the same rows in every pass, got {self.judge.count} and then {self.count}"
            )
        cap = capacity(self.judge.total, self.eps, self.count)
        return select_positions(torch.cat(self.scores), torch.cat(self.positions), self.eps, cap)

    def kept(self, found: UniversalSet) -> Tensor:
        """The rows of the set, in its order; zero rows in slots that are not valid."""
        rows, positions = torch.cat(self.rows), torch.cat(self.positions)
        slots = rows.new_zeros((*found.index.shape, rows.shape[-1]))
        slots[found.valid] = rows[torch.searchsorted(positions, found.index[found.valid])]
        return slots
