"""What a stream remembers and judges by, for each loss: a summary that adds, and a bound that only falls."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from levattention._shapes import Bool, Float64
from levattention.losses import Power
from levattention.summary import Prune, Summary


class Sieve(ABC):
    """Judges rows (heads, m, d) against all rows seen so far.

    Attributes:
        width: columns of the Gram it keeps.
    """

    width: int

    @property
    @abstractmethod
    def route(self) -> str:
        """How the final scores are found."""

    @abstractmethod
    def update(self, rows: Tensor) -> None:
        """Remember the rows."""

    @abstractmethod
    def merge(self, other: Sieve) -> None:
        """Remember all that the other has seen."""

    @abstractmethod
    def survivors(self, rows: Tensor, eps: float) -> Bool[Tensor, "heads m"]:
        """Rows that may still reach ε in the end."""

    @abstractmethod
    def scores(self, rows: Tensor, eps: float) -> Float64[Tensor, "heads m"]:
        """Final scores of the rows, as the offline routine gives them."""

    @abstractmethod
    def total(self, n: int) -> float:
        """What the final scores sum to at most."""

    @abstractmethod
    def rank(self) -> Tensor:
        """Numerical rank of each head."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All that must be saved."""

    @abstractmethod
    def restore(self, state: dict[str, Tensor]) -> None:
        """Take up a saved state."""

    def spares(self, rows: Tensor, eps: float) -> Bool[Tensor, "heads m"]:
        """Rows that a look at their length alone rules out; none where there is no such test."""
        return torch.zeros(rows.shape[:-1], dtype=torch.bool, device=rows.device)

    def dismisses(self, rows: Tensor, eps: float) -> Bool[Tensor, "heads m"]:
        """Rows that a score in fp32 rules out, whatever it was rounded by; none where there is no such test."""
        return torch.zeros(rows.shape[:-1], dtype=torch.bool, device=rows.device)


class Squares(Sieve):
    """f(x) = x²: leverage against the Gram, or against R where the Gram is not enough."""

    def __init__(self, d: int, heads: int, device: torch.device) -> None:
        self.width = d
        self.summary = Summary(d, heads, device)
        self._prune: Prune | None = None

    @property
    def route(self) -> str:
        """Whether the Gram was enough."""
        return "gram" if self.summary.upper is None else "qr"

    def update(self, rows: Tensor) -> None:
        """Add the rows to the summary."""
        self.summary.update(rows)
        self._prune = None

    def merge(self, other: Sieve) -> None:
        """Add the other's summary."""
        if not isinstance(other, Squares):
            raise ValueError(f"merge: expected the state of a stream with the same loss, got {type(other).__name__}")
        self.summary.merge(other.summary)
        self._prune = None

    def spares(self, rows: Tensor, eps: float) -> Tensor:
        """Rows with ‖k‖²/λ_min under ε."""
        return self._bound().spares(rows, eps)

    def dismisses(self, rows: Tensor, eps: float) -> Tensor:
        """Rows whose score in fp32 stays under ε by more than its rounding."""
        return self._bound().dismisses(rows, eps)

    def survivors(self, rows: Tensor, eps: float) -> Tensor:
        """Rows whose bound still reaches ε."""
        bound = self._bound()
        return bound.keeps(bound.bound(rows), eps)

    def scores(self, rows: Tensor, eps: float) -> Tensor:
        """Leverage scores against everything seen."""
        return self.summary.factor().leverage(rows)

    def total(self, n: int) -> float:
        """The rank, at most d."""
        return Power(2).total_sensitivity(self.width, n)

    def rank(self) -> Tensor:
        """Numerical rank of each head."""
        return self.summary.factor().rank

    def state(self) -> dict[str, Tensor]:
        """The Gram, R, and what dtype the rows came in."""
        return self.summary.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take up a saved summary."""
        self.summary.restore(state)
        self._prune = None

    def _bound(self) -> Prune:
        if self._prune is None:
            self._prune = self.summary.prune()
        return self._prune
