"""The queries of a head in groups of queries that are alike, so that each group can have slots of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from levattention._shapes import Bool, Float, Int64
from levattention.clusters import squares
from levattention.slots import gather_rows


def bisect(
    points: Float[Tensor, "*batch m d"], form: Float[Tensor, "*batch d d"], real: Bool[Tensor, "*batch m"], groups: int
) -> Int64[Tensor, "*batch g s"]:
    """The places of the points in each of `groups` groups of equal size; from m on these are of no point.

    A part is halved at the median of the projections xᵢᵀA(x − x̄) onto its point x farthest from the mean x̄, until
    there are `groups` parts, a power of two. Points that are not real fill up the groups and change none.

    Args:
        points: xᵢ.
        form: A, symmetric and positive semidefinite: points are (xᵢ − xⱼ)ᵀA(xᵢ − xⱼ) apart.
        real: which points are real.
        groups: how many.
    """
    extra = -points.shape[-2] % groups
    points, real = pad(points, (0, 0, 0, extra)), pad(real, (0, extra))
    order = torch.arange(points.shape[-2], device=points.device).expand(*real.shape[:-1], 1, -1)
    own = squares(points, form)
    while order.shape[-2] < groups:
        order = _halved(order, points, own, form, real)
    return order


def _halved(order: Tensor, points: Tensor, own: Tensor, form: Tensor, real: Tensor) -> Tensor:
    """Every part of an order in two, the real points shared equally."""
    parts, size = order.shape[-2:]
    flat = order.flatten(-2)
    x = gather_rows(points, flat).unflatten(-2, (parts, size))
    here = real.gather(-1, flat).unflatten(-1, (parts, size))
    own = own.gather(-1, flat).unflatten(-1, (parts, size))
    count = here.sum(-1, keepdim=True)
    mean = (here.unsqueeze(-2).to(x.dtype) @ x / count.clamp(min=1).unsqueeze(-1)) @ form.unsqueeze(-3)
    apart = own - 2 * (x @ mean.mT).squeeze(-1)  # and the same for all
    far = torch.where(here, apart, -torch.inf).argmax(-1, keepdim=True)
    along = (x @ (gather_rows(x, far) @ form.unsqueeze(-3) - mean).mT).squeeze(-1)
    ranked = order.gather(-1, torch.where(here, along, torch.inf).argsort(dim=-1, stable=True))
    # First half of the real points, what fills the part up, second half, what fills that up.
    half, rank = (count + 1) // 2, torch.arange(size, device=order.device)
    filler = torch.where(rank + half - count < size // 2, rank + half - count, rank)
    place = torch.where(rank < half, rank, torch.where(rank < count, rank - half + size // 2, filler))
    return torch.empty_like(ranked).scatter(-1, place, ranked).unflatten(-1, (2, size // 2)).flatten(-3, -2)
