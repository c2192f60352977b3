"""Which keys are local to a query: a stretch of the sequence, or a diamond of a picture's grid of patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from levattention._shapes import Bool


@dataclass(frozen=True)
class Line:
    """Keys at most `reach` positions away, on either side."""

    reach: int

    def near(self, query: Tensor, key: Tensor) -> Bool[Tensor, "m s"]:
        """|i − j| ≤ reach."""
        return (query.unsqueeze(-1) - key).abs() <= self.reach


@dataclass(frozen=True)
class Grid:
    """Patches of an h × w grid in row order, local within a Manhattan distance.

    The `prefix` tokens before the patches (a class token, registers) have no place on the grid: each is local to
    itself alone.

    Example:
        >>> grid = Grid(3, 3, radius=1)
        >>> grid.near(torch.tensor([4]), torch.arange(9)).nonzero()[:, 1].tolist()
        [1, 3, 4, 5, 7]
    """

    h: int
    w: int
    radius: int
    prefix: int = 0

    def __post_init__(self) -> None:
        if min(self.h, self.w) < 1 or min(self.radius, self.prefix) < 0:
            raise ValueError(f"Grid: expected h, w >= 1 and radius, prefix >= 0, got {self}")

    @property
    def tokens(self) -> int:
        """How many tokens the grid and its prefix hold."""
        return self.prefix + self.h * self.w

    @property
    def reach(self) -> int:
        """radius rows of w patches."""
        return self.radius * self.w

    def near(self, query: Tensor, key: Tensor) -> Bool[Tensor, "m s"]:
        """|Δy| + |Δx| ≤ radius between patches."""
        i, j = query.unsqueeze(-1) - self.prefix, key - self.prefix
        rows = (i.div(self.w, rounding_mode="floor") - j.div(self.w, rounding_mode="floor")).abs()
        distance = rows + (i.remainder(self.w) - j.remainder(self.w)).abs()
        return (i == j) | ((distance <= self.radius) & (i >= 0) & (j >= 0))


# `near` says which keys are local, and none of them is further than `reach` positions away.
Window = Line | Grid


def as_window(window: int | Grid, m: int, n: int) -> Window | None:
    """The window that an int or a Grid stands for; None for 0.

    Raises:
        ValueError: a negative int, or a grid that does not hold exactly the n keys.
    """
    if isinstance(window, Grid):
        if window.tokens != n or m != n:
            raise ValueError(
                f"window: a {window.h} x {window.w} grid with {window.prefix} prefix tokens is for {window.tokens} "
                f"queries and keys, got {m} queries and {n} keys"
            )
        return window
    if isinstance(window, bool) or not isinstance(window, int) or window < 0:
        raise ValueError(f"window: expected an integer >= 0 or a Grid, got {window!r}")
    return Line(window) if window else None


def positions(span: slice, device: torch.device) -> Tensor:
    """The positions of a slice, (stop − start,)."""
    return torch.arange(span.start, span.stop, device=device)
