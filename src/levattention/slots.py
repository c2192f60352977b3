"""Attention over a few weighted rows: the step that every part of `attend` ends in, and the sum of two such parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, embedding, one_hot, pad

from levattention._shapes import Bool, Float, Int64
from levattention.losses import Loss, Power


class Part(NamedTuple):
    """Attention over some of the keys, ready to be merged with the rest.

    Attributes:
        out: the weighted mean of the values, (*batch, m, e); zero where no key was seen.
        lse: the logarithm of the sum of the weights, (*batch, m); −inf where no key was seen.
    """

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Slots:
    """Weighted rows that stand for the keys of a head.

    Attributes:
        keys: one row a slot.
        values: likewise.
        log_weight: logarithm of how many keys the slot stands for; −inf in an empty slot.
        owner: the slot that stands for each key; c for a key that none stands for.
        order: the places of the queries in each group that has slots of its own, from m on of no query; None where
            all queries share their slots, which then have no dimension of groups.
    """

    keys: Float[Tensor, "*batch_g c d"]
    values: Float[Tensor, "*batch_g c e"]
    log_weight: Float[Tensor, "*batch_g c"]
    owner: Int64[Tensor, "*batch n"]
    order: Int64[Tensor, "*batch g s"] | None = None

    def without(self, near: Bool[Tensor, "m s"], span: slice) -> Tensor:
        """log_weight for each query, (*batch, m, c) or (*batch, g, m, c), less the keys of `span` `near` that query.

        A slot of w keys of which r are near stands for the share 1 − r/w of its weight: those r are counted elsewhere.
        """
        c = self.keys.shape[-2]
        dtype = self.log_weight.dtype
        members = torch.zeros((*self.owner.shape[:-1], c + 1), dtype=dtype, device=self.owner.device)
        members = members.scatter_add(-1, self.owner, torch.ones_like(self.owner, dtype=dtype))[..., :c].unsqueeze(-2)
        taken = near.to(dtype) @ one_hot(self.owner[..., span], c + 1)[..., :c].to(dtype)
        left = ((members - taken) / members.clamp(min=1.0)).log()
        return self.log_weight.unsqueeze(-2) + (left if self.order is None else left.unsqueeze(-3))


def gather_rows(matrix: Tensor, index: Int64[Tensor, "*batch c"]) -> Tensor:
    """Rows `index` of a (*batch, n, d) matrix, (*batch, c, d)."""
    if matrix.is_contiguous():
        # Whole rows are copied, several times as fast as entry by entry.
        first = torch.arange(math.prod(index.shape[:-1]), device=index.device) * matrix.shape[-2]
        flat = embedding(index + first.view(*index.shape[:-1], 1), matrix.flatten(0, -2))
        return flat.view(*index.shape, matrix.shape[-1])
    return matrix.gather(-2, index.unsqueeze(-1).expand(*index.shape, matrix.shape[-1]))


def regrouped(rows: Tensor, order: Int64[Tensor, "*batch g s"] | None) -> Tensor:
    """The queries' rows (*batch, m, w) in groups, (*batch, g, s, w), zeros in places without a query."""
    if order is None:
        return rows.unsqueeze(-3)
    filled = pad(rows, (0, 0, 0, order.shape[-2] * order.shape[-1] - rows.shape[-2]))
    return gather_rows(filled, order.flatten(-2)).unflatten(-2, order.shape[-2:])


def in_order(part: Part, order: Int64[Tensor, "*batch g s"], m: int) -> Part:
    """A part of grouped queries, each of the m queries in its own place again."""
    place = places(order, m)
    return Part(gather_rows(part.out.flatten(-3, -2), place), part.lse.flatten(-2).gather(-1, place))


def places(order: Int64[Tensor, "*batch g s"], m: int) -> Int64[Tensor, "*batch m"]:
    """Where each of the m queries stands among the grouped ones; its group is that by the size of a group."""
    return order.flatten(-2).argsort(-1)[..., :m]


def own_group(part: Part, group: Int64[Tensor, "*batch m"]) -> Part:
    """Of a part in which every query looked at the slots of all groups, (*batch, g, m, ·), that of its own group."""
    group = group.unsqueeze(-2)
    out = part.out.gather(-3, group.unsqueeze(-1).expand(*group.shape, part.out.shape[-1])).squeeze(-3)
    return Part(out, part.lse.gather(-2, group).squeeze(-2))


def attend_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weight: Tensor,
    *,
    scale: float,
    loss: Loss | None = None,
    dropout_p: float = 0.0,
) -> Part:
    """Σⱼ wⱼ g(qᵢ·kⱼ) vⱼ / Σⱼ wⱼ g(qᵢ·kⱼ) with g = exp(scale·) or f(scale·), and the logarithm of the denominator.

    Args:
        queries: (*batch, m, d).
        keys: (*batch, c, d).
        values: (*batch, c, e).
        log_weight: log w, broadcast to (*batch, m, c); −inf takes a key out.
        scale: factor of the inner products.
        loss: f; None for softmax.
        dropout_p: probability of dropping a weight, after normalisation as in SDPA.
    """
    inner = (queries * scale) @ keys.mT
    if loss is None:
        logits = inner + log_weight
        peak = _finite(logits.detach().amax(-1, keepdim=True))
        weights, offset = (logits - peak).exp(), peak
    elif isinstance(loss, Power):
        # |x|^p is homogeneous, so a row can be scaled to a peak of 1 and p large cannot overflow.
        peak = inner.detach().abs().amax(-1, keepdim=True)
        peak = torch.where(peak > 0, peak, 1.0)
        weights, offset = loss(inner / peak) * log_weight.exp(), loss.p * peak.log()
    else:
        weights, offset = loss(inner) * log_weight.exp(), torch.zeros_like(inner[..., :1])
    total = weights.sum(-1, keepdim=True)
    seen = total > 0
    safe = torch.where(seen, total, 1.0)
    lse = torch.where(seen, offset + safe.log(), -torch.inf).squeeze(-1)
    share = weights / safe
    return Part((dropout(share, dropout_p) if dropout_p > 0 else share) @ values, lse)


def merge(parts: list[Part]) -> Part:
    """Attention over the union of disjoint parts: each counts in proportion to the sum of its weights."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part.lse for part in parts])
    peak = _finite(lse.detach().amax(0))
    weights = (lse - peak).exp()
    total = weights.sum(0)
    seen = total > 0
    safe = torch.where(seen, total, 1.0)
    out = (torch.stack([part.out for part in parts]) * (weights / safe).unsqueeze(-1)).sum(0)
    return Part(out, torch.where(seen, peak + safe.log(), -torch.inf))


def _finite(peak: Tensor) -> Tensor:
    """The peak, and 0 for a row without any key, whose peak is −inf."""
    return torch.where(peak == -torch.inf, 0.0, peak)
