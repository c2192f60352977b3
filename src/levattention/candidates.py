"""Rows that a stream has kept so far, each with its position and whatever came with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from levattention._shapes import Bool, Int64, Num


@dataclass(frozen=True)
class Candidates:
    """Kept rows of each head, padded to the longest.

    Attributes:
        rows: (heads, c, d), in the dtype they came in.
        positions: where in the stream each stood; rising along c.
        valid: which slots hold a row.
        payload: what came with the rows, (heads, c, ...), or None.
    """

    rows: Num[Tensor, "heads c d"]
    positions: Int64[Tensor, "heads c"]
    valid: Bool[Tensor, "heads c"]
    payload: Tensor | None = None

    @classmethod
    def of(cls, rows: Tensor, first: int, payload: Tensor | None = None) -> Candidates:
        """A block of rows (heads, m, d) whose first row stands at position `first`."""
        heads, count, _ = rows.shape
        positions = torch.arange(first, first + count, device=rows.device).expand(heads, count)
        return cls(rows, positions, torch.ones(heads, count, dtype=torch.bool, device=rows.device), payload)

    def only(self, mask: Bool[Tensor, "heads c"]) -> Candidates:
        """The valid rows that the mask allows, in the same order."""
        mask = mask & self.valid
        if mask.all():
            return self
        width = int(mask.sum(-1).max()) if mask.numel() else 0
        if mask.shape[0] == 1:
            index = mask.nonzero()[:, 1].unsqueeze(0)
        else:
            index = mask.byte().argsort(dim=-1, descending=True, stable=True)[:, :width]
        return Candidates(
            pick(self.rows, index),
            self.positions.gather(-1, index),
            mask.gather(-1, index),
            None if self.payload is None else pick(self.payload, index),
        )

    def join(self, other: Candidates) -> Candidates:
        """The rows of both, in order of position."""
        if self.rows.shape[1] == 0:
            return other
        if other.rows.shape[1] == 0:
            return self
        if (self.payload is None) != (other.payload is None):
            raise ValueError("payload: expected with every block or with none")
        both = Candidates(
            torch.cat([self.rows, other.rows], 1),
            torch.cat([self.positions, other.positions], 1),
            torch.cat([self.valid, other.valid], 1),
            None if self.payload is None or other.payload is None else torch.cat([self.payload, other.payload], 1),
        )
        if int(self.positions.max()) < int(other.positions.min()):
            return both
        order = both.positions.argsort(dim=-1, stable=True)
        payload = None if both.payload is None else pick(both.payload, order)
        return Candidates(
            pick(both.rows, order), both.positions.gather(-1, order), both.valid.gather(-1, order), payload
        )

    def at(self, positions: Int64[Tensor, "heads k"]) -> Num[Tensor, "heads k d"]:
        """The rows that stand at these positions; any row for a position that is not kept."""
        if self.rows.shape[1] == 0:
            return self.rows.new_zeros((*positions.shape, self.rows.shape[-1]))
        keyed = self.positions.masked_fill(~self.valid, torch.iinfo(torch.int64).max)
        order = keyed.argsort(dim=-1)
        slot = torch.searchsorted(keyed.gather(-1, order), positions).clamp(max=keyed.shape[-1] - 1)
        return pick(self.rows, order.gather(-1, slot))

    def shifted(self, by: int) -> Candidates:
        """The same rows, standing `by` positions later."""
        return replace(self, positions=self.positions + by)

    def to(self, device: torch.device) -> Candidates:
        """The same rows on another device."""
        payload = None if self.payload is None else self.payload.to(device)
        return Candidates(self.rows.to(device), self.positions.to(device), self.valid.to(device), payload)


def pick(values: Tensor, index: Int64[Tensor, "heads c"]) -> Tensor:
    """values[h, index[h]] for each head h; values (heads, m, ...)."""
    if len(index) == 1:
        return values[:, index[0]]
    expanded = index.reshape(*index.shape, *[1] * (values.ndim - 2)).expand(*index.shape, *values.shape[2:])
    return values.gather(1, expanded)
